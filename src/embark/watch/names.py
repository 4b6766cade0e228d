"""What is measured: each name once, with its unit, what it means and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity, named as it stands in events and in TensorBoard."""

    name: str
    unit: str
    """Empty for a plain number."""
    meaning: str
    better: Literal["up", "down"] | None
    """`None` where neither way is."""
    label: str
    """What people read."""


METRICS: tuple[Metric, ...] = (
    Metric("loss", "nats", "what training makes small, a mean since the last point", "down", "loss"),
    Metric("auc", "", "how often a positive outranks a negative", "up", "AUC"),
    Metric("normalized_entropy", "", "log loss, over that of guessing the mean rate", "down", "normalized entropy"),
    Metric("log_loss", "nats", "surprise at the labels, a mean per sample", "down", "log loss"),
    Metric("calibration", "", "predicted positives over real ones; 1 is right", None, "calibration"),
    Metric("best_auc", "", "the AUC of the true probabilities on these samples", "up", "best possible AUC"),
    Metric("best_log_loss", "nats", "the log loss of the true probabilities", "down", "best possible log loss"),
    Metric("samples_per_s", "samples/s", "samples trained on per second, all ranks together", "up", "rate"),
    Metric("step_s", "s", "one training step, a mean since the last point", "down", "step time"),
    Metric("learning_rate", "", "how far one step goes", None, "learning rate"),
    Metric("eval_s", "s", "one pass over the held-out samples", "down", "evaluation time"),
    Metric("save_s", "s", "writing one checkpoint", "down", "save time"),
    Metric("train_s", "s", "training proper: no evaluation, no saving", "down", "training time"),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def find(name: str) -> Metric | None:
    """The metric of this name; `None` for a value that is not one, such as `step` or `path`."""
    return _BY_NAME.get(name)


def metric(name: str) -> Metric:
    """The metric of this name, which there must be."""
    return _BY_NAME[name]

"""Which held-out metrics an evaluation measures, by the kind of model, and which of them a spec may go by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from embark.errors import Mistake
from embark.spec.tasks import main_task

if TYPE_CHECKING:
    from embark.spec.model import ModelSpec
    from embark.spec.run import RunSpec

HeldOutMetric = Literal["auc", "log_loss", "normalized_entropy", "recall_at_k", "ndcg_at_k", "hit_at_k"]
RANKING_METRICS: tuple[HeldOutMetric, ...] = ("recall_at_k", "ndcg_at_k", "hit_at_k")


def measured_metrics(model: ModelSpec) -> tuple[HeldOutMetric, ...]:
    """Those of an evaluation of this model, the one to go by first."""
    if model.kind == "two_tower":
        return RANKING_METRICS
    if model.is_next_item:
        return ("auc", "log_loss", *RANKING_METRICS)
    if model.tasks and main_task(model.tasks) < 0:  # no task is binary
        return ("log_loss",)
    return ("auc", "log_loss", "normalized_entropy")


def metric_mistake(model: ModelSpec, field: str, metric: HeldOutMetric) -> Mistake | None:
    """Of a field that names a metric, where the model has none such."""
    measured = measured_metrics(model)
    if metric in measured:
        return None
    of_what = "tasks of which none is binary" if measured == ("log_loss",) else f'model.kind = "{model.kind}"'
    return Mistake("", field, metric, f"is not measured of {of_what}", f"use {', '.join(measured)}")


def metric_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Of the fields that name one; one that is not used may have its default."""
    train, store = spec.train, spec.store
    for field, metric, is_used in (("train.early_stopping_metric", train.early_stopping_metric,
                                    train.early_stopping_patience > 0),
                                   ("store.best_by", store.best_by, store.keep_best > 0)):
        mistake = metric_mistake(spec.model, field, metric)
        if mistake is not None and (is_used or metric in RANKING_METRICS):
            yield mistake

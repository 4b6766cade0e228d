"""What a run's own figures say about the model: the same findings at the end of a run, in `embark diagnose`, on the
page and in the report. Their texts are rows of `quality.toml`."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from embark.formatting import format_count, format_float, to_finite, to_one_line
from embark.spec import file_of
from embark.spec.user_code import is_custom
from embark.values import JsonMap, frozen
from .drift import LOGITS
from .events import Event
from .traffic import TRAFFIC_KINDS, TrafficRecord, findings

RULES = Path(__file__).with_name("quality.toml")
LEAK_AUC = 0.995  # Clicks are never predicted that well.
CHANCE = 0.02  # An AUC this near to 0.5 is chance, once there are enough samples.
MIN_SAMPLES = 1000
MIN_STEPS = 20
RISE = 1.01  # Ratio of the held-out loss to its lowest.
GAP_AUC, GAP_LOSS = 0.05, 1.15  # Between training and held-out figures of one moment.
OFF = 0.1
STILL = 0.001  # A rise of the AUC by so much in the last part of a run.
MAX_POINTS = 4096


@frozen
class Finding:
    """One thing to know about a model, and what to try next."""

    code: str
    name: str
    cause: str
    fix: str
    command: str


def start_command(command: str, *, has_stream: bool) -> str:
    """Replace `embark train` in a command by `embark follow` for a run on a stream."""
    return command.replace("embark train", "embark follow") if has_stream else command


@cache
def quality_rules() -> Mapping[str, Mapping[str, str]]:
    """Return the rules by name."""
    return {row["name"]: row for row in tomllib.loads(RULES.read_text(encoding="utf-8"))["rule"]}


class Quality:
    """Collects a run's events and finds what they say about the model."""

    def __init__(self) -> None:
        self._train: dict[int, JsonMap] = {}
        self._evals: dict[int, JsonMap] = {}
        self._notes: dict[str, str] = {}  # Sentences by the name of the rule.
        self._has_stopped_early = False
        self._best_step = 0.0  # Of early stopping; 0 without.
        self._has_stream = False
        self._model_file = ""  # The file of a custom model.
        self.traffic = TrafficRecord()  # The events of a server.

    def add(self, event: Event) -> None:
        values = event.values
        if event.kind in TRAFFIC_KINDS:
            with suppress(ValueError, TypeError, AttributeError, LookupError, OverflowError):  # a damaged one
                self.traffic.add(event)
            return
        step = to_finite(values.get("step"))
        if event.kind == "start":
            self._has_stream = bool(values.get("stream"))
            kind = str(values.get("model_kind", ""))
            self._model_file = file_of(kind) if is_custom(kind) else ""
        if event.kind == "start" and not to_finite(values.get("first_step")):
            self._train, self._evals, self._notes = {}, {}, {}
        elif event.kind == "step" and step is not None:
            if len(self._train) >= MAX_POINTS:  # half of them say as much
                self._train = dict(list(self._train.items())[::2])
            self._train[int(step)] = values
        elif event.kind == "eval" and step is not None:
            self._evals[int(step)] = values
        elif event.kind == "end":
            state = values.get("early_stopping")
            if isinstance(state, Mapping):
                self._has_stopped_early = bool(state.get("has_stopped"))
                self._best_step = to_finite(state.get("best_step")) or 0.0
        elif event.kind == "note":
            text = to_one_line(values.get("text", ""))
            for name, rule in quality_rules().items():
                if "note" in rule and re.search(rule["note"], text):
                    self._notes.setdefault(name, text)

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings in the order of their codes."""
        found = dict(self._found())
        return tuple(Finding(rule["code"], name, rule["cause"].format_map(found[name]), rule["fix"],
                             start_command(rule["command"], has_stream=self._has_stream))
                     for name, rule in quality_rules().items() if name in found)

    def _found(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        yield from findings(self.traffic)
        yield from ((name, {"text": text}) for name, text in self._notes.items())
        last_step, held = max(self._evals.items(), default=(0, {}))
        auc, num = to_finite(held.get("auc")), to_finite(held.get("num_samples")) or 0.0
        if not self._has_stopped_early and (what := self._overfitting(last_step, held)):
            yield "overfitting", {"what": what}
        elif what := self._still_improving(last_step, held):
            yield "still-improving", {"what": what}
        ne = to_finite(held.get("normalized_entropy"))
        if ne is not None and ne > 1 and num >= MIN_SAMPLES / 10:
            yield "worse-than-the-mean", {"ne": format_float(ne)}
        is_real = "best_auc" not in held  # Synthetic samples have one, and no column that leaks.
        is_high = auc is not None and auc > LEAK_AUC and num >= MIN_SAMPLES / 10
        if is_real and is_high and "label-leaks" not in self._notes:  # which names the column
            yield "label-leaks", {"text": f"the held-out AUC is {format_float(auc)}; a column may contain the label, "
                                          "or be known only after it"}
        if what := self._unchanged(last_step, held):
            yield "rate-does-nothing", {"what": what}
        elif auc is not None and num >= MIN_SAMPLES and last_step >= MIN_STEPS and abs(auc - 0.5) <= CHANCE:
            yield "learned-nothing", {"auc": format_float(auc), "steps": format_count(last_step)}
        if self._model_file and num >= MIN_SAMPLES / 10 and _are_probabilities(held.get("score_counts")):
            yield "logits-like-probabilities", {"file": self._model_file}
            return  # which explains how it is calibrated
        calibration = to_finite(held.get("calibration"))
        if calibration is not None and abs(calibration - 1) > max(OFF, 3 / math.sqrt(max(1.0, _num_clicks(held)))):
            yield "miscalibrated", {"ratio": f"{calibration:.2f}"}

    def _overfitting(self, last: int, held: JsonMap) -> str:
        """Say how the held-out loss rises while the training loss falls or, with one evaluation, lies far above it."""
        known = ((step, to_finite(one.get("log_loss"))) for step, one in self._evals.items())
        losses = {step: loss for step, loss in known if loss is not None}
        train_last = self._train_at(last)
        loss, train_loss = losses.get(last), to_finite(train_last.get("loss"))
        if loss is None or train_loss is None or last < MIN_STEPS:
            return ""
        lowest = min(losses, key=lambda step: losses[step])
        train_then = to_finite(self._train_at(lowest).get("loss"))
        if loss > RISE * losses[lowest] and train_then is not None and train_loss < train_then:
            return (f"from step {format_count(lowest)} to {format_count(last)} the held-out loss rose from "
                    f"{format_float(losses[lowest])} to {format_float(loss)}, while the training loss fell from "
                    f"{format_float(train_then)} to {format_float(train_loss)}")
        auc, train_auc = to_finite(held.get("auc")), to_finite(train_last.get("auc"))
        if auc is not None and train_auc is not None and train_auc - auc > GAP_AUC and loss > GAP_LOSS * train_loss:
            return (f"at step {format_count(last)} the training AUC is {format_float(train_auc)} and the held-out AUC "
                    f"{format_float(auc)}")
        return ""

    def _still_improving(self, last: int, held: JsonMap) -> str:
        """Say how much the held-out AUC rose in the last part of a run that its number of steps ended."""
        aucs = {step: auc for step, one in self._evals.items() if (auc := to_finite(one.get("auc"))) is not None}
        before = max((step for step in aucs if step < last), default=0)
        num = to_finite(held.get("num_samples")) or 0.0
        if self._has_stopped_early or last not in aucs or not before or num < MIN_SAMPLES:
            return ""
        rise = aucs[last] - max(auc for step, auc in aucs.items() if step < last)
        if rise < STILL or (self._best_step and self._best_step < last):
            return ""
        return (f"from step {format_count(before)} to {format_count(last)}, its last, the held-out AUC rose from "
                f"{format_float(aucs[before])} to {format_float(aucs[last])}")

    def _unchanged(self, last: int, held: JsonMap) -> str:
        """Say that the same samples are scored the same after more training."""
        first, before = min(self._evals.items(), default=(0, {}))
        a, b = to_finite(before.get("log_loss")), to_finite(held.get("log_loss"))
        if last - first >= MIN_STEPS and a is not None and b is not None and abs(a - b) <= 1e-6 * abs(a):
            return (f"the held-out log loss is {format_float(b)} at steps {format_count(first)} and "
                    f"{format_count(last)} alike")
        return ""

    def _train_at(self, step: int) -> JsonMap:
        """Return the training window that ends nearest to a step."""
        at = min(self._train, key=lambda one: abs(one - step), default=None)
        return {} if at is None else self._train[at]


def _are_probabilities(counts: Any) -> bool:
    """Return whether all logits counted, by bins of `events.drift`, are from 0 to 1."""
    if not isinstance(counts, list) or len(counts) != len(LOGITS) + 1:
        return False
    num = [to_finite(one) or 0.0 for one in counts]
    first, behind = (int(np.searchsorted(LOGITS, edge, side="right")) for edge in (0.0, 1.0))
    return 0 < sum(num) == sum(num[first:behind])


def _num_clicks(held: JsonMap) -> float:
    """Return the number of clicks, or of the others if these are fewer: normalized entropy is log loss over the entropy
    of their share."""
    loss, ne = to_finite(held.get("log_loss")), to_finite(held.get("normalized_entropy"))
    if loss is None or not ne:
        return 0.0
    shares = np.linspace(1e-6, 0.5, 1 << 16)
    entropies = -(shares * np.log(shares) + (1 - shares) * np.log(1 - shares))
    return float(np.interp(loss / ne, entropies, shares)) * (to_finite(held.get("num_samples")) or 0.0)

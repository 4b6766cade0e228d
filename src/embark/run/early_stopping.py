"""When held-out metrics no longer improve: which evaluation was the best, and whether the run has seen enough.

The state is part of every checkpoint, so that a resumed run decides as an undisturbed one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

from embark.data import SampleSource
from embark.errors import UserError
from embark.events.metrics import metric
from embark.formatting import format_float, pluralize
from embark.spec import TrainSpec
from embark.store import Checkpoint, RunDir
from embark.store.checkpoint_store import EARLY_STOPPING
from embark.values import JsonDict, JsonMap, frozen
from .trainer import Ranks


@frozen
class BestSoFar:
    """The results of the evaluations up to `step`, as commit records and the end event contain them."""

    metric: str
    step: int = 0  # The last evaluation that was counted.
    best_step: int = 0  # 0 if none was finite yet.
    best: float | None = None
    num_without_improvement: int = 0  # Evaluations since the best.


Prune = Callable[[JsonMap], str]
"""Sees every evaluation; returns a reason to stop the run there, or an empty string."""


class EarlyStopping:
    """`train.early_stopping_*`: without `early_stopping_patience` it never stops a run and keeps no state. `prune` may
    stop a run that is one of many."""

    def __init__(
        self, train: TrainSpec, source: SampleSource, world: Ranks, checkpoint: Checkpoint | None,
        prune: Prune | None = None
    ) -> None:
        self.is_on = train.early_stopping_patience > 0
        self._train, self._world, self._prune, self._pruned = train, world, prune, ""
        self._so_far = BestSoFar(train.early_stopping_metric)
        saved = checkpoint.values.get(EARLY_STOPPING) if checkpoint else None
        if isinstance(saved, Mapping) and saved.get("metric") == train.early_stopping_metric:
            self._so_far = BestSoFar(**saved)
        if self.is_on and not source.num_eval_samples:
            raise UserError("train.early_stopping_patience needs held-out samples, and the data has none",
                            "hold some out (data.eval_fraction, data.num_eval_samples), or leave it out")

    @property
    def is_over(self) -> bool:
        """Whether the run stops here."""
        is_enough = self.is_on and self._so_far.num_without_improvement >= self._train.early_stopping_patience
        return is_enough or bool(self._pruned)

    def is_best(self, step: int) -> bool:
        """Tell whether the evaluation after `step` is the best so far: its checkpoint is to be kept."""
        return self.is_on and 0 < step == self._so_far.best_step

    def has_missed(self, step: int) -> bool:
        """Tell whether the run was stopped after `step`, before the evaluation due there was complete; if only `prune`
        keeps count, it sees that one again."""
        is_due = self._train.eval_every > 0 and step > 0 and step % self._train.eval_every == 0
        return is_due and (step > self._so_far.step if self.is_on else self._prune is not None)

    def add(self, evaluated: JsonMap) -> None:
        """Count an evaluation, once; the first rank's value decides on all."""
        self._pruned = self._prune(evaluated) if self._prune else ""
        so_far, step = self._so_far, evaluated["step"]
        if not self.is_on or step <= so_far.step:
            return
        value = self._world.gathered(evaluated[so_far.metric])[0]
        sign = 1 if metric(so_far.metric).better == "up" else -1
        is_better = math.isfinite(value) and (
            so_far.best is None or sign * (value - so_far.best) > self._train.early_stopping_min_delta)
        self._so_far = BestSoFar(so_far.metric, step, step, value) if is_better else BestSoFar(
            so_far.metric, step, so_far.best_step, so_far.best, so_far.num_without_improvement + 1)

    def values(self) -> JsonDict:
        """Return the state for a commit record, and for the end event of an interrupted run."""
        return {EARLY_STOPPING: asdict(self._so_far)} if self.is_on else {}

    def end_values(self, run_dir: RunDir) -> JsonDict:
        """Return the state of a run that is done, whether early stopping ended it, and where the best checkpoint is."""
        if not self.is_on:
            return {}
        step = self._so_far.best_step
        is_saved = any(one.step == step for one in run_dir.checkpoints.committed())
        return {EARLY_STOPPING: {**asdict(self._so_far), "has_stopped": self.is_over and not self._pruned,
                                 "path": run_dir.checkpoints.where(step) if is_saved else ""}}

    def reason(self) -> str:
        """Say why the run stops."""
        if self._pruned:
            return self._pruned
        so_far, label = self._so_far, metric(self._so_far.metric).label
        best = (f"its best is {format_float(so_far.best)}, at step {so_far.best_step:,}" if so_far.best is not None
                else "it was never a finite number")
        least = self._train.early_stopping_min_delta
        by = f" by more than {least:g}" if least else ""
        return (f"early stopping at step {so_far.step:,}: held-out {label} has not improved{by} for "
                f"{pluralize(so_far.num_without_improvement, 'evaluation')}; {best}")

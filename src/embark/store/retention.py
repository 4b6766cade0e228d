"""Which checkpoints to keep and which may go. Pure: nothing is touched here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from embark.spec import StoreSpec
from embark.store.checkpoint_store import Checkpoint

Reason = Literal["newest", "every", "best"]


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """A committed checkpoint, as far as keeping it goes."""

    step: int
    metric: float | None = None
    """Of the evaluation at its step, where there was one."""


def reasons_by_spec(store: StoreSpec, checkpoints: Sequence[Checkpoint]) -> dict[int, tuple[Reason, ...]]:
    """Why `[store]` keeps each; one without a reason goes."""
    return reasons_to_keep(
        [RetainedCheckpoint(c.step, metric_of(store, c)) for c in checkpoints], keep_last=store.keep_checkpoints,
        keep_every=store.keep_every, keep_best=store.keep_best, better="up" if store.best_by == "auc" else "down",
    )


def metric_of(store: StoreSpec, checkpoint: Checkpoint) -> float | None:
    """What `best_by` was at the last evaluation before the save."""
    evaluated = checkpoint.values.get("eval")
    value = evaluated.get(store.best_by) if isinstance(evaluated, dict) else None
    return float(value) if isinstance(value, int | float) else None


def reasons_to_keep(
    checkpoints: Sequence[RetainedCheckpoint], *, keep_last: int, keep_every: int = 0, keep_best: int = 0,
    better: Literal["up", "down"] = "up",
) -> dict[int, tuple[Reason, ...]]:
    """Which rules keep each step.

    The newest stays whatever the rules say: a run goes on from it. `keep_last` counts it. `keep_every` keeps the
    multiples of so many steps, and `keep_best` so many with the best metric; of equal ones the newer, and one that
    is not a finite number is never among the best. 0 switches a rule off.
    """
    steps = sorted({c.step for c in checkpoints}, reverse=True)
    kept: dict[Reason, set[int]] = {"newest": set(steps[:max(keep_last, 1)])}
    if keep_every > 0:
        kept["every"] = {step for step in steps if step % keep_every == 0}
    if keep_best > 0:
        sign = 1 if better == "up" else -1
        measured = [(sign * c.metric, c.step) for c in checkpoints if c.metric is not None and math.isfinite(c.metric)]
        kept["best"] = {step for _, step in sorted(measured, reverse=True)[:keep_best]}
    return {step: tuple(reason for reason, those in kept.items() if step in those) for step in steps}

"""Which checkpoints to keep and which may go. Pure: nothing is touched here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Kept:
    """A committed checkpoint, as far as keeping it goes."""

    step: int
    metric: float | None = None
    """Of the evaluation at its step, where there was one."""


def to_delete(
    checkpoints: Sequence[Kept], *, keep_last: int, keep_every: int = 0, keep_best: int = 0,
    better: Literal["up", "down"] = "up",
) -> set[int]:
    """The steps that no rule keeps.

    The newest stays whatever the rules say: a run goes on from it. `keep_last` counts it. `keep_every` keeps the
    multiples of so many steps, and `keep_best` so many with the best metric; of equal ones the newer, and one that
    is not a finite number is never among the best. 0 switches a rule off.
    """
    steps = sorted({c.step for c in checkpoints}, reverse=True)
    kept = set(steps[:max(keep_last, 1)])
    if keep_every > 0:
        kept |= {step for step in steps if step % keep_every == 0}
    if keep_best > 0:
        sign = 1 if better == "up" else -1
        measured = [(sign * c.metric, c.step) for c in checkpoints if c.metric is not None and math.isfinite(c.metric)]
        kept |= {step for _, step in sorted(measured, reverse=True)[:keep_best]}
    return set(steps) - kept

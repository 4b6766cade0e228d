"""One measured quantity over a run, with what was redone set apart."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_POINTS = 1 << 18
"""Of a line that is longer, every second point goes, but no peak and no hole."""


@dataclass(slots=True)
class Points:
    """A step, a time and a value for each."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    times_s: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def chosen(self, places: Sequence[int]) -> Points:
        return Points(*(array("d", [held[i] for i in places]) for held in (self.steps, self.times_s, self.values)))


@dataclass(slots=True)
class Line:
    """The points that count, and those of steps that a stopped run had done and that were done again."""

    kept: Points = field(default_factory=Points)
    lost: list[Points] = field(default_factory=list)

    def add(self, step: float, time_s: float, value: float) -> None:
        """A value that is no number stays as a gap."""
        kept = self.kept
        kept.steps.append(step)
        kept.times_s.append(time_s)
        kept.values.append(value)
        if len(kept.steps) >= MAX_POINTS:
            self.kept = _halved(kept)

    def forget_after(self, step: float) -> None:
        """The run goes on from `step`: what it had told of later ones is told again."""
        kept = self.kept
        if not len(kept) or max(kept.steps) <= step:
            return
        gone = [i for i, at in enumerate(kept.steps) if at > step]
        stays = [i for i, at in enumerate(kept.steps) if at <= step]
        # Joined to where the run went on from, so that the picture shows a branch.
        self.lost.append(kept.chosen([*stays[-1:], *gone]))
        self.kept = kept.chosen(stays)

    @property
    def last(self) -> float | None:
        return self.kept.values[-1] if len(self.kept) else None

    @property
    def median(self) -> float | None:
        """Of the values that are numbers; the first holds warming up, and counts only where it is all there is."""
        values = [value for value in self.kept.values[1:] or self.kept.values if math.isfinite(value)]
        return statistics.median(values) if values else None

    def best(self, better: str) -> tuple[float, float] | None:
        """The step and the value of the best point."""
        known = [(value, step) for value, step in zip(self.kept.values, self.kept.steps, strict=True)
                 if math.isfinite(value)]
        if not known:
            return None
        value, step = max(known) if better == "up" else min(known)
        return step, value


def _halved(points: Points) -> Points:
    """The least and the greatest of every four, and the last."""
    kept: list[int] = []
    for start in range(0, len(points), 4):
        block = range(start, min(start + 4, len(points)))
        known = [i for i in block if math.isfinite(points.values[i])]
        gaps = [i for i in block if not math.isfinite(points.values[i])][:1]
        ordered = sorted(known, key=points.values.__getitem__)
        kept += sorted({*ordered[:1], *ordered[-1:], *gaps})
    if kept[-1] != len(points) - 1:
        kept.append(len(points) - 1)
    return points.chosen(kept)

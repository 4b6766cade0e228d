"""Curves at the width they are drawn: fewer points with every spike kept, axes with round ticks, and curves in
characters."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embark.values import frozen

Floats = NDArray[np.float64]
Point = tuple[float, float]  # A step and a value.

MARK = "●"
MAX_POINTS = 2048

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BARS = " ▁▂▃▄▅▆▇█"  # Bars of a curve on one line, the first is empty.


def thin(xs: ArrayLike | Sequence[float], ys: ArrayLike | Sequence[float], num_points: int) -> tuple[Floats, Floats]:
    """Return at most `num_points` of the points, in order of `xs`: the ends, and the least and greatest of each bucket.

    `xs` must not fall. A value that is no number makes a gap where it alone fills its bucket, and is passed over else.
    """
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if len(x) <= max(num_points, 2):
        return x, y
    starts = _buckets(x, max(1, (num_points - 2) // 2))
    low, high = (np.where(np.isfinite(y), y, gap) for gap in (np.inf, -np.inf))
    kept = {0, len(x) - 1}
    for start, stop in pairwise([*starts.tolist(), len(x)]) if num_points > 3 else ():
        kept |= {start + int(low[start:stop].argmin()), start + int(high[start:stop].argmax())}
    at = sorted(kept)
    return x[at], y[at]


def _buckets(x: Floats, num: int) -> NDArray[np.intp]:
    """Return where each of `num` equal parts of the axis begins; empty ones are left out."""
    return np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], num + 1)[:-1], side="left"))


def means(xs: ArrayLike | Sequence[float], ys: ArrayLike | Sequence[float], num_points: int) -> tuple[Floats, Floats]:
    """Return at most `num_points` means of neighbours: a smoothed curve, in which a spike weighs as one point."""
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= max(num_points, 1):
        return x, y
    starts = _buckets(x, max(num_points, 1))
    num = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / num, np.add.reduceat(y, starts) / num


@frozen
class Axis:
    """The values from `low` to `high`, drawn from the pixels `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def position(self, value: float) -> float:
        share = 0.5 if self.high <= self.low else (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return round numbers, about `most` of them at most."""
        if self.high <= self.low:
            return [self.low]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


class Series:
    """The points of a run of any length: where they become too many, every second one is kept from then on."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._num = 0
        self._each = 1

    def add(self, step: float, value: float) -> None:
        if self._num % self._each == 0:
            self.points.append((step, value))
        self._num += 1
        if len(self.points) >= MAX_POINTS:
            del self.points[1::2]
            self._each *= 2


@frozen
class Chart:
    """A drawn curve, and the numbers at the ends of its axes."""

    rows: tuple[str, ...]
    low: float
    high: float
    first: float
    last: float


def draw(line: Sequence[Point], marks: Sequence[Point], *, width: int, height: int) -> Chart | None:
    """Draw `line` in braille, joined up, with `marks` laid over it, the last on top; `None` where there are not two
    points to join."""
    line = [point for point in line if np.isfinite(point).all()]
    marks = [point for point in marks if np.isfinite(point).all()]
    steps = [step for step, _ in (*line, *marks)]
    if len(set(steps)) < 2:
        return None
    first, last = min(steps), max(steps)
    xs, heights = _joined(line, first, last, 2 * width)
    values = [*heights.tolist(), *(value for _, value in marks)]
    low, high = min(values), max(values)

    cells = np.zeros((height, width), np.int64)
    levels = _levels(heights, low, high, 4 * height).tolist()
    for x, before, y in zip(xs.tolist(), [*levels[:1], *levels], levels, strict=False):
        start = y if abs(y - before) < 2 else before + (1 if y > before else -1)
        for dot in range(min(start, y), max(start, y) + 1):
            row, part = divmod(4 * height - 1 - dot, 4)
            cells[row, x // 2] |= _BRAILLE[part][x % 2]

    letters = [[chr(0x2800 + cell) if cell else " " for cell in row] for row in cells.tolist()]
    for step, value in marks:
        row = height - 1 - int(_levels(value, low, high, 4 * height)) // 4
        letters[row][int(_levels(step, first, last, 2 * width)) // 2] = MARK
    return Chart(tuple("".join(row) for row in letters), low, high, first, last)


def _joined(line: Sequence[Point], first: float, last: float, num: int) -> tuple[NDArray[np.int64], Floats]:
    """Return the columns that a line crosses, and its height in each: the mean of the points there, or on a straight
    line where there are none."""
    if not line:
        return np.empty(0, np.int64), np.empty(0)
    steps, values = np.array(line).T
    held, index = np.unique(_levels(steps, first, last, num), return_inverse=True)
    xs = np.arange(held[0], held[-1] + 1)
    return xs, np.interp(xs, held, np.bincount(index, values) / np.bincount(index))


def _levels(values: ArrayLike, low: float, high: float, num: int) -> NDArray[np.int64]:
    """Map values between `low` and `high` to indices below `num`; to the middle where these are the same."""
    share = (np.asarray(values) - low) / (high - low) if high > low else np.full(np.shape(values), 0.5)
    return np.rint(share * (num - 1)).astype(np.int64)


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """Draw a small curve on one line; `low` and `high` are the same for all that are compared."""
    _, shown = means(np.arange(len(values)), values, width)
    levels = _levels(np.clip(shown, low, high), low, high, len(BARS) - 1)
    return "".join(BARS[1 + level] for level in levels.tolist())

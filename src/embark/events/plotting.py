"""Curves at the width they are drawn: fewer points with every spike kept, axes with round ticks, and curves in
characters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_TIMES_S = tuple(n * unit for unit, ns in (
    (0.01, (1, 2, 5, 10, 20, 50)), (1, (1, 2, 5, 10, 15, 30)), (60, (1, 2, 5, 10, 15, 30)), (3600, (1, 2, 3, 6, 12)),
    (86_400, (1, 2, 5, 7, 14, 30, 90, 180, 365, 730, 1825, 3650)),
) for n in ns)
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))
Point = tuple[float, float]  # A step and a value.

MARK = "●"
MAX_POINTS = 2048

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BARS = " ▁▂▃▄▅▆▇█"  # Bars of a curve on one line, the first is empty.
_HALVES = {0: " ", 1: "'", 2: ".", 3: ":"}


def thin(xs: ArrayLike | Sequence[float], ys: ArrayLike | Sequence[float], num_points: int) -> tuple[Floats, Floats]:
    """Return at most `num_points` of the points, in order of `xs`: the ends, and the least and greatest of each bucket.

    `xs` must not fall. A value that is no number makes a gap where it alone fills its bucket, and is passed over else.
    """
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} positions for {len(y)} values")
    if len(x) <= max(num_points, 2):
        return x, y
    num_buckets = max(1, (num_points - 2) // 2)
    starts = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], num_buckets + 1)[:-1], side="left"))
    known = np.isfinite(y)
    low = _first_where(np.where(known, y, np.inf), starts, np.minimum)
    high = _first_where(np.where(known, y, -np.inf), starts, np.maximum)
    ends = np.array([0, len(x) - 1])
    kept = np.unique(np.concatenate([ends, low, high])) if num_points > 3 else ends
    return x[kept], y[kept]


def _first_where(values: Floats, starts: NDArray[np.intp], least: np.ufunc) -> NDArray[np.intp]:
    """Return where each bucket first has its least value (or its greatest)."""
    best = least.reduceat(values, starts)
    lengths = np.diff(np.append(starts, len(values)))
    hits = np.flatnonzero(values == np.repeat(best, lengths))
    bucket = np.searchsorted(starts, hits, side="right") - 1
    _, first = np.unique(bucket, return_index=True)
    return hits[first]


def means(xs: ArrayLike | Sequence[float], ys: ArrayLike | Sequence[float], num_points: int) -> tuple[Floats, Floats]:
    """Return at most `num_points` means of neighbours: a smoothed curve, in which a spike weighs as one point."""
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= max(num_points, 1):
        return x, y
    starts = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], max(num_points, 1) + 1)[:-1], side="left"))
    num = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / num, np.add.reduceat(y, starts) / num


@dataclass(frozen=True, slots=True)
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
        return self._multiples(next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999))

    def time_ticks(self, most: int) -> list[float]:
        """Return ticks for seconds: quarters of an hour, not tenths of one."""
        span = self.high - self.low
        step = next((step for step in _TIMES_S if step * most >= span), 86_400.0 * math.ceil(span / 86_400 / most))
        return self._multiples(step)

    def _multiples(self, step: float) -> list[float]:
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def format_time_tick(seconds: float) -> str:
    """Format a time as `30 s`, `5 min`, `2 h` or `10 d`."""
    for unit_s, unit in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


class Series:
    """The points of a run of any length: where they become too many, neighbours become their mean."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._waiting: list[Point] = []
        self._each = 1

    def add(self, step: float, value: float) -> None:
        self._waiting.append((step, value))
        if len(self._waiting) < self._each:
            return
        self._points.append(_mean(self._waiting))
        self._waiting = []
        if len(self._points) >= MAX_POINTS:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._each *= 2

    def points(self) -> list[Point]:
        return [*self._points, _mean(self._waiting)] if self._waiting else list(self._points)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn curve, and the numbers at the ends of its axes."""

    rows: tuple[str, ...]
    low: float
    high: float
    first: float
    last: float


def draw(
    line: Sequence[Point], marks: Sequence[Point], *, width: int, height: int, ascii_only: bool,
    glyphs: Mapping[Point, str] | None = None,
) -> Chart | None:
    """Draw `line` joined up with `marks` laid over it, the last on top; `None` where there are not two points to join.

    `glyphs` has the characters of marks that are not drawn as `MARK`.
    """
    line = sorted(p for p in line if math.isfinite(p[0]) and math.isfinite(p[1]))
    marks = [p for p in marks if math.isfinite(p[0]) and math.isfinite(p[1])]
    both = [*line, *marks]
    if len({step for step, _ in both}) < 2:
        return None
    first, last = min(both)[0], max(both)[0]
    across, down = (1, 2) if ascii_only else (2, 4)
    column = _scale(first, last, width * across)
    heights = _joined(line, column)
    values = [*heights.values(), *(value for _, value in marks)]
    low, high = min(values), max(values)
    level = _scale(low, high, height * down)

    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for x in sorted(heights):
        y = level(heights[x])
        start = y if before is None or abs(y - before) < 2 else before + (1 if y > before else -1)
        for dot in range(min(start, y), max(start, y) + 1):
            from_top = height * down - 1 - dot
            bit = _BRAILLE[from_top % 4][x % 2] if not ascii_only else 1 << from_top % 2
            cells[from_top // down][x // across] |= bit
        before = y

    letters = [[_HALVES[c] if ascii_only else chr(0x2800 + c) if c else " " for c in row] for row in cells]
    mark = "o" if ascii_only else MARK
    for step, value in marks:
        letters[height - 1 - level(value) // down][column(step) // across] = (glyphs or {}).get((step, value), mark)
    return Chart(tuple("".join(row) for row in letters), low, high, first, last)


def frame_rows(chart: Chart, high: str, low: str, first: str, last: str, *, ascii_only: bool) -> list[str]:
    """Put a drawn curve into a frame, with these words at the ends of its axes."""
    wall, corner, floor = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    width, margin = len(chart.rows[0]), max(len(high), len(low))
    ends = [high, *[""] * (len(chart.rows) - 2), low]
    rows = [f"{end:>{margin}} {wall}{row}".rstrip() for end, row in zip(ends, chart.rows, strict=True)]
    indent = " " * (margin + 1)
    return [*rows, indent + corner + floor * width, f"{indent} {first}{last.rjust(width - len(first))}"]


def _joined(line: Sequence[Point], column: Callable[[float], int]) -> dict[int, float]:
    """Return the mean of each column that has points, and straight lines over those between that have none."""
    held: dict[int, list[Point]] = {}
    for point in line:
        held.setdefault(column(point[0]), []).append(point)
    known = [(x, _mean(points)[1]) for x, points in sorted(held.items())]
    heights = dict(known)
    for (x0, y0), (x1, y1) in pairwise(known):
        for x in range(x0 + 1, x1):
            heights[x] = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return heights


def _scale(low: float, high: float, num: int) -> Callable[[float], int]:
    """Map a value between `low` and `high` to an index below `num`; to the middle where they are the same."""
    if high <= low:
        return lambda _: (num - 1) // 2
    return lambda value: round((value - low) / (high - low) * (num - 1))


def _mean(points: Sequence[Point]) -> Point:
    return sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points)


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """Draw a small curve on one line; `low` and `high` are the same for all that are compared."""
    known = [value for value in values if math.isfinite(value)]
    width = min(width, len(known))
    edges = [round(i * len(known) / width) for i in range(width + 1)] if width else []
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    level = _scale(low, high, len(BARS) - 1)
    return "".join(BARS[1 + level(min(max(mean, low), high))] for mean in means)

"""Small curves in characters: braille dots or bars, or ASCII where the stream has nothing better."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
"""A step and a value."""

MARK = "●"
MAX_POINTS = 2048

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BARS = "▁▂▃▄▅▆▇█"
_HALVES = {0: " ", 1: "'", 2: ".", 3: ":"}


class Series:
    """The points of a run however long: where they grow too many, neighbours become their mean."""

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


def draw(line: Sequence[Point], marks: Sequence[Point], *, width: int, height: int, ascii_only: bool) -> Chart | None:
    """`line` joined up with `marks` laid over it; `None` where there are not two points to join."""
    line = sorted(p for p in line if math.isfinite(p[0]) and math.isfinite(p[1]))
    marks = sorted(p for p in marks if math.isfinite(p[0]) and math.isfinite(p[1]))
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
    for step, value in marks:
        letters[height - 1 - level(value) // down][column(step) // across] = "o" if ascii_only else MARK
    return Chart(tuple("".join(row) for row in letters), low, high, first, last)


def _joined(line: Sequence[Point], column: Callable[[float], int]) -> dict[int, float]:
    """The mean of each column that has points, and straight lines over those between that have none."""
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
    """From a value between `low` and `high` to one of `num` places; to the middle where they are the same."""
    if high <= low:
        return lambda _: (num - 1) // 2
    return lambda value: round((value - low) / (high - low) * (num - 1))


def _mean(points: Sequence[Point]) -> Point:
    return sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points)


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """A small curve on one line; `low` and `high` are the same for all that are compared."""
    known = [value for value in values if math.isfinite(value)]
    width = min(width, len(known))
    edges = [round(i * len(known) / width) for i in range(width + 1)] if width else []
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    level = _scale(low, high, len(_BARS))
    return "".join(_BARS[level(min(max(mean, low), high))] for mean in means)

"""Where the names of points go, so that none lies on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
NAME_WIDTH, FIGURES_WIDTH = 7.4, 6.7
"""Of a letter, at most, of semi-bold and of plain text of 12 px."""
HEIGHT = 29.0
PADDING = 3.0


@dataclass(frozen=True, slots=True)
class Label:
    """Two lines of text for a point."""

    x: float
    y: float
    name: str
    figures: str

    @property
    def width(self) -> float:
        return max(NAME_WIDTH * len(self.name), FIGURES_WIDTH * len(self.figures))


@dataclass(frozen=True, slots=True)
class Box:
    """Where a label lies."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (self.left < other.right + PADDING and other.left < self.right + PADDING
                and self.top < other.bottom + PADDING and other.top < self.bottom + PADDING)

    def holds(self, point: Point, margin: float = 0.0) -> bool:
        return (self.left - margin <= point[0] <= self.right + margin
                and self.top - margin <= point[1] <= self.bottom + margin)

    def is_in(self, frame: Box) -> bool:
        return (self.left >= frame.left and self.right <= frame.right and self.top >= frame.top
                and self.bottom <= frame.bottom)


def place_labels(
    labels: Sequence[Label], line: Sequence[Point], others: Sequence[Point], frame: Box
) -> Iterator[tuple[Label, Box]]:
    """Each label with its place: never on another, off the line and its points if it can be, on few other points.

    A label that finds no free place is left out.
    """
    taken: list[Box] = []
    for label in labels:
        free = [box for box in _places(label) if box.is_in(frame) and not any(box.meets(t) for t in taken)]
        if not free:
            continue
        box = min(free, key=lambda b: _cost(b, label, line, others))
        taken.append(box)
        yield label, box


def _places(label: Label) -> Iterator[Box]:
    """Around the point, the nearest first. Nothing lies below and left of a front, so that comes first."""
    for away in (9.0, 22.0, 38.0, 58.0, 82.0, 110.0, 150.0):
        for toward_x, toward_y in ((-1, 1), (0, 1), (-1, 0), (1, 0), (1, -1), (0, -1), (1, 1), (-1, -1)):
            middle_x = label.x + toward_x * (away + label.width / 2)
            middle_y = label.y + toward_y * (away + HEIGHT / 2)
            yield Box(middle_x - label.width / 2, middle_y - HEIGHT / 2, middle_x + label.width / 2,
                      middle_y + HEIGHT / 2)


def _cost(box: Box, label: Label, line: Sequence[Point], others: Sequence[Point]) -> float:
    middle = (box.left + box.right) / 2, (box.top + box.bottom) / 2
    reach_x = max(0.0, abs(middle[0] - label.x) - label.width / 2)
    reach_y = max(0.0, abs(middle[1] - label.y) - HEIGHT / 2)
    crossed = sum(_crosses(a, b, box) for a, b in pairwise(line))
    on_points = sum(box.holds(p, 7.0) for p in line)
    return reach_x + reach_y + 60 * crossed + 90 * on_points + 6 * sum(box.holds(p, 3.0) for p in others)


def _crosses(a: Point, b: Point, box: Box) -> bool:
    """The piece of line from `a` to `b` touches the box: it is looked at in 24 places."""
    return any(box.holds((a[0] + (b[0] - a[0]) * n / 24, a[1] + (b[1] - a[1]) * n / 24), 2.0) for n in range(25))

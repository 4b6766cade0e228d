"""Cost against time: an SVG file with every setup as a mark and the front as a named line, and a plot for terminals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from embark.catalog.pricing import PURCHASE_NAMES
from embark.events.plotting import Axis, draw, format_time_tick
from embark.formatting import format_duration, format_usd, pluralize, to_one_line
from embark.plan.survey import Bounds, Estimate, Survey, near_front, pareto_front

Point = tuple[float, float]
WIDTH, HEIGHT = 960.0, 620.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, WIDTH - 28.0, 92.0, HEIGHT - 62.0
MOST_LABELS = 12
NAME_WIDTH, FIGURES_WIDTH = 7.4, 6.7  # Of a letter, at most, of semi-bold and of plain text of 12 px.
LABEL_HEIGHT, LABEL_PADDING = 29.0, 3.0
LOG_FROM = 6.0  # The largest over the smallest from which an axis is logarithmic.
MARGIN = 0.06
MOST_TICKS = 9
CLOUD_NAMES = {"aws": "AWS", "azure": "Azure", "gcp": "Google Cloud"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


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
class Dot(Label):
    """A setup on the picture."""

    cloud: str
    css_class: str
    tooltip: str
    is_front: bool
    is_rough: bool


class Box(NamedTuple):
    """Where a label lies."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box, margin: float = LABEL_PADDING) -> bool:
        return (self.left < other.right + margin and other.left < self.right + margin
                and self.top < other.bottom + margin and other.top < self.bottom + margin)

    def holds(self, point: Point, margin: float = 0.0) -> bool:
        return self.meets(Box(*point, *point), margin)

    def nearest_to(self, point: Point) -> Point:
        return min(max(point[0], self.left), self.right), min(max(point[1], self.top), self.bottom)

    def is_in(self, frame: Box) -> bool:
        return (self.left >= frame.left and self.right <= frame.right and self.top >= frame.top
                and self.bottom <= frame.bottom)


def draw_svg(found: Survey, name: str, bounds: Bounds | None = None) -> str:
    """The complete file. It has no script and needs nothing else."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("embark.plan", ""), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"px": lambda value: f"{round(value, 1):g}", "one_line": to_one_line}
    values = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
    template = environment.get_template("chart.svg.j2")
    return template.render(**values, **_contents(found, bounds or Bounds()), name=name) + "\n"


def _contents(found: Survey, bounds: Bounds) -> dict[str, object]:
    shown, purchase = near_front(found), found.purchase
    totals = [(total_s, usd) for e in shown
              if (total_s := e.total_s(purchase)) is not None and (usd := e.total_usd(purchase)) is not None]
    if not totals:
        return {"dots": ()}
    deadline_s, budget_usd = bounds.deadline_s, bounds.budget_usd
    x_axis = axis_of([s for s, _ in totals] + ([] if deadline_s is None else [deadline_s]), LEFT, RIGHT)
    y_axis = axis_of([usd for _, usd in totals] + ([] if budget_usd is None else [budget_usd]), BOTTOM, TOP)
    on_front = {id(e) for e in pareto_front(shown, purchase)}
    dots = [_dot(e, found, bounds, (x_axis.place(total_s), y_axis.place(usd)), is_front=id(e) in on_front)
            for e, (total_s, usd) in zip(shown, totals, strict=True)]
    front = sorted((dot for dot in dots if dot.is_front), key=lambda dot: dot.x)
    beyond = len(found.fitting) - len(shown)
    num_machines = len({e.setup.machine.name for e in shown})
    legend, legend_end = [], LEFT
    for cloud in sorted({dot.cloud for dot in dots}):
        legend.append((cloud, CLOUD_NAMES.get(cloud, cloud), legend_end))
        legend_end += 35 + 7.2 * len(CLOUD_NAMES.get(cloud, cloud))
    return {
        "dots": dots, "front": front, "labels": list(_labels(dots, front)), "legend": legend, "legend_end": legend_end,
        "subtitle": f"{pluralize(len(shown), 'setup')} of {pluralize(num_machines, 'machine')}, paid "
                    f"{PURCHASE_NAMES[purchase]}; the line joins the {len(front)} that nothing beats in both"
                    f"{f'; {beyond} more lie far beyond' if beyond else ''}",
        "x_ticks": [(x_axis.place(at), format_time_tick(at)) for at in x_axis.time_ticks(MOST_TICKS)],
        "y_ticks": [(y_axis.place(at), format_usd(at)) for at in y_axis.ticks(MOST_TICKS)],
        "deadline": deadline_s and {"at": x_axis.place(deadline_s), "words": f"deadline {format_duration(deadline_s)}"},
        "budget": budget_usd and {"at": y_axis.place(budget_usd), "words": f"budget {format_usd(budget_usd)}"},
    }


def _dot(estimate: Estimate, found: Survey, bounds: Bounds, at: Point, *, is_front: bool) -> Dot:
    setup, step = estimate.setup, estimate.prediction.step
    region = estimate.price.region if estimate.price else ""
    total_usd, total_s = estimate.total_usd(found.purchase), estimate.total_s(found.purchase)
    figures = f"{format_usd(total_usd)}, {format_duration(total_s or 0.0)}"
    pace = "" if step is None else f", {step.total_s * 1e3:.3g} ms a step, bound by {step.bound_by}"
    kind = "best" if is_front else "other" if bounds.keeps(estimate, found.purchase) else "outside"
    return Dot(
        *at, setup.title, figures, setup.machine.cloud,
        f"{setup.machine.cloud} {kind}{' rough' if estimate.is_rough else ''}",
        f"{setup.description} in {region}: {figures}{pace}", is_front, estimate.is_rough,
    )


def _labels(dots: Sequence[Dot], front: Sequence[Dot]) -> Iterator[tuple[Label, Box, Point, bool]]:
    """Each label with its box, the point of the box nearest to its own, and whether a line should join the two."""
    line, others = [(d.x, d.y) for d in front], [(d.x, d.y) for d in dots if not d.is_front]
    frame = Box(LEFT + 4, TOP + 2, RIGHT, BOTTOM - 4)
    num = min(len(front), MOST_LABELS)
    named = [front[round(n * (len(front) - 1) / max(num - 1, 1))] for n in range(num)]
    for label, box in place_labels(named, line, others, frame):
        end = box.nearest_to((label.x, label.y))
        yield label, box, end, math.dist((label.x, label.y), end) > 14


def place_labels(
    labels: Sequence[Label], line: Sequence[Point], others: Sequence[Point], frame: Box
) -> Iterator[tuple[Label, Box]]:
    """Each label with its place: never on another, off the line and its points if it can be, on few other points.

    A label that finds no free place is left out.
    """
    used: list[Box] = []
    for label in labels:
        free = [box for box in _places(label) if box.is_in(frame) and not any(box.meets(other) for other in used)]
        if free:
            used.append(min(free, key=lambda box: _label_cost(box, label, line, others)))
            yield label, used[-1]


def _places(label: Label) -> Iterator[Box]:
    """Near the point, the nearest first. Nothing lies below and left of a front, so that comes first."""
    for away in (9.0, 22.0, 38.0, 58.0, 82.0, 110.0, 150.0):
        for toward_x, toward_y in ((-1, 1), (0, 1), (-1, 0), (1, 0), (1, -1), (0, -1), (1, 1), (-1, -1)):
            middle_x = label.x + toward_x * (away + label.width / 2)
            middle_y = label.y + toward_y * (away + LABEL_HEIGHT / 2)
            yield Box(middle_x - label.width / 2, middle_y - LABEL_HEIGHT / 2, middle_x + label.width / 2,
                      middle_y + LABEL_HEIGHT / 2)


def _label_cost(box: Box, label: Label, line: Sequence[Point], others: Sequence[Point]) -> float:
    near = box.nearest_to((label.x, label.y))
    reach = abs(near[0] - label.x) + abs(near[1] - label.y)
    # A piece of the line crosses the box if one of 25 points of it lies there.
    crossed = sum(any(box.holds((a[0] + (b[0] - a[0]) * n / 24, a[1] + (b[1] - a[1]) * n / 24), 2.0)
                      for n in range(25)) for a, b in pairwise(line))
    on_line, on_others = sum(box.holds(p, 7.0) for p in line), sum(box.holds(p, 3.0) for p in others)
    return reach + 60 * crossed + 90 * on_line + 6 * on_others


def axis_of(values: Sequence[float], start: float, stop: float) -> Axis:
    """Of seconds or dollars, which are all above 0."""
    low, high = min(values), max(values)
    if low == high:
        return Axis(low / 1.5, high * 1.5, start, stop, is_log=True)
    if high / low >= LOG_FROM:
        margin = (high / low) ** MARGIN
        return Axis(low / margin, high * margin, start, stop, is_log=True)
    margin = MARGIN * (high - low)
    return Axis(max(low - margin, low / 2), high + margin, start, stop)


def front_letters(found: Survey) -> dict[int, str]:
    """A letter for each estimate of the front, by its `id`, from the fastest on."""
    return {id(e): letter for e, letter in zip(pareto_front(found.fitting, found.purchase), LETTERS, strict=False)}


def plot(found: Survey, *, width: int, height: int, ascii_only: bool) -> list[str]:
    """Lines of text, at most `width` wide; none where there are not two points to set against each other."""
    points = {id(e): (total_s, usd) for e in near_front(found)
              if (total_s := e.total_s(found.purchase)) is not None
              and (usd := e.total_usd(found.purchase)) is not None}
    if len(points) < 2:
        return []
    times, dollars = zip(*points.values(), strict=True)
    along, up = (math.log10 if max(values) / min(values) >= LOG_FROM else float for values in (times, dollars))
    places = {name: (along(total_s), up(usd)) for name, (total_s, usd) in points.items()}
    lettered = front_letters(found)
    ends = format_usd(max(dollars)), format_usd(min(dollars))
    margin = max(map(len, ends)) + 1
    inner = width - margin - 1
    chart = draw([places[name] for name in lettered], list(places.values()), width=inner, height=height,
                 ascii_only=ascii_only)
    if chart is None or inner < 20:
        return []
    rows = [list(row) for row in chart.rows]
    across, down = (1, 2) if ascii_only else (2, 4)
    x_axis = Axis(chart.first, chart.last, 0, len(rows[0]) * across - 1)
    y_axis = Axis(chart.low, chart.high, 0, len(rows) * down - 1)
    # Over the marks that `draw` set, in the same places: dots first, the front's letters on top.
    for name, (x, y) in sorted(places.items(), key=lambda item: item[0] in lettered):
        rows[len(rows) - 1 - round(y_axis.place(y)) // down][round(x_axis.place(x)) // across] = (
            lettered.get(name, "." if ascii_only else "·"))
    corner, wall, floor = ("+", "|", "-") if ascii_only else ("└", "│", "─")
    sides = [ends[0], *[""] * (height - 2), ends[1]]
    lines = [f"{side:>{margin - 1}} {wall}{''.join(row)}".rstrip() for side, row in zip(sides, rows, strict=True)]
    lines.append(" " * margin + corner + floor * inner)
    first, last = format_duration(min(times)), format_duration(max(times))
    lines.append(" " * (margin + 1) + first + last.rjust(inner - len(first)))
    return lines

"""Curves as SVG: axes with round ticks, gaps where a value is no number, marks at steps where something happened."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from embark.events.plotting import Axis, thin
from embark.formatting import format_count, format_si
from embark.report.document import templates

WIDTH, HEIGHT = 360.0, 196.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 14.0, 10.0, 28.0
LETTER_WIDTH = 6.2
MAX_POINTS = 700
"""Of a line: about two for each pixel."""
MAX_DOTS = 60
FIRST_SHARE = 0.05
"""Of the steps: the first ones are far off, and would flatten all that follows."""

Say = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line of the chart."""

    xs: Any
    ys: Any
    """Sequences or arrays of one length."""
    sign: str
    """Its class: `k0` to `k7`, or `lost`."""
    has_dots: bool = False
    """The points are few and each means something."""
    is_joined: bool = True
    """A line runs through the dots."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Sign:
    """Something that happened at a step."""

    x: float
    kind: str
    """`save`, `stop` or `resume`."""
    tooltip: str


def chart(
    strokes: Sequence[Stroke], signs: Iterable[Sign] = (), *, say_y: Say, say_x: Say | None = None,
    from_zero: bool = False, label: str = "", is_time: bool = False,
) -> Markup | None:
    """The drawing; `None` where there are not two points to join. The first steps may leave it at the top."""
    say_x = say_x or say_step
    strokes = [_thinned(stroke) for stroke in strokes]
    points = [(x, y) for stroke in strokes for x, y in zip(stroke.xs, stroke.ys, strict=True) if math.isfinite(y)]
    if len({x for x, _ in points}) < 2:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    y_axis = _y_axis([y for _, y in points] if from_zero else _settled(points, first, last), from_zero=from_zero)
    left = max(LEFT, 12 + LETTER_WIDTH * max(len(say_y(at)) for at in y_axis.ticks(4)))
    x_axis = Axis(first, last, left, WIDTH - RIGHT)

    def path(stroke: Stroke) -> Markup:
        """A gap where a value is no number."""
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(stroke.xs, stroke.ys, strict=True)]
        starts = [not math.isfinite(y) for _, y in ((0.0, math.nan), *places)]
        return Markup("".join(f"{'M' if is_start else 'L'}{x:.1f} {y:.1f}"
                              for is_start, (x, y) in zip(starts, places, strict=False) if math.isfinite(y)))

    def exact(value: float) -> str:
        return f"{value:.4f}" if say_y is say_figure and abs(value) < 10 else say_y(value)

    return Markup(templates().get_template("chart.svg.j2").render(
        label=label, width=WIDTH, height=HEIGHT, left=left, right=WIDTH - RIGHT, top=TOP, low=HEIGHT - BOTTOM,
        x_axis=x_axis, y_axis=y_axis, x_ticks=x_axis.time_ticks(5) if is_time else x_axis.ticks(5), say_x=say_x,
        say_y=say_y, strokes=strokes, signs=[sign for sign in signs if x_axis.low <= sign.x <= x_axis.high],
        path=path, dots=_dots, exact=exact))


def say_figure(value: float) -> str:
    """A tick of a plain number: as few digits as it needs."""
    return f"{value:.4g}" if abs(value) < 1e4 else format_si(value)


def say_step(value: float) -> str:
    """`2,500`, `20 k`, `1.5 M`"""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (size if unit != 'k' else 1e3):.4g} {unit}"
    return format_count(value)


def say_percent(value: float) -> str:
    return f"{value:.3g} %"


def _settled(points: Sequence[tuple[float, float]], first: float, last: float) -> list[float]:
    """The values that set the scale: all, or those after the first steps where these would take most of it."""
    values = [y for _, y in points]
    later = [y for x, y in points if x >= first + FIRST_SHARE * (last - first)]
    spread = max(values) - min(values)
    return later if len(set(later)) > 1 and spread > 2 * (max(later) - min(later)) else values


def _y_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    low, high = min(values), max(values)
    if from_zero and low >= 0:
        low, high = 0.0, high * 1.08 or 1.0
    else:
        margin = 0.07 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = low - margin, high + margin
    return Axis(low, high, HEIGHT - BOTTOM, TOP)


def _thinned(stroke: Stroke) -> Stroke:
    xs, ys = np.asarray(stroke.xs, np.float64), np.asarray(stroke.ys, np.float64)
    if len(xs) > MAX_POINTS:
        order = np.argsort(xs, kind="stable")
        xs, ys = thin(xs[order], ys[order], MAX_POINTS)
    return replace(stroke, xs=xs.tolist(), ys=ys.tolist())


def _dots(stroke: Stroke) -> list[tuple[float, float]]:
    """Those that are shown; always the last one, which people quote."""
    every = math.ceil(len(stroke.xs) / MAX_DOTS) or 1
    known = [(x, y) for x, y in zip(stroke.xs, stroke.ys, strict=True) if math.isfinite(y)]
    return [*known[:-1][::every], *known[-1:]]

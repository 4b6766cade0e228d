"""Curves as SVG: axes with round ticks, gaps where a value is no number, marks at steps where something happened."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from embark.events.plotting import Axis, thin
from embark.formatting import format_count, format_si, strip_control_chars

_EMPTY = frozenset({"br", "hr", "meta", "link", "circle", "line", "path", "polyline", "polygon", "rect", "use"})
WIDTH, HEIGHT = 360.0, 196.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 14.0, 10.0, 28.0
LETTER_WIDTH = 6.2
MAX_POINTS = 700
"""Of a line: about two for each pixel."""
MAX_DOTS = 60
FIRST_SHARE = 0.05
"""Of the steps: the first ones are far off, and would flatten all that follows."""

Say = Callable[[float], str]


def el(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element. Children that are no `Markup` are escaped; `class_` is `class`, `text_anchor` is `text-anchor`."""
    shown = "".join(f' {_name(name)}="{_value(value)}"' for name, value in attributes.items() if value is not None)
    inside = joined(*children)
    return Markup(f"<{tag}{shown}>{inside}</{tag}>" if inside or tag not in _EMPTY else f"<{tag}{shown}/>")


def joined(*children: str) -> Markup:
    """One after another."""
    return Markup("".join(child if isinstance(child, Markup) else text(child) for child in children))


def text(words: str) -> Markup:
    """Plain text as HTML: nothing in it is a tag or changes the direction of text."""
    return escape(strip_control_chars(words))


def _name(name: str) -> str:
    return name.removesuffix("_").replace("_", "-")


def _value(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(strip_control_chars(str(value)))


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
    thinned = [_thinned(stroke) for stroke in strokes]
    points = [(x, y) for stroke in thinned for x, y in zip(stroke.xs, stroke.ys, strict=True) if math.isfinite(y)]
    if len({x for x, _ in points}) < 2:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    settled = [y for _, y in points] if from_zero else _settled(points, first, last)
    y_axis = _y_axis(settled, from_zero=from_zero)
    left = max(LEFT, 12 + LETTER_WIDTH * max(len(say_y(at)) for at in y_axis.ticks(4)))
    x_axis = Axis(first, last, left, WIDTH - RIGHT)
    lines = [
        *(_line(stroke, x_axis, y_axis) for stroke in thinned if not stroke.has_dots),
        *(_dots(stroke, x_axis, y_axis, say_x, say_y) for stroke in thinned if stroke.has_dots),
    ]
    # An inner svg cuts off what lies beyond its edges.
    edge, top, wide, high = left - 4, TOP - 4, WIDTH - left - RIGHT + 8, HEIGHT - TOP - BOTTOM + 4
    inner = el("svg", *lines, x=edge, y=top, width=wide, height=high, viewBox=f"{edge:g} {top:g} {wide:g} {high:g}")
    ticks = x_axis.time_ticks(5) if is_time else x_axis.ticks(5)
    outer = [*_grid(x_axis, ticks, y_axis, say_x, say_y),
             *(_sign(sign, x_axis) for sign in signs if x_axis.low <= sign.x <= x_axis.high)]
    return el("svg", el("title", label) if label else Markup(), *outer, inner,
              viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", class_="chart")


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


def _grid(x_axis: Axis, x_ticks: Sequence[float], y_axis: Axis, say_x: Say, say_y: Say) -> list[Markup]:
    left, low, right = x_axis.start, HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = []
    for at in y_axis.ticks(4):
        y = y_axis.place(at)
        lines.append(el("line", x1=left, y1=y, x2=right, y2=y, class_="grid"))
        lines.append(el("text", say_y(at), x=left - 7, y=y + 4, text_anchor="end"))
    for at in x_ticks:
        x = x_axis.place(at)
        lines.append(el("line", x1=x, y1=low, x2=x, y2=low + 4, class_="axis"))
        anchor = "end" if x > right - 14 else "middle"
        lines.append(el("text", say_x(at), x=min(x, right + 6), y=low + 18, text_anchor=anchor))
    return [*lines, el("line", x1=left, y1=low, x2=right, y2=low, class_="axis")]


def _sign(sign: Sign, x_axis: Axis) -> Markup:
    x, low = x_axis.place(sign.x), HEIGHT - BOTTOM
    title = el("title", sign.tooltip)
    if sign.kind == "save":
        return el("path", title, d=f"M{x:.1f} {low - 7:.1f}l4 7h-8z", class_="save")
    return el("line", title, x1=x, y1=TOP, x2=x, y2=low, class_=sign.kind)


def _line(stroke: Stroke, x_axis: Axis, y_axis: Axis) -> Markup:
    """A gap where a value is no number."""
    pieces: list[str] = []
    is_on = False
    for x, y in zip(stroke.xs, stroke.ys, strict=True):
        if not math.isfinite(y):
            is_on = False
            continue
        pieces.append(f"{'L' if is_on else 'M'}{x_axis.place(x):.1f} {y_axis.place(y):.1f}")
        is_on = True
    return el("path", el("title", stroke.name) if stroke.name else Markup(), d="".join(pieces),
              class_=f"stroke {stroke.sign}")


def _dots(stroke: Stroke, x_axis: Axis, y_axis: Axis, say_x: Say, say_y: Say) -> Markup:
    every = math.ceil(len(stroke.xs) / MAX_DOTS) or 1
    known = [(x, y) for x, y in zip(stroke.xs, stroke.ys, strict=True) if math.isfinite(y)]
    # The last one is always shown: it is the one that people quote.
    shown = [*known[:-1][::every], *known[-1:]]
    dots = [el("circle", el("title", f"{stroke.name} {_exact(y, say_y)} at {say_x(x)}".strip()),
               cx=x_axis.place(x), cy=y_axis.place(y), r=3.4, class_=f"dot {stroke.sign}") for x, y in shown]
    return joined(_line(stroke, x_axis, y_axis) if stroke.is_joined else Markup(), *dots)


def _exact(value: float, say: Say) -> str:
    return f"{value:.4f}" if say is say_figure and abs(value) < 10 else say(value)

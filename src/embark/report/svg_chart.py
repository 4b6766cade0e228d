"""Charts of a report as SVG."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from embark.events.plotting import Axis
from embark.formatting import strip_control_chars
from embark.values import frozen


@frozen
class Stroke:
    """A line of an SVG chart, with a gap where a value is no number."""

    xs: Any
    ys: Any  # Sequences or arrays of one length.
    sign: str  # CSS class.
    has_dots: bool = False  # The points are few and each means something.
    is_joined: bool = True  # A line runs through the dots.
    name: str = ""


@frozen
class Dot:
    """A mark of an SVG chart at a value."""

    x: float
    y: float
    sign: str  # CSS class.
    words: str  # Text that is shown when one points at it.


@frozen
class Rule:
    """A straight line across an SVG chart, or a small mark at its foot: something that happened."""

    at: float  # Position on the x axis.
    sign: str  # CSS class; `save` is the small mark.
    words: str


def svg_chart(
    x_axis: Axis, y_axis: Axis, ticks: tuple[Sequence[tuple[float, str]], Sequence[tuple[float, str]]], *,
    strokes: Sequence[Stroke], dots: Sequence[Dot], rules: Sequence[Rule]
) -> Markup:
    """Return what belongs inside of an svg element; `ticks` has the values and words of the x and of the y axis."""
    def path(stroke: Stroke) -> str:
        points = [(x_axis.position(x), y_axis.position(y)) for x, y in zip(stroke.xs, stroke.ys, strict=True)]
        starts = [not math.isfinite(y) for _, y in ((0.0, math.nan), *points)]
        return "".join(f"{'M' if is_start else 'L'}{x:.1f} {y:.1f}"
                       for is_start, (x, y) in zip(starts, points, strict=False) if math.isfinite(y))

    return Markup(_svg_template().render(
        x_axis=x_axis, y_axis=y_axis, x_ticks=ticks[0], y_ticks=ticks[1], dots=dots, rules=rules,
        strokes=[(stroke, path(stroke)) for stroke in strokes]))


@cache
def _svg_template() -> Template:
    environment = Environment(
        loader=PackageLoader("embark.report", ""), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else strip_control_chars(value))
    environment.filters["px"] = lambda value: f"{value:.1f}".removesuffix(".0")
    return environment.get_template("svg_chart.svg.j2")

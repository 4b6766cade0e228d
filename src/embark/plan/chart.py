"""Cost against time as one SVG file: every setup a mark, the front a line, its points named."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from embark.catalog.pricing import PURCHASE_NAMES, Purchase
from embark.events.plotting import Axis, format_time_tick
from embark.formatting import format_duration, format_usd, pluralize, to_one_line
from embark.plan.axes import MOST_TICKS, axis_of, dollar_words
from embark.plan.estimate import Estimate
from embark.plan.labels import Box, Label, place_labels
from embark.plan.survey import Bounds, Survey, near_front, pareto_front, setup_name
from embark.plan.verdict import describe_setup

WIDTH, HEIGHT = 960.0, 620.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 28.0, 92.0, 62.0
MOST_LABELS = 12
CLOUD_NAMES = {"aws": "AWS", "azure": "Azure", "gcp": "Google Cloud"}

_LIGHT = {"back": "#ffffff", "ink": "#1c2430", "dim": "#5b6675", "grid": "#e3e7ec", "aws": "#c4560a",
          "azure": "#1f6fd6", "gcp": "#16845a", "bound": "#b3261e"}
_DARK = {"back": "#14181f", "ink": "#e8ecf1", "dim": "#9aa7b7", "grid": "#2a313c", "aws": "#f39a52",
         "azure": "#6fb0ff", "gcp": "#4fcf9c", "bound": "#ff8a80"}
_COLORS = """
  .back {{ fill: {back}; }} text {{ fill: {ink}; }} .dim {{ fill: {dim}; }} .label {{ stroke: {back}; }}
  .grid {{ stroke: {grid}; }} .axis, .leader {{ stroke: {dim}; }} .front, .best {{ stroke: {ink}; }}
  .bound {{ stroke: {bound}; }} .bound-text {{ fill: {bound}; }} .rough {{ stroke: {gcp}; }}
  .aws {{ fill: {aws}; }} .azure {{ fill: {azure}; }} .gcp {{ fill: {gcp}; }} .rough, .front {{ fill: none; }}
"""
_SHAPES = """
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 12px; }
  .title { font-size: 17px; font-weight: 600; }
  .name { font-weight: 600; }
  .label { paint-order: stroke; stroke-width: 4px; stroke-linejoin: round; }
  .grid, .axis { stroke-width: 1; }
  .front { stroke-width: 1.6; stroke-linejoin: round; }
  .bound { stroke-width: 1.4; stroke-dasharray: 6 4; }
  .leader { stroke-width: 0.8; }
  .other { opacity: 0.42; } .outside { opacity: 0.16; }
  .rough { stroke-width: 1.2; }
  .best { stroke-width: 1.4; }
"""
# Written out twice rather than as CSS variables, which some viewers of SVG do not know.
_STYLE = (_SHAPES + _COLORS.format(**_LIGHT) + "  @media (prefers-color-scheme: dark) {" + _COLORS.format(**_DARK)
          + "  }\n")


@dataclass(frozen=True, slots=True)
class Dot:
    """A setup on the picture."""

    x: float
    y: float
    cloud: str
    name: str
    figures: str
    tooltip: str
    is_front: bool
    is_inside: bool
    """Within the deadline and the budget."""
    is_rough: bool


def draw_svg(found: Survey, name: str, bounds: Bounds | None = None) -> str:
    """The whole file. It has no script and needs nothing else."""
    bounds = bounds or Bounds()
    shown = near_front(found)
    if not shown:
        return _empty(name)
    times = [_known(e.total_s(found.purchase)) for e in shown]
    dollars = [_known(e.total_usd(found.purchase)) for e in shown]
    x_axis = axis_of([*times, *_some(bounds.deadline_s)], LEFT, WIDTH - RIGHT)
    y_axis = axis_of([*dollars, *_some(bounds.budget_usd)], HEIGHT - BOTTOM, TOP)
    best = pareto_front(shown, found.purchase)
    dots = _dots(shown, best, bounds, found.purchase, x_axis, y_axis)
    on_front = sorted((d for d in dots if d.is_front), key=lambda d: d.x)
    parts = [
        *_frame(found, shown, name, len(best)), *_grid(x_axis, y_axis), *_bound_lines(bounds, x_axis, y_axis),
        *(_mark(d) for d in dots if not d.is_front),
        f'<polyline class="front" points="{_points(on_front)}"/>' if len(on_front) > 1 else "",
        *(_mark(d) for d in on_front), *_labels(dots, on_front),
    ]
    return _whole("\n".join(part for part in parts if part), name)


def _dots(
    shown: Sequence[Estimate], best: Sequence[Estimate], bounds: Bounds, purchase: Purchase, x_axis: Axis, y_axis: Axis
) -> list[Dot]:
    on_front = {id(e) for e in best}
    dots = []
    for estimate in shown:
        total_s, cost = _known(estimate.total_s(purchase)), _known(estimate.total_usd(purchase))
        setup, region = estimate.setup, estimate.price.region if estimate.price else ""
        step = estimate.prediction.step
        figures = f"{format_usd(cost)}, {format_duration(total_s)}"
        pace = "" if step is None else f", {step.total_s * 1e3:.3g} ms a step, bound by {step.bound_by}"
        tooltip = f"{describe_setup(setup.machine, setup.num_nodes)} in {region}: {figures}{pace}"
        dots.append(Dot(x_axis.place(total_s), y_axis.place(cost), setup.machine.cloud, setup_name(estimate), figures,
                        tooltip, id(estimate) in on_front, bounds.keeps(estimate, purchase), estimate.is_rough))
    return dots


def _frame(found: Survey, shown: Sequence[Estimate], name: str, num_front: int) -> list[str]:
    machines = len({e.setup.machine.name for e in shown})
    beyond = len(found.fitting) - len(shown)
    what = (f"{pluralize(len(shown), 'setup')} of {pluralize(machines, 'machine')}, paid "
            f"{PURCHASE_NAMES[found.purchase]}; the line joins "
            f"the {num_front} that nothing beats in both{f'; {beyond} more lie far beyond' if beyond else ''}")
    lines = [f'<text class="title" x="{LEFT:g}" y="30">{_text(name)}: cost of the run against its time</text>',
             f'<text class="dim" x="{LEFT:g}" y="50">{_text(what)}</text>']
    x = LEFT
    for cloud in sorted({e.setup.machine.cloud for e in shown}):
        lines.append(_shape(cloud, x + 5, 68, 4.5, cloud))
        lines.append(f'<text class="dim" x="{x + 15:g}" y="72">{CLOUD_NAMES.get(cloud, cloud)}</text>')
        x += 35 + 7.2 * len(CLOUD_NAMES.get(cloud, cloud))
    if any(e.is_rough for e in shown):
        lines.append(f'<text class="dim" x="{x:g}" y="72">hollow: TPU, a rough estimate</text>')
    lines.append(f'<text class="dim" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 16:g}" text-anchor="middle">'
                 "the whole run, start and checkpoints counted</text>")
    return lines


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    low, high = HEIGHT - BOTTOM, TOP
    lines = []
    for at in x_axis.time_ticks(MOST_TICKS):
        x = x_axis.place(at)
        lines.append(f'<line class="grid" x1="{x:.1f}" y1="{low:g}" x2="{x:.1f}" y2="{high:g}"/>')
        lines.append(f'<text class="dim" x="{x:.1f}" y="{low + 20:g}" text-anchor="middle">'
                     f"{format_time_tick(at)}</text>")
    for at in y_axis.ticks(MOST_TICKS):
        y = y_axis.place(at)
        lines.append(f'<line class="grid" x1="{LEFT:g}" y1="{y:.1f}" x2="{WIDTH - RIGHT:g}" y2="{y:.1f}"/>')
        lines.append(f'<text class="dim" x="{LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{dollar_words(at)}</text>')
    lines.append(f'<path class="axis" fill="none" d="M{LEFT:g} {high:g}V{low:g}H{WIDTH - RIGHT:g}"/>')
    return lines


def _bound_lines(bounds: Bounds, x_axis: Axis, y_axis: Axis) -> list[str]:
    lines = []
    if bounds.deadline_s is not None:
        x = x_axis.place(bounds.deadline_s)
        lines.append(f'<line class="bound" x1="{x:.1f}" y1="{TOP:g}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM:g}"/>')
        side, anchor = (-6, "end") if x > WIDTH / 2 else (6, "start")
        lines.append(f'<text class="bound-text label" x="{x + side:.1f}" y="{TOP + 12:g}" text-anchor="{anchor}">'
                     f"deadline {format_duration(bounds.deadline_s)}</text>")
    if bounds.budget_usd is not None:
        y = y_axis.place(bounds.budget_usd)
        lines.append(f'<line class="bound" x1="{LEFT:g}" y1="{y:.1f}" x2="{WIDTH - RIGHT:g}" y2="{y:.1f}"/>')
        lines.append(f'<text class="bound-text label" x="{WIDTH - RIGHT - 4:g}" y="{y - 6:.1f}" text-anchor="end">'
                     f"budget {format_usd(bounds.budget_usd)}</text>")
    return lines


def _labels(dots: Sequence[Dot], on_front: Sequence[Dot]) -> list[str]:
    wanted = [Label(d.x, d.y, d.name, d.figures) for d in _spread(on_front, MOST_LABELS)]
    line = [(d.x, d.y) for d in on_front]
    others = [(d.x, d.y) for d in dots if not d.is_front]
    frame = Box(LEFT + 4, TOP + 2, WIDTH - RIGHT, HEIGHT - BOTTOM - 4)
    lines = []
    for label, box in place_labels(wanted, line, others, frame):
        to_x, to_y = min(max(label.x, box.left), box.right), min(max(label.y, box.top), box.bottom)
        if math.dist((label.x, label.y), (to_x, to_y)) > 14:
            lines.append(f'<line class="leader" x1="{label.x:.1f}" y1="{label.y:.1f}" x2="{to_x:.1f}" '
                         f'y2="{to_y:.1f}"/>')
        lines.append(f'<text class="label name" x="{box.left:.1f}" y="{box.top + 11:.1f}">{_text(label.name)}</text>')
        lines.append(f'<text class="label dim" x="{box.left:.1f}" y="{box.top + 25:.1f}">{_text(label.figures)}</text>')
    return lines


def _spread(dots: Sequence[Dot], most: int) -> list[Dot]:
    """The ends, and then always the one farthest from those that are taken."""
    if len(dots) <= most:
        return list(dots)
    taken = [dots[0], dots[-1]]
    left = list(dots[1:-1])
    while len(taken) < most:
        far = max(left, key=lambda d: min(math.dist((d.x, d.y), (t.x, t.y)) for t in taken))
        taken.append(far)
        left.remove(far)
    return sorted(taken, key=lambda d: d.x)


def _mark(dot: Dot) -> str:
    kind = "best" if dot.is_front else "other" if dot.is_inside else "outside"
    kind += " rough" if dot.is_rough else ""
    size = 5.5 if dot.is_front else 4.0
    return _shape(dot.cloud, dot.x, dot.y, size, f"{dot.cloud} {kind}", dot.tooltip)


def _shape(cloud: str, x: float, y: float, size: float, classes: str, tooltip: str = "") -> str:
    """A cloud has a shape besides its colour, for those who see colours otherwise."""
    title = f"<title>{_text(tooltip)}</title>" if tooltip else ""
    if cloud == "azure":
        side = 1.8 * size
        return (f'<rect class="{classes}" x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:.1f}" '
                f'height="{side:.1f}">{title}</rect>')
    if cloud == "gcp":
        up, out = 1.25 * size, 1.15 * size
        return (f'<path class="{classes}" d="M{x:.1f} {y - up:.1f}L{x + out:.1f} {y + up * 0.7:.1f}'
                f'L{x - out:.1f} {y + up * 0.7:.1f}Z">{title}</path>')
    return f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}">{title}</circle>'


def _empty(name: str) -> str:
    return _whole(f'<text class="title" x="{LEFT:g}" y="30">{_text(name)}: nothing here fits and has a price</text>',
                  name)


def _whole(inside: str, name: str) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" width="{WIDTH:g}" '
            f'height="{HEIGHT:g}" role="img">\n<title>{_text(name)}: cost against time</title>\n'
            f"<style>{_STYLE}</style>\n"
            f'<rect class="back" width="{WIDTH:g}" height="{HEIGHT:g}"/>\n{inside}\n</svg>\n')


def _points(dots: Sequence[Dot]) -> str:
    return " ".join(f"{d.x:.1f},{d.y:.1f}" for d in dots)


def _text(text: str) -> str:
    return escape(to_one_line(text), quote=True)


def _some(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _known(value: float | None) -> float:
    if value is None:
        raise ValueError("what fits and has a price has both")
    return value

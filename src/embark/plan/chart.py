"""Cost against time: an SVG file with every setup as a mark and the front as a line, and a plot for terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from embark.catalog.pricing import PURCHASE_NAMES
from embark.events.plotting import Axis, draw, format_time_tick, frame_rows
from embark.formatting import format_duration, format_usd, pluralize, to_one_line
from embark.plan.survey import Bounds, Estimate, Survey, near_front, pareto_front
from embark.plan.svg_chart import Dot, Rule, Shape, Stroke, svg_chart

WIDTH, HEIGHT = 1180, 620
LEFT, RIGHT, TOP, BOTTOM = 76, 820, 92, HEIGHT - 62
LOG_FROM = 6.0  # The largest over the smallest from which an axis is logarithmic.
MARGIN = 0.06
MOST_TICKS = 9
CLOUDS: dict[str, tuple[str, Shape]] = {
    "aws": ("AWS", "circle"), "azure": ("Azure", "square"), "gcp": ("Google Cloud", "triangle"),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_svg(found: Survey, name: str, bounds: Bounds | None = None) -> str:
    """Return the text of a complete file that has no script and needs nothing else."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("embark.plan", ""), autoescape=True, undefined=StrictUndefined)
    values = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP}
    return environment.get_template("chart.svg.j2").render(
        **values, **_contents(found, bounds or Bounds()), name=to_one_line(name)) + "\n"


def _contents(found: Survey, bounds: Bounds) -> dict[str, object]:
    points, letters = _points(found), front_letters(found)
    if not points:
        return {"chart": ""}
    deadline_s, budget_usd = bounds.deadline_s, bounds.budget_usd
    x_axis = axis_of([s for _, s, _ in points] + ([] if deadline_s is None else [deadline_s]), LEFT, RIGHT)
    y_axis = axis_of([usd for *_, usd in points] + ([] if budget_usd is None else [budget_usd]), BOTTOM, TOP)
    on_front = {id(e) for e in pareto_front(found.fitting, found.purchase)}
    front = sorted((point for point in points if id(point[0]) in on_front), key=lambda point: point[1])
    others = [point for point in points if id(point[0]) not in on_front]
    rules = [Rule(deadline_s, "bound", f"deadline {format_duration(deadline_s)}", is_named=True)] if deadline_s else []
    if budget_usd:
        rules.append(Rule(budget_usd, "bound", f"budget {format_usd(budget_usd)}", is_level=True, is_named=True))
    beyond = len(found.fitting) - len(points)
    return {
        "chart": svg_chart(
            x_axis, y_axis, ([(at, format_time_tick(at)) for at in x_axis.time_ticks(MOST_TICKS)],
                             [(at, format_usd(at)) for at in y_axis.ticks(MOST_TICKS)]), rules=rules,
            strokes=[Stroke([s for _, s, _ in front], [usd for *_, usd in front], "front")],
            dots=[*(_dot(e, found, "other" if bounds.keeps(e, found.purchase) else "outside") for e, *_ in others),
                  *(_dot(e, found, "best", letters.get(id(e), "")) for e, *_ in front)]),
        "subtitle": f"{pluralize(len(points), 'setup')} of "
                    f"{pluralize(len({e.setup.machine.name for e, *_ in points}), 'machine')}, paid "
                    f"{PURCHASE_NAMES[found.purchase]}; the line joins the {len(front)} that nothing beats in both"
                    f"{f'; {beyond} more lie far beyond' if beyond else ''}",
        "clouds": [(cloud, *CLOUDS[cloud]) for cloud in CLOUDS
                   if any(e.setup.machine.cloud == cloud for e, *_ in points)],
        "has_rough": any(e.is_rough for e, *_ in points),
        "front": [(letters.get(id(e), ""), e.setup.title, f"{format_usd(usd)}, {format_duration(total_s)}")
                  for e, total_s, usd in front],
    }


def _points(found: Survey) -> list[tuple[Estimate, float, float]]:
    """Return the setups near the front, with their seconds and dollars."""
    return [(e, total_s, usd) for e in near_front(found)
            if (total_s := e.total_s(found.purchase)) is not None and (usd := e.total_usd(found.purchase)) is not None]


def _dot(estimate: Estimate, found: Survey, kind: str, letter: str = "") -> Dot:
    setup, step, cloud = estimate.setup, estimate.prediction.step, estimate.setup.machine.cloud
    total_usd, total_s = estimate.total_usd(found.purchase) or 0.0, estimate.total_s(found.purchase) or 0.0
    region = estimate.price.region if estimate.price else ""
    pace = "" if step is None else f", {step.total_s * 1e3:.3g} ms a step, bound by {step.bound_by}"
    return Dot(
        total_s, total_usd, f"{cloud} {kind}{' rough' if estimate.is_rough else ''}",
        f"{setup.description} in {region}: {format_usd(total_usd)}, {format_duration(total_s)}{pace}",
        CLOUDS[cloud][1], 5.5 if kind == "best" else 4.0, letter)


def axis_of(values: Sequence[float], start: float, stop: float) -> Axis:
    """Return an axis for seconds or dollars, which are all above 0."""
    low, high = min(values), max(values)
    if low == high:
        return Axis(low / 1.5, high * 1.5, start, stop, is_log=True)
    if high / low >= LOG_FROM:
        margin = (high / low) ** MARGIN
        return Axis(low / margin, high * margin, start, stop, is_log=True)
    margin = MARGIN * (high - low)
    return Axis(max(low - margin, low / 2), high + margin, start, stop)


def front_letters(found: Survey) -> dict[int, str]:
    """Return a letter for each estimate of the front, by its `id`, from the fastest on."""
    return {id(e): letter for e, letter in zip(pareto_front(found.fitting, found.purchase), LETTERS, strict=False)}


def plot(found: Survey, *, width: int, height: int) -> list[str]:
    """Return lines of text, at most `width` wide; none where there are not two points to set against each other."""
    points, letters = _points(found), front_letters(found)
    if len(points) < 2:
        return []
    _, times, dollars = zip(*points, strict=True)
    along, up = (math.log10 if max(values) / min(values) >= LOG_FROM else float for values in (times, dollars))
    # Letters come last, so that they lie on top.
    marks = {(along(total_s), up(usd)): letters.get(id(e), "·")
             for e, total_s, usd in sorted(points, key=lambda point: id(point[0]) in letters)}
    front = [(along(total_s), up(usd)) for e, total_s, usd in points if id(e) in letters]
    high, low = format_usd(max(dollars)), format_usd(min(dollars))
    inner = width - max(len(high), len(low)) - 2
    chart = draw(front, list(marks), width=inner, height=height, glyphs=marks)
    if chart is None or inner < 20:
        return []
    return frame_rows(chart, high, low, format_duration(min(times)), format_duration(max(times)))

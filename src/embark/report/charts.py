"""The charts and tables of a run: its curves, and of several runs laid over each other, its time and money, and its
tables on each rank."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
from markupsafe import Markup

from embark.events.metrics import metric
from embark.events.monitoring import SLOW_RANK
from embark.events.plotting import Axis, Floats, Point, means, thin
from embark.events.sharding import plan_rows, rank_line, ranks_text
from embark.events.spending import losses_sentence
from embark.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_duration,
    format_float,
    format_si,
    format_step_time,
    format_usd,
    pluralize,
)
from embark.values import frozen
from .context import RunContext
from .document import Bar, Bars, BarSegment, Block, Folded, Gallery, Key, Picture, Table, Words
from .figures import phase_means, placement_of, prediction_of, rank_times
from .record import EVALS, Record
from .svg_chart import Dot, Rule, Stroke, svg_chart

WIDTH, HEIGHT = 360, 196
LEFT, RIGHT, TOP, BOTTOM = 40, 14, 10, 28
LETTER_WIDTH = 6.2
MAX_POINTS = 700  # Points of a line: about two for each pixel.
MAX_DOTS = 60
FIRST_SHARE = 0.05  # The share of the steps that is far off at first, and would flatten all that follows.

MAX_RULES = 60
MAX_PLAIN = 120  # Points of a plain chart; more are reduced to as many means.
REASONS = {"preempted": "preempted", "interrupted": "stopped by Ctrl-C", "died": "died", "error": "failed"}


Say = Callable[[float], str]


def chart(
    strokes: Sequence[Stroke], rules: Iterable[Rule] = (), *, say_y: Say, from_zero: bool = False, label: str = ""
) -> Markup | None:
    """Draw curves as SVG; `None` where there are not two points to join. The first steps may leave it at the top."""
    strokes = [_thinned(stroke) for stroke in strokes]
    points = [(x, y) for stroke in strokes for x, y in zip(stroke.xs, stroke.ys, strict=True) if math.isfinite(y)]
    if len({x for x, _ in points}) < 2:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    y_axis = _y_axis([y for _, y in (points if from_zero else settled(points))], from_zero=from_zero)
    y_ticks = [(at, say_y(at)) for at in y_axis.ticks(4)]
    x_axis = Axis(first, last, max(LEFT, 12 + LETTER_WIDTH * max(len(words) for _, words in y_ticks)), WIDTH - RIGHT)
    x_ticks = [(at, say_step(at)) for at in x_axis.ticks(5)]

    def exact(value: float) -> str:
        return f"{value:.4f}" if say_y is say_figure and abs(value) < 10 else say_y(value)

    inside = svg_chart(
        x_axis, y_axis, (x_ticks, y_ticks), rules=[rule for rule in rules if first <= rule.at <= last],
        strokes=[stroke for stroke in strokes if stroke.is_joined],
        dots=[Dot(x, y, stroke.sign, f"{stroke.name} {exact(y)} at {say_step(x)}".strip())
              for stroke in strokes if stroke.has_dots for x, y in _dots(stroke)])
    return Markup('<svg viewBox="0 0 {} {}" role="img" class="chart">{}{}</svg>').format(
        WIDTH, HEIGHT, Markup("<title>{}</title>").format(label) if label else "", inside)


def say_figure(value: float) -> str:
    """Format a tick of a plain number with as few digits as it needs."""
    return f"{value:.4g}" if abs(value) < 1e4 else format_si(value)


def say_step(value: float) -> str:
    """Format a step as `2,500`, `20 k` or `1.5 M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (size if unit != 'k' else 1e3):.4g} {unit}"
    return format_count(value)


def settled(points: Sequence[Point]) -> list[Point]:
    """Return the points that set the scale: all, or those after the first steps where these would take most of it."""
    known = [point for point in points if math.isfinite(point[1])]
    steps = [step for step, _ in known] or [0.0]
    start = min(steps) + FIRST_SHARE * (max(steps) - min(steps))
    later = [point for point in known if point[0] >= start]
    return later if 0 < 2 * _spread(later) < _spread(known) else known


def _spread(points: Sequence[Point]) -> float:
    values = [value for _, value in points] or [0.0]
    return max(values) - min(values)


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
    """Return the dots that are shown; always the last one, which people quote."""
    every = math.ceil(len(stroke.xs) / MAX_DOTS) or 1
    known = [(x, y) for x, y in zip(stroke.xs, stroke.ys, strict=True) if math.isfinite(y)]
    return [*known[:-1][::every], *known[-1:]]


@frozen
class LearningCurve:
    """A curve that is shown, and how its figures are formatted."""

    name: str
    say: Say  # Formats the label of a tick.
    tell: Say  # Formats a figure in a sentence.
    from_zero: bool = False
    eval_name: str = ""  # Name of the metric in evaluations; empty if it is the same.


LEARNING = (
    LearningCurve("loss", say_figure, format_float, eval_name="log_loss"),
    LearningCurve("auc", say_figure, format_float),
    LearningCurve("normalized_entropy", say_figure, format_float),
    LearningCurve("calibration", say_figure, format_float),
    LearningCurve("samples_per_s", lambda value: f"{format_si(value)}/s", lambda value: f"{format_si(value)} samples/s",
                  from_zero=True),
    LearningCurve("learning_rate", say_figure, lambda value: f"{value:.3g}", from_zero=True)
)
UNITS: dict[str, Say] = {"B": format_bytes, "s": format_step_time}


def learning_curves(context: RunContext) -> Gallery | None:
    """Draw loss, AUC, NE, rate and learning rate by step; with checkpoints, evaluations and interruptions."""
    record, stops = context.record, context.interruptions
    rules = [*_save_rules(record), *(
        Rule(stop.stopped_step, "stop", f"{REASONS[stop.reason]} at step {format_count(stop.stopped_step)}")
        for stop in stops[-MAX_RULES:])]
    pictures = []
    has_evals = False
    for shown in LEARNING:
        steps, values = record.steps.column(shown.name)
        held = _known(*record.evals.column(shown.eval_name or shown.name))
        strokes = training_strokes(steps, values, "k0", "training")
        if len(held[0]):
            strokes.append(Stroke(*held, "k1", has_dots=True, name="held out"))
        title = metric(shown.name).label
        drawn = chart(strokes, rules, say_y=shown.say, from_zero=shown.from_zero, label=f"{title} by step")
        if drawn is None:
            continue
        has_evals |= bool(len(held[0]))
        note = f"held out {shown.tell(held[1][-1])}" if len(held[0]) else \
            f"training {shown.tell(values[-1])}" if shown.name in EVALS or shown.eval_name else shown.tell(values[-1])
        pictures.append(Picture(capitalize(title), drawn, note))
    if not pictures:
        return None
    keys = [Key("k0", "training"), *([Key("held", "held out")] if has_evals else []),
            *([Key("save", "checkpoint")] if record.save else []), *([Key("stop", "interrupted")] if stops else [])]
    return Gallery(tuple(pictures), tuple(keys))


def overlaid(records: Sequence[Record], names: Sequence[str]) -> Gallery | None:
    """Draw each curve of every run in one picture, each run in its own colour."""
    pictures = []
    for shown in LEARNING:
        strokes = []
        for index, record in enumerate(records):
            strokes += training_strokes(*record.steps.column(shown.name), f"k{index % 8}", names[index])
            held = _known(*record.evals.column(shown.eval_name or shown.name))
            if len(held[0]):
                strokes.append(Stroke(*held, f"k{index % 8}", has_dots=True, is_joined=False,
                                      name=f"{names[index]}, held out"))
        title = metric(shown.name).label
        drawn = chart(strokes, say_y=shown.say, from_zero=shown.from_zero, label=f"{title} by step")
        if drawn is not None:
            pictures.append(Picture(capitalize(title), drawn, "by step"))
    keys = tuple(Key(f"k{index % 8}", name) for index, name in enumerate(names))
    return Gallery(tuple(pictures), (*keys, Key("any", "dots: held out, lines: training"))) if pictures else None


def training_strokes(steps: Floats, values: Floats, sign: str, name: str) -> list[Stroke]:
    """Return a curve of many points as their mean, over all of them faintly."""
    if not np.isfinite(values).any():
        return []
    if len(steps) < 2 * MAX_PLAIN:
        return [Stroke(steps, values, sign, name=name)]
    return [Stroke(steps, values, f"{sign} faint"), Stroke(*means(steps, values, MAX_PLAIN), sign, name=name)]


def points_of(xs: Floats, ys: Floats) -> list[Point]:
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _save_rules(record: Record) -> list[Rule]:
    saves = record.saves
    return [Rule(save.step, "save", f"checkpoint at step {format_count(save.step)}: {format_bytes(save.size_bytes)} in "
                                    f"{format_duration(save.save_s)}")
            for save in saves[:: -(-len(saves) // MAX_RULES) or 1]]


def _known(xs: Floats, ys: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(ys)
    return xs[known], ys[known]


MAX_ROWS = 40


def predicted_and_actual(record: Record) -> list[Block]:
    """Return what `embark plan` predicts for this machine, and what was measured."""
    found = prediction_of(record)
    rows = []
    for row in found["rows"] if found else ():
        predicted, actual, say = row["predicted"], row["actual"], UNITS[row["unit"]]
        if predicted is not None:
            error = MISSING if actual is None or predicted <= 0 else percent_off(predicted, actual)
            rows.append((row["name"], say(predicted), say(actual) if actual is not None else "not measured yet", error))
    if not found or not rows:
        return []
    how = "Predicted from measurements on this kind of machine" if found["is_calibrated"] else \
        "Estimated from data sheets: this kind of machine was not measured"
    note = f"{how} ({found['basis']})." if found["basis"] else f"{how}."
    if found["bound_by"]:
        note += f" Predicted bottleneck: {found['bound_by']}."
    return [Table(("", "predicted", "actual", "off by"), tuple(rows), frozenset({1, 2, 3})), Words(note, is_small=True)]


def money(context: RunContext) -> list[Block]:
    """Return hours, and dollars where a price is known."""
    record, spent, attempts = context.record, context.spent, context.record.attempts()
    if spent is None or record.last_s is None:
        return []
    rows = [("wall time", format_duration(record.last_s - attempts[0].began_s))]
    samples = record.num_samples
    if samples and spent.held_s:
        rows.append(("samples trained on", format_count(samples)))
        rows.append(("machine time per million samples", format_duration(1e6 * spent.held_s / samples)))
    note = context.price.text or "No price is known for where it ran: hours only."
    if spent.usd is not None:
        left, lost = spent.usd_for(spent.left_s), spent.lost.usd if spent.lost.num else None
        amounts = (("spent", spent.usd), ("spent per million samples", 1e6 * spent.usd / samples if samples else None),
                   ("of it on interruptions", min(spent.usd, lost) if lost is not None else None),
                   ("still to spend, at this pace", left or None), ("budget", spent.budget_usd))
        rows += [(label, format_usd(amount)) for label, amount in amounts if amount is not None]
        if context.price.usd_per_hour is None:
            note = f"Price: {format_usd(spent.usd_per_hour or 0.0)} an hour, as given at the start."
    parts = {"training": spent.useful_s, "repeated steps": spent.redone_s, "starting and waiting": spent.waiting_s}
    bars = _share_bars(f"{format_duration(spent.held_s)} of machine time", parts, ["used", "bad", "wait"],
                       format_duration)
    return [*([bars] if bars else []), Table(("", ""), tuple(rows), frozenset({1})), Words(note, is_small=True)]


def faults(context: RunContext) -> list[Block]:
    """Return what interrupted the run, what that cost, and where it resumed."""
    stops, spent = context.interruptions, context.spent
    if not stops:
        return []
    rows = [
        (format_time(stop.stopped_s), REASONS[stop.reason], format_count(stop.stopped_step),
         format_count(stop.resumed_step) if stop.resumed_step is not None else "not yet", format_count(stop.lost_steps),
         format_duration(stop.redone_s), format_duration(stop.down_s) if stop.resumed_s is not None else MISSING)
        for stop in stops[-MAX_ROWS:]
    ]
    columns = ("when", "how", "at step", "resumed from", "steps repeated", "repeated in", "down for")
    note = [Words(f"The last {MAX_ROWS} of {pluralize(len(stops), 'interruption')}.", is_small=True)] \
        if len(stops) > MAX_ROWS else []
    summary = [Words(f"{capitalize(losses_sentence(spent.lost))}.")] if spent is not None else []
    return [*summary, Table(columns, tuple(rows), frozenset({2, 3, 4, 5, 6})), *note]


def ranks(record: Record) -> Bars | None:
    """Return each rank's step, and its wait for input; those that the others wait for in red."""
    times = [rank for rank in rank_times(record) if rank["step_s"]]
    if not times:
        return None
    longest = max(rank["step_s"] for rank in times)
    bars, has_slow = [], False
    shown = sorted(times, key=lambda rank: -rank["step_s"])[:MAX_ROWS]  # of many, the slowest matter most
    for rank in sorted(shown, key=lambda rank: int(rank["rank"])):
        step_s, wait_s = rank["step_s"], min(rank["input_s"] or 0.0, rank["step_s"])
        is_slow = "step_s" in rank["slower_than"]
        has_slow |= is_slow
        pieces = (BarSegment(0.0, wait_s / longest, "wait", f"waiting for input {format_step_time(wait_s)}"),
                  BarSegment(wait_s / longest, step_s / longest, "slow" if is_slow else "used",
                             f"step {format_step_time(step_s)}"))
        bars.append(Bar(f"rank {rank['rank']}", pieces, format_step_time(step_s), "bad" if is_slow else ""))
    keys = (Key("used", "step time, median of the last steps"), Key("wait", "of it waiting for input"),
            *((Key("slow", f"over {SLOW_RANK:g} times the others' time"),) if has_slow else ()))
    note = f"The slowest {MAX_ROWS} of {pluralize(len(times), 'rank')}." if len(times) > MAX_ROWS else ""
    return Bars("Step time by rank", tuple(bars), keys, note)


def phases(record: Record) -> Bars | None:
    """Return the parts of a step."""
    means = {name.replace("_", "-"): seconds for name, seconds in (phase_means(record) or {}).items()}
    return _share_bars("Step time by phase", means, [f"k{index}" for index in range(len(means))], format_step_time)


def _share_bars(
    title: str, parts: Mapping[str, float], signs: Sequence[str], say: Callable[[float], str]
) -> Bars | None:
    """Draw parts of a total, each starting where the one above ends."""
    total = sum(parts.values())
    if total <= 0:
        return None
    bars, start = [], 0.0
    for (label, value), sign in zip(parts.items(), signs, strict=True):
        share = value / total
        bars.append(Bar(label, (BarSegment(start, start + share, sign),), f"{say(value)} · {100 * share:.0f} %"))
        start += share
    return Bars(title, tuple(bars))


def percent_off(predicted: float, actual: float) -> str:
    """Format how much more it was than predicted, as `+3 %`."""
    percent = 100 * (actual / predicted - 1)
    return f"{percent:+.0f} %" if abs(percent) >= 9.5 else f"{percent:+.1f} %"


def format_time(time_s: float | None) -> str:
    """Format a time as `2026-11-15 11:14 UTC`."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC") if time_s else MISSING
    except (ValueError, OverflowError, OSError):
        return MISSING


def tables_on_ranks(record: Record) -> list[Block]:
    """Return a row for tables that are alike, how full the ranks are, and all tables folded."""
    placement = placement_of(record)
    if not placement:
        return []
    tables = placement["tables"]
    short = Table(("tables", "size", "sharding", "bytes"), tuple(plan_rows(tables)), frozenset({3}))
    every = Table(
        ("table", "rows", "width", "sharding", "kernel", "where", "bytes"),
        tuple((table["table"], format_count(table["rows"]), format_count(table["dim"]), table["sharding"],
               table["kernel"], ranks_text(table["ranks"]), format_bytes(table["bytes"])) for table in tables),
        frozenset({1, 2, 6})
    )
    per_rank = rank_line(placement["per_rank"])
    return [short, *([Words(f"{per_rank}.", is_small=True)] if per_rank else []),
            *([Folded(f"All {placement['num_tables']:,} tables", (every,))] if len(tables) > 1 else [])]

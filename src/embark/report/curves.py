"""The curves of a run, and of several laid over each other, drawn as SVG: axes with round ticks, gaps where a value is
no number, marks at steps where something happened."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from embark.events.metrics import metric
from embark.events.plotting import (
    Axis,
    Dot,
    Floats,
    Point,
    Rule,
    Stroke,
    draw,
    format_time_tick,
    frame_rows,
    means,
    svg_chart,
    thin,
)
from embark.formatting import format_bytes, format_count, format_duration, format_float, format_si, format_step_time
from embark.report.context import RunContext
from embark.report.document import Gallery, Key, Picture
from embark.report.record import EVALS, Record
from embark.report.rows import TIME

WIDTH, HEIGHT = 360, 196
LEFT, RIGHT, TOP, BOTTOM = 40, 14, 10, 28
LETTER_WIDTH = 6.2
MAX_POINTS = 700  # Of a line: about two for each pixel.
MAX_DOTS = 60
FIRST_SHARE = 0.05  # Of the steps: the first ones are far off, and would flatten all that follows.

MAX_RULES = 60
MAX_PLAIN = 120  # Of many more points, so many means are drawn.
MAX_LETTERED = 600
LETTERS_WIDTH, LETTERS_HEIGHT = 64, 8
REASONS = {"preempted": "preempted", "interrupted": "stopped by Ctrl-C", "died": "died", "error": "failed"}


Say = Callable[[float], str]


def chart(
    strokes: Sequence[Stroke], rules: Iterable[Rule] = (), *, say_y: Say, say_x: Say | None = None,
    from_zero: bool = False, label: str = "", is_time: bool = False,
) -> Markup | None:
    """Draw curves as SVG; `None` where there are not two points to join. The first steps may leave it at the top."""
    say_x = say_x or say_step
    strokes = [_thinned(stroke) for stroke in strokes]
    points = [(x, y) for stroke in strokes for x, y in zip(stroke.xs, stroke.ys, strict=True) if math.isfinite(y)]
    if len({x for x, _ in points}) < 2:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    y_axis = _y_axis([y for _, y in points] if from_zero else _settled(points, first, last), from_zero=from_zero)
    y_ticks = [(at, say_y(at)) for at in y_axis.ticks(4)]
    x_axis = Axis(first, last, max(LEFT, 12 + LETTER_WIDTH * max(len(words) for _, words in y_ticks)), WIDTH - RIGHT)
    x_ticks = [(at, say_x(at)) for at in (x_axis.time_ticks(5) if is_time else x_axis.ticks(5))]

    def exact(value: float) -> str:
        return f"{value:.4f}" if say_y is say_figure and abs(value) < 10 else say_y(value)

    inside = svg_chart(
        x_axis, y_axis, (x_ticks, y_ticks), rules=[rule for rule in rules if first <= rule.at <= last],
        strokes=[stroke for stroke in strokes if stroke.is_joined],
        dots=[Dot(x, y, stroke.sign, f"{stroke.name} {exact(y)} at {say_x(x)}".strip())
              for stroke in strokes if stroke.has_dots for x, y in _dots(stroke)])
    return Markup('<svg viewBox="0 0 {} {}" role="img" class="chart">{}{}</svg>').format(
        WIDTH, HEIGHT, Markup("<title>{}</title>").format(label) if label else "", inside)


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


@dataclass(frozen=True, slots=True)
class Shown:
    """A curve that is shown, and how its figures are said."""

    name: str
    say: Say  # At the axis.
    tell: Say  # In a sentence.
    from_zero: bool = False
    eval_name: str = ""  # What evaluations call it; the same where it is empty.


def _rate(value: float) -> str:
    return f"{format_si(value)}/s"


def _bytes_rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


LEARNING = (
    Shown("loss", say_figure, format_float, eval_name="log_loss"),
    Shown("auc", say_figure, format_float),
    Shown("normalized_entropy", say_figure, format_float),
    Shown("calibration", say_figure, format_float),
    Shown("samples_per_s", _rate, lambda value: f"{format_si(value)} samples/s", from_zero=True),
    Shown("learning_rate", say_figure, lambda value: f"{value:.3g}", from_zero=True),
)
_Aggregate = Callable[..., Floats]
SYSTEM: tuple[tuple[str, Say, tuple[tuple[str, str, _Aggregate], ...]], ...] = (
    ("processors busy", say_percent, (("", "cpu_percent", np.nanmean),)),
    ("memory of the fullest machine", say_percent, (("", "host_used_bytes/host_bytes", np.nanmax),)),
    ("GPUs busy, mean", say_percent, (("", "gpu.util_percent", np.nanmean),)),
    ("memory of the fullest GPU", say_percent, (("", "gpu.used_bytes/gpu.total_bytes", np.nanmax),)),
    ("power of all GPUs", lambda v: f"{format_si(v)} W", (("", "gpu.power_w", np.nansum),)),
    ("network", _bytes_rate, (("in", "net_in_bytes_per_s", np.nansum), ("out", "net_out_bytes_per_s", np.nansum))),
    ("disk", _bytes_rate, (("read", "disk_read_bytes_per_s", np.nansum),
                           ("written", "disk_write_bytes_per_s", np.nansum))),
    ("slowest and median rank", lambda v: format_step_time(v),
     (("slowest", "step_s", np.nanmax), ("median", "step_s", np.nanmedian))),
)
"""Title, format, and of each line its label, what is measured, and how machines, GPUs or ranks become one value."""


def learning_curves(context: RunContext) -> Gallery | None:
    """Loss, AUC, NE, rate, learning rate by step; with checkpoints, evaluations and interruptions."""
    record, stops = context.record, context.interruptions
    rules = [*_save_rules(record), *(
        Rule(stop.stopped_step, "stop", f"{REASONS[stop.reason]} at step {format_count(stop.stopped_step)}")
        for stop in stops[-MAX_RULES:])]
    pictures = []
    has_evals = has_redone = False
    for shown in LEARNING:
        steps, values = record.steps.column(shown.name)
        held = _known(*record.evals.column(shown.eval_name or shown.name))
        redone = record.steps.redone(shown.name)
        strokes = [*(Stroke(xs, ys, "lost", name="repeated later") for xs, ys in redone),
                   *training_strokes(steps, values, "k0", "training")]
        if len(held[0]):
            strokes.append(Stroke(*held, "k1", has_dots=True, name="held out"))
        title = metric(shown.name).label
        drawn = chart(strokes, rules, say_y=shown.say, from_zero=shown.from_zero, label=f"{title} by step")
        if drawn is None:
            continue
        has_evals |= bool(len(held[0]))
        has_redone |= bool(redone)
        note = f"held out {shown.tell(held[1][-1])}" if len(held[0]) else \
            f"training {shown.tell(values[-1])}" if shown.name in EVALS or shown.eval_name else shown.tell(values[-1])
        pictures.append(Picture(capitalize(title), drawn, note, letters((steps, values), held)))
    if not pictures:
        return None
    keys = [Key("k0", "training"), *([Key("held", "held out")] if has_evals else []),
            *([Key("save", "checkpoint")] if record.save else []), *([Key("stop", "interrupted")] if stops else []),
            *([Key("lost", "repeated later")] if has_redone else [])]
    return Gallery(tuple(pictures), tuple(keys))


def system_curves(record: Record) -> Gallery | None:
    """Processors, memory, GPUs, network and disks by the time since the start."""
    pictures = []
    starts = [event.time_s for event in record.of_kind("start")]
    for title, say, lines in SYSTEM:
        strokes, last = [], []
        for place, (label, what, aggregate) in enumerate(lines):
            times, values = _measured(record, what, aggregate)
            if len(values):
                strokes.append(Stroke(*_by_time(times, values, starts), f"k{place}", name=label))
                last.append(f"{label} {say(values[-1])}".strip())
        drawn = chart(strokes, say_y=say, say_x=format_time_tick, from_zero=True, label=title,
                      is_time=True) if strokes else None
        if drawn is not None:
            keys = tuple(Key(stroke.sign, text) for stroke, text in zip(strokes, last, strict=True))
            is_one = len(strokes) == 1
            pictures.append(Picture(capitalize(title), drawn, last[0] if is_one else "", keys=() if is_one else keys))
    return Gallery(tuple(pictures)) if pictures else None


def _measured(record: Record, what: str, aggregate: _Aggregate) -> tuple[Floats, Floats]:
    """One value for each measurement: `what` of all machines, GPUs or ranks; a ratio in percent."""
    rows = record.ranks if what == "step_s" else record.machines
    columns = rows.last(len(rows))

    def matching(part: str) -> Floats:
        is_gpu, name = part.startswith("gpu."), part.removeprefix("gpu.")
        found = [values for column, values in columns.items()
                 if column.startswith(f"{name}.") or (column.endswith(f".{name}") and (".gpu." in column) == is_gpu)]
        return np.array(found) if found else np.empty((0, 0))

    used, _, total = what.partition("/")
    values = matching(used)
    if total and values.shape == (whole := matching(total)).shape:
        values = 100 * values / np.where(whole > 0, whole, np.nan)
    if not len(values) or (what == "step_s" and len(values) < 2):
        return np.empty(0), np.empty(0)
    known = np.isfinite(values).any(axis=0) & np.isfinite(columns[TIME])
    return columns[TIME][known], aggregate(values[:, known], axis=0)


def overlaid(records: Sequence[Record], names: Sequence[str]) -> Gallery | None:
    """The same curve of every run in one picture, each in its own colour."""
    pictures, by_time = [], []
    for place, record in enumerate(records):
        times, values = record.steps.column("loss", TIME)
        if len(times):
            starts = [event.time_s for event in record.of_kind("start")]
            by_time.append(Stroke(*_by_time(times, values, starts), f"k{place % 8}", name=names[place]))
    for shown in LEARNING:
        strokes = []
        for place, record in enumerate(records):
            strokes += training_strokes(*record.steps.column(shown.name), f"k{place % 8}", names[place])
            held = _known(*record.evals.column(shown.eval_name or shown.name))
            if len(held[0]):
                strokes.append(Stroke(*held, f"k{place % 8}", has_dots=True, is_joined=False,
                                      name=f"{names[place]}, held out"))
        title = metric(shown.name).label
        drawn = chart(strokes, say_y=shown.say, from_zero=shown.from_zero, label=f"{title} by step")
        if drawn is not None:
            pictures.append(Picture(capitalize(title), drawn, "by step"))
    drawn = chart(by_time, say_y=say_figure, say_x=format_time_tick, label="training loss by time", is_time=True)
    if drawn is not None:
        pictures.insert(1, Picture("Training loss", drawn, "by time since the start"))
    keys = tuple(Key(f"k{place % 8}", name) for place, name in enumerate(names))
    return Gallery(tuple(pictures), (*keys, Key("any", "dots: held out, lines: training"))) if pictures else None


def training_strokes(steps: Floats, values: Floats, sign: str, name: str) -> list[Stroke]:
    """A curve of many points: a mean that can be followed, over all of them faintly."""
    if not np.isfinite(values).any():
        return []
    if len(steps) < 2 * MAX_PLAIN:
        return [Stroke(steps, values, sign, name=name)]
    return [Stroke(steps, values, f"{sign} faint"), Stroke(*means(steps, values, MAX_PLAIN), sign, name=name)]


def letters(line: tuple[Floats, Floats], marks: tuple[Floats, Floats]) -> str:
    """The curve in braille, its ends written beside it; empty where there is none."""
    drawn = draw(points_of(*thin(*line, MAX_LETTERED)), points_of(*marks), width=LETTERS_WIDTH, height=LETTERS_HEIGHT,
                 ascii_only=False)
    if drawn is None or drawn.high <= drawn.low:
        return ""
    return "\n".join(frame_rows(drawn, say_figure(drawn.high), say_figure(drawn.low), format_count(drawn.first),
                               format_count(drawn.last), ascii_only=False))


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


def _by_time(times: Floats, values: Floats, starts: Sequence[float]) -> tuple[Floats, Floats]:
    """Since the first start, in order, with a gap where the run was interrupted."""
    gaps = np.array(starts[1:])
    times, values = np.concatenate([times, gaps]), np.concatenate([values, np.full(len(gaps), np.nan)])
    order = np.argsort(times, kind="stable")
    return times[order] - (starts[0] if starts else times.min()), values[order]

"""The curves of a run, and of several laid over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from embark.events.curve import Point, draw
from embark.events.downsample import thin
from embark.events.interruptions import Interruption
from embark.events.names import metric
from embark.events.ticks import format_time_tick
from embark.formatting import format_bytes, format_count, format_duration, format_float, format_si
from embark.report.chart import Say, Sign, Stroke, chart, say_figure, say_percent
from embark.report.document import Gallery, Key, Picture
from embark.report.line import Line, Points
from embark.report.record import Record

MAX_SIGNS = 60
MAX_PLAIN = 120
"""Of many more points, so many means are drawn."""
MAX_LETTERED = 600
LETTERS_WIDTH, LETTERS_HEIGHT = 64, 8
REASONS = {"preempted": "taken away", "interrupted": "stopped by hand", "died": "died", "error": "failed"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A curve that is shown, and how its figures are said."""

    name: str
    say: Say
    """At the axis."""
    tell: Say
    """In a sentence."""
    from_zero: bool = False
    eval_name: str = ""
    """What evaluations call it; the same where it is empty."""


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
SYSTEM: tuple[tuple[str, Say, tuple[tuple[str, str], ...]], ...] = (
    ("processors busy", say_percent, (("cpu_percent", ""),)),
    ("memory of the fullest machine", lambda v: say_percent(100 * v), (("memory_share", ""),)),
    ("GPUs busy, a mean", say_percent, (("gpu_percent", ""),)),
    ("memory of the fullest GPU", lambda v: say_percent(100 * v), (("gpu_memory_share", ""),)),
    ("power of all GPUs", lambda v: f"{format_si(v)} W", (("power_w", ""),)),
    ("network", _bytes_rate, (("net_in_bytes_per_s", "in"), ("net_out_bytes_per_s", "out"))),
    ("disk", _bytes_rate, (("disk_read_bytes_per_s", "read"), ("disk_write_bytes_per_s", "written"))),
    ("slowest and median rank", lambda v: milliseconds(v),
     (("rank_slowest", "slowest"), ("rank_median", "median"))),
)


def learning_curves(record: Record, stops: Sequence[Interruption]) -> Gallery | None:
    """Loss, AUC, NE, rate, learning rate by step; with checkpoints, evaluations and interruptions."""
    signs = [*_save_signs(record), *stop_signs(stops)]
    pictures = []
    has_evals = has_lost = False
    for shown in LEARNING:
        line, held = record.train.get(shown.name, Line()), record.evals.get(shown.eval_name or shown.name, Line())
        strokes = [*(Stroke(p.steps, p.values, "lost", name="done, and done again") for p in line.lost),
                   *training_strokes(line, "k0", "training")]
        if len(held.kept):
            strokes.append(Stroke(held.kept.steps, held.kept.values, "k1", has_dots=True, name="held out"))
        title = metric(shown.name).label
        drawn = chart(strokes, signs, say_y=shown.say, from_zero=shown.from_zero, label=f"{title} by step")
        if drawn is None:
            continue
        has_evals |= bool(len(held.kept))
        has_lost |= bool(line.lost)
        pictures.append(Picture(_capital(title), drawn, _last_words(line, held, shown.tell),
                                letters(_points(line.kept), _points(held.kept))))
    if not pictures:
        return None
    keys = [Key("k0", "training"), *([Key("held", "held out")] if has_evals else []),
            *([Key("save", "checkpoint")] if record.saves else []), *([Key("stop", "stopped")] if stops else []),
            *([Key("lost", "done, and done again")] if has_lost else [])]
    return Gallery(tuple(pictures), tuple(keys))


def system_curves(record: Record) -> Gallery | None:
    """Processors, memory, GPUs, wires, by the time since the start."""
    pictures = []
    began_s = record.attempts[0].start_s if record.attempts else 0.0
    for title, say, names in SYSTEM:
        strokes = []
        if "rank_median" in dict(names) and len(record.machine.ranks) < 2:
            continue
        for place, (name, label) in enumerate(names):
            line = record.machine.lines.get(name)
            if line is not None and len(line.kept):
                # By time nothing is redone: what was lost belongs where it happened.
                points = _by_time([*line.lost, line.kept], record)
                times_s, values = [t - began_s for t, _ in points], [v for _, v in points]
                strokes.append(Stroke(times_s, values, f"k{place}", name=label))
        drawn = chart(strokes, say_y=say, say_x=format_time_tick, from_zero=True, label=title,
                      is_time=True) if strokes else None
        if drawn is not None:
            told = ", ".join(f"{stroke.name} {say(stroke.ys[-1])}".strip() for stroke in strokes)
            keys = tuple(Key(stroke.sign, f"{stroke.name} {say(stroke.ys[-1])}") for stroke in strokes)
            is_one = len(strokes) == 1
            pictures.append(Picture(_capital(title), drawn, told if is_one else "", keys=() if is_one else keys))
    return Gallery(tuple(pictures)) if pictures else None


def overlaid(records: Sequence[Record], names: Sequence[str]) -> Gallery | None:
    """The same curve of every run in one picture, each in its colour."""
    pictures = []
    for shown in LEARNING:
        strokes = []
        for place, record in enumerate(records):
            line, held = record.train.get(shown.name, Line()), record.evals.get(shown.eval_name or shown.name, Line())
            strokes += training_strokes(line, _color(place), names[place])
            if len(held.kept):
                strokes.append(Stroke(held.kept.steps, held.kept.values, _color(place), has_dots=True, is_joined=False,
                                      name=f"{names[place]}, held out"))
        title = metric(shown.name).label
        drawn = chart(strokes, say_y=shown.say, from_zero=shown.from_zero, label=f"{title} by step")
        if drawn is not None:
            pictures.append(Picture(_capital(title), drawn, "by step"))
    by_time = _loss_by_time(records, names)
    if by_time is not None:
        pictures.insert(1, by_time)
    keys = tuple(Key(_color(place), name) for place, name in enumerate(names))
    return Gallery(tuple(pictures), (*keys, Key("any", "held out"))) if pictures else None


def training_strokes(line: Line, sign: str, name: str) -> list[Stroke]:
    """A curve of many points: a mean that can be followed, over all of them faintly."""
    steps, values = line.kept.steps, line.kept.values
    if len(steps) < 2 * MAX_PLAIN:
        return [Stroke(steps, values, sign, name=name)]
    edges = [round(i * len(steps) / MAX_PLAIN) for i in range(MAX_PLAIN + 1)]
    middles = [steps[(a + b) // 2] for a, b in pairwise(edges)]
    means = [_mean(values[a:b]) for a, b in pairwise(edges)]
    return [Stroke(steps, values, f"{sign} faint"), Stroke(middles, means, sign, name=name)]


def stop_signs(stops: Sequence[Interruption]) -> list[Sign]:
    return [Sign(stop.stopped_step, "stop", f"{REASONS[stop.reason]} at step {format_count(stop.stopped_step)}")
            for stop in stops[-MAX_SIGNS:]]


def letters(line: Sequence[Point], marks: Sequence[Point]) -> str:
    """The curve in braille, its ends written beside it; empty where there is none."""
    if len(line) > MAX_LETTERED:
        xs, ys = thin([x for x, _ in line], [y for _, y in line], MAX_LETTERED)
        line = list(zip(xs.tolist(), ys.tolist(), strict=True))
    drawn = draw(line, marks, width=LETTERS_WIDTH, height=LETTERS_HEIGHT, ascii_only=False)
    if drawn is None or drawn.high <= drawn.low:
        return ""
    ends = [say_figure(drawn.high), *[""] * (LETTERS_HEIGHT - 2), say_figure(drawn.low)]
    margin = max(map(len, ends))
    rows = [f"{end:>{margin}} {row}".rstrip() for end, row in zip(ends, drawn.rows, strict=True)]
    first, last = format_count(drawn.first), format_count(drawn.last)
    return "\n".join([*rows, " " * (margin + 1) + first + last.rjust(LETTERS_WIDTH - len(first))])


def milliseconds(seconds: float) -> str:
    """`5.10 ms`: three digits."""
    return f"{1e3 * seconds:#.3g} ms".replace(". ", " ") if seconds < 1 else format_duration(seconds)


def _loss_by_time(records: Sequence[Record], names: Sequence[str]) -> Picture | None:
    strokes = []
    for place, record in enumerate(records):
        points = record.train.get("loss", Line()).kept
        if len(points):
            began_s = record.attempts[0].start_s if record.attempts else points.times_s[0]
            by_time = _by_time([points], record)
            strokes.append(Stroke([t - began_s for t, _ in by_time], [v for _, v in by_time], _color(place),
                                  name=names[place]))
    drawn = chart(strokes, say_y=say_figure, say_x=format_time_tick, label="loss by time", is_time=True)
    return Picture("Loss", drawn, "by time since the start") if drawn is not None else None


def _save_signs(record: Record) -> list[Sign]:
    saves = record.saves
    if len(saves) > MAX_SIGNS:
        saves = saves[:: -(-len(saves) // MAX_SIGNS)]
    return [Sign(save.step, "save", f"checkpoint at step {format_count(save.step)}: {format_bytes(save.size_bytes)} in "
                                    f"{format_duration(save.save_s)}") for save in saves]


def _last_words(line: Line, held: Line, tell: Say) -> str:
    if held.last is not None:
        return f"held out {tell(held.last)}"
    return tell(line.last) if line.last is not None else ""


def _points(points: Points) -> list[Point]:
    return list(zip(points.steps, points.values, strict=True))


def _by_time(pieces: Sequence[Points], record: Record) -> list[Point]:
    """In order, with a gap where the run was away."""
    told = {point for piece in pieces for point in zip(piece.times_s, piece.values, strict=True)}
    gaps = {(attempt.start_s, math.nan) for attempt in record.attempts[1:]}
    return sorted(told | gaps, key=lambda point: point[0])


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _color(place: int) -> str:
    return f"k{place % 8}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

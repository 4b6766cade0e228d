"""What the live terminal shows, laid out for any size: one run in full, or many as rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from embark.events.curve import MARK, Point, draw
from embark.events.downsample import thin
from embark.events.interruptions import losses_sentence
from embark.events.spending import Spending
from embark.formatting import (
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_float,
    format_si,
    pluralize,
    to_encoding,
    to_finite,
    to_float,
    to_one_line,
)
from embark.report.curves import milliseconds
from embark.report.line import Line
from embark.report.machine import share_of, slow_ranks
from embark.report.record import Record
from embark.report.status import Standing, sentence

STYLES = {"running": "bold cyan", "done": "bold green", "stopped": "bold yellow", "failed": "bold red",
          "killed": "bold red", "empty": "dim"}
MAX_WIDTH = 160
CURVES = (("loss", "log_loss", "loss"), ("auc", "auc", "AUC"), ("normalized_entropy", "normalized_entropy", "NE"))
MIN_PANEL = 25
MAX_POINTS = 600
_LABEL = 8
_TICKS = 7
_GAP = 3
_SPARK = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class View:
    """One run as it is at this moment."""

    name: str
    record: Record
    now: Standing
    spent: Spending | None
    is_gone: bool = False
    """Its files are no longer there."""
    is_read: bool = True
    """False: its file is long, and is still being read."""

    @property
    def word(self) -> str:
        return "files are gone" if self.is_gone else self.now.word if self.is_read else "reading"

    @property
    def style(self) -> str:
        return "bold red" if self.is_gone else STYLES[self.now.state] if self.is_read else "dim"


def screen(
    views: Sequence[View], *, width: int, height: int, ascii_only: bool = False, encoding: str = "utf-8"
) -> RenderableType:
    """No wider and no higher than the terminal."""
    width, room = min(width, MAX_WIDTH), height - 1
    pen = _Pen(width, ascii_only, encoding)
    foot = pen.text("Ctrl-C leaves; runs go on without it", "dim")
    if not views:
        return Group(pen.text("no runs yet; embark train starts one", "dim"), foot)
    if len(views) == 1:
        return Group(*_whole(pen, views[0], room)[:room], foot)
    rows = _rows(pen, views, room)
    chosen = next((v for v in views if v.now.state == "running"), views[0])
    below = [] if room - len(views) - 3 < 12 else [Text(""), *_whole(pen, chosen, room - len(views) - 3)]
    return Group(rows, *below[: max(0, room - len(views) - 2)], foot)


def lines_of(view: View) -> Iterator[str]:
    """The same in words, for a pipe."""
    yield f"{view.name}: {view.word}"
    yield f"  {sentence(view.record, view.now)}"
    for label, words in _facts(view):
        if label:
            yield f"  {label:<{_LABEL}} {words}"


class _Pen:
    """Text in letters that the terminal has, cut to its width."""

    def __init__(self, width: int, ascii_only: bool, encoding: str) -> None:
        self.width = width
        self.ascii_only = ascii_only
        self._encoding = encoding

    def text(self, words: str, style: str = "") -> Text:
        return self.line((words, style))

    def line(self, *parts: tuple[str, str]) -> Text:
        text = Text.assemble(*((to_encoding(words, self._encoding), style) for words, style in parts), no_wrap=True,
                             overflow="ellipsis" if not self.ascii_only else "crop")
        text.truncate(self.width, overflow="ellipsis" if not self.ascii_only else "crop")
        return text

    def bar(self, share: float, width: int, style: str) -> list[tuple[str, str]]:
        done = round(min(max(share, 0.0), 1.0) * width)
        full, empty = ("#", "-") if self.ascii_only else ("━", "━")
        return [(full * done, style), (empty * (width - done), "bright_black")]


def _rows(pen: _Pen, views: Sequence[View], room: int) -> Table:
    """As many of the columns as fit."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    wide, wider = pen.width >= 76, pen.width >= 100
    for heading, is_shown, is_right in (
        ("run", True, False), ("", True, False), ("steps", True, True), ("", wider, False), ("loss", True, True),
        ("AUC", True, True), ("samples/s", wide, True), ("left", True, True), ("spent", wider, True),
    ):
        if is_shown:
            table.add_column(heading, justify="right" if is_right else "left", no_wrap=True,
                             overflow="ellipsis" if not pen.ascii_only else "crop")
    for view in views[: max(1, room - 2)]:
        record = view.record
        held = to_finite(record.history.eval.get("auc"))
        auc = held if held is not None else record.history.step.get("auc")
        share = record.steps_done / record.num_steps if record.num_steps else 0.0
        spent = f"${view.spent.usd:,.2f}" if view.spent is not None and view.spent.usd is not None else ""
        left = format_clock(_left_s(view)) if view.now.state == "running" and _left_s(view) is not None else ""
        cells = [
            (pen.text(view.name), True), (pen.text(view.word, view.style), True),
            (pen.text(f"{format_count(record.steps_done)}/{format_count(record.num_steps)}" if record.has_begun else ""), True),
            (pen.line(*pen.bar(share, 10, "cyan")), wider),
            (pen.text(format_float(record.history.step.get("loss")), _loss_style(record)), True),
            (pen.text(format_float(auc)), True), (pen.text(format_si(_rate(view))), wide), (pen.text(left), True),
            (pen.text(spent), wider),
        ]
        table.add_row(*(text for text, is_shown in cells if is_shown))
    return table


def _whole(pen: _Pen, view: View, room: int) -> list[RenderableType]:
    """One run: who, how far, curves, and what else there is to say, the first lines first."""
    lines: list[RenderableType] = [_head(pen, view), _progress(pen, view)]
    facts = [pen.line((f"{label:<{_LABEL}} ", "dim"), (words, _fact_style(label))) for label, words in _facts(view)]
    bars = _bars(pen, view)
    left = room - len(lines) - len(facts) - len(bars)
    curves = _curves(pen, view, min(14, left - 3)) if left >= 7 else []
    if not curves and view.record.train:
        curves = [_figures(pen, view)]
    return [*lines, *curves, *facts, *bars]


def _head(pen: _Pen, view: View) -> Text:
    start = view.record.start
    ranks = pluralize(int(to_finite(start.get("world_size")) or 1), "rank") if start else ""
    device = to_one_line(start.get("device_name") or start.get("device") or "")
    on = " · ".join(filter(None, (device, ranks, to_one_line(start.get("precision", "")))))
    return pen.line((view.name, "bold"), ("  ", ""), (view.word, view.style), (f"  {on}" if on else "", "dim"))


def _progress(pen: _Pen, view: View) -> Text:
    record = view.record
    if not record.num_steps:
        return pen.text(sentence(record, view.now), "dim")
    share = record.steps_done / record.num_steps
    words = f"step {format_count(record.steps_done)}/{format_count(record.num_steps)} "
    left_s = _left_s(view)
    after = f" {100 * share:3.0f} %"
    if not view.is_read:
        after += "  so far"
    elif view.now.state == "running" and left_s is not None:
        after += f"  {format_clock(left_s)} left"
    elif view.now.state == "killed":
        after += f"  silent for {format_duration(view.now.silent_s)}"
    style = {"done": "green", "running": "cyan"}.get(view.now.state, "yellow")
    return pen.line((words, ""), *pen.bar(share, max(4, pen.width - len(words) - len(after)), style), (after, ""))


def _curves(pen: _Pen, view: View, height: int) -> list[RenderableType]:
    num = max(1, min(len(CURVES), pen.width // MIN_PANEL - (pen.width < 100)))
    across = (pen.width - _GAP * (num - 1)) // num
    panels = []
    for name, held_name, title in CURVES[:num]:
        line, held = view.record.train.get(name, Line()), view.record.evals.get(held_name, Line())
        if panel := _panel(pen, title, line, held, across, height):
            panels.append(panel)
    rows: list[RenderableType] = []
    for parts in zip(*panels, strict=True):
        row = Text(no_wrap=True)
        for part in parts:
            part.truncate(across, overflow="crop")
            row.append_text(part).append(" " * (across - part.cell_len + _GAP))
        rows.append(row)
    return [Text(""), *rows, Text("")] if rows else []


def _figures(pen: _Pen, view: View) -> Text:
    """Where there is no room for curves."""
    known = [(title, view.record.train[name].last) for name, _, title in CURVES if name in view.record.train]
    told = "  ".join(f"{title} {format_float(value)}" for title, value in known)
    held = to_finite(view.record.history.eval.get("auc"))
    return pen.line((told, ""), (f"  held out AUC {format_float(held)}" if held is not None else "", "magenta"))


def _panel(pen: _Pen, title: str, line: Line, held: Line, width: int, height: int) -> list[Text]:
    """A line of words, and the rows of the curve."""
    chart = draw(_points(line), _points(held), width=width - _TICKS - 1, height=height - 1, ascii_only=pen.ascii_only)
    rows = [pen.line((f"{title} ", "bold"), (format_float(line.last), _nan_style(line.last)),
                     (f"  held out {format_float(held.last)}" if held.last is not None else "", "magenta"))]
    if chart is None:  # one point, or a loss that is no number: the figure alone
        return [*rows, *(Text("") for _ in range(height - 1))] if len(line.kept) else []
    for place, row in enumerate(chart.rows):
        label = format_float(chart.high) if place == 0 else format_float(chart.low) if place == len(chart.rows) - 1 else ""
        text = Text(f"{label:>{_TICKS}} ", "dim")
        for char in row:
            text.append(char, "not dim magenta" if char in (MARK, "o") else "not dim cyan")
        rows.append(text)
    return rows


def _points(line: Line) -> list[Point]:
    """The first steps are left out where they would press all that follows into a line."""
    steps, values = thin(line.kept.steps, line.kept.values, MAX_POINTS)
    points = [(x, y) for x, y in zip(steps.tolist(), values.tolist(), strict=True) if y == y]
    later = points[len(points) // 20 + 1 :]
    if len(later) > 1 and _spread(points) > 2 * _spread(later) > 0:
        return later
    return points


def _spread(points: Sequence[Point]) -> float:
    return max(y for _, y in points) - min(y for _, y in points)


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """A word and what there is to say under it."""
    record = view.record
    rate, step_s = _rate(view), record.train["step_s"].median if "step_s" in record.train else None
    if rate is not None:
        pace = f"{format_si(rate)} samples/s"
        yield "pace", f"{pace} · {milliseconds(step_s)} a step" if step_s else pace
    if record.machine.last_ranks:
        yield "ranks", _ranks(record.machine.last_ranks)
    if record.saves:
        save = record.saves[-1]
        ago = f" · {format_duration(max(0.0, view.now.silent_s + (record.last_s or save.time_s) - save.time_s))} ago" \
            if view.now.state == "running" else ""
        yield "saved", f"step {format_count(save.step)} · {format_bytes(save.size_bytes)} in {format_duration(save.save_s)}{ago}"
    if view.spent is not None and (told := losses_sentence(view.spent.lost)):
        yield "stops", told
    if view.spent is not None and view.spent.usd is not None:
        to_go = view.spent.usd_for(view.spent.left_s)
        more = f" · ${to_go:,.2f} to go" if to_go else ""
        yield "money", f"${view.spent.usd:,.2f} spent{more}"
    warnings = [note for note in record.notes if note.level == "warning"]
    if view.now.state == "failed" and record.error:
        yield "error", to_one_line(record.error)
    elif warnings:
        yield "warning", to_one_line(warnings[-1].text)
    if view.now.state in ("done", "stopped", "killed") and view.is_read:
        yield "", sentence(record, view.now)


def _bars(pen: _Pen, view: View) -> list[Text]:
    """How busy and how full its machines are, as last told."""
    systems = view.record.machine.systems
    if not systems:
        return []
    gpus = [gpu for one in systems for gpu in one.get("gpus") or () if isinstance(gpu, Mapping)]
    long = max(4, min(20, (pen.width - 54) // 2))
    lines = []
    if gpus:
        power, heat = _known(gpus, "power_w"), _known(gpus, "temperature_c")
        more = "".join((f"  {format_si(sum(power))} W" if power else "", f"  {max(heat):.0f} °C" if heat else ""))
        lines.append(_pair(pen, f"{pluralize(len(gpus), 'GPU')}", _mean(_known(gpus, "util_percent")),
                           _most(gpus, "used_bytes", "total_bytes"), long, more))
    wires = [(f"{word} {format_bytes(sum(known))}/s", known) for word, name in (
        ("in", "net_in_bytes_per_s"), ("out", "net_out_bytes_per_s"), ("read", "disk_read_bytes_per_s"),
        ("write", "disk_write_bytes_per_s")) if (known := _known(systems, name))]
    lines.append(_pair(pen, "CPU", _mean(_known(systems, "cpu_percent")),
                       _most(systems, "host_used_bytes", "host_bytes"), long, ""))
    if wires:
        lines.append(pen.line((f"{'wires':<{_LABEL}} ", "dim"), (" · ".join(words for words, _ in wires), "")))
    return lines


def _pair(pen: _Pen, label: str, busy_percent: float | None, full: float | None, long: int, more: str) -> Text:
    parts: list[tuple[str, str]] = [(f"{label:<{_LABEL}} ", "dim")]
    if busy_percent is not None:
        parts += [("busy ", "dim"), *pen.bar(busy_percent / 100, long, "cyan"), (f" {busy_percent:3.0f} %  ", "")]
    if full is not None:
        style = "red" if full > 0.95 else "yellow" if full > 0.85 else "cyan"
        parts += [("memory ", "dim"), *pen.bar(full, long, style), (f" {100 * full:3.0f} %", "")]
    return pen.line(*parts, (more, "dim"))


def _ranks(times_s: Sequence[float]) -> str:
    usual_s = statistics.median(times_s)
    slow = slow_ranks(dict(enumerate(times_s)))
    if len(times_s) == 1:
        return f"1 · {milliseconds(usual_s)} a step"
    most = max(times_s) or 1.0
    picture = "".join(_SPARK[round(time_s / most * 7)] for time_s in times_s[:64])
    told = f"{len(times_s)} · {milliseconds(usual_s)} a step · {picture}"
    if not slow:
        return told
    worst = max(slow, key=lambda rank: times_s[rank])
    others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    return f"{told} rank {worst}{others} slow: {milliseconds(times_s[worst])}"


def _rate(view: View) -> float | None:
    if view.now.state == "running":
        return to_finite(view.record.history.step.get("samples_per_s"))
    return view.record.samples_per_s


def _left_s(view: View) -> float | None:
    return view.spent.left_s if view.spent is not None and view.spent.left_s else view.record.history.seconds_left


def _loss_style(record: Record) -> str:
    return _nan_style(record.train["loss"].last) if "loss" in record.train else ""


def _nan_style(value: float | None) -> str:
    read = to_float(value)
    return "bold red" if read is not None and read != read else ""


def _fact_style(label: str) -> str:
    return {"error": "red", "warning": "yellow", "": "bold"}.get(label, "")


def _known(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [read for row in rows if (read := to_finite(row.get(name))) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _most(rows: Sequence[Mapping[str, Any]], used: str, total: str) -> float | None:
    return max((share for row in rows if (share := share_of(row, used, total)) is not None), default=None)

"""What the live terminal shows, laid out for any size: one run in full, or many as rows."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from embark.events.curve import Point, draw, sparkline
from embark.events.downsample import thin
from embark.events.interruptions import losses_sentence
from embark.events.spending import Spending
from embark.events.summary import chart_rows
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
    to_one_line,
)
from embark.report.curves import milliseconds, points_of
from embark.report.record import Record, gpus_of, slow_ranks
from embark.report.status import RunStatus

STYLES = {"running": "bold cyan", "finished": "bold green", "stopped": "bold yellow", "waiting": "dim"}
MAX_WIDTH = 160
CURVES = (("loss", "log_loss", "loss"), ("auc", "auc", "AUC"), ("normalized_entropy", "normalized_entropy", "NE"))
MIN_PANEL = 25
MAX_POINTS = 600
_LABEL = 8
_TICKS = 7
_GAP = 3


@dataclass(frozen=True, slots=True)
class View:
    """One run at this moment."""

    name: str
    record: Record
    status: RunStatus
    spent: Spending | None
    is_read: bool = True
    """False: its file is long, and is still being read."""

    @property
    def state(self) -> str:
        return self.status.state

    @property
    def label(self) -> str:
        return self.status.label if self.is_read else "reading"

    @property
    def style(self) -> str:
        return STYLES.get(self.state, "bold red") if self.is_read else "dim"

    @property
    def left_s(self) -> float | None:
        if self.state != "running":
            return None
        return self.spent.left_s if self.spent is not None and self.spent.left_s else self.record.seconds_left

    @property
    def samples_per_s(self) -> float | None:
        newest = to_finite(self.record.step.get("samples_per_s"))
        return newest if self.state == "running" else self.record.samples_per_s

    @property
    def spent_usd(self) -> float | None:
        return None if self.spent is None else self.spent.usd

    def last(self, name: str) -> float | None:
        """The newest value of a curve; NaN where the event has none."""
        step = self.record.step
        return None if name not in step else math.nan if (value := to_finite(step[name])) is None else value


def screen(
    views: Sequence[View], *, width: int, height: int, ascii_only: bool = False, encoding: str = "utf-8"
) -> RenderableType:
    """No wider and no higher than the terminal."""
    width, num_lines = min(width, MAX_WIDTH), height - 1
    pen = _Pen(width, ascii_only, encoding)
    foot = pen.text("Ctrl-C stops watching; the runs continue", "dim")
    if not views:
        return Group(pen.text("no runs yet; embark train starts one", "dim"), foot)
    if len(views) == 1:
        return Group(*_one_run(pen, views[0], num_lines)[:num_lines], foot)
    rows = _rows(pen, views, num_lines)
    chosen = next((view for view in views if view.state == "running"), views[0])
    left = num_lines - len(views) - 3
    below = [] if left < 12 else [Text(""), *_one_run(pen, chosen, left)]
    return Group(rows, *below[: max(0, left + 1)], foot)


def text_lines(view: View) -> Iterator[str]:
    """The same as text, for a pipe."""
    yield f"{view.name}: {view.label}"
    yield f"  {view.status.sentence}"
    for label, text in _facts(view):
        if label:
            yield f"  {label:<{_LABEL}} {text}"


class _Pen:
    """Text in characters that the terminal has, cut to its width."""

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


def _rows(pen: _Pen, views: Sequence[View], num_lines: int) -> Table:
    """As many of the columns as fit."""
    overflow: Literal["ellipsis", "crop"] = "ellipsis" if not pen.ascii_only else "crop"
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    is_wide, is_wider = pen.width >= 76, pen.width >= 100
    columns: list[tuple[str, bool, bool, Callable[[View], Text]]] = [
        ("run", True, False, lambda view: pen.text(view.name)),
        ("", True, False, lambda view: pen.text(view.label, view.style)),
        ("steps", True, True, lambda view: pen.text(_steps(view.record) if view.record.start else "")),
        ("", is_wider, False, lambda view: pen.line(*pen.bar(_share_done(view.record), 10, "cyan"))),
        ("loss", True, True, lambda view: pen.text(format_float(view.record.step.get("loss")),
                                                   _nan_style(view.last("loss")))),
        ("AUC", True, True, lambda view: pen.text(_auc(view.record))),
        ("samples/s", is_wide, True, lambda view: pen.text(format_si(view.samples_per_s))),
        ("left", True, True, lambda view: pen.text(format_clock(view.left_s) if view.left_s is not None else "")),
        ("spent", is_wider, True,
         lambda view: pen.text(f"${view.spent_usd:,.2f}" if view.spent_usd is not None else "")),
    ]
    shown = [(heading, is_right, cell) for heading, is_shown, is_right, cell in columns if is_shown]
    for heading, is_right, _ in shown:
        table.add_column(heading, justify="right" if is_right else "left", no_wrap=True, overflow=overflow)
    for view in views[: max(1, num_lines - 2)]:
        table.add_row(*(cell(view) for _, _, cell in shown))
    return table


def _steps(record: Record) -> str:
    return f"{format_count(record.steps_done)}/{format_count(record.num_steps)}"


def _share_done(record: Record) -> float:
    return record.steps_done / record.num_steps if record.num_steps else 0.0


def _auc(record: Record) -> str:
    held = to_finite(record.eval.get("auc"))
    return format_float(held if held is not None else record.step.get("auc"))


def _one_run(pen: _Pen, view: View, num_lines: int) -> list[RenderableType]:
    """One run: its name, its progress, curves, and facts, the most important first."""
    lines: list[RenderableType] = [_head(pen, view), _progress(pen, view)]
    facts = [pen.line((f"{label:<{_LABEL}} ", "dim"),
                      (text, {"error": "red", "warning": "yellow", "": "bold"}.get(label, "")))
             for label, text in _facts(view)]
    bars = _bars(pen, view)
    left = num_lines - len(lines) - len(facts) - len(bars)
    curves = _curves(pen, view, min(14, left - 3)) if left >= 7 else []
    if not curves and view.record.step:
        known = [(title, view.last(name)) for name, _, title in CURVES]
        text = "  ".join(f"{title} {format_float(value)}" for title, value in known if value is not None)
        held = to_finite(view.record.eval.get("auc"))
        curves = [pen.line((text, ""), (f"  held-out AUC {format_float(held)}" if held is not None else "", "magenta"))]
    return [*lines, *curves, *facts, *bars]


def _head(pen: _Pen, view: View) -> Text:
    start = view.record.start
    ranks = pluralize(int(to_finite(start.get("world_size")) or 1), "rank") if start else ""
    device = to_one_line(start.get("device_name") or start.get("device") or "")
    on = " · ".join(filter(None, (device, ranks, to_one_line(start.get("precision", "")))))
    return pen.line((view.name, "bold"), ("  ", ""), (view.label, view.style), (f"  {on}" if on else "", "dim"))


def _progress(pen: _Pen, view: View) -> Text:
    record = view.record
    if not record.num_steps:
        return pen.text(view.status.sentence, "dim")
    before, after = f"step {_steps(record)} ", f" {100 * _share_done(record):3.0f} %"
    if not view.is_read:
        after += "  so far"
    elif view.left_s is not None:
        after += f"  {format_clock(view.left_s)} left"
    elif view.state == "killed":
        after += f"  silent for {format_duration(view.status.silent_s)}"
    style = {"finished": "green", "running": "cyan"}.get(view.state, "yellow")
    bar = pen.bar(_share_done(record), max(4, pen.width - len(before) - len(after)), style)
    return pen.line((before, ""), *bar, (after, ""))


def _curves(pen: _Pen, view: View, height: int) -> list[RenderableType]:
    num = max(1, min(len(CURVES), pen.width // MIN_PANEL - (pen.width < 100)))
    across = (pen.width - _GAP * (num - 1)) // num
    panels = [_panel(pen, view, curve, across, height) for curve in CURVES[:num]]
    rows: list[RenderableType] = []
    for parts in zip(*filter(None, panels), strict=True):
        row = Text(no_wrap=True)
        for part in parts:
            part.truncate(across, overflow="crop")
            row.append_text(part).append(" " * (across - part.cell_len + _GAP))
        rows.append(row)
    return [Text(""), *rows, Text("")] if rows else []


def _panel(pen: _Pen, view: View, curve: tuple[str, str, str], width: int, height: int) -> list[Text]:
    """A title, and the rows of the curve; the first steps are left out where they would flatten the rest."""
    name, eval_name, title = curve
    last, held = view.last(name), to_finite(view.record.eval.get(eval_name))
    if last is None:
        return []
    rows = [pen.line((f"{title} ", "bold"), (format_float(last), _nan_style(last)),
                     (f"  held out {format_float(held)}" if held is not None else "", "magenta"))]
    steps, values = thin(*view.record.steps.column(name), MAX_POINTS)
    points = [point for point in points_of(steps, values) if math.isfinite(point[1])]
    later = points[len(points) // 20 + 1 :]
    if len(later) > 1 and _spread(points) > 2 * _spread(later) > 0:
        points = later
    chart = draw(points, points_of(*view.record.evals.column(eval_name)), width=width - _TICKS - 1, height=height - 1,
                 ascii_only=pen.ascii_only)
    drawn = chart_rows(chart, _TICKS) if chart else []  # one point, or a loss of NaN: the figure alone
    return [*rows, *drawn, *(Text("") for _ in range(height - 1 - len(drawn)))]


def _spread(points: Sequence[Point]) -> float:
    return max(y for _, y in points) - min(y for _, y in points)


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Labels and what there is to say under them."""
    record, spent = view.record, view.spent
    rate, step_s = view.samples_per_s, record.median("step_s")
    if rate is not None:
        yield "pace", f"{format_si(rate)} samples/s" + (f" · {milliseconds(step_s)} a step" if step_s else "")
    if record.rank_times_s:
        yield "ranks", _ranks(record.rank_times_s)
    if saves := record.saves:
        save = saves[-1]
        ago_s = max(0.0, view.status.silent_s + (record.last_s or save.time_s) - save.time_s)
        ago = f" · {format_duration(ago_s)} ago" if view.state == "running" else ""
        yield "saved", (f"step {format_count(save.step)} · {format_bytes(save.size_bytes)} in "
                        f"{format_duration(save.save_s)}{ago}")
    if spent is not None and (lost := losses_sentence(spent.lost)):
        yield "lost", lost
    if spent is not None and spent.usd is not None:
        to_go = spent.usd_for(spent.left_s)
        yield "cost", f"${spent.usd:,.2f} spent" + (f" · ${to_go:,.2f} to go" if to_go else "")
    warnings = [event.values.get("text", "") for event in record.of_kind("note")
                if event.values.get("level") == "warning"]
    if view.state == "failed" and record.error:
        yield "error", to_one_line(record.error_text)
    elif warnings:
        yield "warning", to_one_line(warnings[-1])
    if view.state in ("finished", "stopped", "killed") and view.is_read:
        yield "", view.status.sentence


def _bars(pen: _Pen, view: View) -> list[Text]:
    """How busy and how full its machines are."""
    systems = view.record.systems
    if not systems:
        return []
    gpus = [gpu for system in systems for gpu in gpus_of(system)]
    length = max(4, min(20, (pen.width - 54) // 2))
    lines = []
    if gpus:
        power, heat = _known(gpus, "power_w"), _known(gpus, "temperature_c")
        more = "".join((f"  {format_si(sum(power))} W" if power else "", f"  {max(heat):.0f} °C" if heat else ""))
        lines.append(_pair(pen, pluralize(len(gpus), "GPU"), _known(gpus, "util_percent"),
                           _fullest(gpus, "used_bytes", "total_bytes"), length, more))
    lines.append(_pair(pen, "CPU", _known(systems, "cpu_percent"), _fullest(systems, "host_used_bytes", "host_bytes"),
                       length, ""))
    rates = [f"{label} {format_bytes(sum(known))}/s" for label, name in (
        ("in", "net_in_bytes_per_s"), ("out", "net_out_bytes_per_s"), ("read", "disk_read_bytes_per_s"),
        ("write", "disk_write_bytes_per_s")) if (known := _known(systems, name))]
    if rates:
        lines.append(pen.line((f"{'I/O':<{_LABEL}} ", "dim"), (" · ".join(rates), "")))
    return lines


def _pair(pen: _Pen, label: str, busy: Sequence[float], full: float | None, length: int, more: str) -> Text:
    parts: list[tuple[str, str]] = [(f"{label:<{_LABEL}} ", "dim")]
    if busy:
        percent = sum(busy) / len(busy)
        parts += [("busy ", "dim"), *pen.bar(percent / 100, length, "cyan"), (f" {percent:3.0f} %  ", "")]
    if full is not None:
        style = "red" if full > 0.95 else "yellow" if full > 0.85 else "cyan"
        parts += [("memory ", "dim"), *pen.bar(full, length, style), (f" {100 * full:3.0f} %", "")]
    return pen.line(*parts, (more, "dim"))


def _ranks(times_s: Sequence[float]) -> str:
    text = f"{len(times_s)} · {milliseconds(statistics.median(times_s))} a step"
    if len(times_s) > 1:
        text += f" · {sparkline(times_s[:64], 0.0, max(times_s), 64)}"
    if slow := slow_ranks(dict(enumerate(times_s))):
        worst = max(slow, key=lambda rank: times_s[rank])
        others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
        text += f" rank {worst}{others} slow: {milliseconds(times_s[worst])}"
    return text


def _nan_style(value: float | None) -> str:
    return "bold red" if value is not None and math.isnan(value) else ""


def _known(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for row in rows if (value := to_finite(row.get(name))) is not None]


def _fullest(rows: Sequence[Mapping[str, Any]], used: str, total: str) -> float | None:
    pairs = [(to_finite(row.get(used)), to_finite(row.get(total))) for row in rows]
    return max((part / whole for part, whole in pairs if part is not None and whole), default=None)

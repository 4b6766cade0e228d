"""Runs live in a terminal: read as they grow, and laid out for any size, one run in full or many as rows."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from embark.dashboard.runs import LOOK_REMOTE_S, Runs
from embark.events.plotting import draw, sparkline, thin
from embark.events.spending import Spending, losses_sentence
from embark.events.summary import chart_rows
from embark.formatting import (
    format_auc,
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_float,
    format_si,
    format_step_time,
    format_usd,
    pluralize,
    to_encoding,
    to_finite,
    to_one_line,
)
from embark.report.context import Liveness
from embark.report.curves import points_of
from embark.report.record import Record, gpus_of, slow_ranks
from embark.report.run_files import Finder

READ_S = 0.4  # How long files are read before the screen is drawn again.
_TICK_S = 0.05
STYLES = {"running": "bold cyan", "finished": "bold green", "stopped": "bold yellow", "waiting": "dim"}
MAX_WIDTH = 160
CURVES = (("loss", "log_loss", "loss"), ("auc", "auc", "AUC"), ("normalized_entropy", "normalized_entropy", "NE"))
MIN_PANEL = 25
MAX_POINTS = 600
_LABEL, _TICKS, _GAP = 8, 7, 3


@dataclass(frozen=True, slots=True)
class View:
    """One run at this moment."""

    name: str
    record: Record
    status: Liveness
    spent: Spending | None
    is_read: bool = True  # False: its file is long, and is still being read.

    @property
    def label(self) -> str:
        return self.status.label if self.is_read else "reading"

    @property
    def style(self) -> str:
        return STYLES.get(self.status.state, "bold red") if self.is_read else "dim"

    @property
    def left_s(self) -> float | None:
        if self.status.state != "running":
            return None
        return self.spent.left_s if self.spent is not None and self.spent.left_s else self.record.seconds_left

    @property
    def samples_per_s(self) -> float | None:
        newest = to_finite(self.record.step.get("samples_per_s"))
        return newest if self.status.state == "running" else self.record.samples_per_s

    @property
    def steps(self) -> str:
        return f"{format_count(self.record.steps_done)}/{format_count(self.record.num_steps)}"

    def last(self, name: str) -> float | None:
        """The newest value of a curve; NaN where the event has none."""
        step = self.record.step
        return None if name not in step else math.nan if (value := to_finite(step[name])) is None else value


def watch_terminal(
    find: Finder, *, console: Console, every_s: float = 1.0, until: Callable[[], bool] | None = None
) -> None:
    """Show runs until Ctrl-C, until all of them are finished, or until `until` says so; in a pipe print them once."""
    watched = _Watched(find)
    has_more = watched.read()
    if console.is_terminal and not console.is_dumb_terminal:
        # The alternate screen: what was in the terminal is there again when this ends.
        with suppress(KeyboardInterrupt), Live(watched, console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            while not watched.is_over and _wait(0.0 if has_more else every_s, until):
                has_more = watched.read()
                live.refresh()
        lines = [f"{view.name}: {view.status.sentence}" for view in watched.views()]
    else:
        while has_more:
            has_more = watched.read()
        lines = [line for view in watched.views() for line in text_lines(view)] or ["no runs yet"]
    for line in lines:
        console.print(Text(to_encoding(line, console.encoding)), soft_wrap=True)


def _wait(seconds: float, until: Callable[[], bool] | None) -> bool:
    """False as soon as it is enough."""
    end_s = time.monotonic() + seconds
    while until is None or not until():
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return True
        time.sleep(min(_TICK_S, left_s))
    return False


class _Watched:
    """The runs, drawn to the size that the terminal has at this moment."""

    def __init__(self, find: Finder) -> None:
        self._runs = Runs(find)
        self._looked_s: dict[str, float] = {}

    def read(self) -> bool:
        """Read for a while; True where there is more to read at once."""
        self._runs.find()
        runs, has_more = self._runs.all(), False
        for run in runs:
            now_s = time.monotonic()
            if run.files.is_remote and now_s - self._looked_s.get(run.id, -LOOK_REMOTE_S) < LOOK_REMOTE_S:
                continue
            deadline_s = now_s + READ_S / len(runs)
            while (is_unread := run.look(time.time())) and time.monotonic() < deadline_s:
                pass
            has_more |= is_unread
            if not is_unread:
                self._looked_s[run.id] = now_s
        return has_more

    @property
    def is_over(self) -> bool:
        views = self.views()
        return bool(views) and all(view.status.state == "finished" and view.is_read for view in views)

    def views(self) -> list[View]:
        now_s = time.time()
        return [View(to_one_line(run.name), run.record, run.status(now_s), run.spent(now_s), not run.is_sampled)
                for run in self._runs.all()]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        yield screen(self.views(), width=width, height=height, ascii_only=options.ascii_only, encoding=console.encoding)


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
    chosen = next((view for view in views if view.status.state == "running"), views[0])
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


@dataclass(frozen=True, slots=True)
class _Pen:
    """Text in characters that the terminal has, cut to its width."""

    width: int
    ascii_only: bool
    encoding: str

    @property
    def overflow(self) -> Literal["ellipsis", "crop"]:
        return "crop" if self.ascii_only else "ellipsis"

    def text(self, words: str, style: str = "") -> Text:
        return self.line((words, style))

    def line(self, *parts: tuple[str, str]) -> Text:
        text = Text.assemble(*((to_encoding(words, self.encoding), style) for words, style in parts), no_wrap=True,
                             overflow=self.overflow)
        text.truncate(self.width, overflow=self.overflow)
        return text

    def bar(self, share: float, width: int, style: str) -> list[tuple[str, str]]:
        done = round(min(max(share, 0.0), 1.0) * width)
        full, empty = ("#", "-") if self.ascii_only else ("━", "━")
        return [(full * done, style), (empty * (width - done), "bright_black")]


def _rows(pen: _Pen, views: Sequence[View], num_lines: int) -> Table:
    """As many of the columns as fit."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    is_wide, is_wider = pen.width >= 76, pen.width >= 100
    columns: list[tuple[str, bool, bool, Callable[[View], Text]]] = [
        ("run", True, False, lambda view: pen.text(view.name)),
        ("", True, False, lambda view: pen.text(view.label, view.style)),
        ("steps", True, True, lambda view: pen.text(view.steps if view.record.start else "")),
        ("", is_wider, False, lambda view: pen.line(*pen.bar(view.record.share_done, 10, "cyan"))),
        ("train loss", True, True, lambda view: pen.text(format_float(view.record.step.get("loss")),
                                                         _nan_style(view.last("loss")))),
        ("held-out AUC", True, True, lambda view: pen.text(format_float(view.record.eval.get("auc")))),
        ("samples/s", is_wide, True, lambda view: pen.text(format_si(view.samples_per_s))),
        ("left", True, True, lambda view: pen.text(format_clock(view.left_s) if view.left_s is not None else "")),
        ("spent", is_wider, True, lambda view: pen.text(
            format_usd(view.spent.usd) if view.spent is not None and view.spent.usd is not None else "")),
    ]
    shown = [(heading, is_right, cell) for heading, is_shown, is_right, cell in columns if is_shown]
    for heading, is_right, _ in shown:
        table.add_column(heading, justify="right" if is_right else "left", no_wrap=True, overflow=pen.overflow)
    for view in views[: max(1, num_lines - 2)]:
        table.add_row(*(cell(view) for _, _, cell in shown))
    return table


def _one_run(pen: _Pen, view: View, num_lines: int) -> list[RenderableType]:
    """One run: its name, its progress, curves, and facts, the most important first."""
    start = view.record.start
    ranks = pluralize(int(to_finite(start.get("world_size")) or 1), "rank") if start else ""
    device = to_one_line(start.get("device_name") or start.get("device") or "")
    on = " · ".join(filter(None, (device, ranks, to_one_line(start.get("precision", "")))))
    head = pen.line((view.name, "bold"), ("  ", ""), (view.label, view.style), (f"  {on}" if on else "", "dim"))
    facts = [pen.line((f"{label:<{_LABEL}} ", "dim"),
                      (text, {"error": "red", "warning": "yellow", "": "bold"}.get(label, "")))
             for label, text in _facts(view)]
    bars = _bars(pen, view)
    left = num_lines - 2 - len(facts) - len(bars)
    curves = _curves(pen, view, min(14, left - 3)) if left >= 7 else []
    if not curves and view.record.step:
        known = [(title, view.last(name)) for name, _, title in CURVES]
        text = "  ".join(f"{title} {format_float(value)}" for title, value in known if value is not None)
        held = to_finite(view.record.eval.get("auc"))
        held_out = f"  held-out AUC {format_float(held)}" if held is not None else ""
        curves = [pen.line((f"training {text}", ""), (held_out, "magenta"))]
    return [head, _progress(pen, view), *curves, *facts, *bars]


def _progress(pen: _Pen, view: View) -> Text:
    record = view.record
    if not record.num_steps:
        return pen.text(view.status.sentence, "dim")
    before, after = f"step {view.steps} ", f" {100 * record.share_done:3.0f} %"
    if not view.is_read:
        after += "  so far"
    elif view.left_s is not None:
        after += f"  {format_clock(view.left_s)} left"
    elif view.status.state == "killed":
        after += f"  silent for {format_duration(view.status.silent_s)}"
    style = {"finished": "green", "running": "cyan"}.get(view.status.state, "yellow")
    bar = pen.bar(record.share_done, max(4, pen.width - len(before) - len(after)), style)
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
    shown = format_auc(view.record.step) if name == "auc" else format_float(last)
    rows = [pen.line((f"train {title} ", "bold"), (shown, _nan_style(last)),
                     (f"  held out {format_float(held)}" if held is not None else "", "magenta"))]
    steps, values = thin(*view.record.steps.column(name), MAX_POINTS)
    points = [point for point in points_of(steps, values) if math.isfinite(point[1])]
    later = points[len(points) // 20 + 1 :]
    if len(later) > 1 and np.ptp(points, axis=0)[1] > 2 * np.ptp(later, axis=0)[1] > 0:
        points = later
    chart = draw(points, points_of(*view.record.evals.column(eval_name)), width=width - _TICKS - 1, height=height - 1,
                 ascii_only=pen.ascii_only)
    drawn = chart_rows(chart, _TICKS) if chart else []  # one point, or a loss of NaN: the figure alone
    return [*rows, *drawn, *(Text("") for _ in range(height - 1 - len(drawn)))]


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Labels and what there is to say under them."""
    record, spent = view.record, view.spent
    rate, step_s = view.samples_per_s, record.median("step_s")
    if rate is not None:
        yield "pace", f"{format_si(rate)} samples/s" + (f" · {format_step_time(step_s)} a step" if step_s else "")
    if record.traffic:
        yield "traffic", record.traffic.sentence()
    if record.rank_times_s:
        yield "ranks", _ranks(record.rank_times_s)
    if saves := record.saves:
        save = saves[-1]
        ago_s = max(0.0, view.status.silent_s + (record.last_s or save.time_s) - save.time_s)
        ago = f" · {format_duration(ago_s)} ago" if view.status.state == "running" else ""
        yield "saved", (f"step {format_count(save.step)} · {format_bytes(save.size_bytes)} in "
                        f"{format_duration(save.save_s)}{ago}")
    if spent is not None and (lost := losses_sentence(spent.lost)):
        yield "lost", lost
    if spent is not None and spent.usd is not None:
        to_go = spent.usd_for(spent.left_s)
        yield "cost", f"{format_usd(spent.usd)} spent" + (f" · {format_usd(to_go)} to go" if to_go else "")
    warnings = [event.values.get("text", "") for event in record.of_kind("note")
                if event.values.get("level") == "warning"]
    if view.status.state == "failed" and record.error:
        yield "error", to_one_line(record.error_text)
    elif warnings:
        yield "warning", to_one_line(warnings[-1])
    for one in record.quality.findings():
        yield "look at", f"{to_one_line(one.cause)} Next: {one.fix}."
    if view.status.state in ("finished", "stopped", "killed") and view.is_read:
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
    text = f"{len(times_s)} · {format_step_time(statistics.median(times_s))} a step"
    if len(times_s) > 1:
        text += f" · {sparkline(times_s[:64], 0.0, max(times_s), 64)}"
    if slow := slow_ranks(dict(enumerate(times_s))):
        worst = max(slow, key=lambda rank: times_s[rank])
        others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
        text += f" rank {worst}{others} slow: {format_step_time(times_s[worst])}"
    return text


def _nan_style(value: float | None) -> str:
    return "bold red" if value is not None and math.isnan(value) else ""


def _known(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for row in rows if (value := to_finite(row.get(name))) is not None]


def _fullest(rows: Sequence[Mapping[str, Any]], used: str, total: str) -> float | None:
    pairs = [(to_finite(row.get(used)), to_finite(row.get(total))) for row in rows]
    return max((part / whole for part, whole in pairs if part is not None and whole), default=None)

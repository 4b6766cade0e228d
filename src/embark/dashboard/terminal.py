"""Runs live in a terminal: read as they grow, and laid out for any size, one run in full or many as rows."""

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from embark.dashboard.runs import LOOK_REMOTE_S, Runs
from embark.events.plotting import MARK, draw, sparkline, thin
from embark.events.spending import Spending, losses_sentence
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
from embark.report.charts import points_of
from embark.report.context import Liveness
from embark.report.record import Record, gpus_of, slow_ranks
from embark.report.run_files import Finder

READ_S = 0.4  # How long files are read before the screen is drawn again.
_TICK_S = 0.05
STYLES = {"running": "bold cyan", "finished": "bold green", "stopped": "bold yellow", "waiting": "dim"}
MAX_WIDTH = 160
CURVES = (("loss", "log_loss", "loss"), ("auc", "auc", "AUC"), ("normalized_entropy", "normalized_entropy", "NE"))
MIN_PANEL = 25
MAX_POINTS = 600
MAX_HEIGHT = 14  # Lines of a curve with its title.
BAR = "━"
_LABEL, _TICKS, _GAP = 8, 7, 3

Line = list[tuple[str, str]]  # Words and their styles.


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
        record = self.record
        return f"{format_count(record.steps_done)}/{format_count(record.num_steps)}" if record.start else ""

    def last(self, name: str) -> float | None:
        """Return the newest value of a curve; NaN where the event has none."""
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
    """Wait; False as soon as `until` says that it is enough."""
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
        return [View(to_one_line(run.name), run.record, run.status(now_s), run.spent(now_s), run.share_read == 1.0)
                for run in self._runs.all()]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        yield screen(self.views(), width=width, height=height, ascii_only=options.ascii_only, encoding=console.encoding)


def screen(
    views: Sequence[View], *, width: int, height: int, ascii_only: bool = False, encoding: str = "utf-8"
) -> Group:
    """Draw the runs no wider and no higher than the terminal: one in full, or several as rows above one that runs."""
    width, num_lines = min(width, MAX_WIDTH), height - 1
    if not views:
        lines: list[Line] = [[("no runs yet; embark train starts one", "dim")]]
    elif len(views) == 1:
        lines = _one_run(views[0], width, num_lines, ascii_only=ascii_only)
    else:
        lines = _rows(views, width)
        left = num_lines - len(lines) - 1
        if left >= 12:
            chosen = next((view for view in views if view.status.state == "running"), views[0])
            lines += [[], *_one_run(chosen, width, left, ascii_only=ascii_only)]
    shown = [*lines[:num_lines], [("Ctrl-C stops watching; the runs continue", "dim")]]
    return Group(*(_text(line, width, encoding, ascii_only=ascii_only) for line in shown))


def _text(line: Line, width: int, encoding: str, *, ascii_only: bool) -> Text:
    """Put a line into characters that the terminal has, cut to its width."""
    parts = [(to_encoding(words.replace(BAR, "#") if ascii_only else words, encoding), style) for words, style in line]
    text = Text.assemble(*parts, no_wrap=True)
    text.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return text


def text_lines(view: View) -> Iterator[str]:
    """Yield what there is to say about a run, for a pipe."""
    yield f"{view.name}: {view.label}"
    yield f"  {view.status.sentence}"
    for label, text in _facts(view):
        if label:
            yield f"  {label:<{_LABEL}} {text}"


def _rows(views: Sequence[View], width: int) -> list[Line]:
    """Draw a row for each run, with as many of the columns as fit; the last columns are left out first."""
    columns = {"run": [view.name for view in views], "state": [view.label for view in views],
               "steps": [view.steps for view in views],
               "train loss": [format_float(view.record.step.get("loss")) for view in views],
               "held-out AUC": [format_float(view.record.eval.get("auc")) for view in views],
               "left": [format_clock(view.left_s) if view.left_s is not None else "" for view in views],
               "samples/s": [format_si(view.samples_per_s) for view in views],
               "spent": [format_usd(view.spent.usd) if view.spent and view.spent.usd is not None else ""
                         for view in views]}
    widths = {title: max(len(title), *map(len, cells)) for title, cells in columns.items()}
    while len(widths) > 2 and sum(widths.values()) + 2 * (len(widths) - 1) > width:
        widths.popitem()
    rows: list[Line] = [[(f"{title:<{size}}  " if title in ("run", "state") else f"{title:>{size}}  ", "dim")
                         for title, size in widths.items()]]
    for index, view in enumerate(views):
        styles = {"state": view.style, "train loss": _nan_style(view.last("loss"))}
        rows.append([(f"{columns[title][index]:{'<' if title in ('run', 'state') else '>'}{size}}  ",
                      styles.get(title, "")) for title, size in widths.items()])
    return rows


def _one_run(view: View, width: int, num_lines: int, *, ascii_only: bool) -> list[Line]:
    """Draw one run: its name, its progress, curves, and facts, the most important first."""
    start = view.record.start
    ranks = pluralize(int(to_finite(start.get("world_size")) or 1), "rank") if start else ""
    device = to_one_line(start.get("device_name") or start.get("device") or "")
    on = " · ".join(filter(None, (device, ranks, to_one_line(start.get("precision", "")))))
    head = [(view.name, "bold"), ("  ", ""), (view.label, view.style), (f"  {on}", "dim")]
    styles = {"error": "red", "warning": "yellow", "": "bold"}
    facts: list[Line] = [[(f"{label:<{_LABEL}} ", "dim"), (text, styles.get(label, ""))]
                         for label, text in _facts(view)]
    left = num_lines - 2 - len(facts)
    curves = _curves(view, width, min(MAX_HEIGHT, left - 3), ascii_only=ascii_only) if left >= 7 else []
    if not curves and view.record.step:
        known = [(title, view.last(name)) for name, _, title in CURVES]
        text = "  ".join(f"{title} {format_float(value)}" for title, value in known if value is not None)
        held = to_finite(view.record.eval.get("auc"))
        curves = [[(f"training {text}", ""),
                   (f"  held-out AUC {format_float(held)}" if held is not None else "", "magenta")]]
    return [head, _progress(view, width), *curves, *facts]


def _progress(view: View, width: int) -> Line:
    record = view.record
    if not record.num_steps:
        return [(view.status.sentence, "dim")]
    before, after = f"step {view.steps} ", f" {100 * record.share_done:3.0f} %"
    if not view.is_read:
        after += "  so far"
    elif view.left_s is not None:
        after += f"  {format_clock(view.left_s)} left"
    elif view.status.state == "killed":
        after += f"  silent for {format_duration(view.status.silent_s)}"
    style = {"finished": "green", "running": "cyan"}.get(view.status.state, "yellow")
    length = max(4, width - len(before) - len(after))
    done = round(min(max(record.share_done, 0.0), 1.0) * length)
    return [(before, ""), (BAR * done, style), (" " * (length - done), ""), (after, "")]


def _curves(view: View, width: int, height: int, *, ascii_only: bool) -> list[Line]:
    num = max(1, min(len(CURVES), width // MIN_PANEL - (width < 100)))
    across = (width - _GAP * (num - 1)) // num
    panels = [_panel(view, curve, across, height, ascii_only=ascii_only) for curve in CURVES[:num]]
    rows: list[Line] = []
    for parts in zip(*filter(None, panels), strict=True):
        row: Line = []
        for part in parts:
            row += [*part, (" " * (across + _GAP - sum(len(words) for words, _ in part)), "")]
        rows.append(row)
    return [[], *rows, []] if rows else []


def _panel(view: View, curve: tuple[str, str, str], width: int, height: int, *, ascii_only: bool) -> list[Line]:
    """Draw a title and a curve; the first steps are left out where they would flatten the rest."""
    name, eval_name, title = curve
    last, held = view.last(name), to_finite(view.record.eval.get(eval_name))
    if last is None:
        return []
    shown = format_auc(view.record.step) if name == "auc" else format_float(last)
    rows: list[Line] = [[(f"train {title} ", "bold"), (shown, _nan_style(last)),
                         (f"  held out {format_float(held)}" if held is not None else "", "magenta")]]
    steps, values = thin(*view.record.steps.column(name), MAX_POINTS)
    points = [point for point in points_of(steps, values) if math.isfinite(point[1])]
    later = points[len(points) // 20 + 1 :]
    if len(later) > 1 and np.ptp(points, axis=0)[1] > 2 * np.ptp(later, axis=0)[1] > 0:
        points = later
    chart = draw(points, points_of(*view.record.evals.column(eval_name)), width=width - _TICKS - 1, height=height - 1,
                 ascii_only=ascii_only)
    if chart is not None:  # else one point, or a loss of NaN: the figure alone
        ends = [format_float(chart.high), *[""] * (height - 3), format_float(chart.low)]
        rows += [[(f"{end:>{_TICKS}} ", "dim"), *((part, "magenta" if part in (MARK, "o") else "cyan")
                                                  for part in re.split(f"([{MARK}o])", row) if part)]
                 for end, row in zip(ends, chart.rows, strict=True)]
    return [*rows, *([] for _ in range(height - len(rows)))]


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Yield labels and what there is to say under them."""
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
    yield from _machines(record.systems)
    warnings = [event.values.get("text", "") for event in record.of_kind("note")
                if event.values.get("level") == "warning"]
    if view.status.state == "failed" and record.error:
        yield "error", to_one_line(record.error_text)
    elif warnings:
        yield "warning", to_one_line(warnings[-1])
    for finding in record.quality.findings():
        yield "look at", f"{to_one_line(finding.cause)} Next: {finding.fix}."
    if view.status.state in ("finished", "stopped", "killed") and view.is_read:
        yield "", view.status.sentence


def _machines(systems: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield how busy and how full the GPUs and hosts are, and what they read and write."""
    gpus = [gpu for system in systems for gpu in gpus_of(system)]
    for label, rows, (busy, used, total) in (
            (pluralize(len(gpus), "GPU"), gpus, ("util_percent", "used_bytes", "total_bytes")),
            ("CPU", systems, ("cpu_percent", "host_used_bytes", "host_bytes"))):
        percents, power, heat = _known(rows, busy), _known(rows, "power_w"), _known(rows, "temperature_c")
        shares = [part / whole for row in rows if (part := to_finite(row.get(used))) is not None
                  and (whole := to_finite(row.get(total)))]
        parts = (f"busy {sum(percents) / len(percents):.0f} %" if percents else "",
                 f"memory {100 * max(shares):.0f} %" if shares else "",
                 f"{format_si(sum(power))} W" if power else "", f"{max(heat):.0f} °C" if heat else "")
        if any(parts):
            yield label, " · ".join(filter(None, parts))
    rates = [f"{label} {format_bytes(sum(known))}/s" for label, name in (
        ("in", "net_in_bytes_per_s"), ("out", "net_out_bytes_per_s"), ("read", "disk_read_bytes_per_s"),
        ("write", "disk_write_bytes_per_s")) if (known := _known(systems, name))]
    if rates:
        yield "I/O", " · ".join(rates)


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

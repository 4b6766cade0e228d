"""Runs live in a terminal: read as they grow, one run in full or many as rows."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from embark.events.plotting import sparkline, thin
from embark.events.sinks.terminal import Encoded, ProgressLine
from embark.events.spending import Spending, losses_sentence
from embark.events.summary import Panel, curves
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
from embark.report.charts import points_of, settled
from embark.report.context import Liveness
from embark.report.record import Record, gpus_of, slow_ranks
from embark.report.run_files import Finder
from embark.values import JsonMap, frozen
from .runs import Runs

MAX_POINTS = 600
STYLES = {"running": "bold cyan", "finished": "bold green", "stopped": "bold yellow", "waiting": "dim"}
_LABEL = 8


@frozen
class View:
    """One run at this moment."""

    name: str
    record: Record
    status: Liveness
    spent: Spending | None
    is_read: bool = True  # False: its file is long, and is still being read.

    @property
    def label(self) -> Text:
        style = STYLES.get(self.status.state, "bold red") if self.is_read else "dim"
        return Text(self.status.label if self.is_read else "reading", style)

    @property
    def samples_per_s(self) -> float | None:
        newest = to_finite(self.record.step.get("samples_per_s"))
        return newest if self.status.state == "running" else self.record.samples_per_s


def watch_terminal(
    find: Finder, *, console: Console, every_s: float = 1.0, until: Callable[[], bool] = lambda: False
) -> None:
    """Show runs until Ctrl-C, until all of them are finished, or until `until` says so; in a pipe print them once."""
    runs = Runs(find)
    if console.is_terminal and not console.is_dumb_terminal:
        # The alternate screen: what was in the terminal is there again when this ends.
        with suppress(KeyboardInterrupt), runs, Live(get_renderable=lambda: _Screen(runs), console=console, screen=True,
                                                     auto_refresh=False) as live:
            while not _are_finished(runs) and not until():
                live.refresh()
                time.sleep(every_s)
        lines = [f"{view.name}: {view.status.sentence}" for view in views_of(runs)]
    else:
        runs.find()
        for run in runs.all():
            while run.look(time.time()):
                pass
        lines = [line for view in views_of(runs) for line in text_lines(view)] or ["no runs yet"]
    for line in lines:
        console.print(Text(to_encoding(line, console.encoding)), soft_wrap=True)


def views_of(runs: Runs) -> list[View]:
    now_s, views = time.time(), []
    for run in runs.all():
        with run.lock:
            views.append(View(to_one_line(run.name), run.record, run.status(now_s), run.spent(now_s),
                              run.share_read == 1.0))
    return views


def _are_finished(runs: Runs) -> bool:
    views = views_of(runs)
    return bool(views) and all(view.status.state == "finished" and view.is_read for view in views)


@frozen
class _Screen:
    """The runs, drawn to the size that the terminal has at this moment."""

    runs: Runs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with ExitStack() as at_end:
            for run in self.runs.all():
                at_end.enter_context(run.lock)  # no thread adds events to what is drawn
            yield Encoded(screen(views_of(self.runs), console.width, console.height, ascii_only=options.ascii_only))


def screen(views: Sequence[View], width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """Show one run in full, or several as rows above one that runs; the terminal cuts off what does not fit."""
    parts: list[RenderableType] = [Text("Ctrl-C stops watching; the runs continue", "dim")]
    if not views:
        return Group(*parts, Text("no runs yet; embark train starts one", "dim"))
    if len(views) > 1:
        parts += [_rows(views), Text("")]
    chosen = next((view for view in views if view.status.state == "running"), views[0])
    parts += _one_run(chosen)
    if not ascii_only and (drawn := curves(list(_panels(chosen.record)), width, max(5, min(12, height - 20)))):
        parts += [Text(""), drawn]
    return Group(*parts)


def text_lines(view: View) -> Iterator[str]:
    """Yield what there is to say about a run, for a pipe."""
    yield f"{view.name}: {view.label}"
    yield f"  {view.status.sentence}"
    for label, text in _facts(view):
        yield f"  {label:<{_LABEL}} {text}"


def _rows(views: Sequence[View]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("run", "state", "steps", "train loss", "held-out AUC", "left", "samples/s", "spent"):
        table.add_column(title, justify="left" if title in ("run", "state") else "right", no_wrap=True)
    for view in views:
        record, usd = view.record, view.spent.usd if view.spent else None
        steps = f"{format_count(record.steps_done)}/{format_count(record.num_steps)}" if record.start else ""
        left_s = record.seconds_left if view.status.state == "running" else None
        table.add_row(Text(view.name), view.label, steps, _loss(record), format_float(record.held_out.get("auc")),
                      "" if left_s is None else format_clock(left_s), format_si(view.samples_per_s),
                      "" if usd is None else format_usd(usd))
    return table


def _one_run(view: View) -> Iterator[RenderableType]:
    """Yield one run: its name, its progress and its facts, the most important first."""
    start = view.record.start
    ranks = pluralize(int(to_finite(start.get("world_size")) or 1), "rank") if start else ""
    device = to_one_line(start.get("device_name") or start.get("device") or "")
    on = " · ".join(filter(None, (device, ranks, to_one_line(start.get("precision", "")))))
    yield Text.assemble((view.name, "bold"), "  ", view.label, (f"  {on}", "dim"))
    yield Text(view.status.sentence)
    if view.status.state == "running":
        yield ProgressLine(view.record)
    facts = Table.grid(padding=(0, 1, 0, 0))
    facts.add_column(style="dim", min_width=_LABEL, no_wrap=True)
    facts.add_column(no_wrap=True)
    for label, text in _facts(view):
        facts.add_row(label, Text(text, {"error": "red", "warning": "yellow"}.get(label, "")))
    yield facts


def _panels(record: Record) -> Iterator[Panel]:
    """Yield the curves; the first steps are left out where they would flatten the rest."""
    for name, eval_name, title in (("loss", "log_loss", "loss"), ("auc", "auc", "AUC")):
        steps, values = thin(*record.steps.column(name), MAX_POINTS)
        yield Text(f"  {title}", "bold"), settled(points_of(steps, values)), points_of(*record.evals.column(eval_name))


def _loss(record: Record) -> str:
    is_nan = "loss" in record.step and to_finite(record.step["loss"]) is None
    return "NaN" if is_nan else format_float(record.step.get("loss"))


def _facts(view: View) -> Iterator[tuple[str, str]]:
    """Yield labels and what there is to say under them."""
    record, spent = view.record, view.spent
    rate, step_s = view.samples_per_s, record.median("step_s")
    if record.step:
        yield "train", f"loss {_loss(record)} · AUC {format_auc(record.step)}"
    if held := record.held_out:
        yield "held out", f"log loss {format_float(held.get('log_loss'))} · AUC {format_float(held.get('auc'))}"
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


def _machines(systems: Sequence[JsonMap]) -> Iterator[tuple[str, str]]:
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


def _known(rows: Sequence[JsonMap], name: str) -> list[float]:
    return [value for row in rows if (value := to_finite(row.get(name))) is not None]

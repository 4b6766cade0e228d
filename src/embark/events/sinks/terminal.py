"""The run on a terminal, or in a log where there is none."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embark.events import summary as closing
from embark.events.events import Event
from embark.events.history import History
from embark.events.names import metric
from embark.events.sharding import plan_rows, rank_line
from embark.formatting import (
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_float,
    format_rate,
    format_si,
    pluralize,
    strip_control_chars,
    to_encoding,
    to_finite,
    to_float,
    to_one_line,
)

LINE_EVERY_S = 5.0
"""In a log, steps get one line in so many seconds."""

_LABEL = 10
_MIN_BAR = 6

Part = tuple[str, str]
"""Some text and its style."""


class TerminalView:
    """A sink for a person. On a terminal a live bar with lines above it; in a pipe or a log plain lines.

    Under `quiet` only warnings, errors and the sentence at the end. A reader who goes away does not end the run.
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._history = History()
        self._on_terminal = console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None
        self._waiting: Event | None = None
        self._last_line_s = float("-inf")
        self._gone = False

    def emit(self, event: Event) -> None:
        if self._gone:
            return
        try:
            self._history.take(event)
            self._show(event)
        except (OSError, SystemExit):  # rich exits when its reader is gone; a run does not
            self._gone = True

    def close(self) -> None:
        if not self._gone:
            try:
                self._flush_line()
                self._stop_live()
            except (OSError, SystemExit):
                self._gone = True

    def _show(self, event: Event) -> None:
        kind, values = event.kind, event.values
        if kind == "note" and values.get("level") == "warning":
            self._say("warning", [(strip_control_chars(values.get("text", "")), "")], "yellow")
        elif kind == "error":
            self._stop_live()
            self._say("error", [(strip_control_chars(values.get("text", "")), "")], "bold red")
        elif kind == "end":
            self._flush_line()
            self._stop_live()
            self._close_with_summary()
        elif self._quiet:
            return
        elif kind == "step":
            self._step(event)
        elif kind == "start":
            self._header(values)
            self._start_live()
        elif kind == "plan":
            self._plan(values)
        elif kind == "note":
            self._say("note", [(strip_control_chars(values.get("text", "")), "")])
        elif kind == "eval":
            self._eval(values)
        elif kind == "save":
            told = [self._at(values), f"{format_bytes(values.get('bytes'))} in {format_duration(values.get('save_s'))}"]
            self._say_what_fits("saved", [*told, to_one_line(values.get("path", ""))])
        elif kind == "resume":
            self._say_what_fits("resumed", [self._at(values), to_one_line(values.get("path", ""))])
        elif kind == "interrupt":
            self._say_what_fits("stopping", [self._at(values), to_one_line(values.get("signal", ""))], "yellow")

    # What is said once

    def _header(self, start: Mapping[str, Any]) -> None:
        self._print(Text(""))
        self._say("run", [(to_one_line(start.get("name", "")), "bold")])
        ranks = pluralize(int(to_finite(start.get("world_size")) or 1), "rank")
        device = to_one_line(start.get("device_name") or start.get("device") or "")
        self._say("on", [(" · ".join([device, ranks, to_one_line(start.get("precision", ""))]), "")])
        model = f"{format_si(start.get('num_parameters'))} parameters · {format_bytes(start.get('table_bytes'))} of tables"
        self._say("model", [(model, "")])
        samples = f"{format_count(start.get('num_train_samples'))} samples · {format_count(start.get('num_eval_samples'))} held out"
        steps = f"batch {format_count(start.get('batch_size'))} · {format_count(start.get('steps_per_epoch'))} steps an epoch"
        self._say("data", [(f"{samples} · {steps}", "")])
        reason = to_one_line(start.get("engine_reason", ""))
        self._say("engine", [(to_one_line(start.get("engine", "")), ""), (f": {reason}" if reason else "", "dim")])

    def _plan(self, plan: Mapping[str, Any]) -> None:
        rows = plan_rows(plan.get("tables") or [])
        widths = [max(len(row[i]) for row in rows) for i in range(3)] if rows else []
        for index, row in enumerate(rows):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            line = "  ".join([*cells, row[3]])
            if self._on_terminal and len(line) > self._width - _LABEL - 2:
                line = f"{row[0]}  {row[1]}\n  {row[2]}  {row[3]}"
            self._say("tables" if index == 0 else "", [(line, "")])
        per_rank = rank_line(plan.get("per_rank") or [])
        if per_rank:
            self._say("", [(per_rank, "")])
        self._print(Text(""))

    def _eval(self, values: Mapping[str, Any]) -> None:
        told = [f"{metric(name).label} {format_float(values.get(name))}" for name in ("auc", "log_loss")]
        told.append(f"NE {format_float(values.get('normalized_entropy'))}")
        told.append(f"calibration {format_float(values.get('calibration'), 3)}")
        took = f"{format_si(values.get('num_samples'))} samples in {format_duration(values.get('eval_s'))}"
        self._say_what_fits("held out", [self._at(values), *told, took], "magenta")

    def _close_with_summary(self) -> None:
        history, failed = self._history, self._history.end.get("outcome") == "failed"
        if not self._quiet:
            drawn = closing.curves(history, self._width, self._fit, ascii_only=self._ascii_only)
            table = closing.metrics(history, self._width, self._fit)
            for part in (drawn, table):
                if part is not None:
                    self._print(Text(""))
                    self._print(part)
            self._print(Text(""))
        told = self._fit(closing.sentence(history))
        self._print_indented(Text(told, "bold red" if failed else "bold"))
        if not self._quiet:
            self._print_indented(Text(self._fit(closing.work(history))))
            if lost := closing.losses(history):
                self._print_indented(Text(self._fit(lost)))
            if foreseen := closing.foresight(history):
                self._print_indented(Text(self._fit(foreseen), "dim"))
            self._print(Text(""))
            for label, text in closing.places(history):
                self._say(label, [(text, "")])

    # What changes

    def _step(self, event: Event) -> None:
        if self._on_terminal:
            return
        if event.time_s - self._last_line_s < LINE_EVERY_S and self._history.steps_to_do:
            self._waiting = event
            return
        self._step_line(event)

    def _step_line(self, event: Event) -> None:
        self._waiting = None
        self._last_line_s = event.time_s
        values, history = event.values, self._history
        told = [self._at(values), f"loss {format_float(values.get('loss'))}", f"AUC {format_float(values.get('auc'))}"]
        told.append(format_rate(values.get("samples_per_s")))
        if history.seconds_left:
            told.append(f"{format_clock(history.seconds_left)} left")
        self._say_what_fits("train", told)

    def _flush_line(self) -> None:
        if self._waiting is not None:
            self._step_line(self._waiting)

    def _at(self, values: Mapping[str, Any]) -> str:
        """`step  1,000/20,000`"""
        total = format_count(self._history.num_steps)
        return f"step {format_count(values.get('step')):>{len(total)}}" + (f"/{total}" if not self._on_terminal else "")

    def _start_live(self) -> None:
        if self._on_terminal and self._live is None:
            bar = _Bar(self._history, self._fit)
            self._live = Live(
                bar,
                console=self._console,
                transient=True,
                # Only what would land on the bar is taken in and put above it: `2>errors.txt` stays the user's.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    # How it is said

    @property
    def _width(self) -> int:
        return self._console.width

    @property
    def _ascii_only(self) -> bool:
        return self._console.options.ascii_only

    def _fit(self, text: str) -> str:
        return to_encoding(text, self._console.encoding)

    def _say_what_fits(self, label: str, told: Sequence[str], style: str = "dim") -> None:
        """As many of the parts as go on one line, the first before the last; all of them in a log."""
        room = self._width - _LABEL - 2
        shown = list(told)
        while self._on_terminal and len(shown) > 2 and len("   ".join(shown)) > room:
            shown.pop()
        self._say(label, [("   ".join(part for part in shown if part), "")], style)

    def _say(self, label: str, parts: Sequence[Part], style: str = "dim") -> None:
        self._flush_line()
        body = Text.assemble(*((self._fit(text), part_style) for text, part_style in parts))
        if self._quiet:
            self._print(Text.assemble((f"{label}: ", style), body))
            return
        if not self._on_terminal:
            self._print(Text.assemble(f"  {label:<{_LABEL}}", body))
            return
        grid = Table.grid()
        grid.add_column(width=_LABEL + 2, no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(f"  {label}", style), body)
        self._print(grid)

    def _print_indented(self, text: Text) -> None:
        if self._quiet:
            self._print(text)
        elif self._on_terminal:
            self._print(Padding(text, (0, 0, 0, 2)))
        else:
            self._print(Text.assemble("  ", text))

    def _print(self, what: RenderableType) -> None:
        if self._on_terminal:
            self._console.print(what)
            return
        if not isinstance(what, Text):
            with self._console.capture() as capture:
                self._console.print(what)
            what = Text("\n".join(line.rstrip() for line in capture.get().splitlines()))
        self._console.print(what, soft_wrap=True)


class _Bar:
    """`step 12,400/20,000 ━━━━━━━━╸━━━━ loss 0.4512  AUC 0.7712  41.2 k samples/s  2:05 left`, as much as fits."""

    def __init__(self, history: History, fit: closing.Fit) -> None:
        self._history = history
        self._fit = fit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        history, width = self._history, min(options.max_width, closing.MAX_WIDTH)
        total = format_count(history.num_steps)
        left = Text(f"  step {format_count(history.steps_done):>{len(total)}}/{total} ")
        right = self._right(width - left.cell_len - _MIN_BAR)
        bar = ProgressBar(
            total=max(1, history.num_steps), completed=history.steps_done, complete_style="cyan", finished_style="cyan"
        )
        grid = Table.grid()
        grid.add_column(width=left.cell_len, no_wrap=True)
        grid.add_column(width=max(1, width - left.cell_len - right.cell_len))
        grid.add_column(width=right.cell_len, no_wrap=True)
        grid.add_row(left, bar, right)
        yield Text("")
        yield grid

    def _right(self, room: int) -> Text:
        step, left = self._history.step, f"{format_clock(self._history.seconds_left):>5} left"
        if not step:
            return Text("  starting", "dim")
        loss, auc = f"loss {format_float(step.get('loss'))}", f"AUC {format_float(step.get('auc'))}"
        pace = format_si(step.get("samples_per_s"))
        richest_first = (
            [loss, auc, f"{pace:>6} samples/s", left],
            [loss, auc, f"{pace:>6}/s", left],
            [loss, auc, left],
            [loss, auc, left.removesuffix(" left")],
            [loss, left.removesuffix(" left")],
        )
        for told in richest_first:
            text = self._fit("  ".join(["", *told]))
            if len(text) <= room:
                break
        shown = Text(text)
        read = to_float(step.get("loss"))
        if read is not None and read != read:
            shown.highlight_words(["loss NaN"], "bold red")
        return shown

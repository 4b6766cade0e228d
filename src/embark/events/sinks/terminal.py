"""The run on a terminal, or in a log where there is none."""

import sys
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embark.events import summary
from embark.events.events import Event, NewestEvents, changes_of, warm_start_text
from embark.events.metrics import metric
from embark.events.sharding import plan_rows, rank_line
from embark.events.summary import History
from embark.formatting import (
    format_auc,
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
    to_one_line,
)
from embark.values import JsonMap, frozen

LINE_EVERY_S = 5.0  # Between two lines about steps in a log.

_LABEL = 10
_MIN_BAR = 6


class TerminalView:
    """A sink for a person: on a terminal a live bar with lines above it, in a pipe or a log plain lines. Under `quiet`
    it shows only warnings, errors and the sentence at the end. A closed pipe does not end the run."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._history = History()
        self._on_terminal = console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None
        self._last_line_s = float("-inf")
        self._is_gone = False
        self.has_shown_end = False

    def emit(self, event: Event) -> None:
        self._history.add(event)
        self._try(lambda: self._show(event))

    def close(self) -> None:
        self._try(self._stop_live)

    def _try(self, show: Callable[[], None]) -> None:
        if not self._is_gone:
            try:
                show()
            except (OSError, SystemExit):  # rich exits when the pipe is closed; a run does not
                self._is_gone = True

    def _show(self, event: Event) -> None:
        kind, values = event.kind, event.values
        text = strip_control_chars(values.get("text", ""))
        if kind == "note" and values.get("level") == "warning":
            self._say("warning", text, "yellow")
        elif kind == "change":
            self._say("changed", ", ".join(map(str, changes_of([event]))), "yellow")
        elif kind == "error":
            self._stop_live()
            self._say("error", text, "bold red")
        elif kind == "end":
            self._stop_live()
            self._summarize()
            self.has_shown_end = True
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
            self._say("note", text)
        elif kind == "eval":
            self._eval(values)
        elif kind == "save":
            size = f"{format_bytes(values.get('bytes'))} in {format_duration(values.get('save_s'))}"
            self._say("saved", _parts(self._at(values), size, to_one_line(values.get("path", ""))))
        elif kind == "resume":
            self._say("resumed", _parts(self._at(values), to_one_line(values.get("path", ""))))
        elif kind == "warm_start":
            self._say("weights", warm_start_text(values))
        elif kind == "interrupt":
            self._say("stopping", _parts(self._at(values), to_one_line(values.get("signal", ""))), "yellow")

    def _header(self, start: JsonMap) -> None:
        self._print(Text(""))
        count = {name: format_count(start.get(name)) for name in
                 ("num_train_samples", "num_eval_samples", "batch_size", "steps_per_epoch")}
        ranks = pluralize(int(to_finite(start.get("world_size")) or 1), "rank")
        device = to_one_line(start.get("device_name") or start.get("device") or "")
        tables = f"{format_bytes(start.get('table_bytes'))} of tables"
        self._say("run", Text(to_one_line(start.get("name", "")), "bold"))
        self._say("on", " · ".join([device, ranks, to_one_line(start.get("precision", ""))]))
        kind = to_one_line(start.get("model_kind", ""))
        self._say("model", f"{kind} · {format_si(start.get('num_parameters'))} parameters · {tables}")
        if stream := to_one_line(start.get("stream", "")):
            self._say("stream", f"{stream} · batch {count['batch_size']}, each row scored before it is trained on")
        else:
            self._say("data", f"{count['num_train_samples']} samples · {count['num_eval_samples']} held out · "
                              f"batch {count['batch_size']} · {count['steps_per_epoch']} steps an epoch")
        reason = to_one_line(start.get("engine_reason", ""))
        engine = to_one_line(start.get("engine", ""))
        self._say("engine", Text.assemble(engine, (f": {reason}" if reason else "", "dim")))

    def _plan(self, plan: JsonMap) -> None:
        for index, row in enumerate(plan_rows(plan.get("tables") or [])):
            self._say("tables" if index == 0 else "", "  ".join(row))
        if per_rank := rank_line(plan.get("per_rank") or []):
            self._say("", per_rank)
        self._print(Text(""))

    def _eval(self, values: JsonMap) -> None:
        if ranking := summary.ranking_text(values):
            parts = [ranking]
        else:
            parts = [f"{metric(name).label} {format_float(values.get(name))}" for name in ("auc", "log_loss")]
            parts.append(f"NE {format_float(values.get('normalized_entropy'))}")
            parts.append(f"calibration {format_float(values.get('calibration'), 3)}")
        parts.append(f"{format_si(values.get('num_samples'))} samples in {format_duration(values.get('eval_s'))}")
        self._say("held out", _parts(self._at(values), *parts), "magenta")

    def _summarize(self) -> None:
        history, has_failed = self._history, self._history.end.get("outcome") == "failed"
        sentence = Text(summary.outcome_sentence(history), "bold red" if has_failed else "bold")
        if self._quiet:
            self._print(sentence)
            return
        width = self._console.width
        drawn = None if self._console.options.ascii_only else summary.curves(history.panels(), width)
        for part in (drawn, summary.metrics(history, width), summary.tasks(history)):
            if part is not None:
                self._print(Text(""))
                self._print(part)
        self._print(Text(""))
        self._print(Text.assemble("  ", sentence))
        lines = summary.work(history), summary.costs(history), summary.predicted_and_actual(history)
        for line in filter(None, lines):
            self._print(Text(f"  {line}"))
        for one in history.quality.findings():
            self._say("look at", f"{one.cause} Next: {one.fix}.", "yellow")
        self._print(Text(""))
        for label, path in summary.paths(history):
            self._say(label, path)

    def _step(self, event: Event) -> None:
        values, history = event.values, self._history
        is_early = event.time_s - self._last_line_s < LINE_EVERY_S and history.steps_to_do
        if self._on_terminal or is_early:
            return
        self._last_line_s = event.time_s
        left = f"{format_clock(history.seconds_left)} left" if history.seconds_left else ""
        self._say("train", _parts(self._at(values), f"loss {format_float(values.get('loss'))}",
                                  f"AUC {format_auc(values)}", format_rate(values.get("samples_per_s")), left))

    def _at(self, values: JsonMap) -> str:
        """Return the step in words, such as `step 1,000/20,000`."""
        total = format_count(self._history.num_steps)
        is_shown = self._history.num_steps and not self._on_terminal  # of a run that had finished it is not known
        return f"step {format_count(values.get('step')):>{len(total)}}" + (f"/{total}" if is_shown else "")

    def _start_live(self) -> None:
        if self._on_terminal and self._live is None:
            self._live = Live(
                Encoded(ProgressLine(self._history)),
                console=self._console,
                transient=True,
                # Only what would land on the bar is captured and put above it: `2>errors.txt` stays the user's.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty()
            )
            self._live.start(refresh=True)

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _say(self, label: str, body: str | Text, style: str = "dim") -> None:
        self._print(Text.assemble((f"{label}: " if self._quiet else f"  {label:<{_LABEL}}", style), body))

    def _print(self, what: RenderableType) -> None:
        if not self._on_terminal and not isinstance(what, Text):
            with self._console.capture() as capture:
                self._console.print(what)
            what = Text("\n".join(line.rstrip() for line in capture.get().splitlines()))
        self._console.print(Encoded(what), soft_wrap=not self._on_terminal)


def _parts(*parts: str) -> str:
    return "   ".join(filter(None, parts))


@frozen
class Encoded:
    """Anything that is shown, in characters that the terminal has."""

    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.shown, options):
            yield segment._replace(text=to_encoding(segment.text, console.encoding))


@frozen
class ProgressLine:
    """A line such as `step 12,400/20,000 ━━━━━━╸━━━ train: loss 0.4512 AUC 0.7712 41.2 k samples/s 2:05 left`, as much
    as fits."""

    run: NewestEvents

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run, width = self.run, min(options.max_width, summary.MAX_WIDTH)
        total, done = format_count(run.num_steps), format_count(run.steps_done)
        left = Text(f"  step {done:>{len(total)}}/{total} " if run.num_steps else f"  step {done} ")
        right = self._right(width - left.cell_len - _MIN_BAR)
        grid = Table.grid(expand=True)
        grid.width = width
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        # A stream has no end.
        grid.add_row(left, ProgressBar(run.num_steps, run.steps_done, complete_style="cyan", finished_style="cyan")
                     if run.num_steps else "", right)
        yield Text("")
        yield grid

    def _right(self, width: int) -> Text:
        step, has_end = self.run.step, bool(self.run.num_steps)
        if not step:
            return Text("  starting" if has_end else "  waiting for records", "dim")
        parts = [f"train: loss {format_float(step.get('loss'))}", f"AUC {format_auc(step)}",
                 f"{format_si(step.get('samples_per_s')):>6} samples/s",
                 *([f"{format_clock(self.run.seconds_left):>5} left"] if has_end else [])]
        while len(parts) > 1 and len("  ".join(["", *parts])) > width:
            del parts[-2 if has_end else -1]
        shown = Text("  ".join(["", *parts]))
        shown.highlight_words(["loss NaN"], "bold red")
        return shown

"""The only place that prints: text for people by default, JSON for programs with `--json`."""

from __future__ import annotations

import json as jsonlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from typing import TYPE_CHECKING, Annotated, TextIO, TypeVar

from cyclopts import Parameter

from embark.errors import EmbarkError, Interrupted, UserError
from embark.events.events import Event, Sink, to_jsonable
from embark.formatting import MISSING, format_bytes, redact, strip_control_chars, to_encoding, to_one_line
from embark.values import frozen

if TYPE_CHECKING:  # importing rich takes a tenth of a second
    from rich.console import Console as RichConsole

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A switch that is off unless given; there is no `--no-…`."""
OptionalInt = Annotated[int | None, Parameter(show_default=False)]
Texts = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
Spec = Annotated[str, Parameter(
    help="A TOML file or a preset (laptop, quickstart, criteo-1tb, mlperf-dcnv2, mlperf-hstu).")]
Settings = Annotated[tuple[str, ...], Parameter(
    name=("--set", "-s"), help="Override a field: --set train.batch_size=4096. Repeatable.", negative="",
    show_default=False)]
Accepted = Annotated[tuple[str, ...], Parameter(
    name="--accept-change", help="Resume although this field, or data, is not what the checkpoints were trained with. "
    "Repeatable.", negative="", show_default=False)]
T = TypeVar("T")
GAP = 2  # Between two columns of a table.
_LOG_EVERY_S = 20.0
_PIPE_WIDTH = 160  # A pipe has no width of its own: wide enough that table cells are not folded.


_json_stream: TextIO | None = None


@contextmanager
def only_json_on_stdout() -> Iterator[None]:
    """Send results to stdout, and what libraries and the user's own code print to stderr."""
    global _json_stream
    before, _json_stream = _json_stream, sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _json_stream = before


@Parameter(name="*")
@frozen
class Console:
    """What a command says. Results go to stdout, warnings, errors and progress to stderr.

    A command takes it as its last parameter, `console: Console = Console()`, which gives it `--json` and `--quiet`. It
    calls its package, gets one frozen dataclass, and shows it: `console.show(result, _render)`. With `--json` stdout
    carries that dataclass as JSON and nothing else; otherwise `_render(console, result)` prints tables and sentences.
    With `--quiet` only results, warnings and errors are printed.
    """

    json: Flag = False
    """Print JSON for programs instead of text."""
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="", show_default=False)] = False
    """Print results, warnings and errors only."""

    @property
    def out(self) -> RichConsole:
        return _rich_console(sys.stdout, stderr=False)

    @property
    def err(self) -> RichConsole:
        return _rich_console(sys.stderr, stderr=True)

    def show(self, result: T, render: Callable[[Console, T], None]) -> None:
        """Show a command's result: as JSON under `json`, else as `render` prints it.

        The JSON is what the dataclass's `to_dict` returns, or its fields except those left out of its `repr`.
        """
        if self.json:
            _write_json(_json_stream or sys.stdout, result, indent=2)
        else:
            render(self, result)

    def show_line(self, result: T, text_of: Callable[[T], str]) -> None:
        """Show one of many results: as a line of JSON under `json`, else as a line of text."""
        if self.json:
            _write_json(_json_stream or sys.stdout, result)
        else:
            self.raw(f"{text_of(result)}\n")

    def text(self, message: str, style: str = "") -> None:
        """Print a line or more for a person."""
        if not self.json and not self.quiet:
            _print(self.out, [(message, style)])

    def result(self, message: str) -> None:
        """Print the sentence that answers the command, under `quiet` too."""
        if not self.json:
            _print(self.out, [(message, "bold")])

    def raw(self, text: str) -> None:
        """Print text for another program to read: a file, a script."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def file(self, text: str) -> None:
        """Print the file itself for `--out -`, which leaves no room for JSON."""
        if self.json:
            raise UserError("--out - and --json are mutually exclusive", "leave one out")
        self.raw(text)

    def table(
        self, rows: Sequence[Mapping[str, object]], columns: Mapping[str, str] | None = None, title: str = "",
        droppable: Sequence[str] = ()
    ) -> None:
        """Print rows as a table. `columns`: which keys, in which order, under which headings; else all under their own.

        While the table is wider than the terminal, the columns of `droppable` are left out, one after the other.
        """
        from rich.table import Table
        from rich.text import Text

        headings = dict(columns or {key: key.replace("_", " ") for row in rows for key in row})
        for key in droppable:
            widths = [max([len(text), *(len(cell_text(row.get(name))) for row in rows)])
                      for name, text in headings.items()]
            if sum(widths) + GAP * (len(widths) - 1) <= self.out.width:
                break
            headings.pop(key, None)
        if title:
            _print(self.out, [(to_one_line(title), "bold")])
        if not rows:
            _print(self.out, [("nothing to show", "dim")])
            return
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
        encoding = self.out.encoding
        for key, heading in headings.items():
            right = all(_is_number(row.get(key)) for row in rows)
            heading_text = Text(to_encoding(to_one_line(heading), encoding))
            table.add_column(heading_text, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(to_encoding(cell_text(row.get(key)), encoding)) for key in headings))
        self.out.print(table)

    def warning(self, message: str) -> None:
        """Print something to know that stops nothing."""
        message = redact(message)
        if self.json:
            _write_json(sys.stderr, {"warning": strip_control_chars(message)})
        else:
            _print(self.err, [("warning: ", "yellow"), (message, "")])

    def error(self, error: EmbarkError) -> None:
        """Print what went wrong, and its fix."""
        what, fix = redact(error.what), redact(error.fix)
        if self.json:
            _write_json(sys.stderr, {"error": strip_control_chars(what), "fix": strip_control_chars(fix),
                                     "exit_code": int(error.exit_code)})
            return
        if isinstance(error, Interrupted):  # what a person asked for is no error
            text = ". ".join(one if one.startswith("embark ") else one[:1].upper() + one[1:]
                             for one in (what, fix) if one)
            _print(self.err, [(text, "bold")])
            return
        _print(self.err, [("error: ", "bold red"), (what, "")])
        if fix:
            _print(self.err, [("  fix: ", "green"), (fix, "")])

    def confirm(self, question: str, flag: str) -> bool:
        """Ask for confirmation; without a terminal only `flag` gives it."""
        if self.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UserError("cannot ask for confirmation: this is not a terminal", f"{flag} skips the prompt")
        _print(self.err, [(f"{question} [y/N]", "bold")])
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show a line on the terminal while something takes seconds."""
        is_shown = not self.json and not self.quiet and sys.stderr.isatty() and os.getenv("TERM") != "dumb"
        if is_shown:
            sys.stderr.write(f"{what} …")
            sys.stderr.flush()
        try:
            yield
        finally:
            if is_shown:
                sys.stderr.write("\r\033[K")
                sys.stderr.flush()

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show `stages` with one stage that counts bytes; yields a function of the bytes done and the bytes in all."""
        began_s = time.monotonic()
        with self.stages() as show:

            def report(done: int, total: int) -> None:
                rate = format_bytes(done / max(time.monotonic() - began_s, 1e-3))
                show(what, done / total if total else 0.0, f"{format_bytes(done)} of {format_bytes(total)} · {rate}/s")

            yield report

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, float, str], None]]:
        """Show a progress bar over stages; yields a function of the stage, the fraction done, and a note.

        In a log it is a line now and then.
        """
        if self.json or self.quiet:
            yield lambda _stage, _fraction, _note: None
            return
        if not self.err.is_terminal:
            yield self._log_stages()
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
                   TextColumn("{task.fields[note]}", markup=False))
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task("", total=1.0, note="")
            yield lambda stage, fraction, note: bar.update(
                task, description=to_one_line(stage), completed=fraction, note=to_one_line(note))

    def view(self) -> Sink:
        """Return the sink that shows a run's events: a terminal view, or JSON lines on stdout under `json`."""
        if self.json:
            return JsonView(_json_stream or sys.stdout)
        from embark.events.sinks.terminal import TerminalView

        return TerminalView(self.out, quiet=self.quiet)

    def has_shown_end(self, view: Sink) -> bool:
        """Return whether the view has said how the run ended where standard error goes too: an error would say it
        again."""
        return bool(getattr(view, "has_shown_end", False)) and sys.stdout.isatty() == sys.stderr.isatty()

    def _log_stages(self) -> Callable[[str, float, str], None]:
        logged_s = time.monotonic()

        def log(stage: str, fraction: float, note: str) -> None:
            nonlocal logged_s
            if time.monotonic() - logged_s >= _LOG_EVERY_S:
                logged_s = time.monotonic()
                _print(self.err, [(f"{stage} {fraction:.0%} {note}".rstrip(), "")])

        return log


class JsonView:
    """The events of a run, one JSON object a line. A closed pipe does not end the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_closed = False

    def emit(self, event: Event) -> None:
        if event.kind == "progress" or self._is_closed:
            return
        try:
            self._stream.write(event.to_json() + "\n")
            self._stream.flush()
        except OSError:
            self._is_closed = True
            # The buffer would raise again when the process exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def close(self) -> None:
        """Every line was flushed as it was written."""


def _rich_console(stream: TextIO, *, stderr: bool) -> RichConsole:
    from rich.console import Console as RichConsole

    # FORCE_COLOR must not put a progress bar into a log: the stream decides, not rich's guess.
    on_terminal = stream.isatty()
    width = None if on_terminal or os.getenv("COLUMNS") else _PIPE_WIDTH
    return RichConsole(stderr=stderr, force_terminal=on_terminal, width=width, markup=False, emoji=False,
                       highlight=False)


def _print(console: RichConsole, parts: Sequence[tuple[str, str]]) -> None:
    """Print literal text: no markup, no control characters."""
    from rich.text import Text

    shown = [(to_encoding(strip_control_chars(text), console.encoding), style) for text, style in parts]
    if console.is_terminal and not console.is_dumb_terminal:
        column, spaced = 0, []
        for text, style in shown:
            padded, column = _wrap_with_spaces(text, console.width, column)
            spaced.append((padded, style))
        shown = spaced
    console.print(Text.assemble(*shown), soft_wrap=True)


def _wrap_with_spaces(text: str, width: int, column: int) -> tuple[str, int]:
    """Put spaces up to the terminal's edge before a word that would cross it.

    No word is broken, and a command that takes two rows is still one line when it is copied. Also returns the column
    behind the text, which begins at `column`.
    """
    from rich.cells import cell_len

    lines: list[str] = []
    for line in text.split("\n"):
        column = 0 if lines else column
        indent = len(line) - len(line.lstrip(" "))
        shown = ""
        for word in re.findall(r" *[^ ]*", line):
            spaces = len(word) - len(word.lstrip(" "))
            size = cell_len(word)
            if spaces and column and column + size > width and size - spaces + indent < width:
                word = " " * (width - column + indent) + word[spaces:]
                column, size = 0, indent + size - spaces
            shown += word
            column = column + size if column + size <= width else (column + size) % width
        lines.append(shown)
    return "\n".join(lines), column


def _write_json(stream: TextIO, value: object, indent: int | None = None) -> None:
    to_dict = getattr(value, "to_dict", None)
    stream.write(jsonlib.dumps(to_jsonable(to_dict() if to_dict else value), indent=indent, allow_nan=False) + "\n")
    stream.flush()


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def cell_text(value: object) -> str:
    """Format a value for a table."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, Enum):
        return cell_text(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell_text(item) for item in value)
    return to_one_line(value)

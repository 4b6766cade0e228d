"""The run in a notebook: the terminal's view as one output that is updated in place."""

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from embark.events.events import Event, Sink
from .terminal import Encoded, ProgressLine, TerminalView

WIDTH = 112  # Characters of a line.
LABEL_WIDTH = 12
UPDATE_EVERY_S = 0.3
_PRE = ("<pre style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:'DejaVu Sans Mono',Menlo,Consolas,"
        "'Courier New',monospace\">{code}</pre>")


def default_view(progress: bool | None) -> Sequence[Sink]:
    """Return the view of a run that was started from Python: in a notebook a live one, elsewhere none unless `progress`
    asks for the terminal's."""
    if progress is False:
        return ()
    if is_notebook():
        return (NotebookView(),)
    return (TerminalView(_console()),) if progress else ()


def is_notebook() -> bool:
    """Return whether this process is an IPython kernel. IPython is not imported: a kernel has done that."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookView(TerminalView):
    """A sink for a person in front of a notebook."""

    def __init__(self) -> None:
        self._lines = _console(file=StringIO(), record=True, width=WIDTH, force_terminal=True)
        super().__init__(self._lines)
        self._has_bar = False
        self._updated_s = time.monotonic()
        self._output = _display("  loading …")

    def emit(self, event: Event) -> None:
        super().emit(event)
        if event.kind not in ("step", "progress") or time.monotonic() - self._updated_s >= UPDATE_EVERY_S:
            self._update()

    def close(self) -> None:
        super().close()
        self._update()

    def _start_live(self) -> None:
        self._has_bar = True

    def _stop_live(self) -> None:
        self._has_bar = False

    def _say(self, label: str, body: str | Text, style: str = "dim") -> None:
        row = Table.grid()
        row.add_column(width=LABEL_WIDTH, no_wrap=True)
        row.add_row(Text(f"  {label}", style), body if isinstance(body, Text) else Text(body))
        self._print(row)

    def _update(self) -> None:
        self._updated_s = time.monotonic()
        shown, text = _pages(self._lines)
        if self._has_bar:
            below = _console(file=StringIO(), record=True, width=WIDTH, force_terminal=True)
            below.print(Encoded(ProgressLine(self._history)))
            bar, bar_text = _pages(below)
            shown, text = shown + bar, text + bar_text
        self._output.update(_bundle(shown, text), raw=True)


def _console(**options: Any) -> Console:
    return Console(markup=False, emoji=False, highlight=False, force_jupyter=False, **options)


def _pages(console: Console) -> tuple[str, str]:
    """Return what was printed so far, as HTML and as text."""
    shown = console.export_html(clear=False, inline_styles=True, code_format="{code}")
    return shown, console.export_text(clear=False)


def _bundle(shown: str, text: str) -> dict[str, str]:
    """Return one output in the types that a front end chooses from."""
    return {"text/html": _PRE.replace("{code}", shown), "text/plain": text}


def _display(text: str) -> Any:
    """Show an output below the cell, and return the handle that updates it."""
    return import_module("IPython.display").display(_bundle(text, text), raw=True, display_id=True)

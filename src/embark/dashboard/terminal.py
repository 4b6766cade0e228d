"""Runs live in a terminal, for those who have no browser: read as they grow, drawn anew each second."""

import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from embark.dashboard.runs import LOOK_REMOTE_S, Runs
from embark.dashboard.terminal_screen import View, screen, text_lines
from embark.formatting import to_encoding, to_one_line
from embark.report.run_files import Finder

READ_S = 0.4
"""How long files are read before the screen is drawn again."""
_TICK_S = 0.05


def watch_terminal(
    find: Finder, *, console: Console, every_s: float = 1.0, until: Callable[[], bool] | None = None
) -> None:
    """Show runs until Ctrl-C, until all of them are finished, or until `until` says so; in a pipe print them once."""
    watched = _Watched(find)
    if not console.is_terminal or console.is_dumb_terminal:
        while watched.read():
            pass
        lines = [line for view in watched.views() for line in text_lines(view)]
        for line in lines or ["no runs yet"]:
            _print(console, line)
        return
    has_more = watched.read()
    try:
        # The alternate screen: what was in the terminal is there again when this ends.
        with Live(watched, console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            while not watched.is_over and _wait(0.0 if has_more else every_s, until):
                has_more = watched.read()
                live.refresh()
    except KeyboardInterrupt:
        pass
    for view in watched.views():
        _print(console, f"{view.name}: {view.status.sentence}")


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
        yield screen(self.views(), width=width, height=height, ascii_only=options.ascii_only,
                     encoding=console.encoding)


def _print(console: Console, text: str) -> None:
    console.print(Text(to_encoding(text, console.encoding)), soft_wrap=True)

"""Runs live in a terminal, for those who have no browser: read as they grow, drawn anew each second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from embark.dashboard.terminal_screen import View, lines_of, screen
from embark.formatting import to_encoding, to_one_line
from embark.report.locations import EVENTS, SPEC, FolderPlace, Place
from embark.report.record import Record
from embark.report.status import sentence, standing
from embark.report.tail import Tail, parse

FAR_EVERY_S = 10.0
"""A run behind a network is asked so often: each time is a request, and its events come at saves anyway."""
READ_S = 0.4
"""As much of a long file is read before the screen is drawn again."""
_TICK_S = 0.05

Places = Callable[[], Sequence[tuple[str, Place]]]
"""The runs that are meant, by name, as they are when asked."""
Price = Callable[[str], tuple[float | None, str]]
"""Dollars an hour, from the text of a spec, and a word on them."""


def watch_terminal(
    runs: Places | Sequence[str],
    *,
    console: Console,
    every_s: float = 1.0,
    until: Callable[[], bool] | None = None,
    price: Price | None = None,
) -> int:
    """Show runs until Ctrl-C, until all of them are finished, or until `until` says so. Folders will do for `runs`.

    Where there is no terminal, they are told once.
    """
    watched = _Watched(runs if callable(runs) else _folders(runs), price)
    watched.look(patience_s=READ_S)
    if not console.is_terminal or console.is_dumb_terminal:
        while not watched.is_read:
            watched.look(patience_s=READ_S)
        _tell(console, watched.views())
        return 0
    try:
        # The other screen: what stood in the terminal is there again when this ends.
        with Live(_Screen(watched), console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            while not watched.is_over and _wait(every_s if watched.is_read else 0.0, until):
                watched.look(patience_s=READ_S)
                live.refresh()
    except KeyboardInterrupt:
        pass
    for view in watched.views():
        _print(console, f"{view.name}: {sentence(view.record, view.now)}")
    return 0


def _wait(seconds: float, until: Callable[[], bool] | None) -> bool:
    """False as soon as it is enough."""
    end_s = time.monotonic() + seconds
    while until is None or not until():
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return True
        time.sleep(min(_TICK_S, left_s))
    return False


class _Run:
    """One of them, and how far its file was read."""

    def __init__(self, name: str, place: Place, price: Price | None) -> None:
        self.name = to_one_line(name)
        self.record = Record()
        self.is_read = False
        self.is_gone = False
        self._place = place
        self._price = price
        self._usd_per_hour: float | None = None
        self._tail = Tail(place, EVENTS)
        self._looked_s = float("-inf")

    def look(self, deadline_s: float) -> None:
        """Read what is new, until the deadline."""
        now_s = time.monotonic()
        if self.is_read and self._place.is_remote and now_s - self._looked_s < FAR_EVERY_S:
            return
        self._looked_s = now_s
        had_begun = self.record.has_begun
        while True:
            read = self._tail.look()
            if read.is_new and not read.is_gone:
                self.record = Record()
            self.is_gone = read.is_gone and self.record.num_events > 0
            for line in read.lines:
                if event := parse(line):
                    self.record.take(event)
            if read.is_end:
                self.is_read = True
                break
            if time.monotonic() > deadline_s:
                break
        if self.record.has_begun and not had_begun:
            self._ask_price()

    def view(self, now_s: float) -> View:
        now = standing(self.record, now_s, is_remote=self._place.is_remote)
        spent = self.record.spending(self._usd_per_hour, now_s if now.state == "running" else None)
        return View(self.name, self.record, now, spent, is_gone=self.is_gone, is_read=self.is_read)

    def _ask_price(self) -> None:
        size = self._place.size_bytes(SPEC)
        if self._price is not None and size:
            text = self._place.read(SPEC, 0, size).decode("utf-8", "replace")
            self._usd_per_hour, _ = self._price(text)


class _Watched:
    """All of them; under a folder, new ones come."""

    def __init__(self, places: Places, price: Price | None) -> None:
        self._places = places
        self._price = price
        self._runs: dict[str, _Run] = {}

    @property
    def is_read(self) -> bool:
        return all(run.is_read for run in self._runs.values())

    @property
    def is_over(self) -> bool:
        """Nothing will move any more."""
        return bool(self._runs) and all(view.now.state == "done" and view.is_read for view in self.views())

    def look(self, patience_s: float) -> None:
        found = list(self._places())
        # A run whose files are gone stays on the screen, and says so.
        for name, place in found:
            if place.uri not in self._runs:
                self._runs[place.uri] = _Run(name, place, self._price)
        for run in self._runs.values():
            run.look(time.monotonic() + patience_s / max(1, len(self._runs)))

    def views(self) -> list[View]:
        now_s = time.time()
        return [run.view(now_s) for run in self._runs.values()]


class _Screen:
    """Drawn to the size that the terminal has at this moment."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        yield screen(self._watched.views(), width=width, height=height, ascii_only=options.ascii_only,
                     encoding=console.encoding)


def _folders(uris: Sequence[str]) -> Places:
    places = [(Path(uri).name, FolderPlace(Path(uri.removeprefix("file://")).expanduser())) for uri in uris]
    return lambda: places


def _tell(console: Console, views: Sequence[View]) -> None:
    """In a pipe: what the screen says, as lines."""
    for view in views:
        for line in lines_of(view):
            _print(console, line)
    if not views:
        _print(console, "no runs yet")


def _print(console: Console, text: str) -> None:
    console.print(Text(to_encoding(text, console.encoding)), soft_wrap=True)

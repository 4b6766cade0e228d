"""Follows `current` of an exported model's place: loads what it names beside the version that answers, and switches.

A delta is written into the tables of the version that answered before this one, which no request uses any more. Both
map the same file, so that only the pages with changed rows are twice in memory. On a GPU both have their tables there,
and the rows of a delta alone are uploaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from embark.errors import EmbarkError, Fault
from embark.export.artifact import current_version, open_versions, remove_fetched
from embark.serve.request_rows import RequestScorer
from embark.serve.served_model import ServedModel, VersionChange

Load = Callable[[int, RequestScorer | None], RequestScorer]
MAX_RETRY_S = 300.0
_STOP_S = 5.0  # After the last answer; what is being loaded is given up.
_log = logging.getLogger("embark.serve")


class Followed(Protocol):
    """A model that is kept at the current version, in this process or in several."""

    current: int | None
    refused: VersionChange | None

    @property
    def version(self) -> int:
        """The active version."""

    def report(self, change: VersionChange) -> None:
        """Tell all listeners about a change."""


class Switcher(Protocol):
    """How another version takes over."""

    def prepare(self, wanted: int) -> None:
        """Load a version beside the active one, and check it. Raises if it is rejected."""

    def switch(self) -> set[Path]:
        """Answer with what was prepared. Return the folders of the active version and of the one before."""

    def discard(self) -> None:
        """Forget what was prepared."""


class VersionSwitcher:
    """Switches the model of this process."""

    def __init__(self, model: ServedModel, load: Load) -> None:
        """`load` opens a version and scores something with it; a delta is loaded onto a version that it may use up."""
        self._model, self._load = model, load
        self._prepared: RequestScorer | None = None
        self.previous: RequestScorer | None = None  # What answered before; None where it cannot take a delta.

    def prepare(self, wanted: int) -> None:
        previous, self.previous = self.previous, None  # where this fails half of a delta may be in its tables
        self._prepared = None
        scorer = self._load(wanted, None if previous is None or self._model.is_in_use(previous.artifact) else previous)
        self._model.check(scorer)
        self._prepared = scorer

    def switch(self) -> set[Path]:
        scorer, self._prepared = self._prepared, None
        assert scorer is not None
        before = self._model.scorer
        self._model.switch(scorer)
        self.previous = before if scorer.artifact.deltas else None
        return {*before.artifact.folders, *scorer.artifact.folders}

    def discard(self) -> None:
        self._prepared = None


class VersionFollower:
    """Keeps `model` at the current version. A rejected version is tried again at growing intervals."""

    def __init__(self, place: str, model: Followed, switcher: Switcher, poll_s: float) -> None:
        self._place, self._model, self._switcher, self._poll_s = place.rstrip("/") or place, model, switcher, poll_s
        self._versions = open_versions(self._place)
        self._stopping = threading.Event()
        self._retry_s, self._retry_from_s = poll_s, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Poll in a thread while the block runs."""
        thread = threading.Thread(target=self._run, name="embark-follow", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._poll_s):
            self.look()

    def look(self) -> None:
        """Switch to the current version, unless it is active already or was rejected."""
        wanted = None
        try:
            while (wanted := self._current()) != self._model.version:
                refused = self._model.refused
                if refused and refused.version == wanted and time.monotonic() < self._retry_from_s:
                    return
                self._try(wanted)
                if self._stopping.is_set():
                    return
            self._model.refused = None
        except Exception as error:
            if not isinstance(error, EmbarkError):
                _log.exception("version %s cannot be loaded", wanted)
            self._refuse(wanted, error)

    def _current(self) -> int:
        try:
            current = self._model.current = current_version(self._versions)
        except Exception:
            self._model.current = None
            raise
        return current

    def _try(self, wanted: int) -> None:
        self._switcher.prepare(wanted)
        if self._current() != wanted or self._stopping.is_set():  # it may have changed again meanwhile
            self._switcher.discard()
            return
        keep = self._switcher.switch()
        self._retry_s = self._poll_s
        remove_fetched(self._place, keep)  # A rollback needs the one before.

    def _refuse(self, wanted: int | None, error: Exception) -> None:
        """Report a rejected version, once for the same reason."""
        before = self._model.refused
        known = error if isinstance(error, EmbarkError) else Fault("internal error", fix="see the log")
        change = VersionChange(wanted, self._model.version, known.what, known.fix)
        is_retry = before is not None and before.version == wanted
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S) if is_retry else self._poll_s
        self._retry_from_s = time.monotonic() + self._retry_s
        self._model.refused = change
        if change != before:
            self._model.report(change)

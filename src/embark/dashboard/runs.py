"""The runs that are watched, and the threads that keep reading them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from embark.report.liveness import Life, life_of
from embark.report.locations import EVENTS, SPEC, Place
from embark.report.tail import Tail, parse, sample
from embark.report.timeline import Story

SAMPLED_BYTES = 2 << 20
"""A longer file is shown from samples first."""
SAMPLED_FAR_BYTES = 32 << 20
"""The same where each sample is a request."""
LOOK_S = 0.5
LOOK_FAR_S = 5.0
FIND_S = 5.0
_MAX_SPEC_BYTES = 1 << 20
_BREATH_S = 0.002


@dataclass(frozen=True, slots=True)
class Known:
    """What those who serve the page know of a run beside its events. Each is asked seldom, and never under a lock."""

    usd_per_hour: Callable[[str], tuple[float | None, str]] = lambda _spec: (None, "")
    """From the text of a spec to dollars an hour for all its machines, and a word on where they are from."""
    diagnose: Callable[[Place], list[Mapping[str, Any]]] = lambda _place: []
    """From a run to what is wrong with it: `name`, `cause`, `fix`, `evidence`, the cause first."""
    without_secrets: Callable[[str], str] = lambda text: text
    """Cuts out of a line what must not be shown."""


class Run:
    """One run: its files, and what they have told. To be read under its lock."""

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name
        self.id = hashlib.sha256(place.uri.encode()).hexdigest()[:12]
        self.lock = threading.RLock()
        self.story = Story()
        self.version = 1
        """Grows with every change."""
        self.is_sampled = False
        """What is shown is from samples: the rest is still being read."""
        self.share_read = 1.0
        self.heard_s: float | None = None
        self.spec_text = ""
        self._is_gone = False
        self._tail = Tail(place, EVENTS)
        self._exact: Story | None = None
        self._is_first_look = True
        self._spec_size: int | None = None

    def life(self, now_s: float) -> Life:
        return life_of(self.story, now_s, is_gone=self._is_gone, is_remote=self.place.is_remote, heard_s=self.heard_s)

    def look(self, now_s: float) -> bool:
        """Read on; True where there is more to read at once."""
        if self._is_first_look and (has_more := self._begin(now_s)) is not None:
            return has_more
        read = self._tail.look()
        with self.lock:
            if read.is_gone:  # what was shown stays
                self._exact, self.is_sampled, self.share_read = None, False, 1.0
            elif read.is_new or self._is_gone:
                self.story, self._exact, self.is_sampled = Story(), None, False
                self.version += 1
            self._set_gone(read.is_gone and self.story.num_events > 0)
            story = self._exact or self.story
            if self._exact is None:
                self._take(story, read.lines, now_s)
        if self._exact is not None:  # nobody else sees it yet
            self._take(story, read.lines, now_s)
            self._show_exact(is_end=read.is_end)
        elif read.lines and not self._is_first_look:
            self.heard_s = now_s
        self._is_first_look = self._is_first_look and not read.is_end
        self._read_spec()
        return not read.is_end

    def _begin(self, now_s: float) -> bool | None:
        """Of a long file, some lines from all over it, and the rest later: other runs want to be seen first. None where
        it may be read at once."""
        size = self.place.size_bytes(EVENTS)
        if size is None:
            self._read_spec()
            return False
        is_short = size <= (SAMPLED_FAR_BYTES if self.place.is_remote else SAMPLED_BYTES)
        if is_short or self._exact is not None or self._tail.offset:
            return None
        story = Story()
        self._take(story, sample(self.place, EVENTS, size), now_s)
        story.num_bad_lines = 0
        with self.lock:
            self.story, self._exact, self.is_sampled, self.share_read = story, Story(), True, 0.0
            self.version += 1
        self._read_spec()
        return True

    def _take(self, story: Story, lines: Iterable[bytes], now_s: float) -> None:
        any_line = False
        for line in lines:
            any_line = True
            event = parse(line)
            if event is None:
                story.num_bad_lines += bool(line.strip())
                continue
            try:
                story.take(event, now_s)
            except (ValueError, TypeError, OverflowError, AttributeError):
                story.num_bad_lines += 1
        if any_line and story is self.story:
            self.version += 1

    def _show_exact(self, *, is_end: bool) -> None:
        size = self.place.size_bytes(EVENTS)
        with self.lock:
            self.share_read = min(1.0, self._tail.offset / size) if size else 1.0
            if is_end and self._exact is not None:
                self.story, self._exact, self.is_sampled, self.share_read = self._exact, None, False, 1.0
                self.version += 1

    def _set_gone(self, is_gone: bool) -> None:
        if is_gone != self._is_gone:
            self._is_gone = is_gone
            self.version += 1

    def _read_spec(self) -> None:
        size = self.place.size_bytes(SPEC)
        if size is not None and size != self._spec_size:
            self._spec_size = size
            text = self.place.read(SPEC, 0, min(size, _MAX_SPEC_BYTES)).decode("utf-8", "replace")
            with self.lock:
                self.spec_text = text
                self.version += 1


class Runs:
    """All of them, by id, in the order they were found."""

    def __init__(self, find: Callable[[], Iterable[tuple[str, Place]]], known: Known | None = None) -> None:
        """`find` gives the runs that there are now, each with a name; new ones may come at any time."""
        self._find = find
        self.known = known or Known()
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """Why runs could not be listed or read, when last tried; empty where all is well."""
        return next(iter(self._troubles.copy().values()), "")

    def __enter__(self) -> Runs:
        self.find()
        for is_remote in (False, True):
            thread = threading.Thread(target=self._follow, args=(is_remote,), daemon=True, name="embark-watch-reader")
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def all(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def get(self, run_id: str) -> Run | None:
        with self._lock:
            return self._runs.get(run_id)

    def find(self) -> None:
        """Take in those that are new. One that is not found any more stays, and says that it is gone."""
        for name, place in self._find():
            run = Run(place, name)
            with self._lock:
                self._runs.setdefault(run.id, run)

    def _follow(self, is_remote: bool) -> None:
        pause_s = LOOK_FAR_S if is_remote else LOOK_S
        found_s = time.monotonic()
        while not self._stop.is_set():
            if not is_remote and time.monotonic() - found_s > FIND_S:
                found_s = time.monotonic()
                self._try("", self.find)
            mine = [run for run in self.all() if run.place.is_remote == is_remote]
            hungry = [run for run in mine if self._look(run)]
            while hungry and not self._stop.is_set():
                # one block of each in turn, and a breath: whoever asks for the page waits for no file to end
                hungry = [run for run in hungry if self._look(run)]
                self._stop.wait(_BREATH_S)
            self._stop.wait(pause_s)

    def _look(self, run: Run) -> bool:
        return bool(self._try(run.id, lambda: run.look(time.time())))

    def _try(self, about: str, act: Callable[[], Any]) -> Any:
        """A store that does not answer now may answer later: the page goes on, and says so."""
        try:
            result = act()
            self._troubles.pop(about, None)
            return result
        except Exception as error:
            self._troubles[about] = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None

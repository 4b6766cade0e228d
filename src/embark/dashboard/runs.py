"""The runs that are watched, and the threads that read them as they grow."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from embark.catalog.pricing import RunPrice, price_of_run
from embark.events.metrics import metric
from embark.events.spending import Spending
from embark.formatting import format_float, pluralize
from embark.report.context import Liveness, status_of
from embark.report.record import Record
from embark.report.run_files import Finder, RunFiles, Tail
from embark.spec import parse_spec
from embark.store import EVENTS, SPEC, RunDir
from embark.store.lease import current_holder
from embark.store.run_dir import TUNE
from embark.values import JsonDict, JsonMap

LOOK_S = 0.5
LOOK_REMOTE_S = 5.0
FIND_S = 5.0
_PAUSE_S = 0.002


class WatchedRun:
    """A run: its files, and what was read of them. To be read under its lock."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.name = files.name
        self.id = hashlib.sha256(files.uri.encode()).hexdigest()[:12]
        self.lock = threading.RLock()
        self.record = Record()
        self.version = 1  # Grows with every change.
        self.share_read = 1.0  # The share of a long file that was read so far.
        self.is_deleted = False
        self.spec_text = ""
        self._heard_s: float | None = None
        self.tune = TuneFile(files.root)
        self._tail = Tail(files, EVENTS)
        self._is_read = False  # The end of the file was reached once: what comes later is news.
        self._spec_size: int | None = None
        self._price: tuple[object, RunPrice] = (None, RunPrice())

    def status(self, now_s: float) -> Liveness:
        heard_s = self._heard_s if self.share_read == 1.0 else now_s  # its newest events are not read yet
        return status_of(self.record, now_s, is_remote=self.files.is_remote, is_deleted=self.is_deleted,
                         heard_s=heard_s)

    def price(self) -> RunPrice:
        key = (self.spec_text, self.record.start.get("device"), self.record.start.get("world_size"))
        if self._price[0] != key:
            self._price = (key, price_of_run(parse_spec(self.spec_text or None), self.record.start))
        return self._price[1]

    def spent(self, now_s: float) -> Spending | None:
        is_running = self.status(now_s).state == "running"
        return self.record.spending(self.price().usd_per_hour, now_s if is_running else None)

    def held_by(self) -> str:
        """Return the process that trains it; not asked of a remote store, which the page would wait for."""
        holder = None if self.files.is_remote else current_holder(RunDir(self.files.uri).store)
        return str(holder or "")

    def look(self, now_s: float) -> bool:
        """Read the next block; True where there is more to read at once."""
        read = self._tail.look()
        with self.lock:
            if not read.is_missing and (read.is_new or self.is_deleted):
                self.record = Record()
                self.version += 1
            for line in read.lines:
                self.record.add_line(line, now_s)
            is_deleted = read.is_missing and self.record.num_events > 0
            self.version += bool(read.lines) + (is_deleted != self.is_deleted)
            self.is_deleted = is_deleted
            size = self.files.size_bytes(EVENTS)
            self.share_read = 1.0 if read.is_end or not size else min(1.0, self._tail.offset / size)
        if read.lines and self._is_read:
            self._heard_s = now_s
        self._is_read = self._is_read or (read.is_end and not read.is_missing)
        self._read_spec()
        if self.tune.look():
            with self.lock:
                self.version += 1
        return not read.is_end

    def _read_spec(self) -> None:
        size = self.files.size_bytes(SPEC)
        if size is not None and size != self._spec_size:
            self._spec_size = size
            text = self.files.read_text(SPEC)
            with self.lock:
                self.spec_text = text or ""
                self.version += 1


class Runs:
    """All watched runs by id, in the order they were found."""

    def __init__(self, find: Finder) -> None:
        self._find = find
        self._runs: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: dict[str, str] = {}

    @property
    def error(self) -> str:
        """Why runs could not be listed or read at the last attempt; empty where they could."""
        return next(iter(self._errors.copy().values()), "")

    def __enter__(self) -> Runs:
        self.find()
        for is_remote in (False, True):
            thread = threading.Thread(target=self._poll, args=(is_remote,), daemon=True, name="embark-watch-reader")
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def all(self) -> list[WatchedRun]:
        with self._lock:
            return list(self._runs.values())

    def get(self, run_id: str) -> WatchedRun | None:
        with self._lock:
            return self._runs.get(run_id)

    def find(self) -> None:
        """Add new runs. One that is not found any more stays, as deleted."""
        for files in self._find():
            run = WatchedRun(files)
            with self._lock:
                self._runs.setdefault(run.id, run)

    def _poll(self, is_remote: bool) -> None:
        pause_s = LOOK_REMOTE_S if is_remote else LOOK_S
        found_s = time.monotonic()
        while not self._stop.is_set():
            if not is_remote and time.monotonic() - found_s > FIND_S:
                found_s = time.monotonic()
                self._try("", self.find)
            mine = [run for run in self.all() if run.files.is_remote == is_remote]
            unread = [run for run in mine if self._look(run)]
            while unread and not self._stop.is_set():
                # one block of each in turn, and a pause: requests must not wait for a file to end
                unread = [run for run in unread if self._look(run)]
                self._stop.wait(_PAUSE_S)
            self._stop.wait(pause_s)

    def _look(self, run: WatchedRun) -> bool:
        return bool(self._try(run.id, lambda: run.look(time.time())))

    def _try(self, about: str, act: Callable[[], Any]) -> Any:
        """Act, and remember an error: a store that does not answer now may answer later, and the page says so."""
        try:
            result = act()
            self._errors.pop(about, None)
            return result
        except Exception as error:
            self._errors[about] = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None


MAX_TRIALS = 500
MAX_BYTES = 4 << 20


class TuneFile:
    """The file that `embark tune` writes next to its trials, read again when it has changed."""

    def __init__(self, run: Path) -> None:
        self._path = run.parent / TUNE if run.name.startswith("trial-") else None
        self._mark: tuple[int, int] | None = None
        self.shown: JsonDict | None = None

    def look(self) -> bool:
        """Read the file; True where it has changed."""
        if self._path is None:
            return False
        try:
            status = self._path.lstat()
            mark = (status.st_mtime_ns, status.st_size)
            if mark == self._mark or status.st_size > MAX_BYTES or self._path.is_symlink():
                return False
            self._mark, self.shown = mark, _shown(json.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # another program's file
            return False
        return True


def _shown(tune: JsonMap) -> JsonDict:
    known = metric(tune["metric"])
    trials = [{**{name: one[name] for name in ("number", "state", "value", "seconds", "usd")},
               "values": {field: f"{value:.3g}" if isinstance(value, float) else str(value)
                          for field, value in one["values"].items()}} for one in tune["trials"][:MAX_TRIALS]]
    done = [one for one in trials if one["value"] is not None]
    best = list(accumulate((one["value"] for one in done), max if known.better == "up" else min))
    sentence = f"{pluralize(len(trials), 'trial')} of {tune['num_wanted']}"
    if best:
        sentence += f"; best held-out {known.label} {format_float(best[-1])}, of the spec's own values " \
                    f"{format_float(tune['own_value'])}"
    return {"metric": known.label, "sentence": sentence, "best": tune["best"], "trials": trials,
            "numbers": [one["number"] for one in done], "values": [one["value"] for one in done], "best_values": best,
            "best_spec": tune["best_spec"]}

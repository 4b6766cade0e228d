"""Progress of long work, for people: what is done, how long the rest takes, how much memory all processes have."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Self

import psutil

from embark.values import frozen

_REPORT_EVERY_S = 0.5
_MEASURE_EVERY_S = 0.2


@frozen
class Progress:
    """A report of what is done."""

    stage: str  # Such as `reading`, `numbering ids`, `counting`.
    done: int
    total: int  # Bytes of input, or whatever the stage counts.
    rows: int
    elapsed_s: float
    left_s: float | None
    num_bad: int = 0
    memory_bytes: int = 0  # The largest so far of all processes together.


OnProgress = Callable[[Progress], None]


class ProgressReporter:
    """Turns work done, in any thread, into `Progress`, stage after stage and not too often."""

    def __init__(self, notify: OnProgress | None = None, memory: MemoryMonitor | None = None) -> None:
        self._notify, self._memory = notify, memory
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._stage, self._total, self._done, self._done_before = "", 0, 0, 0
        self._stage_began_s = self._reported_s = self._began_s
        self.num_rows = self.num_bad = 0

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Begin a stage; an earlier call has `done` a part of it already."""
        self._stage, self._total, self._done, self._done_before = stage, total, done, done
        self._stage_began_s = time.monotonic()
        self._report()

    def advance(self, num_done: int, num_rows: int = 0, num_bad: int = 0) -> None:
        """Count more of the stage as done."""
        with self._lock:
            self._done += num_done
            self.num_rows += num_rows
            self.num_bad += num_bad
            if self._done >= self._total or time.monotonic() - self._reported_s >= _REPORT_EVERY_S:
                self._report()

    def end(self) -> None:
        """Report that everything is done."""
        self.begin("done", 1, 1)

    def _report(self) -> None:
        self._reported_s = now = time.monotonic()
        new = self._done - self._done_before
        left_s = max(0.0, (now - self._stage_began_s) * (self._total - self._done) / new) if new > 0 else None
        if self._notify:
            self._notify(Progress(self._stage, self._done, self._total, self.num_rows, now - self._began_s, left_s,
                                  self.num_bad, self._memory.peak_bytes if self._memory else 0))


class MemoryMonitor:
    """A thread that measures this process and its descendants, and holds the largest sum.

    A page that several processes share counts once (its "proportional set size"), where the kernel says so.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embark-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))
            if self._is_over.wait(_MEASURE_EVERY_S):
                return


def tree_bytes(pid: int) -> int:
    """Return the memory of the process and its descendants."""
    try:
        process = psutil.Process(pid)
        return sum(map(_process_bytes, (process, *process.children(recursive=True))))
    except psutil.NoSuchProcess:
        return 0


def _process_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0

"""How much memory this process and all below it take, measured while they work."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_EVERY_S = 0.2


class MemoryWatch:
    """A thread that looks from time to time and keeps the largest sum.

    A page that several processes share counts once (its "proportional set size"), where the kernel says so.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="embark-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))
            if self._is_over.wait(_EVERY_S):
                return


def tree_bytes(pid: int) -> int:
    """Of the process and its descendants."""
    return sum(_process_bytes(one) for one in tree_pids(pid))


def tree_pids(pid: int) -> list[int]:
    """The process and its descendants."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            below.setdefault(parent, []).append(int(entry))
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += below.get(one, [])
    return found


def _parent(pid: int) -> int | None:
    try:
        # The name, in brackets, may hold anything; the parent stands two fields behind it.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _process_bytes(pid: int) -> int:
    for file, name in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            for line in Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines():
                if line.startswith(name):
                    return int(line.split()[1]) * 1024
        except OSError:
            continue
    return 0

"""How far it is, how fast, and how long it will take, told not too often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from embark.data.prepare.memory import MemoryWatch
from embark.data.prepare.pieces import Progress

Tell = Callable[[Progress], None]
_EVERY_S = 0.5


class Teller:
    """Turns reports of work done into `Progress`, stage by stage."""

    def __init__(self, tell: Tell, memory: MemoryWatch) -> None:
        self._tell, self._memory = tell, memory
        self._began_at = time.monotonic()
        self._stage, self._total, self._done, self._done_before = "", 0, 0, 0
        self._stage_began_at = self._told_at = self._began_at
        self.num_rows = self.num_bad = 0
        self.stages_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Another stage; `done` of it was done by an earlier call."""
        self.end_stage()
        self._stage, self._total, self._done, self._done_before = stage, total, done, done
        self._stage_began_at = time.monotonic()
        self._say()

    def report(self, num_done: int, num_rows: int, num_bad: int) -> None:
        """More of it is done."""
        self._done += num_done
        self.num_rows += num_rows
        self.num_bad += num_bad
        if time.monotonic() - self._told_at >= _EVERY_S:
            self._say()

    def pass_on(self, progress: Progress) -> None:
        """What another says of its own part."""
        self._stage, self._total, self._done, self._done_before = progress.stage, progress.total, progress.done, 0
        if time.monotonic() - self._told_at >= _EVERY_S:
            self._say()

    def end_stage(self) -> None:
        """Note what the stage took."""
        if self._stage:
            spent_s = time.monotonic() - self._stage_began_at
            self.stages_s[self._stage] = self.stages_s.get(self._stage, 0.0) + spent_s
            self._stage = ""

    def end(self, more: dict[str, Any]) -> None:
        """All is done."""
        self.end_stage()
        self._tell(Progress("done", 1, 1, self.num_rows, self.elapsed_s, 0.0, self.num_bad, self._memory.peak_bytes,
                            more))

    def _say(self) -> None:
        self._told_at = now = time.monotonic()
        new = self._done - self._done_before
        left_s = (now - self._stage_began_at) * (self._total - self._done) / new if new > 0 else None
        self._tell(Progress(self._stage, self._done, self._total, self.num_rows, self.elapsed_s,
                            None if left_s is None else max(0.0, left_s), self.num_bad, self._memory.peak_bytes))

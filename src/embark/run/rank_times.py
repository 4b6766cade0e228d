"""What each rank takes for a step and what its machine shows: the `ranks` event, whichever library trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from embark.events.system import SystemSampler
from embark.run.clock import Clock, Counted
from embark.run.logger import RunLogger


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's."""

    counted: Counted
    system: dict[str, Any] | None
    """Of its machine; from one rank of each, and where it is new."""


class RankTimes:
    """Each rank gives its own; rank 0 has all of them gathered, and tells them every so many seconds."""

    def __init__(self, logger: RunLogger, clock: Clock, every_s: float, rank: int, *, is_sampling: bool) -> None:
        """`is_sampling` is true on one rank of each machine. With `every_s` 0 nothing is logged."""
        self._logger, self._clock, self._every_s = logger, clock, every_s
        self._sampler = SystemSampler(every_s if is_sampling else 0.0, rank)
        self._told_s: float | None = None
        self._before: list[Counted] = []
        self._systems: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        self._sampler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampler.__exit__(kind, error, trace)

    def mine(self) -> RankTime:
        return RankTime(self._clock.counted(), self._sampler.take())

    def tell(self, step: int, times: Sequence[RankTime], *, is_last: bool) -> None:
        """On rank 0, with every rank's."""
        self._systems |= {rank: one.system for rank, one in enumerate(times) if one.system}
        now = time.monotonic()
        is_due = self._told_s is None or is_last or now - self._told_s >= self._every_s
        if not self._every_s or not is_due:
            return
        self._told_s = now
        counts = [one.counted for one in times]
        befores = self._before or [Counted(0, 0.0, 0.0, 0.0)] * len(counts)
        self._before = counts
        self._logger.log("ranks", {
            "step": step,
            "step_s": [_own_step_s(before, after) for before, after in zip(befores, counts, strict=True)],
            "input_s": [_input_s(before, after) for before, after in zip(befores, counts, strict=True)],
            "systems": list(self._systems.values()),
        })


def _own_step_s(before: Counted, now: Counted) -> float:
    """A step, less the wait for others: so a slow rank differs from those that wait for it."""
    own_s = (now.train_s - before.train_s) - (now.agree_s - before.agree_s)
    return max(0.0, own_s) / max(now.num_steps - before.num_steps, 1)


def _input_s(before: Counted, now: Counted) -> float:
    return (now.input_s - before.input_s) / max(now.num_steps - before.num_steps, 1)

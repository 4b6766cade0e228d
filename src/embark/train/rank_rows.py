"""What every rank knows, brought together at each told step: times, machines, phases and trouble, in one gather."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from embark.spec import RunSpec
from embark.train.clock import Clock, Counted
from embark.train.faults import Trouble
from embark.train.phases import PHASES, Looks
from embark.train.telling import Telling
from embark.train.world import World
from embark.watch.system import SystemSampler

FIRST_LOOK_STEPS = 10
"""A look before that would see a step warm up."""
LOOK_EVERY_S = 60.0
"""On a CPU, where a look has been measured to cost some hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's."""

    trouble: Trouble | None
    counted: Counted
    system: dict[str, Any] | None
    """Of its machine; from one rank of each, and where it is new."""
    phases: dict[str, float] | None
    """Where a look ended since the last row."""
    wants_look: bool
    """Rank 0 says when to look; all then look at the same steps."""


class RankRows:
    """Gathers on every rank, tells on rank 0."""

    def __init__(self, spec: RunSpec, world: World, told: Telling, clock: Clock) -> None:
        self._world, self._told, self._clock = world, told, clock
        self._every_s = spec.watch.system_every_s
        self._look_every_s = _look_every_s(spec, world)
        self._looks = Looks(world.device)
        self._looked_s: float | None = None
        self._must_look = False
        self._told_s: float | None = None
        self._before: list[Counted] = []
        self._systems: dict[int, dict[str, Any]] = {}
        self._has_told_problem = False
        self._sampler = SystemSampler(self._every_s if world.local_rank == 0 else 0.0, world.rank)

    def __enter__(self) -> Self:
        self._sampler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._looks.close()
        self._sampler.__exit__(kind, error, trace)

    def looking(self) -> AbstractContextManager[Any]:
        """Around each step. A look begins here and not where it is decided: an evaluation may come in between."""
        if self._must_look:
            self._must_look = False
            self._looks.wait_for_device()
            with self._clock.paused():
                self._looks.begin(self._clock.counted().input_s)
        return self._looks.step()

    def stepped(self) -> None:
        """After each step."""
        if self._looks.is_looking:
            if self._looks.is_at_its_end:
                self._looks.wait_for_device()
            with self._clock.paused():
                self._looks.stepped(self._clock.counted().input_s)

    def gather(self, trouble: Trouble | None) -> list[Row]:
        """Every rank's row, on every rank."""
        mine = Row(trouble, self._clock.counted(), self._sampler.take(), self._looks.take(), self._wants_look())
        return self._world.gathered(mine)

    def tell(self, step: int, rows: Sequence[Row], *, is_last: bool) -> None:
        """What came of it. Where rank 0 wants a look, all look at the steps that come next."""
        if self._world.is_first:
            self._tell_ranks(step, rows, is_last=is_last)
            self._tell_phases(step, rows)
        if rows[0].wants_look and not is_last:
            self._looked_s = time.monotonic()
            self._must_look = True

    def _tell_ranks(self, step: int, rows: Sequence[Row], *, is_last: bool) -> None:
        self._systems |= {rank: row.system for rank, row in enumerate(rows) if row.system}
        now = time.monotonic()
        is_due = self._told_s is None or is_last or now - self._told_s >= self._every_s
        if not self._every_s or not is_due:
            return
        self._told_s = now
        counts = [row.counted for row in rows]
        befores = self._before or [Counted(0, 0.0, 0.0, 0.0)] * len(counts)
        self._before = counts
        self._told.tell("ranks", {
            "step": step,
            "step_s": [_own_step_s(before, after) for before, after in zip(befores, counts, strict=True)],
            "input_s": [_input_s(before, after) for before, after in zip(befores, counts, strict=True)],
            "systems": list(self._systems.values()),
        })

    def _tell_phases(self, step: int, rows: Sequence[Row]) -> None:
        looked = [row.phases for row in rows if row.phases]
        if looked:
            means = {phase: sum(one[phase] for one in looked) / len(looked) for phase in PHASES}
            own_s = [sum(row.phases.values()) - row.phases["all_to_all"] if row.phases else None for row in rows]
            self._told.tell("phases", {"step": step, "seconds": means, "own_s": own_s})
        if self._looks.problem and not self._has_told_problem:
            self._has_told_problem = True
            self._told.tell("note", {"level": "info",
                                     "text": f"where a step's time goes is not known here: {self._looks.problem}"})

    def _wants_look(self) -> bool:
        if not self._world.is_first or not self._look_every_s or self._looks.problem:
            return False
        if self._looked_s is None:
            return self._clock.counted().num_steps >= FIRST_LOOK_STEPS
        return time.monotonic() - self._looked_s >= self._look_every_s


def first_trouble(rows: Sequence[Row]) -> Trouble | None:
    """Of the lowest rank that has any."""
    return next((row.trouble for row in rows if row.trouble), None)


def _look_every_s(spec: RunSpec, world: World) -> float:
    asked = spec.watch.phases_every_s
    if asked == "auto":
        return LOOK_EVERY_S if world.device.type == "cpu" else 0.0
    return asked


def _own_step_s(before: Counted, now: Counted) -> float:
    """A step, less the wait for others: so a slow rank differs from those that wait for it."""
    own_s = (now.train_s - before.train_s) - (now.agree_s - before.agree_s)
    return max(0.0, own_s) / max(now.num_steps - before.num_steps, 1)


def _input_s(before: Counted, now: Counted) -> float:
    return (now.input_s - before.input_s) / max(now.num_steps - before.num_steps, 1)

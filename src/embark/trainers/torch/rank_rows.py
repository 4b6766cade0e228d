"""What every rank knows, brought together at each told step: times, machines, phases and trouble, in one gather."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from embark.run.clock import Clock
from embark.run.logger import RunLogger
from embark.run.rank_times import RankTime, RankTimes
from embark.spec import RunSpec
from embark.trainers.torch.faults import Trouble
from embark.trainers.torch.phases import PHASES, Looks
from embark.trainers.torch.world import World

FIRST_LOOK_STEPS = 10
"""A look before that would see a step warm up."""
LOOK_EVERY_S = 60.0
"""On a CPU, where a look has been measured to cost some hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's."""

    trouble: Trouble | None
    time: RankTime
    phases: dict[str, float] | None
    """Where a look ended since the last row."""
    wants_look: bool
    """Rank 0 says when to look; all then look at the same steps."""


class RankRows:
    """Gathers on every rank, tells on rank 0."""

    def __init__(self, spec: RunSpec, world: World, logger: RunLogger, clock: Clock) -> None:
        self._world, self._logger, self._clock = world, logger, clock
        self._times = RankTimes(logger, clock, spec.watch.system_every_s, world.rank, is_sampling=world.local_rank == 0)
        self._look_every_s = _look_every_s(spec, world)
        self._looks = Looks(world.device)
        self._looked_s: float | None = None
        self._must_look = False
        self._has_told_problem = False

    def __enter__(self) -> Self:
        self._times.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._looks.close()
        self._times.__exit__(kind, error, trace)

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
        mine = Row(trouble, self._times.mine(), self._looks.take(), self._wants_look())
        return self._world.gathered(mine)

    def tell(self, step: int, rows: Sequence[Row], *, is_last: bool) -> None:
        """What came of it. Where rank 0 wants a look, all look at the steps that come next."""
        if self._world.is_first:
            self._times.tell(step, [row.time for row in rows], is_last=is_last)
            self._tell_phases(step, rows)
        if rows[0].wants_look and not is_last:
            self._looked_s = time.monotonic()
            self._must_look = True

    def _tell_phases(self, step: int, rows: Sequence[Row]) -> None:
        looked = [row.phases for row in rows if row.phases]
        if looked:
            means = {phase: sum(one[phase] for one in looked) / len(looked) for phase in PHASES}
            own_s = [sum(row.phases.values()) - row.phases["all_to_all"] if row.phases else None for row in rows]
            self._logger.log("phases", {"step": step, "seconds": means, "own_s": own_s})
        if self._looks.problem and not self._has_told_problem:
            self._has_told_problem = True
            self._logger.log("note", {"level": "info",
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

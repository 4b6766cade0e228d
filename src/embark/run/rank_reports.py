"""What every rank knows, gathered at each logged step: times, host load, step phases and trouble, in one collective."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

from embark.events.system import SystemSampler
from embark.spec import RunSpec
from embark.values import JsonDict, frozen
from .clock import Clock, StepCounters
from .evaluation import Trouble
from .logger import RunLogger
from .trainer import World

FIRST_PROFILE_STEPS = 10  # A profile before that would see a step warm up.
PROFILE_EVERY_S = 60.0  # Interval on a CPU, where a profile costs some hundredths of a second.
_NOTHING = nullcontext()


class StepProfiler(Protocol):
    """Profiles a few steps on request. A failure in here ends the profiling, never the run."""

    problem: str  # Why there will be no more profiles.

    @property
    def is_active(self) -> bool: ...

    @property
    def is_at_last_step(self) -> bool: ...

    def wait_for_device(self) -> None: ...

    def begin(self, input_s: float) -> None: ...

    def step(self) -> AbstractContextManager[Any]: ...

    def stepped(self, input_s: float) -> None: ...

    def take(self) -> dict[str, float] | None:
        """Return the seconds of each phase in a step, once a profile is done."""

    def close(self) -> None: ...


@frozen
class RankReport:
    """The measurements of one rank at a logged step."""

    trouble: Trouble | None
    counted: StepCounters
    system: JsonDict | None  # The host's load, from one rank of each host, if it is new.
    phases: dict[str, float] | None  # Seconds by phase, if a profile ended since the last report.
    wants_profile: bool  # Rank 0 says when to profile; all then profile the same steps.


class RankReports:
    """Gathers reports on every rank, and logs them on rank 0."""

    def __init__(
        self, spec: RunSpec, world: World, logger: RunLogger, clock: Clock, profiler: StepProfiler | None
    ) -> None:
        self._world, self._logger, self._clock, self._profiler = world, logger, clock, profiler
        self._every_s = spec.watch.system_every_s
        self._sampler = SystemSampler(self._every_s if world.is_host_leader else 0.0, world.rank)
        self._profile_every_s = _profile_every_s(spec, world) if profiler else 0.0
        self._logged_s: float | None = None
        self._profiled_s: float | None = None
        self._must_profile = False
        self._has_logged_problem = False
        self._before: list[StepCounters] = []
        self._systems: dict[int, JsonDict] = {}

    def __enter__(self) -> Self:
        self._sampler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler:
            self._profiler.close()
        self._sampler.__exit__(*error)

    def profiling(self) -> AbstractContextManager[Any]:
        """Surround each step. A profile begins here and not where it is decided: an evaluation may come in between."""
        if self._profiler is None:
            return _NOTHING
        if self._must_profile:
            self._must_profile = False
            self._profiler.wait_for_device()
            with self._clock.paused():
                self._profiler.begin(self._clock.counters().input_s)
        return self._profiler.step()

    def stepped(self) -> None:
        """Count a step that is done."""
        if self._profiler and self._profiler.is_active:
            if self._profiler.is_at_last_step:
                self._profiler.wait_for_device()
            with self._clock.paused():
                self._profiler.stepped(self._clock.counters().input_s)

    def gather(self, trouble: Trouble | None) -> list[RankReport]:
        """Return every rank's report, on every rank."""
        phases = self._profiler.take() if self._profiler else None
        mine = RankReport(trouble, self._clock.counters(), self._sampler.take(), phases, self._wants_profile())
        return self._world.gathered(mine)

    def log(self, step: int, reports: Sequence[RankReport], *, is_last: bool) -> None:
        """Log the reports on rank 0. If rank 0 wants a profile, all profile the next steps."""
        if self._world.is_first:
            self._log_times(step, reports, is_last=is_last)
            self._log_phases(step, reports)
        if reports[0].wants_profile and not is_last:
            self._profiled_s = time.monotonic()
            self._must_profile = True

    def _log_times(self, step: int, reports: Sequence[RankReport], *, is_last: bool) -> None:
        self._systems |= {rank: one.system for rank, one in enumerate(reports) if one.system}
        now = time.monotonic()
        is_due = self._logged_s is None or is_last or now - self._logged_s >= self._every_s
        if not self._every_s or not is_due:
            return
        self._logged_s = now
        counts = [one.counted for one in reports]
        pairs = list(zip(self._before or [StepCounters(0, 0.0, 0.0, 0.0)] * len(counts), counts, strict=True))
        self._before = counts
        self._logger.log("ranks", {
            "step": step, "step_s": [_own_step_s(before, after) for before, after in pairs],
            "input_s": [(after.input_s - before.input_s) / max(after.num_steps - before.num_steps, 1)
                        for before, after in pairs],
            "systems": list(self._systems.values())
        })

    def _log_phases(self, step: int, reports: Sequence[RankReport]) -> None:
        profiles = [report.phases for report in reports if report.phases]
        if profiles:
            means = {phase: sum(one[phase] for one in profiles) / len(profiles) for phase in profiles[0]}
            own_s = [sum(r.phases.values()) - r.phases["all_to_all"] if r.phases else None for r in reports]
            self._logger.log("phases", {"step": step, "seconds": means, "own_s": own_s})
        if self._profiler and self._profiler.problem and not self._has_logged_problem:
            self._has_logged_problem = True
            self._logger.note(f"cannot tell where a step's time goes: {self._profiler.problem}")

    def _wants_profile(self) -> bool:
        if not self._world.is_first or not self._profile_every_s or not self._profiler or self._profiler.problem:
            return False
        if self._profiled_s is None:
            return self._clock.counters().num_steps >= FIRST_PROFILE_STEPS
        return time.monotonic() - self._profiled_s >= self._profile_every_s


def first_trouble(reports: Sequence[RankReport]) -> Trouble | None:
    """Return the trouble of the lowest rank that has any."""
    return next((report.trouble for report in reports if report.trouble), None)


def _own_step_s(before: StepCounters, now: StepCounters) -> float:
    """Return a step's time without the wait for others: so a slow rank differs from those that wait for it."""
    own_s = (now.train_s - before.train_s) - (now.agree_s - before.agree_s)
    return max(0.0, own_s) / max(now.num_steps - before.num_steps, 1)


def _profile_every_s(spec: RunSpec, world: World) -> float:
    every_s = spec.watch.phases_every_s
    if every_s == "auto":
        return PROFILE_EVERY_S if world.device_type == "cpu" else 0.0
    return every_s

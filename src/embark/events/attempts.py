"""A run's events, split at its starts: one attempt for each time that it was started."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from embark.events.events import Event
from embark.formatting import to_finite

Reason = Literal["preempted", "interrupted", "died", "error"]
BUDGET = "budget"
"""The signal and the outcome of a run whose budget is spent."""
_MARKS = ("step", "save", "eval", "interrupt", "end")
"""Events that hold the current step."""


@dataclass(slots=True)
class Attempt:
    """From one start to whatever ended it."""

    start_s: float
    """Unix time of its `start` event."""
    began_s: float
    """When its process started, before it loaded anything."""
    first_step: int
    last_s: float
    """The last sign of life."""
    last_step: int
    """The last one logged; a process that died may have done some more."""
    saved_step: int
    num_steps: int = 0
    """Of the complete run."""
    usd_per_hour: float | None = None
    """Of all its machines, as its `start` event has it."""
    budget_usd: float | None = None
    num_machines: int = 1
    is_spot: bool = False
    reason: Reason | None = None
    """Why it stopped, where it logged that."""
    outcome: str = ""
    """Of its `end` event; empty where there is none."""
    is_last: bool = True
    first_step_s: float | None = None
    """When it began to train; None: it did not."""
    step_times: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """It finished, or its budget was spent."""
        return self.outcome in ("done", BUDGET)

    @property
    def has_stopped(self) -> bool:
        """It logged that it stopped, or another followed it."""
        return bool(self.outcome) or self.reason is not None or not self.is_last

    @property
    def pace_s(self) -> float:
        """A step's usual time; the first window holds compilation, and counts only where it is the only one."""
        times = self.step_times[1:] or self.step_times
        return statistics.median(times) if times else 0.0

    def add(self, event: Event, time_s: float) -> None:
        values, kind = event.values, event.kind
        self.last_s = max(self.last_s, time_s)
        step = to_finite(values.get("step"))
        if kind == "resume" and step is not None:
            self.first_step = self.last_step = self.saved_step = int(step)
            return
        step_s = to_finite(values.get("step_s")) if kind == "step" else None
        if step_s is not None and step_s > 0:
            self.step_times.append(step_s)
        if kind in _MARKS and step is not None:
            self._reach(int(step), time_s, step_s)
        if kind == "save" and step is not None:
            self.saved_step = max(self.saved_step, int(step))
        elif kind == "interrupt":
            signal = values.get("signal")
            self.reason = "interrupted" if signal == "SIGINT" else "preempted"
            self.outcome = BUDGET if signal == BUDGET else self.outcome
        elif kind == "error":
            self.reason = "error"
        elif kind == "end":
            self.outcome = str(values.get("outcome", ""))

    def _reach(self, step: int, time_s: float, step_s: float | None) -> None:
        if step <= self.first_step:
            return
        if self.first_step_s is None:  # a step event comes after it and those before it are done
            began_s = time_s - (step_s or 0.0) * (step - self.first_step)
            self.first_step_s = min(time_s, max(self.start_s, began_s))
        self.last_step = max(self.last_step, step)


def attempts(events: Iterable[Event]) -> list[Attempt]:
    """In their order. Invalid values are skipped."""
    found: list[Attempt] = []
    for event in events:
        time_s = to_finite(event.time_s)
        if time_s is None or not isinstance(event.kind, str):
            continue
        if event.kind == "start":
            if found:
                found[-1].is_last = False
            found.append(_started(event, time_s))
        elif found:
            found[-1].add(event, time_s)
    return found


def _started(event: Event, time_s: float) -> Attempt:
    values = event.values
    step = int(to_finite(values.get("first_step")) or 0)
    return Attempt(
        time_s, time_s - max(0.0, to_finite(values.get("age_s")) or 0.0), step, time_s, step, step,
        num_steps=int(to_finite(values.get("num_steps")) or 0), usd_per_hour=to_finite(values.get("usd_per_hour")),
        budget_usd=to_finite(values.get("budget_usd")), num_machines=int(to_finite(values.get("num_machines")) or 1),
        is_spot=values.get("is_spot") is True,
    )

"""What a run has cost so far, from its events alone: its attempts, what each interruption lost, machine time, and
dollars where a price is known."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from embark.formatting import format_duration, format_usd, pluralize, to_finite
from embark.values import frozen
from .events import Event

Reason = Literal["preempted", "interrupted", "died", "error"]
BUDGET = "budget"  # The signal and the outcome of a run whose budget is spent.
_MARKS = ("step", "save", "eval", "interrupt", "end")  # Events that hold the current step.
_TIMES = {1: "once", 2: "twice"}


@dataclass(slots=True)
class Attempt:
    """One attempt of a run, from its `begin` to whatever ended it. It may end before its `start`, while it loads."""

    start_s: float  # Unix time of its `start` event, or of its `begin`.
    began_s: float  # When its process started, before it loaded anything.
    first_step: int
    last_s: float  # The last sign of life.
    last_step: int  # The last one logged; a process that died may have done some more.
    saved_step: int
    num_steps: int = 0  # Steps of the complete run.
    usd_per_hour: float | None = None  # Price of all its machines, from its `start` event.
    budget_usd: float | None = None
    num_machines: int = 1
    is_spot: bool = False
    reason: Reason | None = None  # Why it stopped, where it logged that.
    outcome: str = ""  # Outcome in its `end` event; empty if there is none.
    is_last: bool = True
    number: float | None = None  # The fencing token of its lease.
    has_started: bool = False
    estimated_s: float = 0.0  # From its last event to when it was killed, as far as its lease tells.
    first_step_s: float | None = None  # When it began to train; None: it did not.
    step_times: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether it finished, or its budget was spent."""
        return self.outcome in ("done", BUDGET)

    @property
    def has_stopped(self) -> bool:
        """Whether it logged that it stopped, or another attempt followed it."""
        return bool(self.outcome) or self.reason is not None or not self.is_last

    @property
    def pace_s(self) -> float:
        """A step's usual time; the first window holds compilation, and counts only if it is the only one."""
        times = self.step_times[1:] or self.step_times
        return statistics.median(times) if times else 0.0

    @property
    def held_s(self) -> float:
        return max(0.0, self.last_s - self.began_s)

    @property
    def working_s(self) -> float:
        return 0.0 if self.first_step_s is None else max(0.0, self.last_s - self.first_step_s)

    def start(self, event: Event) -> None:
        values, self.start_s, self.has_started = event.values, event.time_s, True
        self.last_s = max(self.last_s, event.time_s)
        self.first_step = self.last_step = self.saved_step = int(to_finite(values.get("first_step")) or 0)
        self.num_steps = int(to_finite(values.get("num_steps")) or 0)
        self.num_machines = int(to_finite(values.get("num_machines")) or 1)

    def end_at(self, ended_s: float) -> None:
        """Count an attempt that was killed to here."""
        self.estimated_s = max(0.0, ended_s - self.last_s)
        self.last_s += self.estimated_s

    def add(self, event: Event) -> None:
        values, kind, time_s = event.values, event.kind, event.time_s
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
    """Return the attempts in their order. Invalid values are skipped. A `start` belongs to the `begin` before it that
    has its number; events of earlier versions have no `begin`."""
    found: list[Attempt] = []
    boot, clock_s, jump_s = None, 0.0, 0.0
    for event in events:
        uptime_s = to_finite(event.values.get("uptime_s")) if event.kind == "begin" else None
        if uptime_s is not None:  # since one boot, a step of the clock between two processes is not time that passed
            booted_s = event.time_s - uptime_s
            jump_s = booted_s - clock_s if event.values.get("boot") == boot else 0.0
            boot, clock_s = event.values.get("boot"), booted_s - jump_s
        if jump_s:
            event = replace(event, time_s=event.time_s - jump_s)
        if event.kind in ("begin", "start"):
            number, last = to_finite(event.values.get("attempt")), found[-1] if found else None
            if event.kind == "begin" or last is None or last.has_started or number is None or number != last.number:
                found += _begun(event, last)
            if event.kind == "start":
                found[-1].start(event)
        elif found:
            found[-1].add(event)
    return found


def _begun(event: Event, before: Attempt | None) -> list[Attempt]:
    """Return a new attempt; before it, one that was killed after it took its lease and before it recorded anything."""
    values, time_s = event.values, event.time_s
    began_s = time_s - max(0.0, to_finite(values.get("age_s")) or 0.0)
    ended_s = min(began_s, to_finite(values.get("previous_ended_s")) or 0.0)
    killed_s = to_finite(values.get("previous_began_s")) or 0.0
    starts_s = [began_s]
    if before is not None and killed_s <= before.last_s:
        before.end_at(ended_s)
    elif 0 < killed_s < ended_s:
        starts_s.insert(0, killed_s)
    found = []
    for begin_s in starts_s:
        attempt = Attempt(
            begin_s, begin_s, 0, begin_s, 0, 0, usd_per_hour=to_finite(values.get("usd_per_hour")),
            budget_usd=to_finite(values.get("budget_usd")), is_spot=values.get("is_spot") is True,
            number=to_finite(values.get("attempt")))
        if before is not None:  # where it will resume, until its `start` says so
            before.is_last = False
            attempt.first_step = attempt.last_step = attempt.saved_step = before.saved_step
            attempt.num_steps, attempt.num_machines = before.num_steps, before.num_machines
        found.append(attempt)
        before = attempt
    if len(found) > 1:
        found[0].end_at(ended_s)
    found[-1].start_s = found[-1].last_s = time_s
    return found


@frozen
class Interruption:
    """One time that a run was stopped before its end."""

    stopped_s: float  # Unix time of the last sign of life.
    resumed_s: float | None  # When training resumed; None: not yet, as far as the events say.
    reason: Reason
    """`preempted`: by a signal or the cloud's notice. `interrupted`: by Ctrl-C. `error`: by an error that it logged.
    `died`: without an event."""
    stopped_step: int  # The last one logged; a process that died may have done some more.
    resumed_step: int | None
    lost_steps: int  # Steps to be repeated since the checkpoint that it resumed from, or since the last one.
    redone_s: float  # Seconds to repeat the lost steps at the measured pace.
    down_s: float  # Seconds from the last sign of life to the first new step.
    restarted_s: float | None = None
    """When a new process started, before it loaded anything; machines are paid from about then on."""
    between_s: float = 0.0  # Seconds of attempts in between that did no step.

    @property
    def away_s(self) -> float:
        """The part of `down_s` without a process; the rest is loading and compiling."""
        return 0.0 if self.restarted_s is None else min(self.down_s, max(0.0, self.restarted_s - self.stopped_s))


@frozen
class Losses:
    """All interruptions of a run together."""

    num: int
    num_preempted: int
    lost_steps: int
    redone_s: float
    down_s: float
    usd: float | None  # None if no price is known.
    is_open: bool = False  # The run has not resumed after the last one: its steps are still to be repeated.


def interruptions(attempts: Sequence[Attempt]) -> tuple[Interruption, ...]:
    """Return the interruptions in the order they happened. An attempt without a step is part of the interruption before
    it. Events do not tell a run that just died from one that is working: the last attempt counts only once it has
    logged that it stops, or another followed it."""
    found: list[Interruption] = []
    stopped: Attempt | None = None
    between_s = 0.0
    for attempt in attempts:
        if stopped is not None and attempt.has_started and (attempt.first_step_s is not None or attempt.is_over):
            found.append(_interruption(stopped, attempt, between_s, is_over=True))
            stopped = None
        between_s += attempt.held_s
        if not attempt.has_started:
            continue
        if attempt.is_over:
            stopped = None
        elif stopped is None and attempt.has_stopped:
            stopped, between_s = attempt, 0.0
    if stopped is not None:
        last = attempts[-1]
        between_s -= 0.0 if last is stopped else last.held_s
        found.append(_interruption(stopped, last, between_s, is_over=False))
    return tuple(found)


def losses(
    found: Sequence[Interruption], usd_per_hour: float | None = None, *, num_machines: int = 1, is_spot: bool = False
) -> Losses:
    """Add up interruptions. While a preempted spot machine is waited for, the others are paid and it is not. A run
    stopped by Ctrl-C holds no machines until it is started again."""
    usd = None
    if usd_per_hour is not None:
        paid_s = sum(one.redone_s + one.down_s - one.away_s * (1 - held_share(one, num_machines, is_spot=is_spot))
                     for one in found)
        usd = usd_per_hour * paid_s / 3600
    return Losses(len(found), sum(one.reason == "preempted" for one in found), sum(one.lost_steps for one in found),
                  sum(one.redone_s for one in found),
                  sum(one.down_s - (one.away_s if one.reason == "interrupted" else 0.0) for one in found), usd,
                  bool(found) and found[-1].resumed_s is None and found[-1].lost_steps > 0)


def held_share(one: Interruption, num_machines: int, *, is_spot: bool) -> float:
    """Return the share of the machines that are paid while there is no process."""
    if one.reason == "interrupted":
        return 0.0
    return (num_machines - 1) / max(1, num_machines) if is_spot else 1.0


def losses_sentence(lost: Losses) -> str:
    """Say what interruptions cost, such as `preempted twice; 41 steps (12.0 s) repeated, 1 min 35 s down: $0.87`; empty
    if nothing happened."""
    if not lost.num:
        return ""
    verb = "preempted" if lost.num_preempted == lost.num else "interrupted"
    times = _TIMES.get(lost.num, f"{lost.num:,} times")
    steps = "no steps repeated"
    if lost.lost_steps:
        when = "repeated" if not lost.is_open else "to repeat" if lost.num == 1 else "repeated or to repeat"
        steps = f"{pluralize(lost.lost_steps, 'step')} ({format_duration(lost.redone_s)}) {when}"
    usd = "" if lost.usd is None else f": {format_usd(lost.usd)}"
    return f"{verb} {times}; {steps}, {format_duration(lost.down_s)} down{usd}"


def _interruption(stopped: Attempt, after: Attempt, between_s: float, *, is_over: bool) -> Interruption:
    """Describe an interruption; while it lasts, `after` is a new attempt that is still loading, or `stopped` itself."""
    has_restarted = after is not stopped
    lost = max(0, stopped.last_step - (after.first_step if has_restarted else stopped.saved_step))
    # One that died after its last step has nothing left to train.
    until_s = after.first_step_s if has_restarted and after.first_step_s is not None else after.last_s
    return Interruption(
        stopped.last_s, until_s if is_over else None, stopped.reason or "died", stopped.last_step,
        after.first_step if is_over else None, lost, lost * (stopped.pace_s or after.pace_s),
        max(0.0, until_s - stopped.last_s), after.began_s if has_restarted else None, between_s)


@frozen
class Spending:
    """The time and money that a run has spent. Seconds are the run's own time while machines are held, not a sum over
    machines."""

    useful_s: float  # Steps, each counted once, with the saves and evaluations between them.
    redone_s: float  # Steps repeated after an interruption.
    waiting_s: float  # Loading and compiling, and machines that wait for a preempted one.
    usd_per_hour: float | None  # Price of all machines in the last attempt; None if unknown.
    usd: float | None
    step: int
    num_steps: int
    wall_step_s: float  # A step, with its share of saves and evaluations.
    outcome: str  # Outcome in the last `end` event; empty if running or killed.
    lost: Losses
    budget_usd: float | None  # The budget of the last attempt.
    last_s: float  # The last sign of life.
    num_without_step: int = 0  # Attempts that ended before their first step.
    without_step_s: float = 0.0
    estimated_s: float = 0.0  # The part of `held_s` after the last events of processes that were killed.

    @property
    def held_s(self) -> float:
        return self.useful_s + self.redone_s + self.waiting_s

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step, at the measured pace; None if nothing was measured yet."""
        if self.outcome == "done":
            return 0.0
        return max(0, self.num_steps - self.step) * self.wall_step_s if self.wall_step_s and self.num_steps else None

    def usd_for(self, seconds: float | None) -> float | None:
        """Return the price of this many more seconds."""
        return usd_for(self.usd_per_hour, seconds)


def usd_for(usd_per_hour: float | None, seconds: float | None) -> float | None:
    """Return the price of this many seconds; None if either is unknown."""
    return None if seconds is None or usd_per_hour is None else usd_per_hour * seconds / 3600


def spending(
    events: Iterable[Event], *, usd_per_hour: float | None = None, now_s: float | None = None, ended_s: float = 0.0
) -> Spending | None:
    """Add up what a run has spent; None if it has not begun. `usd_per_hour` is for attempts without a price of their
    own; `now_s`, for a running run, counts the time since its last event; `ended_s` is when one that was killed
    ended."""
    tried = attempts(events)
    if not tried:
        return None
    last = tried[-1]
    if now_s is not None and not last.has_stopped:
        last.last_s = max(last.last_s, now_s)
    elif not last.has_stopped:
        last.end_at(ended_s)
    found = interruptions(tried)
    gaps = [_gap(tried, one) for one in found]
    working_s = sum(one.working_s for one in tried)
    redone_s = min(sum(one.redone_s for one in found if one.resumed_s is not None), working_s)
    ended = next((one for one in reversed(tried) if one.has_started or one.outcome), last)
    without_step = [one.held_s for one in tried if one.first_step_s is None and not one.outcome
                    and (one.has_stopped or ended_s)]
    price = last.usd_per_hour if last.usd_per_hour is not None else usd_per_hour
    return Spending(
        useful_s=working_s - redone_s, redone_s=redone_s,
        waiting_s=sum(one.held_s - one.working_s for one in tried) + sum(gaps), usd_per_hour=price,
        usd=_usd(tried, gaps, usd_per_hour),
        step=last.last_step, num_steps=last.num_steps, wall_step_s=_wall_step_s(tried),
        outcome=ended.outcome if ended.is_over else last.outcome,
        lost=losses(found, price, num_machines=last.num_machines, is_spot=last.is_spot),
        budget_usd=ended.budget_usd, last_s=last.last_s, num_without_step=len(without_step),
        without_step_s=sum(without_step), estimated_s=sum(one.estimated_s for one in tried)
    )


def _usd(tried: Sequence[Attempt], gaps: Sequence[float], default: float | None) -> float | None:
    """Return the dollars of all attempts, each at its own price; None if one is unknown."""
    prices = [one.usd_per_hour if one.usd_per_hour is not None else default for one in tried]
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    held = sum(price * one.held_s for price, one in zip(known, tried, strict=True))
    return (held + known[-1] * sum(gaps)) / 3600


def _gap(tried: Sequence[Attempt], one: Interruption) -> float:
    """Return the seconds without a process in which machines were paid for, and which no attempt in between counts
    already."""
    share = held_share(one, tried[-1].num_machines, is_spot=tried[-1].is_spot)
    return max(0.0, one.away_s - one.between_s) * share


def _wall_step_s(tried: Sequence[Attempt]) -> float:
    """Return the time of a step of the newest attempt that did some steps, with its share of saves and evaluations."""
    for attempt in reversed(tried):
        num_done = attempt.last_step - attempt.first_step
        if num_done > 0 and attempt.working_s > 0:
            return attempt.working_s / num_done
    return 0.0

"""What a run lost each time it was interrupted, from its events alone: repeated steps, and time without a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embark.events.attempts import Attempt, Reason
from embark.events.attempts import attempts as split_attempts
from embark.events.events import Event
from embark.formatting import format_duration, pluralize

_TIMES = {1: "once", 2: "twice"}


@dataclass(frozen=True, slots=True)
class Interruption:
    """One time that a run was stopped before its end."""

    stopped_s: float
    """Unix time of the last sign of life."""
    resumed_s: float | None
    """When training resumed; None: not yet, as far as the events say."""
    reason: Reason
    """`preempted`: by a signal or the cloud's notice. `interrupted`: by Ctrl-C. `error`: by an error that it logged.
    `died`: without an event."""
    stopped_step: int
    """The last one logged; a process that died may have done some more."""
    resumed_step: int | None
    lost_steps: int
    """To be repeated: since the checkpoint that it resumed from or, where it has not yet, the last one."""
    redone_s: float
    """What those steps take, at the measured pace."""
    down_s: float
    """From the last sign of life to the first new step."""
    restarted_s: float | None = None
    """When a new process started, before it loaded anything; machines are paid from about then on."""

    @property
    def away_s(self) -> float:
        """The part of `down_s` without a process; the rest is loading and compiling."""
        return 0.0 if self.restarted_s is None else min(self.down_s, max(0.0, self.restarted_s - self.stopped_s))


@dataclass(frozen=True, slots=True)
class Losses:
    """All interruptions of a run together."""

    num: int
    num_preempted: int
    lost_steps: int
    redone_s: float
    down_s: float
    usd: float | None
    """None where no price is known."""
    is_open: bool = False
    """The run has not resumed after the last one: its steps are still to be repeated."""


def interruptions(events: Iterable[Event]) -> tuple[Interruption, ...]:
    """In the order they happened. An attempt without a step is part of the interruption before it.

    Events do not tell a run that just died from one that is working: the last attempt counts only once it has logged
    that it stops, or another followed it.
    """
    return between(split_attempts(events))


def between(attempts: Sequence[Attempt]) -> tuple[Interruption, ...]:
    """The same from attempts."""
    found: list[Interruption] = []
    stopped: Attempt | None = None
    for attempt in attempts:
        if stopped is not None and (attempt.first_step_s is not None or attempt.is_over):
            found.append(_resumed(stopped, attempt))
            stopped = None
        if attempt.is_over:
            stopped = None
        elif stopped is None and attempt.has_stopped:
            stopped = attempt
    if stopped is not None:
        found.append(_not_resumed(stopped, attempts[-1]))
    return tuple(found)


def losses(
    found: Sequence[Interruption], usd_per_hour: float | None = None, *, num_machines: int = 1, is_spot: bool = False
) -> Losses:
    """Their sum. While a preempted spot machine is waited for, the others are paid and it is not.

    A run stopped by Ctrl-C holds no machines until it is started again.
    """
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
    """The share of the machines that are paid while there is no process."""
    if one.reason == "interrupted":
        return 0.0
    return (num_machines - 1) / max(1, num_machines) if is_spot else 1.0


def losses_sentence(lost: Losses) -> str:
    """`preempted twice; 41 steps (12.0 s) repeated, 1 min 35 s down: $0.87`; empty where nothing happened."""
    if not lost.num:
        return ""
    verb = "preempted" if lost.num_preempted == lost.num else "interrupted"
    times = _TIMES.get(lost.num, f"{lost.num:,} times")
    steps = "no steps repeated"
    if lost.lost_steps:
        when = "repeated" if not lost.is_open else "to repeat" if lost.num == 1 else "repeated or to repeat"
        steps = f"{pluralize(lost.lost_steps, 'step')} ({format_duration(lost.redone_s)}) {when}"
    usd = "" if lost.usd is None else f": ${lost.usd:,.2f}"
    return f"{verb} {times}; {steps}, {format_duration(lost.down_s)} down{usd}"


def _resumed(stopped: Attempt, attempt: Attempt) -> Interruption:
    # One that died after its last step has nothing left to train.
    resumed_s = attempt.last_s if attempt.first_step_s is None else attempt.first_step_s
    lost = max(0, stopped.last_step - attempt.first_step)
    pace_s = stopped.pace_s or attempt.pace_s
    return Interruption(
        stopped.last_s, resumed_s, stopped.reason or "died", stopped.last_step, attempt.first_step, lost,
        lost * pace_s, max(0.0, resumed_s - stopped.last_s), attempt.began_s,
    )


def _not_resumed(stopped: Attempt, last: Attempt) -> Interruption:
    """`last` may be a new attempt that is still loading."""
    has_restarted = last is not stopped
    lost = max(0, stopped.last_step - (last.first_step if has_restarted else stopped.saved_step))
    down_s = max(0.0, last.last_s - stopped.last_s) if has_restarted else 0.0
    return Interruption(stopped.last_s, None, stopped.reason or "died", stopped.last_step, None, lost,
                        lost * stopped.pace_s, down_s, last.began_s if has_restarted else None)

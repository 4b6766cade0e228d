"""What a run lost each time it was stopped, from its events alone: steps done twice, and seconds without a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embark.events.attempts import Attempt, Reason, attempts
from embark.events.events import Event
from embark.formatting import format_duration, pluralize

_TIMES = {1: "once", 2: "twice"}


@dataclass(frozen=True, slots=True)
class Interruption:
    """One time that a run was stopped before it had ended."""

    stopped_s: float
    """Unix time of the last sign of life."""
    resumed_s: float | None
    """When training went on; None: not yet, as far as the events say."""
    reason: Reason
    """`preempted`: asked to stop by a signal or the cloud's notice. `interrupted`: by Ctrl-C. `error`: by one that it
    could tell. `died`: without a word."""
    stopped_step: int
    """The last step that was told; a process that died may have done some more."""
    resumed_step: int | None
    lost_steps: int
    """Done, and to be done again: since the checkpoint that it went on from or, where it has not yet, the last one."""
    redone_s: float
    """What those steps take, at the pace measured."""
    down_s: float
    """From the last sign of life to the first new step."""
    restarted_s: float | None = None
    """When a process was back, before it had loaded anything; machines are paid from about then on."""

    @property
    def away_s(self) -> float:
        """Of `down_s`: without a process. The rest is loading and compiling."""
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
    """After the last of them it has not gone on yet: its steps are still to be redone."""


def interruptions(events: Iterable[Event]) -> tuple[Interruption, ...]:
    """In the order they happened. A start that never came to a step is part of the stop before it.

    Nothing in the events tells a run that just died from one that works: the last start counts only once it has said
    that it stops, or another came after it.
    """
    return between(attempts(events))


def between(tries: Sequence[Attempt]) -> tuple[Interruption, ...]:
    """The same, of a run that is cut into attempts already."""
    found: list[Interruption] = []
    stopped: Attempt | None = None
    for attempt in tries:
        if stopped is not None and (attempt.first_step_s is not None or attempt.is_over):
            found.append(_resumed(stopped, attempt))
            stopped = None
        if attempt.is_over:
            stopped = None
        elif stopped is None and attempt.has_stopped:
            stopped = attempt
    if stopped is not None:
        found.append(_not_resumed(stopped, tries[-1]))
    return tuple(found)


def losses(
    found: Sequence[Interruption], usd_per_hour: float | None = None, *, num_machines: int = 1, is_spot: bool = False
) -> Losses:
    """Together. While a spot machine that went is waited for, the others are paid and it is not.

    Who stops a run by Ctrl-C holds no machines until it is started again, and waits for nothing.
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
    """The share of the machines that are paid while no process is there."""
    if one.reason == "interrupted":
        return 0.0
    return (num_machines - 1) / max(1, num_machines) if is_spot else 1.0


def losses_sentence(lost: Losses) -> str:
    """`taken away twice; 41 steps (12.0 s) were redone and 1 min 35 s waited: $0.87`; empty where nothing happened."""
    if not lost.num:
        return ""
    verb = "taken away" if lost.num_preempted == lost.num else "stopped"
    times = _TIMES.get(lost.num, f"{lost.num:,} times")
    verb_of_steps = "was" if lost.lost_steps == 1 else "were"
    redone = "no step was redone"
    if lost.lost_steps:
        when = f"{verb_of_steps} redone" if not lost.is_open else "to redo" if lost.num == 1 else "redone or to redo"
        redone = f"{pluralize(lost.lost_steps, 'step')} ({format_duration(lost.redone_s)}) {when}"
    usd = "" if lost.usd is None else f": ${lost.usd:,.2f}"
    return f"{verb} {times}; {redone} and {format_duration(lost.down_s)} waited{usd}"


def _resumed(stopped: Attempt, attempt: Attempt) -> Interruption:
    # One that died after its last step has nothing left to do.
    resumed_s = attempt.last_s if attempt.first_step_s is None else attempt.first_step_s
    lost = max(0, stopped.last_step - attempt.first_step)
    pace_s = stopped.pace_s or attempt.pace_s
    return Interruption(
        stopped.last_s, resumed_s, stopped.reason or "died", stopped.last_step, attempt.first_step, lost,
        lost * pace_s, max(0.0, resumed_s - stopped.last_s), attempt.began_s,
    )


def _not_resumed(stopped: Attempt, last: Attempt) -> Interruption:
    """`last` may be back, and still loading."""
    is_back = last is not stopped
    lost = max(0, stopped.last_step - (last.first_step if is_back else stopped.saved_step))
    down_s = max(0.0, last.last_s - stopped.last_s) if is_back else 0.0
    return Interruption(stopped.last_s, None, stopped.reason or "died", stopped.last_step, None, lost,
                        lost * stopped.pace_s, down_s, last.began_s if is_back else None)

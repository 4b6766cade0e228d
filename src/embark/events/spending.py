"""What a run has cost so far, from its events alone: machine time, what it went into, and dollars where a price is
known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embark.events.attempts import Attempt, attempts
from embark.events.events import Event
from embark.events.interruptions import Interruption, Losses, between, held_share, losses


@dataclass(frozen=True, slots=True)
class Spending:
    """Seconds are of all machines together, while they are held: the run's own time, not a sum over machines."""

    useful_s: float
    """Steps, each counted once, with the saves and evaluations between them."""
    redone_s: float
    """Steps that had been done before an interruption."""
    waiting_s: float
    """Loading and compiling, and machines that wait for one that was taken away."""
    usd_per_hour: float | None
    """Of all machines, at the last price that the run was told; None: not known."""
    usd: float | None
    step: int
    num_steps: int
    wall_step_s: float
    """A step, with its share of saves and evaluations."""
    outcome: str
    """As the last end says; empty: under way, or dead."""
    lost: Losses
    num_starts: int
    budget_usd: float | None
    """As the last start was told."""
    last_s: float
    """The last sign of life."""

    @property
    def held_s(self) -> float:
        return self.useful_s + self.redone_s + self.waiting_s

    @property
    def left_s(self) -> float | None:
        """To the last step, at the pace measured; None where nothing was measured yet."""
        if self.outcome == "done":
            return 0.0
        return max(0, self.num_steps - self.step) * self.wall_step_s if self.wall_step_s and self.num_steps else None

    def usd_for(self, seconds: float | None) -> float | None:
        """Of so many more seconds."""
        return None if seconds is None or self.usd_per_hour is None else self.usd_per_hour * seconds / 3600

    @property
    def total_usd(self) -> float | None:
        """When it is finished."""
        left = self.usd_for(self.left_s)
        return None if self.usd is None or left is None else self.usd + left


def spending(
    events: Iterable[Event], *, usd_per_hour: float | None = None, now_s: float | None = None
) -> Spending | None:
    """None where the run has not started. `usd_per_hour` is for starts that were told no price; `now_s`, where the run
    is known to be under way, counts the time since its last sign of life."""
    tries = attempts(events)
    if not tries:
        return None
    last = tries[-1]
    if now_s is not None and not last.has_stopped:
        last.last_s = max(last.last_s, now_s)
    found = between(tries)
    gaps = [_gap(tries, one) for one in found]
    redone_s = min(sum(one.redone_s for one in found if one.resumed_s is not None), sum(map(_working_s, tries)))
    price = last.usd_per_hour if last.usd_per_hour is not None else usd_per_hour
    return Spending(
        useful_s=sum(map(_working_s, tries)) - redone_s, redone_s=redone_s,
        waiting_s=sum(map(_starting_s, tries)) + sum(gaps), usd_per_hour=price, usd=_usd(tries, gaps, usd_per_hour),
        step=last.last_step, num_steps=last.num_steps, wall_step_s=_wall_step_s(tries), outcome=last.outcome,
        lost=losses(found, price, num_machines=last.num_machines, is_spot=last.is_spot), num_starts=len(tries),
        budget_usd=last.budget_usd,
        last_s=last.last_s,
    )


def _usd(tries: Sequence[Attempt], gaps: Sequence[float], default: float | None) -> float | None:
    """Each start at its own price; None where one is not known."""
    prices = [one.usd_per_hour if one.usd_per_hour is not None else default for one in tries]
    if any(price is None for price in prices):
        return None
    held = sum((price or 0.0) * _held_s(one) for price, one in zip(prices, tries, strict=True))
    return (held + (prices[-1] or 0.0) * sum(gaps)) / 3600


def _held_s(attempt: Attempt) -> float:
    return max(0.0, attempt.last_s - attempt.began_s)


def _working_s(attempt: Attempt) -> float:
    return 0.0 if attempt.first_step_s is None else max(0.0, attempt.last_s - attempt.first_step_s)


def _starting_s(attempt: Attempt) -> float:
    return _held_s(attempt) - _working_s(attempt)


def _gap(tries: Sequence[Attempt], one: Interruption) -> float:
    """Without a process, as far as machines were held and no start in between counts it already."""
    share = held_share(one, tries[-1].num_machines, is_spot=tries[-1].is_spot)
    between_s = sum(_held_s(t) for t in tries
                    if one.restarted_s is not None and one.stopped_s <= t.began_s < one.restarted_s)
    return max(0.0, one.away_s - between_s) * share


def _wall_step_s(tries: Sequence[Attempt]) -> float:
    """Of the newest start that did some steps."""
    for attempt in reversed(tries):
        num_done = attempt.last_step - attempt.first_step
        if num_done > 0 and _working_s(attempt) > 0:
            return _working_s(attempt) / num_done
    return 0.0

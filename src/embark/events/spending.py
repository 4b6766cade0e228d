"""What a run has cost so far, from its events alone: machine time, and dollars where a price is known."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embark.events.attempts import Attempt, attempts
from embark.events.events import Event
from embark.events.interruptions import Interruption, Losses, between, held_share, losses


@dataclass(frozen=True, slots=True)
class Spending:
    """Seconds are the run's own time while machines are held, not a sum over machines."""

    useful_s: float
    """Steps, each counted once, with the saves and evaluations between them."""
    redone_s: float
    """Steps repeated after an interruption."""
    waiting_s: float
    """Loading and compiling, and machines that wait for a preempted one."""
    usd_per_hour: float | None
    """Of all machines, at the price of the last attempt; None: unknown."""
    usd: float | None
    step: int
    num_steps: int
    wall_step_s: float
    """A step, with its share of saves and evaluations."""
    outcome: str
    """Of the last `end` event; empty: running, or killed."""
    lost: Losses
    num_starts: int
    budget_usd: float | None
    """Of the last attempt."""
    last_s: float
    """The last sign of life."""

    @property
    def held_s(self) -> float:
        return self.useful_s + self.redone_s + self.waiting_s

    @property
    def left_s(self) -> float | None:
        """To the last step, at the measured pace; None where nothing was measured yet."""
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
    """None where the run has not started. `usd_per_hour` is for attempts without a price of their own; `now_s`, for a
    running run, counts the time since its last event."""
    tried = attempts(events)
    if not tried:
        return None
    last = tried[-1]
    if now_s is not None and not last.has_stopped:
        last.last_s = max(last.last_s, now_s)
    found = between(tried)
    gaps = [_gap(tried, one) for one in found]
    redone_s = min(sum(one.redone_s for one in found if one.resumed_s is not None), sum(map(_working_s, tried)))
    price = last.usd_per_hour if last.usd_per_hour is not None else usd_per_hour
    return Spending(
        useful_s=sum(map(_working_s, tried)) - redone_s, redone_s=redone_s,
        waiting_s=sum(map(_starting_s, tried)) + sum(gaps), usd_per_hour=price, usd=_usd(tried, gaps, usd_per_hour),
        step=last.last_step, num_steps=last.num_steps, wall_step_s=_wall_step_s(tried), outcome=last.outcome,
        lost=losses(found, price, num_machines=last.num_machines, is_spot=last.is_spot), num_starts=len(tried),
        budget_usd=last.budget_usd,
        last_s=last.last_s,
    )


def _usd(tried: Sequence[Attempt], gaps: Sequence[float], default: float | None) -> float | None:
    """Each attempt at its own price; None where one is unknown."""
    prices = [one.usd_per_hour if one.usd_per_hour is not None else default for one in tried]
    if any(price is None for price in prices):
        return None
    held = sum((price or 0.0) * _held_s(one) for price, one in zip(prices, tried, strict=True))
    return (held + (prices[-1] or 0.0) * sum(gaps)) / 3600


def _held_s(attempt: Attempt) -> float:
    return max(0.0, attempt.last_s - attempt.began_s)


def _working_s(attempt: Attempt) -> float:
    return 0.0 if attempt.first_step_s is None else max(0.0, attempt.last_s - attempt.first_step_s)


def _starting_s(attempt: Attempt) -> float:
    return _held_s(attempt) - _working_s(attempt)


def _gap(tried: Sequence[Attempt], one: Interruption) -> float:
    """Time without a process in which machines were held, and that no attempt in between counts already."""
    share = held_share(one, tried[-1].num_machines, is_spot=tried[-1].is_spot)
    between_s = sum(_held_s(t) for t in tried
                    if one.restarted_s is not None and one.stopped_s <= t.began_s < one.restarted_s)
    return max(0.0, one.away_s - between_s) * share


def _wall_step_s(tried: Sequence[Attempt]) -> float:
    """Of the newest attempt that did some steps."""
    for attempt in reversed(tried):
        num_done = attempt.last_step - attempt.first_step
        if num_done > 0 and _working_s(attempt) > 0:
            return _working_s(attempt) / num_done
    return 0.0

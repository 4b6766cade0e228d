"""All ranks decide together at every step: stop, save, or continue."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embark.errors import OverBudget, UserError
from embark.events import read_events
from embark.events.spending import BUDGET, Spending, losses_sentence, spending
from embark.formatting import format_usd
from embark.run.preemption_notices import NoticeWatch
from embark.run.signals import NAMES, StopSignals
from embark.run.trainer import Ranks
from embark.spec import RunSpec
from embark.store import RunDir
from embark.store.lease import Lease


@dataclass(frozen=True, slots=True)
class Decision:
    """The same on every rank."""

    stop: str = ""  # The lost lease, signal, notice or budget that stops any rank.
    is_save_due: bool = False


class StopCoordinator:
    """One small all-reduce a step; with one rank, none."""

    def __init__(
        self, signals: StopSignals, notices: NoticeWatch, world: Ranks, guard: BudgetGuard | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._signals, self._notices, self._world, self._guard, self._lease = signals, notices, world, guard, lease
        self._has_taken_hint = False
        self._has_reported_problem = False

    def decide(self, *, is_save_due: bool = False) -> Decision:
        """Rank 0 says when to save; so does, once, a hint that a machine may be preempted."""
        caught = self._caught()
        wants_save = (is_save_due and self._world.is_first) or self._takes_hint()
        *stops, saves = self._world.sum_of([*(int(name == caught) for name in NAMES), int(wants_save)])
        return Decision(next((name for name, flag in zip(NAMES, stops, strict=True) if flag), ""), bool(saves))

    def is_asked(self) -> bool:
        """Whether this rank is: asks no other one, and from any thread."""
        return bool(self._caught())

    def _caught(self) -> str:
        is_spent = self._guard is not None and self._guard.is_spent()
        is_lost = self._lease is not None and self._lease.is_lost()
        has_notice = self._notices.notice()
        return ("lease" if is_lost else self._signals.look() or ("notice" if has_notice else "")
                or ("budget" if is_spent else ""))

    def new_problem(self) -> str:
        """Why preemption notices cannot be seen, reported once."""
        if self._has_reported_problem or not self._notices.problem:
            return ""
        self._has_reported_problem = True
        return self._notices.problem

    def _takes_hint(self) -> bool:
        if self._has_taken_hint or not self._notices.hint():
            return False
        self._has_taken_hint = True
        return True

    def is_stopping(self) -> bool:
        """The same question between steps, as in an evaluation."""
        return bool(self.decide().stop)


PRICE = "EMBARK_USD_PER_HOUR"  # Of all machines together; `embark render` and `embark launch` set it.
HURRIED = ("SIGTERM", "SIGUSR1", "SIGHUP", "notice")  # Stops that leave only seconds.


class BudgetGuard:
    """Counts what was spent. Without a budget or a price it is never spent."""

    def __init__(
        self, budget_usd: float | None, per_hour: float | None, spent_usd: float, save_s: Callable[[], float]
    ) -> None:
        self._per_hour = per_hour
        self._left_usd = math.inf if budget_usd is None or per_hour is None else budget_usd - spent_usd
        self._save_s = save_s
        self._began_s = time.monotonic()

    def is_spent(self) -> bool:
        """What is left pays for no more than a last checkpoint."""
        if self._per_hour is None or self._left_usd == math.inf:
            return False
        used_s = time.monotonic() - self._began_s + self._save_s()
        return self._per_hour * used_s / 3600 >= self._left_usd


def open_budget_guard(spec: RunSpec, run_dir: RunDir, save_s: Callable[[], float]) -> BudgetGuard:
    """On rank 0, once the run's events have its own start."""
    budget_usd, per_hour = spec.place.budget_usd, usd_per_hour()
    before = None if budget_usd is None or per_hour is None else spent_before(run_dir)
    spent_usd = before.usd if before is not None and before.usd is not None else 0.0
    return BudgetGuard(budget_usd, per_hour, spent_usd, save_s)


def refuse_over_budget(spec: RunSpec, run_dir: RunDir) -> None:
    """A run whose budget is spent does not start again."""
    budget_usd = spec.place.budget_usd
    if budget_usd is None:
        return
    if usd_per_hour() is None and (spec.place.machine or spec.place.cloud):
        raise UserError(f"place.budget_usd = {budget_usd:g} cannot be enforced: the machines' price is unknown",
                        fix=f"set {PRICE} to the dollars per hour of all machines together, or leave the budget out")
    before = spent_before(run_dir)
    if before is None or before.usd is None:
        return
    ended_by_it = before.outcome == BUDGET and budget_usd <= (before.budget_usd or 0.0)
    if before.usd >= budget_usd or ended_by_it:
        raise OverBudget(f"{run_dir.uri} has spent {format_usd(before.usd)} of its budget of {format_usd(budget_usd)}, "
                         f"at step {before.step} of {before.num_steps}",
                         fix="a larger place.budget_usd resumes from the last checkpoint")


def why_not_enforced(spec: RunSpec) -> str:
    """Why a budget is not enforced; empty where it is, or none is set."""
    if spec.place.budget_usd is None or usd_per_hour() is not None:
        return ""
    return f"place.budget_usd is not enforced: this machine has no price; set {PRICE}, in dollars per hour"


def usd_per_hour() -> float | None:
    text = os.environ.get(PRICE, "")
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not math.isfinite(price) or price < 0:
        raise UserError(f"the environment's {PRICE} is {text!r}, not a price", fix="dollars per hour, such as 110.08")
    return price


def spent_before(run_dir: RunDir) -> Spending | None:
    """From the starts in the run's events; each at the price recorded then, else at today's."""
    if not run_dir.events.is_file():
        return None
    return spending(read_events(run_dir.events), usd_per_hour=usd_per_hour())


def spending_summary(run_dir: RunDir, stop: str) -> dict[str, object]:
    """For the end event: dollars, and what interruptions cost. A preempted machine has no time to read all events."""
    spent = None if stop in HURRIED else spent_before(run_dir)
    if spent is None:
        return {}
    lost = spent.lost
    found: dict[str, object] = {} if spent.usd is None else {"spent_usd": spent.usd}
    if lost.num:
        found |= {"num_interruptions": lost.num, "lost_steps": lost.lost_steps, "redone_s": lost.redone_s,
                  "waited_s": lost.down_s, "lost_usd": lost.usd, "lost": losses_sentence(lost)}
    return found


class Billing:
    """The time of this process that no run has counted yet: a process may train several, one after the other."""

    counted_s = 0.0

    @classmethod
    def waiting_s(cls) -> float:
        """Since the process began, or its last run ended."""
        return max(0.0, process_age_s() - cls.counted_s)

    @classmethod
    def run_ended(cls) -> None:
        cls.counted_s = process_age_s()


def process_age_s(stat: Path = Path("/proc/self/stat"), uptime: Path = Path("/proc/uptime")) -> float:
    """Since this process began: torch alone takes seconds to load, and machines are billed for them."""
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return max(0.0, float(uptime.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0

"""The budget of a run: what it has spent, what it may still spend, and the time that machines are billed for."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from embark.errors import OverBudget, UserError
from embark.events import read_events
from embark.events.spending import BUDGET, Spending, losses_sentence, spending
from embark.formatting import format_usd
from embark.spec import RunSpec
from embark.store import RunDir
from embark.values import frozen

PRICE = "EMBARK_USD_PER_HOUR"  # The price of all machines together; `embark render` and `embark launch` set it.
HURRIED = ("SIGTERM", "SIGUSR1", "SIGHUP", "notice")  # Stops that leave only seconds.


@frozen
class BudgetGuard:
    """Counts the dollars spent. Without a budget or a price, the budget is never exhausted."""

    left_usd: float | None
    per_hour: float | None
    save_s: Callable[[], float]
    began_s: float = field(default_factory=lambda: time.monotonic())

    def is_spent(self) -> bool:
        """Return whether the remaining budget pays for no more than a last checkpoint."""
        if self.per_hour is None or self.left_usd is None:
            return False
        used_s = time.monotonic() - self.began_s + self.save_s()
        return self.per_hour * used_s / 3600 >= self.left_usd


def open_budget_guard(spec: RunSpec, run_dir: RunDir, save_s: Callable[[], float]) -> BudgetGuard:
    """Count from here on, on rank 0, once the run's events have its own start."""
    left_usd = spec.place.budget_usd
    if left_usd is not None and (before := spent_before(run_dir)) is not None:
        left_usd -= before.usd or 0.0
    return BudgetGuard(left_usd, usd_per_hour(), save_s)


def refuse_over_budget(spec: RunSpec, run_dir: RunDir) -> None:
    """Refuse to start a run again whose budget is spent."""
    budget_usd = spec.place.budget_usd
    if budget_usd is None:
        return
    if usd_per_hour() is None and (spec.place.machine or spec.place.cloud):
        raise UserError(f"place.budget_usd = {budget_usd:g} cannot be enforced: the machines' price is unknown",
                        f"set {PRICE} to the dollars per hour of all machines together, or leave the budget out")
    before = spent_before(run_dir)
    if before is None or before.usd is None:
        return
    ended_by_it = before.outcome == BUDGET and budget_usd <= (before.budget_usd or 0.0)
    if before.usd >= budget_usd or ended_by_it:
        raise OverBudget(f"{run_dir.uri} has spent {format_usd(before.usd)} of its budget of {format_usd(budget_usd)}, "
                         + (f"at step {before.step} of {before.num_steps}" if before.num_steps else
                            "before its first step"),
                         "a larger place.budget_usd resumes from the last checkpoint")


def why_not_enforced(spec: RunSpec) -> str:
    """Return why a budget is not enforced; empty if it is, or if none is set."""
    if spec.place.budget_usd is None or usd_per_hour() is not None:
        return ""
    return f"place.budget_usd is not enforced: this machine has no price; set {PRICE}, in dollars per hour"


def usd_per_hour() -> float | None:
    text = os.getenv(PRICE, "")
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not math.isfinite(price) or price < 0:
        raise UserError(f"the environment's {PRICE} is {text!r}, not a price", "dollars per hour, such as 110.08")
    return price


def spent_before(run_dir: RunDir) -> Spending | None:
    """Add up the starts in the run's events, each at the price recorded then, else at today's."""
    if not run_dir.events.is_file():
        return None
    return spending(read_events(run_dir.events), usd_per_hour=usd_per_hour())


def spending_summary(run_dir: RunDir, stop: str) -> dict[str, object]:
    """Return dollars, and what interruptions cost, for the end event. A preempted machine has no time to read all
    events."""
    spent = None if stop in HURRIED else spent_before(run_dir)
    if spent is None:
        return {}
    lost = spent.lost
    summary: dict[str, object] = {} if spent.usd is None else {"spent_usd": spent.usd}
    if lost.num:
        summary |= {"num_interruptions": lost.num, "lost_steps": lost.lost_steps, "redone_s": lost.redone_s,
                    "waited_s": lost.down_s, "lost_usd": lost.usd, "lost": losses_sentence(lost)}
    return summary


class ProcessTime:
    """Seconds of this process that no run has counted yet: a process may train several runs, one after the other."""

    def __init__(self) -> None:
        self._counted_s = 0.0

    def uncounted_s(self) -> float:
        """Return the seconds since the process began, or since its last run ended."""
        return max(0.0, process_age_s() - self._counted_s)

    def run_ended(self) -> None:
        self._counted_s = process_age_s()


PROCESS = ProcessTime()


def process_age_s(stat: Path = Path("/proc/self/stat"), uptime: Path = Path("/proc/uptime")) -> float:
    """Return the seconds since this process began: torch alone takes seconds to load, and machines are billed for
    them."""
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return max(0.0, float(uptime.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0

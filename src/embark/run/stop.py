"""All ranks decide together at every step: stop, save, or continue."""

from dataclasses import dataclass

from embark.store.lease import Lease
from embark.values import frozen
from .budget import BudgetGuard
from .preemption_notices import NoticeWatch
from .signals import NAMES, StopSignals
from .trainer import Ranks


@frozen
class Decision:
    """The next action of the run, the same on every rank."""

    stop: str = ""  # The lost lease, signal, notice or budget that stops any rank.
    is_save_due: bool = False


@dataclass
class StopCoordinator:
    """Lets all ranks decide together by one small all-reduce in each step; one rank decides alone."""

    signals: StopSignals
    notices: NoticeWatch
    world: Ranks
    guard: BudgetGuard | None = None
    lease: Lease | None = None
    _has_reported_problem = False

    def decide(self, *, is_save_due: bool = False) -> Decision:
        """Decide whether to stop and whether to save. Rank 0 says when to save."""
        caught = self._caught()
        wants_save = is_save_due and self.world.is_first
        *stops, saves = self.world.sum_of([*(int(name == caught) for name in NAMES), int(wants_save)])
        return Decision(next((name for name, flag in zip(NAMES, stops, strict=True) if flag), ""), bool(saves))

    def is_asked(self) -> bool:
        """Tell whether this rank was asked to stop; asks no other rank, and can be called from any thread."""
        return bool(self._caught())

    def _caught(self) -> str:
        is_spent = self.guard is not None and self.guard.is_spent()
        is_lost = self.lease is not None and self.lease.is_lost()
        has_notice = self.notices.notice()
        return ("lease" if is_lost else self.signals.look() or ("notice" if has_notice else "")
                or ("budget" if is_spent else ""))

    def new_problem(self) -> str:
        """Return once why preemption notices cannot be seen."""
        if self._has_reported_problem or not self.notices.problem:
            return ""
        self._has_reported_problem = True
        return self.notices.problem

    def is_stopping(self) -> bool:
        """Decide together between steps, as in an evaluation."""
        return bool(self.decide().stop)

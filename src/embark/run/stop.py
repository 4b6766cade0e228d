"""All ranks decide together at every step: stop, save, or continue."""

from dataclasses import dataclass

from embark.run.budget import BudgetGuard
from embark.run.preemption_notices import NoticeWatch
from embark.run.signals import NAMES, StopSignals
from embark.run.trainer import Ranks


@dataclass(frozen=True, slots=True)
class Decision:
    """The same on every rank."""

    stop: str = ""
    """The signal, notice or budget that stops any rank."""
    is_save_due: bool = False


class StopCoordinator:
    """One small all-reduce a step; with one rank, none."""

    def __init__(
        self, signals: StopSignals, notices: NoticeWatch, world: Ranks, guard: BudgetGuard | None = None
    ) -> None:
        self._signals = signals
        self._notices = notices
        self._world = world
        self._guard = guard
        self._has_taken_hint = False
        self._has_reported_problem = False

    def decide(self, *, is_save_due: bool = False) -> Decision:
        """Rank 0 says when to save; so does, once, a hint that a machine may be preempted."""
        caught = self._signals.caught or ("notice" if self._notices.notice() else "") or self._spent_budget()
        wants_save = (is_save_due and self._world.is_first) or self._takes_hint()
        *stops, saves = self._world.sum_of([*(int(name == caught) for name in NAMES), int(wants_save)])
        return Decision(next((name for name, flag in zip(NAMES, stops, strict=True) if flag), ""), bool(saves))

    def new_problem(self) -> str:
        """Why preemption notices cannot be seen, reported once."""
        if self._has_reported_problem or not self._notices.problem:
            return ""
        self._has_reported_problem = True
        return self._notices.problem

    def _spent_budget(self) -> str:
        return "budget" if self._guard is not None and self._guard.is_spent() else ""

    def _takes_hint(self) -> bool:
        if self._has_taken_hint or not self._notices.hint():
            return False
        self._has_taken_hint = True
        return True

    def is_stopping(self) -> bool:
        """The same question between steps, as in an evaluation."""
        return bool(self.decide().stop)

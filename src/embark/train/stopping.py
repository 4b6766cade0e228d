"""All ranks decide together, at every step: stop now, save now, or go on."""

from __future__ import annotations

from dataclasses import dataclass

from embark.train.notices import NoticeWatch
from embark.train.signals import NAMES, StopSignals
from embark.train.world import World


@dataclass(frozen=True, slots=True)
class Decision:
    """The same on every rank."""

    stop: str = ""
    """What any rank was told to stop by."""
    is_save_due: bool = False


class Together:
    """Gathers what each rank knows. One small all-reduce a step; with one rank, none."""

    def __init__(self, signals: StopSignals, notices: NoticeWatch, world: World) -> None:
        self._signals = signals
        self._notices = notices
        self._world = world

    def decide(self, *, is_save_due: bool = False) -> Decision:
        """Whether the next step comes. Rank 0 alone says when to save."""
        caught = self._signals.caught or ("notice" if self._notices.notice() else "")
        flags = [int(name == caught) for name in NAMES] + [int(is_save_due and self._world.is_first)]
        *stops, save = self._world.sum_of(flags)
        return Decision(next((name for name, flag in zip(NAMES, stops, strict=True) if flag), ""), bool(save))

    def is_stopping(self) -> bool:
        """The same question between steps, as in an evaluation."""
        return bool(self.decide().stop)

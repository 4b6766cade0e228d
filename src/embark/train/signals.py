"""Ctrl-C and SIGTERM: finish the step, save, leave. A second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import torch

from embark.errors import EmbarkError, Interrupted, Preempted
from embark.train.world import World

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Catches the signals while it is entered; every rank learns of what any of them caught."""

    def __init__(self) -> None:
        self._caught = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in HANDLED:
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def caught(self, world: World) -> int:
        """The signal that any rank caught, or 0; the same answer on every rank, at the same step."""
        if world.world_size == 1:
            return self._caught
        flags = torch.zeros(len(HANDLED), dtype=torch.int32)
        if self._caught:
            flags[HANDLED.index(signal.Signals(self._caught))] = 1
        world.sum_over_ranks(flags)
        return next((int(number) for number, flag in zip(HANDLED, flags.tolist(), strict=True) if flag), 0)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        if self._caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._caught = number


def stopped_by(number: int, what: str) -> EmbarkError:
    """The error that ends a run which a signal stopped."""
    fix = "the same command goes on from there"
    return Interrupted(what, fix=fix) if number == signal.SIGINT else Preempted(what, fix=fix)

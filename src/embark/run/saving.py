"""Saves as the loop sees them: when one is due, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embark.run.checkpoint_schedule import CheckpointSchedule
from embark.run.committing import Saved
from embark.run.logger import RunLogger
from embark.run.protocols import Saver


class Saving:
    """Begins saves, tells how they went, and learns from them when to save next."""

    def __init__(self, checkpointer: Saver, pace: CheckpointSchedule, logger: RunLogger, step: int) -> None:
        self._checkpointer = checkpointer
        self._pace = pace
        self._logger = logger
        self._saved_step = step
        self._step_s = 0.0
        self._why = ""
        self._longest_s = 0.0

    def longest_s(self) -> float:
        """What the longest save took, from its beginning to the commit."""
        return self._longest_s

    def is_due(self, step: int) -> bool:
        return self._pace.is_due(step) and step > self._saved_step

    def begin(self, step: int, evaluated: dict[str, Any], step_s: float) -> None:
        """Copy the state; the rest goes on behind the training."""
        self._step_s = max(step_s, 1e-6)
        self._tell(self._checkpointer.begin(step, {"eval": evaluated}))
        self._saved_step = step
        self._pace.begun(step, self._step_s)

    def tell_done(self) -> None:
        """Tell of a save that has ended meanwhile."""
        self._tell(self._checkpointer.done())

    def wait(self) -> None:
        self._tell(self._checkpointer.wait())

    def finish(self, step: int, evaluated: dict[str, Any], *, wants_last: bool) -> None:
        """The last save, waited for. Here a failure is the run's: nothing comes after that could mend it."""
        if wants_last and step > self._saved_step:
            self.begin(step, evaluated, self._step_s)
        failed = self._tell(self._checkpointer.wait(), is_last=True)
        if failed and failed.error:
            raise failed.error

    def _tell(self, saves: Sequence[Saved], *, is_last: bool = False) -> Saved | None:
        failed = None
        for saved in saves:
            if saved.error:
                failed = saved
                if is_last:
                    continue
                self._logger.warn(f"step {saved.step} could not be saved: {saved.error.what}. Training goes on; the "
                                f"checkpoint before it is whole. {saved.error.fix}".strip())
                continue
            self._longest_s = max(self._longest_s, saved.cost_s)
            self._logger.log("save", {"step": saved.step, "path": saved.uri, "bytes": saved.num_bytes,
                                     "save_s": saved.cost_s, "pause_s": saved.pause_s})
            if saved.untidy:
                self._logger.warn(f"step {saved.step} is saved, but {saved.untidy.what}. {saved.untidy.fix}".strip())
            choice = self._pace.saved(saved.step, pause_s=saved.pause_s, cost_s=saved.cost_s,
                                      step_s=max(self._step_s, 1e-6))
            if is_last:
                continue
            if choice and choice.why != self._why:
                self._why = choice.why
                self._logger.log("note", {"level": "info", "text": choice.why})
            elif self._pace.is_grace_too_short(saved.cost_s) and not self._why:
                self._why = "a save takes longer than the notice of a preemption"
                self._logger.warn(f"a save takes {saved.cost_s:.1f} s, longer than the notice a preempted machine gets: "
                                'save more often, or set store.checkpoint_every = "auto"')
        return failed

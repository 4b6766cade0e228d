"""When to save, and what the run's log says about each save."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from embark.run.checkpointer import Saved
from embark.run.logger import RunLogger
from embark.spec import RunSpec
from embark.store.checkpoint_interval import Choice, steps_between_saves

FIRST_SAVE_S = 20.0
"""With `auto`, the first save comes early: it measures what one costs."""


class CheckpointSchedule:
    """Every so many steps, or as often as measured costs say. Rank 0's; the others save when it does."""

    def __init__(self, spec: RunSpec, step: int, grace_s: float) -> None:
        self._every = spec.store.checkpoint_every
        self._mtbf_s = spec.store.hours_between_failures * 3600
        self._grace_s = grace_s
        self._began_s = time.monotonic()
        self._next_step = 0 if self._every == "auto" else step

    def is_due(self, step: int) -> bool:
        if isinstance(self._every, int):
            return bool(self._every) and step % self._every == 0
        if not self._next_step:
            return time.monotonic() - self._began_s > FIRST_SAVE_S
        return step >= self._next_step

    def begun(self, step: int, step_s: float) -> None:
        """A save is under way. The next waits until its cost is known or, if it fails, for as long as the first."""
        if self._every == "auto":
            self._next_step = step + max(1, int(FIRST_SAVE_S / step_s))

    def saved(self, step: int, *, pause_s: float, cost_s: float, step_s: float) -> Choice | None:
        """Learn what a save costs; with `auto`, choose when the next one comes."""
        if self._every != "auto":
            return None
        choice = steps_between_saves(pause_s, cost_s, step_s, self._mtbf_s, self._grace_s)
        self._next_step = step + choice.every_steps
        return choice

    def is_grace_too_short(self, cost_s: float) -> bool:
        """A save begun at the preemption notice would not finish in time."""
        return cost_s > self._grace_s


class Saver(Protocol):
    """Writes checkpoints; each call returns those finished since the last."""

    def begin(self, step: int, values: dict[str, Any]) -> list[Saved]: ...

    def done(self) -> list[Saved]: ...

    def wait(self) -> list[Saved]: ...


class CheckpointManager:
    """Begins saves, logs how they went, and learns from them when to save next."""

    def __init__(self, checkpointer: Saver, schedule: CheckpointSchedule, logger: RunLogger, step: int) -> None:
        self._checkpointer = checkpointer
        self._schedule = schedule
        self._logger = logger
        self._saved_step = step
        self._step_s = 0.0
        self._reason = ""
        self._longest_s = 0.0

    def longest_s(self) -> float:
        """The longest save so far, from its beginning to the commit."""
        return self._longest_s

    def is_due(self, step: int) -> bool:
        return self._schedule.is_due(step) and step > self._saved_step

    def begin(self, step: int, evaluated: dict[str, Any], step_s: float) -> None:
        """Copy the state; writing continues in the background."""
        self._step_s = max(step_s, 1e-6)
        self._log(self._checkpointer.begin(step, {"eval": evaluated}))
        self._saved_step = step
        self._schedule.begun(step, self._step_s)

    def log_done(self) -> None:
        """Log a save that has finished meanwhile."""
        self._log(self._checkpointer.done())

    def wait(self) -> None:
        self._log(self._checkpointer.wait())

    def finish(self, step: int, evaluated: dict[str, Any], *, wants_last: bool) -> None:
        """The last save, waited for. A failure here fails the run: no later save could make up for it."""
        if wants_last and step > self._saved_step:
            self.begin(step, evaluated, self._step_s)
        failed = self._log(self._checkpointer.wait(), is_last=True)
        if failed and failed.error:
            raise failed.error

    def _log(self, saves: Sequence[Saved], *, is_last: bool = False) -> Saved | None:
        failed = None
        for saved in saves:
            if saved.error:
                failed = saved
                if not is_last:
                    self._logger.warn(f"step {saved.step} could not be saved: {saved.error.what}. Training continues; "
                                      f"the previous checkpoint is intact. {saved.error.fix}".strip())
                continue
            self._longest_s = max(self._longest_s, saved.cost_s)
            self._logger.log("save", {"step": saved.step, "path": saved.uri, "bytes": saved.num_bytes,
                                      "save_s": saved.cost_s, "pause_s": saved.pause_s})
            if problem := saved.cleanup_error:
                self._logger.warn(f"step {saved.step} is saved, but {problem.what}. {problem.fix}".strip())
            choice = self._schedule.saved(saved.step, pause_s=saved.pause_s, cost_s=saved.cost_s,
                                          step_s=max(self._step_s, 1e-6))
            if is_last:
                continue
            if choice and choice.why != self._reason:
                self._reason = choice.why
                self._logger.note(choice.why)
            elif self._schedule.is_grace_too_short(saved.cost_s) and not self._reason:
                self._reason = "a save takes longer than the notice of a preemption"
                self._logger.warn(f"a save takes {saved.cost_s:.1f} s, longer than the notice a preempted machine gets:"
                                  ' save more often, or set store.checkpoint_every = "auto"')
        return failed

"""When a run saves: every so many steps, or as often as the measured cost of a save says."""

import time

from embark.spec import RunSpec
from embark.store.checkpoint_interval import Choice, steps_between_saves

FIRST_SAVE_S = 20.0  # With `auto`, the first save comes early: it measures what one costs.


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

"""What stops a run: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP, a cloud's preemption notice, a spent budget or a lost lease.
Imports almost nothing, so that signals are handled before torch is loaded."""

from __future__ import annotations

import math
import os
import signal
import time
from types import FrameType

from embark.errors import EmbarkError, Interrupted, OverBudget, Preempted

NAMES = ("lease", "SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "notice", "budget")
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """Remembers the first signal while it is entered. A second Ctrl-C leaves at once, and so does the first while
    `is_loading`: then there is nothing to save."""

    def __init__(self, *, is_loading: bool = False) -> None:
        self.caught = ""
        self.deadline_s = math.inf  # End of the paid time of this run, by the monotonic clock.
        # torchrun's, which ends its ranks; one that is killed cannot. A shell, on the other hand, may end.
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self.is_loading = is_loading
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def look(self) -> str:
        """Return the signal that was caught; a rank whose torchrun is gone stops as if that had stopped it."""
        if not self.caught and self._agent and os.getppid() != self._agent:
            self.caught = "SIGTERM"
        return self.caught or ("budget" if time.monotonic() >= self.deadline_s else "")

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        if (self.caught or self.is_loading) and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = self.caught or signal.Signals(number).name


def stopped_by(name: str, what: str, again: str = "the same command", *, has_checkpoint: bool = True) -> EmbarkError:
    """Make the error that ends a stopped run."""
    if name == "budget":
        return OverBudget(what, f"a larger place.budget_usd {'resumes from' if has_checkpoint else 'starts'} there")
    fix = f"run {again} to resume" if has_checkpoint else \
        "run the same command to start over: there is no checkpoint yet"
    return Interrupted(what, fix) if name == "SIGINT" else Preempted(what, fix)

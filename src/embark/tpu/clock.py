"""How long training takes, with evaluation and saving left out."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.2
MAX_WINDOWS = 1000


class Clock:
    """Counts steps and seconds: since the last window, and in all."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._started = self._window_started = self._last_tick = time.perf_counter()
        self._steps = self._window_steps = 0
        self._window_times: deque[float] = deque(maxlen=MAX_WINDOWS)

    def step(self) -> None:
        self._steps += 1
        self._window_steps += 1

    def ticks(self) -> bool:
        """True a few times a second."""
        now = time.perf_counter()
        if now - self._last_tick < TICK_S:
            return False
        self._last_tick = now
        return True

    def window(self) -> dict[str, float]:
        """The rate since the last call. The first holds the compilation of the step."""
        now = time.perf_counter()
        seconds = max(now - self._window_started, 1e-9)
        values = {"samples_per_s": self._window_steps * self._batch_size / seconds,
                  "step_s": seconds / max(self._window_steps, 1)}
        self._window_started, self._window_steps = now, 0
        self._window_times.append(values["step_s"])
        return values

    def step_s(self) -> float:
        """A step's mean time."""
        return (time.perf_counter() - self._started) / max(self._steps, 1)

    def usual_step_s(self) -> float:
        """The median of the windows; the first counts only where it is all."""
        times = list(self._window_times)
        return statistics.median(times[1:] or times) if times else self.step_s()

    def whole(self) -> dict[str, float]:
        """The rate over everything so far."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        samples = self._steps * self._batch_size
        return {"train_s": seconds, "num_samples": samples, "samples_per_s": samples / seconds}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            lost = time.perf_counter() - began
            self._started += lost
            self._window_started += lost

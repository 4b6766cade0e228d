"""How long training takes, evaluation and saving excluded, and how much of it was waiting."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from embark.values import frozen

TICK_S = 0.2
MAX_WINDOWS = 1000


@frozen
class StepCounters:
    """The counters of one rank since it began."""

    num_steps: int
    train_s: float
    input_s: float  # Time spent waiting for batches.
    agree_s: float  # Time spent waiting for the other ranks to agree on the next step.


class Waits(Protocol):
    """Counts the time spent waiting for batches."""

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and count the time waited for them."""

    def total_s(self) -> float:
        """Return the seconds waited so far."""


class HostWaits:
    """Counts the time spent in `next`."""

    def __init__(self) -> None:
        self._total_s = 0.0

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            began_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._total_s += time.perf_counter() - began_s
            yield batch

    def total_s(self) -> float:
        return self._total_s


class Clock:
    """Counts steps and seconds, since the last window and in all."""

    def __init__(self, batch_size: int, waits: Waits | None = None) -> None:
        self._batch_size = batch_size
        self._started = self._window_started = self._last_tick = time.perf_counter()
        self._steps = self._window_steps = 0
        self._window_times: deque[float] = deque(maxlen=MAX_WINDOWS)
        self._input = waits or HostWaits()
        self._window_input_s = 0.0
        self._agreeing = _Agreeing()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and count the time waited for them."""
        return self._input.timed(batches)

    def step(self) -> None:
        self._steps += 1
        self._window_steps += 1

    def ticks(self) -> bool:
        """Return True a few times a second: often enough for a progress bar, too seldom to cost anything."""
        now = time.perf_counter()
        if now - self._last_tick < TICK_S:
            return False
        self._last_tick = now
        return True

    def window(self) -> dict[str, float]:
        """Return the rates since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._window_started, 1e-9)
        num_steps = max(self._window_steps, 1)
        input_s = self._input.total_s()
        values = {
            "samples_per_s": self._window_steps * self._batch_size / seconds,
            "step_s": seconds / num_steps,
            "input_s": (input_s - self._window_input_s) / num_steps
        }
        self._window_started, self._window_steps, self._window_input_s = now, 0, input_s
        self._window_times.append(values["step_s"])
        return values

    def counters(self) -> StepCounters:
        """Return the counters so far, to be compared with the other ranks."""
        train_s = time.perf_counter() - self._started
        return StepCounters(self._steps, train_s, self._input.total_s(), self._agreeing.total_s)

    def step_s(self) -> float:
        """Return the mean time of a step."""
        return (time.perf_counter() - self._started) / max(self._steps, 1)

    def median_step_s(self) -> float | None:
        """Return the median of the windows; the first includes compilation, and counts only if there is no other. None
        before the first step."""
        if not self._steps:
            return None
        times = list(self._window_times)
        return statistics.median(times[1:] or times) if times else self.step_s()

    def totals(self) -> dict[str, float]:
        """Return the rate over everything so far."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        samples = self._steps * self._batch_size
        return {"train_s": seconds, "num_samples": samples, "samples_per_s": samples / seconds}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in here as training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            lost = time.perf_counter() - began
            self._started += lost
            self._window_started += lost

    def agreeing(self) -> _Agreeing:
        """Count the time in here as training that waits for the other ranks."""
        return self._agreeing


class _Agreeing:
    """Counts the time of a block; entered at every step, so one object serves all of them."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._began_s

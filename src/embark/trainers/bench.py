"""Timing a training step, whichever library runs it."""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

from embark.data import Batch, SampleSource
from embark.model.steps import steps_per_epoch
from embark.spec import RunSpec
from embark.values import frozen

NUM_BATCHES = 16
WARM_UP_STEPS = 20
ROUNDS = 5
ENDLESS = 1_000_000_000  # More steps than a bench takes: the learning rate schedule does not end.


class Contender(Protocol):
    """A trainer whose steps are timed."""

    name: str

    def run(self, num_steps: int) -> None:
        """Dispatch this many steps."""

    def wait(self) -> None:
        """Wait until the device has done the dispatched steps."""

    def memory_bytes(self) -> int: ...

    def close(self) -> None: ...


@frozen
class StepTiming:
    """Measured step times of one contender."""

    name: str
    samples_per_s: float
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    first_step_s: float  # Includes all that is compiled or captured for it.
    memory_bytes: int  # 0 where the device does not say.
    ratio: float = 1.0  # Embark's speed over the other's.


@frozen
class Ceiling:
    """The fastest step that this device allows, by what a step must move and compute."""

    samples_per_s: float
    step_ms: float
    share: float  # Share of the ceiling that Embark reaches.
    bytes_per_step: float
    flops_per_step: float
    bytes_per_s: float  # Measured: a copy within the device's memory, read and written.
    flops_per_s: float  # Measured: a large matrix product in the step's precision.


@frozen
class BenchResult:
    """Result of `embark bench` on one device."""

    batch_size: int
    device: str
    library: str  # Such as `torch 2.11.0`.
    rows: list[StepTiming]
    roofline: Ceiling | None = None


def time_contender(make: Callable[[], Contender], batch_size: int, seconds: float) -> StepTiming:
    """Build a contender and time its first step, then its usual ones; the median of several rounds counts."""
    began = time.perf_counter()
    contender = make()
    contender.run(1)
    contender.wait()
    first_s = time.perf_counter() - began
    times = time_steps(contender, seconds)
    step_s, memory_bytes = statistics.median(times), contender.memory_bytes()
    contender.close()
    return StepTiming(
        name=contender.name, samples_per_s=batch_size / step_s, step_ms=step_s * 1e3, fastest_ms=min(times) * 1e3,
        slowest_ms=max(times) * 1e3, first_step_s=first_s, memory_bytes=memory_bytes
    )


def time_steps(
    contender: Contender, seconds: float, warm_up_steps: int = WARM_UP_STEPS,
    before_round: Callable[[], None] = lambda: None
) -> list[float]:
    """Return the seconds of a step in each round."""
    contender.run(warm_up_steps)
    num_steps = max(3, int(seconds / ROUNDS / _step_s(contender, 3)))
    times = []
    for _ in range(ROUNDS):
        before_round()
        times.append(_step_s(contender, num_steps))
    return times


def first_batches(spec: RunSpec, source: SampleSource) -> list[Batch]:
    """Load batches into host memory before the clock starts."""
    size = spec.train.batch_size
    return [source.train_rows(0, i * size, (i + 1) * size) for i in range(num_batches(spec, source))]


def num_batches(spec: RunSpec, source: SampleSource) -> int:
    """Return how many batches are in memory before the clock starts."""
    return min(NUM_BATCHES, steps_per_epoch(source.num_train_samples, spec.train.batch_size))


def _step_s(contender: Contender, num_steps: int) -> float:
    contender.wait()
    started = time.perf_counter()
    contender.run(num_steps)
    contender.wait()
    return (time.perf_counter() - started) / num_steps

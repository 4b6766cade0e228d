"""How fast JAX's trainer steps here, from batches that are in the host's memory before the clock starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from typing import Any

import jax

from embark.data import Batch, Source, fit_spec, open_source
from embark.data.prefetcher import Prefetcher
from embark.errors import UserError
from embark.model.jax_layout import NUM_AHEAD
from embark.spec import RunSpec
from embark.store import open_store
from embark.trainers.jax.faults import peak_bytes
from embark.trainers.jax.prefetch import to_devices
from embark.trainers.jax.state import initial_state
from embark.trainers.jax.trainer import JaxTrainer
from embark.trainers.jax.world import World, check_against, join

NUM_BATCHES = 16
WARM_UP_STEPS = 10
ROUNDS = 5
ENDLESS = 10**9
"""More steps than a bench takes: the learning rate does not end."""


class Stepping:
    """The trainer, ready to step; a thread puts the next batches on the devices meanwhile, as in a run."""

    def __init__(self, spec: RunSpec, world: World, source: Source) -> None:
        self.built = JaxTrainer(spec, world, ENDLESS, source)
        self.built.state = initial_state(spec, self.built.places, world)
        batches = _batches(spec, source)
        self._ahead = Prefetcher(lambda number: to_devices(batches[number % len(batches)], spec, self.built.places, world),
                            ENDLESS, depth=NUM_AHEAD)
        self._ahead.start()
        self._placed = self._ahead.take()
        self._numbers = count()

    def run(self, num_steps: int) -> None:
        """Nothing is waited for."""
        for _ in range(num_steps):
            self.built.step(next(self._placed), next(self._numbers))

    def wait(self) -> None:
        jax.block_until_ready(self.built.state)

    def close(self) -> None:
        self._ahead.close()


def bench(spec: RunSpec, *, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Samples a second of all devices together, a step's time, and memory where JAX tells it."""
    with join(spec.place) as world:
        if world.world_size > 1:
            raise UserError("embark bench measures one process", fix="run it on one host")
        spec = fit_spec(spec, open_store=open_store)
        check_against(spec, world)
        began = time.perf_counter()
        with closing(Stepping(spec, world, open_source(spec, open_store=open_store))) as stepping:
            stepping.run(1)
            stepping.wait()
            first_s = time.perf_counter() - began
            times = _timed(stepping, seconds)
        name = f"Embark, {stepping.built.engine.name}, {stepping.built.precision}, from memory"
        tell(name)
        step_s = statistics.median(times)
        row = {"name": name, "samples_per_s": spec.train.batch_size / step_s, "step_ms": step_s * 1e3,
               "fastest_ms": min(times) * 1e3, "slowest_ms": max(times) * 1e3, "first_step_s": first_s}
        if held := peak_bytes(world):
            row["memory_bytes"] = held
        return {"batch_size": spec.train.batch_size, "device": world.device_name, "jax": jax.__version__,
                "rows": [row]}


def _timed(stepping: Stepping, seconds: float) -> list[float]:
    """Seconds of a step, in rounds."""
    stepping.run(WARM_UP_STEPS)
    stepping.wait()
    began = time.perf_counter()
    stepping.run(3)
    stepping.wait()
    num_steps = max(3, int(seconds / ROUNDS / ((time.perf_counter() - began) / 3)))
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        stepping.run(num_steps)
        stepping.wait()
        times.append((time.perf_counter() - began) / num_steps)
    return times


def _batches(spec: RunSpec, source: Source) -> list[Batch]:
    size = spec.train.batch_size
    num_batches = min(NUM_BATCHES, source.num_train_samples // size)
    if not num_batches:
        raise UserError(f"the data has fewer than train.batch_size = {size} samples", fix="a smaller train.batch_size")
    return [source.train_rows(0, i * size, (i + 1) * size) for i in range(num_batches)]

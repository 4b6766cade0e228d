"""This trainer's own step, as `embark train` runs it: engine, schedule and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

import torch

from embark.data import Source
from embark.spec import RunSpec
from embark.trainers.torch.build import Built, build
from embark.trainers.torch.engines.cuda_graph.batch_layout import HostBuffer
from embark.trainers.torch.engines.pipeline import Part
from embark.trainers.torch.world import World

MANY_STEPS = 1_000_000_000


class Ours:
    """Fed by its own loader, or from `num_batches` batches that are in host memory before the clock starts; every step
    copies its batch to the device."""

    def __init__(self, spec: RunSpec, world: World, source: Source, num_batches: int = 0) -> None:
        self.built: Built = build(spec, world, MANY_STEPS, source)
        engine = self.built.engine
        where = "from memory" if num_batches else "from its loader"
        self.name = f"Embark, {engine.name}, {self.built.precision}, {where}"
        self._step = 0
        self._open = ExitStack()
        part = Part(spec.train.batch_size, world.rank, world.world_size, 0, MANY_STEPS)
        self._batches: Iterator[Any] = self._open.enter_context(engine.feed(source, part))
        if num_batches:
            self._batches = cycle([_kept(batch, world.device) for batch in islice(self._batches, num_batches)])
            self._open.close()

    def run(self, num_steps: int) -> None:
        """Train so many steps."""
        for _ in range(num_steps):
            self.built.optimizers.set_rates(self._step)
            self.built.engine.step(self._batches, self._step)
            self._step += 1

    def close(self) -> None:
        """Stop the loader."""
        self._open.close()


def _kept(batch: Any, device: torch.device) -> Any:
    """A batch that outlives its loader."""
    if not isinstance(batch, HostBuffer):
        return batch
    copy = batch.buffer.clone()
    batch.release(None)
    return HostBuffer(copy.pin_memory() if device.type == "cuda" else copy, lambda event: None, batch.num_batches)

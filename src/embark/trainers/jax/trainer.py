"""Everything that learns, and what it has seen."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from embark.data import Source
from embark.model.jax_layout import LINE_WIDTHS, MAX_IN_FLIGHT, Layout, check_supported, make_layout
from embark.model.learning_rate import dense_rate, rate_factor
from embark.spec import RunSpec
from embark.trainers.jax.metrics import Window
from embark.trainers.jax.prefetch import DeviceBatch, capacities
from embark.trainers.jax.sparsecore_choice import Choice, choose_cores
from embark.trainers.jax.state import empty_counts
from embark.trainers.jax.step import Programs, State, make_programs, state_shapes, weight_shapes
from embark.trainers.jax.world import World, choose_precision

MAX_FLAGS = 256
"""Steps that may wait to be asked whether they went well."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a run says of how it is run."""

    name: str
    reason: str


class JaxTrainer:
    """A model over all devices. It has no weights before it is given a state."""

    def __init__(self, spec: RunSpec, world: World, num_steps: int, source: Source) -> None:
        check_supported(spec.train)
        self.spec, self.world, self._num_steps = spec, world, num_steps
        self.precision = choose_precision(spec, world)
        choice = choose_cores(spec, world.mesh.devices.flat[0].device_kind, world.num_devices)
        self.places, self._programs = self._on_cores(choice) if choice.cores else self._ordinary(source)
        self._counts_shape = state_shapes(spec, self.places, world.mesh)["counts"]
        whole = "the whole step as one program of XLA"
        self.engine = Engine("sparsecore" if choice.cores else "jax", "; ".join(filter(None, (whole, choice.reason))))
        self.layout: dict[str, Any] = self.places.described(spec)
        self.num_parameters = sum(t.rows * (t.dim or 0) for t in spec.model.table_list()) + sum(
            math.prod(shape) for shape in weight_shapes(spec).values()
        )
        self.state: State = {}
        self.window = Window(world.fetch)
        self._in_flight: deque[jax.Array] = deque()
        self._flags: list[tuple[int, jax.Array, jax.Array]] = []
        self._trouble: tuple[str, int, str] | None = None

    def step(self, batch: DeviceBatch, step: int) -> float:
        """Train on a batch, step `step` of the run; returns the tables' rate. Nothing is waited for but what the
        devices were given long before."""
        train = self.spec.train
        factor = rate_factor(train, step, self._num_steps)
        rates = np.array([train.learning_rate * factor, dense_rate(train) * factor], np.float32)
        self.state, told = self._programs.train(self.state, batch, rates, np.int32(step))
        self.window.add(told["sums"], train.batch_size)
        self._flags.append((step, told["bad_table"], told["has_bad_loss"]))
        if len(self._flags) > MAX_FLAGS:
            self._look()
        self._in_flight.append(told["sums"])
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()
        return train.learning_rate * factor

    def metrics(self) -> dict[str, float]:
        """Since the last call, over all devices; waits for them."""
        metrics = self.window.take(self.state["counts"])
        self.state["counts"] = empty_counts(self._counts_shape)
        return metrics

    def trouble(self) -> tuple[str, int, str] | None:
        """`id` or `loss`, the first step that went wrong since the last call, and the table; waits for the devices."""
        self._look()
        trouble, self._trouble = self._trouble, None
        return trouble

    def empty_counts(self) -> jax.Array:
        """For an evaluation."""
        return empty_counts(self._counts_shape)

    def evaluate(self, counts: jax.Array, batch: DeviceBatch) -> tuple[jax.Array, jax.Array]:
        """Count a batch that nothing is learnt from."""
        return self._programs.evaluate(self.state, counts, batch)

    def _ordinary(self, source: Source) -> tuple[Layout, Programs]:
        """Rows go between devices by an exchange."""
        places = make_layout(self.spec, self.world.num_devices, LINE_WIDTHS.get(self.world.kind, 0))
        room = capacities(source, self.spec, places)
        return places, make_programs(self.spec, places, room, self.world.mesh, self.precision)

    def _on_cores(self, choice: Choice) -> tuple[Layout, Programs]:
        """Rows are looked up and moved by SparseCores."""
        from embark.trainers.jax import sparsecore
        from embark.trainers.jax.sparsecore_layout import make_stacks

        places = make_stacks(self.spec, self.world.num_devices, choice.cores)
        return places, sparsecore.make_programs(self.spec, places, self.world.mesh, self.precision)

    def _look(self) -> None:
        """What the devices found wrong."""
        flags, self._flags = self._flags, []
        tables = self.spec.model.table_list()
        for step, bad_table, has_bad_loss in flags:
            table = int(self.world.fetch(bad_table))
            found = ("id", step, tables[table].name) if table < len(tables) else None
            if found is None and int(self.world.fetch(has_bad_loss)):
                found = ("loss", step, "")
            self._trouble = self._trouble or found

"""A model over all devices, with its optimizers and the programs that train it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import jax
import numpy as np

from embark.data import Batch, SampleSource
from embark.errors import EmbarkError, Fault, UserError
from embark.events.drift import logit_counts
from embark.features.arrays import Floats, Mask
from embark.model.engine_selection import choose_precision
from embark.model.jax_layout import LINE_WIDTHS, MAX_IN_FLIGHT, check_supported, make_layout
from embark.model.steps import dense_rate, rate_factor
from embark.run.clock import HostWaits
from embark.run.evaluation import Trouble, exact_auc, halves_counter, metrics_from
from embark.run.host import peak_resident_bytes
from embark.spec import PlaceSpec, RunSpec
from embark.store import RunDir
from embark.store.run_dir import compiled_code_folder
from embark.values import JsonDict, frozen
from .checkpoint import JaxCheckpointer
from .prefetch import DeviceBatch, capacities, to_devices, train_batches
from .state import empty_counts
from .step import State, Window, make_programs, state_shapes, weight_shapes
from .world import World, join

MAX_FLAGS = 256  # Steps whose flags may wait on the devices.


@frozen
class Engine:
    """Name and reason of the engine, for the start event."""

    name: str
    reason: str


class JaxTrainer:
    """A model over all devices. It has no weights before it is given a state."""

    def __init__(self, spec: RunSpec, world: World, num_steps: int, source: SampleSource) -> None:
        check_supported(spec)
        self.spec, self.world, self._num_steps = spec, world, num_steps
        self.precision = choose_precision(spec.train, has_matrix_bf16=world.kind != "cpu")
        self.table_layout = make_layout(spec, world.num_devices, LINE_WIDTHS.get(world.kind, 0))
        capacity = capacities(source, spec, self.table_layout)
        self._programs = make_programs(spec, self.table_layout, capacity, world.mesh, self.precision)
        self._counts_shape = state_shapes(spec, self.table_layout, world.mesh)["counts"]
        self.engine = Engine("jax", "the complete step as one program of XLA")
        self.layout: JsonDict = self.table_layout.described(spec)
        self.num_parameters = sum(t.rows * (t.dim or 0) for t in spec.model.table_list()) + sum(
            math.prod(shape) for shape in weight_shapes(spec).values()
        )
        self.state: State = {}
        self.window = Window(world.fetch)
        self._in_flight: deque[jax.Array] = deque()
        self._flags: list[tuple[int, jax.Array, jax.Array]] = []
        self._trouble: Trouble | None = None

    def input_waits(self) -> HostWaits:
        return HostWaits()

    def profiler(self) -> None:
        """Return nothing: steps are one program of XLA, without phases to tell apart."""

    def feed(
        self, source: SampleSource, start_step: int, stop_step: int
    ) -> AbstractContextManager[Iterator[DeviceBatch]]:
        return train_batches(source, self.spec, self.table_layout, self.world, start_step, stop_step)

    def step(self, batches: Iterator[DeviceBatch], step: int) -> float:
        """Train on the next batch; returns the tables' learning rate. Waits only for steps long dispatched."""
        train = self.spec.train
        factor = rate_factor(train, step, self._num_steps)
        rates = np.array([train.learning_rate * factor, dense_rate(train) * factor], np.float32)
        self.state, outputs = self._programs.train(self.state, next(batches), rates, np.int32(step))
        self.window.add(outputs["sums"], train.batch_size)
        self._flags.append((step, outputs["bad_table"], outputs["has_bad_loss"]))
        if len(self._flags) > MAX_FLAGS:
            self._read_flags()
        self._in_flight.append(outputs["sums"])
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()
        return train.learning_rate * factor

    def window_metrics(self) -> dict[str, float]:
        """Return the metrics over all devices since the last call; waits for them."""
        metrics = self.window.take(self.state["counts"])
        self.state["counts"] = empty_counts(self._counts_shape)
        return metrics

    def trouble(self) -> Trouble | None:
        """Return what first went wrong since the last call; waits for the devices."""
        self._read_flags()
        trouble, self._trouble = self._trouble, None
        return trouble

    @contextmanager
    def evaluating(self, step: int) -> Iterator[Evaluator]:
        yield Evaluator(self)

    def evaluate(self, batch: DeviceBatch) -> tuple[jax.Array, jax.Array]:
        """Return logits and sums of a batch without training on it."""
        return self._programs.evaluate(self.state, batch)

    def checkpointer(self, run_dir: RunDir) -> JaxCheckpointer:
        return JaxCheckpointer(run_dir, self)

    def peak_bytes(self) -> int:
        """Return the most bytes that one device has used, or this process on a CPU."""
        if self.world.kind == "cpu":
            return peak_resident_bytes()
        used = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for _, device in self.world.local_devices]
        return max(used, default=0)

    def _read_flags(self) -> None:
        """Fetch the errors that the devices found."""
        flags, self._flags = self._flags, []
        tables = self.spec.model.table_list()
        for step, bad_table, has_bad_loss in flags:
            table = int(self.world.fetch(bad_table))
            found = ("id", step, tables[table].name) if table < len(tables) else None
            if found is None and int(self.world.fetch(has_bad_loss)):
                found = ("loss", step, "")
            self._trouble = self._trouble or found


class Evaluator:
    """Collects the model's predictions on held-out batches."""

    def __init__(self, trainer: JaxTrainer) -> None:
        self._trainer, self._window = trainer, Window(trainer.world.fetch)
        self._logits: list[Floats] = []
        self._clicks: list[Mask] = []
        self._waiting: deque[tuple[jax.Array, int]] = deque()

    def eval_source(self, source: SampleSource) -> SampleSource:
        return source

    def batch_size(self, of_training: int) -> int:
        return of_training

    def add(self, batch: Batch) -> None:
        trainer = self._trainer
        placed = to_devices(batch, trainer.spec, trainer.table_layout, trainer.world, is_eval=True)
        logits, sums = trainer.evaluate(placed)
        self._window.add(sums, 0)
        self._clicks.append(batch.label[: batch.num_samples] > 0.5)
        self._waiting.append((logits, batch.num_samples))
        if len(self._waiting) > MAX_IN_FLIGHT:
            self._settle()

    def metrics(self) -> JsonDict:
        """Return the metrics over all processes; the devices sum over them, and each process has its own samples'
        logits."""
        while self._waiting:
            self._settle()
        logits, is_click = np.concatenate(self._logits), np.concatenate(self._clicks)
        others = logits[~is_click]
        auc, num_samples = exact_auc(self._trainer.world, logits[is_click], len(others), halves_counter(others))
        counts = np.sum(self._trainer.world.gathered(logit_counts(logits)), axis=0).tolist()
        return {**metrics_from(self._window.sums(), auc, num_samples), "score_counts": counts}

    def _settle(self) -> None:
        """Fetch this process's part of the oldest batch, in the order of its samples."""
        logits, num_samples = self._waiting.popleft()
        shards = sorted(logits.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        found = np.concatenate([np.asarray(shard.data) for shard in shards])[:num_samples]
        self._logits.append(np.nan_to_num(found.astype(np.float32), nan=0.0))  # the loss keeps its NaN


LOST_PEER = ("connection reset", "connection closed", "deadline_exceeded", "unavailable:", "gloo", "nccl", "heartbeat")


class JaxBackend:
    """JAX on TPUs, and on whatever else it finds."""

    def join(self, place: PlaceSpec) -> AbstractContextManager[World]:
        return join(place)

    def allocator(self, world: World) -> None:
        """Return nothing: batches are made in ordinary memory."""

    def build(self, spec: RunSpec, world: World, num_steps: int, source: SampleSource, run_dir: RunDir) -> JaxTrainer:
        # The next run need not wait a minute for the same programs to be compiled again.
        if world.kind != "cpu" and not jax.config.jax_compilation_cache_dir:
            folder = compiled_code_folder("jax", run_dir.path / "programs")
            jax.config.update("jax_compilation_cache_dir", str(folder))
        return JaxTrainer(spec, world, num_steps, source)

    def explain(self, error: Exception) -> EmbarkError | None:
        text = str(error) if isinstance(error, RuntimeError) else ""
        line = text.splitlines()[0] if text else ""
        if "RESOURCE_EXHAUSTED" in text:
            return UserError(f"out of device memory: {line}",
                             'a smaller train.batch_size, train.table_dtype = "fp16", or more devices')
        if any(sign in text.lower() for sign in LOST_PEER):
            return Fault(f"a process was lost: {line}", "start the run again: it resumes from its last checkpoint")
        return None

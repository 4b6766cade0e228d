"""The interface between the training loop and a training library: what `trainers/torch` and `trainers/jax` provide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from embark.values import JsonDict

if TYPE_CHECKING:
    from embark.data import Batch, SampleSource
    from embark.errors import EmbarkError
    from embark.features.arrays import Bytes
    from embark.spec import PlaceSpec, RunSpec
    from embark.store import RunDir
    from .checkpointer import Checkpointer
    from .clock import Waits
    from .evaluation import Trouble
    from .rank_reports import StepProfiler


class Ranks(Protocol):
    """The processes that train together. In torch each has one device; in JAX, all devices of its host."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_first(self) -> bool: ...

    def sum_of(self, numbers: list[int]) -> list[int]: ...

    def gathered(self, value: Any) -> list[Any]: ...


class World(Ranks, Protocol):
    """This process among the ranks, and what it runs on."""

    @property
    def is_host_leader(self) -> bool:
        """Whether this process samples the host's load and polls for preemption notices: one of each host does."""

    @property
    def device_type(self) -> str:
        """`cpu`, `cuda`, `gpu` or `tpu`."""

    @property
    def device_name(self) -> str: ...

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU; 0 for anything else."""

    @property
    def num_devices(self) -> int: ...

    @property
    def devices_per_host(self) -> int: ...


class EngineInfo(Protocol):
    """The engine that runs the steps, and why it was chosen."""

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str: ...


class Evaluator(Protocol):
    """Counts predictions on held-out batches."""

    def eval_source(self, source: SampleSource) -> SampleSource:
        """Return `source`, or one with the same held-out samples that makes them where the model is."""

    def batch_size(self, of_training: int) -> int:
        """Return how many samples to add at a time, over all ranks."""

    def add(self, batch: Batch) -> None: ...

    def metrics(self) -> JsonDict:
        """Return the metrics over all ranks, as `run.evaluation.metrics_from` makes them, with the exact AUC and
        `score_counts`: how many samples have a prediction in each bin of `events.drift`; for several tasks, as
        `run.task_metrics.combine` makes them."""


class Trainer(Protocol):
    """A model that learns."""

    @property
    def engine(self) -> EngineInfo: ...

    @property
    def layout(self) -> JsonDict:
        """The sharding of the tables."""

    @property
    def precision(self) -> str: ...

    @property
    def num_parameters(self) -> int: ...

    def input_waits(self) -> Waits: ...

    def profiler(self) -> StepProfiler | None: ...

    def feed(self, source: SampleSource, start_step: int, stop_step: int) -> AbstractContextManager[Iterator[Any]]:
        """Give batches on their way to the device."""

    def step(self, batches: Iterator[Any], step: int) -> float:
        """Train on the next batch; returns the learning rate."""

    def window_metrics(self) -> JsonDict:
        """Return the metrics over all ranks since the last call."""

    def trouble(self) -> Trouble | None:
        """Return what went wrong on this rank's devices since the last call."""

    def evaluating(self, step: int) -> AbstractContextManager[Evaluator]: ...

    def checkpointer(self, run_dir: RunDir) -> Checkpointer: ...

    def peak_bytes(self) -> int: ...


class TrainerBackend(Protocol):
    """A training library."""

    def join(self, place: PlaceSpec) -> AbstractContextManager[Any]:
        """Join the other ranks; gives this process's `World`."""

    def allocator(self, world: Any) -> Callable[[int], Bytes] | None:
        """Return how to allocate host memory for batches; None for ordinary memory."""

    def build(self, spec: RunSpec, world: Any, num_steps: int, source: SampleSource, run_dir: RunDir) -> Trainer: ...

    def explain(self, error: Exception) -> EmbarkError | None:
        """Return the library's error as one of Embark's; None if it is unknown."""

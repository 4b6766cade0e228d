"""The interface of engines, which turn batches into steps, and the engine of TorchRec's own pipeline."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from embark.data import Batch, Loader, SampleSource
from embark.run.evaluation import Trouble
from embark.spec import RunSpec
from embark.trainers.torch.batch import DeviceBatch, ToDevice
from embark.trainers.torch.dynamic.tables import DynamicTables
from embark.trainers.torch.metrics import MetricWindow
from embark.trainers.torch.optimizers import Optimizers
from embark.trainers.torch.task_metrics import TaskWindow
from embark.trainers.torch.world import World


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The steps of a part of the run, and this rank's share of their samples: a loader's arguments."""

    batch_size: int
    rank: int
    world_size: int
    start_step: int
    stop_step: int


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """The parts from which an engine is built."""

    spec: RunSpec
    world: World
    plan: ShardingPlan
    model: DistributedModelParallel
    dense: nn.Module  # The model's dense layers, outside of the sharded wrapper.
    optimizers: Optimizers
    precision: str
    window: MetricWindow | TaskWindow
    extend: Callable[[Batch, int], Batch] | None = None  # Appends samples to the batch of a step.
    dynamic: DynamicTables | None = None


class Engine(ABC):
    """Trains batch by batch; the weights stay in `model`, where checkpoints find them."""

    name: str

    def __init__(self, inputs: EngineInputs, reason: str) -> None:
        """`reason` says why this engine, for a person."""
        self.model, self.reason = inputs.model, reason

    @abstractmethod
    def feed(self, source: SampleSource, part: BatchRange) -> AbstractContextManager[Iterator[Any]]:
        """Yield the batches of a part of the run, for `step`; closed when it ends."""

    @abstractmethod
    def step(self, batches: Iterator[Any], step: int) -> None:
        """Train on the next batch, step `step` of the run, and count it in the window."""

    def settle(self, step: int) -> None:  # noqa: B027
        """Bring all state to what a checkpoint after `step` steps should contain."""

    def trouble(self) -> Trouble | None:
        """Return what went wrong on the device, if anything is known to have."""
        return None

    @contextmanager
    def evaluating(self) -> Iterator[DistributedModelParallel]:
        """Give TorchRec's own model in evaluation mode."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self.model.train()


class OneByOne:
    """A train pipeline that begins a batch when the one before has trained."""

    def __init__(self, model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, batches: Iterator[DeviceBatch]) -> tuple[Tensor, Tensor, Tensor]:
        self._optimizer.zero_grad()
        loss, output = self._model(next(batches).to(self._device, non_blocking=True))
        loss.backward()
        self._optimizer.step()
        found: tuple[Tensor, Tensor, Tensor] = output
        return found

    def detach(self) -> None:
        """Do nothing: there are no batches in it."""

    def attach(self) -> None:
        """Do nothing: there are no batches in it."""


class PipelineEngine(Engine):
    """`TrainPipelineSparseDist`: copies batch i + 2 and distributes the ids of batch i + 1 while batch i trains; where
    the host holds tables, it fetches the rows of batch i + 1 besides."""

    name = "pipeline"

    def __init__(self, inputs: EngineInputs, reason: str, *, must_prefetch: bool = False) -> None:
        super().__init__(inputs, reason)
        self._window, device, self._extend = inputs.window, inputs.world.device, inputs.extend
        if device.type == "cuda" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
            # What autograd keeps comes and goes in other sizes: blocks that do not grow leave up to a third unused.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self._to_device = ToDevice([t.name for t in inputs.spec.model.table_list()], device,
                                   inputs.spec.model.table_list())
        kind: Any = PrefetchTrainPipelineSparseDist if must_prefetch else TrainPipelineSparseDist
        self._dynamic = inputs.dynamic
        if self._dynamic:  # what a batch takes rows from may have them until the batch before has trained
            kind = OneByOne
        self._pipeline = kind(inputs.model, inputs.optimizers.both, device)

    @contextmanager
    def feed(self, source: SampleSource, part: BatchRange) -> Iterator[Iterator[Any]]:
        with Loader(source, **asdict(part)) as loader:
            extend = self._extend
            batches = loader if extend is None else (
                extend(batch, step) for step, batch in enumerate(loader, part.start_step))
            yield iter(batches) if self._dynamic else map(self._to_device, batches)  # the pipeline copies to the device

    def step(self, batches: Iterator[Any], step: int) -> None:
        if self._dynamic:
            batches = iter([self._to_device(self._dynamic.assign(next(batches), step))])
        _, logits, label = self._pipeline.progress(batches)
        self._window.add(logits, label)

    @contextmanager
    def evaluating(self) -> Iterator[DistributedModelParallel]:
        """Give the model in evaluation mode; batches already in the pipeline stay there."""
        self._pipeline.detach()
        try:
            with super().evaluating() as model:
                yield model
        finally:
            self._pipeline.attach()

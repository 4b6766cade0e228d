"""What turns batches into steps. One engine so far: TorchRec's own pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from embark.train.batch import DeviceBatch
from embark.train.optimizers import Optimizers

Output = tuple[Tensor, Tensor, Tensor]
"""Loss, logits, labels of this rank's part of the batch."""


class PipelineEngine:
    """`TrainPipelineSparseDist`: copies batch i + 2 and distributes the ids of batch i + 1 while batch i trains."""

    name = "pipeline"
    reason = "TorchRec's pipeline takes any sharding and any number of ids"

    def __init__(self, model: DistributedModelParallel, optimizers: Optimizers, device: torch.device) -> None:
        self.model = model
        self._device = device
        self._pipeline = TrainPipelineSparseDist(model, optimizers.both, device)

    def step(self, batches: Iterator[DeviceBatch]) -> Output:
        """Train on the next batch."""
        return self._pipeline.progress(batches)

    @contextmanager
    def evaluating(self) -> Iterator[DistributedModelParallel]:
        """The model alone, in evaluation mode; batches already in the pipeline stay there."""
        self._pipeline.detach()
        self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self.model.train()
            self._pipeline.attach()

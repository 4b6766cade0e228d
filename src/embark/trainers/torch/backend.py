"""torch as a training library: how it joins the ranks, allocates memory, builds the trainer and fails."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from embark.data import Source
from embark.errors import EmbarkError
from embark.spec import PlaceSpec, RunSpec
from embark.store import RunDir
from embark.trainers.torch.batch import pinned
from embark.trainers.torch.errors import explain
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import World, join


class TorchBackend:
    """TorchRec on CPUs and NVIDIA GPUs."""

    def join(self, place: PlaceSpec) -> AbstractContextManager[World]:
        return join(place)

    def allocator(self, world: World) -> Callable[[int], NDArray[np.uint8]] | None:
        return pinned(world.device)

    def build(self, spec: RunSpec, world: World, num_steps: int, source: Source, run_dir: RunDir) -> TorchTrainer:
        # Triton keeps compiled kernels with the run's files, so that a resumed run need not compile them again.
        os.environ.setdefault("TRITON_CACHE_DIR", str(run_dir.path.absolute() / "cache" / "triton"))
        return TorchTrainer(spec, world, num_steps, source)

    def explain(self, error: RuntimeError) -> EmbarkError | None:
        return explain(error)

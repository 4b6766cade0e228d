"""Saving and loading everything a run needs to go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel

from embark.store import Checkpoint, RunDir, begin_checkpoint, commit_checkpoint
from embark.train.optimizers import Optimizers
from embark.train.world import World


def save(
    run_dir: RunDir, step: int, model: DistributedModelParallel, optimizers: Optimizers, world: World,
    values: dict[str, Any],
) -> dict[str, Any]:
    """Write the checkpoint of `step`, each rank its own shards; returns the values of the `save` event."""
    started = time.perf_counter()
    path = run_dir.checkpoint_path(step)
    if world.is_first:
        begin_checkpoint(path)
    _wait(world)
    dcp.save(_state(model, optimizers), checkpoint_id=path)
    if world.is_first:
        commit_checkpoint(path, {"step": step, "world_size": world.world_size, **values})
    _wait(world)
    return {"step": step, "path": str(path), "bytes": _bytes_in(path), "save_s": time.perf_counter() - started}


def load(checkpoint: Checkpoint, model: DistributedModelParallel, optimizers: Optimizers) -> None:
    """Read it back, at any number of ranks and under any plan."""
    optimizers.init_state()
    state = _state(model, optimizers)
    dcp.load(state, checkpoint_id=checkpoint.path)
    model.load_state_dict(state["model"])
    optimizers.both.load_state_dict(state["optimizers"])


def _state(model: DistributedModelParallel, optimizers: Optimizers) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizers": optimizers.both.state_dict()}


def _wait(world: World) -> None:
    if world.world_size > 1:
        dist.barrier()


def _bytes_in(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

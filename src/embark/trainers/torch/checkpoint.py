"""The torch trainer's state: what it is, how it is written, and how it is read."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.remote_device import _remote_device

from embark.run.checkpointer import Checkpointer
from embark.store import Checkpoint, ChecksumStore, RunDir, checkpoint_name
from embark.trainers.torch.dcp_files import plain_errors, reader, writer
from embark.trainers.torch.optimizers import RowwiseRecut

if TYPE_CHECKING:
    from embark.trainers.torch.trainer import TorchTrainer


class TorchCheckpointer(Checkpointer):
    """Saves with a process group of its own, beside the one that trains."""

    def __init__(self, run_dir: RunDir, trainer: TorchTrainer) -> None:
        world = trainer.world
        group = dist.new_group(backend="gloo", timeout=world.timeout) if world.world_size > 1 else None
        super().__init__(trainer.spec, run_dir, world, lambda value: world.gathered(value, group), trainer.layout,
                         world.world_size)
        self._trainer, self._world, self._group = trainer, world, group
        self._staging = Staging()

    def _copied(self, step: int) -> State:
        self._trainer.engine.settle(step)
        return self._staging.copy(self._state())

    def _write_arrays(self, step: int, copied: State, store: ChecksumStore) -> dict[str, bytes]:
        with plain_errors("save"):
            dcp.save(copied, storage_writer=writer(store, checkpoint_name(step)), process_group=self._group,
                     no_dist=self._group is None)
        return {}

    def _load(self, checkpoint: Checkpoint) -> None:
        self._trainer.optimizers.init_state()
        state = self._state(is_load=True)
        here = f"random.{self._world.rank}"
        source = reader(self._checkpoints.store, checkpoint.name)
        saved = source.read_metadata()
        if not any(name.startswith(f"{here}.") for name in saved.state_dict_metadata):  # saved by fewer ranks
            state.pop(here)
        recut = RowwiseRecut(saved)
        with plain_errors("load"):
            dcp.load({**state, "optimizers": recut.prepare(state["optimizers"])}, storage_reader=source)
        recut.fill()
        self._trainer.model.load_state_dict(state["model"])
        self._trainer.optimizers.both.load_state_dict({"state": state["optimizers"]})
        self._trainer.optimizers.set_step(checkpoint.step)
        self._trainer.window.set_state(state["metrics"], self._world)
        if here in state:
            set_random_state(state[here], self._world.device)

    def _state(self, *, is_load: bool = False) -> State:
        """Tensors only, by name. Everything else a run knows follows from its spec and its step."""
        return {
            "model": self._trainer.model.state_dict(),
            "optimizers": self._trainer.optimizers.both.state_dict()["state"],
            "metrics": self._trainer.window.empty_state() if is_load else self._trainer.window.state(self._world),
            f"random.{self._world.rank}": random_state(self._world.device),
        }


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Of this rank, as tensors, which a checkpoint takes like any others. Ranks differ: save it under the rank."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on from there. Of a state saved on another kind of device, what both have is set."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


State = dict[str, Any]


class Staging:
    """Keeps its buffers from one save to the next: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, state: State) -> State:
        """The state on the host, tensor by tensor; a GPU's copies run together and are waited for once."""
        copied = {name: self._copy(name, value) for name, value in state.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def _copy(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(f"{name}/{key}", held) for key, held in value.items()}
        if isinstance(value, ShardedTensor):
            return self._copy_shards(name, value)
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(name, value)
        return deepcopy(value)

    def _copy_shards(self, name: str, value: ShardedTensor) -> ShardedTensor:
        metadata = deepcopy(value.metadata())
        for shard in metadata.shards_metadata:
            shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")
        by_offset = {tuple(s.shard_offsets): s for s in metadata.shards_metadata}
        shards = [
            Shard(self._copy_tensor(f"{name}#{i}", shard.tensor), by_offset[tuple(shard.metadata.shard_offsets)])
            for i, shard in enumerate(value.local_shards())
        ]
        metadata.tensor_properties.pin_memory = any(shard.tensor.is_pinned() for shard in shards)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, sharded_tensor_metadata=metadata, process_group=value._process_group
        )

    def _copy_tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(value.detach(), non_blocking=True)

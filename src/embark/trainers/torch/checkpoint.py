"""The torch trainer's state: its tensors, how they are copied and how they are filled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embark.run.checkpointer import Checkpointer
from embark.store import RunDir
from embark.store.checkpoint_arrays import CheckpointArrays, TensorChunk
from embark.store.object_store import for_each_parallel
from .dynamic.id_map import MapPart

if TYPE_CHECKING:
    from .trainer import TorchTrainer

READ_BYTES = 32 << 20  # Host memory that one thread takes at a time, however large the table.
NUM_READERS = 8
State = dict[str, Any]


class TorchCheckpointer(Checkpointer):
    """Saves over a process group of its own, apart from the one that trains."""

    def __init__(self, run_dir: RunDir, trainer: TorchTrainer) -> None:
        world = trainer.world
        group = dist.new_group(backend="gloo", timeout=world.timeout) if world.world_size > 1 else None
        super().__init__(trainer.spec, run_dir, world, lambda value: world.gathered(value, group), trainer.layout,
                         world.world_size)
        self._trainer, self._world = trainer, world
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        """Kept from one save to the next: fresh memory costs more than the copy."""

    def _copied(self, step: int) -> list[TensorChunk]:
        """Copy tensors to the host; a GPU's copies run together and are waited for once."""
        self._trainer.engine.settle(step)
        pieces = [TensorChunk(shard.name, shard.size, shard.offsets, *to_array(self._copy(shard)))
                  for shard in local_shards(self._state()) if shard.is_sharded or self._world.is_first
                  or shard.name.startswith("random.")]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return pieces

    def _copy(self, shard: LocalShard) -> torch.Tensor:
        value = shard.values
        key = (shard.name, shard.offsets, value.shape, value.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda)
        return self._buffers[key].copy_(value.detach(), non_blocking=True)

    def _load(self, arrays: CheckpointArrays, step: int) -> None:
        dense = "optimizers.dense."
        self._trainer.optimizers.init_state(
            [name.removeprefix(dense) for name in arrays.entries if name.startswith(dense)])
        state = self._state(is_load=True)
        here = f"random.{self._world.rank}"
        # Saved by fewer ranks, by JAX or on another kind of device, a checkpoint lacks some of it.
        state[here] = {kind: value for kind, value in state[here].items() if f"{here}.{kind}" in arrays.entries}
        fill(local_shards(state), arrays)
        if self._trainer.dynamic:
            self._trainer.dynamic.map.loaded()
        self._trainer.model.load_state_dict(state["model"])
        self._trainer.optimizers.both.load_state_dict({"state": state["optimizers"]})
        self._trainer.optimizers.set_step(step)
        self._trainer.window.set_state(state["metrics"], self._world)
        set_random_state(state[here], self._world.device)

    def _weight_sizes(self) -> dict[str, tuple[int, ...]]:
        return {f"model.{name}": tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)
                for name, value in self._trainer.model.state_dict().items()}

    def _load_weights(self, arrays: CheckpointArrays) -> None:
        state = {"model": self._trainer.model.state_dict()}
        parts = [part for shard in local_shards(state) for part in _slices(shard)]
        for_each_parallel(lambda part: _read_over(part, arrays), parts, NUM_READERS)
        self._trainer.model.load_state_dict(state["model"])

    def _state(self, *, is_load: bool = False) -> State:
        """Return the tensors of the state by name. All else that a run knows follows from its spec and its step."""
        return {
            "model": self._trainer.model.state_dict(),
            "optimizers": self._trainer.optimizers.both.state_dict()["state"],
            "metrics": self._trainer.window.empty_state() if is_load else self._trainer.window.state(self._world),
            f"random.{self._world.rank}": random_state(self._world.device),
            **({"dynamic": self._trainer.dynamic.map.state(is_load=is_load)} if self._trainer.dynamic else {}),
        }


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's part of a tensor, or all of one that is not sharded."""

    name: str  # The keys in the nested state, joined by dots.
    size: tuple[int, ...]  # Size of the complete tensor.
    offsets: tuple[int, ...]
    values: torch.Tensor
    is_sharded: bool


def local_shards(state: State, above: str = "") -> Iterator[LocalShard]:
    """List this rank's parts of all tensors of a nested state."""
    for key, value in state.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            yield from local_shards(value, f"{name}.")
        elif isinstance(value, ShardedTensor):
            size = tuple(value.metadata().size)  # asked for its size, a ShardedTensor warns that it is deprecated
            for shard in value.local_shards():
                yield LocalShard(name, size, tuple(shard.metadata.shard_offsets), shard.tensor, is_sharded=True)
        elif isinstance(value, MapPart):
            if value.tensor.numel():
                yield LocalShard(name, (value.size,), (value.first,), value.tensor, is_sharded=True)
        else:
            yield LocalShard(name, tuple(value.shape), (0,) * value.dim(), value, is_sharded=False)


def fill(shards: Iterator[LocalShard], arrays: CheckpointArrays) -> None:
    """Read every shard, under whatever sharding it was saved, in pieces that are read in parallel."""
    parts = [part for shard in shards for part in _parts(shard, arrays)]
    for_each_parallel(lambda part: _read(part, arrays), parts, NUM_READERS)


def _parts(shard: LocalShard, arrays: CheckpointArrays) -> Iterator[LocalShard]:
    is_rowwise_state = shard.name.endswith(".momentum1") and len(shard.size) == 1
    arrays.entry(shard.name, None if is_rowwise_state else shard.size)
    yield from _slices(shard)


def _slices(shard: LocalShard) -> Iterator[LocalShard]:
    """Cut a shard into pieces that one thread reads at a time."""
    values = shard.values.detach()
    if not values.numel():
        return
    if not values.dim():
        yield LocalShard(shard.name, shard.size, (0,), values.view(1), shard.is_sharded)
        return
    at_once = max(1, READ_BYTES // (values[0].numel() * values.itemsize))
    for first, part in enumerate(values.split(at_once)):
        offsets = (shard.offsets[0] + first * at_once, *shard.offsets[1:])
        yield LocalShard(shard.name, shard.size, offsets, part, shard.is_sharded)


def _read(part: LocalShard, arrays: CheckpointArrays) -> None:
    saved = arrays.entries[part.name]
    if saved.size != part.size:  # row-wise Adagrad's state, of another number of column shards
        table = f"model.{part.name.removeprefix('optimizers.tables.').rpartition('.weight.')[0]}.weight"
        first = part.offsets[0] % arrays.entry(table).size[0]
        rows = arrays.rowwise_state(part.name, table, first, first + len(part.values))
        part.values.copy_(torch.from_numpy(rows))
    elif part.values.is_cpu and part.values.dtype != torch.bfloat16:
        arrays.read_into(part.name, part.offsets, part.values.numpy())
    else:
        rows = arrays.read_into(part.name, part.offsets, np.empty(tuple(part.values.shape), saved.array_dtype))
        part.values.copy_(torch.from_numpy(rows))


def _read_over(part: LocalShard, arrays: CheckpointArrays) -> None:
    values = part.values.cpu()
    rows = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    part.values.copy_(torch.from_numpy(arrays.read_into(part.name, part.offsets, rows)))


def to_array(values: torch.Tensor) -> tuple[NDArray[Any], str]:
    """Return a tensor as an array on the host, and its type where NumPy does not have it."""
    return (values.view(torch.uint16).numpy(), "bfloat16") if values.dtype == torch.bfloat16 else (values.numpy(), "")


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return this rank's random state as tensors, which a checkpoint takes like any others.

    Ranks differ: save it under the rank.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore as much of the random state as there is."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)

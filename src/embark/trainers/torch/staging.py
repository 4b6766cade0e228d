"""A copy of the training state, so that training continues while the copy is written."""

from copy import deepcopy
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.remote_device import _remote_device

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

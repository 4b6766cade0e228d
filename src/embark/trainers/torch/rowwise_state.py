"""Row-wise Adagrad's state when a table is cut into other columns than before.

It holds one number a row: the sum of the gradient's mean square. Of a table in k column shards it holds k, each over
its own columns, and TorchRec lays them end to end: k × rows numbers. The mean over the shards, weighted by their
widths, is what the whole row would have; a shard of a row begins with the whole row's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

SUFFIX = ".momentum1"


class RowwiseRecut:
    """Stands plain tensors where a saved state has another length than the one to fill, and fills it from them."""

    def __init__(self, saved: Metadata) -> None:
        self._saved = saved.state_dict_metadata
        self._recut: list[tuple[ShardedTensor, Tensor, list[int]]] = []

    def prepare(self, optimizers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The state to load into: as it is, but for what must be cut anew."""
        return {
            parameter: {name: self._place(parameter, name, value) for name, value in states.items()}
            for parameter, states in optimizers.items()
        }

    def fill(self) -> None:
        """After loading: give every shard its rows."""
        for wanted, loaded, widths in self._recut:
            rows = loaded.numel() // len(widths)
            share = torch.tensor(widths, dtype=loaded.dtype) / sum(widths)
            whole = (loaded.view(len(widths), rows) * share[:, None]).sum(0)
            for shard in wanted.local_shards():
                first = shard.metadata.shard_offsets[0] % rows
                shard.tensor.copy_(whole[first : first + shard.tensor.numel()])

    def _place(self, parameter: str, name: str, value: Any) -> Any:
        was = self._saved.get(f"optimizers.{parameter}.{name}")
        if not (name.endswith(SUFFIX) and isinstance(value, ShardedTensor) and isinstance(was, TensorStorageMetadata)):
            return value
        about = value.metadata()  # asked for its size, a ShardedTensor warns that it is deprecated
        if len(about.size) != 1 or was.size == about.size:
            return value
        loaded = torch.empty(was.size, dtype=about.tensor_properties.dtype)
        self._recut.append((value, loaded, self._widths(parameter)))
        return loaded

    def _widths(self, parameter: str) -> list[int]:
        """Of the column shards that were saved, from left to right."""
        table = self._saved[f"model.{parameter.removeprefix('tables.')}"]
        widths = {chunk.offsets[1]: chunk.sizes[1] for chunk in table.chunks}
        return [widths[first] for first in sorted(widths)]

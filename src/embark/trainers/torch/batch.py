"""Batches from numpy arrays to tensors that a train pipeline can pin, copy and shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embark.data import Batch
from embark.data.loader import pooling_weights
from embark.features.layout import Field, Layout
from embark.spec import Table


@dataclass
class DeviceBatch(Pipelineable):
    """A rank's part of a batch, as tensors."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> DeviceBatch:
        return DeviceBatch(*(part.to(device, non_blocking=non_blocking)
                             for part in (self.dense, self.sparse, self.label)))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense, self.sparse, self.label):
            part.record_stream(stream)

    def pin_memory(self) -> DeviceBatch:
        return DeviceBatch(self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory())


def pinned(device: torch.device) -> Callable[[int], NDArray[np.uint8]] | None:
    """Return an allocator of memory that a GPU copies from at full speed, or None where there is no GPU.

    Each piece is a block of torch's own pinned memory from its first byte on, so torch knows of the copies from it and
    gives it out again only when they are done.
    """
    if device.type != "cuda":
        return None

    def allocate(size_bytes: int) -> NDArray[np.uint8]:
        torch.cuda.set_device(device)  # a thread begins with GPU 0
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    return allocate


class ToDevice:
    """Turns batches into `DeviceBatch`es, and reuses the parts that are the same in all of them."""

    def __init__(self, names: list[str], device: torch.device, tables: Sequence[Table] = ()) -> None:
        """Create the converter. `tables` are the features, for a model with weighted ids."""
        self._names, self._device, self._tables = names, device, tables
        self._fixed: dict[int, tuple[Tensor, Tensor, list[int], list[int]]] = {}

    def __call__(self, batch: Batch) -> DeviceBatch:
        on_host = DeviceBatch(torch.from_numpy(batch.dense), self._keyed(batch), torch.from_numpy(batch.label))
        return on_host.pin_memory() if self._device.type == "cuda" else on_host

    def _keyed(self, batch: Batch) -> KeyedJaggedTensor:
        """Make a KeyedJaggedTensor. Lengths and offsets that never change are kept: building them costs fifty times the
        rest."""
        stride = len(batch.label)
        parts = self._fixed.get(stride) if batch.is_fixed else None
        if parts is None:
            lengths = torch.from_numpy(batch.lengths)
            per_key: list[int] = lengths.sum(dim=1).tolist()
            offset_per_key = [0, *torch.tensor(per_key).cumsum(0).tolist()]
            flat = lengths.reshape(-1)
            offsets = torch.cat([flat.new_zeros(1), flat.cumsum(0, dtype=torch.int32)])
            parts = (flat, offsets, per_key, offset_per_key)
            if batch.is_fixed:
                if self._device.type == "cuda":  # once, not for every batch
                    parts = (flat.pin_memory(), offsets.pin_memory(), per_key, offset_per_key)
                self._fixed[stride] = parts
        flat, offsets, per_key, offset_per_key = parts
        return KeyedJaggedTensor(
            keys=self._names, values=torch.from_numpy(batch.ids), lengths=flat, offsets=offsets, stride=stride,
            length_per_key=per_key, offset_per_key=offset_per_key,
            weights=None if batch.weights is None else torch.from_numpy(pooling_weights(batch, self._tables)),
        )


_DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32, "float16": torch.float16,
           "float32": torch.float32}


class RawDecoder:
    """Batches of `num_rows` rows of one layout, for a model that takes the features `names` in this order.

    Shapes and kernels are fixed and nothing waits for the device, so `decode` can be captured in a CUDA graph: one
    cast for each group of columns, one gather where the groups' order is not the model's, one cast of the label.
    `spare_rows`: the block has space for so many more, and its rows are to be brought into the order behind it.
    """

    def __init__(
        self, layout: Layout, names: Sequence[str], num_rows: int, device: torch.device, num_batches: int = 1,
        *, spare_rows: int = 0,
    ) -> None:
        if not layout.is_fixed:
            raise ValueError("there are no raw batches where rows have different numbers of ids")
        where = layout.map(num_batches * num_rows + spare_rows)
        row_order = layout.row_order(num_batches * num_rows, spare_rows)
        self._row_order = row_order if spare_rows else None
        self.size_bytes: int = row_order.start + row_order.size_bytes
        """Bytes of `num_batches` batches, which lie together."""
        self._num_rows = num_rows
        self._label, self._dense, self._groups = where.label, where.dense, where.groups
        # A feature of several ids is as many lines of `num_rows` ids, which lie together.
        stored = [member for group in layout.groups for member in group.members]
        lines, num_lines = {}, 0
        for member in stored:
            feature = layout.features[member]
            lines[feature.name] = range(num_lines, num_lines + feature.multi_hot)
            num_lines += feature.multi_hot
        wanted = [line for name in names for line in lines[name]]
        self._num_lines = num_lines
        self._order = None if wanted == list(range(num_lines)) else torch.tensor(wanted, device=device)

    def decode(self, buffer: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Decode one of the batches: dense [B, D] in float32, ids in int32, feature by feature, and labels [B] in
        float32.

        Dense values that are stored as float32 stay in `buffer`: it must not be filled again while they are used.
        """
        rows = slice(number * self._num_rows, (number + 1) * self._num_rows)
        order = None if self._row_order is None else _view(buffer, self._row_order)[rows]

        def taken(field: Field, dim: int) -> Tensor:
            values = _view(buffer, field)
            if order is None:
                return values.narrow(dim, rows.start, self._num_rows)
            bits = values.view(torch.int16) if values.dtype == torch.uint16 else values  # which torch cannot gather
            return bits.index_select(dim, order).view(values.dtype)

        dense, label = (taken(field, 0).to(torch.float32) for field in (self._dense, self._label))
        ids = torch.empty(self._num_lines * self._num_rows, dtype=torch.int32, device=buffer.device)
        start = 0
        for field in self._groups:
            group = taken(field, 1)
            ids[start : start + group.numel()].view(group.shape).copy_(group)
            start += group.numel()
        if self._order is not None:
            ids = ids.view(self._num_lines, self._num_rows).index_select(0, self._order).view(-1)
        return dense, ids, label


def _view(buffer: Tensor, field: Field) -> Tensor:
    taken = buffer[field.start : field.start + field.size_bytes]
    return taken.view(_DTYPES[field.dtype.name]).view(field.shape)

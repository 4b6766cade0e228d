"""From numpy to a batch that a train pipeline can pin, copy and shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embark.data import Batch


@dataclass
class DeviceBatch(Pipelineable):
    """A rank's part of a batch, as tensors."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> DeviceBatch:
        return DeviceBatch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense, self.sparse, self.label):
            part.record_stream(stream)

    def pin_memory(self) -> DeviceBatch:
        return DeviceBatch(self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory())


def pinned(device: torch.device) -> Callable[[int], NDArray[np.uint8]] | None:
    """Memory that a GPU copies from at full speed, for batches to be made in; None where there is no GPU.

    Each piece is a block of torch's own pinned memory from its first byte on, so torch knows of the copies from it
    and gives it out again only when they are done.
    """
    if device.type != "cuda":
        return None

    def allocate(size_bytes: int) -> NDArray[np.uint8]:
        torch.cuda.set_device(device)  # a thread begins with GPU 0
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    return allocate


class ToDevice:
    """Turns batches into `DeviceBatch`es, keeping what is the same in every one of them."""

    def __init__(self, names: list[str], device: torch.device) -> None:
        self._names = names
        self._device = device
        self._fixed: dict[int, tuple[Tensor, Tensor, list[int], list[int]]] = {}

    def __call__(self, batch: Batch) -> DeviceBatch:
        on_host = DeviceBatch(
            torch.from_numpy(batch.dense), self._keyed(batch), torch.from_numpy(batch.label)
        )
        return on_host.pin_memory() if self._device.type == "cuda" else on_host

    def stream(self, batches: Iterable[Batch]) -> Iterator[DeviceBatch]:
        """Each of `batches`, made ready; the pipeline does the copy to the device."""
        return map(self, batches)

    def _keyed(self, batch: Batch) -> KeyedJaggedTensor:
        """Building lengths and offsets anew costs fifty times the rest, so fixed ones are kept."""
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
            keys=self._names,
            values=torch.from_numpy(batch.ids),
            lengths=flat,
            offsets=offsets,
            stride=stride,
            length_per_key=per_key,
            offset_per_key=offset_per_key,
        )

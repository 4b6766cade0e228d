"""The order of shuffled rows, found on the device: what `data.prepared.order.row_order` finds on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from embark.data.prepared.order import TABLE_COLUMNS, num_in_table
from embark.features.hashing import FIRST, SECOND, STEP
from embark.features.layout import Field
from embark.trainers.torch.world import CAPTURED


class RowOrder:
    """Replaces a table of blocks, `order.block_table`, by the place of each row in the buffer; waits for nothing.

    One graph for each buffer: some thirty launches, one by one, would take the host longer than a step.
    """

    def __init__(self, field: Field, block_rows: int, device: torch.device) -> None:
        self._field, self._block_rows = field, block_rows
        self._num_blocks = num_in_table(field.shape[0], block_rows)
        self._numbers = torch.arange(block_rows, device=device)
        self._samples = torch.arange(field.shape[0], device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}  # By the buffer's address.

    def __call__(self, buffer: Tensor) -> None:
        address = buffer.data_ptr()
        if not buffer.is_cuda or address not in self._graphs:  # the first call loads what a capture must not
            self._graphs[address] = None
            self._find(buffer)
            return
        graph = self._graphs[address]
        if graph is None:
            graph = self._graphs[address] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._find(buffer)
            CAPTURED.add(graph)
        graph.replay()

    def _find(self, buffer: Tensor) -> None:
        field, numbers = self._field, self._numbers
        region = buffer[field.start : field.start + field.size_bytes]
        table = region[: 8 * TABLE_COLUMNS * self._num_blocks].view(torch.int64).view(-1, TABLE_COLUMNS)
        key, low, rows, at, first, stop = table.unbind(1)
        bits = numbers * _signed(STEP) + key[:, None]
        bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _signed(FIRST)
        bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _signed(SECOND)
        bits = bits ^ (bits >> 31 & (1 << 33) - 1)
        bits = (bits & ~low[:, None] | numbers) ^ torch.iinfo(torch.int64).min  # sorted as if they had no sign
        bits = torch.where(numbers < rows[:, None], bits, torch.iinfo(torch.int64).max)
        order = bits.sort(1).values & low[:, None]
        block = torch.searchsorted(stop.contiguous(), self._samples, right=True).clamp_(max=self._num_blocks - 1)
        start = torch.nn.functional.pad(stop[:-1], (1, 0))
        place = self._samples + (first - start)[block]
        shuffled = order.view(-1)[(block * self._block_rows + place).clamp_(0, order.numel() - 1)]
        region.view(torch.int32).copy_(torch.where(rows[block] > 0, shuffled, place) + at[block])


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits

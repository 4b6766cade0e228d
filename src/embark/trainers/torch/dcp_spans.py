"""Which bytes of a saved tensor a load wants, and how they get into the tensor that wants them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import ReadItem

from embark.trainers.torch.dcp_index import Chunk

PIECE_BYTES = 32 << 20
"""Host memory that one thread takes at a time, however large the table."""
GAP_BYTES = 256 << 10
"""Wanted ranges that are no further apart are read at once: a request costs more than the bytes between."""
JOINED_BYTES = 4 << 20
"""At most so many: they are copied once more, and what is large is better read side by side."""


@dataclass(frozen=True, slots=True)
class Span:
    """Whole rows of a saved chunk, one after another in its file, and the rows of a tensor they are for."""

    file: str
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """As saved: of the rows, at their full width."""
    columns: tuple[tuple[int, int], ...]
    """Offset and length wanted of each dimension but the first."""
    target: torch.Tensor

    @contextmanager
    def filling(self) -> Iterator[memoryview]:
        """Where to put the bytes: right into the target, or, where it is elsewhere or of another form, beside it."""
        is_direct = (
            self.target.is_cpu and self.target.is_contiguous() and self.target.dtype == self.dtype
            and self.target.shape == self.shape
        )
        rows = self.target if is_direct else torch.empty(self.shape, dtype=self.dtype)
        yield _bytes_of(rows)
        if not is_direct:
            for number, (offset, length) in enumerate(self.columns, 1):
                rows = rows.narrow(number, offset, length)
            self.target.copy_(rows)


def spans_of(item: ReadItem, chunk: Chunk, target: torch.Tensor) -> Iterator[Span]:
    """What to read of `chunk` for `item`, in pieces that host memory has room for."""
    if target.shape != item.lengths:
        raise ValueError(f"{item.storage_index.fqn}: {tuple(item.lengths)} were planned for {tuple(target.shape)}")
    # A scalar is one row of one.
    shape = tuple(chunk.sizes) or (1,)
    offsets, lengths = tuple(item.storage_offsets) or (0,), tuple(item.lengths) or (1,)
    target = target if target.dim() else target.view(1)
    row_bytes = math.prod(shape[1:]) * chunk.dtype.itemsize
    if not row_bytes or not math.prod(lengths):
        return
    columns = tuple(zip(offsets[1:], lengths[1:], strict=True))
    rows_at_once = max(1, PIECE_BYTES // row_bytes)
    for row in range(0, lengths[0], rows_at_once):
        num_rows = min(rows_at_once, lengths[0] - row)
        yield Span(
            chunk.place.file, chunk.place.start + (offsets[0] + row) * row_bytes, num_rows * row_bytes, chunk.dtype,
            (num_rows, *shape[1:]), columns, target.narrow(0, row, num_rows),
        )


def together(spans: list[Span]) -> list[list[Span]]:
    """Spans to be read by one request each, in the order of the files."""
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.file, span.start)):
        if groups:
            first, last = groups[-1][0], groups[-1][-1]
            is_near = span.file == last.file and 0 <= span.start - (last.start + last.num_bytes) <= GAP_BYTES
            if is_near and span.start + span.num_bytes - first.start <= JOINED_BYTES:
                groups[-1].append(span)
                continue
        groups.append([span])
    return groups


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())

"""Which bytes of a saved tensor a load wants, and how they get into the tensor that wants them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from embark.errors import Fault
from embark.store.checkpoint_index import ITEM_BYTES, ChunkEntry, FileRange, Index, TensorEntry, read_index

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """What lies at a place: part of a tensor, row after row; or a pickled value, whose dtype and sizes mean nothing."""

    place: FileRange
    dtype: torch.dtype = torch.uint8
    sizes: tuple[int, ...] = ()


def index_text(metadata: Metadata, places: dict[MetadataIndex, FileRange]) -> str:
    """The index of a checkpoint whose pieces were written to `places`."""
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, FileRange] = {}
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata):
            values[name] = places[MetadataIndex(name)]
            continue
        chunks = tuple(
            ChunkEntry(tuple(chunk.offsets), tuple(chunk.sizes), places[MetadataIndex(name, chunk.offsets)])
            for chunk in saved.chunks
        )
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise Fault(f"{name} is of {dtype}, which no checkpoint holds", fix=f"one of: {', '.join(ITEM_BYTES)}")
        tensors[name] = TensorEntry(dtype, tuple(saved.size), chunks)
    return Index(tensors, values, metadata.planner_data or {}).to_json()


def read_metadata(text: bytes, where: str) -> Metadata:
    """DCP's metadata from an index; one that Embark did not write, or that was changed since, is refused."""
    index = read_index(text, where)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, Chunk] = {}
    for name, tensor in index.tensors.items():
        dtype = getattr(torch, tensor.dtype)
        for number, chunk in enumerate(tensor.chunks):
            stored[MetadataIndex(name, chunk.offsets, number)] = Chunk(chunk.place, dtype, chunk.sizes)
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.size), chunks)
    for name, place in index.values.items():
        described[name] = BytesStorageMetadata()
        stored[MetadataIndex(name)] = Chunk(place)
    return Metadata(described, planner_data=dict(index.paths), storage_data=stored, storage_meta=StorageMeta())

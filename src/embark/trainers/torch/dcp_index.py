"""DCP's metadata from and to the index of a checkpoint, whose file `store/index.py` defines."""

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

from embark.errors import Fault
from embark.store.checkpoint_index import ITEM_BYTES, ChunkEntry, FileRange, Index, TensorEntry, read_index


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

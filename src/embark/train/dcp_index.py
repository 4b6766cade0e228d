"""What a checkpoint holds and where in its files each piece lies: DCP's metadata as JSON, checked as it is read."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

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

INDEX = "index.json"
FORMAT = "embark-checkpoint-1"
FILE_NAME = re.compile(r"rank-\d{5,}-\d{2,}\.bin")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Place:
    """A range of a file."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What lies at a place: part of a tensor, row after row; or a pickled value, whose dtype and sizes mean nothing."""

    place: Place
    dtype: torch.dtype = torch.uint8
    sizes: tuple[int, ...] = ()


def index_text(metadata: Metadata, places: dict[MetadataIndex, Place]) -> str:
    """The index of a checkpoint whose pieces were written to `places`."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata):
            values[name] = _written(places[MetadataIndex(name)])
            continue
        chunks = [
            {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes),
             **_written(places[MetadataIndex(name, chunk.offsets)])}
            for chunk in saved.chunks
        ]
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(saved.size), "chunks": chunks}
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
    return json.dumps({"format": FORMAT, "tensors": tensors, "values": values, "paths": paths}) + "\n"


def read_index(text: bytes, where: str) -> Metadata:
    """DCP's metadata from an index; one that Embark did not write, or that was changed since, is refused."""
    try:
        index = json.loads(text)
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}, and this Embark reads {FORMAT!r}")
        return _metadata(index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise Fault(f"{where} is not the index of a checkpoint: {reason}",
                fix="it was damaged, or another program wrote it: take another checkpoint")


def _metadata(index: dict[str, Any]) -> Metadata:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, Chunk] = {}
    for name, tensor in index["tensors"].items():
        dtype = DTYPES[tensor["dtype"]]
        size = _sizes(tensor["size"])
        chunks = []
        for number, written in enumerate(tensor["chunks"]):
            chunk = Chunk(_place(written), dtype, _sizes(written["sizes"]))
            offsets = _sizes(written["offsets"])
            if chunk.place.num_bytes != math.prod(chunk.sizes) * dtype.itemsize:
                raise ValueError(f"{name}: {chunk.place.num_bytes} bytes for {chunk.sizes} of {tensor['dtype']}")
            ends = [offset + length for offset, length in zip(offsets, chunk.sizes, strict=True)]
            if any(end > limit for end, limit in zip(ends, size, strict=True)):
                raise ValueError(f"{name}: a part that ends at {ends} of {size}")
            stored[MetadataIndex(name, offsets, number)] = chunk
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(chunk.sizes)))
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)
    for name, written in index["values"].items():
        described[name] = BytesStorageMetadata()
        stored[MetadataIndex(name)] = Chunk(_place(written))
    paths = {name: tuple(path) for name, path in index["paths"].items()}
    return Metadata(described, planner_data=paths, storage_data=stored, storage_meta=StorageMeta())


def _written(place: Place) -> dict[str, Any]:
    return {"file": place.file, "start": place.start, "bytes": place.num_bytes}


def _place(written: dict[str, Any]) -> Place:
    file = written["file"]
    if not FILE_NAME.fullmatch(file):
        raise ValueError(f"{file!r} is not the name of a checkpoint's file")
    start, num_bytes = _sizes([written["start"], written["bytes"]])
    return Place(file, start, num_bytes)


def _sizes(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} are not sizes")
    return tuple(numbers)

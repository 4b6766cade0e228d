"""The index of a checkpoint, `index.json`: which tensors there are, and where in its files each piece of them lies.

    {"format": "embark-checkpoint-1",
     "tensors": {NAME: {"dtype": "float32", "size": [rows, columns], "chunks": [
         {"offsets": [0, 0], "sizes": [rows, columns], "file": "rank-00000-00.bin", "start": 0, "bytes": …}]}},
     "values": {NAME: {"file": …, "start": …, "bytes": …}},    what is no tensor, pickled by torch
     "paths": {NAME: ["model", …]}}                            where each stands in the nested state

A piece is its part of the tensor, row after row, little-endian. Nothing in here knows torch.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embark.errors import Fault

INDEX = "index.json"
FORMAT = "embark-checkpoint-1"
FILE_NAME = re.compile(r"rank-\d{5,}-\d{2,}\.bin")
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
}
"""Every dtype that a checkpoint may hold, by torch's name."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: FileRange


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, whole, and the chunks it was saved in."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Index:
    """All that a checkpoint holds, by name."""

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, FileRange]
    paths: Mapping[str, tuple[Any, ...]]

    def to_json(self) -> str:
        """The text that `read_index` reads back."""
        return json.dumps({
            "format": FORMAT,
            "tensors": {name: _tensor_written(tensor) for name, tensor in self.tensors.items()},
            "values": {name: _place_written(place) for name, place in self.values.items()},
            "paths": {name: list(path) for name, path in self.paths.items()},
        }) + "\n"


def read_index(text: bytes, where: str) -> Index:
    """The index in `text`; one that Embark did not write, or that was changed since, is refused."""
    try:
        written = json.loads(text)
        if written["format"] != FORMAT:
            raise ValueError(f"format {written['format']!r}, and this Embark reads {FORMAT!r}")
        return Index(
            tensors={name: _tensor(name, tensor) for name, tensor in written["tensors"].items()},
            values={name: _place(place) for name, place in written["values"].items()},
            paths={name: tuple(path) for name, path in written["paths"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise Fault(f"{where} is not the index of a checkpoint: {reason}",
                fix="it was damaged, or another program wrote it: take another checkpoint")


def _tensor(name: str, written: Mapping[str, Any]) -> TensorEntry:
    dtype, size = written["dtype"], _sizes(written["size"])
    chunks = []
    for part in written["chunks"]:
        chunk = ChunkEntry(_sizes(part["offsets"]), _sizes(part["sizes"]), _place(part))
        if chunk.place.num_bytes != math.prod(chunk.sizes) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name}: {chunk.place.num_bytes} bytes for {chunk.sizes} of {dtype}")
        ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > limit for end, limit in zip(ends, size, strict=True)):
            raise ValueError(f"{name}: a part that ends at {ends} of {size}")
        chunks.append(chunk)
    return TensorEntry(dtype, size, tuple(chunks))


def _place(written: Mapping[str, Any]) -> FileRange:
    file = written["file"]
    if not FILE_NAME.fullmatch(file):
        raise ValueError(f"{file!r} is not the name of a checkpoint's file")
    start, num_bytes = _sizes([written["start"], written["bytes"]])
    return FileRange(file, start, num_bytes)


def _sizes(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} are not sizes")
    return tuple(numbers)


def _tensor_written(tensor: TensorEntry) -> dict[str, Any]:
    chunks = [
        {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **_place_written(chunk.place)}
        for chunk in tensor.chunks
    ]
    return {"dtype": tensor.dtype, "size": list(tensor.size), "chunks": chunks}


def _place_written(place: FileRange) -> dict[str, Any]:
    return {"file": place.file, "start": place.start, "bytes": place.num_bytes}

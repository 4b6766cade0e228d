"""Files in the safetensors format: eight bytes of length, a JSON header, then the arrays one behind the other.

The `safetensors` package writes from memory and copies on reading. Tables may be larger than memory, so they are
written in pieces here, and mapped. Nothing in such a file can run code.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Array
from embark.values import JsonDict, JsonMap, frozen

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "|b1", "I8": "|i1", "U8": "|u1", "I16": "<i2",
           "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}
_NAMES = {np.dtype(text): name for name, text in _DTYPES.items()}
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # The limit of the safetensors library.


@frozen
class TensorSource:
    """A tensor to be written."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Array]]  # Yields the rows in order, some at a time.

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_memory(name: str, values: Array) -> TensorSource:
    """Return a tensor that is written in one piece."""
    return TensorSource(name, values.dtype, values.shape, lambda: [values])


def file_of(tensors: Sequence[TensorSource], metadata: Mapping[str, str]) -> tuple[int, Iterator[memoryview]]:
    """Return the size in bytes and the pieces of a file. The widest elements come first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda one: (-one.dtype.itemsize, one.name))
    header: JsonDict = {"__metadata__": dict(metadata)}
    end = 0
    for one in ordered:
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape),
                            "data_offsets": [end, end + one.num_bytes]}
        end += one.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for one in ordered:
            for values in one.pieces():
                if values.size:
                    yield np.ascontiguousarray(values, one.dtype).reshape(-1).view(np.uint8).data

    return 8 + len(text) + end, pieces()


def map_file(path: Path) -> dict[str, Array]:
    """Map the tensors of a file by name. Pages that are never touched are never read."""
    try:
        data: Array = np.memmap(path, np.uint8, "c")  # Private: torch wants memory that could be written.
        length = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or length > min(_MAX_HEADER_BYTES, len(data) - 8):
            raise ValueError("its header is longer than the file")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        return {str(name): _tensor(data[8 + length :], about) for name, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: is not a safetensors file: {error}", "export the run again") from None


def _tensor(data: Array, about: JsonMap) -> Array:
    dtype, shape = np.dtype(_DTYPES[about["dtype"]]), [int(size) for size in about["shape"]]
    start, stop = (int(offset) for offset in about["data_offsets"])
    if min([*shape, start], default=0) < 0 or stop > len(data) or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {shape} lies in bytes {start} to {stop} of {len(data)}")
    return data[start:stop].view(dtype).reshape(shape)

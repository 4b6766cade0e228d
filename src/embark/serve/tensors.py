"""Tensors of the Open Inference Protocol v2 as columns of a request: from JSON, and from raw bytes."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from embark.features.arrow.cells import as_text
from embark.features.arrow.row_parser import json_array
from embark.features.schema import Schema
from embark.values import frozen
from .request_rows import TensorColumns

DTYPES = {"BOOL": "u1", **{f"{kind}{bits}": f"<{letter}{bits // 8}" for kind, letter, sizes in (
    ("INT", "i", (8, 16, 32, 64)), ("UINT", "u", (8, 16, 32, 64)), ("FP", "f", (16, 32, 64))) for bits in sizes}}
"""numpy's name of every datatype with values of one size."""
BYTES = "BYTES"
_MAX_EMPTY_ROWS = 1 << 16  # Limit for a tensor whose shape says rows and no values: its data do not bound them.


@frozen
class Tensor:
    """An input tensor of a request."""

    name: str
    shape: tuple[int, ...]
    values: Any  # A list of JSON values, or an array, Arrow's or numpy's; as many as the shape says.


def read_tensor(name: Any, datatype: Any, shape: Any, data: Any) -> Tensor:
    """Read a tensor. `data` is a JSON array, flat or of rows; raw little-endian bytes; or a sequence of values of the
    datatype."""
    if not isinstance(name, str):
        raise ValueError("every input has a name of its own")
    if not isinstance(shape, Sequence) or len(shape) not in (1, 2) or not all(
            type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise ValueError(f"input {name!r}: its shape is not [rows] or [rows, values]")
    if datatype is None and isinstance(data, list):
        datatype = BYTES  # JSON values are read by themselves
    if not isinstance(datatype, str) or datatype not in (BYTES, *DTYPES):
        raise ValueError(f"input {name!r}: its datatype is {str(datatype)[:40]!r}, and none of {BYTES}, "
                         f"{', '.join(DTYPES)}")
    if isinstance(data, bytes | memoryview):
        data = _of_bytes(name, datatype, data, math.prod(shape))
    elif isinstance(data, list) and len(shape) == 2 and len(data) == shape[0] and \
            all(isinstance(one, list) for one in data):
        data = [value for one in data for value in one]
    if isinstance(data, list) and "INT" in datatype:
        limits = np.iinfo(DTYPES[datatype])
        for value in (value for one in data for value in (one if isinstance(one, list) else [one])):
            if value is not None and not (isinstance(value, int) and limits.min <= value <= limits.max):
                raise ValueError(f"input {name!r}: {str(value)[:40]} is no {datatype}")
    if len(data) != math.prod(shape):
        raise ValueError(f"input {name!r}: {len(data)} values for the shape {list(shape)}")
    if not len(data) and shape[0] > _MAX_EMPTY_ROWS:
        raise ValueError(f"input {name!r}: {shape[0]:,} rows without values")
    return Tensor(name, tuple(shape), data)


def tensor_columns(tensors: Sequence[Tensor], schema: Schema) -> TensorColumns:
    """Return the tensors of a request as columns. Columns of one value may come as [rows, 1] too, and a tensor of one
    row belongs to all rows."""
    lists = {column.source for column in schema.read if column.is_list and not column.is_words}
    columns = {tensor.name: _column(tensor, tensor.name in lists) for tensor in tensors}
    if len(columns) != len(tensors):
        raise ValueError("every input has a name of its own")
    return TensorColumns.of({tensor.name: tensor.shape[0] for tensor in tensors}, columns)


def _column(tensor: Tensor, is_list: bool) -> Any:
    values, num_rows, width = tensor.values, tensor.shape[0], tensor.shape[1] if len(tensor.shape) == 2 else 1
    is_one = len(tensor.shape) == 1 or (width == 1 and not is_list)
    if isinstance(values, list):
        return json_array(values if is_one else [values[i * width : (i + 1) * width] for i in range(num_rows)])
    return values if is_one else pa.ListArray.from_arrays(np.arange(num_rows + 1, dtype=np.int32) * width, values)


def _of_bytes(name: str, datatype: str, data: bytes | memoryview, num_values: int) -> Any:
    if datatype == BYTES:
        texts = pa.array(_texts(name, bytes(data), num_values), pa.binary())
        try:
            as_text(texts).validate(full=True)
        except pa.ArrowInvalid:
            raise ValueError(f"input {name!r}: has text that is not UTF-8") from None
        return texts
    dtype = np.dtype(DTYPES[datatype])
    if len(data) != num_values * dtype.itemsize:
        raise ValueError(f"input {name!r}: {len(data)} bytes for {num_values} values of {datatype}")
    values = np.frombuffer(data, dtype)
    return values.astype(np.float32) if dtype == np.float16 else values


def _texts(name: str, data: bytes, num_values: int) -> list[bytes]:
    """Split bytes into texts; each has its length before it, in four bytes."""
    found: list[bytes] = []
    at = 0
    while at + 4 <= len(data) and len(found) < num_values:
        size, = struct.unpack_from("<I", data, at)
        at += 4 + size
        found.append(data[at - size : at])
    if at != len(data) or len(found) != num_values:
        raise ValueError(f"input {name!r}: its bytes are not {num_values} texts, each after its length in four bytes")
    return found

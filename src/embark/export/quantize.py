"""Table rows in fewer bits: each row has a scale and an offset of its own, which lie behind its values.

These are the fused rows that FBGEMM and torch's quantized lookups read: `int8` has D bytes, then scale and offset as
float32; `int4` has two values a byte, the first in the low bits, then scale and offset as float16.
"""

from typing import Any, Literal, get_args

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Array, Bytes, Floats

TableDtype = Literal["fp32", "fp16", "int8", "int4"]
TABLE_DTYPES: tuple[TableDtype, ...] = get_args(TableDtype)
_SMALLEST = np.float32(np.finfo(np.float16).smallest_subnormal)


def row_format(dtype: TableDtype, dim: int) -> tuple[np.dtype[Any], int]:
    """Return the element type of a stored row and the number of elements."""
    if dtype == "int8":
        return np.dtype("u1"), dim + 8
    if dtype == "int4":
        return np.dtype("u1"), (dim + 1) // 2 + 4
    return np.dtype("<f4" if dtype == "fp32" else "<f2"), dim


def quantize_rows(rows: Floats, dtype: TableDtype) -> Array:
    """Return rows of shape [n, D] in their stored form."""
    if not np.isfinite(rows).all():
        raise DataError("has values that are not finite", "export another checkpoint with --step")
    if dtype in ("fp32", "fp16"):
        if dtype == "fp16" and np.abs(rows).max(initial=0) > np.finfo(np.float16).max:
            raise DataError("has values that fp16 cannot hold", "--tables fp32 or int8")
        return rows.astype(row_format(dtype, rows.shape[1])[0])
    levels = 255 if dtype == "int8" else 15
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    if dtype == "int8":
        scale = (high - low) / np.float32(levels)
        scale[scale == 0] = 1
        return np.hstack([_levels(rows, low, scale, levels), *(_bytes(part) for part in (scale, low))])
    if max(np.abs(low).max(initial=0), np.abs(high).max(initial=0)) > np.finfo(np.float16).max:
        raise DataError("has values that int4 rows, whose offsets are fp16, cannot hold", "--tables fp32 or int8")
    low = low.astype(np.float16).astype(np.float32)
    scale = np.maximum((high - low) / np.float32(levels), _SMALLEST).astype(np.float16)
    values = _levels(rows, low, scale.astype(np.float32), levels)
    if values.shape[1] % 2:
        values = np.pad(values, ((0, 0), (0, 1)))
    packed = values[:, ::2] | values[:, 1::2] << 4
    return np.hstack([packed, *(_bytes(part) for part in (scale, low.astype(np.float16)))])


def _levels(rows: Array, low: Array, scale: Array, levels: int) -> Bytes:
    nearest: Bytes = np.clip(np.rint((rows - low) / scale), 0, levels).astype(np.uint8)
    return nearest


def _bytes(column: Array) -> Bytes:
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), -1)

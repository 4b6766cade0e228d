"""Quantized rows are torch's own format, and as near to the values as their bits allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from embark.errors import DataError
from embark.export.quantize import TABLE_DTYPES, quantize_rows, row_format

ROWS = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9),
              elements=st.floats(-1000, 1000, width=32, allow_subnormal=False))


def unpacked(packed: np.ndarray, dtype: str, dim: int) -> np.ndarray:
    """By torch."""
    if dtype in ("fp32", "fp16"):
        return packed.astype(np.float32)
    unpack = torch.ops.quantized.embedding_bag_byte_unpack if dtype == "int8" else \
        torch.ops.quantized.embedding_bag_4bit_unpack
    return unpack(torch.from_numpy(packed)).numpy()[:, :dim]


@pytest.mark.parametrize("dtype", TABLE_DTYPES)
@settings(max_examples=40)
@given(rows=ROWS)
def test_values_are_within_the_rounding_of_their_bits(dtype, rows):
    packed = quantize_rows(rows, dtype)
    assert (packed.dtype, packed.shape[1]) == row_format(dtype, rows.shape[1])
    span = rows.max(axis=1) - rows.min(axis=1)
    size = np.abs(rows).max(axis=1)
    half_a_step = {"fp32": 0 * span, "fp16": size * 2**-11 + 2**-25, "int8": span / 255 / 2 + size * 2**-22,
                   "int4": span / 15 / 2 * (1 + 2**-10) + size * 2**-9 + 2**-23}[dtype]
    assert (np.abs(unpacked(packed, dtype, rows.shape[1]) - rows).max(axis=1) <= half_a_step + 1e-7 * size).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_row_of_one_value_is_exact_where_its_offset_is(dtype):
    rows = np.full((3, 5), 0.5, np.float32)
    assert np.array_equal(unpacked(quantize_rows(rows, dtype), dtype, 5), rows)


@pytest.mark.parametrize(("dtype", "value"), [("fp32", np.nan), ("int8", np.inf), ("fp16", 1e6), ("int4", -1e6)])
def test_what_the_bits_cannot_hold_is_refused(dtype, value):
    with pytest.raises(DataError):
        quantize_rows(np.array([[1, value]], np.float32), dtype)

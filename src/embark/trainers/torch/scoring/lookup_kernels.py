"""The Triton kernel that looks up and pools the rows of all tables at once, out of rows as an artifact holds them.

A row of int8 or int4 is turned into numbers in registers, with the scale and the offset that lie behind its values.
"""

import triton
import triton.language as tl
from torch import Tensor

from embark.export.quantize import TableDtype

FIELDS = tl.constexpr(8)  # Numbers that describe a table; see `tables.GpuTables`.
FP32 = tl.constexpr(0)
FP16 = tl.constexpr(1)
INT8 = tl.constexpr(2)
INT4 = tl.constexpr(3)
_KINDS = {"fp32": FP32, "fp16": FP16, "int8": INT8, "int4": INT4}
_ELEMENTS_AT_A_TIME = 1024


def look_up(ids: Tensor, tables: Tensor, out: Tensor, *, dtype: TableDtype, max_dim: int) -> None:
    """Pool the rows of each sample and table into the table's columns of `out`.

    An id of -1 is none. One that the table does not have makes the sample's vector NaN, so that no score comes of it.
    """
    num_samples, dim = out.shape[0], triton.next_power_of_2(max_dim)
    block = max(1, min(8, _ELEMENTS_AT_A_TIME // dim))
    _look_up[(triton.cdiv(num_samples, block), tables.shape[0])](
        ids, tables, out, num_samples, out.stride(0), KIND=_KINDS[dtype].value, BLOCK=block, DIM=dim,
        num_warps=1 if dim <= 64 else 2,
    )


@triton.jit
def _look_up(
    ids, tables, out, num_samples, out_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr
):
    about = tables + tl.program_id(1) * FIELDS
    address = tl.load(about)
    num_rows = tl.load(about + 1)
    row_bytes = tl.load(about + 2)
    dim = tl.load(about + 3)
    column = tl.load(about + 4)
    first_id = tl.load(about + 5) * num_samples
    num_ids = tl.load(about + 6).to(tl.int32)
    is_mean = tl.load(about + 7)
    samples = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_sample = samples < num_samples
    columns = tl.arange(0, DIM)
    is_column = columns < dim
    total = tl.zeros([BLOCK, DIM], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for i in range(num_ids):
        row = tl.load(ids + first_id + samples * num_ids + i, mask=is_sample, other=-1).to(tl.int64)
        is_id = row >= 0
        is_row = is_id & (row < num_rows)
        values = _row(address, row * row_bytes, dim, columns, is_row, is_column, KIND)
        total += tl.where((is_id & (row >= num_rows))[:, None], float("nan"), values)
        count += is_id.to(tl.float32)
    if is_mean != 0:
        total = total / tl.maximum(count, 1.0)[:, None]
    to = out + samples[:, None] * out_stride + column + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_sample[:, None] & is_column[None, :])


@triton.jit
def _row(address, start, dim, columns, is_row, is_column, KIND: tl.constexpr):
    """Read the values of the rows that begin at these bytes, [BLOCK, DIM]; zeros where there is none."""
    mask = is_row[:, None] & is_column[None, :]
    if KIND == FP32:
        at = (address + start).to(tl.pointer_type(tl.float32))
        return tl.load(at[:, None] + columns[None, :], mask=mask, other=0.0)
    elif KIND == FP16:
        at = (address + start).to(tl.pointer_type(tl.float16))
        return tl.load(at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        at = (address + start).to(tl.pointer_type(tl.uint8))
        if KIND == INT8:
            levels = tl.load(at[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
            scale = _bytes(at + dim, is_row, 4).to(tl.float32, bitcast=True)
            low = _bytes(at + dim + 4, is_row, 4).to(tl.float32, bitcast=True)
        else:
            packed = tl.load(at[:, None] + (columns // 2)[None, :], mask=mask, other=0)
            levels = ((packed >> ((columns % 2) * 4).to(tl.uint8)[None, :]) & 15).to(tl.float32)
            behind = at + (dim + 1) // 2
            scale = _bytes(behind, is_row, 2).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            low = _bytes(behind + 2, is_row, 2).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.where(mask, levels * scale[:, None] + low[:, None], 0.0)


@triton.jit
def _bytes(at, is_row, NUM: tl.constexpr):
    """Read a little-endian number, [BLOCK], byte by byte, since rows of an odd width are not aligned."""
    found = tl.load(at, mask=is_row, other=0).to(tl.uint32)
    for i in tl.static_range(1, NUM):
        found = found | (tl.load(at + i, mask=is_row, other=0).to(tl.uint32) << (8 * i))
    return found

"""The Triton kernel that gives new rows of dynamic tables their first values, in FBGEMM's storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from embark.features import hashing
from embark.trainers.torch.dynamic.batch_ids import NewRows
from embark.trainers.torch.dynamic.map_kernels import ROWS_AT_A_TIME, block_size, mixed

if TYPE_CHECKING:
    from embark.trainers.torch.dynamic.id_map import IdMap
    from embark.trainers.torch.dynamic.rows import RowShard

_STEP = tl.constexpr(hashing.STEP)
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_FIELDS = tl.constexpr(10)  # Numbers that describe a shard of rows; see `about_shards`.


def about_shards(ids: IdMap, shards: list[RowShard]) -> Tensor:
    """What `reset` reads of shards: [shards, fields]."""
    about = []
    for shard in shards:
        states = [*((one.data_ptr(), one.shape[1] if one.dim() > 1 else 1) for one in shard.states), (0, 0), (0, 0)]
        about.append([shard.table, ids.first_slots[shard.table] - 1 + shard.first_row, len(shard.weights),
                      shard.first_column, shard.weights.shape[1], shard.weights.data_ptr(), *states[0], *states[1]])
    return torch.tensor(about, device=ids.device)


def reset(ids: IdMap, new: NewRows, shards: list[RowShard], about: Tensor) -> None:
    """Give new rows the first values of their ids, and their optimizer's state none."""
    width = len(new.slots) // len(ids.tables)
    block = block_size(new.slots, width, ROWS_AT_A_TIME)
    _reset[(triton.cdiv(width, block), len(shards))](
        new.slots, new.hashes, about, ids.value_keys, ids.bounds, width, BLOCK=block,
        DTYPE=_DTYPES[shards[0].weights.dtype], num_warps=1, enable_fp_fusion=False,
        DIM=triton.next_power_of_2(max(shard.weights.shape[1] for shard in shards)))


@triton.jit
def _reset(
    slots, new_hashes, about, value_keys, bounds, width, DTYPE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr
):
    about += tl.program_id(1) * _FIELDS
    table = tl.load(about)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = table * width + place
    slot = tl.load(slots + at, mask=place < width, other=-1)
    row = slot - tl.load(about + 1)
    is_mine = (slot >= 0) & (row >= 0) & (row < tl.load(about + 2))
    if tl.max(is_mine.to(tl.int32), axis=0) > 0:
        columns, dim = tl.arange(0, DIM).to(tl.int64), tl.load(about + 4)
        mask = is_mine[:, None] & (columns < dim)[None, :]
        bits = tl.load(new_hashes + at, mask=is_mine, other=0).to(tl.uint64)
        of_column = (columns + tl.load(about + 3)).to(tl.uint64) * _STEP
        bits = mixed((bits[:, None] + of_column[None, :]).to(tl.int64), tl.load(value_keys + table))
        value = (((bits >> 40) & 0xFFFFFF).to(tl.float32) * 1.1920928955078125e-07 - 1.0) * tl.load(bounds + table)
        element = row[:, None] * dim + columns[None, :]
        tl.store(tl.load(about + 5).to(tl.pointer_type(DTYPE)) + element, value.to(DTYPE), mask=mask)
        _clear(about + 6, row, columns, is_mine)
        _clear(about + 8, row, columns, is_mine)


@triton.jit
def _clear(about, row, columns, is_mine):
    """Of one state of the optimizer; its width is 0 where there is none."""
    width = tl.load(about + 1)
    if width > 0:
        state = tl.load(about).to(tl.pointer_type(tl.float32))
        mask = is_mine[:, None] & (columns < width)[None, :]
        element = row[:, None] * width + columns[None, :]
        tl.store(state + element, tl.zeros_like(element).to(tl.float32), mask=mask)

"""Triton kernels of the map: what `torch_ops` computes, with shapes that follow from the layout alone, so that a CUDA
graph can hold them. Nothing depends on the order in which programs run: those that write what others read are launches
of their own, and what several add to are integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from embark.data import dynamic_ids, hashing
from embark.spec.dynamic import BUCKET_SLOTS
from embark.trainers.torch.dynamic import batch_ids
from embark.trainers.torch.dynamic.batch_ids import Found, IdLayout, NewRows

if TYPE_CHECKING:
    from embark.trainers.torch.dynamic.id_map import IdMap
    from embark.trainers.torch.dynamic.rows import RowShard

_STEP, _FIRST, _SECOND = tl.constexpr(hashing.STEP), tl.constexpr(hashing.FIRST), tl.constexpr(hashing.SECOND)
_SLOTS, _HALF = tl.constexpr(BUCKET_SLOTS), tl.constexpr(2**31)
_FREE, _NO_SLOT, _NO_ID = tl.constexpr(dynamic_ids.FREE), tl.constexpr(batch_ids.NO_SLOT), tl.constexpr(batch_ids.NO_ID)
_LRU, _LFU, _AGE = tl.constexpr(batch_ids.LRU), tl.constexpr(batch_ids.LFU), tl.constexpr(batch_ids.AGE)
_NEVER = tl.constexpr(batch_ids.NEVER)
_LOOKUPS, _HITS = tl.constexpr(batch_ids.LOOKUPS), tl.constexpr(batch_ids.HITS)
_DEFAULTS, _ADMISSIONS = tl.constexpr(batch_ids.DEFAULTS), tl.constexpr(batch_ids.ADMISSIONS)
_EVICTIONS, _NUM_STATISTICS = tl.constexpr(batch_ids.EVICTIONS), tl.constexpr(len(batch_ids.STATISTICS))
_FIELDS = tl.constexpr(10)  # Numbers that describe a shard of rows; see `about_shards`.
_IDS_AT_A_TIME, _ROWS_AT_A_TIME = 64, 8


def find(ids: IdMap, raw: Tensor, layout: IdLayout, step: Tensor | None) -> Found:
    """Which slot each id has; with a step, those are touched. Ids of 32 bits are none where they are −1."""
    hashes = torch.empty(raw.shape, dtype=torch.int64, device=raw.device)
    slots, is_missing = torch.empty_like(hashes), torch.empty(raw.shape, dtype=torch.int32, device=raw.device)
    block = _block(raw, layout.longest, _IDS_AT_A_TIME)
    _find[(triton.cdiv(layout.longest, block), len(ids.tables))](
        raw, layout.starts, hashes, slots, is_missing, ids.keys, ids.num_buckets, ids.first_bucket, ids.hashes,
        ids.seen, ids.counts, ids.policies, ids.statistics, step,
        NONE=-1 if raw.dtype == torch.int32 else dynamic_ids.NO_ID, HAS_COUNTS=ids.has_counts, BLOCK=block)
    return Found(hashes, slots, is_missing)


def candidates(ids: IdMap, found: Found, layout: IdLayout) -> tuple[Tensor, Tensor]:
    """[tables, most of any] the hashes of ids without a slot, as they come, and how many of each table."""
    number = found.is_missing.cumsum(0, dtype=torch.int32)
    until = torch.where(layout.starts > 0, number[(layout.starts - 1).clamp(min=0)], 0)
    nums = torch.minimum(until.diff(), ids.max_new)
    width = max(1, min(ids.most_new, layout.longest))
    taken = torch.full((len(ids.tables), width), 2**63 - 1, dtype=torch.int64, device=ids.device)
    block = _block(number, layout.longest, 1024)
    _take[(triton.cdiv(layout.longest, block), len(ids.tables))](
        found.hashes, found.is_missing, number, layout.starts, until, ids.max_new, taken, width, BLOCK=block)
    return taken, nums


def choose(
    ids: IdMap, buckets: Tensor, tables: Tensor, number: Tensor, is_admitted: Tensor, step: Tensor
) -> Tensor:
    """The slot of each admitted one: the `number`-th that its bucket can spare; −1 where it has no more."""
    found = torch.empty_like(buckets)
    block = _block(buckets, len(buckets), _ROWS_AT_A_TIME)
    _choose[(triton.cdiv(len(buckets), block),)](
        buckets, tables, number, is_admitted, ids.seen, ids.counts, ids.policies, step, found, len(buckets),
        BLOCK=block, num_warps=1)
    return found


def place(ids: IdMap, new: NewRows, occurrences: Tensor, counters: Tensor | None, step: Tensor) -> None:
    """Give the slots to their new ids."""
    width = len(new.slots) // len(ids.tables)
    block = _block(new.slots, width, 256)
    _place[(triton.cdiv(width, block), len(ids.tables))](
        new.slots, new.hashes, occurrences, counters, ids.hashes, ids.seen, ids.counts, ids.counters, ids.policies,
        ids.statistics, step, width, BLOCK=block)


def rows(ids: IdMap, found: Found, layout: IdLayout, *, is_counting: bool) -> Tensor:
    """Of all ids, those without a slot looked up again: 0 where there is none, −1 where there is no id."""
    out = torch.empty(found.slots.shape, dtype=torch.int32, device=found.slots.device)
    block = _block(out, layout.longest, _IDS_AT_A_TIME)
    _rows[(triton.cdiv(layout.longest, block), len(ids.tables))](
        found.hashes, found.slots, layout.starts, out, ids.num_buckets, ids.first_bucket, ids.hashes, ids.seen,
        ids.statistics, IS_COUNTING=is_counting, BLOCK=block)
    return out


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
    block = _block(new.slots, width, _ROWS_AT_A_TIME)
    _reset[(triton.cdiv(width, block), len(shards))](
        new.slots, new.hashes, about, ids.value_keys, ids.bounds, width, BLOCK=block,
        IS_HALF=shards[0].weights.dtype == torch.float16, num_warps=1, enable_fp_fusion=False,
        DIM=triton.next_power_of_2(max(shard.weights.shape[1] for shard in shards)))


def _block(like: Tensor, size: int, on_gpu: int) -> int:
    """One program for all where they are interpreted, one after the other."""
    return on_gpu if like.is_cuda else triton.next_power_of_2(max(1, size))


@triton.jit
def _find(
    raw, starts, hashes, slots, is_missing, keys, num_buckets, first_bucket, map_hashes, seen, counts, policies,
    statistics, step, NONE: tl.constexpr, HAS_COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):
    table = tl.program_id(1)
    start, end = tl.load(starts + table), tl.load(starts + table + 1)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    if first < end:
        at = first + tl.arange(0, BLOCK)
        is_here = at < end
        one = tl.load(raw + at, mask=is_here, other=NONE).to(tl.int64)
        is_id = is_here & (one != NONE)
        bits = _mixed(one, tl.load(keys + table))
        slot = _probe(bits, is_id, tl.load(num_buckets + table), tl.load(first_bucket + table), map_hashes, seen)
        is_hit = slot >= 0
        tl.store(hashes + at, bits, mask=is_here)
        tl.store(slots + at, tl.where(is_id, slot, _NO_ID), mask=is_here)
        tl.store(is_missing + at, (is_id & (slot < 0)).to(tl.int32), mask=is_here)
        if step is not None:
            now = tl.load(step).to(tl.int32)
            tl.store(seen + slot, tl.zeros([BLOCK], tl.int32) + now, mask=is_hit)
            if HAS_COUNTS:  # noqa: SIM102
                if tl.load(policies + table) == _LFU:
                    tl.atomic_add(counts + slot, tl.zeros([BLOCK], tl.int32) + 1, mask=is_hit)
            total = statistics + table * _NUM_STATISTICS
            tl.atomic_add(total + _LOOKUPS, tl.sum(is_id.to(tl.int64), axis=0))
            tl.atomic_add(total + _HITS, tl.sum(is_hit.to(tl.int64), axis=0))


@triton.jit
def _take(hashes, is_missing, number, starts, until, max_new, taken, width, BLOCK: tl.constexpr):
    table = tl.program_id(1)
    start, end = tl.load(starts + table), tl.load(starts + table + 1)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    if first < end:
        at = first + tl.arange(0, BLOCK)
        is_candidate = tl.load(is_missing + at, mask=at < end, other=0) > 0
        to = (tl.load(number + at, mask=is_candidate, other=0) - 1 - tl.load(until + table)).to(tl.int64)
        is_candidate = is_candidate & (to < tl.load(max_new + table))
        bits = tl.load(hashes + at, mask=is_candidate, other=0)
        tl.store(taken + table.to(tl.int64) * width + to, bits, mask=is_candidate)


@triton.jit
def _choose(
    buckets, tables, number, is_admitted, seen, counts, policies, step, found, num, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < num
    is_wanted = tl.load(is_admitted + at, mask=is_here, other=0) != 0
    chosen = tl.zeros([BLOCK], tl.int64) + _NO_SLOT
    if tl.max(is_wanted.to(tl.int32), axis=0) > 0:
        bucket = tl.load(buckets + at, mask=is_wanted, other=0)
        wanted = tl.load(number + at, mask=is_wanted, other=0).to(tl.int32)
        policy = tl.load(policies + tl.load(tables + at, mask=is_wanted, other=0), mask=is_wanted, other=0)[:, None]
        ways = tl.arange(0, _SLOTS)[None, :]
        slot = bucket[:, None] * _SLOTS + ways
        last = tl.load(seen + slot, mask=is_wanted[:, None], other=0).to(tl.int64)
        count = tl.load(counts + slot, mask=is_wanted[:, None], other=0).to(tl.int64)
        score = tl.where(policy == _LRU, last, tl.where(policy == _LFU, (count << 32) + last, count))
        score = tl.where(last == _FREE, -1, tl.where(last == tl.load(step), _NEVER, score))
        most = tl.minimum(tl.max(tl.where(is_wanted, wanted, 0), axis=0), _SLOTS - 1)
        for taken in range(most + 1):
            least = tl.min(score, axis=1)
            which = tl.min(tl.where(score == least[:, None], ways, _SLOTS), axis=1)
            is_mine = is_wanted & (wanted == taken) & (least < _NEVER)
            chosen = tl.where(is_mine, bucket * _SLOTS + which, chosen)
            score = tl.where(ways == which[:, None], _NEVER, score)
    tl.store(found + at, chosen, mask=is_here)


@triton.jit
def _place(
    slots, new_hashes, occurrences, own_counters, map_hashes, seen, counts, counters, policies, statistics, step, width,
    BLOCK: tl.constexpr,
):
    table = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = table.to(tl.int64) * width + place
    slot = tl.load(slots + at, mask=place < width, other=-1)
    is_placed = slot >= 0
    num = tl.sum(is_placed.to(tl.int64), axis=0)
    if num > 0:
        now, policy = tl.load(step).to(tl.int32), tl.load(policies + table)
        is_other = is_placed & (tl.load(seen + slot, mask=is_placed, other=0) != _FREE)
        tl.store(map_hashes + slot, tl.load(new_hashes + at, mask=is_placed, other=0), mask=is_placed)
        tl.store(seen + slot, tl.zeros([BLOCK], tl.int32) + now, mask=is_placed)
        count = tl.load(occurrences + at, mask=is_placed, other=0)
        count = tl.where(policy == _LFU, count, tl.where(policy == _AGE, now, 0))
        tl.store(counts + slot, count, mask=is_placed)
        if own_counters is not None:
            own = tl.load(own_counters + at, mask=is_placed, other=-1)
            tl.store(counters + own, tl.zeros([BLOCK], tl.int32), mask=is_placed & (own >= 0))
        total = statistics + table * _NUM_STATISTICS
        tl.atomic_add(total + _ADMISSIONS, num)
        tl.atomic_add(total + _EVICTIONS, tl.sum(is_other.to(tl.int64), axis=0))


@triton.jit
def _rows(
    hashes, slots, starts, out, num_buckets, first_bucket, map_hashes, seen, statistics, IS_COUNTING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    table = tl.program_id(1)
    start, end = tl.load(starts + table), tl.load(starts + table + 1)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    if first < end:
        at = first + tl.arange(0, BLOCK)
        is_here = at < end
        slot = tl.load(slots + at, mask=is_here, other=_NO_ID)
        is_missing = slot == _NO_SLOT
        base = tl.load(first_bucket + table)
        if tl.max(is_missing.to(tl.int32), axis=0) > 0:
            bits = tl.load(hashes + at, mask=is_missing, other=0)
            again = _probe(bits, is_missing, tl.load(num_buckets + table), base, map_hashes, seen)
            slot = tl.where(is_missing, again, slot)
            if IS_COUNTING:
                num = tl.sum((slot == _NO_SLOT).to(tl.int64), axis=0)
                tl.atomic_add(statistics + table * _NUM_STATISTICS + _DEFAULTS, num)
        row = tl.where(slot >= 0, slot - base * _SLOTS + 1, tl.where(slot == _NO_ID, -1, 0))
        tl.store(out + at, row.to(tl.int32), mask=is_here)


@triton.jit
def _reset(
    slots, new_hashes, about, value_keys, bounds, width, IS_HALF: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr
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
        bits = _mixed((bits[:, None] + of_column[None, :]).to(tl.int64), tl.load(value_keys + table))
        value = (((bits >> 40) & 0xFFFFFF).to(tl.float32) * 1.1920928955078125e-07 - 1.0) * tl.load(bounds + table)
        element = row[:, None] * dim + columns[None, :]
        if IS_HALF:
            tl.store(tl.load(about + 5).to(tl.pointer_type(tl.float16)) + element, value.to(tl.float16), mask=mask)
        else:
            tl.store(tl.load(about + 5).to(tl.pointer_type(tl.float32)) + element, value, mask=mask)
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


@triton.jit
def _mixed(numbers, key):
    bits = numbers.to(tl.uint64) ^ key.to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    return (bits ^ (bits >> 31)).to(tl.int64)


@triton.jit
def _probe(bits, is_wanted, num_buckets, first_bucket, map_hashes, seen):
    bucket = ((((bits >> 32) + _HALF) * num_buckets) >> 32) + first_bucket
    ways = tl.arange(0, _SLOTS)
    there = tl.load(map_hashes + bucket[:, None] * _SLOTS + ways[None, :], mask=is_wanted[:, None], other=0)
    is_same = (there == bits[:, None]) & is_wanted[:, None]
    which = tl.min(tl.where(is_same, ways[None, :], _SLOTS), axis=1)
    slot = bucket * _SLOTS + which
    is_there = which < _SLOTS
    is_there = is_there & (tl.load(seen + slot, mask=is_there, other=_FREE) != _FREE)
    return tl.where(is_there, slot, _NO_SLOT)

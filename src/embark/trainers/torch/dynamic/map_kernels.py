"""Triton kernels of the map: what `torch_ops` computes, with shapes that follow from the layout alone, so that a CUDA
graph can hold them. Nothing depends on the order in which programs run: those that write what others read are launches
of their own, and what several add to are integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from embark.data import dynamic_ids
from embark.features import hashing
from embark.spec.model import BUCKET_COUNTERS, BUCKET_SLOTS
from . import batch_ids, torch_ops
from .batch_ids import Candidates, IdLayout, IdSlots, NewRows, RankedIds

if TYPE_CHECKING:
    from .id_map import IdMap
    from .tables import RowShard

_STEP, _FIRST, _SECOND = tl.constexpr(hashing.STEP), tl.constexpr(hashing.FIRST), tl.constexpr(hashing.SECOND)
_SLOTS, _COUNTERS, _HALF = tl.constexpr(BUCKET_SLOTS), tl.constexpr(BUCKET_COUNTERS), tl.constexpr(2**31)
_FREE, _NO_SLOT, _NO_ID = tl.constexpr(dynamic_ids.FREE), tl.constexpr(batch_ids.NO_SLOT), tl.constexpr(batch_ids.NO_ID)
_LRU, _LFU, _AGE = tl.constexpr(batch_ids.LRU), tl.constexpr(batch_ids.LFU), tl.constexpr(batch_ids.AGE)
_NEVER = tl.constexpr(batch_ids.NEVER)
_LOOKUPS, _HITS = tl.constexpr(batch_ids.LOOKUPS), tl.constexpr(batch_ids.HITS)
_DEFAULTS, _ADMISSIONS = tl.constexpr(batch_ids.DEFAULTS), tl.constexpr(batch_ids.ADMISSIONS)
_EVICTIONS, _NUM_STATISTICS = tl.constexpr(batch_ids.EVICTIONS), tl.constexpr(len(batch_ids.STATISTICS))
IDS_AT_A_TIME, FIND_WARPS, ROWS_AT_A_TIME = 64, 2, 8
MAX_WIDTH = 8192  # Candidates of a table that one program ranks.


def halve(values: Tensor, ends: Tensor, half_lives: Tensor, step: Tensor, most: int) -> None:
    """Halve the values of tables whose half-life has passed; a table has at most `most`."""
    block = block_size(values, most, 4096)
    _halve[(triton.cdiv(most, block), len(half_lives))](values, ends, half_lives, step, BLOCK=block)


def find(ids: IdMap, raw: Tensor, layout: IdLayout, step: Tensor | None) -> IdSlots:
    """Return the slot of each id; with a step, the slots are touched. Ids of 32 bits are none where they are −1."""
    hashes = torch.empty(raw.shape, dtype=torch.int64, device=raw.device)
    slots, is_missing = torch.empty_like(hashes), torch.empty(raw.shape, dtype=torch.int32, device=raw.device)
    block = block_size(raw, layout.longest, IDS_AT_A_TIME)
    _find[(triton.cdiv(layout.longest, block), len(ids.tables))](
        raw, layout.starts, hashes, slots, is_missing, ids.keys, ids.num_buckets, ids.first_bucket, ids.own_first,
        ids.own_end, ids.tags, ids.hashes, ids.seen, ids.counts, ids.policies, ids.statistics, step,
        NONE=-1 if raw.dtype == torch.int32 else dynamic_ids.NO_ID, HAS_COUNTS=ids.has_counts, BLOCK=block,
        num_warps=FIND_WARPS)
    return IdSlots(hashes, slots, is_missing)


def candidates(ids: IdMap, found: IdSlots, layout: IdLayout) -> Candidates:
    """Return the ids without a slot that a step considers."""
    before = found.is_missing.cumsum(0, dtype=torch.int32)
    until = torch.where(layout.starts > 0, before[(layout.starts - 1).clamp(min=0)], 0)
    missing = until.diff()
    ids.statistics[:, batch_ids.LOOKUPS] += layout.sizes  # what is no id was taken off before
    ids.statistics[:, batch_ids.HITS] += layout.sizes - missing
    width = max(1, min(ids.most_new, layout.longest))
    taken = torch.full((len(ids.tables), width), batch_ids.LAST_HASH, dtype=torch.int64, device=ids.device)
    places = torch.empty_like(taken)
    block = block_size(before, layout.longest, 1024)
    _take[(triton.cdiv(layout.longest, block), len(ids.tables))](
        found.hashes, found.is_missing, before, layout.starts, until, ids.max_new, taken, places, width, BLOCK=block)
    return Candidates(taken, torch.minimum(missing, ids.max_new), places, before, until)


def rank(ids: IdMap, hashes: Tensor, nums: Tensor, step: Tensor) -> RankedIds:
    """Return which candidates are admitted, in which order, and how often each occurs; `hashes` are sorted."""
    num_tables, width = hashes.shape
    if width > MAX_WIDTH:
        return torch_ops.rank(ids, hashes, nums, step)
    is_admitted, number, occurrences = (torch.empty(hashes.numel(), dtype=torch.int32, device=ids.device)
                                        for _ in range(3))
    counters = torch.empty(hashes.numel(), dtype=torch.int64, device=ids.device) if ids.has_counters else None
    block = triton.next_power_of_2(width)
    _distinct[(num_tables,)](
        hashes, nums, is_admitted, occurrences, counters, ids.counters, ids.chance_keys, ids.chances, ids.counter_keys,
        ids.num_buckets, ids.first_counter, ids.counts_needed, step, width, BLOCK=block, num_warps=16)
    _rank[(num_tables,)](
        hashes, is_admitted, number, counters, ids.counters, ids.counts_needed, ids.num_buckets, width, BLOCK=block,
        num_warps=16)
    return RankedIds(is_admitted, number, occurrences, counters)


def choose(ids: IdMap, hashes: Tensor, ranked: RankedIds, step: Tensor) -> Tensor:
    """Return the slot of each admitted id: the `number`-th that its bucket can spare, or −1 if there are no more."""
    found = torch.empty_like(hashes.view(-1))
    width = hashes.shape[1]
    block = block_size(found, width, ROWS_AT_A_TIME)
    _choose[(triton.cdiv(width, block), len(ids.tables))](
        hashes, ranked.number, ranked.is_admitted, ids.num_buckets, ids.first_bucket, ids.seen, ids.counts,
        ids.policies, step, found, width, BLOCK=block, num_warps=1)
    return found


def place(ids: IdMap, new: NewRows, ranked: RankedIds, step: Tensor) -> None:
    """Give the slots to their new ids."""
    width = len(new.slots) // len(ids.tables)
    block = block_size(new.slots, width, 256)
    _place[(triton.cdiv(width, block), len(ids.tables))](
        new.slots, new.hashes, ranked.occurrences, ranked.counters, ids.hashes, ids.tags, ids.seen, ids.counts,
        ids.counters, ids.policies, ids.statistics, step, width, BLOCK=block)


def rows(ids: IdMap, found: IdSlots, layout: IdLayout, candidates: Candidates | None) -> Tensor:
    """Return the row of every id: 0 if it has none, −1 where there is no id.

    After a step, which has candidates, ids without a slot are looked up again and counted: the candidates by
    themselves, for they are few.
    """
    out = torch.empty(found.slots.shape, dtype=torch.int32, device=found.slots.device)
    many = candidates or Candidates(out, out, out)
    block = block_size(out, layout.longest, 1024)
    _rows[(triton.cdiv(layout.longest, block), len(ids.tables))](
        found.hashes, found.slots, layout.starts, out, many.before, many.until, many.nums, ids.num_buckets,
        ids.first_bucket, ids.tags, ids.hashes, ids.seen, ids.statistics, BLOCK=block)
    if candidates is not None:
        width = candidates.hashes.shape[1]
        block = block_size(out, width, IDS_AT_A_TIME)
        _look_again[(triton.cdiv(width, block), len(ids.tables))](
            candidates.hashes, candidates.places, candidates.nums, out, ids.num_buckets, ids.first_bucket, ids.tags,
            ids.hashes, ids.seen, ids.statistics, width, BLOCK=block)
    return out


def block_size(like: Tensor, size: int, on_gpu: int) -> int:
    """Return the ids of a program; the interpreter, which runs programs one after the other, takes all at once."""
    return on_gpu if like.is_cuda else triton.next_power_of_2(max(1, size))


@triton.jit
def _halve(values, ends, half_lives, step, BLOCK: tl.constexpr):
    table = tl.program_id(1)
    now = tl.load(step)
    if (now > 0) & (now % tl.load(half_lives + table) == 0):
        at = tl.load(ends + table) + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_here = at < tl.load(ends + table + 1)
        tl.store(values + at, tl.load(values + at, mask=is_here, other=0) >> 1, mask=is_here)


@triton.jit
def _find(
    raw, starts, hashes, slots, is_missing, keys, num_buckets, first_bucket, own_first, own_end, tags, map_hashes, seen,
    counts, policies, statistics, step, NONE: tl.constexpr, HAS_COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):
    table = tl.program_id(1)
    start, end = tl.load(starts + table), tl.load(starts + table + 1)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    if first < end:
        at = first + tl.arange(0, BLOCK)
        is_here = at < end
        one = tl.load(raw + at, mask=is_here, other=NONE).to(tl.int64)
        bits, buckets = mixed(one, tl.load(keys + table)), tl.load(num_buckets + table)
        bucket = _bucket(bits, buckets)
        is_custom = (bucket >= tl.load(own_first + table)) & (bucket < tl.load(own_end + table))
        is_id = is_here & (one != NONE) & is_custom
        slot, last = _probe(bits, is_id, buckets, tl.load(first_bucket + table), tags, map_hashes, seen)
        is_hit = slot >= 0
        tl.store(hashes + at, bits, mask=is_here)
        tl.store(slots + at, tl.where(is_id, slot, _NO_ID), mask=is_here)
        tl.store(is_missing + at, (is_id & (slot < 0)).to(tl.int32), mask=is_here)
        if step is not None:
            now = tl.load(step).to(tl.int32)
            tl.store(seen + slot, tl.zeros([BLOCK], tl.int32) + now, mask=is_hit & (last != now))
            if HAS_COUNTS:  # noqa: SIM102
                if tl.load(policies + table) == _LFU:
                    # Equal ones add once: many ids of a batch are the same few.
                    is_same = (slot[:, None] == slot[None, :]) & is_hit[None, :]
                    order = tl.arange(0, BLOCK)
                    num_before = tl.sum((is_same & (order[None, :] < order[:, None])).to(tl.int32), axis=1)
                    tl.atomic_add(counts + slot, tl.sum(is_same.to(tl.int32), axis=1), mask=is_hit & (num_before == 0))
            num_none = tl.sum((is_here & (is_id == 0)).to(tl.int64), axis=0)
            if num_none > 0:
                total = statistics + table * _NUM_STATISTICS
                tl.atomic_add(total + _LOOKUPS, -num_none)
                tl.atomic_add(total + _HITS, -num_none)


@triton.jit
def _take(hashes, is_missing, before, starts, until, max_new, taken, places, width, BLOCK: tl.constexpr):
    table = tl.program_id(1)
    start, end = tl.load(starts + table), tl.load(starts + table + 1)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    if first < end:
        at = first + tl.arange(0, BLOCK)
        is_candidate = tl.load(is_missing + at, mask=at < end, other=0) > 0
        to = (tl.load(before + at, mask=is_candidate, other=0) - 1 - tl.load(until + table)).to(tl.int64)
        is_candidate = is_candidate & (to < tl.load(max_new + table))
        to += table.to(tl.int64) * width
        tl.store(taken + to, tl.load(hashes + at, mask=is_candidate, other=0), mask=is_candidate)
        tl.store(places + to, at, mask=is_candidate)


@triton.jit
def _distinct(
    hashes, nums, is_admitted, occurrences, own_counters, counters, chance_keys, chances, counter_keys, num_buckets,
    first_counter, counts_needed, step, width, BLOCK: tl.constexpr,
):
    """Return the first of equal hashes, how many they are, and whether it has the luck that it needs."""
    table = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    at = table.to(tl.int64) * width + place
    num = tl.load(nums + table).to(tl.int32)
    bits = tl.load(hashes + at, mask=place < num, other=0)
    is_first = (place < num) & ((place == 0) | (bits != tl.load(hashes + at - 1, mask=(place > 0) & (place < num))))
    is_next = (place + 1 < num) & (bits != tl.load(hashes + at + 1, mask=place + 1 < num))
    following = tl.associative_scan(tl.where(is_next, place + 1, num), 0, _least, reverse=True)
    count = following - place
    luck = mixed(bits ^ (tl.load(step).to(tl.uint64) * _STEP).to(tl.int64), tl.load(chance_keys + table))
    is_lucky = is_first & ((luck >> 32) + _HALF < tl.load(chances + table))
    tl.store(is_admitted + at, is_lucky.to(tl.int32), mask=place < width)
    tl.store(occurrences + at, count, mask=place < width)
    if own_counters is not None:
        own = tl.zeros([BLOCK], tl.int64) - 1
        if tl.load(counts_needed + table) > 0:
            own = mixed(bits, tl.load(counter_keys + table)) & (_COUNTERS - 1)
            own += _bucket(bits, tl.load(num_buckets + table)) * _COUNTERS
            own = tl.where(is_first, own + tl.load(first_counter + table), -1)
            tl.atomic_add(counters + own, count, mask=own >= 0)
        tl.store(own_counters + at, own, mask=place < width)


@triton.jit
def _rank(
    hashes, is_admitted, number, own_counters, counters, counts_needed, num_buckets, width, BLOCK: tl.constexpr
):
    """Return the index of each admitted id among those of its bucket."""
    table = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    at = table.to(tl.int64) * width + place
    is_in = tl.load(is_admitted + at, mask=place < width, other=0)
    if own_counters is not None:
        needed = tl.load(counts_needed + table)
        if needed > 0:
            own = tl.load(own_counters + at, mask=is_in > 0, other=-1)
            is_in = (tl.load(counters + own, mask=own >= 0, other=0) >= needed).to(tl.int32) * is_in
            tl.store(is_admitted + at, is_in, mask=place < width)
    buckets = tl.load(num_buckets + table)
    bucket = _bucket(tl.load(hashes + at, mask=place < width, other=0), buckets)
    before = _bucket(tl.load(hashes + at - 1, mask=(place > 0) & (place < width), other=0), buckets)
    num_before = tl.cumsum(is_in, 0) - is_in
    first = tl.where((place == 0) | (bucket != before), num_before, 0)
    tl.store(number + at, num_before - tl.associative_scan(first, 0, _most), mask=place < width)


@triton.jit
def _choose(
    hashes, number, is_admitted, num_buckets, first_bucket, seen, counts, policies, step, found, width,
    BLOCK: tl.constexpr,
):
    table = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = table.to(tl.int64) * width + place
    is_wanted = tl.load(is_admitted + at, mask=place < width, other=0) != 0
    chosen = tl.zeros([BLOCK], tl.int64) + _NO_SLOT
    if tl.max(is_wanted.to(tl.int32), axis=0) > 0:
        bits = tl.load(hashes + at, mask=is_wanted, other=0)
        bucket = _bucket(bits, tl.load(num_buckets + table)) + tl.load(first_bucket + table)
        wanted = tl.load(number + at, mask=is_wanted, other=0)
        policy = tl.load(policies + table)
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
    tl.store(found + at, chosen, mask=place < width)


@triton.jit
def _place(
    slots, new_hashes, occurrences, own_counters, map_hashes, tags, seen, counts, counters, policies, statistics, step,
    width, BLOCK: tl.constexpr,
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
        bits = tl.load(new_hashes + at, mask=is_placed, other=0)
        tl.store(map_hashes + slot, bits, mask=is_placed)
        tl.store(tags + slot, bits.to(tl.int16), mask=is_placed)
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
    hashes, slots, starts, out, before, until, nums, num_buckets, first_bucket, tags, map_hashes, seen, statistics,
    BLOCK: tl.constexpr,
):
    table = tl.program_id(1)
    start, end = tl.load(starts + table), tl.load(starts + table + 1)
    first = start + tl.program_id(0).to(tl.int64) * BLOCK
    if first < end:
        at = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + at, mask=at < end, other=_NO_ID)
        base = tl.load(first_bucket + table)
        if before is not None:
            # No candidates, for there are too many: they may have got a slot all the same.
            is_other = slot == _NO_SLOT
            place = tl.load(before + at, mask=is_other, other=0) - 1 - tl.load(until + table)
            is_other = is_other & (place >= tl.load(nums + table))
            num = tl.sum(is_other.to(tl.int64), axis=0)
            if num > 0:
                bits = tl.load(hashes + at, mask=is_other, other=0)
                again, _ = _probe(bits, is_other, tl.load(num_buckets + table), base, tags, map_hashes, seen)
                slot = tl.where(is_other, again, slot)
                num = tl.sum((is_other & (again < 0)).to(tl.int64), axis=0)
                tl.atomic_add(statistics + table * _NUM_STATISTICS + _DEFAULTS, num)
        row = tl.where(slot >= 0, slot - base * _SLOTS + 1, tl.where(slot == _NO_ID, -1, 0))
        tl.store(out + at, row.to(tl.int32), mask=at < end)


@triton.jit
def _look_again(
    hashes, places, nums, out, num_buckets, first_bucket, tags, map_hashes, seen, statistics, width,
    BLOCK: tl.constexpr,
):
    table = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_candidate = place < tl.load(nums + table)
    if tl.max(is_candidate.to(tl.int32), axis=0) > 0:
        at = table.to(tl.int64) * width + place
        base = tl.load(first_bucket + table)
        bits = tl.load(hashes + at, mask=is_candidate, other=0)
        slot, _ = _probe(bits, is_candidate, tl.load(num_buckets + table), base, tags, map_hashes, seen)
        is_there = slot >= 0
        to = tl.load(places + at, mask=is_there, other=0)
        tl.store(out + to, (slot - base * _SLOTS + 1).to(tl.int32), mask=is_there)
        num = tl.sum((is_candidate & (slot < 0)).to(tl.int64), axis=0)
        if num > 0:
            tl.atomic_add(statistics + table * _NUM_STATISTICS + _DEFAULTS, num)


@triton.jit
def mixed(numbers, key):
    bits = numbers.to(tl.uint64) ^ key.to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    return (bits ^ (bits >> 31)).to(tl.int64)


@triton.jit
def _bucket(bits, num_buckets):
    return (((bits >> 32) + _HALF) * num_buckets) >> 32


@triton.jit
def _least(one, other):
    return tl.minimum(one, other)


@triton.jit
def _most(one, other):
    return tl.maximum(one, other)


@triton.jit
def _probe(bits, is_wanted, num_buckets, first_bucket, tags, map_hashes, seen):
    """Return the slot of each id, and when it was seen last.

    16 bits are compared first, then all of the slot that has them; the few ids whose 16 bits another slot has too are
    compared with all of their bucket.
    """
    bucket = _bucket(bits, num_buckets) + first_bucket
    ways = tl.arange(0, _SLOTS)
    place = bucket[:, None] * _SLOTS + ways[None, :]
    tag = tl.load(tags + place, mask=is_wanted[:, None], other=0)
    is_same = (tag == bits.to(tl.int16)[:, None]) & is_wanted[:, None]
    which = tl.min(tl.where(is_same, ways[None, :], _SLOTS), axis=1)
    is_like = which < _SLOTS
    slot = bucket * _SLOTS + which
    last = tl.load(seen + slot, mask=is_like, other=_FREE)
    is_it = is_like & (tl.load(map_hashes + slot, mask=is_like, other=0) == bits) & (last != _FREE)
    is_unclear = is_like & (is_it == 0)
    if tl.max(is_unclear.to(tl.int32), axis=0) > 0:
        there = tl.load(map_hashes + place, mask=is_unclear[:, None], other=0)
        is_same = (there == bits[:, None]) & is_unclear[:, None]
        which = tl.min(tl.where(is_same, ways[None, :], _SLOTS), axis=1)
        is_other = which < _SLOTS
        slot = tl.where(is_unclear, bucket * _SLOTS + which, slot)
        last = tl.where(is_unclear, tl.load(seen + slot, mask=is_other, other=_FREE), last)
        is_it = is_it | (is_other & (last != _FREE))
    return tl.where(is_it, slot, _NO_SLOT), last


_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_FIELDS = tl.constexpr(10)  # Numbers that describe a shard of rows; see `about_shards`.


def about_shards(ids: IdMap, shards: list[RowShard]) -> Tensor:
    """Describe shards for `reset`: [shards, fields]."""
    about = []
    for shard in shards:
        states = [*((one.data_ptr(), one.shape[1] if one.dim() > 1 else 1) for one in shard.states), (0, 0), (0, 0)]
        about.append([shard.table, ids.first_slots[shard.table] - 1 + shard.first_row, len(shard.weights),
                      shard.first_column, shard.weights.shape[1], shard.weights.data_ptr(), *states[0], *states[1]])
    return torch.tensor(about, device=ids.device)


def reset(ids: IdMap, new: NewRows, shards: list[RowShard], about: Tensor) -> None:
    """Give new rows the first values of their ids, and clear their optimizer's state."""
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
    """Clear one state of the optimizer; its width is 0 where there is none."""
    width = tl.load(about + 1)
    if width > 0:
        state = tl.load(about).to(tl.pointer_type(tl.float32))
        mask = is_mine[:, None] & (columns < width)[None, :]
        element = row[:, None] * width + columns[None, :]
        tl.store(state + element, tl.zeros_like(element).to(tl.float32), mask=mask)

"""Triton kernels over the tables: look rows up, and update each touched row once.

They work on FBGEMM's own storage, so TorchRec keeps owning the weights. FBGEMM's kernels take the learning rate from
the host when they are launched, and a graph would replay the first one for ever: these read it on the device.

Gradients of a row are added up in the order of the batch, whatever the card does in parallel, so a run repeats to the
bit: ids are sorted; the first of a run of equal ids adds up the others. Long runs, of hot rows and small tables, are
added up tile by tile, and a last kernel joins the tiles. Rows in fp16 and bf16 are rounded stochastically, by a hash of
the seed, the step, the row and the column: how a step rounds does not depend on what was drawn before.
"""

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

PLACE_BITS = tl.constexpr(40)  # Above them an id's place has its shard, and above that what its neighbours are.
PLACE = tl.constexpr((1 << 40) - 1)
SHARD = tl.constexpr((1 << 20) - 1)
IS_NEXT_EQUAL = tl.constexpr(1 << 61)  # The key behind is the same.
IS_FIRST = tl.constexpr(1 << 62)  # First of a run of equal keys that fills no tile.
NO_KEY = tl.constexpr(2147483647)  # Sorts last: an id that is not there, or is another rank's.
FIELDS = tl.constexpr(10)  # Numbers that describe a shard; see `lookup._Group`.
ROWWISE_ADAGRAD, ADAGRAD, SGD, ADAM, ROWWISE_ADAM = (tl.constexpr(kind) for kind in range(5))
KINDS = {"rowwise_adagrad": ROWWISE_ADAGRAD, "adagrad": ADAGRAD, "sgd": SGD, "adam": ADAM, "rowwise_adam": ROWWISE_ADAM}
# The quickest of those tried on an H200 (bench/LOG.md), for rows of 64 and of 128.
MANY_KEYS = 2**20
VALUES_AT_A_TIME = 512  # Values of the rows that one warp updates.
SAMPLES_AT_A_TIME = 8


def look_up(
    ids: Tensor, weights: Tensor, shards: Tensor, out: Tensor, keys: Tensor, trouble: Tensor, step: Tensor,
    factors: Tensor | None = None, key_factors: Tensor | None = None,
    *, num_samples: int, dim: int, column_multiple: int, offset_multiple: int,
) -> None:
    """Pool the rows of every shard into its columns of `out`, and write the sort key of every id.

    `factors` has what the row of each id is multiplied by, and `key_factors` gets them in the order of the keys. An id
    outside its table counts as none, and the first step it happened in is kept in `trouble`. `column_multiple`:
    what the columns in `out` are multiples of; `offset_multiple`: what the shards' offsets are, 0 where all are 0.
    """
    grid = (triton.cdiv(num_samples, SAMPLES_AT_A_TIME), shards.shape[0])
    _look_up[grid](
        ids, weights, shards, out, keys, trouble, step, factors, key_factors, num_samples, out.stride(0), dim,
        BLOCK=SAMPLES_AT_A_TIME, DIM=triton.next_power_of_2(dim), MULTIPLE=column_multiple, OFFSETS=offset_multiple,
        num_warps=1 if dim <= 64 else 2,
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows and their optimizer's state, in FBGEMM's storage, which an update changes."""

    weights: Tensor
    state: Tensor | None  # The optimizer's first, by its name for it; None: it has none.
    second_state: Tensor | None
    state_shifts: Tensor  # Added to a key, gives the index of its row-wise state: one number, or one for each shard.
    offsets: Tensor | None  # Added to a key times `dim`, gives its row's start, for each shard; None: nothing.
    offset_multiple: int  # Common divisor of `offsets`; 0 if there are none.
    dim: int
    optimizer: str
    eps: float
    l2: float = 0.0  # Penalty on looked-up rows, divided by the batch size.


@dataclass(frozen=True, slots=True)
class SortedIds:
    """Ids as keys in ascending order, and how each leads to its gradient."""

    keys: Tensor
    places: Tensor  # Position of each gradient; above `PLACE_BITS` its shard and its index in its run of equal keys.
    # Before `locate`: where the id was within its segment: the ids of all samples in one shard, then in the next.
    segment: int  # Number of keys that were sorted together.
    slots: Tensor  # [ids a sample has in all shards, 4]: shard, first position, ids a sample, column of its shard.
    num_samples: int
    column_multiple: int  # Common divisor of the columns in `slots`.
    key_factors: Tensor | None = None  # What each id's row is multiplied by, before the sort.
    factors: Tensor | None = None  # The same behind the sort.


@dataclass(frozen=True, slots=True)
class Rounding:
    """Source of the random bits that round rows in fp16 and bf16."""

    seed: Tensor
    origins: Tensor  # [num_shards, 2]: from a key to the number of its row among those of all tables; first column.


def locate(ids: SortedIds, grad_stride: int) -> None:
    """Find where the gradients of sorted ids are, and which have the same row; needs no gradient, so nothing waits for
    it."""
    num_keys = ids.keys.numel()
    _locate[(triton.cdiv(num_keys, 512),)](
        ids.keys, ids.places, ids.slots, ids.key_factors, ids.factors, num_keys, ids.segment, ids.num_samples,
        grad_stride, TILE=tiles(num_keys)[0], BLOCK=512, num_warps=4)


def update(
    ids: SortedIds, grads: Tensor, partial: Tensor, rates: Tensor, step: Tensor, rows: Rows, rounding: Rounding | None,
    *, has_long_runs: bool,
) -> None:
    """Move every row that has a key by the sum of its gradients, rows of `grads`, [samples, columns].

    One call moves rows whose run of equal keys fills a tile, another the rest. Neither touches what the other does.
    """
    num_keys, dim = ids.keys.numel(), triton.next_power_of_2(rows.dim)
    tile, many = tiles(num_keys)
    num_tiles = num_keys // tile  # those that are complete
    # What is None takes no part in the compiled kernel.
    seed, origins = (rounding.seed, rounding.origins) if rounding else (None, None)
    stepped = step if rounding or "adam" in rows.optimizer else None
    of_ids = (ids.keys, ids.places, grads, ids.factors, num_keys)
    of_rows = (rows.weights, rows.state, rows.second_state, rows.state_shifts, rows.offsets, rates, stepped, seed,
               origins, rows.dim, rows.eps, rows.l2 or None)
    multiple = math.gcd(ids.column_multiple, grads.stride(0))
    common: dict[str, Any] = {"KIND": KINDS[rows.optimizer].value, "DIM": dim, "MULTIPLE": multiple,
                              "HAS_SHIFTS": rows.state_shifts.numel() > 1, "OFFSETS": rows.offset_multiple}
    if not has_long_runs:
        block = max(1, VALUES_AT_A_TIME // dim)
        grid = (triton.cdiv(num_keys, block),)
        _update_short[grid](*of_ids, *of_rows, BLOCK=block, num_warps=max(1, dim // 512), **common)
    elif num_tiles:
        grid = (triton.cdiv(num_tiles, many),)
        _sum_tiles[grid](*of_ids, partial, rows.dim, num_tiles, MANY=many, DIM=dim, TILE=tile, MULTIPLE=multiple,
                         num_warps=4)
        _update_long[grid](*of_ids, partial, *of_rows, num_tiles, MANY=many, TILE=tile,
                           SUMS=max(1, 8192 // dim), num_warps=4, **common)


def tiles(num_keys: int) -> tuple[int, int]:
    """Return the sorted ids in a tile, and the tiles of a program; a run of equal ids that fills a tile is added up by
    tiles."""
    return (64, 2) if num_keys >= MANY_KEYS else (32, 1)


def partial_shape(num_keys: int, dim: int) -> tuple[int, int]:
    """Shape of the sums that the kernels of an update hand each other."""
    return max(1, num_keys // tiles(num_keys)[0]), triton.next_power_of_2(dim)


@triton.jit
def _look_up(
    ids, weights, shards, out, keys, trouble, step, factors, key_factors, num_samples, out_stride, dim,
    BLOCK: tl.constexpr, DIM: tl.constexpr, MULTIPLE: tl.constexpr, OFFSETS: tl.constexpr,
):
    shard = tl.program_id(1)
    about = shards + shard * FIELDS
    ids_start = tl.load(about)
    num_ids = tl.load(about + 1).to(tl.int32)
    first_row = tl.load(about + 2).to(tl.int32)
    num_rows = tl.load(about + 3).to(tl.int32)
    table_rows = tl.load(about + 4).to(tl.int32)
    column = tl.multiple_of(tl.load(about + 5), MULTIPLE)
    first_key = tl.load(about + 6).to(tl.int32)
    keys_start = tl.load(about + 7)
    note = (tl.load(step) << 20) | tl.load(about + 8)
    samples = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_sample = samples < num_samples
    columns = tl.arange(0, DIM)
    is_column = columns < dim
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for which in range(num_ids):
        place = samples.to(tl.int64) * num_ids + which
        id_ = tl.load(ids + ids_start + place, mask=is_sample, other=-1)
        row = id_ - first_row
        is_mine = (row >= 0) & (row < num_rows) & (id_ < table_rows)
        is_bad = (id_ < -1) | (id_ >= table_rows)
        key = tl.where(is_mine, first_key + row, NO_KEY)
        element = key.to(tl.int64)[:, None] * dim + columns[None, :]
        if OFFSETS > 0:
            element += tl.multiple_of(tl.load(about + 9), OFFSETS)
        values = tl.load(weights + element, mask=is_mine[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        if factors is not None:
            factor = tl.load(factors + ids_start + place, mask=is_sample, other=0.0)
            tl.store(key_factors + keys_start + place, factor, mask=is_sample)
            values *= factor[:, None]
        total += values
        tl.store(keys + keys_start + place, key, mask=is_sample)
        tl.atomic_min(trouble + tl.zeros_like(row), note + tl.zeros_like(place), mask=is_bad)
    to = out + samples.to(tl.int64)[:, None] * out_stride + column + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_sample[:, None] & is_column[None, :])


@triton.jit
def _locate(
    keys, places, slots, key_factors, factors, num_keys, segment, num_samples, grad_stride, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_key = at < num_keys
    position = at // segment * segment + tl.load(places + at, mask=is_key, other=0).to(tl.int32)
    if factors is not None:
        tl.store(factors + at, tl.load(key_factors + position, mask=is_key, other=0.0), mask=is_key)
    about = slots + 4 * (position // num_samples)
    sample = (position - tl.load(about + 1, mask=is_key, other=0)) // tl.load(about + 2, mask=is_key, other=1)
    place = sample.to(tl.int64) * grad_stride + tl.load(about + 3, mask=is_key, other=0)
    packed = place | (tl.load(about, mask=is_key, other=0).to(tl.int64) << PLACE_BITS)
    key = tl.load(keys + at, mask=is_key, other=NO_KEY)
    before = tl.load(keys + at - 1, mask=(at > 0) & is_key, other=-1)
    after = tl.load(keys + at + 1, mask=at + 1 < num_keys, other=-1)
    end = (at + TILE - 1) // TILE * TILE + TILE - 1  # of the first tile that the run may fill
    far = tl.load(keys + end, mask=end < num_keys, other=-1)
    is_first = (key != NO_KEY) & (key != before) & (key != far)
    packed |= tl.where(is_first, IS_FIRST, 0) | tl.where(key == after, IS_NEXT_EQUAL, 0)
    tl.store(places + at, packed, mask=is_key)


@triton.jit
def _gradients(packed, at, is_wanted, grads, factors, dim, DIM: tl.constexpr, MULTIPLE: tl.constexpr):
    """Read the gradients that the packed indices of the sorted ids `at` point to."""
    place = packed & PLACE
    columns = tl.arange(0, DIM)
    from_ = grads + tl.multiple_of(place, MULTIPLE)[:, None] + columns[None, :]
    values = tl.load(from_, mask=is_wanted[:, None] & (columns < dim)[None, :], other=0.0)
    values = values.to(tl.float32)
    if factors is not None:
        values *= tl.load(factors + at, mask=is_wanted, other=0.0)[:, None]
    return values


@triton.jit
def _update_short(
    keys, places, grads, factors, num_keys, weights, state, second_state, state_shifts, offsets, rates, step, seed,
    origins, dim, eps, l2, KIND: tl.constexpr, DIM: tl.constexpr, MULTIPLE: tl.constexpr, HAS_SHIFTS: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Update rows whose run of equal keys fills no tile: the first of a run adds the others up, one after the other."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    behind = at + 1
    key = tl.load(keys + at, mask=at < num_keys, other=NO_KEY)
    packed = tl.load(places + at, mask=at < num_keys, other=0)
    one = tl.load(places + behind, mask=behind < num_keys, other=0)
    is_first = (packed & IS_FIRST) != 0
    goes_on = is_first & ((packed & IS_NEXT_EQUAL) != 0)
    shard = (packed >> PLACE_BITS) & SHARD
    # Asked for at once: most runs have one key or two.
    total = _gradients(packed, at, is_first, grads, factors, dim, DIM, MULTIPLE)
    other = _gradients(one, behind, goes_on, grads, factors, dim, DIM, MULTIPLE)
    row, first, second, of_row = _read_rows(key, shard, is_first, weights, state, second_state, state_shifts, offsets,
                                            dim, KIND, DIM, HAS_SHIFTS, OFFSETS)
    total += other
    count = 1.0 + goes_on.to(tl.float32)
    goes_on &= (one & IS_NEXT_EQUAL) != 0
    while tl.max(goes_on.to(tl.int32), axis=0) > 0:
        # Two at a time: each waits for the memory.
        one = tl.load(places + behind + 1, mask=behind + 1 < num_keys, other=0)
        two = tl.load(places + behind + 2, mask=behind + 2 < num_keys, other=0)
        is_next = goes_on & ((one & IS_NEXT_EQUAL) != 0)
        other = _gradients(one, behind + 1, goes_on, grads, factors, dim, DIM, MULTIPLE)
        another = _gradients(two, behind + 2, is_next, grads, factors, dim, DIM, MULTIPLE)
        total += other
        total += another
        count += goes_on.to(tl.float32) + is_next.to(tl.float32)
        behind += 2
        goes_on = is_next & ((two & IS_NEXT_EQUAL) != 0)
    _write_rows(key, shard, total, count, is_first, row, first, second, of_row, weights, state, second_state, offsets,
                rates, step, seed, origins, dim, eps, l2, KIND, DIM, OFFSETS)


@triton.jit
def _sum_tiles(
    keys, places, grads, factors, num_keys, partial, dim, num_tiles, MANY: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, MULTIPLE: tl.constexpr,
):
    """Sum the gradients of tiles that are filled by one key."""
    for which in range(MANY):
        tile = tl.program_id(0) * MANY + which
        at = tile * TILE + tl.arange(0, TILE)
        first = tl.load(keys + tile * TILE, mask=tile < num_tiles, other=NO_KEY)
        last = tl.load(keys + tile * TILE + TILE - 1, mask=tile < num_tiles, other=NO_KEY)
        packed = tl.load(places + at, mask=at < num_keys, other=0)
        if (first == last) & (first != NO_KEY):
            values = _gradients(packed, at, at >= 0, grads, factors, dim, DIM, MULTIPLE)
            tl.store(partial + tile.to(tl.int64) * DIM + tl.arange(0, DIM), tl.sum(values, axis=0))


@triton.jit
def _update_long(
    keys, places, grads, factors, num_keys, partial, weights, state, second_state, state_shifts, offsets, rates, step,
    seed, origins, dim, eps, l2, num_tiles, KIND: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    MULTIPLE: tl.constexpr, HAS_SHIFTS: tl.constexpr, OFFSETS: tl.constexpr, MANY: tl.constexpr, SUMS: tl.constexpr,
):
    """Update rows whose run of equal keys fills tiles, by what stands before them, their sums, and what is left behind.
    """
    tiles = tl.program_id(0) * MANY + tl.arange(0, MANY)
    is_tile = tiles < num_tiles
    first = tl.load(keys + tiles * TILE, mask=is_tile, other=NO_KEY)
    last = tl.load(keys + tiles * TILE + TILE - 1, mask=is_tile, other=NO_KEY)
    before = tl.load(keys + tiles * TILE - TILE, mask=is_tile & (tiles > 0), other=-1)
    left = ((first == last) & (first != NO_KEY) & (first != before)).to(tl.int32)
    columns = tl.arange(0, DIM)
    within = tl.arange(0, TILE)
    while tl.max(left, axis=0) > 0:
        tile = tl.min(tl.where(left > 0, tiles, 2147483647), axis=0)
        left = tl.where(tiles == tile, 0, left)
        key = tl.load(keys + tile * TILE)
        one = tl.arange(0, 1)
        is_row = one == 0
        shard = (tl.load(places + tile * TILE + one) >> PLACE_BITS) & SHARD
        row, held, second, of_row = _read_rows(key + one, shard, is_row, weights, state, second_state, state_shifts,
                                               offsets, dim, KIND, DIM, HAS_SHIFTS, OFFSETS)
        at = tile * TILE - TILE + within
        packed = tl.load(places + at, mask=at >= 0, other=0)
        is_part = (at >= 0) & (tl.load(keys + at, mask=at >= 0, other=-1) == key)
        total = tl.sum(_gradients(packed, at, is_part, grads, factors, dim, DIM, MULTIPLE), axis=0)
        count = tl.sum(is_part.to(tl.float32), axis=0)
        next_tile = tile
        goes_on = 1
        while goes_on > 0:
            some = next_tile + tl.arange(0, SUMS)
            is_full = tl.load(keys + some * TILE + TILE - 1, mask=some < num_tiles, other=-1) == key
            sums = some.to(tl.int64)[:, None] * DIM + columns[None, :]
            total += tl.sum(tl.load(partial + sums, mask=is_full[:, None], other=0.0), axis=0)
            num_full = tl.sum(is_full.to(tl.int32), axis=0)
            count += TILE * num_full.to(tl.float32)
            next_tile += num_full
            goes_on = num_full // SUMS
        at = next_tile * TILE + within
        packed = tl.load(places + at, mask=at < num_keys, other=0)
        is_part = tl.load(keys + at, mask=at < num_keys, other=-1) == key
        total += tl.sum(_gradients(packed, at, is_part, grads, factors, dim, DIM, MULTIPLE), axis=0)
        count += tl.sum(is_part.to(tl.float32), axis=0)
        _write_rows(key + one, shard, total[None, :], count, is_row, row, held, second, of_row, weights, state,
                    second_state, offsets, rates, step, seed, origins, dim, eps, l2, KIND, DIM, OFFSETS)


@triton.jit
def _elements(key, shard, is_row, offsets, dim, DIM: tl.constexpr, OFFSETS: tl.constexpr):
    """Return the indices of the values of rows."""
    element = key.to(tl.int64)[:, None] * dim + tl.arange(0, DIM)[None, :]
    if OFFSETS > 0:
        element += tl.multiple_of(tl.load(offsets + shard, mask=is_row, other=0), OFFSETS)[:, None]
    return element


@triton.jit
def _read_rows(
    key, shard, is_row, weights, state, second_state, state_shifts, offsets, dim, KIND: tl.constexpr, DIM: tl.constexpr,
    HAS_SHIFTS: tl.constexpr, OFFSETS: tl.constexpr,
):
    """Return rows, their optimizer's state, and where that stands; zeros for state that the optimizer does not have."""
    columns = tl.arange(0, DIM)
    is_element = is_row[:, None] & (columns < dim)[None, :]
    element = _elements(key, shard, is_row, offsets, dim, DIM, OFFSETS)
    row = tl.load(weights + element, mask=is_element, other=0.0).to(tl.float32)
    of_row = key.to(tl.int64)
    if KIND == ROWWISE_ADAGRAD or KIND == ROWWISE_ADAM:  # noqa: SIM109
        if HAS_SHIFTS:
            of_row += tl.load(state_shifts + shard, mask=is_row, other=0)
        else:
            of_row += tl.load(state_shifts)
    first = tl.zeros_like(row)
    second = tl.zeros_like(row)
    if KIND == ROWWISE_ADAGRAD:
        first = tl.load(state + of_row, mask=is_row, other=0.0)[:, None]
    elif KIND != SGD:
        first = tl.load(state + element, mask=is_element, other=0.0)
    if KIND == ADAM:
        second = tl.load(second_state + element, mask=is_element, other=0.0)
    elif KIND == ROWWISE_ADAM:
        second = tl.load(second_state + of_row, mask=is_row, other=0.0)[:, None]
    return row, first, second, of_row


@triton.jit
def _write_rows(
    key, shard, total, count, is_row, row, first, second, of_row, weights, state, second_state, offsets, rates, step,
    seed, origins, dim, eps, l2, KIND: tl.constexpr, DIM: tl.constexpr, OFFSETS: tl.constexpr,
):
    rate = tl.load(rates)
    columns = tl.arange(0, DIM)
    is_element = is_row[:, None] & (columns < dim)[None, :]
    element = _elements(key, shard, is_row, offsets, dim, DIM, OFFSETS)
    if l2 is not None:
        total += (l2 * (count + tl.zeros_like(key).to(tl.float32)))[:, None] * row
    if KIND == ROWWISE_ADAGRAD:
        squares = first + (tl.sum(total * total, axis=1) / dim)[:, None]
        tl.store((state + of_row)[:, None], squares, mask=is_row[:, None])
        change = total * (rate / (tl.sqrt(squares) + eps))
    elif KIND == ADAGRAD:
        squares = first + total * total
        tl.store(state + element, squares, mask=is_element)
        change = rate * total / (tl.sqrt(squares) + eps)
    elif KIND == SGD:
        change = rate * total
    else:
        num_steps = (tl.load(step) + 1).to(tl.float64)  # 1 - 0.999^n keeps four digits in single precision
        first_share = (1.0 - tl.exp(num_steps * -0.10536051565782628)).to(tl.float32)
        second_share = (1.0 - tl.exp(num_steps * -0.0010005003335835344)).to(tl.float32)
        mean = 0.9 * first + 0.1 * total
        tl.store(state + element, mean, mask=is_element)
        if KIND == ADAM:
            squares = 0.999 * second + 0.001 * total * total
            tl.store(second_state + element, squares, mask=is_element)
        else:
            squares = 0.999 * second + (0.001 * (tl.sum(total * total, axis=1) / dim))[:, None]
            tl.store((second_state + of_row)[:, None], squares, mask=is_row[:, None])
        change = rate * (mean / first_share) / (tl.sqrt(squares / second_share) + eps)
    # At a rate of zero no bit may move, and -0.0 less -0.0 is 0.0.
    value = tl.where(rate == 0.0, row, row - change)
    if seed is not None:
        origin = origins + 2 * shard
        number = key.to(tl.int64) + tl.load(origin, mask=is_row, other=0)
        column = (tl.load(origin + 1, mask=is_row, other=0)[:, None] + columns[None, :]).to(tl.uint32)
        of_step = mixed(tl.load(seed).to(tl.uint32) ^ mixed(tl.load(step).to(tl.uint32)))
        by_row = mixed(of_step ^ mixed(number.to(tl.uint32) ^ mixed((number >> 32).to(tl.uint32) + 1)))
        random = mixed(by_row[:, None] + column * 0x9E3779B9)
        if weights.dtype.element_ty == tl.bfloat16:  # noqa: SIM108
            value = rounded_to_bf16(value, random)
        else:
            value = rounded(value, random)
    tl.store(weights + element, value, mask=is_element)


@triton.jit
def mixed(bits):
    """Hash 32-bit numbers: https://nullprogram.com/blog/2018/07/31/."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def rounded_to_bf16(value, random):
    """Round like `rounded`, to bf16, which has the exponents of fp32."""
    bits = (value.to(tl.uint32, bitcast=True) + (random & 0xFFFF)) & 0xFFFF0000
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value).to(tl.bfloat16)


@triton.jit
def rounded(value, random):
    """Round stochastically to one of the two neighbours in fp16: the nearer, the likelier.

    What fp16 represents exactly stays as it is, infinities and NaN too.
    """
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + (random & 0x1FFF)) & 0xFFFFE000
    # Below 2^-14 fp16 has steps of 2^-24.
    steps = tl.abs(value) * 16777216.0 + (random & 0x1FFF).to(tl.float32) * 0.0001220703125
    small = (tl.floor(steps) * 5.9604644775390625e-08).to(tl.uint32, bitcast=True)
    magnitude = tl.where(magnitude < 0x38800000, small, normal)
    nearby = (magnitude | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(value == value, nearby, value).to(tl.float16)

"""Triton kernels over the tables: look rows up, and update each touched row once.

They work on FBGEMM's own storage, so TorchRec keeps owning the weights. FBGEMM's kernels take the learning rate from
the host when they are launched, and a graph would replay the first one for ever: these read it on the device.

Gradients of a row are added up in the order of the batch, whatever the card does in parallel, so a run repeats to the
bit: ids are sorted; a tile of sorted ids adds up its runs of equal ids by one matrix product; a second kernel joins
the runs that cross from tile to tile. Rows in fp16 are rounded stochastically, by a hash of the seed, the step, the
row and the column: how a step rounds does not depend on what was drawn before.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

NO_KEY = tl.constexpr(2147483647)  # Sorts last: an id that is not there, or is another rank's.
FIELDS = tl.constexpr(11)  # Numbers that describe a shard; see `lookup._Group`.
ROWWISE_ADAGRAD = tl.constexpr(0)
ADAGRAD = tl.constexpr(1)
SGD = tl.constexpr(2)
ADAM = tl.constexpr(3)
ROWWISE_ADAM = tl.constexpr(4)
KINDS = {"rowwise_adagrad": ROWWISE_ADAGRAD, "adagrad": ADAGRAD, "sgd": SGD, "adam": ADAM, "rowwise_adam": ROWWISE_ADAM}
# The quickest of those tried on an H200 (bench/LOG.md), for rows of 64 and of 128.
TILE = 32
TILE_WARPS = 4
TILES_AT_A_TIME = 16
SAMPLES_AT_A_TIME = 8


def look_up(
    ids: Tensor, weights: Tensor, shards: Tensor, out: Tensor, keys: Tensor, trouble: Tensor, step: Tensor,
    *, num_samples: int, max_dim: int,
) -> None:
    """Pool the rows of every shard into its columns of `out`, and write the sort key of every id.

    An id outside its table counts as none, and the first step it happened in is kept in `trouble`.
    """
    grid = (triton.cdiv(num_samples, SAMPLES_AT_A_TIME), shards.shape[0])
    _look_up[grid](
        ids, weights, shards, out, keys, trouble, step, num_samples, out.stride(0),
        BLOCK=SAMPLES_AT_A_TIME, DIM=triton.next_power_of_2(max_dim), num_warps=1 if max_dim <= 64 else 2,
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """What an update changes: rows and their optimizer's state, in FBGEMM's storage."""

    weights: Tensor
    state: Tensor | None  # The optimizer's first, by its name for it; None: it has none.
    second_state: Tensor | None
    state_shifts: Tensor  # From a key to the place of its row-wise state: one number, or one for each shard.
    shard_of: Tensor  # The shard that each id belongs to, in the order of the batch.
    dim: int
    optimizer: str
    eps: float
    l2: float = 0.0  # Of the penalty on looked-up rows, divided by the batch size.


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where rows in fp16 take their random bits from."""

    seed: Tensor
    origins: Tensor  # [num_shards, 2]: from a key to the number of its row among those of all tables; first column.


def update(
    keys: Tensor, order: Tensor, places: Tensor, grads: Tensor, partial: Tensor, rates: Tensor, step: Tensor,
    rows: Rows, rounding: Rounding | None,
) -> None:
    """Move every row whose key is in `keys` (sorted) by the sum of its gradients, which stand at `places[order]`."""
    num_keys = keys.numel()
    num_tiles = triton.cdiv(num_keys, TILE)
    # What is None takes no part in the compiled kernel.
    seed, origins = (rounding.seed, rounding.origins) if rounding else (None, None)
    stepped = step if rounding or "adam" in rows.optimizer else None
    of_rows = (rows.weights, rows.state, rows.second_state, rows.state_shifts, rows.shard_of, rates, stepped, seed,
               origins)
    common: dict[str, Any] = {
        "KIND": KINDS[rows.optimizer].value, "DIM": triton.next_power_of_2(rows.dim), "TILE": TILE,
        "HAS_SHIFTS": rows.state_shifts.numel() > 1,
    }
    l2 = rows.l2 or None
    _update_tiles[(num_tiles,)](
        keys, order, places, grads, partial, *of_rows, num_keys, rows.dim, rows.eps, l2,
        num_warps=TILE_WARPS, **common,
    )
    _update_crossing[(num_tiles,)](
        keys, order, partial, *of_rows, num_keys, num_tiles, rows.dim, rows.eps, l2,
        MANY=TILES_AT_A_TIME, num_warps=1, **common,
    )


def partial_shape(num_keys: int, dim: int) -> tuple[int, int, int]:
    """Of what the two kernels of an update hand each other."""
    return triton.cdiv(num_keys, TILE), 2, triton.next_power_of_2(dim)


@triton.jit
def _look_up(
    ids, weights, shards, out, keys, trouble, step, num_samples, out_stride, BLOCK: tl.constexpr, DIM: tl.constexpr
):
    shard = tl.program_id(1)
    about = shards + shard * FIELDS
    ids_start = tl.load(about)
    num_ids = tl.load(about + 1).to(tl.int32)
    first_row = tl.load(about + 2).to(tl.int32)
    num_rows = tl.load(about + 3).to(tl.int32)
    table_rows = tl.load(about + 4).to(tl.int32)
    weights_start = tl.load(about + 5)
    dim = tl.load(about + 6).to(tl.int32)
    column = tl.load(about + 7)
    first_key = tl.load(about + 8).to(tl.int32)
    keys_start = tl.load(about + 9)
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
        if tl.max(is_bad.to(tl.int32), axis=0) > 0:
            tl.atomic_min(trouble, (tl.load(step) << 20) | tl.load(about + 10))
        element = weights_start + row.to(tl.int64)[:, None] * dim + columns[None, :]
        total += tl.load(weights + element, mask=is_mine[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        tl.store(keys + keys_start + place, tl.where(is_mine, first_key + row, NO_KEY), mask=is_sample)
    to = out + samples.to(tl.int64)[:, None] * out_stride + column + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_sample[:, None] & is_column[None, :])


@triton.jit
def _update_tiles(
    keys, order, places, grads, partial, weights, state, second_state, state_shifts, shard_of, rates, step, seed,
    origins, num_keys, dim, eps, l2, KIND: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
):
    tile = tl.program_id(0)
    within = tl.arange(0, TILE)
    at = tile * TILE + within
    key = tl.load(keys + at, mask=at < num_keys, other=NO_KEY)
    is_key = key != NO_KEY
    position = tl.load(order + at, mask=is_key, other=0)
    columns = tl.arange(0, DIM)
    is_column = columns < dim
    place = tl.load(places + position, mask=is_key, other=0)
    grad = tl.load(grads + place[:, None] + columns[None, :], mask=is_key[:, None] & is_column[None, :], other=0.0)
    is_same = key[:, None] == key[None, :]
    total = tl.dot(is_same.to(grad.dtype), grad, input_precision="ieee")
    before = tl.load(keys + at - 1, mask=(at > 0) & (at <= num_keys), other=-1)
    left = tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
    right = tl.load(keys + (tile + 1) * TILE, mask=(tile + 1) * TILE < num_keys, other=-1)
    comes_from_left = is_key & (key == left)
    goes_on_right = is_key & (key == right)
    is_whole_first = is_key & (key != before) & (~comes_from_left) & (~goes_on_right)
    count = 0.0
    if l2 is not None:
        count = tl.sum(is_same.to(tl.float32), axis=1)
    _update_rows(key, position, total, count, is_whole_first, weights, state, second_state, state_shifts, shard_of,
                 rates, step, seed, origins, dim, eps, l2, KIND, DIM, HAS_SHIFTS)
    slot = partial + (tile * 2).to(tl.int64) * DIM + columns
    tl.store(tl.broadcast_to(slot[None, :], [TILE, DIM]), total, mask=(comes_from_left & (within == 0))[:, None])
    starts_here = goes_on_right & (~comes_from_left) & (within == TILE - 1)
    tl.store(tl.broadcast_to(slot[None, :], [TILE, DIM]) + DIM, total, mask=starts_here[:, None])


@triton.jit
def _update_crossing(
    keys, order, partial, weights, state, second_state, state_shifts, shard_of, rates, step, seed, origins, num_keys,
    num_tiles, dim, eps, l2, KIND: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, HAS_SHIFTS: tl.constexpr,
    MANY: tl.constexpr,
):
    """A run of equal ids that leaves its tile: the tile it starts in adds up what the tiles behind it hold of it."""
    tile = tl.program_id(0)
    last = tile * TILE + TILE - 1
    if last + 1 < num_keys:
        key = tl.load(keys + last)
        left = tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
        if (key == tl.load(keys + last + 1)) & (key != NO_KEY) & (key != left):
            columns = tl.arange(0, DIM)
            total = tl.load(partial + (tile * 2 + 1).to(tl.int64) * DIM + columns)
            count = 0.0
            if l2 is not None:
                count = tl.sum((tl.load(keys + tile * TILE + tl.arange(0, TILE)) == key).to(tl.float32), axis=0)
            next_tile = tile + 1
            goes_on = 1
            while goes_on > 0:
                tiles = next_tile + tl.arange(0, MANY)
                first = tl.load(keys + tiles * TILE, mask=tiles < num_tiles, other=-1)
                is_part = first == key
                element = (tiles * 2).to(tl.int64)[:, None] * DIM + columns[None, :]
                total += tl.sum(tl.load(partial + element, mask=is_part[:, None], other=0.0), axis=0)
                if l2 is not None:
                    at = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
                    is_same = tl.load(keys + at, mask=at < num_keys, other=-1) == key
                    count += tl.sum(tl.sum(is_same.to(tl.float32), axis=1), axis=0)
                goes_on = tl.min(is_part.to(tl.int32), axis=0)
                next_tile += MANY
            one = tl.arange(0, 1)
            position = tl.load(order + last + one)
            _update_rows(key + one, position, total[None, :], count, one == 0, weights, state, second_state,
                         state_shifts, shard_of, rates, step, seed, origins, dim, eps, l2, KIND, DIM, HAS_SHIFTS)


@triton.jit
def _update_rows(
    key, position, total, count, is_row, weights, state, second_state, state_shifts, shard_of, rates, step, seed,
    origins, dim, eps, l2, KIND: tl.constexpr, DIM: tl.constexpr, HAS_SHIFTS: tl.constexpr,
):
    rate = tl.load(rates)
    columns = tl.arange(0, DIM)
    is_element = is_row[:, None] & (columns < dim)[None, :]
    element = key.to(tl.int64)[:, None] * dim + columns[None, :]
    row = tl.load(weights + element, mask=is_element, other=0.0).to(tl.float32)
    if l2 is not None:
        total += (l2 * (count + tl.zeros_like(key).to(tl.float32)))[:, None] * row
    if KIND == ROWWISE_ADAGRAD or KIND == ROWWISE_ADAM:  # noqa: SIM109
        if HAS_SHIFTS:
            shift = tl.load(state_shifts + tl.load(shard_of + position, mask=is_row, other=0), mask=is_row, other=0)
        else:
            shift = tl.load(state_shifts) + tl.zeros_like(key).to(tl.int64)
        of_row = key.to(tl.int64) + shift
    if KIND == ROWWISE_ADAGRAD:
        at = state + of_row
        squares = tl.load(at, mask=is_row, other=0.0) + tl.sum(total * total, axis=1) / dim
        tl.store(at, squares, mask=is_row)
        change = total * (rate / (tl.sqrt(squares) + eps))[:, None]
    elif KIND == ADAGRAD:
        squares = tl.load(state + element, mask=is_element, other=0.0) + total * total
        tl.store(state + element, squares, mask=is_element)
        change = rate * total / (tl.sqrt(squares) + eps)
    elif KIND == SGD:
        change = rate * total
    else:
        num_steps = (tl.load(step) + 1).to(tl.float64)  # 1 - 0.999^n keeps four digits in single precision
        first_share = (1.0 - tl.exp(num_steps * -0.10536051565782628)).to(tl.float32)
        second_share = (1.0 - tl.exp(num_steps * -0.0010005003335835344)).to(tl.float32)
        mean = 0.9 * tl.load(state + element, mask=is_element, other=0.0) + 0.1 * total
        tl.store(state + element, mean, mask=is_element)
        if KIND == ADAM:
            squares = 0.999 * tl.load(second_state + element, mask=is_element, other=0.0) + 0.001 * total * total
            tl.store(second_state + element, squares, mask=is_element)
        else:
            at = second_state + of_row
            of_rows = 0.999 * tl.load(at, mask=is_row, other=0.0) + 0.001 * (tl.sum(total * total, axis=1) / dim)
            tl.store(at, of_rows, mask=is_row)
            squares = of_rows[:, None]
        change = rate * (mean / first_share) / (tl.sqrt(squares / second_share) + eps)
    # At a rate of zero no bit may move, and -0.0 less -0.0 is 0.0.
    value = tl.where(rate == 0.0, row, row - change)
    if seed is not None:
        origin = origins + 2 * tl.load(shard_of + position, mask=is_row, other=0).to(tl.int64)
        number = key.to(tl.int64) + tl.load(origin, mask=is_row, other=0)
        column = (tl.load(origin + 1, mask=is_row, other=0)[:, None] + columns[None, :]).to(tl.uint32)
        of_step = _mixed(tl.load(seed).to(tl.uint32) ^ _mixed(tl.load(step).to(tl.uint32)))
        by_row = _mixed(of_step ^ _mixed(number.to(tl.uint32) ^ _mixed((number >> 32).to(tl.uint32) + 1)))
        value = _rounded(value, _mixed(by_row[:, None] + column * 0x9E3779B9))
    tl.store(weights + element, value, mask=is_element)


@triton.jit
def _mixed(bits):
    """A hash of 32-bit numbers: https://nullprogram.com/blog/2018/07/31/."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _rounded(value, random):
    """To one of the two neighbours in fp16: the nearer, the likelier. What has no digits behind stays as it is,
    infinities and NaN too."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + (random & 0x1FFF)) & 0xFFFFE000
    # Below 2^-14 fp16 has steps of 2^-24.
    steps = tl.abs(value) * 16777216.0 + (random & 0x1FFF).to(tl.float32) * 0.0001220703125
    small = (tl.floor(steps) * 5.9604644775390625e-08).to(tl.uint32, bitcast=True)
    magnitude = tl.where(magnitude < 0x38800000, small, normal)
    rounded = (magnitude | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value).to(tl.float16)

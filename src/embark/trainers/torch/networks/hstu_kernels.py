"""Triton kernels of HSTU's causal attention over jagged sequences, forward and backward.

A program has a block of rows of one sample and one head. It computes only the blocks that the causal mask leaves, and
no padding. Nothing is added up by atomics and no block size is chosen by timing, so that a run repeats to the bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from embark.trainers.torch.networks.jagged import JaggedLayout


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a kernel: rows (or columns) of a program, those that it takes at a time, warps and stages."""

    own: int
    step: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of all kernels."""

    forward: Tile
    keys: Tile
    queries: Tile
    square: Tile  # Tile of queries with a position bias, with as many rows as columns.


BF16 = Tiles(Tile(64, 64, 4, 3), Tile(128, 32, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))
FP32 = Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one attention. `position_bias` has one value for each distance 0 to max_length − 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    position_bias: Tensor | None
    time_bias: Tensor | None
    times: Tensor | None
    layout: JaggedLayout
    max_length: int

    def tile(self, name: str) -> Tile:
        """Return a kernel's tile, no larger than the longest sequence asks for."""
        tile: Tile = getattr(BF16 if self.q.element_size() == 2 else FP32, name)
        longest = max(16, triton.next_power_of_2(self.max_length))
        return Tile(min(tile.own, longest), min(tile.step, longest), tile.warps if longest > 64 else 4, tile.stages)

    def arguments(self) -> tuple[object, ...]:
        """Return the first arguments of all kernels."""
        nothing = self.q  # Stands for a bias that is not there; never read.
        return (self.q, self.k, self.v, nothing if self.position_bias is None else self.position_bias,
                nothing if self.times is None else self.times, nothing if self.time_bias is None else self.time_bias,
                self.layout.offsets, self.q.stride(0), self.k.stride(0), self.v.stride(0),
                self.q.shape[2] ** -0.5, 1.0 / self.max_length)

    def constants(self) -> dict[str, object]:
        """Return the constants of all kernels."""
        q_width, v_width = self.q.shape[2], self.v.shape[2]
        return {
            "HEADS": self.q.shape[1], "Q_WIDTH": q_width, "V_WIDTH": v_width,
            "Q_PADDED": max(16, triton.next_power_of_2(q_width)), "V_PADDED": max(16, triton.next_power_of_2(v_width)),
            "BUCKETS": 0 if self.time_bias is None else len(self.time_bias),
            "HAS_POSITIONS": self.position_bias is not None,
            # The hardware's tanh is exact to 11 bits.
            "IS_FAST": self.q.is_cuda and self.q.element_size() == 2,
            "PRECISION": "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee",
        }


class TritonAttention(torch.autograd.Function):
    """`hstu_attention` for autograd; its position bias has one value for each distance."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time_bias: Tensor | None,
        times: Tensor | None, layout: JaggedLayout, max_length: int,
    ) -> Tensor:
        q, k, v = (_with_whole_rows(one) for one in (q, k, v))
        ctx.save_for_backward(q, k, v, position_bias, time_bias, times)
        ctx.layout, ctx.max_length = layout, max_length
        return forward(Inputs(q, k, v, position_bias, time_bias, times, layout, max_length))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias, times = ctx.saved_tensors
        inputs = Inputs(q, k, v, position_bias, time_bias, times, ctx.layout, ctx.max_length)
        grad = grad.contiguous()
        q_grad, *bias_grads = backward_queries(inputs, grad)
        return q_grad, *backward_keys(inputs, grad), *bias_grads, None, None, None


def _with_whole_rows(values: Tensor) -> Tensor:
    """Return values with the heads of a row one behind the other; rows may be apart."""
    is_whole = values.stride(2) == 1 and values.stride(1) == values.shape[2]
    return values if is_whole else values.contiguous()


def forward(inputs: Inputs) -> Tensor:
    """Compute the attention, [total, heads, width of v]; zeros in spare rows, as in all gradients."""
    out = torch.zeros(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    tile = inputs.tile("forward")
    blocks = inputs.layout.blocks(tile.own)
    _forward[(len(blocks) * inputs.q.shape[1],)](
        *inputs.arguments(), blocks, out, out.stride(0), **inputs.constants(), ROWS=tile.own, COLUMNS=tile.step,
        num_warps=tile.warps, num_stages=tile.stages)
    return out


def backward_keys(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of k and v."""
    k_grad, v_grad = (torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in (inputs.k, inputs.v))
    tile = inputs.tile("keys")
    blocks = inputs.layout.blocks(tile.own)
    _backward_keys[(len(blocks) * inputs.q.shape[1],)](
        *inputs.arguments(), blocks, grad, k_grad, v_grad, grad.stride(0), k_grad.stride(0), v_grad.stride(0),
        **inputs.constants(), ROWS=tile.step, COLUMNS=tile.own, num_warps=tile.warps, num_stages=tile.stages)
    return k_grad, v_grad


def backward_queries(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of q, of the position bias [max_length] and of the time bias [buckets]."""
    q_grad = torch.zeros(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    tile = inputs.tile("queries" if inputs.position_bias is None else "square")
    blocks = inputs.layout.blocks(tile.own)
    num_programs = len(blocks) * inputs.q.shape[1]
    num_buckets = 0 if inputs.time_bias is None else len(inputs.time_bias)
    num_distances = 0 if inputs.position_bias is None else triton.cdiv(inputs.max_length, tile.own) * tile.own
    # Zero where a program has no rows so far apart, or nothing to do.
    position_sums = torch.zeros((num_programs, num_distances), device=grad.device)
    time_sums = torch.zeros((num_programs, triton.next_power_of_2(num_buckets)), device=grad.device)
    _backward_queries[(num_programs,)](
        *inputs.arguments(), blocks, grad, q_grad, position_sums, time_sums, grad.stride(0), q_grad.stride(0),
        num_distances, **inputs.constants(), ROWS=tile.own, COLUMNS=tile.step,
        BUCKETS_PADDED=max(1, time_sums.shape[1]), num_warps=tile.warps, num_stages=tile.stages)
    return (q_grad, position_sums.sum(0)[:inputs.max_length] if num_distances else None,
            time_sums.sum(0)[:num_buckets] if num_buckets else None)


@triton.jit
def _forward(
    q, k, v, position_bias, times, time_bias, offsets, q_stride, k_stride, v_stride, scale, share,
    blocks, out, out_stride,
    HEADS: tl.constexpr, Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BUCKETS: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    sample, block = _block(blocks, HEADS)
    if sample < 0:
        return
    start, length = _sample(offsets, sample)
    q += start * q_stride + head * Q_WIDTH
    k += start * k_stride + head * Q_WIDTH
    v += start * v_stride + head * V_WIDTH
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    row_times = _times(times + start, rows, length, BUCKETS)
    queries = _load(q, rows, q_stride, length, Q_WIDTH, Q_PADDED, True)
    total = tl.zeros([ROWS, V_PADDED], tl.float32)
    for column in range(0, first, COLUMNS):
        total = _forward_step(
            total, queries, k, v, position_bias, times + start, time_bias, k_stride, v_stride, scale, rows, row_times,
            column, length, Q_WIDTH, V_WIDTH, Q_PADDED, V_PADDED, BUCKETS, HAS_POSITIONS, IS_FAST, PRECISION, COLUMNS,
            False)
    for column in range(first, tl.minimum(first + ROWS, length), COLUMNS):
        total = _forward_step(
            total, queries, k, v, position_bias, times + start, time_bias, k_stride, v_stride, scale, rows, row_times,
            column, length, Q_WIDTH, V_WIDTH, Q_PADDED, V_PADDED, BUCKETS, HAS_POSITIONS, IS_FAST, PRECISION, COLUMNS,
            True)
    _store(out + start * out_stride + head * V_WIDTH, total * share, rows, out_stride, length, V_WIDTH, V_PADDED)


@triton.jit
def _forward_step(
    total, queries, k, v, position_bias, times, time_bias, k_stride, v_stride, scale, rows, row_times, column, length,
    Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BUCKETS: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    columns = column + tl.arange(0, COLUMNS)
    keys = _load(k, columns, k_stride, length, Q_WIDTH, Q_PADDED, IS_CUT)
    values = _load(v, columns, v_stride, length, V_WIDTH, V_PADDED, IS_CUT)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = _scores(
        products, scale, rows[:, None], columns[None, :], length, position_bias, time_bias, row_times[:, None],
        _times(times, columns, length, BUCKETS)[None, :], BUCKETS, HAS_POSITIONS, IS_FAST, IS_CUT)
    weights = _silu(scores, IS_FAST)
    if IS_CUT:
        weights = tl.where(rows[:, None] >= columns[None, :], weights, 0.0)
    return tl.dot(weights.to(values.dtype), values, total, input_precision=PRECISION)


@triton.jit
def _backward_keys(
    q, k, v, position_bias, times, time_bias, offsets, q_stride, k_stride, v_stride, scale, share,
    blocks, grad, k_grad, v_grad, grad_stride, k_grad_stride, v_grad_stride,
    HEADS: tl.constexpr, Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BUCKETS: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has COLUMNS keys and goes through the rows from the diagonal down. Scores stand on their side: keys
    first, so that they are ready to be multiplied from the left."""
    head = tl.program_id(0) % HEADS
    sample, block = _block(blocks, HEADS)
    if sample < 0:
        return
    start, length = _sample(offsets, sample)
    q += start * q_stride + head * Q_WIDTH
    k += start * k_stride + head * Q_WIDTH
    v += start * v_stride + head * V_WIDTH
    grad += start * grad_stride + head * V_WIDTH
    first = (tl.cdiv(length, COLUMNS) - 1 - block) * COLUMNS  # the first keys have the most rows
    columns = first + tl.arange(0, COLUMNS)
    column_times = _times(times + start, columns, length, BUCKETS)
    keys = _load(k, columns, k_stride, length, Q_WIDTH, Q_PADDED, True)
    values = _load(v, columns, v_stride, length, V_WIDTH, V_PADDED, True)
    k_total = tl.zeros([COLUMNS, Q_PADDED], tl.float32)
    v_total = tl.zeros([COLUMNS, V_PADDED], tl.float32)
    cut_end = tl.minimum(first + COLUMNS, length)
    for row in range(first, cut_end, ROWS):
        k_total, v_total = _backward_keys_step(
            k_total, v_total, keys, values, q, grad, position_bias, times + start, time_bias, q_stride, grad_stride,
            scale, columns, column_times, row, length, Q_WIDTH, V_WIDTH, Q_PADDED, V_PADDED, BUCKETS, HAS_POSITIONS,
            IS_FAST, PRECISION, ROWS, True)
    for row in range(first + COLUMNS, length, ROWS):
        k_total, v_total = _backward_keys_step(
            k_total, v_total, keys, values, q, grad, position_bias, times + start, time_bias, q_stride, grad_stride,
            scale, columns, column_times, row, length, Q_WIDTH, V_WIDTH, Q_PADDED, V_PADDED, BUCKETS, HAS_POSITIONS,
            IS_FAST, PRECISION, ROWS, False)
    _store(k_grad + start * k_grad_stride + head * Q_WIDTH, k_total * (scale * share), columns, k_grad_stride, length,
           Q_WIDTH, Q_PADDED)
    _store(v_grad + start * v_grad_stride + head * V_WIDTH, v_total * share, columns, v_grad_stride, length,
           V_WIDTH, V_PADDED)


@triton.jit
def _backward_keys_step(
    k_total, v_total, keys, values, q, grad, position_bias, times, time_bias, q_stride, grad_stride, scale, columns,
    column_times, row, length,
    Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BUCKETS: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, ROWS)
    queries = _load(q, rows, q_stride, length, Q_WIDTH, Q_PADDED, True)
    grads = _load(grad, rows, grad_stride, length, V_WIDTH, V_PADDED, True)  # zero behind the last row
    products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    scores = _scores(
        products, scale, rows[None, :], columns[:, None], length, position_bias, time_bias,
        _times(times, rows, length, BUCKETS)[None, :], column_times[:, None], BUCKETS, HAS_POSITIONS, IS_FAST, IS_CUT)
    weights, slopes = _silu_and_slope(scores, IS_FAST)
    if IS_CUT:
        is_seen = rows[None, :] >= columns[:, None]
        weights = tl.where(is_seen, weights, 0.0)
        slopes = tl.where(is_seen, slopes, 0.0)
    v_total = tl.dot(weights.to(grads.dtype), grads, v_total, input_precision=PRECISION)
    slopes = slopes * tl.dot(values, tl.trans(grads), input_precision=PRECISION)
    return tl.dot(slopes.to(queries.dtype), queries, k_total, input_precision=PRECISION), v_total


@triton.jit
def _backward_queries(
    q, k, v, position_bias, times, time_bias, offsets, q_stride, k_stride, v_stride, scale, share,
    blocks, grad, q_grad, position_sums, time_sums, grad_stride, q_grad_stride, sums_stride,
    HEADS: tl.constexpr, Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BUCKETS: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BUCKETS_PADDED: tl.constexpr,
):  # fmt: skip
    """Blocks are square where there is a position bias. Each program has sums of its own for the biases."""
    head = tl.program_id(0) % HEADS
    sample, block = _block(blocks, HEADS)
    if sample < 0:
        return
    start, length = _sample(offsets, sample)
    q += start * q_stride + head * Q_WIDTH
    k += start * k_stride + head * Q_WIDTH
    v += start * v_stride + head * V_WIDTH
    grad += start * grad_stride + head * V_WIDTH
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    row_times = _times(times + start, rows, length, BUCKETS)
    queries = _load(q, rows, q_stride, length, Q_WIDTH, Q_PADDED, True)
    grads = _load(grad, rows, grad_stride, length, V_WIDTH, V_PADDED, True)
    total = tl.zeros([ROWS, Q_PADDED], tl.float32)
    position_sums += tl.program_id(0).to(tl.int64) * sums_stride
    carried = tl.zeros([COLUMNS], tl.float32)
    time_total = tl.zeros([BUCKETS_PADDED], tl.float32)
    for column in range(0, first, COLUMNS):
        keys, slopes = _slopes(
            queries, grads, k, v, position_bias, times + start, time_bias, k_stride, v_stride, scale, rows, row_times,
            column, length, Q_WIDTH, V_WIDTH, Q_PADDED, V_PADDED, BUCKETS, HAS_POSITIONS, IS_FAST, PRECISION, COLUMNS,
            False)
        total = tl.dot(slopes.to(keys.dtype), keys, total, input_precision=PRECISION)
        if HAS_POSITIONS:
            carried = _add_positions(slopes, carried, position_sums + (first - column), share, COLUMNS)
        time_total = _add_times(slopes, time_total, times + start, row_times, column, length, BUCKETS, BUCKETS_PADDED,
                                COLUMNS)
    for column in range(first, tl.minimum(first + ROWS, length), COLUMNS):
        keys, slopes = _slopes(
            queries, grads, k, v, position_bias, times + start, time_bias, k_stride, v_stride, scale, rows, row_times,
            column, length, Q_WIDTH, V_WIDTH, Q_PADDED, V_PADDED, BUCKETS, HAS_POSITIONS, IS_FAST, PRECISION, COLUMNS,
            True)
        total = tl.dot(slopes.to(keys.dtype), keys, total, input_precision=PRECISION)
        if HAS_POSITIONS:
            carried = _add_positions(slopes, carried, position_sums + (first - column), share, COLUMNS)
        time_total = _add_times(slopes, time_total, times + start, row_times, column, length, BUCKETS, BUCKETS_PADDED,
                                COLUMNS)
    _store(q_grad + start * q_grad_stride + head * Q_WIDTH, total * (scale * share), rows, q_grad_stride, length,
           Q_WIDTH, Q_PADDED)
    if BUCKETS > 0:
        tl.store(time_sums + tl.program_id(0) * BUCKETS_PADDED + tl.arange(0, BUCKETS_PADDED), time_total * share)


@triton.jit
def _add_positions(slopes, carried, sums, share, SIZE: tl.constexpr):
    """Write the sums of a square block's diagonals from the main one down, with what the block before gave to them.

    Returns those above the main one, which continue in the block behind.
    """
    within = tl.arange(0, SIZE)
    # Column c of each row i becomes what was in column i − c, or from the right end: a diagonal becomes a column.
    turned = tl.gather(slopes, (within[:, None] - within[None, :]) & (SIZE - 1), axis=1)
    is_below = within[:, None] >= within[None, :]
    below = tl.sum(tl.where(is_below, turned, 0.0), axis=0)
    tl.store(sums + within, (below + carried) * share)
    return tl.sum(tl.where(is_below, 0.0, turned), axis=0)


@triton.jit
def _add_times(
    slopes, time_total, times, row_times, column, length, BUCKETS: tl.constexpr, BUCKETS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if BUCKETS > 0:
        column_times = _times(times, column + tl.arange(0, COLUMNS), length, BUCKETS)
        found = _buckets(row_times[:, None] - column_times[None, :], BUCKETS)
        for bucket in range(tl.min(found), tl.max(found) + 1):  # few, but near the diagonal
            of_bucket = tl.sum(tl.where(found == bucket, slopes, 0.0))
            time_total += tl.where(tl.arange(0, BUCKETS_PADDED) == bucket, of_bucket, 0.0)
    return time_total


@triton.jit
def _slopes(
    queries, grads, k, v, position_bias, times, time_bias, k_stride, v_stride, scale, rows, row_times, column, length,
    Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BUCKETS: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    """Return the keys of a block, and the gradients of its scores times max_length."""
    columns = column + tl.arange(0, COLUMNS)
    keys = _load(k, columns, k_stride, length, Q_WIDTH, Q_PADDED, IS_CUT)
    values = _load(v, columns, v_stride, length, V_WIDTH, V_PADDED, IS_CUT)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = _scores(
        products, scale, rows[:, None], columns[None, :], length, position_bias, time_bias, row_times[:, None],
        _times(times, columns, length, BUCKETS)[None, :], BUCKETS, HAS_POSITIONS, IS_FAST, IS_CUT)
    _, slopes = _silu_and_slope(scores, IS_FAST)
    if IS_CUT:
        slopes = tl.where(rows[:, None] >= columns[None, :], slopes, 0.0)
    return keys, slopes * tl.dot(grads, tl.trans(values), input_precision=PRECISION)


@triton.jit
def _block(blocks, HEADS: tl.constexpr):
    """Return the sample, or -1, and which of its blocks the program has."""
    at = blocks + tl.program_id(0) // HEADS * 2
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _sample(offsets, sample):
    """Return a sample's first row and its number of rows."""
    start = tl.load(offsets + sample).to(tl.int64)
    return start, (tl.load(offsets + sample + 1).to(tl.int64) - start).to(tl.int32)


@triton.jit
def _load(at, rows, stride, length, WIDTH: tl.constexpr, PADDED: tl.constexpr, IS_CUT: tl.constexpr):
    """Load [rows, PADDED], with zeros behind the last row, if rows may lie there, and behind the last column."""
    columns = tl.arange(0, PADDED)
    where = at + rows[:, None] * stride + columns[None, :]
    if IS_CUT and WIDTH != PADDED:
        return tl.load(where, mask=(rows < length)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif IS_CUT:
        return tl.load(where, mask=(rows < length)[:, None], other=0.0)
    elif WIDTH != PADDED:
        return tl.load(where, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def _store(at, values, rows, stride, length, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    mask = (rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at + rows[:, None] * stride + columns[None, :], values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _times(times, rows, length, BUCKETS: tl.constexpr):
    if BUCKETS > 0:
        return tl.load(times + rows, mask=rows < length, other=0).to(tl.int64)
    else:
        return rows


@triton.jit
def _scores(
    products, scale, rows, columns, length, position_bias, time_bias, row_times, column_times, BUCKETS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, IS_CUT: tl.constexpr,
):
    scores = products * scale
    if HAS_POSITIONS:
        distances = tl.minimum(rows, length - 1) - columns
        if IS_CUT:
            distances = tl.maximum(distances, 0)
        scores += _bias(position_bias, distances, IS_FAST)
    if BUCKETS > 0:
        scores += _bias(time_bias, _buckets(row_times - column_times, BUCKETS), IS_FAST)
    return scores


@triton.jit
def _bias(values, index, IS_FAST: tl.constexpr):
    if IS_FAST:
        # As a load, Triton would bring it through shared memory, stage by stage, into the layout of the products.
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [(values + index).to(tl.int64)],
                                         dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.load(values + index)


@triton.jit
def _buckets(difference, BUCKETS: tl.constexpr):
    """Compute `time_bucket`: the exponent of 1 + |difference|."""
    bits = (1.0 + tl.abs(difference).to(tl.float32)).to(tl.int32, bitcast=True)
    return tl.minimum((bits >> 23) - 127, BUCKETS - 1)


@triton.jit
def _silu(x, IS_FAST: tl.constexpr):
    if IS_FAST:
        half = 0.5 * x
        return half + half * _tanh(half)
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_and_slope(x, IS_FAST: tl.constexpr):
    if IS_FAST:
        half = 0.5 * x
        tanh = _tanh(half)
        return half + half * tanh, 0.5 + 0.5 * (tanh + half * (1.0 - tanh * tanh))
    else:
        share = 1.0 / (1.0 + tl.exp(-x))
        return x * share, share * (1.0 + x * (1.0 - share))


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

"""Triton kernels of HSTU's causal attention over jagged sequences, forward and backward.

A program has a block of rows of one sample and one head. It computes only the blocks that the causal mask leaves, and
no padding. The backward pass keeps the gradients of all scores: a first kernel computes them with those of k and v, a
second one multiplies them by k, and a third one sums them for the biases. Nothing is added up by atomics and no block
size is chosen by timing, so that a run repeats to the bit.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from .jagged import JaggedLayout

PAD = 127
"""Zeros around a position bias: a block of rows and one of columns are no further beyond its ends. An odd number: of an
even one less a range of columns Triton assumes that it is aligned."""
LANES = 32
"""As many time buckets can a warp look up, one in each lane."""
PARTS = 4
"""Programs that share the sums of a sample's distances."""
MAX_SCORES = 2**31
"""Gradients of scores that are kept at a time, if not one head's are more; heads that do not fit follow."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a kernel: rows (or columns) of a program, those that it takes at a time, warps and stages."""

    own: int
    step: int
    warps: int
    stages: int
    tma: bool = False


BF16 = {"forward": Tile(64, 32, 4, 3, True), "keys": Tile(64, 64, 4, 2, True), "queries": Tile(128, 64, 4, 3),
        "sums": Tile(32, 32, 1, 1)}
FP32 = {"forward": Tile(64, 32, 4, 2), "keys": Tile(32, 32, 4, 2), "queries": Tile(32, 32, 4, 2),
        "sums": Tile(32, 16, 1, 1)}


class Inputs:
    """Inputs of one attention, as kernels take them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time_bias: Tensor | None,
                 times: Tensor | None, layout: JaggedLayout, max_length: int) -> None:
        self.q, self.k, self.v = (_with_whole_rows(one) for one in (q, k, v))
        self.layout, self.max_length = layout, max_length
        # The kernels have halves of scores. A bias that is not there is never read.
        self.has_positions, self.num_buckets = position_bias is not None, 0
        self.position_bias = self.time_bias = self.times = q
        if position_bias is not None:  # of keys that do not come behind their query
            self.position_bias = pad(position_bias[max_length - 1:].float() * 0.5, (PAD, PAD))
        if time_bias is not None and times is not None:
            self.num_buckets = len(time_bias)
            # In place 0 bucket 1: a float's exponent is 127 more than its bucket, or 31 modulo 32.
            buckets = ((torch.arange(LANES, device=times.device) + 1) % LANES).clamp_(max=self.num_buckets - 1)
            self.time_bias = time_bias.float()[buckets] * 0.5
            # A difference of two times is exact in fp32, rounded once, as (high − high) · 2²⁰ + (low − low).
            self.times = torch.stack([times >> 20, times & 0xFFFFF], dim=1).float()

    def tile(self, name: str) -> Tile:
        """Return a kernel's tile, no larger than the longest sequence asks for."""
        tile = (BF16 if self.q.element_size() == 2 else FP32)[name]
        longest = max(16, triton.next_power_of_2(self.max_length))
        if longest <= 64:
            return Tile(min(tile.own, longest), min(tile.step, longest), 4, tile.stages)
        # The GPU copies blocks by itself if heads are as wide.
        has_tma = all(one.shape[2] == padded_width(one.shape[2]) for one in (self.q, self.v)) and (
            not self.q.is_cuda or torch.cuda.get_device_capability(self.q.device) >= (9, 0))
        return replace(tile, own=min(tile.own, longest), tma=tile.tma and has_tma)

    def constants(self, num_heads: int) -> dict[str, object]:
        """Return the constants of all kernels that compute scores."""
        q_width, v_width = self.q.shape[2], self.v.shape[2]
        return {
            "HEADS": num_heads, "Q_WIDTH": q_width, "V_WIDTH": v_width,
            "Q_PADDED": padded_width(q_width), "V_PADDED": padded_width(v_width),
            "HAS_TIMES": self.num_buckets > 0, "HAS_POSITIONS": self.has_positions,
            # The hardware's tanh is exact to 11 bits.
            "IS_FAST": self.q.is_cuda and self.q.element_size() == 2, "PRECISION": precision(),
        }


def padded_width(width: int) -> int:
    """Return how wide a head is in registers."""
    return max(16, triton.next_power_of_2(width))


def precision() -> str:
    """Return how products of fp32 are computed."""
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


def described(values: Tensor, rows: int, tile: Tile) -> Any:
    """Return [total, heads, width] as a kernel takes it: a tensor, or a descriptor of blocks of one head's rows."""
    width = values.shape[2]
    if not tile.tma:
        return values
    return TensorDescriptor(values, [len(values), values.shape[1] * width], [values.stride(0), 1], [rows, width])


class TritonAttention(torch.autograd.Function):
    """`hstu_attention` for autograd, without the rest of a block."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        ctx.inputs, out = Inputs(q, k, v, *given), v.new_zeros(v.shape)
        forward(ctx.inputs, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.inputs
        grads = [one.new_zeros(one.shape) for one in (inputs.q, inputs.k, inputs.v)]
        return *grads, *backward(inputs, grad.contiguous(), grads), None, None, None


def _with_whole_rows(values: Tensor) -> Tensor:
    """Return values with the heads of a row one behind the other; rows may be apart."""
    return values if values.stride()[1:] == (values.shape[2], 1) else values.contiguous()


def forward(inputs: Inputs, out: Tensor) -> None:
    """Compute the attention into `out` [total, heads, width of v], but for rows behind the last sample."""
    tile, num_heads = inputs.tile("forward"), inputs.q.shape[1]
    blocks = inputs.layout.blocks(tile.own)
    _forward[(len(blocks) * num_heads,)](
        described(inputs.q, tile.own, tile), described(inputs.k, tile.step, tile), described(inputs.v, tile.step, tile),
        inputs.q.stride(0), inputs.k.stride(0), inputs.v.stride(0), inputs.position_bias, inputs.times,
        inputs.time_bias, inputs.layout.offsets, inputs.q.shape[2] ** -0.5 / 2, 1.0 / inputs.max_length, blocks, out,
        out.stride(0), **inputs.constants(num_heads), ROWS=tile.own, COLUMNS=tile.step, TMA=tile.tma,
        num_warps=tile.warps, num_stages=tile.stages)


def backward(inputs: Inputs, grad: Tensor, grads: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of q, k and v into `grads`, but for rows behind the last sample; return those of the
    biases."""
    (total, num_heads, q_width), num_samples = inputs.q.shape, len(inputs.layout.offsets) - 1
    q_grad, k_grad, v_grad = grads
    tile, of_queries, of_sums = (inputs.tile(name) for name in ("keys", "queries", "sums"))
    size = tile.own
    offsets = inputs.layout.offsets
    # The scores of a sample are blocks of `size` rows by as many columns, without those that the mask hides.
    num_of_samples = (offsets.diff().long() + (size - 1)) // size
    num_of_samples = num_of_samples * (num_of_samples + 1) // 2
    starts = num_of_samples.cumsum(0) - num_of_samples
    # As many blocks as there can be: how many there are is known to the device alone.
    num_blocks = total * (triton.cdiv(inputs.max_length, size) + 3) // (2 * size) + num_samples
    at_a_time = max(1, min(num_heads, MAX_SCORES // (num_blocks * size * size)))
    scores = torch.empty((at_a_time, num_blocks * size * size), dtype=inputs.q.dtype, device=inputs.q.device)
    has_positions, num_buckets = inputs.has_positions, inputs.num_buckets
    distances = inputs.layout.blocks(of_sums.own)
    position_sums = torch.zeros((num_samples * PARTS, triton.cdiv(inputs.max_length, of_sums.own) * of_sums.own),
                                device=grad.device)
    time_sums = torch.zeros((len(distances) * PARTS, triton.next_power_of_2(max(1, num_buckets))), device=grad.device)
    scale, share = q_width**-0.5 / 2, 1.0 / inputs.max_length
    for head in range(0, num_heads, at_a_time):
        here = min(at_a_time, num_heads - head)
        constants = inputs.constants(here)
        blocks = inputs.layout.blocks(size)
        _backward_keys[(len(blocks) * here,)](
            described(inputs.q, tile.step, tile), described(inputs.k, size, tile), described(inputs.v, size, tile),
            inputs.q.stride(0), inputs.k.stride(0), inputs.v.stride(0), inputs.position_bias, inputs.times,
            inputs.time_bias, offsets, scale, share, blocks, described(grad, tile.step, tile), k_grad, v_grad,
            grad.stride(0), k_grad.stride(0), v_grad.stride(0), scores, starts, scores.stride(0), head,
            **constants, ROWS=tile.step, COLUMNS=size, TMA=tile.tma, num_warps=tile.warps, num_stages=tile.stages)
        blocks = inputs.layout.blocks(of_queries.own)
        _backward_queries[(len(blocks) * here,)](
            inputs.k, inputs.k.stride(0), offsets, scale * share, blocks, q_grad, q_grad.stride(0), scores, starts,
            scores.stride(0), head, HEADS=here, Q_WIDTH=q_width, Q_PADDED=padded_width(q_width),
            PRECISION=precision(), ROWS=of_queries.own, COLUMNS=of_queries.step, SIZE=size,
            num_warps=of_queries.warps, num_stages=of_queries.stages)
        if has_positions or num_buckets:
            _backward_biases[(len(distances) * PARTS,)](
                inputs.times, offsets, share * 0.5, distances, scores, starts, scores.stride(0), position_sums,
                time_sums, position_sums.stride(0), HEADS=here, PARTS=PARTS, BUCKETS=num_buckets,
                BUCKETS_PADDED=time_sums.shape[1], DISTANCES=of_sums.own, COLUMNS=of_sums.step, SIZE=size,
                IS_FAST=constants["IS_FAST"], num_warps=of_sums.warps)
    of_positions = pad(position_sums.sum(0)[:inputs.max_length], (inputs.max_length - 1, 0)) if has_positions else None
    return of_positions, time_sums.sum(0)[:num_buckets] if num_buckets else None


@triton.jit
def _forward(
    q, k, v, q_stride, k_stride, v_stride, position_bias, times, time_bias, offsets, scale, share,
    blocks, out, out_stride,
    HEADS: tl.constexpr, Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    HAS_TIMES: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    sample, block = _block(blocks, HEADS)
    if sample < 0:
        return
    start, length = _sample(offsets, sample)
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    times += start * 2
    if HAS_TIMES:
        row_high, row_low = _times(times, rows, length, IS_FAST, True)
    row_biases = position_bias + 127 + rows.to(tl.int64)
    queries = _load(q, start, head, first, length, q_stride, Q_WIDTH, Q_PADDED, ROWS, True, TMA)
    total = tl.zeros([ROWS, V_PADDED], tl.float32)
    for is_cut in tl.static_range(2):
        begin, end = 0, first
        if is_cut:
            begin, end = first, tl.minimum(first + ROWS, length)
        for column in range(begin, end, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            keys = _load(k, start, head, column, length, k_stride, Q_WIDTH, Q_PADDED, COLUMNS, is_cut, TMA)
            values = _load(v, start, head, column, length, v_stride, V_WIDTH, V_PADDED, COLUMNS, is_cut, TMA)
            halves = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            if HAS_POSITIONS:
                halves += _read(row_biases[:, None] - columns.to(tl.int64)[None, :], IS_FAST)
            if HAS_TIMES:
                high, low = _times(times, columns, length, IS_FAST, is_cut)
                halves += _of_bucket(time_bias, row_high[:, None] - high[None, :], row_low[:, None] - low[None, :],
                                     IS_FAST)
            weights, _ = _silu_and_slope(halves, IS_FAST)
            if is_cut:
                weights = tl.where(rows[:, None] >= columns[None, :], weights, 0.0)
            total = tl.dot(weights.to(values.dtype), values, total, input_precision=PRECISION)
    _store(out + start * out_stride + head * V_WIDTH, total * share, rows, out_stride, length, V_WIDTH, V_PADDED)


@triton.jit
def _backward_keys(
    q, k, v, q_stride, k_stride, v_stride, position_bias, times, time_bias, offsets, scale, share,
    blocks, grad, k_grad, v_grad, grad_stride, k_grad_stride, v_grad_stride, scores, starts, scores_stride, first_head,
    HEADS: tl.constexpr, Q_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    HAS_TIMES: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A program has COLUMNS keys and goes through the rows from the diagonal down. Scores stand on their side: keys
    first, so that they are ready to be multiplied from the left."""
    head = first_head + tl.program_id(0) % HEADS
    sample, block = _block(blocks, HEADS)
    if sample < 0:
        return
    start, length = _sample(offsets, sample)
    scores += (head - first_head).to(tl.int64) * scores_stride
    block = tl.cdiv(length, COLUMNS) - 1 - block  # the first keys have the most rows
    scores, pitch = _block_of_scores(scores, starts, sample, block, length, COLUMNS)
    first = block * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    times += start * 2
    if HAS_TIMES:
        column_high, column_low = _times(times, columns, length, IS_FAST, True)
    column_biases = position_bias + 127 - columns.to(tl.int64)
    keys = _load(k, start, head, first, length, k_stride, Q_WIDTH, Q_PADDED, COLUMNS, True, TMA)
    values = _load(v, start, head, first, length, v_stride, V_WIDTH, V_PADDED, COLUMNS, True, TMA)
    k_total = tl.zeros([COLUMNS, Q_PADDED], tl.float32)
    v_total = tl.zeros([COLUMNS, V_PADDED], tl.float32)
    # Rows on the diagonal, then those of the last block, which may be cut, then all between.
    cut_end = first + tl.cdiv(tl.minimum(COLUMNS, length - first), ROWS) * ROWS
    whole_end = first + COLUMNS + tl.maximum(0, length - first - COLUMNS) // ROWS * ROWS
    for is_cut in tl.static_range(1, -1, -1):
        begin, end = first + COLUMNS, whole_end
        if is_cut:
            begin, end = first, cut_end + (whole_end < length).to(tl.int32) * ROWS
        for at in range(begin, end, ROWS):
            row = at
            if is_cut:
                row = tl.where(at < cut_end, at, whole_end)
            rows = row + tl.arange(0, ROWS)
            queries = _load(q, start, head, row, length, q_stride, Q_WIDTH, Q_PADDED, ROWS, is_cut, TMA)
            grads = _load(grad, start, head, row, length, grad_stride, V_WIDTH, V_PADDED, ROWS, is_cut, TMA)
            halves = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale
            others = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
            if HAS_POSITIONS:
                halves += _read(column_biases[:, None] + rows.to(tl.int64)[None, :], IS_FAST)
            if HAS_TIMES:
                high, low = _times(times, rows, length, IS_FAST, is_cut)
                halves += _of_bucket(time_bias, column_high[:, None] - high[None, :],
                                     column_low[:, None] - low[None, :], IS_FAST)
            weights, slopes = _silu_and_slope(halves, IS_FAST)
            if is_cut:
                is_seen = (rows[None, :] >= columns[:, None]) & (rows < length)[None, :]
                weights = tl.where(is_seen, weights, 0.0)
                slopes = tl.where(is_seen, slopes, 0.0)
            v_total = tl.dot(weights.to(grads.dtype), grads, v_total, input_precision=PRECISION)
            slopes *= others
            slopes = slopes.to(queries.dtype)
            tl.store(scores + (row - first) + tl.arange(0, COLUMNS)[:, None] * pitch + tl.arange(0, ROWS)[None, :],
                     slopes)
            k_total = tl.dot(slopes, queries, k_total, input_precision=PRECISION)
    _store(k_grad + start * k_grad_stride + head * Q_WIDTH, k_total * (scale * share), columns, k_grad_stride, length,
           Q_WIDTH, Q_PADDED)
    _store(v_grad + start * v_grad_stride + head * V_WIDTH, v_total * share, columns, v_grad_stride, length,
           V_WIDTH, V_PADDED)


@triton.jit
def _backward_queries(
    k, k_stride, offsets, scale, blocks, q_grad, q_grad_stride, scores, starts, scores_stride, first_head,
    HEADS: tl.constexpr, Q_WIDTH: tl.constexpr, Q_PADDED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Multiply the gradients of scores by k."""
    head = first_head + tl.program_id(0) % HEADS
    sample, block = _block(blocks, HEADS)
    if sample < 0:
        return
    start, length = _sample(offsets, sample)
    scores += (head - first_head).to(tl.int64) * scores_stride
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, Q_PADDED], tl.float32)
    for column in range(0, tl.minimum(first + ROWS, length), COLUMNS):
        keys = _load(k, start, head, column, length, k_stride, Q_WIDTH, Q_PADDED, COLUMNS, True, False)
        at, pitch = _block_of_scores(scores, starts, sample, column // SIZE, length, SIZE)
        places = column % SIZE + tl.arange(0, COLUMNS)
        of_rows = first - column // SIZE * SIZE + tl.arange(0, ROWS)
        slopes = tl.load(at + places[:, None] * pitch + of_rows[None, :], mask=(of_rows >= 0)[None, :], other=0.0)
        total = tl.dot(tl.trans(slopes), keys, total, input_precision=PRECISION)
    _store(q_grad + start * q_grad_stride + head * Q_WIDTH, total * scale, rows, q_grad_stride, length, Q_WIDTH,
           Q_PADDED)


@triton.jit
def _backward_biases(
    times, offsets, share, blocks, scores, starts, scores_stride, position_sums, time_sums, sums_stride,
    HEADS: tl.constexpr, PARTS: tl.constexpr, BUCKETS: tl.constexpr, BUCKETS_PADDED: tl.constexpr,
    DISTANCES: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, IS_FAST: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of scores by distance and by bucket. A program has DISTANCES of one sample, all heads, and
    every PARTS-th block of columns."""
    part = tl.program_id(0) % PARTS
    sample, block = _block(blocks, PARTS)
    if sample < 0:
        return
    start, length = _sample(offsets, sample)
    times += start * 2
    first = (tl.cdiv(length, DISTANCES) - 1 - block) * DISTANCES
    distances = first + tl.arange(0, DISTANCES)
    position_total = tl.zeros([DISTANCES], tl.float32)
    buckets = tl.arange(0, BUCKETS_PADDED)
    time_total = tl.zeros([BUCKETS_PADDED], tl.float32)
    for column in range(part * COLUMNS, length - first, PARTS * COLUMNS):
        at, pitch = _block_of_scores(scores, starts, sample, column // SIZE, length, SIZE)
        columns = column + tl.arange(0, COLUMNS)
        rows = columns[:, None] + distances[None, :]
        at += (columns % SIZE)[:, None] * (pitch + 1) + distances[None, :]
        slopes = tl.zeros([COLUMNS, DISTANCES], tl.float32)
        for head in tl.static_range(HEADS):
            slopes += tl.load(at + head * scores_stride, mask=rows < length, other=0.0)
        position_total += tl.sum(slopes, axis=0)
        if BUCKETS > 0:
            row_high, row_low = _times(times, rows, length, IS_FAST, True)
            high, low = _times(times, columns, length, IS_FAST, True)
            found = tl.minimum(_exponents(row_high - high[:, None], row_low - low[:, None]), BUCKETS - 1)
            for bucket in range(tl.min(found), tl.max(found) + 1):  # few, but for the smallest distances
                of_bucket = tl.sum(tl.where(found == bucket, slopes, 0.0))
                time_total += tl.where(buckets == bucket, of_bucket, 0.0)
    sums = position_sums + (sample * PARTS + part).to(tl.int64) * sums_stride + distances
    tl.store(sums, tl.load(sums) + position_total * share)
    if BUCKETS > 0:
        sums = time_sums + tl.program_id(0) * BUCKETS_PADDED + buckets
        tl.store(sums, tl.load(sums) + time_total * share)


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
def _block_of_scores(scores, starts, sample, block, length, SIZE: tl.constexpr):
    """Return where the scores of a block of keys begin, for rows from it down, and how far keys are apart."""
    num = tl.cdiv(length, SIZE)
    before = tl.load(starts + sample) + (block * num - block * (block - 1) // 2)
    return scores + before * (SIZE * SIZE), (num - block) * SIZE


@triton.jit
def _load(at, start, head, first, length, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
          IS_CUT: tl.constexpr, TMA: tl.constexpr):
    """Load [ROWS, PADDED] of a sample and head. Behind the last row there are zeros if rows may lie there (`IS_CUT`),
    or with TMA those of the next sample."""
    if TMA:
        return at.load([start.to(tl.int32) + first, head * WIDTH])
    else:
        rows, columns = first + tl.arange(0, ROWS), tl.arange(0, PADDED)
        where = at + start * stride + head * WIDTH + rows[:, None] * stride + columns[None, :]
        if IS_CUT or WIDTH != PADDED:
            return tl.load(where, mask=(rows < length)[:, None] & (columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(where)


@triton.jit
def _store(at, values, rows, stride, length, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    mask = (rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at + rows[:, None] * stride + columns[None, :], values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _times(times, rows, length, IS_FAST: tl.constexpr, IS_CUT: tl.constexpr):
    """Load the two parts of rows' times."""
    if IS_CUT:
        rows = tl.minimum(rows, length - 1)
    at = times + rows.to(tl.int64) * 2
    if IS_FAST:
        return tl.inline_asm_elementwise("ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [at.to(tl.int64)],
                                         dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
    else:
        return tl.load(at), tl.load(at + 1)


@triton.jit
def _read(at, IS_FAST: tl.constexpr):
    if IS_FAST:
        # As a load, Triton would bring it through shared memory, stage by stage, into the layout of the products.
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32,
                                         is_pure=True, pack=1)
    else:
        return tl.load(at)


@triton.jit
def _of_bucket(time_bias, high, low, IS_FAST: tl.constexpr):
    """Read the bias of a difference of times."""
    if IS_FAST:
        # Each lane of a warp holds one of the table's values; a lane asks another one for the value that it needs.
        apart = 1.0 + tl.abs(tl.fma(high, 1048576.0, low))
        table = tl.inline_asm_elementwise(
            "{ .reg .b32 l; .reg .b64 a; mov.u32 l, %laneid; mad.wide.u32 a, l, 4, $1; ld.global.nc.f32 $0, [a]; }",
            "=f,l", [time_bias.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 e; shr.u32 e, $1, 23; min.u32 e, e, 158; shfl.sync.idx.b32 $0, $2, e, 31, -1; }",
            "=f,f,f", [apart, table], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.load(time_bias + ((tl.minimum(_exponents(high, low), 31) + 31) & 31))


@triton.jit
def _exponents(high, low):
    """Compute `time_bucket` of a difference, but for the last bucket's limit: the exponent of 1 + |difference|."""
    bits = (1.0 + tl.abs(tl.fma(high, 1048576.0, low))).to(tl.int32, bitcast=True)
    return (bits >> 23) - 127


@triton.jit
def _silu_and_slope(halves, IS_FAST: tl.constexpr):
    """Compute SiLU of twice the values, and twice its slope."""
    if IS_FAST:
        tanh = _tanh(halves)
        return tl.fma(halves, tanh, halves), tl.fma(halves, tl.fma(-tanh, tanh, 1.0), 1.0 + tanh)
    else:
        share = 1.0 / (1.0 + tl.exp(-2.0 * halves))
        return 2.0 * halves * share, 2.0 * share * (1.0 + 2.0 * halves * (1.0 - share))


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

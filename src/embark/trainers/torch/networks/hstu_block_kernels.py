"""A block of HSTU on a GPU: Triton kernels for all that is not a product of matrices, forward and backward.

Each kernel reads and writes a row once. Rows behind the last sample are zeros, and so are their gradients. Sums over
rows are those of a fixed number of programs, added up in a fixed order, so that a run repeats to the bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from . import hstu_kernels
from .hstu_kernels import Inputs
from .jagged import JaggedLayout
from .layers import RowDropout

ROWS, COLUMNS = 4, 512
NUM_PROGRAMS = 1024
"""Programs that sum over rows, each over its part of them."""


class NormedRows(torch.autograd.Function):
    """Normalize rows into `dtype`, and return the rows themselves, whose gradients are added in the same pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, end: Tensor,
                ) -> tuple[Tensor, Tensor]:
        values = values.contiguous()
        out, moments = norm(values, weight, bias, eps, None, dtype, end)
        ctx.save_for_backward(values, weight, bias, moments, end)
        return out, values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_rows: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias, moments, end = ctx.saved_tensors
        found = torch.empty_like(values)
        sums = norm_backward(values, weight, bias, None, grad, moments, end, found, of_rows.contiguous())
        return found, *sums, None, None, None


class GatedAttention(torch.autograd.Function):
    """Compute u times the normalized attention, from u, v, q and k before their bias and SiLU."""

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, raw_bias: Tensor, weight: Tensor, bias: Tensor, position_bias: Tensor,
        time_bias: Tensor | None, eps: float, times: Tensor | None, layout: JaggedLayout, num_heads: int,
    ) -> Tensor:
        active, end = torch.empty_like(raw), layout.offsets[-1:]
        elementwise(raw, raw_bias, raw, active, end, None)
        u, *vqk = active.chunk(4, dim=1)
        v, q, k = (one.unflatten(1, (num_heads, -1)) for one in vqk)
        max_length = len(position_bias) // 2 + 1
        inputs = Inputs(q, k, v, position_bias, time_bias, times, layout, max_length)
        attended = torch.empty_like(u, memory_format=torch.contiguous_format)
        hstu_kernels.forward(inputs, attended.unflatten(1, (num_heads, -1)))
        out, moments = norm(attended, weight, bias, eps, u, raw.dtype, end)
        ctx.save_for_backward(raw, raw_bias, u, attended, weight, bias, moments)
        ctx.inputs = inputs
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raw, raw_bias, u, attended, weight, bias, moments = ctx.saved_tensors
        inputs, end = ctx.inputs, ctx.inputs.layout.offsets[-1:]
        of_raw, of_attended = torch.empty_like(raw), torch.empty_like(attended)
        of_u, *of_vqk = of_raw.chunk(4, dim=1)
        sums = norm_backward(attended, weight, bias, u, grad, moments, end, of_attended, of_u)
        of_v, of_q, of_k, given = (one.unflatten(1, (inputs.q.shape[1], -1)) for one in (*of_vqk, of_attended))
        of_biases = hstu_kernels.backward(inputs, given, [of_q, of_k, of_v])
        of_bias = elementwise(raw, raw_bias, of_raw, of_raw, end, None, is_backward=True)
        return of_raw, of_bias, *sums, *of_biases, None, None, None, None


class AddDropped(torch.autograd.Function):
    """Add a layer's output, with its bias and dropout, to rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, added: Tensor, bias: Tensor, end: Tensor, dropout: RowDropout) -> Tensor:
        out = torch.empty_like(rows)
        elementwise(added, bias, rows, out, end, dropout)
        ctx.save_for_backward(bias, end)
        ctx.dropout, ctx.dtype = dropout, added.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias, end = ctx.saved_tensors
        grad = grad.contiguous()
        of_added = torch.empty_like(grad, dtype=ctx.dtype)
        return grad, of_added, elementwise(grad, bias, grad, of_added, end, ctx.dropout, is_backward=True), None, None


def fused_block(block: Any, values: Tensor, times: Tensor | None, layout: JaggedLayout, dropout: RowDropout) -> Tensor:
    """Compute an `HSTUBlock`."""
    device, end = values.device.type, layout.offsets[-1:]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype
    norm, gated_norm = block.norm, block.attended_norm
    normed, values = NormedRows.apply(values, norm.weight, norm.bias, norm.eps, dtype, end)
    gated = GatedAttention.apply(
        linear(normed, block.uvqk.weight), block.uvqk.bias, gated_norm.weight, gated_norm.bias, block.position_bias,
        None if times is None else block.time_bias, gated_norm.eps, times, layout, block.num_heads)
    found: Tensor = AddDropped.apply(values, linear(gated, block.out.weight), block.out.bias, end, dropout)
    return found


def norm(values: Tensor, weight: Tensor, bias: Tensor, eps: float, gate: Tensor | None, dtype: torch.dtype, end: Tensor,
         ) -> tuple[Tensor, Tensor]:
    """Normalize rows, and multiply them by a gate; return their means and scales too."""
    total, width = values.shape
    out, moments = torch.empty_like(values, dtype=dtype), torch.empty((2, total), device=values.device)
    given = values if gate is None else gate
    _norm[(triton.cdiv(total, ROWS),)](
        values, weight, bias, given, out, moments, end, total, eps, given.stride(0), WIDTH=width,
        PADDED=triton.next_power_of_2(width), ROWS=ROWS, HAS_GATE=gate is not None)
    return out, moments


def norm_backward(
    values: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None, grad: Tensor, moments: Tensor, end: Tensor,
    values_grad: Tensor, beside: Tensor,
) -> Tensor:
    """Compute the gradients of `norm`, those of the rows into `values_grad`; return those of weight and bias, [2,
    width]. With a gate its gradient is written `beside`; without one, what is `beside` is added to that of the rows."""
    total, width = values.shape
    num_programs = min(NUM_PROGRAMS, triton.cdiv(total, ROWS))
    sums = torch.empty((num_programs, 2, width), device=values.device)
    given = values if gate is None else gate
    _norm_backward[(num_programs,)](
        values, weight, bias, given, grad.contiguous(), moments, end, total, values_grad, beside, sums, given.stride(0),
        beside.stride(0), WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=ROWS, HAS_GATE=gate is not None)
    return sums.sum(0)


def elementwise(
    values: Tensor, bias: Tensor, other: Tensor, out: Tensor, end: Tensor, dropout: RowDropout | None, *,
    is_backward: bool = False,
) -> Tensor:
    """Compute SiLU of values and bias, or with a `dropout` the sum of `other` and what it leaves of values and bias.

    Backward, SiLU's slope times `other`, or what the dropout leaves of values. Return the sums of columns then.
    """
    total, width = values.shape
    grid = min(NUM_PROGRAMS, triton.cdiv(total, ROWS)), triton.cdiv(width, COLUMNS)
    sums = torch.empty((grid[0], width), device=values.device)
    share, key, numbers = dropout or RowDropout(0.0, 0, end)
    _elementwise[grid](
        values, bias, other, out, sums, end, numbers, key, round(share * 2**32) - 2**31, 1 / (1 - share), total, width,
        ROWS=ROWS, COLUMNS=COLUMNS, IS_SILU=dropout is None, IS_BACKWARD=is_backward, DROPS=share > 0,
        HAS_KEY=isinstance(key, Tensor))
    return sums.sum(0) if is_backward else sums


@triton.jit(do_not_specialize=("total",))  # which differ from batch to batch
def _norm(
    values, weight, bias, gate, out, moments, end, total, eps, gate_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_column = columns < WIDTH
    mask = (rows < tl.load(end))[:, None] & is_column[None, :]
    places = rows.to(tl.int64)[:, None]
    x = tl.load(values + places * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / WIDTH
    apart = tl.where(mask, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(apart * apart, axis=1) / WIDTH + eps)
    found = apart * scale[:, None] * tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    found += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    if HAS_GATE:
        found *= tl.load(gate + places * gate_stride + columns[None, :], mask=mask, other=0.0)
    tl.store(out + places * WIDTH + columns[None, :], tl.where(mask, found, 0.0).to(out.dtype.element_ty),
             mask=(rows < total)[:, None] & is_column[None, :])
    tl.store(moments + rows, mean, mask=rows < total)
    tl.store(moments + total + rows, scale, mask=rows < total)


@triton.jit(do_not_specialize=("total",))  # which differ from batch to batch
def _norm_backward(
    values, weight, bias, gate, grad, moments, end, total, values_grad, beside, sums, gate_stride, beside_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PADDED)
    is_column = columns < WIDTH
    by = tl.load(weight + columns, mask=is_column, other=0.0)[None, :]
    shift = tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    num_known = tl.load(end)
    weight_total = tl.zeros([ROWS, PADDED], tl.float32)
    bias_total = tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < num_known)[:, None] & is_column[None, :]
        is_stored = (rows < total)[:, None] & is_column[None, :]
        places = rows.to(tl.int64)[:, None]
        mean = tl.load(moments + rows, mask=rows < total)[:, None]
        scale = tl.load(moments + total + rows, mask=rows < total)[:, None]
        x = tl.load(values + places * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        given = tl.load(grad + places * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        normed = tl.where(mask, (x - mean) * scale, 0.0)
        at_beside = beside + places * beside_stride + columns[None, :]
        if HAS_GATE:
            tl.store(at_beside, (given * (normed * by + shift)).to(beside.dtype.element_ty), mask=is_stored)
            given *= tl.load(gate + places * gate_stride + columns[None, :], mask=mask, other=0.0)
        weight_total += given * normed
        bias_total += given
        given *= by
        mean_given, mean_product = tl.sum(given, axis=1) / WIDTH, tl.sum(given * normed, axis=1) / WIDTH
        found = tl.where(mask, scale * (given - mean_given[:, None] - normed * mean_product[:, None]), 0.0)
        if not HAS_GATE:
            found += tl.load(at_beside, mask=mask, other=0.0)
        tl.store(values_grad + places * WIDTH + columns[None, :], found.to(values_grad.dtype.element_ty),
                 mask=is_stored)
    sums += tl.program_id(0) * 2 * WIDTH + columns
    tl.store(sums, tl.sum(weight_total, axis=0), mask=is_column)
    tl.store(sums + WIDTH, tl.sum(bias_total, axis=0), mask=is_column)


@triton.jit(do_not_specialize=("total", "key"))  # which differ from batch to batch
def _elementwise(
    values, bias, other, out, sums, end, numbers, key, least, scale, total, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_SILU: tl.constexpr, IS_BACKWARD: tl.constexpr, DROPS: tl.constexpr,
    HAS_KEY: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_known = tl.load(end)
    shift = tl.load(bias + columns, mask=columns < width, other=0.0)[None, :]
    if HAS_KEY:
        key = tl.load(key)
    sum_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        mask = (rows < num_known)[:, None] & (columns < width)[None, :]
        found = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
        if IS_SILU or not IS_BACKWARD:
            found += shift
        if IS_SILU:
            share = tl.sigmoid(found)
            if IS_BACKWARD:
                found = share * (1.0 + found * (1.0 - share)) * tl.load(other + at, mask=mask, other=0.0)
            else:
                found *= share
        if DROPS:
            of_rows = _mix(_mix(tl.load(numbers + rows, mask=rows < total, other=0)) ^ key).to(tl.int32)
            bits = (of_rows[:, None] ^ _mix((columns + 1).to(tl.int64)).to(tl.int32)[None, :]) * 0x45D9F3B
            found = tl.where((bits ^ (bits >> 15)) * 0x45D9F3B >= least, found * scale, 0.0)  # as drop_rows decides
        if not IS_SILU and not IS_BACKWARD:
            found += tl.load(other + at, mask=mask, other=0.0)
        found = tl.where(mask, found, 0.0)
        sum_total += found
        tl.store(out + at, found.to(out.dtype.element_ty), mask=(rows < total)[:, None] & (columns < width)[None, :])
    if IS_BACKWARD:
        tl.store(sums + tl.program_id(0) * width + columns, tl.sum(sum_total, axis=0), mask=columns < width)


@triton.jit
def _mix(bits):
    bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & 0xFFFFFFFF
    bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & 0xFFFFFFFF
    return (bits >> 16) ^ bits

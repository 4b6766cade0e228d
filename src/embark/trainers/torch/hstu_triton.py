"""HSTU's attention by Triton kernels: how they are cut and started, and what autograd calls."""


from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from embark.trainers.torch import hstu_kernels as kernels
from embark.trainers.torch.jagged import JaggedLayout


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is cut: rows (or columns) of a program, those that it takes at a time, warps and stages."""

    own: int
    step: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of all kernels."""

    forward: Tile
    keys: Tile
    queries: Tile
    square: Tile  # For queries with a position bias: as many rows as columns at a time.


BF16 = Tiles(Tile(64, 64, 4, 3), Tile(128, 32, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))
FP32 = Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one attention. `position_bias` has one value for each distance 0 to max_length − 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    position_bias: Tensor | None
    time_bias: Tensor | None
    times: Tensor | None
    layout: JaggedLayout
    max_length: int

    def tile(self, name: str) -> Tile:
        """No larger than the longest sequence asks for."""
        tile: Tile = getattr(BF16 if self.q.element_size() == 2 else FP32, name)
        longest = max(16, triton.next_power_of_2(self.max_length))
        return Tile(min(tile.own, longest), min(tile.step, longest), tile.warps if longest > 64 else 4, tile.stages)

    def arguments(self) -> tuple[object, ...]:
        """What all kernels take first."""
        nothing = self.q  # In the place of a bias that there is not; never read.
        return (self.q, self.k, self.v, nothing if self.position_bias is None else self.position_bias,
                nothing if self.times is None else self.times, nothing if self.time_bias is None else self.time_bias,
                self.layout.offsets, self.q.stride(0), self.k.stride(0), self.v.stride(0),
                self.q.shape[2] ** -0.5, 1.0 / self.max_length)

    def constants(self) -> dict[str, object]:
        """Of all kernels."""
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
    """Takes what `hstu_attention` takes; the position bias with one value for each distance."""

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
    """The heads of a row one behind the other; rows may be apart."""
    is_whole = values.stride(2) == 1 and values.stride(1) == values.shape[2]
    return values if is_whole else values.contiguous()


def forward(inputs: Inputs) -> Tensor:
    """[total, heads, width of v]."""
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    tile = inputs.tile("forward")
    blocks = inputs.layout.blocks(tile.own)
    kernels.forward[(len(blocks) * inputs.q.shape[1],)](
        *inputs.arguments(), blocks, out, out.stride(0), **inputs.constants(), ROWS=tile.own, COLUMNS=tile.step,
        num_warps=tile.warps, num_stages=tile.stages)
    return out


def backward_keys(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of k and v."""
    k_grad, v_grad = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (inputs.k, inputs.v))
    tile = inputs.tile("keys")
    blocks = inputs.layout.blocks(tile.own)
    kernels.backward_keys[(len(blocks) * inputs.q.shape[1],)](
        *inputs.arguments(), blocks, grad, k_grad, v_grad, grad.stride(0), k_grad.stride(0), v_grad.stride(0),
        **inputs.constants(), ROWS=tile.step, COLUMNS=tile.own, num_warps=tile.warps, num_stages=tile.stages)
    return k_grad, v_grad


def backward_queries(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, of the position bias [max_length] and of the time bias [buckets]."""
    q_grad = torch.empty(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    tile = inputs.tile("queries" if inputs.position_bias is None else "square")
    blocks = inputs.layout.blocks(tile.own)
    num_programs = len(blocks) * inputs.q.shape[1]
    num_buckets = 0 if inputs.time_bias is None else len(inputs.time_bias)
    num_distances = 0 if inputs.position_bias is None else triton.cdiv(inputs.max_length, tile.own) * tile.own
    # Zero where a program has no rows so far apart, or nothing to do.
    position_sums = torch.zeros((num_programs, num_distances), device=grad.device)
    time_sums = torch.zeros((num_programs, triton.next_power_of_2(num_buckets)), device=grad.device)
    kernels.backward_queries[(num_programs,)](
        *inputs.arguments(), blocks, grad, q_grad, position_sums, time_sums, grad.stride(0), q_grad.stride(0),
        num_distances, **inputs.constants(), ROWS=tile.own, COLUMNS=tile.step,
        BUCKETS_PADDED=max(1, time_sums.shape[1]), num_warps=tile.warps, num_stages=tile.stages)
    return (q_grad, position_sums.sum(0)[:inputs.max_length] if num_distances else None,
            time_sums.sum(0)[:num_buckets] if num_buckets else None)

"""Values of all ranks, for losses over the candidates of a global batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(values: Tensor) -> Tensor:
    """Concatenate the values of all ranks, of which each has as many, without gradient."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    sent = values.to(torch.uint8) if values.dtype == torch.bool else values
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, sent.contiguous())
    return torch.cat(parts).to(values.dtype)


def from_all_ranks(values: Tensor) -> Tensor:
    """Concatenate the values of all ranks; the gradient sums what all ranks' losses say of this rank's rows."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    found: Tensor = _AllGather.apply(values)
    return found


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.num = len(values)
        return gathered(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.num : (dist.get_rank() + 1) * ctx.num]

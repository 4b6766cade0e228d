"""Layers in int8 on a CPU. Each row of values has its own scale and each column of weights too, so a score does not
depend on the other rows of its batch, and integers are summed exactly."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

MIN_WIDTH = 128  # Narrower layers take longer in int8: most of their time is not the product.
_LARGEST = 127
_TINY = 1e-30


@cache
def has_int8_products() -> bool:
    """Whether they are faster than float32's: oneDNN on ARM with its dot products of bytes."""
    if not torch.backends.mkldnn.is_available() or not getattr(torch.backends.mkldnn, "is_acl_available", bool)():
        return False
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "asimddp" in cpu.read_text().split()


class Int8Linear(nn.Module):
    """A linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight_scale = weight.abs().amax(dim=1).clamp(min=_TINY) / _LARGEST
        levels = (weight / self.weight_scale[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self.bias = None if linear.bias is None else linear.bias.detach()
        # For the product itself: its sums come back as they are. With a scale for each column it would not use bytes.
        self.one, self.zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)

    def forward(self, values: Tensor) -> Tensor:
        rows = values.reshape(-1, values.shape[-1])
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY)
        levels = (rows * (_LARGEST / largest)).round_().to(torch.int8)
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, 0, self.packed, self.one, self.zero, None, 1.0, 0, torch.float32, "none", [], "")
        found = sums.mul_(largest / _LARGEST).mul_(self.weight_scale)
        return (found if self.bias is None else found.add_(self.bias)).view(*values.shape[:-1], -1)

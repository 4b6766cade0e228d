"""Dropout whose masks depend on the seed, the step, the sample and the unit alone: a resumed run drops what an
undisturbed one does, and any number of ranks what one does. torch's own depends on what a generator gave before."""

import zlib

import torch
import torch.fx
from torch import Tensor, nn


class ReLUWithDropout(nn.Module):
    """In the place of a ReLU, so that the layers keep their names in checkpoints."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.key, self.first_sample = 0, 0  # Of the step and the layer; of this rank's part of the global batch.

    def forward(self, values: Tensor) -> Tensor:
        values = values.relu()
        return drop(values, self.dropout, self.key, self.first_sample) if self.training else values


def seed_dropout(model: nn.Module, seed: int, step: int, first_sample: int) -> None:
    """What the next forward pass drops."""
    layers = [layer for layer in model.modules() if isinstance(layer, ReLUWithDropout)]
    for number, layer in enumerate(layers):
        layer.key, layer.first_sample = zlib.crc32(f"{seed}/{step}/{number}".encode()), first_sample


@torch.fx.wrap  # the train pipeline traces the model; the size of a batch is known only when it runs
def drop(values: Tensor, dropout: float, key: int | Tensor, first_sample: int) -> Tensor:
    """`[samples, units]` with a share `dropout` of them zero and the others scaled up."""
    num_samples, num_units = values.shape
    samples = torch.arange(first_sample, first_sample + num_samples, device=values.device)
    units = torch.arange(num_units, device=values.device)
    bits = _mix(_mix(_mix(samples) ^ key)[:, None] ^ _mix(units + num_units)[None, :])
    return torch.where(bits >= round(dropout * 2**32), values / (1 - dropout), 0.0)


def _mix(bits: Tensor) -> Tensor:
    """A hash of 32-bit numbers, each in 64 bits: no product overflows."""
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * 0x45D9F3B & 0xFFFFFFFF
    return (bits >> 16) ^ bits

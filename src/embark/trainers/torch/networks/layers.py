"""MLPs, and dropout whose masks depend on the seed, the step, the sample and the unit alone.

A resumed run drops what an undisturbed one does, and any number of ranks what one does; torch's own dropout depends on
what a generator gave before.
"""

import zlib
from typing import NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

from embark.spec.model import ModelSpec


class ReLUWithDropout(nn.Module):
    """ReLU and dropout in one module, so that the layers keep their names in checkpoints."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.key: int | Tensor = 0  # Of the step and the layer.
        self.first_sample = 0  # The first of this rank's part.

    def forward(self, values: Tensor) -> Tensor:
        values = values.relu()
        return drop(values, self.dropout, self.key, self.first_sample) if self.training else values


class SequenceDropout(nn.Module):
    """Dropout over rows of sequences; it depends on a row's sample and position, not on its neighbours."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.key: int | Tensor = 0
        self.first_sample = 0

    def forward(self, values: Tensor, numbers: Tensor, rows_per_sample: int) -> Tensor:
        """Drop values; `numbers` [rows] are those of the rows in the batch, `rows_per_sample` for each sample."""
        dropout = self.drawn(numbers, rows_per_sample)
        return drop_rows(values, *dropout) if dropout.share else values

    def drawn(self, numbers: Tensor, rows_per_sample: int) -> "RowDropout":
        """Return what `forward` drops."""
        return RowDropout(self.dropout if self.training else 0.0, self.key,
                          numbers + self.first_sample * rows_per_sample)


class RowDropout(NamedTuple):
    """What is dropped of rows; a share of 0 drops nothing."""

    share: float
    key: int | Tensor
    numbers: Tensor


def seed_dropout(model: nn.Module, seed: int, step: int, first_sample: int) -> None:
    """Choose what the next forward pass drops."""
    layers = [layer for layer in model.modules() if isinstance(layer, ReLUWithDropout | SequenceDropout)]
    for number, layer in enumerate(layers):
        layer.key, layer.first_sample = zlib.crc32(f"{seed}/{step}/{number}".encode()), first_sample


@torch.fx.wrap  # the train pipeline traces the model; the size of a batch is known only when it runs
def drop(values: Tensor, dropout: float, key: int | Tensor, first_sample: int) -> Tensor:
    """Return `[samples, units]` with a share `dropout` of them zero and the others scaled up."""
    num_samples, num_units = values.shape
    samples = torch.arange(first_sample, first_sample + num_samples, device=values.device)
    units = torch.arange(num_units, device=values.device)
    bits = _mix(_mix(_mix(samples) ^ key)[:, None] ^ _mix(units + num_units)[None, :])
    return torch.where(bits >= round(dropout * 2**32), values / (1 - dropout), 0.0)


def drop_rows(values: Tensor, dropout: float, key: int | Tensor, numbers: Tensor) -> Tensor:
    """Drop values of rows that have any numbers, by a shorter hash: sequences have many rows."""
    units = torch.arange(values.shape[1], device=values.device)
    of_rows, of_units = _mix(_mix(numbers) ^ key).to(torch.int32), _mix(units + 1).to(torch.int32)
    bits = of_rows[:, None] ^ of_units[None, :]  # products of 32-bit integers wrap around
    bits.mul_(0x45D9F3B).bitwise_xor_(bits >> 15).mul_(0x45D9F3B)
    return torch.where(bits >= round(dropout * 2**32) - 2**31, values * (1 / (1 - dropout)), 0.0)


def _mix(bits: Tensor) -> Tensor:
    """Hash 32-bit numbers, each in 64 bits: no product overflows."""
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * 0x45D9F3B & 0xFFFFFFFF
    return (bits >> 16) ^ bits


def mlp(width: int, sizes: tuple[int, ...], dropout: float, *, ends_linear: bool = False) -> nn.Sequential:
    """Make linear layers from `width` over `sizes`, with a ReLU behind each, or behind all but the last if it
    `ends_linear`."""
    layers: list[nn.Module] = []
    for number, size in enumerate(sizes, start=1):
        is_hidden = number < len(sizes)
        layers += [nn.Linear(width, size), ReLUWithDropout(dropout) if dropout and is_hidden else nn.ReLU()]
        width = size
    return nn.Sequential(*(layers[:-1] if ends_linear else layers))


def bottom_mlp(model: ModelSpec) -> nn.Module | None:
    """Make the layers over the dense features, if there are any."""
    return mlp(model.num_dense, (*model.bottom_mlp, model.embedding_dim), model.dropout) if model.num_dense else None


MAX_DEVIATION = 100.0
"""Columns that vary more keep their scale: a step moves every weight about as far."""


@torch.no_grad()
def center_units(layers: nn.Sequential, dense: Tensor) -> None:
    """Start as on columns that are standardized by these rows, and with units whose mean over the rows is zero before
    their ReLU.

    Each is then positive for some rows and not for others. With torch's own weights a unit over columns that are never
    negative, or over other units, is often zero for all rows, and no gradient ever reaches it.
    """
    values, is_first = dense.double(), True
    for layer in layers:
        if isinstance(layer, nn.Linear):
            if is_first:
                deviations, means = torch.std_mean(values, dim=0, correction=0)
                least = 4 * torch.finfo(torch.float32).eps * means.abs()
                is_usual = (deviations > least) & (deviations <= MAX_DEVIATION)
                layer.weight.mul_(torch.where(is_usual, 1 / deviations, 1.0))
                is_first = False
            values = values @ layer.weight.double().T
            layer.bias.copy_(-values.mean(dim=0))
            values += layer.bias
        else:
            values = values.relu()

"""Stochastic rounding of rows to bf16 in plain torch: a CPU rounds as `cuda_graph.rounding_kernels` do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RowRounding:
    """To one of the two neighbours in bf16, the nearer, the likelier: by a hash of seed, step, row and column."""

    seed: int
    step: Tensor  # Of the run.
    origins: Mapping[int, tuple[int, int]]
    """By where a table begins in FBGEMM's storage: its first row's number among those of all tables; first column."""

    def __call__(self, values: Tensor, rows: Tensor, first_rows: Tensor, starts: Sequence[int]) -> Tensor:
        """`rows` of a matrix of tables, each with its first row, ascending, and where it begins in the storage."""
        table = torch.bucketize(rows, first_rows, right=True) - 1
        numbers, columns = torch.tensor([self.origins[start] for start in starts]).unbind(1)
        number = rows - first_rows[table] + numbers[table]
        column = columns[table][:, None] + torch.arange(values.shape[1])
        of_step = _mixed((self.seed & _LOW) ^ _mixed(self.step & _LOW))
        by_row = _mixed(of_step ^ _mixed((number & _LOW) ^ _mixed(((number >> 32) + 1) & _LOW)))
        random = _mixed((by_row[:, None] + column * 0x9E3779B9) & _LOW)
        bits = (values.view(torch.int32).long() + (random & 0xFFFF)) & ~0xFFFF
        rounded = bits.to(torch.int32).view(torch.float32)
        return torch.where(values.isnan(), values, rounded).bfloat16()


def _mixed(bits: Tensor) -> Tensor:
    """`rounding_kernels.mixed`, of 32-bit numbers in 64 bits."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _LOW
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _LOW
    return bits ^ (bits >> 16)

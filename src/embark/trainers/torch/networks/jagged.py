"""Sequences of different lengths, one behind the other in one tensor; torch alone."""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class JaggedSequence(NamedTuple):
    """A sequence feature of a batch, as a network gets it."""

    values: Tensor  # [total, dim]: the rows of sample 0, then those of sample 1, …; [total] where nothing is looked up.
    offsets: Tensor  # [samples + 1]: where each sample's rows begin, and the end.
    ids: Tensor  # [total]


def take(values: Tensor, index: Tensor) -> Tensor:
    """Select rows of `values`, with gradients that are summed in the same order in every run.

    Rows may be taken several times: a CPU uses index_select and a GPU indexing; the other way round each would add
    gradients as threads happen to come.
    """
    return values.index_select(0, index) if values.is_cpu else values[index]


def sample_of_each(offsets: Tensor, total: int) -> Tensor:
    """Return the sample of each row, [total]."""
    return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff(), output_size=total)


class Padding:
    """Samples in groups of similar length, each padded to the longest of its group: most are far shorter than the
    longest of the batch. Groups are by powers of two, so that less than half of a group is padding."""

    def __init__(self, offsets: Tensor) -> None:
        def to_device(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(offsets.device)

        ends = offsets.cpu().numpy().astype(np.int64)
        starts, lengths = ends[:-1], np.diff(ends)
        kinds = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        slots, num_slots = np.zeros(int(ends[-1]), np.int64), 0
        self.groups: list[tuple[Tensor, Tensor]] = []  # The samples [b], and the rows [b, longest] they are made of.
        for kind in np.unique(kinds[lengths > 0]).tolist():
            samples = np.flatnonzero((kinds == kind) & (lengths > 0))
            places = np.arange(int(lengths[samples].max()))
            is_row = places < lengths[samples, None]
            rows = starts[samples, None] + np.minimum(places, lengths[samples, None] - 1)
            slots[rows[is_row]] = num_slots + np.flatnonzero(is_row)
            num_slots += rows.size
            self.groups.append((to_device(samples), to_device(rows)))
        self._slots = to_device(slots)

    def pad(self, values: Tensor) -> list[Tensor]:
        """Return [total, …] as [b, longest, …] for each group; copies of a sample's last row fill it up."""
        return [take(values, rows.view(-1)).view(*rows.shape, *values.shape[1:]) for _, rows in self.groups]

    def unpad(self, groups: list[Tensor]) -> Tensor:
        """Return padded groups as [total, …]."""
        return take(torch.cat([group.flatten(0, 1) for group in groups]), self._slots)


class JaggedLayout:
    """Layout of a batch's sequences for attention, computed once for all layers."""

    def __init__(self, offsets: Tensor, total: int) -> None:
        self.offsets, self.total = offsets, total
        self._blocks: dict[int, Tensor] = {}

    @cached_property
    def padding(self) -> Padding:
        """Groups for layers that take padded tensors; waits for the device."""
        return Padding(self.offsets)

    @cached_property
    def longest_first(self) -> tuple[Tensor, Tensor]:
        """Samples by falling length, and their lengths."""
        lengths, order = self.offsets.diff().sort(descending=True, stable=True)
        return order, lengths

    def blocks(self, size: int) -> Tensor:
        """Return samples and numbers of blocks of `size` rows, [n, 2].

        The longest samples come first and the last block of a sample before the others: what takes longest starts
        first. Samples -1 fill the rest: how many blocks there are is known to the device alone, and here how many there
        can be.
        """
        if size not in self._blocks:
            order, lengths = self.longest_first
            ends = ((lengths + (size - 1)) // size).cumsum(0)
            programs = torch.arange(self.total // size + len(order), device=ends.device)
            place = torch.searchsorted(ends, programs, right=True).clamp_(max=len(order) - 1)
            numbers = ends[place] - 1 - programs
            samples = torch.where(numbers >= 0, order[place], -1)
            self._blocks[size] = torch.stack([samples, numbers], dim=1).int()
        return self._blocks[size]

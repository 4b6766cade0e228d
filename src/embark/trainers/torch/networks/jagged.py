"""Sequences of different lengths, one behind the other in one tensor; torch alone."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class JaggedSequence(NamedTuple):
    """A sequence feature of a batch, as a network gets it.

    In a captured step, whose shapes are fixed, all three have room for more rows than the batch has: spare rows behind
    the last sample's, with zeros for values and -1 for ids. Networks get `has_spare_rows` then, and ask the host
    nothing.
    """

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
    """Return the sample of each row, [total]; spare rows count to the last sample."""
    rows = torch.arange(total, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True).clamp_(max=len(offsets) - 2)


def move(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Select rows of `values`, each at most once; zeros where `index` is -1.

    `inverse` says where each row of `values` goes, or -1, so that gradients are selected too, and never sorted.
    """
    moved: Tensor = _Move.apply(values, index, inverse)
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _select(values, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _select(grad, inverse), None, None


def _select(values: Tensor, index: Tensor) -> Tensor:
    found = values.index_select(0, index.clamp(min=0))
    return found.masked_fill_((index < 0).view(-1, *[1] * (values.ndim - 1)), 0)


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


class Grid:
    """`Padding` of all samples to one length, in shapes that do not depend on the batch."""

    def __init__(self, offsets: Tensor, total: int, max_length: int) -> None:
        num_samples, device = len(offsets) - 1, offsets.device
        starts, lengths = offsets[:-1].long(), offsets.diff()
        places = torch.arange(max_length, device=device)
        self._rows = torch.where(places < lengths[:, None], starts[:, None] + places, -1).view(-1)
        samples, rows = sample_of_each(offsets, total), torch.arange(total, device=device)
        slots = samples * max_length + rows - starts[samples]
        self._slots = torch.where(rows < offsets[-1], slots, -1)
        self._shape = num_samples, max_length
        self.groups = [(torch.arange(num_samples, device=device), self._rows.view(self._shape))]

    def pad(self, values: Tensor) -> list[Tensor]:
        """Return [total, …] as one group [samples, max_length, …]; zeros fill it up."""
        return [move(values, self._rows, self._slots).view(*self._shape, *values.shape[1:])]

    def unpad(self, groups: list[Tensor]) -> Tensor:
        """Return the padded group as [total, …], with zeros for spare rows."""
        return move(groups[0].flatten(0, 1), self._slots, self._rows)


class JaggedLayout:
    """Layout of a batch's sequences for attention, computed once for all layers."""

    def __init__(self, offsets: Tensor, total: int, max_length: int = 0) -> None:
        """`max_length` of sequences with spare rows: all shapes then follow from it."""
        self.offsets, self.total, self._max_length = offsets, total, max_length
        self._blocks: dict[int, Tensor] = {}

    @property
    def has_spare_rows(self) -> bool:
        return self._max_length > 0

    @cached_property
    def padding(self) -> Padding | Grid:
        """Groups for layers that take padded tensors; waits for the device if there are no spare rows."""
        return Grid(self.offsets, self.total, self._max_length) if self._max_length else Padding(self.offsets)

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

"""Rows out of a block: which columns a model takes, where each goes in a batch, and the copying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared.layout import Block, Layout

Rows = slice | NDArray[np.int64]
"""Rows of a block: consecutive ones, or their numbers."""


@dataclass(frozen=True, slots=True)
class Run:
    """Features that follow each other in a group and in a batch."""

    group: int
    first: int
    """Its place in the group."""
    num: int
    place: int
    """Of the first, among the selected features."""
    multi_hot: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """A feature whose rows have different numbers of ids."""

    index: int
    """Among `Layout.ragged`."""
    place: int
    """Among the selected features."""


@dataclass(frozen=True, slots=True)
class ColumnSelection:
    """The features that a model takes, in its order."""

    multi_hot: tuple[int, ...]
    runs: tuple[Run, ...]
    ragged: tuple[Ragged, ...]

    @property
    def is_fixed(self) -> bool:
        return not self.ragged

    @staticmethod
    def of(layout: Layout, names: Sequence[str]) -> ColumnSelection:
        """Those called `names`; the layout has them all."""
        position = {feature.name: index for index, feature in enumerate(layout.features)}
        runs: list[Run] = []
        ragged: list[Ragged] = []
        for place, name in enumerate(names):
            feature = layout.features[position[name]]
            if feature.is_ragged:
                ragged.append(Ragged(layout.ragged.index(position[name]), place))
                continue
            group, at = layout.positions[position[name]]
            last = runs[-1] if runs else None
            if last and (last.group, last.first + last.num, last.place + last.num) == (group, at, place):
                runs[-1] = Run(group, last.first, last.num + 1, last.place, last.multi_hot)
            else:
                runs.append(Run(group, at, 1, place, feature.multi_hot))
        multi_hot = tuple(layout.features[position[name]].multi_hot for name in names)
        return ColumnSelection(multi_hot, tuple(runs), tuple(ragged))

    def fixed_starts(self, num_rows: int) -> list[int]:
        """Where each feature's ids begin in a batch, and where the last one's end."""
        return [num_rows * before for before in accumulate(self.multi_hot, initial=0)]

    def fixed_lengths(self, num_rows: int) -> NDArray[np.int32]:
        """[F, num_rows]"""
        return np.repeat(np.array(self.multi_hot, np.int32)[:, None], num_rows, axis=1)


def copy_rows(out: NDArray[Any], column: NDArray[Any], rows: Rows) -> None:
    """Copy rows of a column [n, …], cast to what `out` holds."""
    if isinstance(rows, slice):
        out[...] = column[rows]
    elif out.dtype == column.dtype:
        np.take(column, rows, 0, out, "clip")  # "raise" would copy twice, to leave `out` alone if it does
    else:
        out[...] = np.take(column, rows, 0, mode="clip")


def copy_features(out: NDArray[Any], features: NDArray[Any], rows: Rows) -> None:
    """Copy rows of each of several features [F, n, multi_hot], cast to what `out` holds."""
    if isinstance(rows, slice):
        out[...] = features[:, rows]
    elif out.dtype != features.dtype:
        out[...] = np.take(features, rows, 1, mode="clip")
    elif out.flags.c_contiguous:
        np.take(features, rows, 1, out, "clip")
    else:
        for target, feature in zip(out, features, strict=True):
            np.take(feature, rows, 0, target, "clip")


def ragged_lengths(block: Block, index: int, rows: Rows) -> NDArray[Any]:
    """How many ids each of the rows has."""
    lengths: NDArray[Any] = block.ragged[index][0][rows]
    return lengths


def ragged_ids(block: Block, index: int, rows: Rows) -> NDArray[Any]:
    """The ids of the rows, one row's behind the other's."""
    lengths, ids, offsets = block.ragged[index]
    if isinstance(rows, slice):
        return ids[offsets[rows.start] : offsets[rows.stop]]
    counts = lengths[rows].astype(np.int64)
    # Each row's first position, less what came before it in the output, plus the position in the output.
    shift = offsets[rows] - (np.cumsum(counts) - counts)
    return np.take(ids, np.repeat(shift, counts) + np.arange(counts.sum()))

"""Rows between the input and the encoder: keys of sparse columns, numbers of dense ones, and the rows that could not be
read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from embark.values import frozen
from .arrays import Bytes, Floats, Hashes, Int32s, Int64s, Mask, UInt32s, last_of_lists
from .layout import Rows

Keys = Hashes | UInt32s  # 32 bits where they always suffice.
MAX_QUOTED = 20  # Bad rows that are reported one by one.


CUT_LISTS = "lists with more ids than their column takes, of which the last, the newest, were kept"


@frozen
class BadRow:
    """A row that could not be read."""

    line: int  # Counted from 0 within the segment.
    why: str


@frozen
class RawRows:
    """Rows of the input with keys, in columns."""

    positions: Int64s
    """[n]: the byte of the file, decompressed, at which each row begins; of Parquet, the row of the file. A random
    split draws by it, so that the size of the pieces changes nothing."""
    label: Floats  # [n]: 0 or 1.
    dense: Floats  # [n, D], as they are; NaN where missing.
    keys: tuple[Keys, ...]
    """Of each sparse column: the number, or 64 bits of hash of the text. [n]; of a list, those of all rows."""
    lengths: tuple[Int32s | None, ...]  # [n] of each list, after cutting; None of the others.
    is_missing: tuple[Mask | None, ...]
    """[n] of each column that is not a list: where there is no value; None where none is missing."""
    split: Bytes | None = None  # [n]: position in SPLITS, once it is known.
    bad: tuple[BadRow, ...] = ()  # Rows left out among these; at most MAX_QUOTED.
    reasons: Mapping[str, int] = field(default_factory=dict)  # Number of rows that were left out, by reason.
    num_cut: int = 0  # Lists that were longer than their column's `max_ids`.
    num_lines: int = 0  # Lines this piece took, including bad ones and the header.
    time: Int64s | None = None  # [n]: microseconds since 1970, where rows are split by it.

    def __len__(self) -> int:
        return len(self.label)

    @property
    def num_bad(self) -> int:
        return sum(self.reasons.values())

    def select(self, mask: Mask) -> RawRows:
        """Return the rows of the mask."""
        keys = (k[mask] if n is None else k[np.repeat(mask, n)] for k, n in zip(self.keys, self.lengths, strict=True))
        return replace(
            self, positions=self.positions[mask], label=self.label[mask], dense=self.dense[mask], keys=tuple(keys),
            lengths=tuple(None if lengths is None else lengths[mask] for lengths in self.lengths),
            is_missing=tuple(None if missing is None else missing[mask] for missing in self.is_missing),
            time=None if self.time is None else self.time[mask]
        )

    def cut_lists(self, most: Sequence[int]) -> RawRows:
        """Shorten the lists of each column to their last ids."""
        if all(lengths is None for lengths in self.lengths):
            return self
        found = [(keys, None, 0) if lengths is None else last_of_lists(keys, lengths, limit)
                 for keys, lengths, limit in zip(self.keys, self.lengths, most, strict=True)]
        keys, lengths, nums = zip(*found, strict=True)
        return replace(self, keys=keys, lengths=lengths, num_cut=self.num_cut + sum(nums))

    @staticmethod
    def join(several: Sequence[RawRows]) -> RawRows:
        """Join rows, one behind the other."""
        if len(several) == 1:
            return several[0]

        def joined(name: str, column: int | None = None) -> Any:
            arrays = [getattr(rows, name) for rows in several]
            arrays = arrays if column is None else [of[column] for of in arrays]
            if name == "is_missing" and any(array is not None for array in arrays):
                arrays = [np.zeros(len(rows), np.bool_) if array is None else array
                          for rows, array in zip(several, arrays, strict=True)]
            return None if arrays[0] is None else np.concatenate(arrays)

        columns = range(len(several[0].keys))
        return RawRows(
            joined("positions"), joined("label"), joined("dense"), tuple(joined("keys", i) for i in columns),
            tuple(joined("lengths", i) for i in columns), tuple(joined("is_missing", i) for i in columns),
            joined("split"), tuple(bad for rows in several for bad in rows.bad)[:MAX_QUOTED],
            sum((Counter(rows.reasons) for rows in several), Counter()),
            num_cut=sum(rows.num_cut for rows in several), num_lines=sum(rows.num_lines for rows in several),
            time=joined("time")
        )


@frozen
class NumberRows:
    """Rows of which every cell is one number, in two matrices: a server reads most requests so, without a step for
    each column. They have keys, and once they are encoded ids."""

    dense: Floats  # [n, D], or [1, D] where all rows have the same.
    ids: Int64s  # [F, n], of the features of the layout.
    shared: tuple[int, ...] = ()  # Features of which all rows have the same, as those of one user have.

    def __len__(self) -> int:
        return int(self.ids.shape[1])

    @property
    def all_dense(self) -> Floats:
        """The dense values of each row: [n, D]."""
        return np.broadcast_to(self.dense, (len(self), self.dense.shape[1]))

    def to_raw(self) -> RawRows:
        """Convert rows with keys to columns."""
        columns: tuple[None, ...] = (None,) * len(self.ids)
        return RawRows(np.arange(len(self)), np.zeros(len(self), np.float32), self.all_dense,
                       tuple(self.ids.view(np.uint64)), columns, columns)

    def to_rows(self) -> Rows:
        """Convert rows with ids to columns."""
        return Rows(np.zeros(len(self), np.uint8), self.all_dense, tuple(self.ids), (None,) * len(self.ids))

    def cut(self, start: int, stop: int) -> NumberRows:
        """Return rows `start` to `stop`."""
        dense = self.dense if len(self.dense) == 1 else self.dense[start:stop]
        return NumberRows(dense, self.ids[:, start:stop], self.shared)

    @staticmethod
    def join(several: Sequence[NumberRows]) -> NumberRows:
        """Join rows, one behind the other."""
        if len(several) == 1:
            return several[0]
        return NumberRows(np.concatenate([one.all_dense for one in several]),
                          np.concatenate([one.ids for one in several], axis=1))

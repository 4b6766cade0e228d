"""Rows of which every cell is one number, in two matrices: a server reads most requests so, without a step for each
column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.rows import RawRows
from embark.data.prepared import Rows


@dataclass(frozen=True, slots=True)
class NumberRows:
    """Rows with keys, and once they are encoded with ids."""

    dense: NDArray[np.float32]  # [n, D], or [1, D] where all rows have the same.
    ids: NDArray[np.int64]  # [F, n], of the features of the layout.
    shared: tuple[int, ...] = ()  # Features of which all rows have the same, as those of one user have.

    def __len__(self) -> int:
        return int(self.ids.shape[1])

    @property
    def all_dense(self) -> NDArray[np.float32]:
        """[n, D]"""
        return np.broadcast_to(self.dense, (len(self), self.dense.shape[1]))

    def to_raw(self) -> RawRows:
        """Rows with keys, in columns."""
        columns: tuple[None, ...] = (None,) * len(self.ids)
        return RawRows(np.arange(len(self)), np.zeros(len(self), np.float32), self.all_dense,
                       tuple(self.ids.view(np.uint64)), columns, columns)

    def to_rows(self) -> Rows:
        """Rows with ids, in columns."""
        return Rows(np.zeros(len(self), np.uint8), self.all_dense, tuple(self.ids), (None,) * len(self.ids))

    def cut(self, start: int, stop: int) -> NumberRows:
        """Rows `start` to `stop`."""
        dense = self.dense if len(self.dense) == 1 else self.dense[start:stop]
        return NumberRows(dense, self.ids[:, start:stop], self.shared)

    @staticmethod
    def join(several: Sequence[NumberRows]) -> NumberRows:
        """All of them as one."""
        if len(several) == 1:
            return several[0]
        return NumberRows(np.concatenate([one.all_dense for one in several]),
                          np.concatenate([one.ids for one in several], axis=1))

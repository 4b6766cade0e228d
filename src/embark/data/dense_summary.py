"""What the values of dense columns are: exact sums and ends, and how they spread to 1/256 of a value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 20
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_NUM_CELLS = 1 << 16
_ROWS_AT_A_TIME = 8_192
"""So few that they stay in the second-level cache."""
_SIGN, _INFINITE = 0x8000, 0x7F80


class DenseSummary:
    """Of D columns. A value's cell is the upper half of its 32 bits, so that one pass is enough."""

    def __init__(self, num_columns: int) -> None:
        self.num_rows = 0
        self._cells = np.zeros(num_columns * _NUM_CELLS, np.int64)
        self._first_cell = np.arange(num_columns, dtype=np.intp)[:, None] * _NUM_CELLS
        self._sum = np.zeros(num_columns)
        self._sum_of_squares = np.zeros(num_columns)
        self._min = np.full(num_columns, np.inf)
        self._max = np.full(num_columns, -np.inf)

    def add(self, dense: NDArray[Any]) -> None:
        """Take [n, D]."""
        for start in range(0, len(dense), _ROWS_AT_A_TIME):
            self._add(dense[start : start + _ROWS_AT_A_TIME])

    def _add(self, dense: NDArray[Any]) -> None:
        columns = np.ascontiguousarray(dense.T, np.float32)
        self.num_rows += columns.shape[1]
        cells = columns.view("<u2")[:, 1::2].astype(np.intp)
        cells += self._first_cell
        np.add.at(self._cells, cells.reshape(-1), 1)
        wide = columns.astype(np.float64)
        with np.errstate(invalid="ignore"):
            sums = wide.sum(axis=1)
        lowest = highest = columns
        if not np.isfinite(sums).all():
            is_finite = np.isfinite(columns)
            lowest, highest = np.where(is_finite, columns, np.inf), np.where(is_finite, columns, -np.inf)
            wide = np.where(is_finite, wide, 0.0)
            sums = wide.sum(axis=1)
        self._sum += sums
        self._sum_of_squares += np.einsum("ij,ij->i", wide, wide)
        np.minimum(self._min, lowest.min(axis=1, initial=np.inf), out=self._min)
        np.maximum(self._max, highest.max(axis=1, initial=-np.inf), out=self._max)

    def summary(self, column: int) -> dict[str, Any]:
        """As `statistics.json` has it; of the finite values."""
        cells = self._cells[column * _NUM_CELLS : (column + 1) * _NUM_CELLS]
        middles, counts, num_not_finite = _in_order(cells)
        num = int(counts.sum())
        if not num:
            return {"num_not_finite": num_not_finite}
        low, high, mean = float(self._min[column]), float(self._max[column]), float(self._sum[column]) / num
        middles = np.clip(middles, low, high)
        variance = max(0.0, float(self._sum_of_squares[column]) / num - mean * mean)
        width = (high - low) / NUM_BINS
        bins = np.minimum(((middles - low) / (width or 1.0)).astype(int), NUM_BINS - 1)
        # Half of a cell's values on each side of its middle.
        until = np.cumsum(counts) - counts / 2
        quantiles = {str(q): float(np.interp(q * num, until, middles)) for q in QUANTILES}
        return {
            "min": low, "max": high, "mean": mean, "std": 0.0 if low == high else variance**0.5,
            "zero_share": int(cells[0] + cells[_SIGN]) / num, "num_not_finite": num_not_finite,
            "histogram": np.bincount(bins, weights=counts, minlength=NUM_BINS).astype(int).tolist(),
            "quantiles": quantiles,
        }


def _in_order(cells: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """The middles of the finite cells that have values, rising, how many each has, and how many are not finite."""
    used = np.flatnonzero(cells)
    is_finite = (used & ~_SIGN) < _INFINITE
    num_not_finite = int(cells[used[~is_finite]].sum())
    used = used[is_finite]
    bits = (used.astype(np.uint32) << 16) + np.uint32(1 << 15) * ((used & ~_SIGN) > 0).astype(np.uint32)
    middles = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    order = np.argsort(middles, kind="stable")
    return middles[order], cells[used][order], num_not_finite

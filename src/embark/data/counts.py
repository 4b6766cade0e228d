"""What the columns of prepared data hold: how often each id is looked up, exactly and within a memory limit; sums, ends
and quantiles of dense columns."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared import Block
from embark.features.arrays import Array, Doubles, Int64s, Mask

NUM_TOP = 20
_SMALL = 1 << 16
_CHUNK = 1 << 20
NUM_BINS = 20
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_NUM_CELLS = 1 << 16
_ROWS_AT_A_TIME = 8_192  # Few enough that they stay in the second-level cache.
_RANKS = [times * 10**power for power in range(13) for times in (1, 2, 5)]
_SIGN, _INFINITE = 0x8000, 0x7F80


class DenseIdCounts:
    """Counts lookups of the ids `first` to `stop`, and those of them in rows whose label is 1."""

    def __init__(self, first: int, stop: int, *, is_wide: bool) -> None:
        self.first, self.stop = first, stop
        self._one = np.uint64(1) if is_wide else np.uint32(1)
        # Filled at once: pages of zeros that come one by one cost more than all the counting.
        self._all = np.full(stop - first, 0, self._one.dtype)
        self._positive = np.full(stop - first, 0, self._one.dtype)

    @staticmethod
    def size_bytes(num_rows: int, *, is_wide: bool) -> int:
        """Return the memory that counting `num_rows` rows of a table takes."""
        return num_rows * 2 * (8 if is_wide else 4)

    def __len__(self) -> int:
        return self.stop - self.first

    def add(self, block: Block, feature: int, *, is_complete: bool) -> None:
        """Count a block. `is_complete`: no id is outside the range."""
        lengths, at = block.lengths(feature), block.ids(feature).astype(np.intp)
        if lengths is None:
            positive = at.take(block.positive, axis=0).reshape(-1)
        else:
            positive = at[np.repeat(block.label, lengths) != 0]
        # In place, where np.bincount would make a new array of the table's size for every block.
        for values, into in ((at.reshape(-1), self._all), (positive, self._positive)):
            if not is_complete:
                values = values[(values >= self.first) & (values < self.stop)] - self.first
            np.add.at(into, values, self._one)

    def used(self) -> Iterator[tuple[NDArray[np.intp], Int64s, Int64s]]:
        """Yield in portions the ids that are looked up at all, rising, how often, and how often with a label of 1."""
        for start in range(0, len(self._all), _CHUNK):
            at = start + np.flatnonzero(self._all[start : start + _CHUNK] != 0)
            yield self.first + at, self._all[at].astype(np.int64), self._positive[at].astype(np.int64)

    def rates(self, ids: Array, prior: float, weight: float) -> Doubles:
        """Return the share of label 1 among the lookups of each id, drawn to `prior` as by `weight` more lookups."""
        at = ids.astype(np.intp) - self.first
        rates: Doubles = (self._positive[at] + prior * weight) / (self._all[at] + weight)
        return rates

    def is_used(self, ids: Array) -> Mask:
        """Mark the ids that are looked up at all."""
        found: Mask = self._all[ids.astype(np.intp) - self.first] != 0
        return found


class SparseIdCounts:
    """Counts lookups of a table with far more rows than the data has lookups: it holds only the ids that occur."""

    def __init__(self, stop: int) -> None:
        self.first, self.stop = 0, stop
        self._met: list[tuple[NDArray[np.intp], Mask]] = []

    @staticmethod
    def size_bytes(num_ids: int) -> int:
        """Return the memory that counting `num_ids` lookups takes."""
        return 48 * num_ids

    def __len__(self) -> int:
        return self.stop - self.first

    def add(self, block: Block, feature: int, *, is_complete: bool) -> None:
        lengths, ids = block.lengths(feature), block.ids(feature)
        is_positive = np.repeat(block.label, ids.shape[1] if lengths is None else lengths) != 0
        self._met.append((ids.reshape(-1).astype(np.intp), is_positive))

    def used(self) -> Iterator[tuple[NDArray[np.intp], Int64s, Int64s]]:
        yield self._counted

    def rates(self, ids: Array, prior: float, weight: float) -> Doubles:
        _, counts, positive = self._counted
        if not len(counts):
            return np.full(len(ids), prior)
        at, is_used = self._indexes_of(ids)
        rates: Doubles = (positive[at] + prior * weight) / (counts[at] + weight)
        return np.where(is_used, rates, prior)

    def is_used(self, ids: Array) -> Mask:
        return self._indexes_of(ids)[1]

    @cached_property
    def _counted(self) -> tuple[NDArray[np.intp], Int64s, Int64s]:
        none = (np.zeros(0, np.intp), np.zeros(0, bool))
        ids, is_positive = (np.concatenate(arrays) for arrays in zip(none, *self._met, strict=True))
        found, indexes = np.unique(ids, return_inverse=True)
        counts = np.bincount(indexes, minlength=len(found)).astype(np.int64)
        return found, counts, np.bincount(indexes[is_positive], minlength=len(found)).astype(np.int64)

    def _indexes_of(self, ids: Array) -> tuple[NDArray[np.intp], Mask]:
        found = self._counted[0]
        at = np.minimum(np.searchsorted(found, ids), max(len(found) - 1, 0))
        return at, (found[at] == ids) if len(found) else np.zeros(len(ids), bool)


Counts = DenseIdCounts | SparseIdCounts


class Frequencies:
    """Summarizes a column from counts of one range of ids after another."""

    def __init__(self) -> None:
        self._top: list[tuple[int, int, int]] = []
        """The most frequent ids: minus the count, the id, and how often its label was 1."""
        self._id_0 = 0
        self._few = np.zeros(_SMALL, np.int64)  # Number of ids by how often they were looked up.
        self._often: list[Int64s] = []  # Counts too large for `_few`.

    def add(self, counts: Counts) -> None:
        for ids, values, positive in counts.used():
            self._few += np.bincount(np.minimum(values, _SMALL - 1), minlength=_SMALL)
            self._often.append(values[values >= _SMALL - 1])
            self._add_top(ids, values, positive)
            if len(ids) and ids[0] == 0:
                self._id_0 = int(values[0])

    def _add_top(self, ids: NDArray[np.intp], values: Int64s, positive: Int64s) -> None:
        at = np.flatnonzero(values > (-self._top[-1][0] if len(self._top) == NUM_TOP else 0))
        if len(at) > NUM_TOP:
            least = np.partition(values[at], len(at) - NUM_TOP)[len(at) - NUM_TOP]
            above = at[values[at] > least]
            at = np.concatenate([above, at[values[at] == least][: NUM_TOP - len(above)]])
        found = zip((-values[at]).tolist(), ids[at].tolist(), positive[at].tolist(), strict=True)
        self._top = sorted([*self._top, *found])[:NUM_TOP]

    def summary(self, num_rows: int) -> dict[str, Any]:
        """Return the column's entry of `statistics.json`; its table has `num_rows` rows."""
        values, nums = self._levels()
        num_ids, num_used = int((values * nums).sum()), int(nums.sum())
        ranks = [rank for rank in _RANKS if rank < num_used] + [num_used]
        covered = _covered(values, nums, ranks)
        parts = _covered(values, nums, [-(-num_rows // 100), -(-num_rows // 10)])
        return {
            "rows": num_rows, "num_ids": num_ids, "num_used": num_used,
            "id_0_share": _share(self._id_0, num_ids),
            "top_share": {str(rank): _share(c, num_ids) for rank, c in zip(ranks, covered, strict=True) if rank},
            "share_of_top_1_percent_rows": _share(parts[0], num_ids),
            "share_of_top_10_percent_rows": _share(parts[1], num_ids),
            "top": [{"id": top, "count": -count, "label_rate": _share(num, -count)} for count, top, num in self._top],
        }

    def _levels(self) -> tuple[Int64s, Int64s]:
        """Return the distinct counts, falling, and how many ids have each."""
        often, often_nums = np.unique(np.concatenate([np.zeros(0, np.int64), *self._often]), return_counts=True)
        few = np.flatnonzero(self._few[: _SMALL - 1])
        few = few[few > 0]
        values = np.concatenate([few, often])[::-1].astype(np.int64)
        return values, np.concatenate([self._few[few], often_nums])[::-1].astype(np.int64)


def _covered(values: Int64s, nums: Int64s, ranks: Iterable[int]) -> list[int]:
    """Return the lookups of the most frequent ids up to each rank."""
    num_ids = np.concatenate([[0], np.cumsum(nums)])
    lookups = np.concatenate([[0], np.cumsum(nums * values)])
    covered = []
    for rank in ranks:
        level = int(np.searchsorted(num_ids, rank, side="right")) - 1
        rest = (rank - int(num_ids[level])) * int(values[level]) if level < len(values) else 0
        covered.append(int(lookups[level]) + rest)
    return covered


def _share(part: int, total: int) -> float | None:
    return part / total if total else None


class LengthSummary:
    """Summarizes the lengths of a ragged feature."""

    def __init__(self) -> None:
        self._num_rows = np.zeros(0, np.int64)  # Rows, by how many ids they have.

    def add(self, lengths: Any) -> None:
        if lengths is not None:
            more = np.bincount(lengths, minlength=len(self._num_rows))
            more[: len(self._num_rows)] += self._num_rows
            self._num_rows = more

    def summary(self) -> dict[str, Any]:
        used = np.flatnonzero(self._num_rows)
        if not len(used):
            return {}
        num = int(self._num_rows.sum())
        return {"lengths": {"min": int(used[0]), "mean": int(used @ self._num_rows[used]) / num, "max": int(used[-1]),
                            "empty_share": int(self._num_rows[0]) / num}}


class DenseSummary:
    """Summarizes dense columns. A value's cell is the upper half of its 32 bits, so that one pass is enough."""

    def __init__(self, num_columns: int) -> None:
        self.num_rows = 0
        self._cells = np.zeros(num_columns * _NUM_CELLS, np.int64)
        self._first_cell = np.arange(num_columns, dtype=np.intp)[:, None] * _NUM_CELLS
        self._sum = np.zeros(num_columns)
        self._sum_of_squares = np.zeros(num_columns)
        self._min = np.full(num_columns, np.inf)
        self._max = np.full(num_columns, -np.inf)

    def add(self, dense: Array) -> None:
        """Take rows [n, D]."""
        for start in range(0, len(dense), _ROWS_AT_A_TIME):
            self._add(dense[start : start + _ROWS_AT_A_TIME])

    def _add(self, dense: Array) -> None:
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
        """Return the column's entry of `statistics.json`, of the finite values."""
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


def _in_order(cells: Int64s) -> tuple[Doubles, Int64s, int]:
    """Return the middles of the finite cells that have values, rising, how many each has, and how many are not
    finite."""
    used = np.flatnonzero(cells)
    is_finite = (used & ~_SIGN) < _INFINITE
    num_not_finite = int(cells[used[~is_finite]].sum())
    used = used[is_finite]
    bits = (used.astype(np.uint32) << 16) + np.uint32(1 << 15) * ((used & ~_SIGN) > 0).astype(np.uint32)
    middles = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    order = np.argsort(middles, kind="stable")
    return middles[order], cells[used][order], num_not_finite

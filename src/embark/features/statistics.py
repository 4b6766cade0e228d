"""How often a value occurs and how often its label is 1, as dense values. Of a training row they are those of earlier
rows, so that its own label is not among its features; of any other row they are those of all training rows."""

from collections.abc import Sequence

import numpy as np

from embark.spec.features import Statistic
from embark.values import frozen
from .arrays import Array, Doubles, Floats, Int64s, Mask
from .made import filled_keys
from .rows import Keys, RawRows
from .schema import Schema, SparseColumn

SMOOTHING = 20
"""Rows with the mean label rate that are added to those of a value."""
_LEAST_RATE = 1e-6


def statistic_values(
    wanted: Sequence[Statistic], counts: Int64s, rated: Int64s, positive: Int64s, mean: float
) -> Floats:
    """Return [n, statistics] of values with `counts` rows, `positive` of `rated` rows having label 1.

    `count` is ln(1 + count); `label_rate` the smoothed rate in log odds, 0 where it is the mean.
    """
    columns: dict[Statistic, Doubles] = {"count": np.log1p(counts)}
    if "label_rate" in wanted:
        mean = min(max(mean, _LEAST_RATE), 1 - _LEAST_RATE)
        ones, zeros = positive + SMOOTHING * mean, (rated - positive) + SMOOTHING * (1 - mean)
        columns["label_rate"] = np.log(ones / zeros) - np.log(mean / (1 - mean))
    return np.stack([columns[name] for name in wanted], axis=1).astype(np.float32)


@frozen
class ValueStatistics:
    """The statistics of a column's values, of all training rows."""

    column: int  # Position among the sparse columns.
    keys: Array  # uint64, rising.
    values: Array  # float32 [keys + 1, statistics]; the last row is of a value that no training row has.

    def of(self, keys: Keys, is_missing: Mask | None) -> Floats:
        """Return [n, statistics]."""
        wanted, known = filled_keys(keys, is_missing), self.keys
        found = np.searchsorted(known, wanted)
        if len(known):
            found[known[np.minimum(found, len(known) - 1)] != wanted] = len(known)
        statistics: Floats = self.values[found]
        return statistics


def with_statistics(dense: Floats, statistics: Sequence[ValueStatistics], raw: RawRows) -> Floats:
    """Return the dense values of rows with the statistics of their values behind them."""
    if not statistics:
        return dense
    return np.concatenate([dense, *(one.of(raw.keys[one.column], raw.is_missing[one.column])
                                    for one in statistics)], axis=1)


def statistic_columns(schema: Schema) -> dict[int, SparseColumn]:
    """Return the sparse columns that have statistics, by their positions."""
    return {position: column for position, column in enumerate(schema.sparse) if column.statistics}


def are_statistics(keys: Array, values: Array, num: int) -> bool:
    """Return whether these are keys and `num` statistics of each: forged ones may have fitting checksums."""
    return bool(keys.ndim == 1 and keys.dtype == np.uint64 and values.dtype == np.float32
                and values.shape == (len(keys) + 1, num) and np.isfinite(values).all())

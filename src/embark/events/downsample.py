"""Many points to few, with every spike kept: what a curve looks like at the width it is drawn."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def thin(xs: ArrayLike | Sequence[float], ys: ArrayLike | Sequence[float], num_points: int) -> tuple[Floats, Floats]:
    """At most `num_points` of the points, in order of `xs`: the ends, and the least and greatest of each bucket.

    `xs` must not fall. A value that is no number makes a gap where it alone fills its bucket, and is passed over else.
    """
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if len(x) != len(y):
        raise ValueError(f"{len(x)} places for {len(y)} values")
    if len(x) <= max(num_points, 2):
        return x, y
    num_buckets = max(1, (num_points - 2) // 2)
    starts = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], num_buckets + 1)[:-1], side="left"))
    known = np.isfinite(y)
    low = _first_where(np.where(known, y, np.inf), starts, np.minimum)
    high = _first_where(np.where(known, y, -np.inf), starts, np.maximum)
    ends = np.array([0, len(x) - 1])
    kept = np.unique(np.concatenate([ends, low, high])) if num_points > 3 else ends
    return x[kept], y[kept]


def _first_where(values: Floats, starts: NDArray[np.intp], least: np.ufunc) -> NDArray[np.intp]:
    """Where each bucket first has its least value (or its greatest)."""
    best = least.reduceat(values, starts)
    lengths = np.diff(np.append(starts, len(values)))
    hits = np.flatnonzero(values == np.repeat(best, lengths))
    bucket = np.searchsorted(starts, hits, side="right") - 1
    _, first = np.unique(bucket, return_index=True)
    return hits[first]


def means(xs: ArrayLike | Sequence[float], ys: ArrayLike | Sequence[float], num_points: int) -> tuple[Floats, Floats]:
    """At most `num_points` means of neighbours: what a smoothed curve is made of, where one spike weighs as one."""
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= max(num_points, 1):
        return x, y
    starts = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], max(num_points, 1) + 1)[:-1], side="left"))
    num = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / num, np.add.reduceat(y, starts) / num

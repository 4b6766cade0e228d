"""Types of numpy's arrays, and arithmetic on ragged ones."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
UInt32s = NDArray[np.uint32]
Hashes = NDArray[np.uint64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def is_first(*columns: Array) -> Mask:
    """Mark the rows of sorted columns that are not equal to the row before."""
    marks = np.ones(len(columns[0]), np.bool_)
    marks[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return marks


def ragged_positions(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the positions of all values of some runs, one run behind the other: `lengths` values from `starts` on."""
    lengths = lengths.reshape(-1)
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(starts.reshape(-1) - (ends - lengths), lengths) + np.arange(lengths.sum())


def last_of_lists(values: NDArray[Any], lengths: NDArray[Any], most: int) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Shorten lists to their last `most` values, the newest of a history; return also how many were longer."""
    kept = lengths.clip(max=most)
    num_cut = int((kept < lengths).sum())
    return (values[ragged_positions(np.cumsum(lengths) - kept, kept)] if num_cut else values), kept, num_cut

"""Rows from block to block, one copy for each group of columns."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared.layout import Block

Rows = slice | NDArray[np.int64]  # Rows of a block: consecutive ones, or their numbers.


def copy_block(out: Block, to: slice, block: Block, rows: Rows) -> None:
    """Copy rows of all columns."""
    copy_rows(out.label[to], block.label, rows)
    copy_rows(out.dense[to], block.dense, rows)
    for target, group in zip(out.groups, block.groups, strict=True):
        copy_features(target[:, to], group, rows)


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

"""Weights of ids: read from columns beside the ids, and what they come to when rows are pooled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embark.data.loader import Batch
from embark.data.prepare.rows import RawRows
from embark.data.prepare.schema import SparseColumn
from embark.errors import DataError
from embark.spec.model import Table


def weight_columns(tables: Sequence[Table]) -> tuple[SparseColumn, ...]:
    """Of the tables whose ids have weights."""
    return tuple(SparseColumn(table.weights_column, "number", is_list=True, max_ids=1 << 31)
                 for table in tables if table.weights_column)


def weights_of(path: str, tables: Sequence[Table], rows: RawRows) -> dict[int, NDArray[np.float32]]:
    """By the position of the table: of each id, in the ids' order. They stand behind the tables' columns."""
    weighted = [position for position, table in enumerate(tables) if table.weights_column]
    found: dict[int, NDArray[np.float32]] = {}
    for column, position in enumerate(weighted, len(tables)):
        table, lengths, values = tables[position], rows.lengths[column], rows.keys[column].view(np.float64)
        name, ids = table.weights_column, rows.lengths[position]
        assert lengths is not None
        assert ids is not None
        _refuse(path, name, lengths != ids, f"has another number of weights than {table.name} has ids",
                "write as many weights as ids")
        is_bad = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[~(values >= 0)], minlength=len(lengths)) > 0
        _refuse(path, name, is_bad, "has a weight that is negative or empty", "weights are numbers from 0 up")
        found[position] = values.astype(np.float32)
    return found


def pooling_weights(batch: Batch, tables: Sequence[Table]) -> NDArray[np.float32]:
    """What each row is multiplied by before rows are summed: of a mean, its share of the sample's weights."""
    assert batch.weights is not None
    weights, start = batch.weights.copy(), 0
    for table, lengths in zip(tables, batch.lengths, strict=True):
        part = weights[start : start + int(lengths.sum())]
        start += len(part)
        if table.pooling == "mean":
            owner = np.repeat(np.arange(len(lengths)), lengths)
            total = np.bincount(owner, part, minlength=len(lengths))
            part /= np.where(total > 0, total, 1).astype(np.float32)[owner]
    return weights


def _refuse(path: str, column: str, is_bad: NDArray[np.bool_], what: str, fix: str) -> None:
    if is_bad.any():
        raise DataError(f"{path}: column {column!r}, row {int(is_bad.argmax()) + 1:,} of the data: {what}; such rows: "
                        f"{int(is_bad.sum()):,}", fix=fix)

"""A file of one's own: one row a sample, one column a feature, held in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.batch import Batch
from embark.data.files import Cells, Wanted, bad_cell, read_columns
from embark.data.hashing import hash_counters, stream_key, uniform
from embark.errors import DataError
from embark.spec.data import DataSpec
from embark.spec.model import ModelSpec, Table

_HELD_OUT, _ORDER = range(2)


class ColumnsSource:
    """The rows of the file, in a new order each epoch; which are held out depends on the seed and the row alone."""

    notes: tuple[str, ...]
    """Ids that were clipped."""

    def __init__(self, model: ModelSpec, data: DataSpec) -> None:
        path, tables = Path(data.path), model.table_list()
        _refuse_label_as_feature(path, data, tables)
        wanted = [Wanted(data.label, "number")]
        wanted += [Wanted(name, "number") for name in data.dense_columns]
        wanted += [Wanted(t.name, "ids", may_be_empty=t.multi_hot > 1) for t in tables]
        label, *features = read_columns(path, wanted)
        dense, sparse = features[: len(data.dense_columns)], features[len(data.dense_columns) :]
        self._seed = data.seed
        self._label = _checked_label(path, data.label, label)
        self._dense = np.empty((len(self._label), len(dense)), np.float32)
        for position, (name, cells) in enumerate(zip(data.dense_columns, dense, strict=True)):
            self._dense[:, position] = _checked_dense(path, name, cells)
        self._features, self.notes = _checked_ids(path, tables, sparse, must_clip=data.on_bad_id == "clip")
        self._is_fixed = all(feature.offsets is None for feature in self._features)
        bits = hash_counters(stream_key(data.seed, _HELD_OUT), np.arange(len(self._label)))
        is_held_out = uniform(bits) < data.eval_fraction
        self._eval_rows = np.flatnonzero(is_held_out)
        self._train_rows = np.flatnonzero(~is_held_out)
        self._order: tuple[int, NDArray[np.int64]] = (-1, self._train_rows)

    @property
    def num_train_samples(self) -> int:
        """Rows that are not held out."""
        return len(self._train_rows)

    @property
    def num_eval_samples(self) -> int:
        """Rows that are held out."""
        return len(self._eval_rows)

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of the epoch's own order."""
        order_epoch, order = self._order
        if order_epoch != epoch:
            bits = hash_counters(stream_key(self._seed, _ORDER, epoch), self._train_rows)
            order = self._train_rows[np.argsort(bits, kind="stable")]
            self._order = (epoch, order)
        return self._batch(order, start, stop)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Held-out rows, in the file's order."""
        return self._batch(self._eval_rows, start, stop)

    def _batch(self, order: NDArray[np.int64], start: int, stop: int) -> Batch:
        if not 0 <= start <= stop <= len(order):
            raise IndexError(f"samples {start} to {stop} of {len(order)}")
        rows = order[start:stop]
        taken = [feature.take(rows) for feature in self._features]
        return Batch(
            dense=self._dense[rows],
            ids=np.concatenate([ids for ids, _ in taken]),
            lengths=np.stack([lengths for _, lengths in taken]),
            label=self._label[rows],
            is_fixed=self._is_fixed,
        )


@dataclass(frozen=True, slots=True)
class _Feature:
    """All ids of a column: [rows, ids of each], or one behind the other with offsets [rows + 1]."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64] | None

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The rows' ids and how many each has."""
        if self.offsets is None:
            return self.ids[rows].reshape(-1), np.full(len(rows), self.ids.shape[1], np.int32)
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        # Each row's first position, less what came before it in the output, plus the position in the output.
        shift = self.offsets[rows] - (np.cumsum(lengths) - lengths)
        return self.ids[np.repeat(shift, lengths) + np.arange(lengths.sum())], lengths.astype(np.int32)


@dataclass(frozen=True, slots=True)
class _BadIds:
    """The ids of one column that its table does not hold."""

    table: Table
    count: int
    row: int
    value: int
    smallest: int
    largest: int

    def __str__(self) -> str:
        return (
            f"column {self.table.name!r}: ids outside 0 to {self.table.rows - 1}: {self.count}, "
            f"the first is {self.value} in row {self.row + 1} of the data"
        )

    @property
    def fix(self) -> str:
        """What makes them right."""
        if self.smallest < 0:
            return f"{self.table.name}: ids start at 0, the smallest here is {self.smallest}"
        return f"{self.table.name}: rows = {self.largest + 1}"


def _refuse_label_as_feature(path: Path, data: DataSpec, tables: Sequence[Table]) -> None:
    if data.label in (*data.dense_columns, *(table.name for table in tables)):
        raise DataError(
            f"{path}: column {data.label!r} is data.label and a feature too, so the model would be shown the answer",
            fix="take it out of data.dense_columns and of the tables",
        )


def _checked_label(path: Path, name: str, cells: Cells) -> NDArray[np.float32]:
    is_bad = (cells.values != 0) & (cells.values != 1)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise bad_cell(
            path, name, row,
            f"the label is {cells.values[row]:g}; labels that are neither 0 nor 1: {int(is_bad.sum())}",
            "write 1 for what the model is to predict and 0 for the rest",
        )
    return cells.values.astype(np.float32)


def _checked_dense(path: Path, name: str, cells: Cells) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        values = cells.values.astype(np.float32)
    is_bad = ~np.isfinite(values)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise bad_cell(
            path, name, row,
            f"{cells.values[row]:g} is no finite 32-bit number; such in the column: {int(is_bad.sum())}",
            "drop those rows, or fill the values in",
        )
    return values


def _checked_ids(
    path: Path, tables: Sequence[Table], columns: Sequence[Cells], *, must_clip: bool
) -> tuple[list[_Feature], tuple[str, ...]]:
    """Every column is looked at before any is refused, so that one error names them all."""
    bad = [found for table, cells in zip(tables, columns, strict=True) if (found := _find_bad_ids(path, table, cells))]
    if bad and not must_clip:
        raise DataError(
            f"{path}: " + "\n  ".join(map(str, bad)),
            fix="; ".join(found.fix for found in bad) + '; or data.on_bad_id = "clip" to clip them',
        )
    features = [_feature(table, cells) for table, cells in zip(tables, columns, strict=True)]
    return features, tuple(f"{found}; clipped" for found in bad)


def _find_bad_ids(path: Path, table: Table, cells: Cells) -> _BadIds | None:
    most = 1 if cells.lengths is None else int(cells.lengths.max())
    if cells.lengths is not None and most > table.multi_hot:
        raise bad_cell(
            path, table.name, int(cells.lengths.argmax()),
            f"has {most} ids, the most of the column, and the table takes {table.multi_hot}",
            f"set multi_hot = {most} for table {table.name}",
        )
    values: NDArray[Any] = cells.values
    is_bad = (values < 0) | (values >= table.rows)
    if not is_bad.any():
        return None
    first = int(is_bad.argmax())
    row = first if cells.lengths is None else int(np.searchsorted(np.cumsum(cells.lengths), first, side="right"))
    return _BadIds(
        table, int(is_bad.sum()), row, int(values[first]), smallest=int(values.min()), largest=int(values.max())
    )


def _feature(table: Table, cells: Cells) -> _Feature:
    ids = np.clip(cells.values, 0, table.rows - 1).astype(np.int32)
    if cells.lengths is None:
        return _Feature(ids[:, None], None)
    if cells.lengths.min() == cells.lengths.max():
        return _Feature(ids.reshape(len(cells.lengths), int(cells.lengths[0])), None)
    return _Feature(ids, np.concatenate([[0], np.cumsum(cells.lengths)]))

"""Requests whose tensors are all raw numbers: where each of them is in the bytes is found once for all requests that
are alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.features.arrow.row_parser import RowParser, number_columns
from embark.features.rows import NumberRows
from embark.features.schema import Schema
from embark.values import frozen
from .request_rows import RequestColumns, TensorColumns, repeated


@frozen
class _Location:
    """The position of a tensor in the bytes of a request."""

    start: int
    dtype: np.dtype[Any]
    num_rows: int


@frozen
class _Run:
    """Tensors of the same type and length, one behind the other."""

    start: int
    num_rows: int
    columns: slice | list[int]  # Columns of the matrix that they belong into.
    num_columns: int

    def read(self, data: memoryview, dtype: str) -> NDArray[Any]:
        """Return [columns, rows]."""
        return np.frombuffer(data, dtype, self.num_columns * self.num_rows, self.start).reshape(
            self.num_columns, self.num_rows)


@frozen
class RawLayout:
    """The positions of tensors, for all requests with tensors of the same names, types and shapes, in the same
    order."""

    num_rows: int
    num_bytes: int
    locations: Mapping[str, _Location]
    dense: tuple[_Run, ...]
    sparse: tuple[_Run, ...]  # Empty where a column is no number, or not of the type that the model takes.
    num_dense_rows: int
    shape: tuple[int, int]  # Numbers of dense and sparse columns.
    shared: tuple[int, ...]  # Sparse columns with a single row, which all rows share.

    @staticmethod
    def of(columns: TensorColumns, schema: Schema) -> RawLayout | None:
        """Find the layout of a request whose columns are in the order of the bytes; None if one of them is not
        numpy's."""
        locations, at = {}, 0
        for name, values in columns.columns.items():
            if not isinstance(values, np.ndarray):
                return None
            locations[name] = _Location(at, values.dtype, len(values))
            at += values.nbytes
        sources = [column.source for column in schema.sparse]
        wanted = [*schema.dense, *sources]
        is_unlabelled = not schema.label and not schema.labels
        has_one_id = all(column.num_hashes == 1 and not column.statistics for column in schema.sparse)
        has_matrices = is_unlabelled and has_one_id and bool(sources) and len(set(wanted)) == len(wanted) and \
            not schema.times and number_columns(schema).keys() == set(wanted) <= locations.keys()
        dense = _runs(locations, schema.dense, "<f4") if has_matrices else None
        sparse = _runs(locations, sources, "<i8") if has_matrices else None
        if dense is None or sparse is None:
            dense = sparse = ()
        return RawLayout(
            columns.num_rows, at, locations, dense, sparse,
            num_dense_rows=columns.num_rows if any(run.num_rows != 1 for run in dense) else 1,
            shape=(len(schema.dense), len(sources)),
            shared=tuple(i for i, name in enumerate(sources) if name in columns.shared))


def _runs(locations: Mapping[str, _Location], names: Sequence[str], dtype: str) -> tuple[_Run, ...] | None:
    """Group tensors into runs; None if a tensor has another type."""
    found: list[tuple[_Location, list[int]]] = []  # The first of each run, and the columns of all.
    for column in sorted(range(len(names)), key=lambda column: locations[names[column]].start):
        location = locations[names[column]]
        if location.dtype != np.dtype(dtype):
            return None
        first, columns = found[-1] if found else (location, [])
        if columns and first.num_rows == location.num_rows and \
                location.start == first.start + len(columns) * location.num_rows * location.dtype.itemsize:
            columns.append(column)
        else:
            found.append((location, [column]))
    return tuple(_Run(first.start, first.num_rows, slice(columns[0], columns[-1] + 1) if columns == list(
        range(columns[0], columns[-1] + 1)) else columns, len(columns)) for first, columns in found)


@frozen
class RawTensors(RequestColumns):
    """The cells of a request whose layout is known."""

    layout: RawLayout
    data: memoryview

    def __len__(self) -> int:
        return self.layout.num_rows

    @property
    def names(self) -> Collection[str]:
        return self.layout.locations.keys()

    def column(self, name: str, parser: RowParser) -> Any:
        location = self.layout.locations[name]
        found = np.frombuffer(self.data, location.dtype, location.num_rows, location.start)
        return found if location.num_rows == len(self) else repeated(found, len(self))

    def numbers(self) -> NumberRows | None:
        layout, data = self.layout, self.data
        if not layout.sparse:
            return None
        dense = np.empty((layout.num_dense_rows, layout.shape[0]), np.float32)
        for run in layout.dense:
            dense[:, run.columns] = run.read(data, "<f4").T
        keys = np.empty((layout.shape[1], layout.num_rows), np.int64)
        for run in layout.sparse:
            keys[run.columns] = run.read(data, "<i8")
        return NumberRows(dense, keys, layout.shared)

"""Rows of Arrow columns: the label, the dense values and the keys, without the rows that cannot be read."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from embark.errors import DataError
from embark.features.arrays import Floats, Int64s, Mask
from embark.features.made import with_made
from embark.features.rows import MAX_QUOTED, BadRow, RawRows
from embark.features.schema import TIME_ROWS, LabelColumn, Schema, texts
from embark.features.values import DecimalSign, json_cell, meaning_of_format
from embark.spec import PrepareSpec
from embark.values import JsonMap, frozen
from .cells import (
    LARGEST,
    CellParser,
    SparseCells,
    normalize_array,
)
from .times import Times, parse_times

SplitCell = Callable[[str], list[str]]
_MAX_CELL_CHARS = 40
_UNCUT = 1 << 31


@frozen
class Location:
    """The position of some rows in the input."""

    lines: Int64s  # [n]: within the segment, counted from 0; of Parquet, the row.
    positions: Int64s  # See `RawRows`.
    num_lines: int
    bad: Sequence[BadRow] = ()  # Rows with another number of fields, which are not in the columns.


@dataclass(slots=True)
class _Bad:
    """The rows that cannot be read, each with the first reason."""

    mask: Mask
    whys: dict[int, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, is_bad: Mask | None, name: str, array: Any, what: str) -> None:
        """Mark cells of column `name` as bad, because of `what`."""
        if is_bad is None:
            return
        new = np.flatnonzero(is_bad & ~self.mask)
        self.mask[new] = True
        if len(new):
            self.reasons[f"column {name!r}: a cell {what}"] += len(new)
        self.whys.update((int(row), _why(name, array[int(row)], what)) for row in new[:MAX_QUOTED])


class RowParser:
    """Makes rows of columns, by the schema."""

    def __init__(self, schema: Schema, prepare: PrepareSpec) -> None:
        self._schema, self.prepare = schema, prepare
        above = prepare.label_above
        self._labels = schema.labels
        if schema.label and not schema.labels:
            self._labels = (LabelColumn(schema.label, above is None, main_above=0.5 if above is None else above,
                                        ones=texts(prepare.label_is)),)
        self._cells = CellParser(prepare.missing, prepare.list_delimiter or schema.list_delimiter)
        self.number_columns = number_columns(schema)
        weighted = {column.weights_of for column in schema.sparse if column.weights_of}
        # Lists of weighted ids are cut once it is known that they are as long as their weights.
        self._sparse = tuple(replace(column, max_ids=_UNCUT) if column.weights_of or column.name in weighted else column
                             for column in schema.read)

    @property
    def columns(self) -> list[str]:
        """The columns of the input that are needed."""
        return list(self._schema.needed)

    @property
    def decimals(self) -> Mapping[str, DecimalSign]:
        """The decimal signs of columns of numbers that may have commas."""
        return self._schema.decimals

    @property
    def id_columns(self) -> set[str]:
        """Columns of the input that hold ids, or weights of ids."""
        return {column.source for column in self._schema.read}

    def parse(self, column: Callable[[str], Any], location: Location, where: str) -> RawRows:
        """Make rows of the cells that `column` returns by name; those of `number_columns` may be numpy's arrays too."""
        schema, num_rows = self._schema, len(location.lines)
        cells = {name: self._cells_of(name, column(name)) for name in self.columns}
        bad = _Bad(np.zeros(num_rows, np.bool_))
        label = self._label(cells, bad, where)
        times = self._times(cells, bad, where)
        dense = np.empty((num_rows, len(schema.dense_names)), np.float32)
        is_read = _fill(dense, [cells[name] for name in schema.dense])
        for position, name in enumerate(() if is_read else schema.dense):
            array = cells[name]
            with _in_column(where, name):
                dense[:, position], is_bad = self._cells.numbers(array, decimal=schema.decimals.get(name, ""))
            bad.add(is_bad, name, array, "is not a number")
        for position, name in enumerate(schema.ages, len(schema.dense)):
            dense[:, position] = times[name].days_until(times[schema.time_column])
        keys: list[SparseCells] = []
        for sparse in self._sparse:
            if sparse.kind in TIME_ROWS:
                keys.append(times[sparse.source].keys(sparse.kind))
                continue
            array = cells[sparse.source]
            if isinstance(array, np.ndarray):
                keys.append(self._cells.keys(array, sparse))
                continue
            with _in_column(where, sparse.source):
                found = self._cells.keys(array, sparse)
            what = {"hex": "is not a hexadecimal number", "number": "is not a number"}.get(sparse.kind,
                                                                                           "is not an integer")
            bad.add(found.is_bad, sparse.source, array, what)
            bad.add(found.is_missing if sparse.is_required else None, sparse.source, array, "means no value")
            keys.append(found)
        self._pair_weights(keys, cells, bad)
        examples = [*location.bad, *(BadRow(int(location.lines[row]), why) for row, why in bad.whys.items())]
        examples.sort(key=lambda row: row.line)
        rows = RawRows(
            location.positions, label, dense, tuple(k.keys for k in keys), tuple(k.lengths for k in keys),
            tuple(k.is_missing for k in keys), bad=tuple(examples[:MAX_QUOTED]),
            reasons=bad.reasons + Counter(row.why for row in location.bad), num_cut=sum(k.num_cut for k in keys),
            num_lines=location.num_lines,
            time=times[schema.time_column].micros if schema.has_row_time else None
        )
        return with_made(rows.select(~bad.mask) if bad.mask.any() else rows, schema)

    def split_cell(self, text: str) -> list[str]:
        """Split a text in a list column as it would be split where all cells are text."""
        if text.strip() in self._cells.missing:
            return []
        return text.split(delimiter) if (delimiter := self._cells.list_delimiter) else re.split("[|;]", text)

    def _pair_weights(self, keys: list[SparseCells], cells: JsonMap, bad: _Bad) -> None:
        """Check weights against their ids, and cut both."""
        columns = self._schema.read
        indexes = {column.name: index for index, column in enumerate(columns)}
        for index, column in enumerate(columns):
            if not column.weights_of:
                continue
            of, array = indexes[column.weights_of], cells[column.source]
            ids, weights = keys[of].lengths, keys[index].lengths
            assert ids is not None
            assert weights is not None
            bad.add(ids != weights, column.source, array, f"has another number of weights than {column.weights_of} has "
                    "ids")
            owner = np.repeat(np.arange(len(weights)), weights)
            is_none = owner[~(keys[index].keys.view(np.float64) >= 0)]
            bad.add(np.bincount(is_none, minlength=len(weights)) > 0, column.source, array,
                    "has a weight that is negative or empty")
            most = columns[of].max_ids
            keys[of], keys[index] = keys[of].cut(most), replace(keys[index].cut(most), num_cut=0)

    def _cells_of(self, name: str, array: Any) -> Any:
        if isinstance(array, np.ndarray) and name in self.number_columns and (
                self.number_columns[name] == "number" or array.dtype.kind in "iu"):
            return array
        return normalize_array(array)

    def _label(self, cells: JsonMap, bad: _Bad, where: str) -> Floats:
        """Return [n]; with the labels of tasks [n, 1 + labels]: the first binary task's, and all of them, NaN where a
        cell is empty."""
        main, columns = np.zeros(len(bad.mask), np.float32), []
        for label in self._labels:
            name, array, may_be_empty = label.name, cells[label.name], bool(self._schema.labels)
            with _in_column(where, name):
                values, is_bad = self._cells.is_one_of(array, label.ones) if label.ones else \
                    self._cells.numbers(array, may_be_text=label.is_binary,
                                        decimal=self._schema.decimals.get(name, ""))
            is_empty = np.isnan(values)
            if may_be_empty or not label.is_binary:
                bad.add(is_bad if may_be_empty else is_empty, name, array,
                        "is not a number; the label must be a number")
            with np.errstate(invalid="ignore"):
                if label.is_binary:
                    bad.add((values != 0) & (values != 1) & ~(is_empty & may_be_empty), name, array,
                            "is neither 0 nor 1; the label must be 0 or 1")
                if label.num_classes:
                    bad.add((values < 0) | (values >= label.num_classes) | (values % 1 > 0), name, array,
                            f"is no class from 0 to {label.num_classes - 1}")
                if label.main_above is not None:
                    main[:] = values > label.main_above
            columns.append(values.astype(np.float32))
        return np.column_stack([main, *columns]) if self._schema.labels else main

    def _times(self, cells: JsonMap, bad: _Bad, where: str) -> dict[str, Times]:
        schema, found = self._schema, {}
        for column in schema.times:
            array = cells[column.name]
            with _in_column(where, column.name):
                found[column.name] = times = parse_times(array, column.format, self._cells, column.zone)
            bad.add(times.is_bad, column.name, array, f"does not fit the column, which holds "
                    f"{meaning_of_format(column.format)}")
            if schema.is_split_by_time and column.name == schema.time_column:
                bad.add(times.is_missing, column.name, array, "is empty; a split by time needs one in every row")
        return found


def number_columns(schema: Schema) -> dict[str, Literal["number", "integer"]]:
    """Return the columns that are nothing but dense, or nothing but integers of one value."""
    found: dict[str, Literal["number", "integer"]] = dict.fromkeys(schema.dense, "number")
    other = {schema.label, *(time.name for time in schema.times)}
    for column in schema.read:
        if column.kind == "integer" and not column.is_list and column.source not in schema.dense:
            found[column.source] = "integer"
        else:
            other.add(column.source)
    return {name: kind for name, kind in found.items() if name not in other}


def _fill(dense: Floats, arrays: Sequence[Any]) -> bool:
    """Put columns that are numpy's into the matrix, all at once, unless a value is too large."""
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
        return False
    values = np.stack(arrays, axis=1)
    if (np.abs(values) > LARGEST).any():
        return False
    dense[:, : len(arrays)] = values
    return True


@contextmanager
def _in_column(where: str, name: str) -> Iterator[None]:
    """Add the column's name and the file to an error."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: column {name!r} {error.what}",
                        "leave it out, or give it another role in [data.prepare]") from None


def _why(name: str, cell: Any, what: str) -> str:
    """Return a sentence that quotes a cell and says why it cannot be read, or that it is empty."""
    if hasattr(cell, "as_buffer"):
        value = bytes(cell.as_buffer() or b"").decode(errors="replace")
    else:
        value = cell.item() if isinstance(cell, np.generic) else cell.as_py()
    if value is None or value == "":
        return f"column {name!r} is empty" + "".join(what.partition(";")[1:])
    text = repr(value)
    return f"column {name!r}: {text if len(text) <= _MAX_CELL_CHARS else text[:_MAX_CELL_CHARS] + '…'} {what}"


def json_column(rows: Sequence[JsonMap], name: str, parser: RowParser | None = None) -> Any:
    """Return the cells of a column as text, or as lists of text."""
    cells = [row.get(name) for row in rows]
    return json_array(cells, parser.split_cell, parser.decimals.get(name, "")) if parser else json_array(cells)


def json_array(values: Sequence[Any], split: SplitCell | None = None, decimal: str = "") -> Any:
    """Return JSON values as text, or as lists of text; beside arrays, `split` returns the values of a text. `decimal`:
    the sign that text of the column has in its numbers; those of JSON have a point."""
    if decimal == ",":
        values = [repr(value).replace(".", ",") if type(value) is float else value for value in values]
    kinds = set(map(type, values))
    if list not in kinds:
        if kinds == {int} or (kinds == {float} and all(map(math.isfinite, values))):
            return pa.array(list(map(repr, values)), pa.string())  # as json_cell, in half the time
        return pa.array([json_cell(value) for value in values], pa.string())
    lists = [value if isinstance(value, list) else [] if value is None else
             split(value) if split and isinstance(value, str) else [value] for value in values]
    return pa.array([[json_cell(one) for one in value] for value in lists], pa.list_(pa.string()))

"""A file read into memory: one row a sample, one column a feature. Nothing is guessed or left out."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embark.data.loader import Batch
from embark.data.prepare.guess import find_times
from embark.data.prepare.inputs import InputFile, Inputs
from embark.data.prepare.readers import CsvReader, ParquetReader
from embark.data.prepare.rows import Reader
from embark.data.prepare.sampling import Column, take_sample
from embark.data.task_labels import bad_labels, check_lists, meaning_of, task_labels
from embark.errors import DataError, nearest
from embark.features.arrow.row_parser import Location, RowParser
from embark.features.encoding import weights_of_keys
from embark.features.hashing import hash_counters, stream_key, uniform
from embark.features.rows import RawRows
from embark.features.schema import LabelColumn, Schema, SparseColumn, TimeColumn
from embark.features.values import moment_text
from embark.spec.data import DataSpec, PrepareSpec
from embark.spec.model import ModelSpec, Table
from embark.spec.tasks import label_columns, list_size_of
from embark.store.errors import explain_data

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET_SUFFIXES = (".parquet", ".pq")
_STRICT = PrepareSpec(missing=("",))
_HELD_OUT, _ORDER = range(2)
_NUM_HASHERS = 4
_SAMPLE_ROWS = 10_000


class ColumnsSource:
    """The rows of the file, in a new order each epoch; which are held out depends on the seed and the row alone, or
    with `data.time_column` on the rows' times."""

    notes: tuple[str, ...]  # Ids that were clipped.

    def __init__(self, model: ModelSpec, data: DataSpec) -> None:
        tables = model.table_list()
        labels = label_columns(model.tasks)
        features = {*data.dense_columns, *(name for table in tables for name in (table.name, table.weights_column))}
        if data.label and not labels and data.label in features:
            raise DataError(f"{data.path}: column {data.label!r} is data.label and also a feature, which would show "
                            "the model the answer", fix="remove it from data.dense_columns and from the tables")
        rows = _read(data, tables, LabelColumn.of(model.tasks))
        self._seed = data.seed
        self._label, self._dense = rows.label if data.label else np.ones_like(rows.label), rows.dense
        if labels:
            self._label = task_labels(rows.label[:, 1:], labels, model.tasks)
            for task, values in zip(model.tasks, self._label.T, strict=True):
                _refuse(data.path, task.column, bad_labels(values, task), f"is no label of {task.name}",
                        f"labels of it are {meaning_of(task)}")
        self._list_size = list_size_of(model.tasks)
        check_lists(len(self._label), self._list_size, data.path)
        for name, values in zip(data.dense_columns, rows.dense.T, strict=True):
            _refuse(data.path, name, np.isnan(values), "is empty", "drop those rows, or fill in the values")
        self._features, self.notes = _checked_ids(data.path, tables, rows, must_clip=data.on_bad_id == "clip")
        # By the position of the table, of each id. They stand behind the tables' columns.
        weighted = [position for position, table in enumerate(tables) if table.weights_column]
        self._weights = {position: weights_of_keys(rows.keys[column])
                         for column, position in enumerate(weighted, len(tables))}
        self._is_fixed = all(feature.offsets is None for feature in self._features)
        self._is_by_time = rows.time is not None
        if rows.time is None:
            bits = hash_counters(stream_key(data.seed, _HELD_OUT), np.arange(len(self._label)) // self._list_size)
            is_held_out = uniform(bits) < data.eval_fraction
        else:
            is_held_out = _is_newest(data, rows.time)
        self._eval_rows = np.flatnonzero(is_held_out)
        self._train_rows = np.flatnonzero(~is_held_out)
        self._orders: dict[int, NDArray[np.int64]] = {}  # Of the two newest epochs: threads may be in both.
        self._ordering = threading.Lock()

    @property
    def num_train_samples(self) -> int:
        """Rows that are not held out."""
        return len(self._train_rows)

    @property
    def num_eval_samples(self) -> int:
        """Rows that are held out."""
        return len(self._eval_rows)

    def fingerprint(self) -> str:
        """Of every value that the spec reads, in the order of the rows; and of which rows a split by time holds out."""
        arrays = [self._label, self._dense, *(array for one in self._features for array in (one.ids, one.offsets)),
                  *([self._eval_rows] if self._is_by_time else []), *self._weights.values()]
        with ThreadPoolExecutor(_NUM_HASHERS) as threads:  # hashing frees the interpreter
            return hashlib.sha256("".join(threads.map(_digest, arrays)).encode()).hexdigest()

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of the epoch's own order."""
        with self._ordering:
            if epoch not in self._orders:
                bits = hash_counters(stream_key(self._seed, _ORDER, epoch), self._train_rows // self._list_size)
                before = {one: order for one, order in self._orders.items() if abs(one - epoch) == 1}
                self._orders = {**before, epoch: self._train_rows[np.argsort(bits, kind="stable")]}
            order = self._orders[epoch]
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
            dense=self._dense[rows], ids=np.concatenate([ids for ids, _ in taken]),
            lengths=np.stack([lengths for _, lengths in taken]), label=self._label[rows], is_fixed=self._is_fixed,
            weights=np.concatenate([
                np.ones(len(ids), np.float32) if (values := self._weights.get(position)) is None else
                replace(feature, ids=values.reshape(feature.ids.shape)).take(rows)[0]
                for position, (feature, (ids, _)) in enumerate(zip(self._features, taken, strict=True))
            ]) if self._weights else None,
        )


@dataclass(frozen=True, slots=True)
class _Feature:
    """All ids of a column: [rows, ids of each], or one behind the other with offsets [rows + 1]."""

    ids: NDArray[Any]  # int64 of a dynamic table, else int32
    offsets: NDArray[np.int64] | None

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """The rows' ids and how many each has."""
        if self.offsets is None:
            return self.ids[rows].reshape(-1), np.full(len(rows), self.ids.shape[1], np.int32)
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        # Each row's first position, less what came before it in the output, plus the position in the output.
        shift = self.offsets[rows] - (np.cumsum(lengths) - lengths)
        return self.ids[np.repeat(shift, lengths) + np.arange(lengths.sum())], lengths.astype(np.int32)


def _digest(array: NDArray[Any] | None) -> str:
    if array is None:
        return "none;"
    return f"{array.dtype.str}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()};"


def _read(data: DataSpec, tables: Sequence[Table], labels: tuple[LabelColumn, ...]) -> RawRows:
    """All rows of the file, or of all files of a folder or a glob; the first that cannot be read is an error."""
    inputs = Inputs()
    files = inputs.find(data.path)
    # Every column of ids is read as lists, so that an error can say how many ids a cell has.
    sparse = tuple(SparseColumn(table.name, "text" if table.is_dynamic else "integer", is_list=True, max_ids=1 << 31)
                   for table in tables) + tuple(
                       SparseColumn.of_weights(table) for table in tables if table.weights_column)
    portions, times = [], _times(inputs, files, data) if data.time_column else ()
    roles = _Roles(data, sparse, times, labels)
    for file in files:
        if not file.size_bytes:
            raise DataError(f"{file.uri}: the file is empty", fix="leave it out of data.path, or write it again")
        suffix = _suffix(file)
        if suffix == ".npz":
            found: Iterator[RawRows] = iter([_read_npz(inputs, file, roles)])
        else:
            reader = _reader(inputs, file, suffix, roles)
            found = (rows for segment in reader.segments(file, 1 << 62) for rows in reader.read(segment, 64 << 20))
        for rows in found:
            if rows.bad:
                at, more = rows.bad[0], f"; such rows: {rows.num_bad:,}" if rows.num_bad > 1 else ""
                raise DataError(f"{file.uri}, line {at.line + 1:,}: {at.why}{more}",
                                fix="ids are integers from 0 up, the label is 0 or 1, dense columns are numbers; "
                                    "`embark data prepare` reads words and missing values")
            portions.append(rows)
    if not any(map(len, portions)):
        raise DataError(f"{data.path}: has columns, but no rows", fix="add at least one row below its header")
    return RawRows.join(portions)


def _times(inputs: Inputs, files: Sequence[InputFile], data: DataSpec) -> tuple[TimeColumn, ...]:
    """The column of `data.time_column`, in the format of the first file."""
    first, suffix = files[0], _suffix(files[0])
    if suffix == ".npz":
        cells = [str(cell) for cell in _load_npz(inputs, first, [data.time_column])[data.time_column][:_SAMPLE_ROWS]]
        columns: tuple[Column, ...] = (Column.of(data.time_column, cells, ("", "NaT")),)
    else:
        how = {"format": "parquet"} if suffix in PARQUET_SUFFIXES else \
            {"format": "csv", "delimiter": DELIMITERS.get(suffix, ","), "header": True}
        columns = take_sample(PrepareSpec.model_validate(how), (), inputs, files).columns
    if found := find_times(data.model_copy(update={"prepare": PrepareSpec(time_unit=data.prepare.time_unit)}), columns,
                           first.uri):
        return found
    names = [column.name for column in columns]
    raise DataError(f"{first.uri}: has no column {data.time_column!r}, which data.time_column names",
                    fix=nearest(data.time_column, names))


def _is_newest(data: DataSpec, time: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The newest share; rows of one moment stay together."""
    rank = max(1, round(len(time) * data.eval_fraction))
    start = np.partition(time, len(time) - rank)[len(time) - rank]
    if start == time.min():
        raise DataError(f"{data.path}: holding out the newest {data.eval_fraction:g} by column {data.time_column!r} "
                        f"leaves no rows to train on: so many have the time {moment_text(int(start))}",
                        fix="leave data.time_column out, or make data.eval_fraction smaller")
    is_newest: NDArray[np.bool_] = time >= start
    return is_newest


@dataclass(frozen=True, slots=True)
class _Roles:
    """What the columns are."""

    data: DataSpec
    sparse: tuple[SparseColumn, ...]
    times: tuple[TimeColumn, ...]
    labels: tuple[LabelColumn, ...]

    @property
    def label(self) -> str:
        return self.labels[0].name if self.labels else self.data.label

    def schema(self, format: Literal["csv", "parquet"], delimiter: str = "") -> Schema:
        return Schema(format, self.label, self.data.dense_columns, self.sparse, (), delimiter=delimiter,
                      has_header=format == "csv", times=self.times, time_column=self.data.time_column,
                      is_split_by_time=bool(self.times), labels=self.labels)


def _reader(inputs: Inputs, file: InputFile, suffix: str, roles: _Roles) -> Reader:
    if suffix in PARQUET_SUFFIXES:
        return ParquetReader(roles.schema("parquet"), _STRICT, inputs)
    if suffix in DELIMITERS:
        return CsvReader(roles.schema("csv", DELIMITERS[suffix]), _STRICT, inputs)
    raise DataError(f"{file.uri}: files that end in {suffix!r} are not read",
                    fix="one of: " + ", ".join((*DELIMITERS, *PARQUET_SUFFIXES, ".npz")))


def _suffix(file: InputFile) -> str:
    return "." + file.name.lower().removesuffix(".gz").rpartition(".")[2]


def _load_npz(inputs: Inputs, file: InputFile, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    try:
        with open(str(inputs.local_path(file.uri)), "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            if lacking := [name for name in names if name not in arrays.files]:
                raise DataError(f"{file.uri}: has no column {lacking[0]!r}", fix=nearest(lacking[0], arrays.files))
            return {name: arrays[name] for name in names}
    except DataError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
        if isinstance(error, OSError) and error.errno:
            raise explain_data(error, file.uri) from error
        raise DataError(f"{file.uri}: is not an NPZ file of plain arrays: {error}",
                        fix="write it with numpy.savez, without objects") from error


def _read_npz(inputs: Inputs, file: InputFile, roles: _Roles) -> RawRows:
    parser = RowParser(roles.schema("parquet"), _STRICT)
    loaded = _load_npz(inputs, file, parser.columns)
    if len({len(array) for array in loaded.values()}) > 1:
        sizes = ", ".join(f"{name} {len(array)}" for name, array in loaded.items())
        raise DataError(f"{file.uri}: the columns differ in their number of rows: {sizes}",
                        fix="write arrays of the same length")
    ids = {column.source for column in roles.sparse}
    for name, array in loaded.items():
        if array.ndim != 1 and not (array.ndim == 2 and name in ids):
            wanted = "1 or 2 dimensions (rows, ids)" if name in ids else "1 dimension"
            raise DataError(f"{file.uri}: column {name!r} has {array.ndim} dimensions and must have {wanted}",
                            fix="reshape the array before numpy.savez")

    import pyarrow  # the readers' import has said so if it is missing

    def column(name: str) -> Any:
        array = loaded[name]
        values = pyarrow.array(array.reshape(-1))
        return values if array.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(values, array.shape[1])

    rows = np.arange(len(loaded[roles.label]))
    return parser.parse(column, Location(rows, rows, len(rows)), file.uri)


def _refuse(path: str, column: str, is_bad: NDArray[np.bool_], what: str, fix: str) -> None:
    if is_bad.any():
        raise DataError(f"{path}: column {column!r}, row {int(is_bad.argmax()) + 1:,} of the data: {what}; such rows: "
                        f"{int(is_bad.sum()):,}", fix=fix)


def _checked_ids(
    path: str, tables: Sequence[Table], rows: RawRows, *, must_clip: bool
) -> tuple[list[_Feature], tuple[str, ...]]:
    """Every column is looked at before any is refused, so that one error names them all."""
    columns = [(keys.view(np.int64), np.asarray(lengths, np.int64))
               for _, keys, lengths in zip(tables, rows.keys, rows.lengths, strict=False)]  # weights stand behind them
    for table, (_, lengths) in zip(tables, columns, strict=True):
        most = int(lengths.max())
        _refuse(path, table.name, lengths > table.multi_hot, f"has more ids than the table takes, {table.multi_hot}; "
                f"the most is {most}", f"set multi_hot = {most} for table {table.name}")
        if table.multi_hot == 1:
            _refuse(path, table.name, lengths == 0, "is empty", "drop those rows, or fill in the values")
    bad = [found for table, column in zip(tables, columns, strict=True) if (found := _find_bad_ids(table, *column))]
    if bad and not must_clip:
        raise DataError(f"{path}: " + "\n  ".join(what for what, _ in bad),
                        fix="; ".join(fix for _, fix in bad) + '; or data.on_bad_id = "clip" to clip them')
    features = [_feature(table, *column) for table, column in zip(tables, columns, strict=True)]
    return features, tuple(f"{what}; clipped" for what, _ in bad)


def _find_bad_ids(table: Table, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[str, str] | None:
    """What is wrong with the ids of a column that its table does not hold, and the fix."""
    if table.is_dynamic:  # the hashes of any values
        return None
    is_bad = (ids < 0) | (ids >= table.rows)
    if not is_bad.any():
        return None
    first, smallest = int(is_bad.argmax()), int(ids.min())
    row = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
    what = (f"column {table.name!r}: ids outside 0 to {table.rows - 1}: {int(is_bad.sum())}, the first is "
            f"{int(ids[first])} in row {row + 1} of the data")
    fix = f"ids start at 0, the smallest here is {smallest}" if smallest < 0 else f"rows = {int(ids.max()) + 1}"
    return what, f"{table.name}: {fix}"


def _feature(table: Table, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> _Feature:
    clipped: NDArray[Any] = ids if table.is_dynamic else np.clip(ids, 0, table.rows - 1).astype(np.int32)
    if lengths.min() == lengths.max():
        return _Feature(clipped.reshape(len(lengths), int(lengths[0])), None)
    return _Feature(clipped, np.concatenate([[0], np.cumsum(lengths)]))

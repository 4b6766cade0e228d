"""Files read into memory: one row a sample, one column a feature. They are read as a preparation reads them, except
that a bad row is an error and nothing is guessed."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Array, Int32s, Int64s, Mask, ragged_positions
from embark.features.arrow.row_parser import RowParser
from embark.features.encoding import PLAIN_FEATURES, plain_options, plain_schema, weights_of_keys
from embark.features.hashing import hash_counters, stream_key, uniform
from embark.features.made import bucket_ids
from embark.features.numbers import NumberSample, fit_numbers, numbers_of, with_bounds
from embark.features.rows import CUT_LISTS, RawRows
from embark.features.schema import Schema
from embark.features.values import moment_text
from embark.spec import DataSpec, FeaturesSpec, ModelSpec, PrepareSpec, Table, label_columns, list_size_of
from embark.values import frozen
from .loader import Batch, check_range
from .prepare.guess import find_times
from .prepare.inputs import InputFile, Inputs, tables_of
from .prepare.later_rows import fit_schema
from .prepare.sampling import take_sample
from .prepare.tasks import open_reader
from .prepared.manifest import versioned
from .task_labels import bad_labels, check_lists, meaning_of, task_labels

_HELD_OUT, _ORDER = range(2)


class ColumnsSource:
    """The rows of the file, in a new order each epoch. Which are held out depends on the seed and the row alone, or,
    with `data.time_column`, on the rows' times."""

    notes: tuple[str, ...]  # Sentences about cut lists and clipped ids.

    def __init__(self, model: ModelSpec, data: DataSpec, features: FeaturesSpec = PLAIN_FEATURES) -> None:
        tables, labels = model.table_list(), label_columns(model.tasks)
        schema = plain_schema(tables, data.dense_columns, data, model.tasks, features=features)
        if data.label and not labels and data.label in (*schema.dense, *(column.source for column in schema.read)):
            raise DataError(f"{data.path}: column {data.label!r} is data.label and also a feature, which would show "
                            "the model the answer", "remove it from data.dense_columns and from the tables")
        inputs, files, schema = open_files(data, features, schema, plain_options(data, header=True))
        rows = read_rows(inputs, files, schema, RowParser(schema, plain_options(data))).cut_lists(
            [table.multi_hot for table in (*tables, *(table for table in tables if table.weights_column))])
        self._seed, self._tables = data.seed, tables_of(files)
        self._label, self._dense = rows.label if data.label else np.ones_like(rows.label), rows.dense
        if labels:
            self._label = task_labels(rows.label[:, 1:], labels, model.tasks)
            for task, values in zip(model.tasks, self._label.T, strict=True):
                _refuse(data.path, task.column, bad_labels(values, task), f"is no label of {task.name}",
                        f"labels of it are {meaning_of(task)}")
        self._list_size = list_size_of(model.tasks)
        check_lists(len(self._label), self._list_size, data.path)
        for name, values in zip(data.dense_columns, rows.dense.T, strict=True):
            refuse_empty(data.path, name, np.isnan(values))
        # The weight of each id, by the position of its table. Weights stand behind the tables' columns.
        weighted = [position for position, table in enumerate(tables) if table.weights_column]
        self._weights = {position: weights_of_keys(rows.keys[column])
                         for column, position in enumerate(weighted, len(tables))}
        self._is_by_time = rows.time is not None
        if rows.time is None:
            bits = hash_counters(stream_key(data.seed, _HELD_OUT), np.arange(len(self._label)) // self._list_size)
            is_held_out = uniform(bits) < data.eval_fraction
        else:
            is_held_out = _is_newest(data, rows.time)
        self._eval_rows = np.flatnonzero(is_held_out)
        self._train_rows = np.flatnonzero(~is_held_out)
        names = data.dense_columns
        if features.fitted:
            self.numbers = numbers_of(features.fitted, names)
        else:
            sample = NumberSample.of(data.seed, 0, self._train_rows, self._dense[self._train_rows])
            self.numbers = fit_numbers(features, names, sample, may_add=False, bucketed=schema.bucketed)
        schema = with_bounds(schema, self.numbers)
        rows = replace(rows, keys=tuple(
            bucket_ids(column, schema, self._dense).view(np.uint64) if column.kind == "bucket" else keys
            for column, keys in zip(schema.sparse, rows.keys, strict=True)))
        self._features, self.notes = _checked_ids(data.path, tables, rows, must_clip=data.on_bad_id == "clip")
        self._is_fixed = all(feature.offsets is None for feature in self._features)
        self._dense = self.numbers.encode(self._dense)
        self.num_train_samples, self.num_eval_samples = len(self._train_rows), len(self._eval_rows)
        self._order = lru_cache(2)(self._epoch_order)  # Threads may be in two epochs.

    def fingerprint(self) -> str:
        """Return a checksum of every value that the spec reads, in the order of the rows, and of which rows a split by
        time holds out; with the versions of tables."""
        arrays = [self._label, self._dense, *(array for one in self._features for array in (one.ids, one.offsets)),
                  *([self._eval_rows] if self._is_by_time else []), *self._weights.values()]
        tables = "".join(f"{one.id}{one.version};" for one in self._tables)
        return versioned(hashlib.sha256((tables + "".join(map(_digest, arrays))).encode()).hexdigest(),
                         [f"{one.kind} {one.version}" for one in self._tables])

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return rows `start` to `stop` of the epoch's order."""
        return self._batch(self._order(epoch), start, stop)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return held-out rows, in the file's order."""
        return self._batch(self._eval_rows, start, stop)

    def _epoch_order(self, epoch: int) -> Int64s:
        bits = hash_counters(stream_key(self._seed, _ORDER, epoch), self._train_rows // self._list_size)
        return self._train_rows[np.argsort(bits, kind="stable")]

    def _batch(self, order: Int64s, start: int, stop: int) -> Batch:
        check_range(start, stop, len(order))
        rows = order[start:stop]
        taken = [feature.take(rows) for feature in self._features]
        return Batch(
            dense=self._dense[rows], ids=np.concatenate([ids for ids, _ in taken]),
            lengths=np.stack([lengths for _, lengths in taken]), label=self._label[rows], is_fixed=self._is_fixed,
            weights=np.concatenate([
                np.ones(len(ids), np.float32) if (values := self._weights.get(position)) is None else
                replace(feature, ids=values.reshape(feature.ids.shape)).take(rows)[0]
                for position, (feature, (ids, _)) in enumerate(zip(self._features, taken, strict=True))
            ]) if self._weights else None
        )


@frozen
class _Feature:
    """All ids of a column: [rows, ids of each], or one behind the other with offsets [rows + 1]."""

    ids: Array  # int64 of a dynamic table, else int32
    offsets: Int64s | None

    def take(self, rows: Int64s) -> tuple[Array, Int32s]:
        """Return the rows' ids and how many each has."""
        if self.offsets is None:
            return self.ids[rows].reshape(-1), np.full(len(rows), self.ids.shape[1], np.int32)
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        return self.ids[ragged_positions(self.offsets[rows], lengths)], lengths.astype(np.int32)


def _digest(array: Array | None) -> str:
    if array is None:
        return "none;"
    return f"{array.dtype.str}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()};"


def open_files(
    data: DataSpec, features: FeaturesSpec, schema: Schema, options: PrepareSpec, names: Sequence[str] = ()
) -> tuple[Inputs, list[InputFile], Schema]:
    """Find the files at `data.path`. Return also the schema with their format and times; they have columns `names`
    too."""
    inputs = Inputs()
    files = inputs.find(data.path)
    times = (data.time_column,) if data.time_column else ()
    sample = take_sample(options, (*schema.needed, *names, *times), inputs, files)
    schema = fit_schema(schema, sample, files[0].uri, (*names, *times))
    found = find_times(features, data.changed(prepare=options), sample.columns, files[0].uri)
    return inputs, files, replace(schema, times=found, time_column=data.time_column, is_split_by_time=bool(found))


def read_rows(inputs: Inputs, files: Sequence[InputFile], schema: Schema, parser: RowParser) -> RawRows:
    """Read all rows; the first one that cannot be read is an error."""
    reader, portions = open_reader(schema, parser.prepare, inputs, parser), []
    for file in files:
        for rows in (rows for segment in reader.segments(file, 1 << 62) for rows in reader.read(segment, 64 << 20)):
            if rows.bad:
                at, more = rows.bad[0], f"; such rows: {rows.num_bad:,}" if rows.num_bad > 1 else ""
                raise DataError(f"{file.uri}, line {at.line + 1:,}: {at.why}{more}",
                                "ids are integers from 0 up, the label is 0 or 1, dense columns are numbers; "
                                    "`embark data prepare` reads words and missing values")
            portions.append(rows)
    return RawRows.join(portions)


def _is_newest(data: DataSpec, time: Int64s) -> Mask:
    """Mark the newest share; rows of one moment stay together."""
    rank = max(1, round(len(time) * data.eval_fraction))
    start = np.partition(time, len(time) - rank)[len(time) - rank]
    if start == time.min():
        raise DataError(f"{data.path}: holding out the newest {data.eval_fraction:g} by column {data.time_column!r} "
                        f"leaves no rows to train on: so many have the time {moment_text(int(start))}",
                        "leave data.time_column out, or make data.eval_fraction smaller")
    is_newest: Mask = time >= start
    return is_newest


def _refuse(path: str, column: str, is_bad: Mask, what: str, fix: str) -> None:
    if is_bad.any():
        raise DataError(f"{path}: column {column!r}, row {int(is_bad.argmax()) + 1:,} of the data: {what}; such rows: "
                        f"{int(is_bad.sum()):,}", fix)


def refuse_empty(path: str, column: str, is_empty: Mask | None) -> None:
    """Refuse data without a value in some rows of a column that must have one."""
    if is_empty is not None:
        _refuse(path, column, is_empty, "is empty", "drop those rows, or fill in the values")


def _checked_ids(
    path: str, tables: Sequence[Table], rows: RawRows, *, must_clip: bool
) -> tuple[list[_Feature], tuple[str, ...]]:
    """Return the features and notes on cut lists and clipped ids. One error names all columns with ids outside their
    tables."""
    columns = []
    for table, keys, num_ids, is_missing in zip(tables, rows.keys, rows.lengths, rows.is_missing, strict=False):
        lengths = np.ones(len(rows), np.int64) if num_ids is None else num_ids.astype(np.int64)
        refuse_empty(path, table.name, (lengths == 0) & (table.multi_hot == 1) if is_missing is None else is_missing)
        columns.append((keys.view(np.int64), lengths))
    bad = [found for table, column in zip(tables, columns, strict=True) if (found := find_bad_ids(table, *column))]
    if bad and not must_clip:
        raise DataError(f"{path}: " + "\n  ".join(what for what, _ in bad),
                        "; ".join(fix for _, fix in bad) + '; or data.on_bad_id = "clip" to clip them')
    features = [_feature(table, *column) for table, column in zip(tables, columns, strict=True)]
    cut = [f"{CUT_LISTS}: {rows.num_cut:,}"] if rows.num_cut else []
    return features, (*cut, *(f"{what}; clipped" for what, _ in bad))


def find_bad_ids(table: Table, ids: Int64s, lengths: Int64s) -> tuple[str, str] | None:
    """Say what is wrong with the ids of a column that its table does not hold, and the fix."""
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


def _feature(table: Table, ids: Int64s, lengths: Int64s) -> _Feature:
    clipped: Array = ids if table.is_dynamic else np.clip(ids, 0, table.rows - 1).astype(np.int32)
    if lengths.min() == lengths.max():
        return _Feature(clipped.reshape(len(lengths), int(lengths[0])), None)
    return _Feature(clipped, np.concatenate([[0], np.cumsum(lengths)]))

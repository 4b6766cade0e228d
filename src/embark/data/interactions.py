"""A log of users and items, in memory: a sample is a user's items in order, with negatives drawn for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.hashing import hash_counters, stream_key, uniform
from embark.data.loader import Batch
from embark.data.prepare.inputs import Inputs
from embark.errors import DataError, MissingPackage, nearest
from embark.spec import DataSpec, ModelSpec, Table

I64 = NDArray[np.int64]
_ORDER, _NEGATIVES, _EVAL_NEGATIVES = range(3)
NUM_HELD_OUT = 2  # Of each user: the last item for testing, the one before it for validation.
MIN_LENGTH = 3  # Users with fewer items are trained on, and not evaluated.
MAX_REDRAWS = 100


class InteractionsSource:
    """The items of each user but the last two are trained on, or the newest of them that `max_length` has room for. An
    evaluation has one item more, its last, which is what the model has to find."""

    def __init__(self, model: ModelSpec, data: DataSpec) -> None:
        self._tables, self._seed, self._num_dense = model.table_list(), data.seed, model.num_dense
        roles = model.sequence
        by_name = {table.name: table for table in self._tables}
        self._history, self._negatives = by_name[roles.history], by_name.get(roles.negatives)
        self._times = roles.times
        log = read_log(data)
        _check_items(data, log.items, self._history)
        self._items, self._stamps, self._num_rows = log.items.astype(np.int32), log.times, self._history.rows
        is_eval_last = 1 if data.eval_split == "test" else 2
        lengths = np.diff(log.starts)
        self._starts = log.starts[:-1]
        is_held_out = lengths >= MIN_LENGTH
        ends = self._starts + lengths
        train_ends = np.where(is_held_out, ends - NUM_HELD_OUT, ends)
        self._train_users = np.flatnonzero(train_ends - self._starts >= 2)  # the shortest has an item and the next one
        self._eval_users = np.flatnonzero(is_held_out)
        self._train_ends, self._eval_ends = train_ends, ends - is_eval_last + 1
        self._all_ends = ends
        # For «has the user chosen this item?»: all pairs in one sorted array. Training does not know those held out.
        users = np.repeat(np.arange(len(lengths)), lengths)
        pairs = users * self._num_rows + self._items
        self._chosen = np.unique(pairs)
        self._trained = np.unique(pairs[np.arange(len(pairs)) < np.repeat(train_ends, lengths)])
        self._catalog = np.unique(self._items)  # Negatives are drawn from these alone: other rows are no items.
        self._num_eval_negatives = data.interactions.num_eval_negatives
        if not len(self._train_users):
            raise DataError(f"{data.path}: no user has an item to train on besides the two newest",
                            fix="a log with at least 4 rows for a user")
        num_distinct = np.bincount(self._chosen // self._num_rows)
        if self._negatives is not None and num_distinct.max() >= len(self._catalog):
            raise DataError(f"{data.path}: user {log.users[num_distinct.argmax()]} chose all of the "
                            f"{len(self._catalog)} items of the log, so that no negative is left",
                            fix="leave out this user, or add rows of other items")
        long = int((train_ends - self._starts > self._history.multi_hot).sum())
        self.notes: tuple[str, ...] = (f"{long:,} of {len(lengths):,} users have more than {self._history.multi_hot} "
                                       "items to train on: the newest are used",) if long else ()
        self._order = lru_cache(2)(self._epoch_order)

    @property
    def num_train_samples(self) -> int:
        """Users with something to train on."""
        return len(self._train_users)

    @property
    def num_eval_samples(self) -> int:
        """Users of whom something is held out."""
        return len(self._eval_users)

    def fingerprint(self) -> str:
        """Of all rows, in order."""
        digest = hashlib.sha256(self._items.data)
        for array in (self._starts, self._stamps if self._times else None):
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Users `start` to `stop` of the epoch's order, with negatives of this epoch."""
        order = self._order(epoch)
        if not 0 <= start <= stop <= len(order):
            raise IndexError(f"samples {start} to {stop} of {len(order)}")
        users = order[start:stop]
        num = self._negatives.multi_hot if self._negatives else 0
        return self._batch(users, self._train_ends, self._trained, stream_key(self._seed, _NEGATIVES, epoch), num)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Held-out users, with the same negatives every time."""
        if not 0 <= start <= stop <= len(self._eval_users):
            raise IndexError(f"samples {start} to {stop} of {len(self._eval_users)}")
        num = self._num_eval_negatives if self._negatives else 0
        return self._batch(self._eval_users[start:stop], self._eval_ends, self._chosen,
                           stream_key(self._seed, _EVAL_NEGATIVES), num)

    def _batch(self, users: I64, ends: I64, chosen: I64, key: Any, num_negatives: int) -> Batch:
        ends = ends[users]
        lengths = np.minimum(ends - self._starts[users], self._history.multi_hot)
        rows = np.repeat(ends - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
        found: dict[str, tuple[NDArray[np.int32], I64]] = {self._history.name: (self._items[rows], lengths)}
        if self._negatives:
            found[self._negatives.name] = (
                self._draw(users, chosen, key, num_negatives), np.full(len(users), num_negatives))
        if self._times and self._stamps is not None:
            found[self._times] = (self._stamps[rows], lengths)
        missing = [table.name for table in self._tables if table.name not in found]
        if missing:
            raise DataError(f"model.tables: {missing[0]} is nothing that an interaction log has",
                            fix="it has the features that [model.sequence] names")
        return Batch(
            dense=np.zeros((len(users), self._num_dense), np.float32),
            ids=np.concatenate([found[table.name][0] for table in self._tables]),
            lengths=np.stack([found[table.name][1] for table in self._tables]).astype(np.int32),
            label=np.ones(len(users), np.float32), is_fixed=False,
        )

    def _draw(self, users: I64, chosen: I64, key: Any, num: int) -> NDArray[np.int32]:
        """Items of the log that are not among the users' `chosen`, all equally likely; by user and index alone."""
        counters = users[:, None] * num + np.arange(num)
        drawn = np.empty(counters.shape, np.int64)
        pending = np.ones(counters.shape, bool)
        for turn in range(MAX_REDRAWS):
            bits = hash_counters(key, counters[pending] * MAX_REDRAWS + turn)
            drawn[pending] = self._catalog[(uniform(bits) * len(self._catalog)).astype(np.int64)]
            pairs = np.broadcast_to(users[:, None], counters.shape)[pending] * self._num_rows + drawn[pending]
            at = np.minimum(np.searchsorted(chosen, pairs), len(chosen) - 1)
            pending[pending] = chosen[at] == pairs
            if not pending.any():
                break
        return drawn.astype(np.int32).reshape(-1)

    def _epoch_order(self, epoch: int) -> I64:
        bits = hash_counters(stream_key(self._seed, _ORDER, epoch), self._train_users)
        return self._train_users[np.argsort(bits, kind="stable")]


class Log:
    """All rows, user by user, each user's in order."""

    def __init__(self, users: NDArray[Any], items: I64, times: I64 | None) -> None:
        self.users, number, counts = np.unique(users, return_inverse=True, return_counts=True)
        order = np.argsort(number, kind="stable") if times is None else np.lexsort((times, number))
        self.items, self.starts = items[order], np.concatenate([[0], np.cumsum(counts)])
        self.times: NDArray[np.int32] | None = None if times is None else (times[order] - times.min()).astype(np.int32)


def read_log(data: DataSpec) -> Log:
    """Of a text, Parquet or NPZ file."""
    how, inputs = data.interactions, Inputs()
    local = inputs.local_path(inputs.find(data.path)[0].uri)
    if local is None:
        raise DataError(f"{data.path}: an interaction log is read from a local file", fix="copy it to this machine")
    names = (how.user, how.item, *([data.time_column] if data.time_column else []))
    columns = _read_npz(Path(local), names) if local.endswith(".npz") else _read_arrow(Path(local), data, names)
    items, times = columns[how.item], columns.get(data.time_column)
    if not len(items):
        raise DataError(f"{data.path}: has no rows", fix="write it again")
    if items.dtype.kind not in "iu":
        raise DataError(f"{data.path}: column {how.item!r} holds {items.dtype}, not whole numbers",
                        fix="number the items from 0 or 1 on")
    if times is not None:
        if times.dtype.kind not in "iuf":
            raise DataError(f"{data.path}: column {data.time_column!r} holds {times.dtype}, not a time",
                            fix="seconds since 1970, or ISO 8601 such as 2024-05-31 18:00:00")
        times = times.astype(np.int64)
        if times.max() - times.min() >= 2**31:
            raise DataError(f"{data.path}: the times of column {data.time_column!r} span more than 2³¹ seconds",
                            fix="write seconds, not milliseconds")
    users = columns[how.user]
    return Log(users if users.dtype.kind in "iu" else users.astype(str), items.astype(np.int64), times)


def _read_npz(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as arrays:
        for name in names:
            if name not in arrays.files:
                raise DataError(f"{path}: has no array {name!r}", fix=nearest(name, arrays.files))
        return {name: arrays[name] for name in names}


def _read_arrow(path: Path, data: DataSpec, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyarrow import csv, parquet
    except ImportError:
        raise MissingPackage("reading interaction logs needs pyarrow",
                             fix="pip install 'embark-rec[columns]', or an NPZ file") from None
    how = data.interactions
    try:
        if path.suffix in (".parquet", ".pq"):
            table = parquet.read_table(path)
        else:
            with path.open(encoding="utf-8") as file:
                delimiter = how.delimiter or _delimiter(file.readline())
            table = csv.read_csv(path, csv.ReadOptions(column_names=list(how.column_names) or None),
                                 csv.ParseOptions(delimiter=delimiter))
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(f"{data.path}: cannot be read: {str(error).splitlines()[0]}",
                        fix="a text file with one row a line, Parquet or NPZ") from error
    found: dict[str, NDArray[Any]] = {}
    for name in names:
        if name not in table.column_names:
            raise DataError(f"{data.path}: has no column {name!r}", fix=f"{nearest(name, table.column_names)}; a file "
                            "without a header needs data.interactions.column_names")
        column = table[name]
        if column.null_count:
            raise DataError(f"{data.path}: column {name!r} has {column.null_count:,} empty cells", fix="drop them")
        if pa.types.is_temporal(column.type):
            column = pc.cast(pc.cast(column, pa.timestamp("s"), safe=False), pa.int64())
        found[name] = column.to_numpy()
    return found


def _delimiter(line: str) -> str:
    return next((one for one in ("\t", ",", ";", " ") if one in line), ",")


def _check_items(data: DataSpec, items: I64, table: Table) -> None:
    is_bad: Sequence[bool] | NDArray[np.bool_] = (items < 0) | (items >= table.rows)
    if np.any(is_bad):
        raise DataError(f"{data.path}: item {items[np.argmax(is_bad)]} is not in 0 to {table.rows - 1}; such rows: "
                        f"{np.sum(is_bad):,}", fix=f"table {table.name} needs rows = {int(items.max()) + 1}"
                        if items.min() >= 0 else "number the items from 0 or 1 on")

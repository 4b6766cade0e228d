"""A log of users and items, in memory: a sample is a user's items in order, with negatives drawn for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from pyarrow import chunked_array

from embark.data.columns import find_bad_ids, open_files, read_rows, refuse_empty
from embark.data.loader import Batch, check_range
from embark.errors import DataError
from embark.features.arrays import Array, Int32s, Int64s, ragged_positions
from embark.features.arrow.cells import as_utf8, normalize_array
from embark.features.arrow.row_parser import Location, RowParser
from embark.features.encoding import plain_options
from embark.features.hashing import hash_counters, stream_key, uniform
from embark.features.rows import RawRows
from embark.features.schema import Schema, SparseColumn
from embark.spec import DataSpec, ModelSpec
from embark.spec.data import PrepareSpec
from embark.spec.features import GUESSED, FeaturesSpec

_ORDER, _NEGATIVES, _EVAL_NEGATIVES = range(3)
NUM_HELD_OUT = 2  # Each user's last item for testing, the one before it for validation.
MIN_LENGTH = 3  # Users with fewer items are trained on, and not evaluated.
MAX_REDRAWS = 100


class InteractionsSource:
    """The items of each user but the last two are trained on, or the newest of them that `max_length` has room for. An
    evaluation has one item more, its last, which is what the model has to find."""

    def __init__(self, model: ModelSpec, data: DataSpec, features: FeaturesSpec = GUESSED) -> None:
        self._tables, self._seed, self._num_dense = model.table_list(), data.seed, model.num_dense
        roles = model.sequence
        by_name = {table.name: table for table in self._tables}
        self._history, self._negatives = by_name[roles.history], by_name.get(roles.negatives)
        self._times = roles.times
        log = read_log(data, features)
        if bad := find_bad_ids(self._history, log.items, np.ones_like(log.items)):
            raise DataError(f"{data.path}: {bad[0]}", fix=bad[1])
        self._items, self._stamps, self._num_rows = log.items.astype(np.int32), log.times, self._history.rows
        is_eval_last = 1 if data.eval_split == "test" else 2
        lengths = np.diff(log.starts)
        self._starts = log.starts[:-1]
        is_held_out = lengths >= MIN_LENGTH
        ends = self._starts + lengths
        train_ends = np.where(is_held_out, ends - NUM_HELD_OUT, ends)
        self._train_users = np.flatnonzero(train_ends - self._starts >= 2)  # the shortest has an item and the next one
        self._eval_users = np.flatnonzero(is_held_out)
        self.num_train_samples, self.num_eval_samples = len(self._train_users), len(self._eval_users)
        self._train_ends, self._eval_ends = train_ends, ends - is_eval_last + 1
        self._all_ends = ends
        # All pairs of user and chosen item in one sorted array. Training does not know those held out.
        users = np.repeat(np.arange(len(lengths)), lengths)
        pairs = users * self._num_rows + self._items
        self._chosen = np.unique(pairs)
        self._trained = np.unique(pairs[np.arange(len(pairs)) < np.repeat(train_ends, lengths)])
        self.catalog: Int32s = np.unique(self._items)  # Negatives are drawn from these alone: other rows are no items.
        self._num_eval_negatives = data.interactions.num_eval_negatives
        if not len(self._train_users):
            raise DataError(f"{data.path}: no user has an item to train on besides the two newest",
                            fix="a log with at least 4 rows for a user")
        num_distinct = np.bincount(self._chosen // self._num_rows)
        if self._negatives is not None and num_distinct.max() >= len(self.catalog):
            raise DataError(f"{data.path}: user {log.users[num_distinct.argmax()]} chose all of the "
                            f"{len(self.catalog)} items of the log, so that no negative is left",
                            fix="leave out this user, or add rows of other items")
        long = int((train_ends - self._starts > self._history.multi_hot).sum())
        self.notes: tuple[str, ...] = (f"{long:,} of {len(lengths):,} users have more than {self._history.multi_hot} "
                                       "items to train on: the newest are used",) if long else ()
        self._order = lru_cache(2)(self._epoch_order)

    def fingerprint(self) -> str:
        """Return a checksum of all rows, in order."""
        digest = hashlib.sha256(self._items.data)
        for array in (self._starts, self._stamps if self._times else None):
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return users `start` to `stop` of the epoch's order, with negatives of this epoch."""
        order = self._order(epoch)
        check_range(start, stop, len(order))
        users = order[start:stop]
        num = self._negatives.multi_hot if self._negatives else 0
        return self._batch(users, self._train_ends, self._trained, stream_key(self._seed, _NEGATIVES, epoch), num)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return held-out users, with the same negatives every time."""
        check_range(start, stop, self.num_eval_samples)
        num = self._num_eval_negatives if self._negatives else 0
        return self._batch(self._eval_users[start:stop], self._eval_ends, self._chosen,
                           stream_key(self._seed, _EVAL_NEGATIVES), num)

    def eval_seen(self, start: int, stop: int) -> tuple[Int32s, Int64s]:
        """Return all items before the held-out one, user by user, and how many each user has."""
        check_range(start, stop, self.num_eval_samples)
        users = self._eval_users[start:stop]
        lengths = self._eval_ends[users] - 1 - self._starts[users]
        return self._items[ragged_positions(self._starts[users], lengths)], lengths

    def _batch(self, users: Int64s, ends: Int64s, chosen: Int64s, key: Any, num_negatives: int) -> Batch:
        ends = ends[users]
        lengths = np.minimum(ends - self._starts[users], self._history.multi_hot)
        rows = np.repeat(ends - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
        found: dict[str, tuple[Int32s, Int64s]] = {self._history.name: (self._items[rows], lengths)}
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

    def _draw(self, users: Int64s, chosen: Int64s, key: Any, num: int) -> Int32s:
        """Draw items of the log that are not among the users' `chosen`, all equally likely, by user and index alone."""
        counters = users[:, None] * num + np.arange(num)
        drawn = np.empty(counters.shape, np.int64)
        pending = np.ones(counters.shape, bool)
        for turn in range(MAX_REDRAWS):
            bits = hash_counters(key, counters[pending] * MAX_REDRAWS + turn)
            drawn[pending] = self.catalog[(uniform(bits) * len(self.catalog)).astype(np.int64)]
            pairs = np.broadcast_to(users[:, None], counters.shape)[pending] * self._num_rows + drawn[pending]
            at = np.minimum(np.searchsorted(chosen, pairs), len(chosen) - 1)
            pending[pending] = chosen[at] == pairs
            if not pending.any():
                break
        return drawn.astype(np.int32).reshape(-1)

    def _epoch_order(self, epoch: int) -> Int64s:
        bits = hash_counters(stream_key(self._seed, _ORDER, epoch), self._train_users)
        return self._train_users[np.argsort(bits, kind="stable")]


class Log:
    """All rows, user by user, the rows of each user in order."""

    def __init__(self, users: Array, items: Int64s, times: Int64s | None) -> None:
        self.users, number, counts = np.unique(users, return_inverse=True, return_counts=True)
        order = np.argsort(number, kind="stable") if times is None else np.lexsort((times, number))
        self.items, self.starts = items[order], np.concatenate([[0], np.cumsum(counts)])
        self.times: Int32s | None = None if times is None else (times[order] - times.min()).astype(np.int32)


class _LogParser(RowParser):
    """Reads the items and their times, and collects the cells of the users, who are sorted as they are written."""

    def __init__(self, schema: Schema, prepare: PrepareSpec, user: str) -> None:
        super().__init__(schema, prepare)
        self._user, self._users = user, list[Any]()

    @property
    def columns(self) -> list[str]:
        return [*super().columns, self._user]

    def parse(self, column: Callable[[str], Any], location: Location, where: str) -> RawRows:
        self._users.append(normalize_array(column(self._user)))
        return super().parse(column, location, where)

    def users(self, path: str) -> Array:
        """Return the numbers of the users, or all as text where one is not a number."""
        cells = normalize_array(chunked_array(self._users))
        found = self._cells.keys(cells, SparseColumn(self._user, "integer"))
        refuse_empty(path, self._user, found.is_missing)
        if found.is_bad is None:
            return found.keys.view(np.int64)
        return np.array(as_utf8(self._cells.text(cells)).to_pylist(), str)


def read_log(data: DataSpec, features: FeaturesSpec = GUESSED) -> Log:
    """Read text or Parquet files. Times that are numbers are seconds unless `data.prepare.time_unit` is set."""
    how = data.interactions
    options = plain_options(
        data, delimiter=how.delimiter, column_names=how.column_names, header=not how.column_names,
        time_unit="s" if data.prepare.time_unit == "auto" else data.prepare.time_unit)
    items = Schema("csv", "", (), (SparseColumn(how.item, "integer"),), ())
    inputs, files, schema = open_files(data, features, items, options, (how.user,))
    parser = _LogParser(schema, options, how.user)
    rows = read_rows(inputs, files, schema, parser)
    refuse_empty(data.path, how.item, rows.is_missing[0])
    seconds = None if rows.time is None else rows.time // 1_000_000
    if seconds is not None and seconds.max() - seconds.min() >= 2**31:
        raise DataError(f"{data.path}: the times of column {data.time_column!r} span more than 2³¹ seconds",
                        fix='set data.prepare.time_unit = "ms" if they are milliseconds')
    return Log(parser.users(data.path), rows.keys[0].view(np.int64), seconds)

"""A log of users and items, in memory: a sample is a user's items in order, with negatives drawn for it."""

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import chunked_array

from embark.errors import DataError
from embark.features.arrays import Array, Hashes, Int32s, Int64s, ragged_positions
from embark.features.arrow.cells import normalize_array
from embark.features.arrow.row_parser import Location, RowParser
from embark.features.encoding import plain_options
from embark.features.hashing import hash_counters
from embark.features.rows import RawRows
from embark.features.schema import Schema, SparseColumn
from embark.spec import DataSpec, FeaturesSpec, ModelSpec, PrepareSpec
from embark.spec.features import GUESSED
from embark.values import JsonDict, frozen
from .columns import find_bad_ids, open_files, read_rows, refuse_empty
from .kept_maps import LogMaps
from .loader import Batch, check_range
from .next_item import NextItemBatches, Users, order_key
from .prepare.id_numbering import IdFiles
from .prepare.sequences import ends_of, log_layout, most_distinct
from .prepared.manifest import IDS, SEQUENCES, Manifest, Part


class InteractionsSource:
    """The items of each user but the last two are trained on, or the newest of them that `max_length` has room for. An
    evaluation has one item more, its last, which is what the model has to find."""

    def __init__(self, model: ModelSpec, data: DataSpec, features: FeaturesSpec = GUESSED) -> None:
        log, self._seed = read_log(data, features), data.seed
        self._history = next(table for table in model.table_list() if table.name == model.sequence.history)
        if bad := find_bad_ids(self._history, log.items, np.ones_like(log.items)):
            raise DataError(f"{data.path}: {bad[0]}", bad[1])
        self._items, self._times = log.items.astype(np.int32), log.times if model.sequence.times else None
        lengths = np.diff(log.starts)
        self._starts, self._lengths, self._ends = log.starts[:-1], lengths, ends_of(lengths)
        self._split = 2 if data.eval_split == "test" else 1
        self._train_users = np.flatnonzero(self._ends[:, 0] >= 2)  # the shortest has an item and the next one
        self._eval_users = np.flatnonzero(self._ends[:, self._split])
        self.num_train_samples, self.num_eval_samples = len(self._train_users), len(self._eval_users)
        catalog, counts = np.unique(self._items, return_counts=True)
        self._batches = NextItemBatches(model, data, catalog, counts)
        self.catalog: Int32s = catalog
        self.counts: Int64s = counts  # How often each item of the catalog is in the log.
        if not len(self._train_users):
            raise DataError(f"{data.path}: no user has an item to train on besides the two newest",
                            "a log with at least 4 rows for a user")
        user, most = most_distinct(self._items, lengths)
        self._batches.check_users(data.path, most, f"user {log.name_of(user)}")
        long = int((self._ends[:, 0] > self._history.multi_hot).sum())
        self.notes: tuple[str, ...] = (f"{long:,} of {len(lengths):,} users have more than {self._history.multi_hot} "
                                       "items to train on: the newest are used",) if long else ()
        self._order = lru_cache(2)(self._epoch_order)
        self.maps = log.maps(self._history.name, self._digest()) if log.keys is not None else None

    def fingerprint(self) -> str:
        """Return a checksum of all rows, in order, and of the id map if there is one."""
        return self.maps.manifest.fingerprint() if self.maps else self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256(self._items.data)
        for array in (self._starts, self._times):
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return users `start` to `stop` of the epoch's order, with negatives of this epoch."""
        order = self._order(epoch)
        check_range(start, stop, len(order))
        users = order[start:stop]
        ends = self._ends[users, 0]
        return self._batches.train(self._users(users, ends, ends), epoch)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return held-out users, with the same negatives every time."""
        check_range(start, stop, self.num_eval_samples)
        users = self._eval_users[start:stop]
        return self._batches.evaluate(self._users(users, self._lengths[users], self._ends[users, self._split]))

    def eval_seen(self, start: int, stop: int) -> tuple[Int32s, Int64s]:
        """Return all items before the held-out one, user by user, and how many each user has."""
        check_range(start, stop, self.num_eval_samples)
        users = self._eval_users[start:stop]
        lengths = self._ends[users, self._split] - 1
        return self._items[ragged_positions(self._starts[users], lengths)], lengths

    def _users(self, users: Int64s, lengths: Int64s, ends: Int64s) -> Users:
        at = ragged_positions(self._starts[users], lengths)
        return Users(users, self._items[at], lengths, ends, None if self._times is None else self._times[at])

    def _epoch_order(self, epoch: int) -> Int64s:
        bits = hash_counters(order_key(self._seed, epoch), self._train_users)
        return self._train_users[np.argsort(bits, kind="stable")]


@frozen
class Log:
    """All rows, user by user, the rows of each user in order."""

    items: Int64s
    times: Int32s | None
    starts: Int64s
    keys: Hashes | None  # Of items that are words: those that have an id, rising.
    ids: Int32s | None  # Of these keys.
    counts: Int64s | None
    schema: Schema
    prepare: PrepareSpec
    sources: tuple[JsonDict, ...]
    users: Any  # The cells of the rows' users.
    firsts: Int64s  # A row of each user.

    def name_of(self, user: int) -> str:
        cell = self.users[int(self.firsts[user])].as_py()
        return cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)

    def maps(self, history: str, rows_sha256: str) -> LogMaps:
        """Return the id map with a manifest that names no file of rows, but has their checksum."""
        assert self.keys is not None
        assert self.ids is not None
        assert self.counts is not None
        schema = replace(self.schema, sparse=tuple(
            replace(column, name=history, column=column.source, kind="text") for column in self.schema.sparse))
        files = IdFiles.of(Path(IDS), history)
        arrays: dict[str, Array] = {
            str(files.keys): self.keys, str(files.ids): self.ids, str(files.counts): self.counts}
        num_rows = len(self.ids) + 1
        about = files.record("frequency", {"rows": num_rows, "distinct": len(self.ids), "kept": len(self.ids),
                                           "sha256": _sha256(self.keys, self.ids)}) | {"counts": str(files.counts)}
        layout = log_layout(history, num_rows, "")
        settings = {"schema": asdict(schema), "prepare": self.prepare.model_dump(mode="json"),
                    SEQUENCES: {"held_out": {}}, "id_maps": {history: about}}
        part = Part("memory", len(self.starts) - 1, 0, rows_sha256)
        return LogMaps(Manifest(layout, {"train": (part,)}, "", settings=json.loads(json.dumps(settings)),
                                sources=self.sources), arrays)


def _sha256(*arrays: Array) -> str:
    """Return the checksum of arrays as that of their files is made."""
    digest = hashlib.sha256()
    for array in arrays:
        file = io.BytesIO()
        np.save(file, array)
        digest.update(hashlib.sha256(file.getvalue()).digest())
    return digest.hexdigest()


class _LogParser(RowParser):
    """Reads the times, and collects the cells of users and items, whose kind is known when all are read."""

    def __init__(self, schema: Schema, prepare: PrepareSpec, names: tuple[str, str]) -> None:
        super().__init__(schema, prepare)
        self._names = names
        self._found: tuple[list[Any], list[Any]] = ([], [])

    @property
    def columns(self) -> list[str]:
        return [*dict.fromkeys((*super().columns, *self._names))]

    def parse(self, column: Callable[[str], Any], location: Location, where: str) -> RawRows:
        for name, found in zip(self._names, self._found, strict=True):
            found.append(normalize_array(column(name)))
        return super().parse(column, location, where)

    def keys(self, path: str, which: int) -> tuple[Hashes, Any, bool]:
        """Return the keys of the users or the items, their cells, and whether some are words."""
        name, cells = self._names[which], normalize_array(chunked_array(self._found[which]))
        found = self._cells.keys(cells, SparseColumn(name, "integer"))
        refuse_empty(path, name, found.is_missing)
        is_text = found.is_bad is not None and bool(found.is_bad.any())
        return self._cells.keys(cells, SparseColumn(name, "text")).keys if is_text else found.keys, cells, is_text


def read_log(data: DataSpec, features: FeaturesSpec) -> Log:
    """Read text or Parquet files. Times that are numbers are seconds unless `data.prepare.time_unit` is set. Items that
    are words get ids by frequency, as a preparation gives them."""
    how = data.interactions
    options = plain_options(
        data, delimiter=how.delimiter, column_names=how.column_names, header=not how.column_names,
        time_unit="s" if data.prepare.time_unit == "auto" else data.prepare.time_unit)
    inputs, files, schema = open_files(data, features, Schema("csv", "", (), (), ()), options, (how.user, how.item))
    parser = _LogParser(schema, options, (how.user, how.item))
    rows = read_rows(inputs, files, schema, parser)
    users, cells, _ = parser.keys(data.path, 0)
    items, _, is_text = parser.keys(data.path, 1)
    seconds = None if rows.time is None else rows.time // 1_000_000
    if seconds is not None and seconds.max() - seconds.min() >= 2**31:
        raise DataError(f"{data.path}: the times of column {data.time_column!r} span more than 2³¹ seconds",
                        'set data.prepare.time_unit = "ms" if they are milliseconds')
    keys = ids = nums = None
    own = items.view(np.int64)
    if is_text:
        keys, which, nums = np.unique(items, return_inverse=True, return_counts=True)
        rank = np.empty(len(keys), np.int64)
        rank[np.lexsort((keys, -nums))] = np.arange(1, len(keys) + 1)
        is_kept = nums >= (data.prepare.min_count or 1)
        own = np.where(is_kept, rank, 0)[which]
        keys, ids, nums = keys[is_kept], rank[is_kept].astype(np.int32), nums[is_kept]
    at = np.flatnonzero(own) if is_text else np.arange(len(own))
    _, firsts, number, counts = np.unique(users[at], return_index=True, return_inverse=True, return_counts=True)
    order = at[np.argsort(number, kind="stable")] if seconds is None else at[np.lexsort((seconds[at], number))]
    times = None if seconds is None else (seconds[order] - seconds.min()).astype(np.int32)
    schema = replace(schema, sparse=(SparseColumn(how.item, "text"),))
    return Log(own[order], times, np.concatenate([[0], np.cumsum(counts)]), keys, ids, nums, schema, options,
               tuple({"uri": os.path.abspath(file.uri) if "://" not in file.uri else file.uri, "bytes": file.size_bytes}
                     for file in files), cells, at[firsts])

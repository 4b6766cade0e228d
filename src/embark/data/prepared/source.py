"""Prepared data as batches: rows out of mapped blocks, one copy for each group of columns."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby

import numpy as np

from embark.data.loader import Batch
from embark.data.task_labels import task_labels
from embark.errors import DataError
from embark.features.arrays import Array, Bytes, Int32s, Int64s, UInt32s, ragged_positions
from embark.features.layout import REPAIR, Block, Layout
from embark.features.numbers import Numbers, read_numbers
from embark.formatting import shortlist
from embark.spec import DataSpec, Table, Task
from embark.values import frozen
from .manifest import NUMBERS, Manifest, Part, label_columns_of
from .order import BlockSlice, EpochOrder, Shuffle, block_table, row_key, row_order
from .parts import Parts

Allocate = Callable[[int], Bytes]  # Returns a buffer of this size, aligned to 16 bytes.
Rows = slice | Int64s  # Rows of a block: consecutive ones, or their numbers.
Range = tuple[int, int, int]  # Epoch, first sample, and the sample after the last.

_MOST_ORDERS = 3
_MOST_ROW_ORDERS = 16
_MOST_BUFFERS = 64
_FEW_ROWS = 4_000_000  # Up to this number of rows, training never waits for a loader.
MAX_NAMED = 8  # Columns that a note names at most.
_NUM_AHEAD = 4  # Parts that are announced before they are used.


@dataclass(frozen=True, slots=True, eq=False)
class RawBatches:
    """Batches of `num_rows` rows, consecutive in a block with space for `capacity` of them, whose fields are where
    `layout.map(capacity * num_rows)` says."""

    buffer: Bytes
    num_rows: int
    layout: Layout
    num_batches: int = 1
    capacity: int = 1


class PreparedSource:
    """The rows of a prepared data set, in a new order each epoch.

    The order depends on `data.seed`, `data.shuffle` and the epoch. Every method may be called from many threads.
    """

    def __init__(
        self, manifest: Manifest, tables: Sequence[Table], data: DataSpec, parts: Parts,
        allocate: Allocate | None = None, tasks: tuple[Task, ...] = ()
    ) -> None:
        self.layout: Layout = manifest.layout
        self._tasks, self._label_columns = tasks, label_columns_of(manifest)
        self._fingerprint, self._numbers = manifest.fingerprint(), manifest.settings.get(NUMBERS, [])
        self._data, self._parts, self._allocate = data, parts, allocate or partial(np.empty, dtype=np.uint8)
        self._shuffle: Shuffle = data.shuffle if data.shuffle != "auto" else (
            "rows" if manifest.num_rows("train") <= _FEW_ROWS else "blocks")
        self._train_parts = manifest.parts.get("train", ())
        self._eval_parts = manifest.parts.get(data.eval_split, ())
        self.block_rows: int = manifest.block_rows
        self._eval_order = EpochOrder([p.rows for p in self._eval_parts], self.block_rows)
        self.num_train_samples: int = manifest.num_rows("train")
        self.num_eval_samples: int = self._eval_order.num_rows
        self.notes: tuple[str, ...] = _notes(manifest, data)  # Sentences about the data for a person.
        names = [table.name for table in tables]
        self._selection = ColumnSelection.of(self.layout, names, [table.weights_feature for table in tables])
        rows = {feature.name: feature.rows for feature in self.layout.features}
        self._names, self._table_rows = tuple(names), np.array([rows[name] for name in names], np.int64)
        self._lock = threading.Lock()  # or two threads would compute one order
        self._order_locks = [threading.Lock() for _ in range(_MOST_ROW_ORDERS)]  # the same of a block's rows
        self._epoch_orders = lru_cache(_MOST_ORDERS)(self._epoch_order)
        self._row_orders = lru_cache(_MOST_ROW_ORDERS)(partial(row_order, data.seed))
        self._fixed_lengths = lru_cache(_MOST_ORDERS)(self._selection.fixed_lengths)
        self._buffers: dict[tuple[int, int], Block] = {}
        self._announced = (-1, -1)

    @cached_property
    def numbers(self) -> Numbers:
        """How columns became dense values, where these are not the cells by a plain formula."""
        return read_numbers(self._numbers)

    def fingerprint(self) -> str:
        return self._fingerprint

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return rows `start` to `stop` of the epoch's order."""
        return self._checked(self._batch(epoch, self._epoch(epoch).pieces(start, stop), stop - start),
                             f"samples {start} to {stop - 1} of epoch {epoch}")

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return rows of `data.eval_split`, in the order of the files."""
        return self._checked(self._batch(None, self._eval_order.pieces(start, stop), stop - start),
                             f"held-out samples {start} to {stop - 1}")

    def spare_rows(self, num_rows: int) -> int:
        """Return the extra rows that a raw batch needs so that the GPU can shuffle whole blocks; 0 if the batch is too
        small."""
        return 2 * self.block_rows if self._shuffle == "rows" and num_rows >= 2 * self.block_rows else 0

    def train_raw(
        self, ranges: Sequence[Range], into: Bytes, capacity: int = 1, *, spare_rows: int = 0
    ) -> RawBatches:
        """Return the rows of `train_rows` as the bytes of one block with all the layout's columns. With `spare_rows`:
        blocks as they are stored, and `block_table` behind them, where `Layout.row_order` is to be."""
        pieces: list[tuple[int, BlockSlice]] = []
        # Ranges that follow each other are one to copy: a call costs more than a small batch's rows.
        for epoch, start, stop in _joined(ranges):
            pieces += [(epoch, piece) for piece in self._epoch(epoch).pieces(start, stop)]
        num_rows = ranges[0][2] - ranges[0][1]
        out = self._views_of(into, capacity * num_rows + spare_rows)
        if spare_rows:
            self._fill_blocks(pieces, out, self.layout.row_order(capacity * num_rows, spare_rows).of(into), spare_rows)
        else:
            self._fill(pieces, out)
        return RawBatches(into, num_rows, self.layout, len(ranges), capacity)

    def _checked(self, batch: Batch, where: str) -> Batch:
        """Refuse or clip ids outside their tables, as `data.on_bad_id` says. They were inside when the data was
        prepared: one that is not is damage."""
        selection = self._selection
        if selection.is_fixed:
            starts = selection.fixed_starts(len(batch.label))
            largest = selection.largest_fixed(batch.ids, len(batch.label))
        else:
            starts = list(accumulate(batch.lengths.sum(axis=1, dtype=np.int64).tolist(), initial=0))
            largest = np.array([ids.max(initial=0) for ids in np.split(batch.ids.view(np.uint32), starts[1:-1])])
        if (largest < self._table_rows).all():
            return batch
        for number, rows in enumerate(self._table_rows.tolist()):
            ids = batch.ids[starts[number] : starts[number + 1]]
            is_bad = (ids < 0) | (ids >= rows)
            if self._data.on_bad_id == "clip":
                np.clip(ids, 0, rows - 1, out=ids)
            elif is_bad.any():
                at = int(is_bad.argmax())
                sample = int(np.searchsorted(np.cumsum(batch.lengths[number]), at, side="right"))
                raise DataError(
                    f"table {self._names[number]}: id {ids[at]} of sample {sample} of the batch is not in 0 to "
                    f"{rows - 1}, in {where}",
                    f"{REPAIR}; then run the same command to resume from the last checkpoint")
        return batch

    def _fill(self, pieces: Sequence[tuple[int | None, BlockSlice]], out: Block) -> None:
        at = 0
        for epoch, piece in pieces:
            end = at + piece.stop - piece.start
            with self._block(epoch, piece) as (block, rows):
                copy_block(out, slice(at, end), block, rows)
            at = end

    def _fill_blocks(
        self, pieces: Sequence[tuple[int, BlockSlice]], out: Block, order: Int32s, spare_rows: int
    ) -> None:
        """Copy whole blocks, as long as there is space and a good part of each is wanted."""
        table = block_table(order, self.block_rows)
        table[:] = (0, 0, 0, 0, 0, len(order))
        at = sample = number = 0
        is_in_order = False
        for epoch, piece in pieces:
            num_rows = piece.stop - piece.start
            num_others = piece.block_rows - num_rows
            has_line = number + is_in_order < len(table) - 1  # The last is for all rows without one of their own.
            if has_line and num_others <= min(spare_rows, 3 * num_rows):
                with self._stored(epoch, piece) as block:
                    copy_block(out, slice(at, at + piece.block_rows), block, slice(0, piece.block_rows))
                key, low = row_key(self._data.seed, epoch, piece)
                number += is_in_order
                table[number] = (key, low, piece.block_rows, at, piece.start, sample + num_rows)
                number, is_in_order = number + 1, False
                at += piece.block_rows
                spare_rows -= num_others
            else:
                with self._block(epoch, piece) as (block, rows):
                    copy_block(out, slice(at, at + num_rows), block, rows)
                if not is_in_order:
                    table[number] = (0, 0, 0, at, 0, 0)
                table[number, 5], is_in_order = sample + num_rows, True
                at += num_rows
            sample += num_rows

    def _batch(self, epoch: int | None, pieces: list[BlockSlice], num_rows: int) -> Batch:
        selection = self._selection
        dense = self._new(np.float32, num_rows, len(self.layout.dense))
        shape = (num_rows, len(self._label_columns)) if self._tasks else (num_rows,)
        label = self._new(np.float32, *shape)
        if selection.is_fixed:
            lengths, starts = self._fixed_lengths(num_rows), selection.fixed_starts(num_rows)
        else:
            lengths = self._ragged_lengths(epoch, pieces, num_rows)
            starts = list(accumulate((int(n) for n in lengths.sum(axis=1, dtype=np.int64)), initial=0))
        ids = self._new(np.int32, starts[-1])
        weights = np.ones(starts[-1], np.float32) if selection.weights else None
        ragged_at = [starts[index] for _, index in selection.ragged]
        at = 0
        for piece in pieces:
            end = at + piece.stop - piece.start
            with self._block(epoch, piece) as (block, rows):
                copy_rows(label[at:end], self._stored_label(block), rows)
                copy_rows(dense[at:end], block.dense, rows)
                for run in selection.runs:
                    target = ids[starts[run.index] : starts[run.index + run.num]]
                    features = block.groups[run.group][run.first : run.first + run.num]
                    copy_features(target.reshape(run.num, num_rows, run.multi_hot)[:, at:end], features, rows)
                for number, (ragged, index) in enumerate(selection.ragged):
                    some = _ragged_ids(block, ragged, rows)
                    own = slice(ragged_at[number], ragged_at[number] + len(some))
                    ids[own] = some
                    if weights is not None and index in selection.weights:
                        weights[own] = _ragged_ids(block, selection.weights[index], rows)
                    ragged_at[number] += len(some)
            at = end
        if self._tasks:
            label = task_labels(label, self._label_columns, self._tasks)
        return Batch(dense, ids, lengths, label, is_fixed=selection.is_fixed, weights=weights)

    def _stored_label(self, block: Block) -> Array:
        if not self._tasks:
            return block.label
        return block.labels if self.layout.labels else block.label[:, None]

    def _ragged_lengths(self, epoch: int | None, pieces: list[BlockSlice], num_rows: int) -> Int32s:
        lengths = self._selection.fixed_lengths(num_rows)
        at = 0
        for piece in pieces:
            end = at + piece.stop - piece.start
            with self._block(epoch, piece) as (block, rows):
                for ragged, index in self._selection.ragged:
                    lengths[index, at:end] = block.ragged[ragged][0][rows]
            at = end
        return lengths

    @contextmanager
    def _block(self, epoch: int | None, piece: BlockSlice) -> Iterator[tuple[Block, Rows]]:
        """Provide the arrays to copy from, and which rows."""
        with self._stored(epoch, piece) as block:
            yield block, self._rows(epoch, piece)

    @contextmanager
    def _stored(self, epoch: int | None, piece: BlockSlice) -> Iterator[Block]:
        self._announce_next_parts(epoch, piece)
        parts = self._eval_parts if epoch is None else self._train_parts
        with self._parts.using(parts[piece.part]) as part:
            yield part.block(piece.block)

    def _rows(self, epoch: int | None, piece: BlockSlice) -> Rows:
        if epoch is None or self._shuffle != "rows":
            return slice(piece.start, piece.stop)
        block = replace(piece, start=0, stop=piece.block_rows)  # all its pieces have one order
        with self._order_locks[piece.block % len(self._order_locks)]:
            order = self._row_orders(epoch, block)
        return order[piece.start : piece.stop]

    def _epoch(self, epoch: int) -> EpochOrder:
        with self._lock:
            return self._epoch_orders(epoch)

    def _epoch_order(self, epoch: int) -> EpochOrder:
        return EpochOrder([p.rows for p in self._train_parts], self.block_rows, shuffle=self._shuffle,
                          seed=self._data.seed, epoch=epoch)

    def _announce_next_parts(self, epoch: int | None, piece: BlockSlice) -> None:
        """Announce, once for each part that is begun, the parts behind it, into the next epoch if it is the last."""
        if (-1 if epoch is None else epoch, piece.part) == self._announced:
            return
        self._announced = (-1 if epoch is None else epoch, piece.part)
        coming: list[Part] = []
        if epoch is None:
            coming = list(self._eval_parts[piece.part + 1 : piece.part + 1 + _NUM_AHEAD])
        else:
            order = self._epoch(epoch).parts
            at = int(np.flatnonzero(order == piece.part)[0])
            coming = [self._train_parts[p] for p in order[at + 1 : at + 1 + _NUM_AHEAD]]
            if len(coming) < _NUM_AHEAD:
                following = self._epoch(epoch + 1).parts[: _NUM_AHEAD - len(coming)]
                coming += [self._train_parts[p] for p in following]
        self._parts.expect(coming)

    def _views_of(self, into: Bytes, num_rows: int) -> Block:
        """Return the cached views of a buffer: for small batches finding the fields costs as much as filling them."""
        if not self.layout.is_fixed:
            raise ValueError("there are no raw batches where rows have different numbers of ids")
        key = (int(into.ctypes.data), num_rows)
        found = self._buffers.get(key)
        if found is None:
            if len(self._buffers) >= _MOST_BUFFERS:
                self._buffers.clear()
            found = self._buffers[key] = Block.of(self.layout, into, num_rows)
        return found

    def _new(self, dtype: type[np.generic], *shape: int) -> Array:
        size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not size_bytes:
            return np.empty(shape, dtype)
        return self._allocate(size_bytes).view(dtype).reshape(shape)


@frozen
class _Run:
    """Features that follow each other in a group and in a batch."""

    group: int
    first: int  # The position of the first in the group.
    num: int
    index: int  # The index of the first among the selected features.
    multi_hot: int


@frozen
class ColumnSelection:
    """The features that a model takes, in its order."""

    multi_hot: tuple[int, ...]
    runs: tuple[_Run, ...]
    ragged: tuple[tuple[int, int], ...]
    """The index among `Layout.ragged`, and here, of each feature whose rows have different numbers of ids."""
    weights: Mapping[int, int]  # From the index of weighted ids here to the index of their weights in `Layout.ragged`.

    @property
    def is_fixed(self) -> bool:
        return not self.ragged

    @staticmethod
    def of(layout: Layout, names: Sequence[str], weights: Sequence[str]) -> ColumnSelection:
        """Select the features called `names`, and their `weights`, empty for those that have none; the layout has them
        all."""
        position = {feature.name: index for index, feature in enumerate(layout.features)}
        runs: list[_Run] = []
        ragged: list[tuple[int, int]] = []
        for index, name in enumerate(names):
            feature = layout.features[position[name]]
            if feature.is_ragged:
                ragged.append((layout.ragged.index(position[name]), index))
                continue
            group, at = layout.positions[position[name]]
            last = runs[-1] if runs else None
            if last and (last.group, last.first + last.num, last.index + last.num) == (group, at, index):
                runs[-1] = _Run(group, last.first, last.num + 1, last.index, last.multi_hot)
            else:
                runs.append(_Run(group, at, 1, index, feature.multi_hot))
        multi_hot = tuple(layout.features[position[name]].multi_hot for name in names)
        return ColumnSelection(multi_hot, tuple(runs), tuple(ragged), {
            index: layout.ragged.index(position[name]) for index, name in enumerate(weights) if name})

    def fixed_starts(self, num_rows: int) -> list[int]:
        """Return the index in a batch at which each feature's ids begin, and the end of the last one's."""
        return [num_rows * before for before in accumulate(self.multi_hot, initial=0)]

    def largest_fixed(self, ids: Int32s, num_rows: int) -> UInt32s:
        """Return the largest id of each feature in a batch; a negative one counts as a large one."""
        found, start = [], 0
        for multi_hot, equal in groupby(self.multi_hot):  # one call for features alike: small batches are many
            num = len(list(equal))
            stop = start + num * num_rows * multi_hot
            found.append(ids[start:stop].view(np.uint32).reshape(num, num_rows * multi_hot).max(axis=1, initial=0))
            start = stop
        return np.concatenate(found)

    def fixed_lengths(self, num_rows: int) -> Int32s:
        """Return [F, num_rows]."""
        return np.repeat(np.array(self.multi_hot, np.int32)[:, None], num_rows, axis=1)


def _ragged_ids(block: Block, index: int, rows: Rows) -> Array:
    """Return the ids of the rows, one row's behind the other's."""
    lengths, ids, offsets = block.ragged[index]
    if isinstance(rows, slice):
        return ids[offsets[rows.start] : offsets[rows.stop]]
    return np.take(ids, ragged_positions(offsets[rows], lengths[rows].astype(np.int64)))


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Join ranges that follow each other."""
    joined = [ranges[0]]
    for epoch, start, stop in ranges[1:]:
        before = joined[-1]
        if (epoch, start) == (before[0], before[2]):
            joined[-1] = (epoch, before[1], stop)
        else:
            joined.append((epoch, start, stop))
    return joined


def _notes(manifest: Manifest, data: DataSpec) -> tuple[str, ...]:
    notes = []
    if not manifest.num_rows(data.eval_split):
        notes.append(f"the data has no {data.eval_split} rows, so nothing is evaluated")
    chosen, schema = manifest.settings.get("prepare") or {}, manifest.settings.get("schema") or {}
    if unused := [str(name) for name in schema.get("ignored") or () if name not in chosen.get("ignored_columns", ())]:
        notes.append(f"column{'s' if len(unused) > 1 else ''} not used: {shortlist(unused, MAX_NAMED)}")
    return tuple(notes)


def copy_block(out: Block, to: slice, block: Block, rows: Rows) -> None:
    """Copy rows of all columns."""
    copy_rows(out.label[to], block.label, rows)
    copy_rows(out.dense[to], block.dense, rows)
    for target, group in zip(out.groups, block.groups, strict=True):
        copy_features(target[:, to], group, rows)


def copy_rows(out: Array, column: Array, rows: Rows) -> None:
    """Copy rows of a column [n, …], cast to what `out` holds."""
    if isinstance(rows, slice):
        out[...] = column[rows]
    elif out.dtype == column.dtype:
        np.take(column, rows, 0, out, "clip")  # "raise" would copy twice, to leave `out` alone if it does
    else:
        out[...] = np.take(column, rows, 0, mode="clip")


def copy_features(out: Array, features: Array, rows: Rows) -> None:
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

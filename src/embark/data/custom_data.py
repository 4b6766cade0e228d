"""Samples from the user's own file, by their positions: any rank can take any of them, and a run resume anywhere."""

import hashlib
import threading
from functools import lru_cache
from typing import Any

import numpy as np

from embark.errors import DataError, UserError
from embark.features.arrays import Array, Floats, Int32s, Int64s, Mask
from embark.spec import DataSpec, ModelSpec, Table, file_of, label_columns, list_size_of
from embark.spec.user_code import load_user_class, location_of, user_call, user_errors
from embark.values import JsonDict
from .loader import Batch, check_range
from .prepared.manifest import BLOCK_ROWS
from .prepared.order import EpochOrder, row_order
from .task_labels import bad_labels, check_lists, meaning_of, task_labels

FINGERPRINT_ROWS = 1024  # Samples of each split: all of them would take as long as an epoch.


class CustomSource:
    """Calls the user's class, and refuses what is not what it must be. Each epoch has an order of its own: blocks of
    positions, and the positions in each, by the seed alone."""

    notes: tuple[str, ...] = ()

    def __init__(self, model: ModelSpec, data: DataSpec) -> None:
        self._tables, self._num_dense, self._seed = model.table_list(), model.num_dense, data.seed
        self._tasks = model.tasks
        self._lock = threading.Lock()  # training's thread reads ahead while an evaluation reads
        with user_errors():
            kind = load_user_class(data.kind, data.code)
            if not callable(getattr(kind, "rows", None)):
                raise UserError(f"{file_of(data.kind)}: {kind.__name__} has no method rows(split, positions)",
                                "docs/start/custom-data.md shows one")
            self._where = location_of(kind.rows)
            with user_call(f"{file_of(data.kind)}: class {kind.__name__}", "__init__(self, data, model)"):
                self._own = kind(data, model)
            self.num_train_samples = self._count("num_train_samples")
            self.num_eval_samples = self._count("num_eval_samples")
        self._list_size = list_size_of(model.tasks)
        for name in ("num_train_samples", "num_eval_samples"):
            check_lists(getattr(self, name), self._list_size, f"{self._where.partition(':')[0]}: {name}")
        if not self.num_train_samples:
            raise DataError(f"{self._where}: num_train_samples is 0", "give it at least a batch of samples")
        self._order = lru_cache(2)(self._epoch_order)

    def fingerprint(self) -> str:
        """Return a checksum of samples spread over both splits, and of how many there are."""
        digest = hashlib.sha256(f"{self.num_train_samples} {self.num_eval_samples}".encode())
        for split, count in (("train", self.num_train_samples), ("eval", self.num_eval_samples)):
            if count:
                digest.update(rows_digest(self.rows(split, spread(count, FINGERPRINT_ROWS))))
        return digest.hexdigest()

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return samples of the epoch's order."""
        taken = [piece.block * BLOCK_ROWS + row_order(self._seed, epoch, piece)[piece.start : piece.stop]
                 for piece in self._order(epoch).pieces(start // self._list_size, -(-stop // self._list_size))]
        lists = np.concatenate(taken) if taken else np.empty(0, np.int64)
        positions = (lists[:, None] * self._list_size + np.arange(self._list_size)).reshape(-1)
        first = start // self._list_size * self._list_size
        return self.rows("train", positions[start - first : stop - first])

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return held-out samples in their own order."""
        check_range(start, stop, self.num_eval_samples)
        return self.rows("eval", np.arange(start, stop))

    def rows(self, split: str, positions: Int64s) -> Batch:
        """Return and check what the user's `rows` returns for these positions."""
        positions = positions.copy()
        positions.setflags(write=False)
        with self._lock, user_errors(), user_call(self._where, "rows(self, split, positions)"):
            found = self._own.rows(split, positions)
        try:
            label, dense, ids = found
        except (TypeError, ValueError):
            raise self._wrong(f"returned {type(found).__name__}", "return label, dense, ids") from None
        if not isinstance(ids, dict) or (missing := [t.name for t in self._tables if t.name not in ids]):
            what = f"ids without table {missing[0]}" if isinstance(ids, dict) else f"{type(ids).__name__} for ids"
            raise self._wrong(f"returned {what}", "ids is a dictionary from the name of each table to its ids")
        if self._tasks:
            label = self._task_labels(split, positions, label)
        else:
            label = self._floats("label", label, (len(positions),))
            self._refuse(split, positions, (label != 0) & (label != 1), "label", label, "labels are 0 or 1")
        dense = self._floats("dense", np.empty((len(positions), 0)) if dense is None and not self._num_dense else dense,
                             (len(positions), self._num_dense))
        is_bad = np.logical_or.reduce(~np.isfinite(dense), axis=1)
        self._refuse(split, positions, is_bad, "dense", dense, "fill in missing values")
        taken = [self._ids(split, positions, table, ids[table.name]) for table in self._tables]
        weights = [self._weights(split, positions, table, ids, lengths)
                   for table, (_, lengths) in zip(self._tables, taken, strict=True)]
        return Batch(dense=dense, ids=np.concatenate([one for one, _ in taken]), label=label, is_fixed=False,
                     lengths=np.stack([lengths for _, lengths in taken]),
                     weights=np.concatenate(weights) if any(t.weights_column for t in self._tables) else None)

    def _weights(
        self, split: str, positions: Int64s, table: Table, found: JsonDict, lengths: Int32s
    ) -> Floats:
        """Return the weights of the ids of a table, one behind the other; 1 if the table has none."""
        name, num_ids = table.weights_column, int(lengths.sum())
        if not name:
            return np.ones(num_ids, np.float32)
        if name not in found:
            raise self._wrong(f"returned ids without {name}, the weights of {table.name}",
                              f"ids[{name!r}] has a weight for each id of {table.name}")
        weights = self._floats(f"weights {name}", np.asarray(found[name]).reshape(-1), (num_ids,))
        at = np.repeat(positions, lengths)
        self._refuse(split, at, ~((weights >= 0) & np.isfinite(weights)), f"weights {name}", weights,
                     "weights are numbers from 0 up")
        return weights

    def _task_labels(self, split: str, positions: Int64s, label: Any) -> Floats:
        columns = label_columns(self._tasks)
        if not isinstance(label, dict) or (missing := [name for name in columns if name not in label]):
            what = f"label without {missing[0]}" if isinstance(label, dict) else f"{type(label).__name__} for label"
            raise self._wrong(f"returned {what}", "with [[model.tasks]] label is a dictionary from each label to "
                              f"[{len(positions)}], NaN where a sample has none")
        values = np.stack([self._floats(f"label {name}", label[name], (len(positions),)) for name in columns], axis=1)
        found = task_labels(values, columns, self._tasks)
        for position, task in enumerate(self._tasks):
            self._refuse(split, positions, bad_labels(found[:, position], task), f"label {task.column}",
                         found[:, position], f"labels of task {task.name} are {meaning_of(task)}")
        return found

    def _ids(
        self, split: str, positions: Int64s, table: Table, value: Any
    ) -> tuple[Array, Int32s]:
        num, name = len(positions), f"ids of {table.name}"
        has_lengths = isinstance(value, tuple) and len(value) == 2
        try:
            ids, lengths = map(np.asarray, value) if has_lengths else (np.asarray(value), None)
        except (TypeError, ValueError):
            raise self._wrong(f"returned {name} that are not an array", f"[{num}], [{num}, k], or, where their number "
                              f"differs, (ids one behind the other, lengths [{num}])") from None
        if lengths is not None and lengths.dtype.kind not in "iu" and lengths.size:
            raise self._wrong(f"returned {name} with lengths of type {lengths.dtype}", "return integers")
        if ids.dtype.kind not in "iu" and ids.size:
            raise self._wrong(f"returned {name} of type {ids.dtype}", "return integers")
        if lengths is None:
            if ids.shape[:1] != (num,) or ids.ndim > 2:
                raise self._wrong(f"returned {name} of shape {ids.shape} for {num} samples",
                                  f"[{num}], [{num}, k], or (ids one behind the other, lengths [{num}])")
            lengths = np.full(num, ids.shape[1] if ids.ndim == 2 else 1)
        elif lengths.shape != (num,) or (lengths < 0).any() or lengths.sum() != ids.size or ids.ndim != 1:
            raise self._wrong(f"returned {name} whose lengths, of shape {lengths.shape}, do not sum to their number, "
                              f"{ids.size}", f"lengths is [{num}]: how many ids each sample has")
        self._refuse(split, positions, lengths > table.multi_hot, f"number of {name}", lengths,
                     f"model.tables: {table.name}.multi_hot is {table.multi_hot}")
        ids = ids.reshape(-1)
        if table.is_dynamic:
            bits = ids if ids.dtype == np.uint64 else ids.astype(np.int64)
            return bits.view(np.int64), lengths.astype(np.int32)
        bad = (ids < 0) | (ids >= table.rows)
        at = np.repeat(np.arange(num), lengths.astype(np.int64))
        self._refuse(split, positions[at], bad, name, ids, f"table {table.name} has ids 0 to {table.rows - 1}")
        return ids.astype(np.int32), lengths.astype(np.int32)

    def _floats(self, name: str, value: Any, shape: tuple[int, ...]) -> Floats:
        try:
            found = np.asarray(value, np.float32)
        except (TypeError, ValueError):
            raise self._wrong(f"returned {name} that is not numbers", "return a numpy array") from None
        if found.shape != shape:
            raise self._wrong(f"returned {name} of shape {found.shape} for {shape[0]} samples", f"its shape is {shape}")
        return found

    def _refuse(self, split: str, positions: Int64s, is_bad: Mask, name: str, values: Any,
                fix: str) -> None:
        if is_bad.any():
            at = int(is_bad.argmax())
            raise self._wrong(f"returned {name} = {values[at]} for position {positions[at]} of {split}", fix)

    def _count(self, name: str) -> int:
        count = getattr(self._own, name, None)
        if not isinstance(count, int | np.integer) or count < 0:
            raise DataError(f"{self._where.partition(':')[0]}: {name} is {count!r}", "it is how many samples there "
                            "are, an integer attribute")
        return int(count)

    def _wrong(self, what: str, fix: str) -> DataError:
        return DataError(f"{self._where}: rows {what}", fix)

    def _epoch_order(self, epoch: int) -> EpochOrder:
        return EpochOrder([self.num_train_samples // self._list_size], BLOCK_ROWS, shuffle="rows", seed=self._seed,
                          epoch=epoch)


def spread(count: int, at_most: int) -> Int64s:
    """Return at most `at_most` positions, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).astype(np.int64))


def rows_digest(batch: Batch) -> bytes:
    """Return a checksum of the samples."""
    digest = hashlib.sha256()
    weights = () if batch.weights is None else (batch.weights,)
    for array in (batch.label, batch.dense, batch.lengths, batch.ids, *weights):
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()

"""Tensors of a checkpoint by the torch trainer's names, read by rows. Knows neither torch nor jax.

Both trainers write one format, so that a run started by one resumes with the other.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.errors import UserError
from embark.spec import RunSpec, Table
from embark.store.checkpoint_index import INDEX, TensorEntry, read_index
from embark.store.object_store import ObjectStore
from embark.trainers.jax.initial import ROWS_PER_BLOCK

Array = NDArray[Any]
Path = tuple[str, ...]
"""Where a tensor stands in the nested state; joined by dots, its name."""


def table_path(table: str) -> Path:
    return ("model", f"tables.embedding_bags.{table}.weight")


def slot_path(table: str) -> Path:
    return ("optimizers", f"tables.tables.embedding_bags.{table}.weight", f"{table}.momentum1")


def weight_path(weight: str) -> Path:
    return ("model", f"dense.{weight}")


def weight_state_path(weight: str, state: str) -> Path:
    return ("optimizers", f"dense.dense.{weight}", state)


METRICS: Path = ("metrics",)


class Stored:
    """What lies in one checkpoint."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        self._store, self._folder = store, folder
        path = f"{folder}/{INDEX}"
        self._tensors = read_index(store.read(path), store.where(path)).tensors

    def whole(self, path: Path, shape: tuple[int, ...]) -> Array:
        """A tensor, which must be of that shape."""
        entry = self._entry(path)
        self._check(path, entry, shape)
        return self._rows(entry, 0, shape[0] if shape else 1).reshape(shape)

    def table_rows(self, table: Table, block: int) -> Array:
        """A block of a table's rows."""
        path = table_path(table.name)
        entry = self._entry(path)
        self._check(path, entry, (table.rows, table.dim or 0))
        return self._rows(entry, *_span(table, block))

    def slot_rows(self, table: Table, block: int) -> Array:
        """The optimizer's state of a block of rows: like the rows, or one number each."""
        path = slot_path(table.name)
        entry = self._entry(path)
        first, stop = _span(table, block)
        if entry.size not in ((table.rows,), (table.rows, table.dim)):
            return self._mean_over_columns(table, path, entry, first, stop)
        return self._rows(entry, first, stop)

    def check_slots(self, spec: RunSpec) -> None:
        """The state is of the optimizer that the spec names."""
        for table in spec.model.table_list():
            entry = self._entry(slot_path(table.name))
            if (len(entry.size) == 1) != (spec.train.optimizer == "rowwise_adagrad"):
                raise _of_another_model(f"{'.'.join(slot_path(table.name))} is {list(entry.size)}, which is not "
                                        f"{spec.train.optimizer}'s")

    def _mean_over_columns(self, table: Table, path: Path, entry: TensorEntry, first: int, stop: int) -> Array:
        """Row-wise Adagrad of a table in column shards: one number a row and shard, end to end. Weighted by the
        shards' widths, their mean is what the whole row would have."""
        chunks = self._entry(table_path(table.name)).chunks
        by_offset = {chunk.offsets[1]: chunk.sizes[1] for chunk in chunks}
        widths = [by_offset[offset] for offset in sorted(by_offset)]
        self._check(path, entry, (table.rows * len(widths),))
        share = np.array(widths, np.float32) / np.float32(sum(widths))
        parts = [self._rows(entry, number * table.rows + first, number * table.rows + stop)
                 for number in range(len(widths))]
        return (np.stack(parts) * share[:, None]).sum(axis=0, dtype=np.float32)

    def _entry(self, path: Path) -> TensorEntry:
        name = ".".join(path)
        if name not in self._tensors:
            raise _of_another_model(f"it has no {name}")
        return self._tensors[name]

    def _check(self, path: Path, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        if entry.size != shape:
            raise _of_another_model(f"{'.'.join(path)} is {list(entry.size)} there, and {list(shape)} here")

    def _rows(self, entry: TensorEntry, first: int, stop: int) -> Array:
        """Put together from whatever chunks they were saved in."""
        dtype = np.dtype(entry.dtype).newbyteorder("<")
        rows: Array = np.zeros((stop - first, *entry.size[1:]), dtype)
        for chunk in entry.chunks:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            begin, end = max(first, offsets[0]), min(stop, offsets[0] + sizes[0])
            row_bytes = math.prod(sizes[1:]) * dtype.itemsize
            if begin >= end or not row_bytes:
                continue
            start = chunk.place.start + (begin - offsets[0]) * row_bytes
            data = self._store.read_range(f"{self._folder}/{chunk.place.file}", start, (end - begin) * row_bytes)
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
            read = np.frombuffer(data, dtype).reshape(end - begin, *sizes[1:])
            rows[(slice(begin - first, end - first), *box)] = read
        return rows


def _span(table: Table, block: int) -> tuple[int, int]:
    return block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, table.rows)


def _of_another_model(what: str) -> UserError:
    return UserError(f"the checkpoint is of another model: {what}",
                     fix="take the spec that was saved with it, or start a run of another name")

"""The JAX trainer's state, written and read in the form that the torch trainer writes and reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from embark.errors import UserError
from embark.run.checkpointer import NUM_FILES, PIECE_BYTES, Checkpointer, balanced, file_name
from embark.run.evaluation import STATE_SIZE
from embark.spec import RunSpec, Table
from embark.store import Checkpoint, ChecksumStore, RunDir, checkpoint_name
from embark.store.checkpoint_index import INDEX, ChunkEntry, FileRange, Index, TensorEntry, read_index
from embark.store.object_store import ObjectStore, for_each_parallel
from embark.trainers.jax.network import DENSE_STATES, ROWS_PER_BLOCK
from embark.trainers.jax.state import Array, initial_state, make_state, table_pieces
from embark.trainers.jax.step import weight_shapes

if TYPE_CHECKING:
    from embark.trainers.jax.trainer import JaxTrainer


CHANNEL = "save"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, on the host."""

    path: Path
    size: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    values: Array


class JaxCheckpointer(Checkpointer):
    """Saves through a channel of its own, beside the one that training uses."""

    def __init__(self, run_dir: RunDir, trainer: JaxTrainer) -> None:
        world = trainer.world
        super().__init__(trainer.spec, run_dir, world, lambda value: world.gathered(value, CHANNEL), trainer.layout,
                         world.num_devices)
        self._trainer, self._world = trainer, world

    def _start(self) -> None:
        self._trainer.state = initial_state(self._spec, self._trainer.places, self._world)

    def _copied(self, step: int) -> list[Piece]:
        return list(self._pieces(step))

    def _write_arrays(self, step: int, copied: list[Piece], store: ChecksumStore) -> dict[str, bytes]:
        written = self._on_all_ranks(lambda: self._write_files(step, copied, store))
        if not self._world.is_first:
            return {}
        return {INDEX: _index([one for of_one in written for one in of_one]).to_json().encode()}

    def _load(self, checkpoint: Checkpoint) -> None:
        spec, stored = self._spec, Stored(self._checkpoints.store, checkpoint.name)
        shapes = weight_shapes(spec)
        states = DENSE_STATES[spec.train.dense_optimizer]
        has_slots = spec.train.optimizer != "sgd"
        if has_slots:
            stored.check_slots(spec)
        self._trainer.state = make_state(
            spec, self._trainer.places, self._world, stored.table_rows, stored.slot_rows if has_slots else None,
            {name: stored.tensor(weight_path(name), shape) for name, shape in shapes.items()},
            {name: tuple(stored.tensor(weight_state_path(name, state), shape) for state in states)
             for name, shape in shapes.items()},
        )
        self._trainer.window.set_state(stored.tensor(METRICS, (STATE_SIZE,)))

    def _pieces(self, step: int) -> Iterator[Piece]:
        """The state on the host; every process goes through all of it and gets its own."""
        state, world = self._trainer.state, self._world
        for group in self._trainer.places.groups:
            for kind, path_of in (("tables", table_path), ("slots", slot_path)):
                if group.name not in state[kind]:
                    continue
                for place, first, rows in table_pieces(state[kind][group.name], group, world):
                    size = (place.table.rows, *rows.shape[1:])
                    yield Piece(path_of(place.table.name), size, (first, *(0 for _ in rows.shape[1:])), rows)
        metrics = self._trainer.window.state(state["counts"])
        if not world.is_first:
            return
        for name, weight in state["dense"].items():
            yield _unsharded(weight_path(name), world.fetch(weight))
            states = DENSE_STATES[self._spec.train.dense_optimizer]
            if states:
                yield _unsharded(weight_state_path(name, "step"), np.array(step, np.float32))
            for kind, values in zip(states, state["dense_state"][name], strict=True):
                yield _unsharded(weight_state_path(name, kind), world.fetch(values))
        yield _unsharded(METRICS, metrics)

    def _write_files(self, step: int, pieces: list[Piece], store: ChecksumStore) -> list[tuple[Piece, ChunkEntry]]:
        """This process's files; returns each piece, without its values, and where it lies."""
        shares = balanced(pieces, lambda piece: piece.values.nbytes)
        placed: list[list[tuple[Piece, ChunkEntry]]] = [[] for _ in shares]

        def write(number: int) -> None:
            name, start = file_name(self._world.rank, number), 0
            for piece in shares[number]:
                lies = FileRange(name, start, piece.values.nbytes)
                entry = ChunkEntry(piece.offsets, piece.values.shape, lies)
                bare = Piece(piece.path, piece.size, piece.offsets, np.empty(0, piece.values.dtype))
                placed[number].append((bare, entry))
                start += piece.values.nbytes
            store.write(f"{checkpoint_name(step)}/{name}", _bytes_of(shares[number]), start)

        for_each_parallel(write, range(len(shares)), NUM_FILES)
        return [one for share in placed for one in share]


def _unsharded(path: Path, values: Array) -> Piece:
    return Piece(path, values.shape, (0,) * values.ndim, np.array(values))


def _bytes_of(pieces: list[Piece]) -> Iterator[memoryview]:
    for piece in pieces:
        flat = np.ascontiguousarray(piece.values).reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]


def _index(written: list[tuple[Piece, ChunkEntry]]) -> Index:
    tensors: dict[str, TensorEntry] = {}
    for piece, entry in written:
        name = ".".join(piece.path)
        before = tensors[name].chunks if name in tensors else ()
        tensors[name] = TensorEntry(piece.values.dtype.name, piece.size, (*before, entry))
    return Index(tensors, {}, {".".join(piece.path): piece.path for piece, _ in written})


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

    def tensor(self, path: Path, shape: tuple[int, ...]) -> Array:
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

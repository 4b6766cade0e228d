"""The JAX trainer's state, written and read in the form that the torch trainer writes and reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from embark.run.checkpointer import NUM_FILES, PIECE_BYTES, Checkpointer, balanced, file_name
from embark.run.metrics import STATE_SIZE
from embark.store import Checkpoint, ChecksumStore, RunDir, checkpoint_name
from embark.store.checkpoint_index import INDEX, ChunkEntry, FileRange, Index, TensorEntry
from embark.store.object_store import for_each_parallel
from embark.trainers.jax.optimizers import DENSE_STATES
from embark.trainers.jax.state import Array, initial_state, make_state, table_pieces
from embark.trainers.jax.step import weight_shapes
from embark.trainers.jax.stored import METRICS, Path, Stored, slot_path, table_path, weight_path, weight_state_path

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
        self._trainer = trainer
        self._world = world

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
            {name: stored.whole(weight_path(name), shape) for name, shape in shapes.items()},
            {name: tuple(stored.whole(weight_state_path(name, state), shape) for state in states)
             for name, shape in shapes.items()},
        )
        self._trainer.window.set_state(stored.whole(METRICS, (STATE_SIZE,)))

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
            yield _whole(weight_path(name), world.fetch(weight))
            states = DENSE_STATES[self._spec.train.dense_optimizer]
            if states:
                yield _whole(weight_state_path(name, "step"), np.array(step, np.float32))
            for kind, values in zip(states, state["dense_state"][name], strict=True):
                yield _whole(weight_state_path(name, kind), world.fetch(values))
        yield _whole(METRICS, metrics)

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


def _whole(path: Path, values: Array) -> Piece:
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

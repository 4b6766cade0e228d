"""Saving everything a run needs to go on, while it goes on, in the form that the torch trainer reads and writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from embark.errors import EmbarkError, Fault
from embark.spec import RunSpec, to_toml
from embark.store import Checkpoint, FileMark, MarkedDoor, RunDir, checkpoint_name, reasons_by_spec
from embark.store.index import INDEX, ChunkEntry, Index, Place, TensorEntry
from embark.store.parallel import for_all
from embark.tpu.built import Built
from embark.tpu.metrics import NUM_BINS
from embark.tpu.optimizers import DENSE_STATES
from embark.tpu.state import Array, initial_state, make_state, table_pieces
from embark.tpu.step import weight_shapes
from embark.tpu.stored import METRICS, Path, Stored, slot_path, table_path, weight_path, weight_state_path
from embark.watch import plan_text

NUM_FILES = 4
"""That a process writes side by side."""
PIECE_BYTES = 4 << 20
"""Of a tensor at a time: what was just hashed is still in the processor's cache when it is written."""
CHANNEL = "save"


@dataclass(frozen=True, slots=True)
class Saved:
    """How a save went. The same on every process but for the times."""

    step: int
    pause_s: float
    """How long training stood still."""
    cost_s: float
    """From the beginning to the commit."""
    num_bytes: int
    uri: str
    error: EmbarkError | None = None
    """Why it could not be saved."""
    untidy: EmbarkError | None = None
    """It is saved, but what comes after failed: removing old ones, or copying the run's small files."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, on the host."""

    path: Path
    size: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    values: Array


class Checkpointer:
    """One save at a time, in a thread of its own."""

    def __init__(self, spec: RunSpec, run_dir: RunDir, built: Built) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._shelf = run_dir.shelf
        self._built = built
        self._world = built.world
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embark-save")
        self._running: Future[Saved] | None = None
        self._spoilt: set[int] = set()
        """Steps unfinished or damaged: none counts as kept, and they go with the next commit."""

    def begin(self, step: int, values: dict[str, Any]) -> list[Saved]:
        """Copy the state and begin to write it; returns what was still being written and is done now."""
        before = self.wait()
        started = time.perf_counter()
        pieces = list(self._pieces(step))
        pause_s = time.perf_counter() - started
        self._running = self._thread.submit(self._write, step, pieces, values, started, pause_s)
        return before

    def done(self) -> list[Saved]:
        """The save that has ended since the last look, if one has."""
        return self.wait() if self._running and self._running.done() else []

    def wait(self) -> list[Saved]:
        """The save under way, when it has ended."""
        running, self._running = self._running, None
        return [running.result()] if running else []

    def close(self) -> None:
        """Let a save under way end. What it raised was told, or will be by whoever closes."""
        self._thread.shutdown(wait=True)

    def begin_from_newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Give the model the newest checkpoint that is whole, or its initial weights. A damaged one is named and
        passed over. All processes take the same."""
        found, unfinished = self._agreed(lambda: (self._shelf.committed(), self._shelf.unfinished()))
        self._spoilt = set(unfinished)
        for step in unfinished:
            if not found or step > found[-1].step:
                tell(f"{self._shelf.where(step)} has no mark that can be read and is passed over: its save never ended")
        for checkpoint in reversed(found):
            damage = self._damage(checkpoint)
            if not damage:
                self._load(checkpoint)
                return checkpoint
            self._spoilt.add(checkpoint.step)
            tell(f"{self._shelf.where(checkpoint.step)} is damaged and passed over: {damage}")
        self._built.state = initial_state(self._spec, self._built.places, self._world)
        return None

    def _damage(self, checkpoint: Checkpoint) -> str:
        if self._spec.store.verify == "sizes":
            entries = self._agreed(lambda: self._shelf.door.list(checkpoint.name))
            there = {e.path.removeprefix(f"{checkpoint.name}/"): e.size_bytes for e in entries}
            wrong = [n for n, mark in checkpoint.files.items() if there.get(n) != mark.size_bytes]
            return f"{wrong[0]} is missing or cut short" if wrong else ""
        rank, world_size = self._world.rank, self._world.world_size
        return next((d for d in self._together(lambda: self._shelf.damage(checkpoint, rank, world_size)) if d), "")

    def _load(self, checkpoint: Checkpoint) -> None:
        spec, stored = self._spec, Stored(self._shelf.door, checkpoint.name)
        shapes = weight_shapes(spec)
        states = DENSE_STATES[spec.train.dense_optimizer]
        has_slots = spec.train.optimizer != "sgd"
        if has_slots:
            stored.check_slots(spec)
        self._built.state = make_state(
            spec, self._built.places, self._world, stored.table_rows, stored.slot_rows if has_slots else None,
            {name: stored.whole(weight_path(name), shape) for name, shape in shapes.items()},
            {name: tuple(stored.whole(weight_state_path(name, state), shape) for state in states)
             for name, shape in shapes.items()},
        )
        self._built.window.set_state(stored.whole(METRICS, (2 * NUM_BINS + 4,)))

    def _pieces(self, step: int) -> Iterator[Piece]:
        """The state on the host; every process goes through all of it and gets its own."""
        state, world = self._built.state, self._world
        for group in self._built.places.groups:
            for kind, path_of in (("tables", table_path), ("slots", slot_path)):
                if group.name not in state[kind]:
                    continue
                for place, first, rows in table_pieces(state[kind][group.name], group, world):
                    size = (place.table.rows, *rows.shape[1:])
                    yield Piece(path_of(place.table.name), size, (first, *(0 for _ in rows.shape[1:])), rows)
        metrics = self._built.window.state(state["counts"])
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

    def _write(self, step: int, pieces: list[Piece], values: dict[str, Any], started: float, pause_s: float) -> Saved:
        """In the thread. What goes wrong on one process is known to all before anything is committed."""
        door = MarkedDoor(self._shelf.door)
        error: EmbarkError | None = None
        untidy: EmbarkError | None = None
        num_bytes = 0
        try:
            self._together(lambda: self._shelf.begin(step) if self._world.is_first else None)
            written = self._together(lambda: self._write_files(step, pieces, door))
            marks = self._together(lambda: self._marks(step, written, door))
            num_bytes = sum(mark.size_bytes for of_one in marks for mark in of_one.values())
            self._together(lambda: self._commit(step, marks, values) if self._world.is_first else None)
        except EmbarkError as raised:
            error = raised
            self._spoilt.add(step)
            if self._world.is_first and not self._run_dir.is_remote:  # it would only help to fill the disk
                with suppress(EmbarkError):
                    self._shelf.remove(step)
        else:
            try:
                self._together(lambda: self._tidy() if self._world.is_first else None)
            except EmbarkError as raised:  # from here on it is saved, whatever else goes wrong
                untidy = raised
        cost_s = time.perf_counter() - started
        return Saved(step, pause_s, cost_s, num_bytes, self._shelf.where(step), error, untidy)

    def _write_files(self, step: int, pieces: list[Piece], door: MarkedDoor) -> list[tuple[Piece, ChunkEntry]]:
        """This process's files; returns each piece, without its values, and where it lies."""
        shares = _shares(pieces)
        placed: list[list[tuple[Piece, ChunkEntry]]] = [[] for _ in shares]

        def write(number: int) -> None:
            name, start = f"rank-{self._world.rank:05d}-{number:02d}.bin", 0
            for piece in shares[number]:
                lies = Place(name, start, piece.values.nbytes)
                entry = ChunkEntry(piece.offsets, piece.values.shape, lies)
                bare = Piece(piece.path, piece.size, piece.offsets, np.empty(0, piece.values.dtype))
                placed[number].append((bare, entry))
                start += piece.values.nbytes
            door.write(f"{checkpoint_name(step)}/{name}", _bytes_of(shares[number]), start)

        for_all(write, range(len(shares)), NUM_FILES)
        return [one for share in placed for one in share]

    def _marks(self, step: int, written: list[list[tuple[Piece, ChunkEntry]]], door: MarkedDoor) -> dict[str, FileMark]:
        folder = checkpoint_name(step)
        if self._world.is_first:
            door.write(f"{folder}/{INDEX}", _index([one for of_one in written for one in of_one]).to_json().encode())
            door.write(f"{folder}/spec.toml", to_toml(self._spec).encode())
            door.write(f"{folder}/plan.txt", plan_text(self._built.layout).encode())
        return {path.removeprefix(f"{folder}/"): mark for path, mark in door.marks.items()}

    def _commit(self, step: int, marks: list[dict[str, FileMark]], values: dict[str, Any]) -> None:
        files = {name: mark for of_one in marks for name, mark in of_one.items()}
        self._shelf.commit(step, files, {"world_size": self._world.num_devices, **values})
        self._spoilt.discard(step)

    def _tidy(self) -> None:
        """What is no longer wanted goes, and the run's small files follow."""
        whole = [c for c in self._shelf.committed() if c.step not in self._spoilt]
        old = {step for step, reasons in reasons_by_spec(self._spec.store, whole).items() if not reasons}
        for unwanted in sorted(old | self._spoilt):
            self._shelf.remove(unwanted)
        self._spoilt.clear()
        self._run_dir.publish()

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """Call it on every process and give each what all returned; if one raised, all raise."""
        result, trouble = None, ("", "")
        try:
            result = call()
        except EmbarkError as error:
            trouble = (error.what, error.fix)
        except OSError as error:
            trouble = (str(error), "")
        everywhere = self._world.gathered((result, trouble), CHANNEL)
        for _, (what, fix) in everywhere:
            if what:
                raise Fault(what, fix=fix)
        return [returned for returned, _ in everywhere]

    def _agreed(self, call: Callable[[], Any]) -> Any:
        """What process 0 found, on every process."""
        return self._together(lambda: call() if self._world.is_first else None)[0]


def _whole(path: Path, values: Array) -> Piece:
    return Piece(path, values.shape, (0,) * values.ndim, np.array(values))


def _shares(pieces: list[Piece]) -> list[list[Piece]]:
    """The pieces in files of about one size: the largest first, each to the file that has least."""
    shares: list[list[Piece]] = [[] for _ in range(max(1, min(NUM_FILES, len(pieces))))]
    num_bytes = [0] * len(shares)
    for piece in sorted(pieces, key=lambda p: p.values.nbytes, reverse=True):
        least = num_bytes.index(min(num_bytes))
        shares[least].append(piece)
        num_bytes[least] += piece.values.nbytes
    return shares


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

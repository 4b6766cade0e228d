"""What `soak.py` does inside a rank before it begins: faults of the disk and the clock, and planted defects."""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from integration.faults import hooks

from embark.store.checkpoint_arrays import NUM_FILES

PLANTS = ("early_mark", "unchecked_lease", "late_position", "lost_optimizer_state")
CLOCK_AFTER_CALLS = 20


def disturb(rank: int, plant: str = "", fault: str = "", options: dict[str, Any] | None = None) -> None:
    """Plant a defect, if one is named, and arrange for a fault, if one is."""
    if plant:
        {"early_mark": plant_early_mark, "unchecked_lease": plant_unchecked_lease,
         "late_position": plant_late_position, "lost_optimizer_state": plant_lost_optimizer_state}[plant](rank)
    if fault:
        call: Callable[..., None] = globals().get(fault) or getattr(hooks, fault)
        call(rank, **(options or {}))


def full_disk(rank: int, first_write: int, num_writes: int) -> None:
    """The disk is full from a checkpoint file on, half of which was written, until so many have failed."""
    from embark.store.object_store import LocalStore

    write, count = LocalStore.write, 0

    def half_of(data: Any) -> Iterator[Any]:
        for piece in [data] if isinstance(data, bytes) else data:
            yield memoryview(piece)[: memoryview(piece).nbytes // 2]
            raise OSError(errno.ENOSPC, "No space left on device")

    @functools.wraps(write)
    def write_or_fail(self: LocalStore, path: str, data: Any, size_bytes: int | None = None) -> None:
        nonlocal count
        count += 1
        is_full = first_write <= count < first_write + num_writes
        write(self, path, half_of(data) if is_full else data, size_bytes)

    LocalStore.write = write_or_fail  # type: ignore[method-assign]


def clock_jump(rank: int, seconds: float) -> None:
    """The wall clock is set to another time, soon after the start."""
    now, calls = time.time, 0

    def jumped() -> float:
        nonlocal calls
        calls += 1
        return now() + (seconds if calls > CLOCK_AFTER_CALLS else 0.0)

    time.time = jumped


def plant_early_mark(rank: int) -> None:
    """The commit record is written before the last shard, and nobody looks whether all is there."""
    from embark.run import checkpointer
    from embark.store import checkpoint_store

    late: list[tuple[Any, str, bytes]] = []
    commit, writes = checkpoint_store.CheckpointStore.commit, checkpoint_store.ChecksumWriter.write
    write_all = checkpointer.Checkpointer._write

    def write(self: Any, path: str, data: Any, size_bytes: int | None = None) -> None:
        if not _is_late(path):
            writes(self, path, data, size_bytes)
            return
        content = b"".join(bytes(piece) for piece in data)
        late.append((self._store, path, content))
        nowhere = type("Nowhere", (), {"write": staticmethod(lambda path, data, size=None: list(data))})()
        checksums = checkpoint_store.ChecksumWriter(nowhere)  # its own: other threads write the other files
        writes(checksums, path, [content], size_bytes)
        self.marks |= checksums.marks

    def mark(self: Any, step: int, files: Any, values: Any) -> None:
        there = dict(files)
        absent = {name for name in there if _is_late(name)}
        listed = self._files

        def all_there(step: int) -> Any:
            entries = listed(step)
            entry = type(entries[0])
            name = checkpoint_store.checkpoint_name(step)
            return [*entries, *(entry(f"{name}/{one}", there[one].size_bytes, 0.0) for one in absent)]

        self._files = all_there
        try:
            commit(self, step, files, values)
        finally:
            self._files = listed

    def write_then_the_rest(self: Any, *words: Any) -> Any:
        result = write_all(self, *words)
        while late:
            store, path, content = late.pop(0)
            store.write(path, content)
        return result

    checkpoint_store.ChecksumWriter.write = write  # type: ignore[method-assign]
    checkpoint_store.CheckpointStore.commit = mark  # type: ignore[method-assign]
    checkpointer.Checkpointer._write = write_then_the_rest  # type: ignore[method-assign]


def _is_late(path: str) -> bool:
    """One of the four files that a rank writes at each save; each start numbers its own."""
    return path.endswith(".bin") and int(path[-6:-4]) % NUM_FILES == 0


def plant_unchecked_lease(rank: int) -> None:
    """A process that holds the run's lease never looks whether it still does."""
    from embark.store.lease import Lease

    Lease._check = lambda self: None  # type: ignore[method-assign]
    Lease.is_lost = lambda self: False  # type: ignore[method-assign]


def plant_late_position(rank: int) -> None:
    """A resumed run reads its data from one batch further on."""
    from embark.trainers.jax.trainer import JaxTrainer
    from embark.trainers.torch.trainer import TorchTrainer

    for trainer in (TorchTrainer, JaxTrainer):
        def late(self: Any, source: Any, start: int, stop: int, *, feed: Any = trainer.feed) -> Any:
            return feed(self, source, start + 1 if start else 0, stop + 1)

        trainer.feed = late  # type: ignore[assignment,method-assign]


def plant_lost_optimizer_state(rank: int) -> None:
    """The last rank loads everything but its part of the tables' optimizer state."""
    from embark.trainers.torch import checkpoint

    fill = checkpoint.fill

    def without(shards: Any, arrays: Any) -> None:
        is_last = rank == arrays_ranks(arrays) - 1
        fill((s for s in shards if not (is_last and s.name.startswith("optimizers.tables."))), arrays)

    checkpoint.fill = without


def arrays_ranks(arrays: Any) -> int:
    """How many ranks wrote a checkpoint."""
    return 1 + max(int(chunk.file[5:10]) for entry in arrays.entries.values() for chunk in entry.chunks)

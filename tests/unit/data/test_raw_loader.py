"""Raw batches in a ring of buffers: none is filled again before it is given back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from prepared_rows import make_prepared

from embark.data.loader import RawLoader
from embark.data.prepared.source import PreparedSource


def wanted(source: PreparedSource, step: int, batch_size: int = 96) -> bytes:
    """What the batch of a step must hold."""
    epoch, in_epoch = divmod(step, source.num_train_samples // batch_size)
    buffer = np.empty(source.layout.map(batch_size).size_bytes, np.uint8)
    source.train_raw([(epoch, in_epoch * batch_size, (in_epoch + 1) * batch_size)], buffer)
    return fields(source, buffer, batch_size)


def fields(source: PreparedSource, buffer: np.ndarray, num_rows: int = 96, number: int = 0, capacity: int = 1) -> bytes:
    """One batch of a block, without what lies between its fields, which is anything."""
    where, rows = source.layout.map(capacity * num_rows), slice(number * num_rows, (number + 1) * num_rows)
    groups = [group.of(buffer)[:, rows] for group in where.groups]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in (
        where.label.of(buffer)[rows], where.dense.of(buffer)[rows], *groups))


@pytest.mark.parametrize("capacity", [1, 3, 8])
@pytest.mark.parametrize(("num_threads", "depth", "max_held"), [(1, 1, 1), (1, 2, 3), (3, 2, 2), (4, 8, 5)])
def test_batches_stay_as_they_are_until_they_are_released(
    tmp_path: Path, num_threads: int, depth: int, max_held: int, capacity: int
):
    source = make_prepared(tmp_path).open()
    with RawLoader(source, batch_size=96, rank=0, world_size=1, start_step=3, stop_step=80, depth=depth,
                   num_threads=num_threads, max_held=max_held, capacity=capacity) as loader:
        rows, first = [], 3
        for batches in loader:
            rows.append((first, batches))
            first += batches.num_batches
            if len(rows) == max_held:
                time.sleep(0.003)  # long enough for threads that would overrun it
                for of_step, ones in rows:
                    for number in range(ones.num_batches):
                        found = fields(source, ones.buffer, number=number, capacity=capacity)
                        assert found == wanted(source, of_step + number), (of_step, number)
                loader.release(rows.pop(0)[1])
    assert first == 80, "over the end of epochs, and with fewer in the last"


def test_memory_is_allocated_once_whatever_the_number_of_steps(tmp_path: Path):
    source = make_prepared(tmp_path).open()
    given: list[np.ndarray] = []

    def allocate(size_bytes: int) -> np.ndarray:
        given.append(np.zeros(size_bytes, np.uint8))
        return given[-1]

    with RawLoader(source, batch_size=96, rank=0, world_size=1, start_step=0, stop_step=60, depth=2, num_threads=2,
                   max_held=2, allocate=allocate, capacity=2) as loader:
        for batch in loader:
            assert any(batch.buffer is one for one in given)
            loader.release(batch)
    assert len(given) == 6


def test_ranks_share_a_step(tmp_path: Path):
    source = make_prepared(tmp_path).open()
    found = []
    for rank in range(4):
        with RawLoader(source, batch_size=96, rank=rank, world_size=4, start_step=5, stop_step=6) as loader:
            batch = next(iter(loader))
            found.append(source.layout.map(24).dense.of(batch.buffer).copy())
    np.testing.assert_array_equal(np.concatenate(found), source.train_rows(0, 480, 576).dense)


def test_ranks_that_take_every_fourth_part_of_a_step_have_theirs_together(tmp_path: Path):
    source = make_prepared(tmp_path).open()
    with RawLoader(source, batch_size=96, rank=2, world_size=4, start_step=5, stop_step=8, capacity=8) as loader:
        (batches,) = loader
    assert batches.num_batches == 3
    dense = source.layout.map(8 * 24).dense.of(batches.buffer)
    for number in range(3):
        at = (5 + number) * 96 + 2 * 24
        np.testing.assert_array_equal(dense[number * 24 : (number + 1) * 24], source.train_rows(0, at, at + 24).dense)


def test_close_ends_threads_that_wait_for_a_buffer(tmp_path: Path):
    source = make_prepared(tmp_path).open()
    loader = RawLoader(source, batch_size=96, rank=0, world_size=1, start_step=0, stop_step=100, num_threads=3)
    batches = iter(loader)
    next(batches)
    time.sleep(0.05)
    loader.close()
    assert not [t for t in threading.enumerate() if t.name == "embark-loader"]
    with pytest.raises(RuntimeError):
        next(batches)
    with pytest.raises(RuntimeError, match="once"):
        iter(loader)

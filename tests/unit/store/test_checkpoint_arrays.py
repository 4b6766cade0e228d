"""A checkpoint's arrays come back as they went, in any cut, with no more read than is needed and nothing run."""

from __future__ import annotations

import json
import os
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from embark.errors import Fault, UserError
from embark.store import ChecksumWriter
from embark.store import checkpoint_arrays as module
from embark.store.checkpoint_arrays import (
    INDEX,
    CheckpointArrays,
    ChunkEntry,
    Index,
    TensorChunk,
    TensorEntry,
    merge_entries,
    read_index,
    unsharded,
    write_pieces,
)
from embark.store.errors import NotFound
from embark.store.object_store import LocalStore

ARRAYS = {
    "f32": np.random.default_rng(0).normal(size=(7, 5)).astype("f4"), "f16": np.ones((2, 3, 4), "f2"),
    "i8": np.arange(3, dtype="i1"), "i64": np.arange(9).reshape(3, 3), "bool": np.array([True, False]),
    "f64": np.arange(3.0), "scalar": np.array(2.5), "empty": np.empty((0, 4), "f4"),
    "turned": np.arange(24.0).reshape(4, 6).T, "part": np.arange(100.0).reshape(10, 10)[2:5, 1:7],
    "u8": np.arange(16, dtype="u1"),
}
FULL = np.random.default_rng(1).normal(size=(100, 8)).astype("f4")


def save(root: Path, *ranks: list[TensorChunk]) -> None:
    store = LocalStore(root)
    entries = [write_pieces(ChecksumWriter(store), "c", rank, pieces) for rank, pieces in enumerate(ranks)]
    store.write(f"c/{INDEX}", Index(merge_entries(entries)).to_json())


def boxes(cut: str) -> list[tuple[slice, slice]]:
    rows = {"rows": [0, 30, 100], "more rows": [0, 10, 50, 90, 100]}.get(cut, [0, 100])
    columns = [0, 3, 8] if cut == "columns" else [0, 8]
    return [(slice(a, b), slice(c, d)) for a, b in pairwise(rows) for c, d in pairwise(columns)]


def cut(full: np.ndarray, how: str) -> list[TensorChunk]:
    return [TensorChunk("t", full.shape, (rows.start, columns.start), full[rows, columns])
            for rows, columns in boxes(how)]


class Counting(LocalStore):
    """Notes what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        self.ranges.append((path, start, len(into)))
        super().read_into(path, start, into)


def test_every_kind_of_array_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WRITE_BYTES", 10)
    save(tmp_path, [unsharded(name, values) for name, values in ARRAYS.items()])
    arrays = CheckpointArrays(LocalStore(tmp_path), "c")
    for name, values in ARRAYS.items():
        found = arrays.tensor(name, values.shape)
        assert found.dtype == values.dtype
        assert np.array_equal(found, values), name


@pytest.mark.parametrize("target", ["rows", "more rows", "columns", "complete"])
@pytest.mark.parametrize("source", ["rows", "more rows", "columns", "complete"])
@pytest.mark.parametrize("form", ["as it is", "float64", "turned"])
def test_any_cut_loads_into_any_other(tmp_path, source, target, form):
    pieces = cut(FULL, source)
    save(tmp_path, pieces[:1], pieces[1:])
    arrays = CheckpointArrays(LocalStore(tmp_path), "c")
    for rows, columns in boxes(target):
        expected = FULL[rows, columns]
        into = np.zeros(expected.shape, "f8" if form == "float64" else "f4", order="F" if form == "turned" else "C")
        arrays.read_into("t", (rows.start, columns.start), into)
        assert np.array_equal(into, expected)


def test_a_rank_reads_only_its_own_rows(tmp_path):
    save(tmp_path, cut(FULL, "more rows"))
    store = Counting(tmp_path)
    assert np.array_equal(CheckpointArrays(store, "c").rows("t", 40, 60), FULL[40:60])
    assert sum(length for _, _, length in store.ranges) == 20 * 8 * 4


def test_ranks_write_files_of_about_one_size(tmp_path):
    save(tmp_path, [unsharded(str(number), np.zeros(100 + number, "f4")) for number in range(8)])
    sizes = [path.stat().st_size for path in (tmp_path / "c").glob("rank-00000-*.bin")]
    assert len(sizes) == module.NUM_FILES
    assert max(sizes) - min(sizes) < 100


def test_the_state_of_column_shards_is_their_mean_by_width(tmp_path):
    state = np.arange(200, dtype="f4")
    pieces = [*cut(FULL, "columns"), unsharded("state", state), unsharded("other", state[:150])]
    save(tmp_path, [*pieces, TensorChunk("complete", (100, 8), (0, 0), FULL), unsharded("one", state[:100])])
    arrays = CheckpointArrays(LocalStore(tmp_path), "c")
    expected = state[10:20] * np.float32(3 / 8) + state[110:120] * np.float32(5 / 8)
    assert np.allclose(arrays.rowwise_state("state", "t", 10, 20), expected)
    assert np.array_equal(arrays.rowwise_state("one", "complete", 10, 20), state[10:20])
    with pytest.raises(UserError, match="of another model"):
        arrays.rowwise_state("other", "t", 0, 1)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_pickled_index_is_refused_and_does_not_run(tmp_path):
    save(tmp_path, [unsharded("t", FULL)])
    (tmp_path / "c" / INDEX).write_bytes(pickle.dumps(Evil(tmp_path / "done")))
    with pytest.raises(Fault, match="not the index of a checkpoint"):
        CheckpointArrays(LocalStore(tmp_path), "c")
    assert not (tmp_path / "done").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "done")))
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other-9"), (("tensors",), []), (("tensors", "t", "dtype"), "nn"),
        (("tensors", "t", "dtype"), "object"), (("tensors", "t", "size"), [1]), (("tensors", "t", "size"), [200, 8]),
        (("tensors", "t", "chunks", 0, "file"), "../../secret"), (("tensors", "t", "chunks", 0, "file"), "/etc/passwd"),
        (("tensors", "t", "chunks", 0, "start"), -1), (("tensors", "t", "chunks", 0, "bytes"), 3),
        (("tensors", "t", "chunks", 0, "sizes"), [True, 4]), (("tensors", "t", "chunks", 0, "offsets"), [5, 5]),
        (("tensors", "t", "chunks"), []),
    ],
)
def test_a_changed_index_is_refused(tmp_path, path, value):
    save(tmp_path, [unsharded("t", FULL)])
    index = json.loads((tmp_path / "c" / INDEX).read_text())
    place = index
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "c" / INDEX).write_text(json.dumps(index))
    with pytest.raises(Fault, match="not the index of a checkpoint"):
        CheckpointArrays(LocalStore(tmp_path), "c")


def test_an_index_reads_back_as_it_was():
    index = Index({"t": TensorEntry("float16", (4, 2), (ChunkEntry((0, 0), (4, 2), "rank-00000-00.bin", 3, 16),))})
    assert read_index(index.to_json(), "here") == index


def test_a_tensor_of_which_a_rank_lacks_its_part_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"t: 960 bytes in its chunks instead of 3,200"):
        save(tmp_path, cut(FULL, "rows")[:1])


def test_a_file_that_was_cut_is_a_fault_and_none_is_not_found(tmp_path):
    save(tmp_path, [unsharded("t", FULL)])
    (file,) = (tmp_path / "c").glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Fault, match="1 bytes before what was asked"):
        CheckpointArrays(LocalStore(tmp_path), "c").tensor("t", FULL.shape)
    with pytest.raises(NotFound, match=r"index\.json"):
        CheckpointArrays(LocalStore(tmp_path), "d")


@pytest.mark.parametrize(("name", "size"), [("t", (4, 8)), ("more", (1,))])
def test_the_checkpoint_of_another_model_is_the_users_mistake(tmp_path, name, size):
    save(tmp_path, [unsharded("t", FULL)])
    with pytest.raises(UserError, match="checkpoint is of another model"):
        CheckpointArrays(LocalStore(tmp_path), "c").tensor(name, size)


@pytest.mark.parametrize("tensors", [{}, {"t": {"dtype": "float32", "size": [0, 4], "chunks": []}}])
def test_an_index_of_nothing_is_refused(tensors):
    with pytest.raises(Fault, match=r"no tensors|no chunks"):
        read_index(json.dumps({"format": "embark-checkpoint-2", "tensors": tensors}).encode(), "here")


def test_a_tensor_beyond_its_file_is_refused_before_allocation(tmp_path):
    save(tmp_path, [unsharded("t", np.ones((2, 2), "f4"))])
    index = json.loads((tmp_path / "c" / INDEX).read_text())
    index["tensors"]["t"]["size"] = index["tensors"]["t"]["chunks"][0]["sizes"] = [1, 10**15]
    index["tensors"]["t"]["chunks"][0]["bytes"] = 4 * 10**15
    (tmp_path / "c" / INDEX).write_text(json.dumps(index))
    with pytest.raises(Fault, match="t ends beyond rank-00000-0"):
        CheckpointArrays(LocalStore(tmp_path), "c").refuse_beyond_files()

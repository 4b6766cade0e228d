"""Ranks save together or not at all, whichever library their arrays are of: here they are bytes, and ranks threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from limits import HANG_S

from embark.errors import EmbarkError, ExitCode, Fault, UserError
from embark.run.checkpointer import Checkpointer, Saved
from embark.spec import load_spec
from embark.store import RunDir, checkpoint_name
from embark.store.checkpoint_arrays import CheckpointArrays, TensorChunk
from embark.store.object_store import LocalStore

NUM_RANKS = 3
LAYOUT: dict[str, Any] = {"tables": [], "per_rank": []}
SPEC = load_spec("laptop", ["store.keep_checkpoints=2"])


class Meeting:
    """Where ranks that are threads give each other what they have."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(NUM_RANKS, timeout=HANG_S)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = [self._values[number] for number in range(NUM_RANKS)]
        self._barrier.wait()
        return found


@dataclass(frozen=True, slots=True)
class Rank:
    rank: int
    world_size: int = NUM_RANKS

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_of(self, numbers: list[int]) -> list[int]:
        raise NotImplementedError

    def gathered(self, value: Any) -> list[Any]:
        raise NotImplementedError


class Bytes(Checkpointer):
    """The state of a rank is its number, over and over."""

    def __init__(self, run_dir: RunDir, rank: int, meeting: Meeting, num_times: int = 1000) -> None:
        super().__init__(SPEC, run_dir, Rank(rank), lambda value: meeting.gather(rank, value), LAYOUT, NUM_RANKS)
        self.rank, self.num_times = rank, num_times
        self.loaded = 0

    def _copied(self, step: int) -> list[TensorChunk]:
        return [TensorChunk("t", (NUM_RANKS * self.num_times,), (self.rank * self.num_times,),
                      np.full(self.num_times, self.rank, np.uint8))]

    def _load(self, arrays: CheckpointArrays, step: int) -> None:
        assert set(arrays.rows("t", self.rank * self.num_times, (self.rank + 1) * self.num_times)) == {self.rank}
        self.loaded = step

    def _weight_sizes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def _load_weights(self, arrays: CheckpointArrays, kept: Any) -> None:
        raise NotImplementedError


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir(str(tmp_path / "run"))


@pytest.fixture
def ranks(run_dir) -> Iterator[list[Bytes]]:
    meeting = Meeting()
    made = [Bytes(run_dir, rank, meeting) for rank in range(NUM_RANKS)]
    yield made
    for one in made:
        one.close()


def test_the_mark_is_written_last_and_names_every_file_of_every_rank(ranks, run_dir, monkeypatch):
    written = watched_writes(monkeypatch)
    saves = save(ranks, 5, {"eval": {"auc": 0.7}})
    assert [(one.step, one.error, one.cleanup_error) for one in saves] == [(5, None, None)] * NUM_RANKS
    shards = [f"rank-{rank:05d}-00.bin" for rank in range(NUM_RANKS)]
    assert sorted(written[:NUM_RANKS]) == shards
    assert written[NUM_RANKS:] == ["index.json", "spec.toml", "plan.txt", "commit.json"]
    (checkpoint,) = run_dir.checkpoints.committed()
    assert set(checkpoint.files) == {*shards, "index.json", "spec.toml", "plan.txt"}
    assert checkpoint.values["world_size"] == NUM_RANKS
    assert checkpoint.values["eval"] == {"auc": 0.7}
    assert {one.num_bytes for one in saves} == {checkpoint.num_bytes}
    assert run_dir.checkpoints.damage(checkpoint) == ""


def test_a_failed_write_of_one_rank_leaves_no_checkpoint(ranks, run_dir, monkeypatch):
    save(ranks, 5)
    refuse_writes(monkeypatch, "rank-00002")
    saves = save(ranks, 10)
    assert {(type(one.error), one.error.what) for one in saves} == {(Fault, "the disk of rank-00002 is gone")}
    assert [c.step for c in run_dir.checkpoints.committed()] == [5]
    assert run_dir.checkpoints.unfinished() == []
    monkeypatch.undo()
    assert [one.error for one in save(ranks, 15)] == [None] * NUM_RANKS


def test_a_mark_that_cannot_be_written_is_no_checkpoint_on_any_rank(ranks, run_dir, monkeypatch):
    refuse_writes(monkeypatch, "commit.json")
    assert {one.error.what for one in save(ranks, 5)} == {"the disk of commit.json is gone"}
    assert (run_dir.checkpoints.committed(), run_dir.checkpoints.unfinished()) == ([], [])


def test_what_fails_after_the_commit_leaves_it_saved_and_is_reported(ranks, run_dir, monkeypatch):
    def gone(self: RunDir) -> None:
        raise Fault("the bucket is away")

    monkeypatch.setattr(RunDir, "publish", gone)
    saves = save(ranks, 5)
    assert {(one.error, one.cleanup_error.what) for one in saves} == {(None, "the bucket is away")}
    assert [c.step for c in run_dir.checkpoints.committed()] == [5]


def test_all_ranks_continue_from_the_newest_that_is_complete(ranks, run_dir):
    for step in (5, 10, 15):
        save(ranks, step)
    assert [c.step for c in run_dir.checkpoints.committed()] == [10, 15]  # keep_checkpoints
    torn = run_dir.path / "checkpoints" / checkpoint_name(15) / "rank-00001-00.bin"
    torn.write_bytes(torn.read_bytes()[:-1])
    result: list[list[str]] = [[] for _ in ranks]
    found = on_all(lambda rank: ranks[rank].load_newest(result[rank].append))
    assert [one.step for one in found] == [one.loaded for one in ranks] == [10] * NUM_RANKS
    assert result[0] == result[1] == result[2]
    assert "rank-00001-00.bin: 999 bytes instead of 1,000" in result[0][0]


def test_a_file_that_vanishes_before_it_is_read_is_a_fault_on_all_ranks(
        ranks, run_dir, monkeypatch):
    """Job controllers start it again after 70, never after 64; it then resumes from the checkpoint before."""
    for step in (5, 10):
        save(ranks, step)
    vanishing = run_dir.path / "checkpoints" / checkpoint_name(10) / "rank-00001-00.bin"
    load = ranks[1]._load
    monkeypatch.setattr(ranks[1], "_load", lambda arrays, step: (vanishing.unlink(), load(arrays, step)))

    def failure(rank: int) -> EmbarkError:
        with pytest.raises(EmbarkError) as caught:
            ranks[rank].load_newest(lambda text: None)
        return caught.value

    failures = on_all(failure)
    assert [one.exit_code for one in failures] == [ExitCode.FAULT] * NUM_RANKS
    assert {one.what for one in failures} == {f"there is no {vanishing}"}
    assert "start the run again" in failures[0].fix
    monkeypatch.undo()
    assert [one.step for one in on_all(lambda rank: ranks[rank].load_newest(lambda text: None))] == [5] * NUM_RANKS


@pytest.mark.parametrize("spoil", [
    lambda folder: (folder / "rank-00001-00.bin").write_bytes(b"x"),
    lambda folder: (folder / "index.json").write_bytes(b"\xff" * 300),
    lambda folder: (folder / "commit.json").write_bytes(b"\xff" * 300),
    lambda folder: (folder / "commit.json").write_text('{"step": 5, "files": {"../../spec.toml": [1, "x"]}}'),
])
def test_where_none_is_intact_the_run_stops_and_keeps_everything(ranks, run_dir, spoil):
    for step in (5, 10):
        save(ranks, step)
        spoil(run_dir.path / "checkpoints" / checkpoint_name(step))
    before = contents(run_dir)
    named = r"no checkpoint is intact(.|\n)*step-000000005: .*\n.*step-000000010: .*"
    with pytest.raises(UserError, match=named) as raised:
        on_all(lambda rank: ranks[rank].load_newest(lambda text: None))
    assert "--fresh" in raised.value.fix
    assert contents(run_dir) == before


def test_values_added_later_are_in_the_mark_and_count_for_retention(ranks, run_dir, monkeypatch):
    monkeypatch.setattr(ranks[0], "_spec", load_spec("laptop", ["store.keep_checkpoints=1", "store.keep_best=1"]))
    save(ranks, 5, {"eval": {"auc": 0.8}})
    save(ranks, 10)
    assert [c.step for c in run_dir.checkpoints.committed()] == [5, 10]
    assert on_all(lambda rank: ranks[rank].add_values(10, {"eval": {"auc": 0.9}})) == [None] * NUM_RANKS
    (checkpoint,) = run_dir.checkpoints.committed()
    assert (checkpoint.step, checkpoint.values["eval"]) == (10, {"auc": 0.9})
    assert checkpoint.values["world_size"] == NUM_RANKS
    assert run_dir.checkpoints.damage(checkpoint) == ""


def test_a_changed_text_file_condemns_no_tensors(ranks, run_dir):
    save(ranks, 5)
    for name in ("plan.txt", "spec.toml"):
        (run_dir.path / "checkpoints" / checkpoint_name(5) / name).write_text("\r\n")
    assert [one.step for one in on_all(lambda rank: ranks[rank].load_newest(lambda text: None))] == [5] * NUM_RANKS
    (checkpoint,) = run_dir.checkpoints.committed()
    assert len(run_dir.checkpoints.damages(checkpoint)) == 2  # `embark checkpoints --verify` names them


def test_a_linked_step_folder_is_loaded_and_never_deleted_through(ranks, run_dir, tmp_path):
    save(ranks, 5)
    folder, moved = run_dir.path / "checkpoints" / checkpoint_name(5), tmp_path / "other-disk" / "moved"
    moved.parent.mkdir()
    folder.rename(moved)
    folder.symlink_to(moved)
    before = sorted(path.name for path in moved.iterdir())
    assert [one.step for one in on_all(lambda rank: ranks[rank].load_newest(lambda text: None))] == [5] * NUM_RANKS
    save(ranks, 10)
    save(ranks, 15)  # keep_checkpoints=2: step 5 goes
    assert [c.step for c in run_dir.checkpoints.committed()] == [10, 15]
    assert not folder.is_symlink()
    assert sorted(path.name for path in moved.iterdir()) == before


def test_a_link_to_a_disk_that_is_not_mounted_stops_the_run(ranks, run_dir, tmp_path):
    folder = run_dir.path / "checkpoints" / checkpoint_name(5)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tmp_path / "not-mounted")
    with pytest.raises(UserError, match="no checkpoint is intact"):
        on_all(lambda rank: ranks[rank].load_newest(lambda text: None))
    assert folder.is_symlink()


@pytest.mark.parametrize("stray", ["step-0000000060", "step-99999999999999999999", "step-60"])
def test_a_folder_that_no_save_names_so_is_left_alone(ranks, run_dir, stray):
    save(ranks, 60)
    (run_dir.path / "checkpoints" / stray).mkdir()
    (run_dir.path / "checkpoints" / stray / "commit.json").write_text('{"step": 99999999999999999999, "files": {}}')
    assert [one.step for one in on_all(lambda rank: ranks[rank].load_newest(lambda text: None))] == [60] * NUM_RANKS
    save(ranks, 61)
    assert [c.step for c in run_dir.checkpoints.committed()] == [60, 61]
    assert (run_dir.path / "checkpoints" / stray / "commit.json").exists()


def contents(run_dir: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()}


def test_training_stands_still_for_the_copy_alone(ranks, monkeypatch):
    gate = threading.Event()
    write = LocalStore.write

    def held(self: LocalStore, *words: Any) -> None:
        assert gate.wait(HANG_S)
        write(self, *words)

    monkeypatch.setattr(LocalStore, "write", held)
    for one in ranks:
        assert one.begin(5, {}) == []
        assert one.done() == []
    gate.set()
    assert [saved.step for one in ranks for saved in one.wait()] == [5] * NUM_RANKS
    assert ranks[0].wait() == []


def save(ranks: list[Bytes], step: int, values: dict[str, Any] | None = None) -> list[Saved]:
    for one in ranks:
        assert one.begin(step, values or {}) == []
    return [saved for one in ranks for saved in one.wait()]


def on_all(call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(threads.map(call, range(NUM_RANKS)))


def watched_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files, as they are there."""
    written: list[str] = []
    for name in ("write", "create"):
        write = getattr(LocalStore, name)

        def watched(self: LocalStore, path: str, *words: Any, write: Any = write) -> Any:
            result = write(self, path, *words)
            written.append(path.rpartition("/")[2])
            return result

        monkeypatch.setattr(LocalStore, name, watched)
    return written


def refuse_writes(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    for name in ("write", "create"):
        write = getattr(LocalStore, name)

        def refused(self: LocalStore, path: str, *words: Any, write: Any = write) -> Any:
            if word in path:
                raise OSError(f"the disk of {word} is gone")
            return write(self, path, *words)

        monkeypatch.setattr(LocalStore, name, refused)

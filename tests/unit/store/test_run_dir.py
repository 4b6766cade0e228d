"""A checkpoint is either committed whole or invisible."""

import json

import pytest

from embark.store import RunDir, begin_checkpoint, commit_checkpoint, numbered, read_checkpoint, write_whole


def make_checkpoint(run_dir: RunDir, step: int) -> None:
    path = run_dir.checkpoint_path(step)
    begin_checkpoint(path)
    (path / "shard.distcp").write_bytes(b"x" * 100)
    commit_checkpoint(path, {"step": step})


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    for step in (100, 200, 1_000_000_000):
        make_checkpoint(run_dir, step)
    return run_dir


def test_the_newest_is_the_largest_step_not_the_last_name(run_dir):
    assert run_dir.newest().step == 1_000_000_000
    assert [c.step for c in run_dir.committed()] == [100, 200, 1_000_000_000]


def test_without_its_mark_it_does_not_exist(run_dir):
    (run_dir.checkpoint_path(200) / "commit.json").unlink()
    assert [c.step for c in run_dir.committed()] == [100, 1_000_000_000]


@pytest.mark.parametrize("damage", ["cut", "gone", "mark_cut", "mark_other"])
def test_a_damaged_one_does_not_exist(run_dir, damage):
    path = run_dir.checkpoint_path(1_000_000_000)
    if damage == "cut":
        (path / "shard.distcp").write_bytes(b"x" * 99)
    elif damage == "gone":
        (path / "shard.distcp").unlink()
    elif damage == "mark_cut":
        (path / "commit.json").write_text('{"files": {')
    else:
        (path / "commit.json").write_text(json.dumps({"step": 1}))
    assert run_dir.newest().step == 200


def test_the_mark_keeps_what_it_was_given(run_dir):
    assert read_checkpoint(run_dir.checkpoint_path(100)).commit["step"] == 100


def test_pruning_keeps_the_newest(run_dir):
    run_dir.prune(keep=1)
    assert [p.name for p in run_dir.checkpoints.iterdir()] == ["step-1000000000"]


def test_beginning_anew_clears_what_an_unfinished_save_left(run_dir):
    path = run_dir.checkpoint_path(100)
    begin_checkpoint(path)
    assert list(path.iterdir()) == []


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert RunDir(tmp_path / "none").newest() is None


def test_numbering_takes_the_first_free_name(tmp_path):
    assert numbered(tmp_path / "run").name == "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert numbered(tmp_path / "run").name == "run-3"


def test_writing_whole_replaces_and_leaves_nothing_beside(tmp_path):
    write_whole(tmp_path / "a" / "f", "one")
    write_whole(tmp_path / "a" / "f", "two")
    assert (tmp_path / "a" / "f").read_text() == "two"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["f"]

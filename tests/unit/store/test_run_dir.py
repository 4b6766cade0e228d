"""A checkpoint is either committed whole or invisible; a run's directory is found again."""

import hashlib

import pytest

from embark.errors import DataError
from embark.store import (
    CheckpointStore,
    ChecksumWriter,
    FileChecksum,
    RunDir,
    first_free_run,
    open_store,
    run_uri,
    write_atomic,
)


def put(checkpoints: CheckpointStore, step: int, text: bytes = b"x" * 100) -> None:
    store = ChecksumWriter(checkpoints.store)
    store.write(f"step-{step:09d}/rank-00000-00.bin", text)
    marks = {path.split("/", 1)[1]: mark for path, mark in store.marks.items()}
    checkpoints.commit(step, marks, {"world_size": 2})


@pytest.fixture
def checkpoints(tmp_path) -> CheckpointStore:
    checkpoints = RunDir(str(tmp_path / "run")).checkpoints
    for step in (100, 200, 1_000_000_000):
        put(checkpoints, step)
    return checkpoints


def steps(checkpoints: CheckpointStore) -> list[int]:
    return [c.step for c in checkpoints.committed()]


def file_of(tmp_path, step: int, name: str = "rank-00000-00.bin"):
    return tmp_path / "run" / "checkpoints" / f"step-{step:09d}" / name


def test_they_are_in_order_of_steps_not_of_names(checkpoints):
    assert steps(checkpoints) == [100, 200, 1_000_000_000]


def test_the_mark_keeps_what_it_was_given(checkpoints):
    first = checkpoints.committed()[0]
    assert first.values["world_size"] == 2
    assert first.num_bytes == 100
    assert first.files == {"rank-00000-00.bin": FileChecksum(100, hashlib.sha256(b"x" * 100).hexdigest())}


def test_without_its_mark_it_does_not_exist(checkpoints, tmp_path):
    file_of(tmp_path, 200, "commit.json").unlink()
    assert steps(checkpoints) == [100, 1_000_000_000]
    assert checkpoints.unfinished() == [200]


@pytest.mark.parametrize("text", ['{"files": {', "[]", '{"step": 1}', '{"step": 1, "files": {"a": 3}}', ""])
def test_with_a_mark_that_is_none_it_does_not_exist(checkpoints, tmp_path, text):
    file_of(tmp_path, 200, "commit.json").write_text(text)
    assert steps(checkpoints) == [100, 1_000_000_000]


@pytest.mark.parametrize(
    ("damage", "what"),
    [("cut", "99 bytes instead of 100"), ("gone", "rank-00000-00.bin"), ("flipped", "its bytes changed")],
)
def test_damage_is_named(checkpoints, tmp_path, damage, what):
    path = file_of(tmp_path, 200)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"x" * 99 if damage == "cut" else b"x" * 99 + b"y")
    by_step = {c.step: c for c in checkpoints.committed()}
    assert what in checkpoints.damage(by_step[200])
    assert checkpoints.damage(by_step[100]) == ""


def test_ranks_share_the_looking(checkpoints, tmp_path):
    store = ChecksumWriter(checkpoints.store)
    for name in ("a", "b", "c"):
        store.write(f"step-000000300/{name}", name.encode())
    checkpoints.commit(300, {p.split("/")[1]: m for p, m in store.marks.items()}, {})
    checkpoint = next(c for c in checkpoints.committed() if c.step == 300)
    file_of(tmp_path, 300, "b").write_text("B")
    assert [bool(checkpoints.damage(checkpoint, part, 3)) for part in range(3)] == [False, True, False]


def test_a_file_that_did_not_arrive_is_never_committed(checkpoints):
    with pytest.raises(DataError, match="is not there"):
        checkpoints.commit(300, {"rank-00001-00.bin": FileChecksum(3, "")}, {})
    assert 300 not in steps(checkpoints)


def test_removing_leaves_nothing(checkpoints, tmp_path):
    checkpoints.remove(200)
    assert steps(checkpoints) == [100, 1_000_000_000]
    assert not [e for e in checkpoints.store.list() if e.path.startswith("step-000000200")]


def test_a_checksum_writer_remembers_pieces_and_bytes(tmp_path):
    store = open_store(tmp_path / "d")
    writer = ChecksumWriter(store)
    writer.write("a", iter([b"a", memoryview(b"bc")]), 3)
    writer.write("b", b"abc")
    assert set(writer.marks.values()) == {FileChecksum(3, hashlib.sha256(b"abc").hexdigest())}
    assert store.read("a") == store.read("b") == b"abc"


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert RunDir(str(tmp_path / "none")).checkpoints.committed() == []


def test_numbering_takes_the_first_free_name(tmp_path):
    root = str(tmp_path)
    assert first_free_run(root, "run").uri == f"{root}/run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert first_free_run(root, "run").uri == f"{root}/run-3"
    assert run_uri("s3://bucket/runs/", "a") == "s3://bucket/runs/a"


def test_a_remote_run_keeps_its_small_files_here(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    one, two = RunDir("s3://bucket/a/run"), RunDir("s3://bucket/b/run")
    assert one.is_remote
    assert one.path != two.path
    assert one.path.is_relative_to(tmp_path)
    assert not RunDir(f"file://{tmp_path}/x").is_remote
    assert RunDir(f"file://{tmp_path}/x").path == tmp_path / "x"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_process_that_lost_a_run_does_not_write_the_next_ones_events(
    tmp_path, monkeypatch, is_there
):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    run = RunDir(f"memory://{tmp_path.name}/run")
    write_atomic(run.events, "one\n")
    if is_there:
        run.publish()
    with run.events.open("a") as paused:
        run.fetch()
        paused.write("two\n")
    assert run.events.read_text() == "one\n"


@pytest.mark.parametrize(("here", "kept"), [("one\ntwo\n", "one\ntwo\n"), ("other\n", "one\n"), ("", "one\n")])
def test_events_that_a_killed_process_did_not_publish_are_kept(tmp_path, monkeypatch, here, kept):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    run = RunDir(f"memory://{tmp_path.name}/killed")
    write_atomic(run.events, "one\n")
    run.publish()
    write_atomic(run.events, here)
    run.fetch()
    assert run.events.read_text() == kept


def test_writing_complete_replaces_and_leaves_nothing_beside(tmp_path):
    write_atomic(tmp_path / "a" / "f", "one")
    write_atomic(tmp_path / "a" / "f", "two")
    assert (tmp_path / "a" / "f").read_text() == "two"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["f"]

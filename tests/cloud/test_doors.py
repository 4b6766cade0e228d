"""Every door does the same, whatever lies behind it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from embark.errors import UserError
from embark.store.door import Entry
from embark.store.trouble import Missing


def test_what_is_written_is_read_back(door):
    door.write("a/b.bin", b"0123456789")
    assert door.read("a/b.bin") == b"0123456789"
    assert door.size("a/b.bin") == 10
    assert door.exists("a/b.bin")
    assert not door.exists("a/b")
    assert not door.exists("a")


def test_a_range_is_just_those_bytes(door):
    door.write("a", b"0123456789")
    assert door.read_range("a", 3, 4) == b"3456"
    assert door.read_range("a", 9, 1) == b"9"
    assert door.read_range("a", 5, 0) == b""


@pytest.mark.parametrize(("start", "length"), [(5, 6), (10, 1), (100, 5)])
def test_a_range_past_the_end_is_an_error_and_never_fewer_bytes(door, start, length):
    door.write("a", b"0123456789")
    with pytest.raises(Exception, match=r"short|before what was asked") as caught:
        door.read_range("a", start, length)
    assert caught.value.exit_code == 70


def test_empty_files_and_awkward_names_are_kept(door):
    for path in ("empty", "a b+c&d=é/step-000000100/__0_0.bin", "a%20b"):
        door.write(path, b"")
        assert door.read(path) == b""
    assert len(door.list()) == 3


def test_writing_again_replaces(door):
    door.write("a", b"old and long")
    door.write("a", b"new")
    assert door.read("a") == b"new"


def test_what_is_not_there_is_missing(door):
    for call in (door.read, door.size, lambda path: door.read_range(path, 0, 1)):
        with pytest.raises(Missing, match="there is no"):
            call("nowhere")


def test_a_list_is_of_one_folder_at_any_depth_in_order(door):
    for path in ("run/c/2", "run/c/10", "run/a", "runner/x", "other"):
        door.write(path, path.encode())
    assert door.list("run") == [Entry(p, len(p)) for p in ("run/a", "run/c/10", "run/c/2")]
    assert door.list("run/") == door.list("run")
    assert door.list("nothing") == []
    assert len(door.list()) == 5


def test_deleting_is_by_file_or_by_folder_and_may_be_repeated(door):
    for path in ("run/a", "run/b/c", "runner/x"):
        door.write(path, b"x")
    door.delete("run/a")
    door.delete("run/a")
    assert not door.exists("run/a")
    door.delete_prefix("run")
    door.delete_prefix("run")
    assert [entry.path for entry in door.list()] == ["runner/x"]


@pytest.mark.parametrize("path", ["", "../x", "/etc/x", "a/../../x"])
def test_no_path_leads_out_of_the_store(door, path):
    for call in (door.read, door.delete, door.delete_prefix, lambda p: door.write(p, b"")):
        with pytest.raises(UserError, match="not a path inside"):
            call(path)


def test_fifty_megabytes_go_and_come_back(door, tmp_path):
    data = os.urandom(1 << 20) * 50 + b"tail"
    local = tmp_path / "big"
    local.write_bytes(data)
    door.write("from/file", local)
    door.write("from/pieces", (memoryview(data)[i : i + 7_000_000] for i in range(0, len(data), 7_000_000)), len(data))
    back = tmp_path / "back" / "big"
    for path in ("from/file", "from/pieces"):
        door.download(path, back)
        assert back.read_bytes() == data
    assert door.read_range("from/file", len(data) - 4, 4) == b"tail"
    assert [entry.size_bytes for entry in door.list()] == [len(data)] * 2


def test_pieces_that_end_in_an_error_leave_nothing(door):
    def pieces():
        yield bytes(20_000_000)
        raise KeyError("no more")

    with pytest.raises(Exception, match="no more"):
        door.write("half", pieces(), 40_000_000)
    assert not door.exists("half")
    assert door.list() == []


def test_many_go_and_come_with_progress(door, tmp_path):
    (tmp_path / "up").mkdir()
    pairs = []
    for number in range(20):
        local = tmp_path / "up" / str(number)
        local.write_bytes(str(number).encode() * 1000)
        pairs.append((local, f"many/{number:02d}"))
    told: list[tuple[int, int]] = []
    door.upload_many(pairs, parallel=4, progress=lambda done, total: told.append((done, total)))
    assert len(door.list("many")) == 20
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == sum(local.stat().st_size for local, _ in pairs)
    told.clear()
    door.download_many([(path, tmp_path / "down" / local.name) for local, path in pairs], 4, lambda *t: told.append(t))
    assert told[-1][0] == told[-1][1] > 0
    for local, _ in pairs:
        assert (tmp_path / "down" / local.name).read_bytes() == local.read_bytes()


def test_a_failure_among_many_is_raised(door, tmp_path):
    (tmp_path / "there").write_bytes(b"x")
    with pytest.raises(Missing, match="not-there"):
        door.upload_many([(tmp_path / "there", "a"), (tmp_path / "not-there", "b")])
    door.write("a", b"x")
    with pytest.raises(Missing, match="nowhere"):
        door.download_many([("a", tmp_path / "a"), ("nowhere", tmp_path / "b")])
    assert not (tmp_path / "b").exists()


def test_of_many_writers_one_wins_whole(door):
    versions = [bytes([number]) * 300_000 for number in range(8)]
    begin = threading.Barrier(len(versions))

    def write(version: bytes) -> None:
        begin.wait()
        door.write("contested", version)

    with ThreadPoolExecutor(len(versions)) as pool:
        list(pool.map(write, versions))
    assert door.read("contested") in versions
    assert [entry.path for entry in door.list()] == ["contested"]


def test_a_check_leaves_nothing(door):
    door.check()
    assert door.list() == []

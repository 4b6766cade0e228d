"""Every store does the same, whatever lies behind it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from limits import HANG_S

from embark.errors import UserError
from embark.store.cloud_store import CloudStore
from embark.store.errors import NotFound
from embark.store.object_store import Entry, ObjectStore


def test_what_is_written_is_read_back(store):
    store.write("a/b.bin", b"0123456789")
    assert store.read("a/b.bin") == b"0123456789"
    assert store.size("a/b.bin") == 10
    assert store.exists("a/b.bin")
    assert not store.exists("a/b")
    assert not store.exists("a")


def test_a_range_is_just_those_bytes(store):
    store.write("a", b"0123456789")
    assert store.read_range("a", 3, 4) == b"3456"
    assert store.read_range("a", 9, 1) == b"9"
    assert store.read_range("a", 5, 0) == b""


@pytest.mark.parametrize(("start", "length"), [(5, 6), (10, 1), (100, 5)])
def test_a_range_past_the_end_is_an_error_and_never_fewer_bytes(store, start, length):
    store.write("a", b"0123456789")
    with pytest.raises(Exception, match=r"bytes early|shorter|before what was asked") as caught:
        store.read_range("a", start, length)
    assert caught.value.exit_code == 70


def test_empty_files_and_awkward_names_are_stored(store):
    for path in ("empty", "a b+c&d=é/step-000000100/__0_0.bin", "a%20b"):
        store.write(path, b"")
        assert store.read(path) == b""
    assert len(store.list()) == 3


def test_writing_again_replaces(store):
    store.write("a", b"old and long")
    store.write("a", b"new")
    assert store.read("a") == b"new"


def _ignores_conditions(store: ObjectStore) -> bool:
    """The emulator of Google's JSON interface does."""
    return store.uri.startswith("gs://") and not isinstance(store, CloudStore)


def test_a_file_is_created_once(store):
    assert store.create("a/b", b"first")
    is_overwritten = _ignores_conditions(store)
    assert store.create("a/b", b"second") == is_overwritten
    assert store.read("a/b") == (b"second" if is_overwritten else b"first")
    is_remote = "://" in store.uri  # there, a request that was sent again finds what it created
    assert store.create("a/b", store.read("a/b")) == is_remote


def test_a_file_is_replaced_only_if_it_is_what_was_expected(store):
    assert not store.replace("a/b", b"new", b"old")
    store.write("a/b", b"old")
    assert store.replace("a/b", b"new", b"old")
    assert not store.replace("a/b", b"other", b"old")
    assert store.read("a/b") == b"new"


def test_of_replacements_at_once_none_is_lost(store):
    num_threads, num_changes = (1, 2) if _ignores_conditions(store) else (4, 10)
    store.write("count", b"0")

    def count(name: int) -> None:
        for _ in range(num_changes):
            is_done = False
            while not is_done:
                text = store.read("count")
                is_done = store.replace("count", b"%d by %d" % (int(text.split()[0]) + 1, name), text)

    threads = [threading.Thread(target=count, args=(name,)) for name in range(num_threads)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(HANG_S)
    assert int(store.read("count").split()[0]) == num_threads * num_changes


def test_what_is_not_there_is_missing(store):
    for call in (store.read, store.size, lambda path: store.read_range(path, 0, 1)):
        with pytest.raises(NotFound, match="there is no"):
            call("nowhere")


def test_a_list_is_of_one_folder_at_any_depth_in_order(store):
    for path in ("run/c/2", "run/c/10", "run/a", "runner/x", "other"):
        store.write(path, path.encode())
    assert store.list("run") == [Entry(p, len(p)) for p in ("run/a", "run/c/10", "run/c/2")]
    assert store.list("run/") == store.list("run")
    assert store.list("nothing") == []
    assert len(store.list()) == 5


def test_deleting_is_by_file_or_by_folder_and_may_be_repeated(store):
    for path in ("run/a", "run/b/c", "runner/x"):
        store.write(path, b"x")
    store.delete("run/a")
    store.delete("run/a")
    assert not store.exists("run/a")
    store.delete_prefix("run")
    store.delete_prefix("run")
    assert [entry.path for entry in store.list()] == ["runner/x"]


@pytest.mark.parametrize("path", ["", "../x", "/etc/x", "a/../../x"])
def test_no_path_leads_out_of_the_store(store, path):
    for call in (store.read, store.delete, store.delete_prefix, lambda p: store.write(p, b"")):
        with pytest.raises(UserError, match="not a path inside"):
            call(path)


def test_fifty_megabytes_go_and_come_back(store, tmp_path):
    data = os.urandom(1 << 20) * 50 + b"tail"
    local = tmp_path / "big"
    local.write_bytes(data)
    store.write("from/file", local)
    store.write("from/pieces", (memoryview(data)[i : i + 7_000_000] for i in range(0, len(data), 7_000_000)), len(data))
    back = tmp_path / "back" / "big"
    for path in ("from/file", "from/pieces"):
        store.download(path, back)
        assert back.read_bytes() == data
    assert store.read_range("from/file", len(data) - 4, 4) == b"tail"
    assert [entry.size_bytes for entry in store.list()] == [len(data)] * 2


def test_pieces_that_end_in_an_error_leave_nothing(store):
    def pieces():
        yield bytes(20_000_000)
        raise KeyError("no more")

    with pytest.raises(Exception, match="no more"):
        store.write("half", pieces(), 40_000_000)
    assert not store.exists("half")
    assert store.list() == []


def test_many_files_are_uploaded_and_downloaded(store, tmp_path):
    (tmp_path / "up").mkdir()
    pairs = []
    for number in range(20):
        local = tmp_path / "up" / str(number)
        local.write_bytes(str(number).encode() * 1000)
        pairs.append((local, f"many/{number:02d}"))
    store.upload_many(pairs)
    assert len(store.list("many")) == 20
    store.download_many([(path, tmp_path / "down" / local.name) for local, path in pairs])
    for local, _ in pairs:
        assert (tmp_path / "down" / local.name).read_bytes() == local.read_bytes()


def test_a_failure_among_many_is_raised(store, tmp_path):
    (tmp_path / "there").write_bytes(b"x")
    with pytest.raises(NotFound, match="not-there"):
        store.upload_many([(tmp_path / "there", "a"), (tmp_path / "not-there", "b")])
    store.write("a", b"x")
    with pytest.raises(NotFound, match="nowhere"):
        store.download_many([("a", tmp_path / "a"), ("nowhere", tmp_path / "b")])
    assert not (tmp_path / "b").exists()


def test_of_many_writers_one_wins_complete(store):
    versions = [bytes([number]) * 300_000 for number in range(8)]
    begin = threading.Barrier(len(versions))

    def write(version: bytes) -> None:
        begin.wait()
        store.write("contested", version)

    with ThreadPoolExecutor(len(versions)) as pool:
        list(pool.map(write, versions))
    assert store.read("contested") in versions
    assert [entry.path for entry in store.list()] == ["contested"]


def test_a_check_leaves_nothing(store):
    store.check()
    assert store.list() == []

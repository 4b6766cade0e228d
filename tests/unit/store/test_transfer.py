"""A copy is whole and the same, or not there; one that was stopped goes on."""

from __future__ import annotations

import hashlib

import pytest

from embark.errors import DataError, Fault
from embark.store import open_store
from embark.store.object_store import LocalStore
from embark.store.transfer import COPY_STATE, CopyItem, Transfer

FILES = {"manifest.json": b"{}", "train/0.bin": b"a" * 1_000, "train/1.bin": b"b" * 2_000, "validation/0.bin": b"c"}
LAST = ("manifest.json",)


class Stopped(LocalStore):
    """A target that is killed on a file, and remembers what was written."""

    def __init__(self, root, on=""):
        super().__init__(root)
        self.on, self.written = on, []

    def write(self, path, data, size_bytes=None):
        if path == self.on:
            raise KeyboardInterrupt
        self.written.append(path)
        super().write(path, data, size_bytes)


@pytest.fixture
def source(tmp_path):
    store = open_store(tmp_path / "source")
    for path, data in FILES.items():
        store.write(path, data)
    return store


def items(has_checksums=True):
    return [CopyItem(path, len(data), hashlib.sha256(data).hexdigest() if has_checksums else "")
            for path, data in FILES.items()]


def copy(source, target, *, mark="m", verify=False, listed=None, progress=None):
    transfer = Transfer(source, target, listed or items(), mark=mark, parallel=1)
    plan = transfer.plan(LAST)
    transfer.run(plan, verify=verify, progress=progress)
    return plan


def content(store):
    return {entry.path: store.read(entry.path) for entry in store.list()}


@pytest.mark.parametrize("has_checksums", [True, False])
def test_everything_arrives_and_the_manifest_last(source, tmp_path, has_checksums):
    target, messages = Stopped(tmp_path / "target"), []
    copy(source, target, listed=items(has_checksums), verify=True, progress=lambda *now: messages.append(now))
    assert content(target) == FILES
    assert target.written[0] == COPY_STATE
    assert target.written[-1] == "manifest.json"
    assert messages[-1] == (2 * 3_003, 2 * 3_003)


@pytest.mark.parametrize("on", [COPY_STATE, "train/0.bin", "validation/0.bin", "manifest.json"])
def test_a_stopped_copy_leaves_no_manifest_and_continues(source, tmp_path, on):
    with pytest.raises(KeyboardInterrupt):
        copy(source, Stopped(tmp_path / "target", on))
    assert "manifest.json" not in content(open_store(tmp_path / "target"))
    again = Stopped(tmp_path / "target")
    plan = copy(source, again)
    assert content(again) == FILES
    num_before = {COPY_STATE: 0, "train/0.bin": 0, "validation/0.bin": 2, "manifest.json": 3}[on]
    assert len(plan.done) == num_before
    assert len([path for path in again.written if path != COPY_STATE]) == 4 - num_before


def test_a_complete_copy_is_not_copied_again(source, tmp_path):
    target = Stopped(tmp_path / "target")
    copy(source, target)
    again = Stopped(tmp_path / "target")
    plan = copy(source, again)
    assert (plan.todo, plan.last, again.written) == ((), (), [])
    assert len(plan.done) == 4


def test_an_older_file_of_the_same_size_is_compared_and_replaced(source, tmp_path):
    target = open_store(tmp_path / "target")
    target.write("train/0.bin", b"x" * 1_000)
    target.write("train/1.bin", FILES["train/1.bin"])
    plan = copy(source, target)
    assert [item.path for item in plan.done] == ["train/1.bin"]
    assert content(target) == FILES


def test_such_a_file_is_not_trusted_after_a_stop_either(source, tmp_path):
    """It has the right size and a copy is under way, but it is not of this copy."""
    open_store(tmp_path / "target").write("validation/0.bin", b"x")
    with pytest.raises(KeyboardInterrupt):
        copy(source, Stopped(tmp_path / "target", "train/1.bin"))
    target = open_store(tmp_path / "target")
    copy(source, target)
    assert content(target) == FILES


def test_files_of_another_copy_are_not_trusted(source, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        copy(source, Stopped(tmp_path / "target", "validation/0.bin"), mark="another")
    target = open_store(tmp_path / "target")
    target.write("train/0.bin", b"z" * 1_000)
    copy(source, target)
    assert content(target) == FILES


def test_the_manifest_is_absent_while_a_missing_file_is_copied(source, tmp_path):
    target = Stopped(tmp_path / "target")
    copy(source, target)
    target.delete("train/1.bin")
    with pytest.raises(KeyboardInterrupt):
        copy(source, Stopped(tmp_path / "target", "train/1.bin"))
    assert not target.exists("manifest.json")
    copy(source, target)
    assert content(target) == FILES


def test_a_damaged_source_is_not_copied(source, tmp_path):
    source.write("train/1.bin", b"B" * 2_000)
    target = open_store(tmp_path / "target")
    with pytest.raises(DataError, match="does not match its checksum"):
        copy(source, target)
    assert not target.exists("train/1.bin")
    assert not target.exists("manifest.json")


def test_what_the_target_spoils_is_found_when_it_is_read_back(source, tmp_path):
    class Spoiling(LocalStore):
        def write(self, path, data, size_bytes=None):
            pieces = b"".join(data) if not isinstance(data, bytes) else data
            super().write(path, b"Z" + pieces[1:] if path == "train/1.bin" else pieces)

    target = Spoiling(tmp_path / "target")
    with pytest.raises(Fault, match=r"train/1\.bin is not what was copied"):
        copy(source, target, verify=True)
    assert not target.exists("manifest.json")
    assert not target.exists("train/1.bin")


def test_what_the_target_loses_is_found_without_reading(source, tmp_path):
    class Losing(LocalStore):
        def write(self, path, data, size_bytes=None):
            super().write(path, list(data)[:0] if path == "train/1.bin" else data)

    with pytest.raises(Fault, match="has 0 bytes after the copy"):
        copy(source, Losing(tmp_path / "target"))


def test_a_digest_is_that_of_the_bytes(source):
    assert source.sha256("train/0.bin", 1_000) == hashlib.sha256(FILES["train/0.bin"]).hexdigest()

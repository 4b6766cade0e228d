"""A file is complete and on disk before it has its name, and the name is on disk too."""

import os

from embark.store.atomic_file import commit


def test_an_open_file_is_synced_then_renamed_then_its_directory_is_synced(tmp_path, monkeypatch):
    path, order = tmp_path / "a.bin", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append("replace"), replace(old, new)))
    file = open(f"{path}.part", "wb")  # noqa: SIM115
    file.write(b"rows")
    commit(file, path)
    assert order == ["fsync", "replace", "fsync"]
    assert file.closed
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a.bin", b"rows")]

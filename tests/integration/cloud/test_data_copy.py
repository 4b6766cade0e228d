"""Prepared data goes to every kind of store and comes back the same; an interrupted copy is resumed."""

from __future__ import annotations

import json

import pytest

from embark.__main__ import run
from embark.data.prepared import MANIFEST
from embark.errors import DataError, Fault
from embark.store import open_store
from embark.store.transfer import COPY_STATE, CopyItem, Transfer

SMALL = ["--set", "data.num_train_samples=40000", "--set", "data.num_eval_samples=5000"]


@pytest.fixture
def made(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["data", "make", "laptop", "--out", "made", "-q", *SMALL]) == 0
    capsys.readouterr()
    return tmp_path / "made"


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_and_back_again(store, made, tmp_path, capsys):
    assert run(["data", "copy", str(made), store.uri, "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_copied"] == 3
    assert sorted(entry.path for entry in store.list()) == sorted(content(made))
    assert run(["data", "check", store.uri]) == 0
    assert f"{store.uri}: complete" in capsys.readouterr().out
    assert run(["data", "copy", store.uri, str(tmp_path / "back"), "-q"]) == 0
    assert content(tmp_path / "back") == content(made)
    assert run(["data", "copy", str(made), store.uri]) == 0
    assert "nothing to copy" in capsys.readouterr().out


def test_damage_in_a_store_is_found_by_check_and_refused_by_copy(store, made, tmp_path, capsys):
    assert run(["data", "copy", str(made), store.uri, "-q"]) == 0
    path = next(entry.path for entry in store.list() if entry.path.startswith("train/"))
    data = bytearray(store.read(path))
    data[-1] ^= 1
    store.write(path, bytes(data))
    assert run(["data", "check", store.uri]) == 1
    assert "its checksum is not the manifest's" in capsys.readouterr().err
    assert run(["data", "copy", store.uri, str(tmp_path / "back")]) != 0
    assert not (tmp_path / "back" / MANIFEST).exists()
    store.delete(path)
    assert run(["data", "check", store.uri]) == 1
    assert path in capsys.readouterr().err


def test_an_interrupted_copy_has_no_manifest_and_is_resumed(store, made, capsys, monkeypatch):
    put = type(store).write

    def cut(self, path, data, size_bytes=None):
        if path.startswith("validation/"):
            raise Fault("the line is dead")
        put(self, path, data, size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "write", cut)
        assert run(["data", "copy", str(made), store.uri]) == 70
    assert not store.exists(MANIFEST)
    assert store.exists(COPY_STATE)
    assert run(["data", "check", store.uri]) == 64
    capsys.readouterr()
    assert run(["data", "copy", str(made), store.uri, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_there_already"] >= 1
    assert not store.exists(COPY_STATE)
    assert run(["data", "check", store.uri, "-q"]) == 0


def test_a_large_damaged_source_is_never_complete_in_the_store(store, tmp_path):
    """More than one part of an upload, so that it is under way when the damage shows."""
    source = open_store(tmp_path / "raw")
    source.write("big.bin", b"x" * (40 << 20))
    transfer = Transfer(source, store, [CopyItem("big.bin", 40 << 20, "0" * 64)], mark="m")
    with pytest.raises(DataError, match="does not match its checksum"):
        transfer.run(transfer.plan(), verify=False)
    assert not store.exists("big.bin")

"""A prepared data set is opened whole, or refused with what is missing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from prepared_rows import RAGGED, make_prepared

from embark.data import open_source, resolve_from_data
from embark.data.check import check
from embark.errors import DataError, Fault
from embark.spec import resolve
from embark.store import open_store


def refusal(path: str | Path, **data: object) -> str:
    spec = resolve({"data": {"kind": "prepared", "path": str(path), **data}})
    with pytest.raises(DataError) as caught:
        open_source(resolve_from_data(spec))
    assert str(path) in str(caught.value)
    assert caught.value.fix
    return str(caught.value)


def test_a_folder_without_a_manifest_says_how_to_make_one(tmp_path: Path):
    assert "embark data prepare" in refusal(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    text = refusal(tmp_path / "empty")
    assert "manifest.json" in text
    assert "embark data prepare" in text


def test_a_uri_without_a_manifest_says_the_same(tmp_path: Path):
    text = refusal(f"memory://{tmp_path.name}/nothing")
    assert "manifest.json" in text
    assert "embark data prepare" in text


def test_a_file_uri_is_a_folder(tmp_path: Path):
    made = make_prepared(tmp_path / "a folder")
    spec = resolve_from_data(resolve({"data": {"kind": "prepared", "path": (tmp_path / "a folder").as_uri()}}))
    assert open_source(spec).train_rows(0, 0, 9).ids.tolist() == made.open().train_rows(0, 0, 9).ids.tolist()


@pytest.mark.parametrize("features", [None, RAGGED], ids=["fixed", "ragged"])
def test_parts_that_are_missing_or_cut_short_are_all_named_before_training(tmp_path: Path, features):
    made = make_prepared(tmp_path, *([features] if features else []), part_bytes=2_000)
    parts = made.manifest.parts
    (tmp_path / parts["train"][1].file).unlink()
    cut = tmp_path / parts["validation"][0].file
    cut.write_bytes(cut.read_bytes()[:-64])
    text = refusal(tmp_path)
    assert f"{parts['train'][1].file} is missing" in text
    assert f"{parts['validation'][0].file} has {parts['validation'][0].size_bytes - 64:,} bytes" in text
    # Rows that are not used need not be there.
    (tmp_path / parts["test"][0].file).unlink()
    assert parts["test"][0].file not in refusal(tmp_path)


def test_a_manifest_of_another_version_or_other_blocks_is_refused(tmp_path: Path):
    make_prepared(tmp_path)
    manifest = tmp_path / "manifest.json"
    value = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(value | {"version": 99}))
    assert "version 99" in refusal(tmp_path)
    manifest.write_text(json.dumps(value | {"block_rows": 32}))
    assert "contradict each other" in refusal(tmp_path)
    manifest.write_bytes(b"\x80\xff{")
    assert "not the manifest" in refusal(tmp_path)


SHA256 = "0" * 64
FORGED: dict[str, tuple[list[str | int], object]] = {
    "no rows a block": (["block_rows"], 0), "rows as text": (["parts", "train", 0, "rows"], "12"),
    "negative rows": (["parts", "train", 0, "rows"], -5), "huge rows": (["parts", "train", 0, "rows"], 10**30),
    "no file": (["parts", "train", 0, "file"], None), "a NUL": (["parts", "train", 0, "file"], "a\0b"),
    "an absolute file": (["parts", "train", 0, "file"], "/etc/passwd"),
    "a file above": (["parts", "train", 0, "file"], "train/../../x.bin"),
    "half a character": (["parts", "train", 0, "file"], "\ud800"),
    "a checksum that is a path": (["parts", "train", 0, "sha256"], "/tmp/elsewhere"),
    "a checksum above": (["parts", "train", 0, "sha256"], "../" * 20 + "x"),
    "a short checksum": (["parts", "train", 0, "sha256"], SHA256[1:]),
    "two features of one name": (["layout", "features", 1, "name"], "tiny"),
    "a feature without rows": (["layout", "features", 0, "rows"], 0), "odd numbers": (["layout", "dense_bits"], 17),
    "deep": (["settings"], json.loads("[" * 400 + "]" * 400)), "a list": ([], []),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_forged_manifest_is_refused_before_any_file_is_touched(tmp_path: Path, monkeypatch, forged: str, scheme: str):
    """As a folder, and as an object store through the cache, whose files are named by checksums."""
    made = make_prepared(tmp_path / "data")
    keys, bad = FORGED[forged]
    value = at = json.loads((made.path / "manifest.json").read_text())
    for key in keys[:-1]:
        at = at[key]
    if keys:
        at[keys[-1]] = bad
    (made.path / "manifest.json").write_text(json.dumps(value if keys else bad))
    path = str(made.path)
    if scheme:
        path = f"{scheme}{tmp_path.name}-{len(keys)}/forged"
        for file in made.path.rglob("*.*"):
            open_store(path).write(file.relative_to(made.path).as_posix(), file.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(tmp_path.rglob("*"))
    assert "not the manifest" in refusal(path)
    with pytest.raises(DataError, match="not the manifest"):
        check(path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("method", ["open", "stat"])
def test_a_fault_of_the_machine_is_none_of_the_data(tmp_path: Path, monkeypatch, number: int, method: str):
    make_prepared(tmp_path)
    spec = resolve_from_data(resolve({"data": {"kind": "prepared", "path": str(tmp_path)}}))
    working = getattr(Path, method)

    def failing(path: Path, *words: object, **options: object) -> object:
        if path.suffix == ".bin":
            raise OSError(number, os.strerror(number), str(path))
        return working(path, *words, **options)

    monkeypatch.setattr(Path, method, failing)
    with pytest.raises(Fault, match=os.strerror(number).lower()):
        open_source(spec).train_rows(0, 0, 9)


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_fault_of_the_machine_is_none_of_the_columns(tmp_path: Path, monkeypatch, name: str):
    (tmp_path / name).write_text("label,a\n")
    spec = resolve({"model": {"tables": [{"name": "a", "rows": 9}], "num_dense": 0},
                    "data": {"kind": "columns", "path": str(tmp_path / name), "dense_columns": []}})

    def failing(*words: object, **options: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for place in ("embark.data.prepare.inputs.open", "embark.data.prepare.readers.ParquetFile"):
        monkeypatch.setattr(place, failing, raising=False)
    with pytest.raises(Fault, match="input/output error"):
        open_source(spec)

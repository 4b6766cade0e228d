"""A prepared data set is opened whole, or refused with what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prepared_rows import RAGGED, make_prepared

from embark.data import open_source, resolve_from_data
from embark.errors import DataError
from embark.spec import resolve


def refusal(path: str | Path, **data: object) -> str:
    spec = resolve({"data": {"kind": "prepared", "path": str(path), **data}})
    with pytest.raises(DataError) as caught:
        open_source(resolve_from_data(spec))
    assert str(path) in str(caught.value)
    assert caught.value.fix
    return str(caught.value)


def test_a_folder_that_is_not_there_or_holds_no_manifest_says_how_to_make_one(tmp_path: Path):
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


def test_a_manifest_that_is_none_or_of_another_version_or_of_other_blocks_is_refused(tmp_path: Path):
    make_prepared(tmp_path)
    manifest = tmp_path / "manifest.json"
    value = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(value | {"version": 99}))
    assert "version 99" in refusal(tmp_path)
    manifest.write_text(json.dumps(value | {"block_rows": 32}))
    assert "contradict each other" in refusal(tmp_path)
    manifest.write_bytes(b"\x80\xff{")
    assert "not the manifest" in refusal(tmp_path)

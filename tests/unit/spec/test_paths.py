"""Relative paths of data go by the spec's folder, those of `--set` by the current directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from embark.__main__ import run
from embark.data.prepare.inputs import open_inputs
from embark.errors import DataError, ExitCode
from embark.spec import load_spec
from embark.spec.paths import with_absolute_paths

SPEC = """
[publish]
data = "hour.parquet"

[data]
kind = "prepared"
path = "prepared"
label = "click"
prepare = { input = ["raw/*.csv", "s3://bucket/raw.csv", "/raw.csv"], id_map_from = "january" }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With `project/run.toml`; the current directory is its parent."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "run.toml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_in_a_file_are_relative_to_its_folder(folder, monkeypatch):
    data = load_spec("project/run.toml").data
    assert data.path == "project/prepared"
    assert data.prepare.input == ("project/raw/*.csv", "s3://bucket/raw.csv", "/raw.csv")
    assert data.prepare.id_map_from == "project/january"
    assert load_spec(str(folder / "project" / "run.toml")).data.path == str(folder / "project" / "prepared")
    assert load_spec("project/run.toml", ["data.path=elsewhere"]).data.path == "elsewhere"
    assert load_spec("project/run.toml").store.root == "runs"
    assert load_spec("project/run.toml").publish.data == "project/hour.parquet"
    monkeypatch.chdir("project")
    assert load_spec("run.toml").data.path == "prepared"
    absolute = with_absolute_paths(load_spec("run.toml"))
    assert (absolute.data.path, absolute.data.prepare.id_map_from, absolute.publish.data) == tuple(
        str(folder / "project" / name) for name in ("prepared", "january", "hour.parquet"))


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_in(folder):
    with pytest.raises(DataError) as caught:
        open_inputs(load_spec("project/run.toml", ["data.prepare.input=clicks.csv"]).data.prepare.input)
    assert caught.value.what == f"clicks.csv: there is no such file in {folder}"
    with pytest.raises(DataError, match="no such file") as caught:
        open_inputs(load_spec("project/run.toml").data.prepare.input)
    assert "relative paths of a spec go by the spec's own folder" in caught.value.fix


def test_a_spec_copied_beside_its_rendered_files_still_names_the_same_data(folder, monkeypatch):
    place = ["--set", "place.target=serve", "--set", "serve.artifact=gs://bucket/model", "--set", "model.num_dense=0",
             "--set", "model.num_tables=1"]
    assert run(["render", "project/run.toml", *place, "--out", "deploy/x"]) == ExitCode.DONE
    copied = load_spec("deploy/x/run.toml").data
    assert (copied.path, copied.prepare.input[0]) == ("project/prepared", "project/raw/*.csv")
    assert copied.prepare.id_map_from == "project/january"
    assert run(["render", "deploy/x/run.toml", "--set", "data.path=other"]) == ExitCode.DONE
    assert load_spec("deploy/x/run.toml").data.path == "other"

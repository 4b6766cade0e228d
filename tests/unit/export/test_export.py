"""An exported model: complete or invisible; damaged or foreign ones are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from exported_runs import draw_rows, prepared_spec, save_run, write_csv

from embark import EmbarkError, export_run
from embark.__main__ import run as embark
from embark.errors import DataError, UserError
from embark.export import write_version
from embark.export.artifact import INFO, WEIGHTS, open_artifact, open_versions
from embark.spec import resolve
from embark.store.checkpoint_arrays import CheckpointArrays
from embark.store.object_store import LocalStore, ObjectStore


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    train, held_out = (write_csv(folder / f"{name}.csv", draw_rows(num, num)) for name, num in
                       (("train", 600), ("later", 100)))
    return save_run(prepared_spec(folder, train, held_out))


def test_each_export_is_the_next_version_and_the_newest_is_opened(run_dir, tmp_path):
    uri = str(tmp_path / "models" / "clicks")
    first, second = export_run(run_dir.uri, uri), export_run(run_dir.uri, uri, tables="int8")
    assert (first.version, second.version) == (1, 2)
    assert second.table_bytes < first.table_bytes == second.fp32_table_bytes
    newest = open_artifact(uri)
    assert (newest.version, newest.info.tables, newest.info.step) == (2, "int8", 3)
    assert newest.info.metrics == {"auc": 0.75}
    assert newest.num_bytes == second.num_bytes == sum(
        path.stat().st_size for path in newest.folder.iterdir() if path.name != "commit.json")
    assert open_artifact(f"{uri}/", 1).info.tables == "fp32"
    with pytest.raises(UserError, match="has no version 3") as error:
        open_artifact(uri, 3)
    assert "1, 2" in error.value.fix


def test_weights_are_those_of_the_checkpoint_bit_for_bit(run_dir, tmp_path):
    """In an artifact of fp32, in pieces smaller than a table."""
    arrays = CheckpointArrays(run_dir.checkpoints.store, "step-000000003")
    expected = {name.removeprefix("model."): arrays.tensor(name, entry.size) for name, entry in arrays.entries.items()}
    export_run(run_dir.uri, str(tmp_path / "here"))
    found = open_artifact(str(tmp_path / "here")).weights
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], values) for name, values in expected.items())


def test_an_interrupted_export_is_invisible_and_its_number_not_reused(run_dir, tmp_path, monkeypatch):
    uri, write, left = str(tmp_path / "models"), LocalStore.write, [0]

    def failing(self: LocalStore, path: str, *rest: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write(self, path, *rest)

    monkeypatch.setattr(LocalStore, "write", failing)
    for num_written in (0, 1, 2):
        left[0] = num_written
        with pytest.raises(OSError, match="No space"):
            export_run(run_dir.uri, uri)
        assert open_versions(uri).committed() == []
        with pytest.raises(UserError, match="has no exported model"):
            open_artifact(uri)
    left[0] = 99
    assert export_run(run_dir.uri, uri).version == 4


def test_two_exports_at_once_have_a_version_each(run_dir, tmp_path, monkeypatch):
    """The second begins after the first has chosen its number and before it is committed."""
    uri, to_file = str(tmp_path), write_version.file_of

    def meanwhile(*args: object) -> object:
        monkeypatch.setattr(write_version, "file_of", to_file)
        monkeypatch.setattr("embark.store.CheckpointStore.unfinished", lambda self: [])
        assert export_run(run_dir.uri, uri, tables="int4").version == 2
        return to_file(*args)

    monkeypatch.setattr(write_version, "file_of", meanwhile)
    assert export_run(run_dir.uri, uri, tables="int8").version == 1
    assert [open_artifact(uri, number).info.tables for number in (1, 2)] == ["int8", "int4"]


@pytest.mark.parametrize("name", [INFO, WEIGHTS])
def test_a_changed_file_is_refused(run_dir, tmp_path, name):
    folder = Path(export_run(run_dir.uri, str(tmp_path)).path)
    damaged = bytearray((folder / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / name).write_bytes(damaged)
    with pytest.raises(DataError, match=f"{name}: its bytes changed"):
        open_artifact(str(tmp_path))


def test_an_unreadable_newest_version_is_an_error_and_others_open(run_dir, tmp_path):
    uri = str(tmp_path)
    folders = [Path(export_run(run_dir.uri, uri).path) for _ in range(2)]
    (folders[1] / "commit.json").write_bytes(b"{")
    for version in (None, 2):
        with pytest.raises(DataError, match=r"version-000000002 is damaged: its commit\.json cannot be read"):
            open_artifact(uri, version)
    assert open_artifact(uri, 1).version == 1
    assert export_run(run_dir.uri, uri).version == open_artifact(uri).version == 3
    for folder in (folders[0], tmp_path / "version-000000003"):
        (folder / "commit.json").write_bytes(b"{")
    with pytest.raises(DataError, match="version-000000003 is damaged"):
        open_artifact(uri)


def test_another_format_version_and_other_json_are_refused(run_dir, tmp_path, monkeypatch):
    folder = Path(export_run(run_dir.uri, str(tmp_path)).path)
    monkeypatch.setattr("embark.store.CheckpointStore.damages", lambda *_: [])
    info = json.loads((folder / INFO).read_text())
    for changed, message in (({**info, "format_version": 9}, "its format is version 9"),
                             ({**info, "extra": 1}, "extra"), ({}, "does not describe an exported model")):
        (folder / INFO).write_text(json.dumps(changed))
        with pytest.raises(DataError, match=message):
            open_artifact(str(tmp_path))


def test_a_version_is_fetched_once_and_its_damaged_files_again(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    uri, fetched = f"memory://models-{tmp_path.name}", []
    download = ObjectStore.download
    monkeypatch.setattr(ObjectStore, "download", lambda self, path, to: (fetched.append(to.name),
                                                                         download(self, path, to)))
    version = export_run(run_dir.uri, uri).path
    assert version == f"{uri}/version-000000001"
    first = open_artifact(uri)
    assert first.folder.is_relative_to(tmp_path)
    assert sorted(fetched) == ["artifact.json", "id_maps.safetensors", "reference.json", "weights.safetensors"]
    (first.folder / WEIGHTS).write_bytes(bytes((first.folder / WEIGHTS).stat().st_size))
    again = open_artifact(uri)
    assert fetched[4:] == [WEIGHTS]
    assert "dense.top.0.weight" in again.weights
    open_artifact(uri)
    assert len(fetched) == 5


def test_a_run_without_its_data_is_not_exported(tmp_path):
    train = write_csv(tmp_path / "train.csv", draw_rows(60, 1))
    spec = prepared_spec(tmp_path, train, write_csv(tmp_path / "later.csv", draw_rows(9, 2)))
    run_dir = save_run(spec)
    (tmp_path / "prepared").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="id maps of the run's data cannot be read"):
        export_run(run_dir.uri)


def test_the_command_says_what_it_wrote_and_refuses_odd_flags(run_dir, tmp_path, capsys):
    assert embark(["export", run_dir.uri, "--tables", "int4", "--to", str(tmp_path / "m"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["version"], shown["tables"], shown["path"]) == (1, "int4", f"{tmp_path / 'm'}/version-000000001")
    assert embark(["export", run_dir.uri, "--to", str(tmp_path / "m")]) == 0
    assert "embark score" in capsys.readouterr().out
    for words in (["--force"], ["--ids", "folder", "--tables", "int8"], ["--step", "9"]):
        assert embark(["export", run_dir.uri, *words]) == 64


def test_a_better_checkpoint_than_the_exported_one_is_named(tmp_path, capsys):
    """The newest is exported unless another is named."""
    run_dir = save_run(resolve({"name": "early", "model": {"num_tables": 2, "rows_per_table": 9, "embedding_dim": 4},
                                "store": {"root": str(tmp_path)}}))
    checkpoints = tmp_path / "early" / "checkpoints"
    shutil.copytree(checkpoints / "step-000000003", checkpoints / "step-000000005")
    mark = checkpoints / "step-000000005" / "commit.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "step": 5, "early_stopping": {"best_step": 3}}))
    better = f"Early stopping found step 3 better: {run_dir.uri}@best names it."
    for word, step, is_told in (("", 3, False), ("@best", 3, False), ("@3", 3, False), ("@5", 5, True)):
        assert embark(["export", f"{run_dir.uri}{word}"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"step {step}," in shown
        assert (better in shown) is is_told


def test_a_wrong_uri_is_answered_with_that_of_the_exported_model(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fix(uri: str) -> str:
        with pytest.raises(UserError, match="has no exported model") as error:
            open_artifact(uri)
        return error.value.fix

    assert fix("elsewhere") == "`embark export RUN --to elsewhere` writes one"
    export_run(run_dir.uri, "runs/clicks/export")
    assert {fix(word) for word in ("clicks", "runs/clicks/")} == {"the run's exported model is runs/clicks/export"}
    assert fix("runs/clicks/export/version-000000001").endswith("the versions: runs/clicks/export --version 1")
    assert not (tmp_path / "elsewhere").exists()


def test_the_default_uri_is_the_runs_own_folder(tmp_path):
    spec = resolve({"name": "ids", "model": {"num_tables": 2, "rows_per_table": 9, "embedding_dim": 4},
                    "store": {"root": str(tmp_path)}})
    run_dir = save_run(spec)
    assert export_run(run_dir.uri).uri == f"{run_dir.uri}/export"
    assert open_artifact(f"{run_dir.uri}/export").info.rows.plain_ids == "refuse"
    with pytest.raises(EmbarkError, match="no such type"):
        export_run(run_dir.uri, tables="int2")  # type: ignore[arg-type]

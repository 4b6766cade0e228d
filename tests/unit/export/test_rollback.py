"""Which version of an exported model is current: the last that was exported, until `embark rollback` names another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from exported_runs import EditedRun, save_run

from embark import export_run, list_versions
from embark import rollback_model as rollback
from embark.__main__ import run as embark
from embark.errors import DataError, UserError
from embark.export.artifact import open_artifact
from embark.spec import resolve


@pytest.fixture
def uri(tmp_path):
    spec = resolve({"name": "ids", "model": {"num_tables": 2, "rows_per_table": 9, "embedding_dim": 4},
                    "store": {"root": str(tmp_path / "runs")}})
    uri = save_run(spec).uri
    for tables in ("fp32", "int8", "fp16"):
        export_run(uri, str(tmp_path / "models"), tables=tables)
    return str(tmp_path / "models")


def current(uri: str) -> int:
    number, = [one.version for one in list_versions(uri).versions if one.is_current]
    assert open_artifact(uri).version == number
    return number


def test_each_rollback_goes_one_version_back_and_any_version_can_be_named(uri):
    found = [current(uri)]
    for version in (None, None, 3, 2):
        found.append(rollback(uri, version).version)
        assert found[-1] == current(uri)
    assert found == [3, 2, 1, 3, 2]
    (Path(uri) / "version-000000001" / "commit.json").unlink()  # no version any more
    with pytest.raises(UserError, match="has no version before 2, which is current"):
        rollback(uri)
    with pytest.raises(UserError, match="has no version 1") as error:
        rollback(f"{uri}/", 1)
    assert error.value.fix == "its versions: 2, 3"
    assert current(uri) == 2


def test_a_delta_that_lacks_its_parent_is_not_made_current(uri, tmp_path):
    run = EditedRun(tmp_path, rows=400)
    for _ in range(3):
        export_run(run.save(), f"{uri}-deltas", delta=True)
    rollback(f"{uri}-deltas", 1)
    shutil.rmtree(f"{uri}-deltas/version-000000002")
    with pytest.raises(DataError, match="version-000000003 is a delta that needs version 2, which is gone"):
        rollback(f"{uri}-deltas", 3)
    assert current(f"{uri}-deltas") == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_a_version_with_a_damaged_file_is_not_made_current(uri, is_there):
    weights = Path(uri) / "version-000000002" / "weights.safetensors"
    if is_there:
        weights.write_bytes(b"")
    else:
        weights.unlink()
    with pytest.raises(DataError, match=r"2 is damaged: weights\.safetensors has 0 bytes instead of [1-9]") as error:
        rollback(uri)
    assert error.value.fix == "its versions: 1, 2, 3"
    assert current(uri) == 3


def test_without_a_current_version_one_must_be_named(uri):
    for version in (1, 2, 3):
        mark = Path(uri) / f"version-{version:09}" / "commit.json"
        mark.write_text(json.dumps({**json.loads(mark.read_text()), "candidate": True}))
    (Path(uri) / "current.json").unlink()
    with pytest.raises(UserError, match="has no current version: name one") as error:
        rollback(uri)
    assert error.value.fix == "its versions: 1, 2, 3"


def test_an_export_after_a_rollback_is_current(uri):
    rollback(uri, 1)
    assert export_run(open_artifact(uri).info.run, uri).version == current(uri) == 4


def test_without_the_file_the_newest_is_current(uri):
    rollback(uri, 1)
    (Path(uri) / "current.json").unlink()
    assert current(uri) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": "1"}', '{"version": true}', "[" * 100_000])
def test_a_damaged_file_is_an_error_until_it_is_written_again(uri, text):
    (Path(uri) / "current.json").write_text(text)
    for use in (open_artifact, rollback, list_versions):
        with pytest.raises(DataError, match=r"current\.json is damaged: it names no version") as error:
            use(uri)
        assert error.value.fix.startswith(f"`embark rollback {uri} VERSION`")
    assert rollback(uri, 2).previous == 0
    assert current(uri) == 2


def test_a_uri_without_versions_is_refused(tmp_path):
    for use in (rollback, list_versions):
        with pytest.raises(UserError, match="has no exported model"):
            use(str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_the_command_lists_and_goes_back(uri, capsys):
    assert embark(["rollback", uri]) == 0
    assert embark(["rollback", uri, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{uri}: version 2 is now current (was 3)"
    assert lines[1].endswith(f"Undo: embark rollback {uri} 3")
    (current,) = [line for line in lines[2:] if " yes " in line]  # a long path of its run may take further lines
    assert (current.split()[0], "int8" in current, "0.7500" in current) == ("2", True, True)
    assert embark(["rollback", uri, "2"]) == 0
    assert "version 2 is current already" in capsys.readouterr().out
    assert embark(["rollback", uri, "2", "--list"]) == 64
    capsys.readouterr()
    assert embark(["rollback", uri, "--list", "--json"]) == 0
    assert [one["version"] for one in json.loads(capsys.readouterr().out)["versions"]] == [1, 2, 3]

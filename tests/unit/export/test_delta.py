"""A version as a delta of the one before: together they are, bit for bit, what a full export writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from exported_runs import EditedRun

from embark import export_run, list_versions
from embark.errors import DataError
from embark.export import write_version
from embark.export.artifact import (
    ID_MAPS,
    WEIGHTS,
    current_version,
    file_metadata,
    open_artifact,
    open_versions,
    set_current,
)
from embark.export.delta import DELTA
from embark.export.export_run import read_contents
from embark.export.safetensors_file import file_of, in_memory
from embark.store.checkpoint_inspect import find_trained

DTYPES = ("fp32", "fp16", "int8", "int4")


def file_bytes(artifact, tensors: str) -> bytes:
    """The file that the tensors in memory are."""
    arrays = artifact.weights if tensors == WEIGHTS else artifact.id_maps
    return b"".join(file_of([in_memory(*one) for one in arrays.items()], file_metadata(artifact.info))[1])


@pytest.mark.parametrize("tables", DTYPES)
def test_base_and_deltas_are_bit_for_bit_what_full_exports_are(tmp_path, tables):
    """Opened from scratch, and in place onto every earlier version; whichever were rewritten in full between them."""
    training, uri, full = EditedRun(tmp_path, seed=DTYPES.index(tables)), str(tmp_path / "at"), str(tmp_path / "full")
    parents = []
    for _ in range(6):
        run = training.save()
        parents.append(export_run(run, uri, tables=tables, delta=True).parent)
        export_run(run, full, tables=tables)
    assert parents[:2] == [None, 1]
    for last in range(1, 7):
        expected = [(Path(full) / f"version-{last:09}" / name).read_bytes() for name in (WEIGHTS, ID_MAPS)]
        opened = [open_artifact(uri, last)] + [open_artifact(uri, last, onto=open_artifact(uri, first))
                                                 for first in range(1, last)]
        for one in opened:
            assert one.version == last
            assert one.info == open_artifact(full, last).info
            assert [file_bytes(one, name) for name in (WEIGHTS, ID_MAPS)] == expected


def test_a_delta_holds_changed_rows_until_a_full_version_is_smaller(tmp_path, monkeypatch):
    training, uri = EditedRun(tmp_path, rows=40_000), str(tmp_path / "at")
    results = [export_run(training.save(50), uri, delta=True) for _ in range(4)]
    assert [one.parent for one in results] == [None, 1, 2, 3]
    assert results[0].why_full == "there is no current version"
    assert all(one.num_bytes < results[0].num_bytes / 20 for one in results[1:])
    assert all(one.num_changed_rows < 200 for one in results[1:])
    monkeypatch.setattr(write_version, "MAX_DELTAS", 3)
    assert export_run(training.save(), uri, delta=True).why_full == "version 4 consists of 3 deltas already"
    monkeypatch.setattr(write_version, "MAX_SHARE", 0.001)
    assert "deltas would be more than 0% of it" in export_run(training.save(400), uri, delta=True).why_full
    assert [one.parent for one in list_versions(uri).versions] == [None, 1, 2, 3, None, None]


def test_a_delta_changes_the_version_that_is_current_and_not_the_newest(tmp_path):
    training, uri = EditedRun(tmp_path), str(tmp_path / "at")
    for _ in range(3):
        export_run(training.save(), uri, delta=True)
    set_current(open_versions(uri), 1)
    assert export_run(training.save(), uri, delta=True).parent == 1


def test_a_damaged_chain_is_refused_and_the_next_export_is_a_full_version(tmp_path):
    training, uri = EditedRun(tmp_path), str(tmp_path / "at")
    for _ in range(3):
        export_run(training.save(), uri, delta=True)
    kept = tmp_path / "kept"
    shutil.copytree(uri, kept)
    base, second = (Path(uri) / f"version-{number:09}" for number in (1, 2))

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def rewrite(path: Path) -> None:
        mark = json.loads(path.read_text())
        mark["files"][WEIGHTS][1] = "0" * 64
        path.write_text(json.dumps(mark))

    for broken, why in ((lambda: damage(base / WEIGHTS), "put together from version 1 and 2 deltas has other bytes"),
                        (lambda: damage(second / DELTA), "its bytes changed"),
                        (lambda: rewrite(base / "commit.json"), "needs version 1, which is another one now"),
                        (lambda: (second / "commit.json").unlink(), "needs version 2, which is gone")):
        shutil.rmtree(uri)
        shutil.copytree(kept, uri)
        broken()
        with pytest.raises(DataError, match=why):
            open_artifact(uri)
    result = export_run(training.save(), uri, delta=True)
    assert result.parent is None
    assert "the current version cannot be read" in result.why_full
    assert open_artifact(uri).version == 4


def test_a_candidate_is_current_only_when_it_is_named(tmp_path):
    training, uri = EditedRun(tmp_path), str(tmp_path / "at")
    versions = open_versions(uri)
    contents = read_contents(find_trained(training.save()))
    assert write_version.write_version(contents, uri, candidate=True).version == 1
    assert current_version(versions) == 0
    set_current(versions, 1)
    assert current_version(versions) == open_artifact(uri).version == 1

"""A version is its content: what is applied, opened and made current is told apart by checksums, never by numbers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from exported_runs import EditedRun, draw_rows, prepared_spec, save_run, write_csv
from limits import HANG_S

from embark import export_run, list_versions
from embark.errors import DataError
from embark.export.artifact import (
    CURRENT,
    ID_MAPS,
    INFO,
    WEIGHTS,
    CurrentChanged,
    current,
    fetch_version,
    open_artifact,
    open_versions,
    set_current,
)
from embark.export.delta import DELTA, PARENT_IDENTITY
from embark.export.rollback import rollback
from embark.export.safetensors_file import file_of, in_memory, map_file
from embark.export.write_version import NUMBERS


@pytest.fixture(params=["folder", "memory"])
def uri(request, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    return str(tmp_path / "at") if request.param == "folder" else f"memory://{uuid4().hex}/at"


@pytest.fixture
def training(tmp_path):
    return EditedRun(tmp_path, rows=4_000)


def assert_same(one, other) -> None:
    assert (one.version, one.identity, one.info) == (other.version, other.identity, other.info)
    for found, expected in ((one.weights, other.weights), (one.id_maps, other.id_maps)):
        assert {name: values.tobytes() for name, values in found.items()} == \
            {name: values.tobytes() for name, values in expected.items()}


def rewrite_mark(uri: str, version: int, change) -> None:
    """Edit a commit record by hand."""
    store, path = open_versions(uri).store, f"version-{version:09}/commit.json"
    mark = json.loads(store.read(path))
    change(mark)
    store.write(path, json.dumps(mark).encode())


@pytest.mark.parametrize("is_number_reused", [False, True])
def test_a_delta_is_not_applied_to_what_had_its_parents_number(uri, training, is_number_reused):
    """A server holds version 3, which is deleted after a rollback; two deltas of version 2 follow."""
    for _ in range(2):
        export_run(training.save(), uri, delta=True)
    second = dict(training.weights)
    export_run(training.save(), uri, delta=True)
    held = open_artifact(uri, 3)
    rollback(uri, 2)
    training.weights = second  # so that rows of the deleted version are in no later delta
    versions = open_versions(uri)
    versions.remove(3)
    if is_number_reused:  # as at a URI where everything was deleted
        versions.store.delete(NUMBERS)
    written = [export_run(training.save(), uri, delta=True) for _ in range(2)]
    assert [one.version for one in written] == ([3, 4] if is_number_reused else [4, 5])
    assert [one.parent for one in written] == [2, written[0].version]
    assert fetch_version(uri, have=held.identity)[:2] == (written[1].version, written[1].identity)
    assert_same(open_artifact(uri, onto=held), open_artifact(uri))


def test_numbers_are_not_given_again_by_exports_at_once(uri, training):
    run, found = training.save(), []
    threads = [threading.Thread(target=lambda: found.append(export_run(run, uri).version)) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(HANG_S)
    versions = open_versions(uri)
    for number in found:
        versions.remove(number)
    assert sorted(found) == [1, 2, 3, 4]
    versions.store.delete(CURRENT)
    assert export_run(run, uri).version == 5
    versions.store.write(NUMBERS, b"[")
    assert export_run(run, uri).version == 6


def test_the_version_in_memory_and_those_before_it_open_at_once(uri, training):
    for _ in range(3):
        export_run(training.save(), uri, delta=True)
    for wanted in (2, 3, 1):
        for first in (1, 2, 3):
            held = open_artifact(uri, first)
            assert_same(open_artifact(uri, wanted, onto=held), open_artifact(uri, wanted))
            assert held.identity == (open_artifact(uri, first).identity if first >= wanted else "")


def test_arrays_that_a_delta_was_written_into_are_no_version_any_more(uri, training):
    for _ in range(3):
        export_run(training.save(), uri, delta=True)
    held = open_artifact(uri, 1)
    open_artifact(uri, 3, onto=held)
    assert_same(open_artifact(uri, 2, onto=held), open_artifact(uri, 2))
    held = open_artifact(uri, 1)
    store, path = open_versions(uri).store, f"version-{2:09}/{DELTA}"
    good = store.read(path)
    (name, rows), *_ = ((name, rows) for name, rows in held.weights.items() if len(rows) == 4_000)
    pieces = [in_memory(f"{WEIGHTS}/{name}", rows + 1), in_memory(f"{WEIGHTS}/zzz#values", rows)]  # the second fails
    forge(uri, 2, {DELTA: b"".join(file_of(pieces, {})[1])})
    with pytest.raises(DataError, match="do not fit tensor zzz"):
        open_artifact(uri, 2, onto=held)
    forge(uri, 2, {DELTA: good})
    assert_same(open_artifact(uri, 2, onto=held), open_artifact(uri, 2))


def test_an_identity_is_of_content_and_not_of_number_time_or_place(uri, training, tmp_path):
    run = training.save()
    first, second, elsewhere = (export_run(run, at) for at in (uri, uri, str(tmp_path / "elsewhere")))
    assert (first.version, second.version) == (1, 2)
    assert first.identity == second.identity == elsewhere.identity == open_artifact(uri).identity
    assert [one.identity for one in list_versions(uri).versions] == [first.identity] * 2
    other = export_run(training.save(), uri)
    assert other.identity not in ("", first.identity)
    assert (current(open_versions(uri)).version, current(open_versions(uri)).identity) == (3, other.identity)
    with pytest.raises(DataError, match="version-000000002 has other content than the wanted version"):
        open_artifact(uri, 2, identity=other.identity)
    assert open_artifact(uri, 2, identity=second.identity).version == 2
    rewrite_mark(uri, 3, lambda mark: mark["files"].update({INFO: mark["files"][WEIGHTS]}))
    with pytest.raises(DataError, match=f"and not {other.identity[:12]}"):
        open_artifact(uri)


def test_a_parent_with_other_id_maps_is_another_parent(uri, training):
    for _ in range(2):
        export_run(training.save(), uri, delta=True)
    rewrite_mark(uri, 1, lambda mark: mark["files"].update({ID_MAPS: [8, "0" * 64]}))
    with pytest.raises(DataError, match="needs version 1, which is another one now"):
        open_artifact(uri)


def test_a_delta_without_its_parents_identity_is_refused(uri, training):
    for _ in range(2):
        export_run(training.save(), uri, delta=True)
    rewrite_mark(uri, 2, lambda mark: mark.pop(PARENT_IDENTITY))
    with pytest.raises(DataError, match="needs version 1, which is another one now"):
        open_artifact(uri, 2)


def test_current_changes_only_from_what_the_decision_was_made_against(uri, training):
    run = training.save()
    for _ in range(3):
        export_run(run, uri)
    versions = open_versions(uri)
    seen = current(versions)
    assert (seen.version, seen.serial, seen.reason, seen.previous) == (3, 3, "export", 2)
    rollback(uri, 2)
    with pytest.raises(CurrentChanged, match="version 2 was made current by `embark rollback` meanwhile") as error:
        set_current(versions, 3, expected=seen)
    assert error.value.now == current(versions)
    assert (error.value.now.version, error.value.now.serial, error.value.now.reason) == (2, 4, "rollback")
    versions.store.write(CURRENT, b'{"version": 1}')  # by hand
    by_hand = current(versions)
    assert (by_hand.version, by_hand.identity, by_hand.serial) == (1, open_artifact(uri, 1).identity, 0)
    assert set_current(versions, 3, expected=by_hand).serial == 1
    versions.store.delete(CURRENT)
    none = current(versions)
    assert (none.version, none.identity, none.text) == (3, seen.identity, None)
    set_current(versions, 1, expected=none)
    with pytest.raises(CurrentChanged):
        set_current(versions, 2, expected=none)


CHANGE = """
import sys
from embark.export.artifact import open_versions, set_current
for number in range(40):
    set_current(open_versions(sys.argv[1]), 1)
"""


def test_no_change_of_current_is_lost_between_processes(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", CHANGE, str(tmp_path)]) for _ in range(3)]
    assert [one.wait(HANG_S) for one in processes] == [0, 0, 0]
    assert current(open_versions(str(tmp_path))).serial == 120


def forge(uri: str, version: int, files: dict[str, bytes]) -> None:
    """Replace files of a version, whose checksums fit."""
    store = open_versions(uri).store
    for name, data in files.items():
        store.write(f"version-{version:09}/{name}", data)
    rewrite_mark(uri, version, lambda mark: mark["files"].update(
        {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}))


@pytest.fixture
def words(tmp_path):
    """A model whose columns have id maps."""
    paths = [write_csv(tmp_path / f"{name}.csv", draw_rows(num, seed))
             for seed, (name, num) in enumerate((("train", 400), ("held", 50)))]
    return export_run(save_run(prepared_spec(tmp_path, *paths)).uri, str(tmp_path / "at")).uri


@pytest.mark.parametrize(("change", "says"), [
    (lambda rows: rows["hashed_rows"].update(word=1 << 40), r"rows\.hashed_rows: 'word' has 1099511627776"),
    (lambda rows: rows["hashed_rows"].update(word=-1), r"rows\.hashed_rows: 'word' has -1"),
    (lambda rows: rows["hashed_rows"].pop("word"), r"rows\.hashed_rows: 'word' has None"),
    (lambda rows: rows["layout"]["features"][0].update(rows=1 << 20), "'word' has 1048576 rows, and its table"),
    (lambda rows: rows["layout"]["features"][0].update(name="other"), "has the feature 'other'"),
])
def test_forged_columns_are_refused_with_field_and_value(words, change, says):
    info = json.loads((Path(words) / "version-000000001" / INFO).read_text())
    change(info["rows"])
    forge(words, 1, {INFO: json.dumps(info).encode()})
    with pytest.raises(DataError, match=says) as error:
        open_artifact(words, 1)
    assert str(Path(words) / "version-000000001" / INFO) in error.value.what


@pytest.mark.parametrize(("change", "says"), [
    (lambda maps: {"word.ids": np.full_like(maps["word.ids"], 1 << 30)}, r"word\.ids has ids from 0 to 1073741824"),
    (lambda maps: {"word.ids": maps["word.ids"] - 9}, r"word\.ids has ids from -"),
    (lambda maps: {"word.ids": maps["word.ids"][1:]}, r"word\.keys and word\.ids are not"),
    (lambda maps: {"word.ids": maps["word.ids"].astype(np.float32)}, r"word\.ids has ids from"),
    (lambda maps: {"word.keys": None}, r"word\.keys and word\.ids are not"),
])
def test_forged_id_maps_are_refused_with_tensor_and_value(words, change, says):
    maps = {name: values.copy() for name, values in map_file(Path(words) / "version-000000001" / ID_MAPS).items()}
    maps |= change(maps)
    forged = [in_memory(name, values) for name, values in maps.items() if values is not None]
    forge(words, 1, {ID_MAPS: b"".join(file_of(forged, {})[1])})
    with pytest.raises(DataError, match=says) as error:
        open_artifact(words, 1)
    assert ID_MAPS in error.value.what

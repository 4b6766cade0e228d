"""Paths, globs and folders mean the files that a person would expect."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from embark.data.prepare.inputs import InputFile, Inputs, matches_glob, open_inputs
from embark.data.prepare.parquet_view import open_view
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepare.readers import sample_parquet
from embark.data.prepare.sampling import judge, kind_of
from embark.errors import DataError
from embark.spec import resolve


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("day_0.csv", "day_1.csv", "day_10.csv", "notes.md", "_SUCCESS", ".hidden.csv", "out/part_0.parquet",
                 "out/part_1.parquet", "out/_metadata", "out/_file_list.txt", "out/schema.pbtxt", "deep/a/x.csv",
                 "deep/a/b/y.csv", "odd/[1].csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


def found(tree: Path, pattern: str) -> list[str]:
    return [file.uri for file in Inputs(str(tree)).find(pattern)]


@pytest.mark.parametrize(("pattern", "expected"), [
    ("day_0.csv", ["day_0.csv"]),
    ("day_*.csv", ["day_0.csv", "day_1.csv", "day_10.csv"]),
    ("day_?.csv", ["day_0.csv", "day_1.csv"]),
    ("day_[!1]*.csv", ["day_0.csv"]),
    ("deep/*.csv", None),
    ("deep/*/*.csv", ["deep/a/x.csv"]),
    ("deep/**/*.csv", ["deep/a/b/y.csv", "deep/a/x.csv"]),
    ("**/*.csv", ["day_0.csv", "day_1.csv", "day_10.csv", "deep/a/b/y.csv", "deep/a/x.csv", "odd/[1].csv"]),
    ("out", ["out/part_0.parquet", "out/part_1.parquet"]),
    ("out/", ["out/part_0.parquet", "out/part_1.parquet"]),
    ("out/*", ["out/part_0.parquet", "out/part_1.parquet", "out/schema.pbtxt"]),
    ("odd/[1].csv", ["odd/[1].csv"]),
])
def test_a_pattern_means_these_files(tree: Path, pattern: str, expected: list[str] | None):
    if expected is None:
        with pytest.raises(DataError, match="no such file"):
            found(tree, pattern)
    else:
        assert found(tree, pattern) == expected
        assert found(tree, f"{tree}/{pattern}") == [f"{tree}/{name}" for name in expected]


def test_a_file_uri_is_a_path(tree: Path):
    (tree / "a b.csv").touch()
    assert found(tree, f"file://{tree}/a%20b.csv") == [f"{tree}/a b.csv"]


@pytest.mark.parametrize(("pattern", "hint"), [
    ("day_3.csv", "did you mean 'day_"),
    ("dya_*.csv", "did you mean 'day_"),
    ("data/*.csv", "relative paths of a spec go by"),
    ("out/part_9.parquet", "did you mean 'out/part_"),
    ("zzzzzz.gz", "files in this directory: .hidden.csv, _SUCCESS"),
])
def test_a_missing_file_is_reported_with_those_beside_it(tree: Path, pattern: str, hint: str):
    with pytest.raises(DataError) as caught:
        found(tree, pattern)
    assert pattern in caught.value.what
    assert hint in caught.value.fix


def test_an_empty_folder_is_an_error(tree: Path):
    (tree / "nothing").mkdir()
    (tree / "nothing" / "_SUCCESS").touch()
    with pytest.raises(DataError, match="holds no data files"):
        found(tree, "nothing")


def test_bytes_are_those_requested_and_fewer_at_the_end(tree: Path):
    inputs = Inputs(str(tree))
    assert inputs.read("day_0.csv", 4, 3) == b"0.c"
    assert inputs.read("day_0.csv", 7, 100) == b"sv"
    assert inputs.read("day_0.csv", 9, 100) == b""
    with pytest.raises(DataError, match=r"nowhere.csv: No such file"):
        inputs.read("nowhere.csv", 0, 1)


def test_a_changed_file_is_distinguished_from_the_old_one(tree: Path):
    inputs = Inputs(str(tree))
    before = inputs.find("day_0.csv")[0]
    assert before.size_bytes == 9
    os.utime(tree / "day_0.csv", ns=(1, 1))
    assert inputs.find("day_0.csv")[0] != before


def test_a_process_that_starts_elsewhere_finds_the_same_files(tree: Path, monkeypatch):
    monkeypatch.chdir(tree)
    inputs, files = open_inputs("day_0.csv")
    sent = pickle.dumps((inputs, files[0].uri))
    code = "import pickle, sys; i, u = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(i.read(u, 0, 99))"
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, cwd="/", check=True)
    assert done.stdout == b"day_0.csv"


def test_each_file_comes_once_in_the_order_they_are_named(tree: Path, monkeypatch):
    monkeypatch.chdir(tree)
    inputs, files = open_inputs(["day_1.csv", "day_*.csv"])
    assert [file.name for file in files] == ["day_1.csv", "day_0.csv", "day_10.csv"]
    assert inputs.local_path("day_0.csv") == str(tree / "day_0.csv")
    with pytest.raises(DataError, match="names no file"):
        open_inputs(())


@pytest.mark.parametrize(("glob", "path", "is_match"), [
    ("a*c", "abc", True), ("a*c", "a/c", False), ("**/c", "c", True), ("**/c", "a/b/c", True), ("**", "a/b", True),
    ("a[0-9].csv", "a5.csv", True), ("a[!0-9].csv", "a5.csv", False), ("a.csv", "abcsv", False), ("[", "[", True),
])
def test_a_glob_matches_within_folders(glob: str, path: str, is_match: bool):
    assert matches_glob(path.split("/"), glob.split("/")) == is_match


@pytest.fixture
def partitioned(tmp_path: Path) -> Path:
    rows = {"label": [0, 1] * 50, "word": ["a", "b"] * 50}
    for day in ("2026-01-01", "2026-01-02"):
        for hour, city in ((7, "a%20b"), (11, "__HIVE_DEFAULT_PARTITION__")):
            folder = tmp_path / "clicks" / f"day={day}" / f"hour={hour}" / f"city={city}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table(rows), folder / "part.parquet", row_group_size=30)
            (folder / "_SUCCESS").touch()
            (folder / ".part.parquet.crc").touch()
    return tmp_path / "clicks"


def test_folders_of_partitions_are_columns(partitioned: Path):
    inputs, files = open_inputs(str(partitioned))
    columns = {column.name: column for column in sample_parquet(inputs, files, 10_000, {""})}
    assert list(columns) == ["label", "word", "day", "hour", "city"]
    assert judge(columns["day"], "|").why.startswith("holds dates")
    assert kind_of(columns["hour"]) == "integer"
    assert {name: set(columns[name].cells) for name in ("day", "hour", "city")} == {
        "day": {"2026-01-01", "2026-01-02"}, "hour": {"7", "11"}, "city": {"a b"}}
    found = pa.concat_tables(table for file in files for table in tables_of_file(inputs, file))
    hours, cities = pa.dataset.dataset(partitioned, partitioning="hive").to_table().to_pydict(), found.to_pydict()
    assert len(found) == 400
    assert [str(hour) for hour in hours["hour"]] == cities["hour"]
    assert hours["day"] == cities["day"]
    assert hours["city"] == cities["city"]
    assert hours["word"] == cities["word"]


def tables_of_file(inputs: Inputs, file: InputFile) -> Iterator[pa.Table]:
    with open_view(inputs, file) as view:
        for column, _, _ in view.batches(view.names, range(view.parquet.num_row_groups), 25):
            yield pa.table({name: column(name) for name in view.names})


def test_a_partition_of_its_own_keeps_its_columns(partitioned: Path):
    for pattern in (partitioned / "day=2026-01-02", partitioned / "day=2026-01-02" / "**" / "*.parquet"):
        inputs, files = open_inputs(str(pattern))
        assert [dict(file.constants)["day"] for file in files] == ["2026-01-02"] * 2
        assert inputs.find(files[0].uri) == files[:1]


def test_a_column_in_the_file_comes_before_that_of_its_folder(tmp_path: Path):
    (tmp_path / "hour=7").mkdir()
    pq.write_table(pa.table({"hour": [8, 9]}), tmp_path / "hour=7" / "part.parquet")
    inputs, (file,) = open_inputs(str(tmp_path))
    assert next(tables_of_file(inputs, file)).to_pydict() == {"hour": [8, 9]}


def test_a_parquet_file_without_rows_is_passed_over(partitioned: Path):
    first = min(partitioned.rglob("*.parquet"))
    pq.write_table(pq.read_table(first).select(["label", "word"]).slice(0, 0), first.with_name("empty.parquet"))
    spec = resolve({"data": {"kind": "prepared", "path": str(partitioned.parent / "out"), "label": "label", "prepare": {
        "input": str(partitioned), "sparse_columns": ["word", "hour"]}}})
    manifest = prepare_from_spec(spec).manifest
    assert sum(manifest.rows_by_split.values()) == 400
    assert [feature.name for feature in manifest.layout.features] == ["word", "hour"]


def test_files_of_different_partitions_are_refused(partitioned: Path):
    (partitioned / "year=2025").mkdir()
    pq.write_table(pa.table({"label": [1]}), partitioned / "year=2025" / "part.parquet")
    with pytest.raises(DataError, match=r"different partition columns: \(day, hour, city\).*\(year\)"):
        Inputs().find(str(partitioned))

"""Readable id maps: what is read back is what the rows of the raw files and of the prepared data say."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from embark import write_id_maps
from embark.__main__ import run as embark
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import UserError
from embark.spec import resolve

WORDS = ["Paris, France", ' padded "x" ', "Ørsted", "NA", "plain"]


def prepared(folder: Path, raw: Path, **prepare) -> Path:
    spec = resolve({"data": {"kind": "prepared", "path": str(folder / "out"), "label": "y", "eval_fraction": 0.2,
                             "prepare": {"input": str(raw), "sparse_columns": ["the city", "number", "hash"],
                                         "list_columns": ["tags"], "hex_columns": ["hash"], **prepare}}})
    prepare_from_spec(spec, folder / "out")
    return folder / "out"


@pytest.fixture
def raw(tmp_path) -> Path:
    draw = random.Random(1)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["the city", "number", "hash", "tags", "y"])
        for _ in range(500):
            rows.writerow([draw.choice(WORDS), draw.randrange(-3, 9), f"{draw.randrange(5) * 77:08x}",
                           "|".join(draw.sample(["a", "b", "c"], 2)), draw.randrange(2)])
    return tmp_path / "rows.csv"


def as_format(raw: Path, form: str) -> Path:
    if form == "csv":
        return raw
    path = raw.with_suffix(f".{form}")
    if form == "parquet":
        table = pa.csv.read_csv(raw, convert_options=pa.csv.ConvertOptions(column_types={"hash": pa.string()}))
        pq.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in csv.DictReader(raw.read_text().splitlines())))
    return path


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_every_id_is_written_with_its_value_and_its_count(tmp_path, raw, form):
    data = prepared(tmp_path, as_format(raw, form))
    result = write_id_maps(str(data), tmp_path / "ids")
    manifest = json.loads((data / "manifest.json").read_text())
    rows = list(csv.DictReader(raw.read_text().splitlines()))
    seen = {"the_city": [r["the city"].strip() for r in rows], "number": [int(r["number"]) for r in rows],
            "hash": [r["hash"] for r in rows], "tags": [tag for r in rows for tag in r["tags"].split("|")]}
    for one in result.tables:
        table = pq.read_table(one.path).to_pylist()
        known = {row["value"]: row["id"] for row in table if row["value"] is not None}
        assert set(known) == set(seen[one.table]) - {"NA"}
        assert sorted(known.values()) == list(range(1, len(known) + 1))
        assert (one.num_rows, one.num_values, one.note) == (len(table), len(known), "")
        counts = [row["count"] for row in sorted(table, key=lambda row: row["id"])][1:]
        assert counts == sorted(counts, reverse=True)  # ids are by frequency
        assert sum(row["count"] for row in table) == manifest["rows"]["train"] * (2 if one.table == "tags" else 1)
        everywhere = Counter(seen[one.table])
        assert all(row["count"] <= everywhere[row["value"]] for row in table if row["value"] is not None)
    assert {one.table: one.column for one in result.tables}["the_city"] == "the city"


def test_words_that_are_no_longer_to_be_found_are_said_and_numbers_stay(tmp_path, raw):
    data = prepared(tmp_path, raw)
    raw.rename(tmp_path / "gone.csv")
    result = {one.table: one for one in write_id_maps(str(data), tmp_path / "ids").tables}
    assert "4 of 4 values were not found" in result["the_city"].note
    assert pq.read_schema(result["the_city"].path).names == ["id", "count"]
    assert result["number"].note == ""
    assert result["number"].num_values == 12


def test_a_table_by_hash_has_ids_only_and_says_so(tmp_path, raw):
    tables = [{"name": name, "rows": 50} for name in ("the_city", "number", "hash")]
    spec = resolve({"model": {"tables": tables}, "data": {
        "kind": "prepared", "path": str(tmp_path / "out"), "label": "y", "prepare": {"input": str(raw)}}})
    prepare_from_spec(spec, tmp_path / "out")
    result = write_id_maps(str(tmp_path / "out"), tmp_path / "ids", tables=["number"])
    (one,) = result.tables
    assert "made by hash" in one.note
    found = pq.read_table(one.path)
    assert found.column_names == ["id", "count"]
    assert found["id"].to_pylist() == list(range(50))
    assert sum(found["count"].to_pylist()) == json.loads((tmp_path / "out/manifest.json").read_text())["rows"]["train"]


def test_a_number_beyond_63_bits_is_pointed_out(tmp_path):
    numbers = pa.array([2**63 + 5 + i % 3 for i in range(60)], pa.uint64())
    pq.write_table(pa.table({"number": numbers, "y": [i % 2 for i in range(60)]}), tmp_path / "rows.parquet")
    spec = resolve({"data": {"kind": "prepared", "path": str(tmp_path / "out"), "label": "y",
                             "prepare": {"input": str(tmp_path / "rows.parquet"), "sparse_columns": ["number"]}}})
    prepare_from_spec(spec, tmp_path / "out")
    (one,) = write_id_maps(str(tmp_path / "out"), tmp_path / "ids").tables
    assert "2^63" in one.note
    values = np.array([value for value in pq.read_table(one.path)["value"].to_pylist() if value is not None])
    assert set(values.view(np.uint64).tolist()) == set(numbers.to_pylist())


def test_nothing_is_overwritten_without_force_and_no_part_is_left(tmp_path, raw, capsys):
    data = prepared(tmp_path, raw)
    assert embark(["export", str(data), "--ids", str(tmp_path / "ids"), "--only", "tags"]) == 0
    assert "wrote 1 Parquet file" in capsys.readouterr().out
    before = (tmp_path / "ids/tags.parquet").read_bytes()
    assert embark(["export", str(data), "--ids", str(tmp_path / "ids")]) == 64
    assert "exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "ids").iterdir()] == ["tags.parquet"]
    assert (tmp_path / "ids/tags.parquet").read_bytes() == before
    assert embark(["export", str(data), "--ids", str(tmp_path / "ids"), "--force", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tables"]) == 4
    with pytest.raises(UserError, match="no such table"):
        write_id_maps(str(data), tmp_path / "ids", tables=["tag"])


def test_a_value_of_either_column_that_shares_a_table_is_found(tmp_path):
    raw = tmp_path / "rows.csv"
    raw.write_text("y,film,last\n" + "".join(f"{i % 2},m{i % 5},m{i % 3}\n" for i in range(60)) + "1,m1,lone\n")
    spec = resolve({
        "model": {"num_dense": 0, "tables": [{"name": "film", "rows": 9}, {"name": "last", "shares": "film"}]},
        "data": {"kind": "prepared", "path": str(tmp_path / "out"), "label": "y", "eval_fraction": 0.001,
                 "prepare": {"input": str(raw), "ids": "frequency"}}})
    prepare_from_spec(spec, tmp_path / "out")
    for one in write_id_maps(str(tmp_path / "out"), tmp_path / "ids").tables:
        assert (one.note, one.num_values) == ("", 6)
        assert {row["value"] for row in pq.read_table(one.path).to_pylist()} >= {"lone", "m4"}


def test_a_bucket_is_written_with_its_range(tmp_path):
    raw = tmp_path / "rows.csv"
    raw.write_text("y,price\n" + "".join(f"{i % 2},{i}.5\n" for i in range(80)))
    spec = resolve({"data": {"kind": "prepared", "path": str(tmp_path / "out"), "label": "y", "eval_fraction": 0.001,
                             "prepare": {"input": str(raw)}}, "features": {"num_buckets": 4}})
    prepare_from_spec(spec, tmp_path / "out")
    (one,) = write_id_maps(str(tmp_path / "out"), tmp_path / "ids").tables
    values = {row["id"]: row["value"] for row in pq.read_table(one.path).to_pylist()}
    assert (one.column, len(values)) == ("price", 5)
    assert values[1].startswith("to ")
    assert values[2] == f"{values[1].removeprefix('to ')} to {values[3].partition(' ')[0]}"

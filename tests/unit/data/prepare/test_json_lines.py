"""JSON Lines are read as delimited text is: rows by line, bad ones counted, whatever the size of a chunk."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embark.__main__ import run
from embark.data.prepare.guess import guess_schema
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.readers import JsonLinesReader
from embark.errors import DataError
from embark.features.arrow.cells import hash_words
from embark.features.values import json_cell
from embark.spec import resolve
from embark.spec.data import PrepareSpec

ROWS = [{"user": f"ü {i % 9}", "tags": ["a", "b;c"][: i % 3], "price": i / 4, "n": i, "deep": {"x": 1},
         "bought": i % 2 == 0} for i in range(120)]


def schema_of(folder: Path, name: str = "rows.jsonl"):
    inputs = Inputs(str(folder))
    spec = resolve({"data": {"kind": "prepared", "path": "x", "label": "bought", "prepare": {"input": name}}})
    return guess_schema(spec, inputs, inputs.find(name)), inputs


def write(folder: Path, lines: list[str]) -> None:
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def test_columns_are_what_the_values_are(tmp_path):
    write(tmp_path, [json.dumps(row) for row in ROWS])
    schema, _ = schema_of(tmp_path)
    assert (schema.format, schema.label, schema.dense) == ("jsonl", "bought", ("price",))
    assert [(column.name, column.kind, column.is_list) for column in schema.sparse] == [
        ("user", "text", False), ("tags", "text", True)]
    assert schema.ignored == ("n", "deep")


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("segment_bytes", [500, 1 << 20])
def test_rows_are_the_same_however_the_file_is_cut(tmp_path, chunk_bytes, segment_bytes):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    write(tmp_path, [*lines[:20], "", "[1, 2]", '{"user": "x", ', *lines[20:], '{"bought": 1}'])
    schema, inputs = schema_of(tmp_path)
    (file,) = inputs.find("rows.jsonl")
    reader = JsonLinesReader(schema, PrepareSpec(), inputs)
    portions = [rows for segment in reader.segments(file, segment_bytes) for rows in reader.read(segment, chunk_bytes)]
    assert sum(map(len, portions)) == 121
    assert [label for rows in portions for label in rows.label] == [float(i % 2 == 0) for i in range(120)] + [1.0]
    words = hash_words(pa.array(["a", "b;c"]))
    tags = [key for rows in portions for key in rows.keys[1]]
    assert tags == [word for row in ROWS for word in words[: len(row["tags"])]]
    bad = [why for rows in portions for _, why in ((one.line, one.why) for one in rows.bad)]
    assert bad == ["is not a JSON object in UTF-8"] * 2
    assert sum(rows.num_lines for rows in portions) == 124


def test_a_gzip_file_is_prepared_and_dropped_columns_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with gzip.open("rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    Path("run.toml").write_text('[data]\nkind = "prepared"\npath = "out"\nlabel = "bought"\n'
                                'prepare = { input = "rows.jsonl.gz" }\n')
    assert run(["data", "prepare", "run.toml"]) == 0
    out = capsys.readouterr().out
    assert "dropped columns: n: " in out
    assert "deep: holds structures, which are not read" in out
    assert "prepared 120 rows" in out


def test_one_array_of_objects_is_refused_with_the_command_that_cuts_it(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    with pytest.raises(DataError, match="is one JSON array") as caught:
        schema_of(tmp_path, "rows.json")
    assert "jq -c '.[]' rows.json" in caught.value.fix


@given(value=st.one_of(st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2)))
def test_a_value_is_read_as_the_text_that_json_writes(value):
    assert json_cell(value) == (value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("line", [b'{"user": "caf\xe9", "bought": 1}', b'{"user": "\\ud800", "bought": 1}',
                                  b'{"user": "\\uDFFF x", "bought": 0}'])
def test_a_line_that_is_not_unicode_is_one_bad_row(tmp_path, line):
    good = [json.dumps({**row, "user": "\U0001f600"}).encode() for row in ROWS]  # written as two halves, a whole
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([*good[:50], line, *good[50:]]) + b"\n")
    schema, inputs = schema_of(tmp_path)
    (file,) = inputs.find("rows.jsonl")
    reader = JsonLinesReader(schema, PrepareSpec(), inputs)
    portions = [rows for segment in reader.segments(file, 1 << 20) for rows in reader.read(segment, 1 << 20)]
    assert sum(map(len, portions)) == len(ROWS)
    assert [(bad.line, bad.why) for rows in portions for bad in rows.bad] == [(50, "is not a JSON object in UTF-8")]

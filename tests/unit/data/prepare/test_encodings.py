"""Text in another encoding than UTF-8 is declared or refused; preparation, scores and servers agree on each word."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data import open_source
from embark.data.prepare.guess import guess_schema
from embark.data.prepare.inputs import Inputs, open_inputs
from embark.data.prepare.later_rows import PreparedWith, schema_in, write_later_rows
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import DataError, SpecError
from embark.serve.tensors import read_tensor, tensor_columns
from embark.spec import resolve

DRINKS = ["café", "thé", "crème", "eau"] * 8


def write(path: Path, encoding: str, drinks: list[str] = DRINKS, header: str = "label,drink") -> Path:
    text = header + "\n" + "".join(f'{i % 2},"{drink}\nfroid"\n' for i, drink in enumerate(drinks))
    path.write_bytes((gzip.compress if path.suffix == ".gz" else bytes)(text.encode(encoding)))
    return path


def spec_of(folder: Path, file: Path, **prepare):
    return resolve({"data": {"kind": "prepared", "path": str(folder), "eval_fraction": 1e-9,
                             "prepare": {"input": str(file), "num_workers": 1, **prepare}}})


def prepared(folder: Path, file: Path, **prepare) -> PreparedWith:
    spec = spec_of(folder, file, **prepare)
    return PreparedWith.of(str(folder), prepare_from_spec(spec, folder).manifest)


@pytest.mark.parametrize(("encoding", "drinks"), [
    ("latin-1", DRINKS), ("cp1252", [*DRINKS, "l’eau", "5 €"]), ("koi8-r", ["чай", "кофе"] * 8),
    ("gb18030", ["茶", "咖啡", "水|果"] * 8), ("shift_jis", ["お茶", "水", "ソーダ"] * 8)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_declared_encoding_gives_the_rows_of_utf_8(tmp_path, read_rows, encoding, drinks, suffix):
    right = prepared(tmp_path / "right", write(tmp_path / "utf8.csv", "utf-8", drinks))
    found = prepared(tmp_path / "found", write(tmp_path / f"other.csv{suffix}", encoding, drinks), encoding=encoding)
    rows = [sorted(read_rows(Path(one.path), one.manifest, "train")) for one in (right, found)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == len(drinks)
    assert [one.row_encoder().maps[0].keys.tolist() for one in (right, found)].count(
        right.row_encoder().maps[0].keys.tolist()) == 2


def test_later_files_are_read_as_declared_and_json_lines_as_utf_8(tmp_path):
    before = prepared(tmp_path / "data", write(tmp_path / "rows.csv", "latin-1"), encoding="latin-1")
    (tmp_path / "more.jsonl").write_text("".join(f'{{"label": {i % 2}, "drink": "{drink}\\nfroid"}}\n'
                                                 for i, drink in enumerate(DRINKS)), encoding="utf-8")
    for name in ("rows.csv", "more.jsonl"):
        manifest, bad = write_later_rows(before, str(tmp_path / name), tmp_path / f"{name}-out")
        assert (manifest.num_rows("validation"), bad.num_bad) == (len(DRINKS), 0)
    files = [next((tmp_path / f"{name}-out").rglob("*.bin")).read_bytes() for name in ("rows.csv", "more.jsonl")]
    assert files[0] == files[1]


def test_rows_in_utf_8_are_refused_where_another_encoding_is_declared(tmp_path):
    before = prepared(tmp_path / "data", write(tmp_path / "rows.csv", "latin-1"), encoding="latin-1")
    write(tmp_path / "utf8.csv", "utf-8")
    inputs, files = open_inputs(str(tmp_path / "utf8.csv"))
    with pytest.raises(DataError, match=r"is UTF-8, and data\.prepare.encoding says iso8859-1"):
        schema_in(before.schema, before.prepare, inputs, files)


def test_words_that_are_not_utf_8_are_refused_with_the_line_to_write(tmp_path):
    file, inputs = write(tmp_path / "rows.csv", "latin-1"), Inputs()
    with pytest.raises(DataError, match=r"column 'drink' has 'caf�.*', which is not utf-8") as caught:
        guess_schema(spec_of(tmp_path / "out", file), inputs, inputs.find(str(file)))
    assert 'data.prepare.encoding = "latin-1"' in caught.value.fix
    file = write(tmp_path / "header.csv", "latin-1", ["eau"] * 8, "label,thé")
    with pytest.raises(DataError, match="the name of column 'th�' is not utf-8"):
        guess_schema(spec_of(tmp_path / "out", file), inputs, inputs.find(str(file)))


def test_a_byte_that_the_declared_encoding_lacks_is_named(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b"label,drink\n" + b"1,the\n0,eau\n" * 25_000 + b"1,caf\x81\n" + b"1,the\n0,eau\n" * 35_000)
    at = file.read_bytes().index(b"\x81")
    with pytest.raises(DataError, match=rf"byte {at:,}, b'\\x81', is not cp1252"):
        prepared(tmp_path / "out", file, encoding="cp1252")


def test_parquet_and_tensors_refuse_words_that_are_not_utf_8(tmp_path):
    drinks = pa.array([b"eau", b"caf\xe9"] * 8, pa.binary())
    pq.write_table(pa.table({"label": [0, 1] * 8, "drink": drinks}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 1 has b'caf\\xe9' in column 'drink', which is not UTF-8"):
        prepared(tmp_path / "out", tmp_path / "rows.parquet")
    schema = prepared(tmp_path / "data", write(tmp_path / "rows.csv", "utf-8")).schema.unlabelled()
    for cell, is_text in (("café".encode(), True), (b"caf\xe9", False)):
        data = len(cell).to_bytes(4, "little") + cell
        if is_text:
            assert len(tensor_columns([read_tensor("drink", "BYTES", [1], data)], schema)) == 1
        else:
            with pytest.raises(ValueError, match="input 'drink': has text that is not UTF-8"):
                read_tensor("drink", "BYTES", [1], data)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-7", "rot13", "latin-11", "iso2022_jp"])
def test_encodings_in_which_rows_cannot_be_cut_are_refused(tmp_path, encoding):
    with pytest.raises(SpecError, match="is no encoding that contains ASCII"):
        spec_of(tmp_path, tmp_path / "rows.csv", encoding=encoding)


def test_files_in_memory_have_the_declared_encoding(tmp_path):
    write(tmp_path / "rows.csv", "latin-1", header="label,thé")
    (tmp_path / "rows.csv").write_bytes("label,thé\n1,2\n0,1\n1,1\n".encode("latin-1"))
    spec = resolve({"model": {"num_dense": 1, "tables": [{"name": "label2", "rows": 3}]},
                    "data": {"kind": "columns", "path": str(tmp_path / "rows.csv"), "dense_columns": ["thé"],
                             "eval_fraction": 1e-9, "prepare": {"encoding": "latin-1"}}})
    with pytest.raises(DataError, match="has no column 'label2'"):
        open_source(spec)

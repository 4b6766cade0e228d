"""Whichever way a raw row comes, it becomes the same ids and numbers: what preparation does is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from embark.data import open_source
from embark.data.loader import Batch
from embark.data.prepare.earlier_ids import EarlierIds
from embark.data.prepare.inputs import open_inputs
from embark.data.prepare.later_rows import PreparedWith, schema_in, write_later_rows
from embark.data.prepare.prepare import prepare, prepare_from_spec
from embark.data.prepared import Manifest
from embark.data.prepared.cache import read_manifest
from embark.data.prepared.parts import iter_blocks
from embark.data.stream.source import StreamSource
from embark.errors import DataError
from embark.features.encoding import plain_row_format
from embark.features.layout import Rows
from embark.features.rows import RawRows
from embark.serve.request_rows import JsonColumns, RequestScorer, TensorColumns
from embark.serve.tensors import Tensor, tensor_columns
from embark.spec import RunSpec, resolve

COLUMNS = ("label", "number", "price", "user", "item", "tags", "at")
USUAL = {"label": "1", "price": "0.5", "user": "anna", "item": "3", "tags": "a|b", "at": "2024-05-31T18:00:00Z"}
TEXTS: dict[str, list[str]] = {
    "price": ["", "NA", "nan", "1e3", " 7", "+7", "-0", ".5", "1_000", "٧", "inf", "100000000000000000000", "1e300"],
    "item": ["", "NA", "1e3", " 7", "+7", "-1", "7.0", "007", "18446744073709551615", "18446744073709551616", "9" * 25,
             "７", "0x10"],
    "user": ["", "NA", " anna ", "ä", "日本", "1e3", "007", "7", "9" * 25, "a b", "NULL", "true"],
    "tags": ["", "NA", "a", " a | b ", "a||b", "NA|a", "ä|日本", "|", "b|a|c|d|e"],
    "at": ["", "2024-05-31 18:30", "2024-05-31T18:00:00+02:00", "2024-05-31 18:00:00.123456789Z", "soon", "1717178400"],
}
REFUSED = {"price": ["1_000", "٧", "inf", "1e300"], "at": ["2024-05-31 18:30", "soon", "1717178400"],
           "item": ["1e3", "7.0", "18446744073709551616", "9" * 25, "７", "0x10"]}
NATIVE: list[tuple[str, Any, str]] = [  # Values of JSON and of Parquet, and the text that says the same.
    ("price", 7, "7"), ("price", 1e3, "1e3"), ("price", True, "1"), ("price", 10**20, "1" + "0" * 20),
    ("item", 7, "7"), ("item", True, "1"), ("item", -1, "-1"), ("item", 2**64 - 1, str(2**64 - 1)),
    ("user", 7, "7"), ("tags", ["a", "b"], "a|b"), ("tags", [], ""), ("tags", [" a ", None], "a"),
]
Answers = dict[int, tuple[Any, ...]]  # By the number of a row: what it became; no entry for a row that is refused.


def text_rows() -> list[dict[str, str]]:
    cells = [(column, text) for column, texts in TEXTS.items() for text in texts]
    return [{**USUAL, column: text, "number": str(number)} for number, (column, text) in enumerate(cells)]


def native_rows() -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    rows = [{**USUAL, "number": str(number)} for number in range(len(NATIVE))]
    return ([{**row, column: value} for row, (column, value, _) in zip(rows, NATIVE, strict=True)],
            [{**row, column: text} for row, (column, _, text) in zip(rows, NATIVE, strict=True)])


def spec_of(folder: Path, file: Path) -> RunSpec:
    return resolve({
        "model": {"num_dense": 2, "tables": [
            {"name": "user", "rows": 1_000_003}, {"name": "item", "rows": 1_000_003},
            {"name": "tags", "rows": 1_000_003, "multi_hot": 4}, {"name": "at_hour", "rows": 25}]},
        "data": {"kind": "prepared", "path": str(folder), "dense_columns": ["number", "price"], "eval_fraction": 1e-9,
                 "prepare": {"input": [str(file)], "sparse_columns": ["user", "item"], "list_columns": ["tags"],
                             "list_delimiter": "|", "time_columns": {"at": ["hour"]},
                             "max_bad_share": 0.9, "time_unit": "s"}},
        "features": {"numbers": "none"},
        "stream": {"source": "files", "path": str(folder)}, "train": {"batch_size": 1},
    })


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    lines = [",".join(COLUMNS), *(",".join(row[name] for name in COLUMNS) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, str]]) -> Path:
    pyarrow.parquet.write_table(pa.table({name: [row[name] for row in rows] for name in COLUMNS}), path)
    return path


def of_rows(rows: Rows) -> Answers:
    found = {}
    for i in range(len(rows)):
        row = rows.cut(i, i + 1)
        number, price = row.dense[0].tolist()
        found[round(number)] = (price, *(np.asarray(ids).reshape(-1).tolist() for ids in row.ids))
    return found


def of_batch(batch: Batch) -> Answers:
    return of_rows(Rows(batch.label, batch.dense, tuple(batch.by_feature(batch.ids)),
                        tuple(lengths.astype(np.int64) for lengths in batch.lengths)))


def prepared(data: Path, file: Path, out: Path) -> Answers:
    """Prepare a file whose columns are those of the data."""
    inputs, files = open_inputs(str(file))
    before = prepared_with(data)
    schema = schema_in(before.schema, before.prepare, inputs, files)
    # Numbers have the statistics of the data.
    return of_files(out, prepare(spec_of(out, file), schema, inputs, files, out, earlier=EarlierIds(before)).manifest)


def prepared_with(data: Path) -> PreparedWith:
    before = PreparedWith.of(str(data), read_manifest(str(data)))
    assert before is not None
    return replace(before, prepare=before.prepare.model_copy(update={"max_bad_share": 1.0}))


def of_files(folder: Path, manifest: Manifest) -> Answers:
    found: Answers = {}
    for split in ("train", "validation"):
        for block in iter_blocks(folder, manifest, split):
            features = range(len(manifest.layout.features))
            found |= of_rows(Rows(block.label, block.dense, tuple(block.ids(i) for i in features),
                                  tuple(block.lengths(i) for i in features)))
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """Data that was prepared from usual rows, and what it makes of the odd ones."""
    folder = tmp_path_factory.mktemp("base")
    usual = write_csv(folder / "usual.csv", [{**USUAL, "number": str(number)} for number in range(20)])
    prepare_from_spec(spec_of(folder / "data", usual), folder / "data")
    kinds = {column.name: column.kind for column in prepared_with(folder / "data").schema.sparse}
    assert kinds == {"user": "text", "item": "integer", "tags": "text", "at_hour": "hour"}
    return folder / "data", prepared(folder / "data", write_csv(folder / "odd.csv", text_rows()), folder / "odd")


def served(data: Path, request: Any) -> Answers:
    before = prepared_with(data)
    rows = SimpleNamespace(columns=before.schema.unlabelled(), prepare=before.prepare)
    scorer = RequestScorer(SimpleNamespace(info=SimpleNamespace(rows=rows), encoder=before.row_encoder()), None)
    raw = scorer.parse(request(rows.columns))
    assert isinstance(raw, RawRows), raw
    return of_rows(before.row_encoder().encode(raw))


def streamed(data: Path, file: Path) -> Answers:
    return of_batch(StreamSource(spec_of(data, file)).rows_of_files(str(file))[0])


def later(data: Path, file: Path, out: Path) -> Answers:
    return of_files(out, write_later_rows(prepared_with(data), str(file), out)[0])


WRITERS = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("door", ["prepare", "later rows", "stream"])
def test_a_text_cell_is_the_same_through_every_door(base, tmp_path: Path, door: str, format: str):
    data, right = base
    file = WRITERS[format](tmp_path / f"rows.{format}", text_rows())
    call = {"prepare": prepared, "later rows": later, "stream": lambda data, file, _: streamed(data, file)}[door]
    assert call(data, file, tmp_path / "out") == right
    assert [row for row in text_rows() if int(row["number"]) not in right] == [
        row for row in text_rows() if any(row[column] in texts for column, texts in REFUSED.items())]


def test_a_text_cell_is_served_as_it_was_prepared(base):
    rows, (data, right) = text_rows(), base
    assert served(data, lambda _: JsonColumns(rows)) == right
    names = [name for name in COLUMNS if name != "label"]
    assert served(data, lambda schema: tensor_columns(
        [Tensor(name, (len(rows),), [row[name] for row in rows]) for name in names], schema)) == right
    assert served(data, lambda _: TensorColumns(len(rows), {
        name: pa.array([row[name].encode() for row in rows], pa.binary()) for name in names})) == right


def test_a_value_of_json_or_parquet_is_what_its_text_is(base, tmp_path: Path):
    data, (values, texts) = base[0], native_rows()
    right = later(data, write_csv(tmp_path / "rows.csv", texts), tmp_path / "csv")
    file = write_jsonl(tmp_path / "rows.jsonl", values)
    assert served(data, lambda _: JsonColumns(values)) == right
    assert streamed(data, file) == right
    assert later(data, file, tmp_path / "out") == right
    for number, (column, value, _) in enumerate(NATIVE):  # alone a column keeps its type
        if value == 10**20:
            continue  # which Parquet has no type for
        cell = pa.array([value], pa.uint64() if value == 2**64 - 1 else None)
        row = {name: cell if name == column else pa.array([text]) for name, text in texts[number].items()}
        pyarrow.parquet.write_table(pa.table(row), tmp_path / f"{number}.parquet")
        expected = {number: right[number]} if number in right else {}
        assert later(data, tmp_path / f"{number}.parquet", tmp_path / f"out{number}") == expected, (column, value)
        assert streamed(data, tmp_path / f"{number}.parquet") == expected, (column, value)


PLAIN_CELLS = {"7": 7, " 7": 7, "+7": 7, "007": 7} | dict.fromkeys(("", "NA", "1e3", "7.0", "７", "x"))


@pytest.mark.parametrize("cell", PLAIN_CELLS, ids=repr)
def test_an_id_that_is_not_prepared_is_the_same_through_every_door(tmp_path: Path, cell: str):
    items, users = ["1", "2", "3", cell, "8", "9", "10", "11"], ["u"] * 4 + ["v"] * 4
    path = tmp_path / "rows.csv"
    path.write_text("label,item,user\n" + "".join(
        f"1,{item},{user}\n" for item, user in zip(items, users, strict=True)), encoding="utf-8")
    pyarrow.parquet.write_table(pa.table({"label": [1] * 8, "item": items, "user": users}),
                                tmp_path / "rows.parquet")
    model = {"num_dense": 0, "tables": [{"name": "item", "rows": 50}]}
    expected = None if PLAIN_CELLS[cell] is None else [1, 2, 3, PLAIN_CELLS[cell], 8, 9, 10, 11]

    def ids(file: Path, kind: str) -> list[int] | None:
        data = {"kind": kind, "path": str(file), "eval_fraction": 1e-9}
        sequence = {"kind": "sasrec", "num_dense": 0, "embedding_dim": 8, "tables": [
            {"name": "item", "rows": 50, "pooling": "none", "max_length": 4},
            {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 2}],
            "sequence": {"history": "item", "negatives": "negatives"}}
        spec = resolve({"model": model if kind == "columns" else sequence, "data": data})
        try:
            source = open_source(spec)
        except DataError:
            return None
        if kind == "columns":
            return np.sort(source.train_rows(0, 0, source.num_train_samples).ids).tolist()
        return np.sort(source._items).tolist() if source.maps is None else None  # words have ids of their own

    for file in (path, tmp_path / "rows.parquet"):
        assert ids(file, "columns") == ids(file, "interactions") == expected
    schema, prepare, encoder = plain_row_format(resolve({"model": model}).model, resolve({"model": model}).data)
    artifact = SimpleNamespace(info=SimpleNamespace(rows=SimpleNamespace(
        columns=schema.unlabelled(), prepare=prepare)), encoder=encoder)
    raw = RequestScorer(artifact, None).parse(JsonColumns([{"item": item} for item in items]))
    assert [int(key) for key in raw.keys[0]] == (expected or [1, 2, 3, 8, 9, 10, 11])

"""Numbers with commas, times in other formats and zones: one way from the cell to the model, through every door."""

from __future__ import annotations

import json
import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data import open_source
from embark.data.prepare.guess import guess_schema
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.later_rows import PreparedWith, write_later_rows
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepared.parts import iter_blocks
from embark.data.stream.source import StreamSource
from embark.errors import DataError
from embark.features.arrow.cells import CellParser
from embark.features.rows import RawRows
from embark.features.values import decimal_sign
from embark.serve.request_rows import JsonColumns, RequestScorer, TensorColumns
from embark.spec import resolve

NUM_ROWS = 2_000
ZONE = ZoneInfo("Europe/Berlin")


def cells(seed: int = 1) -> list[dict[str, Any]]:
    draw, rows = random.Random(seed), []
    for index in range(NUM_ROWS):
        price = round(draw.lognormvariate(4, 3), draw.randrange(4))
        at = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(minutes=draw.randrange(800_000))
        rows.append({"label": index % 2, "number": index, "price": price, "total": -price, "at": at.astimezone(ZONE)})
    return rows


def spelled(row: dict[str, Any]) -> dict[str, str]:
    between = f"{row['price']:,}"
    return {"label": str(row["label"]), "number": str(row["number"]), "total": f"{row['total']:,}",
            "price": between.translate(str.maketrans(",.", ".,")) if row["number"] % 2 else str(row["price"]).replace(
                ".", ","), "at": f"{row['at']:%d.%m.%y %I:%M %p}" if row["number"] % 50 else ""}


def spec_of(folder: Path, file: Path):
    tables = [{"name": f"at_{part}", "rows": rows} for part, rows in (("hour", 25), ("day", 32), ("month", 13))]
    return resolve({
        "model": {"num_dense": 3, "tables": tables},
        "data": {"kind": "prepared", "path": str(folder), "dense_columns": ["number", "price", "total"],
                 "eval_fraction": 1e-9, "prepare": {"input": str(file), "num_workers": 1, "delimiter": ";"}},
        "features": {"numbers": "none", "missing_flags": False, "columns": {"price": {"decimal": ","}, "at": {
            "parts": ["hour", "day", "month"], "time_format": "%d.%m.%y %I:%M %p", "time_zone": "Europe/Berlin"}}},
        "stream": {"source": "files", "path": str(folder)}, "train": {"batch_size": 1}})


def of_rows(rows: Any) -> dict[int, tuple[Any, ...]]:
    found = zip(*(np.asarray(one).reshape(len(rows.dense), -1)[:, 0].tolist() for one in rows.ids), strict=True)
    return {round(dense[0]): (*dense[1:], *ids) for dense, ids in zip(rows.dense.tolist(), found, strict=True)}


def of_files(folder: Path, manifest: Any) -> dict[int, tuple[Any, ...]]:
    found = {}
    for split in ("train", "validation"):
        for block in iter_blocks(folder, manifest, split):
            found |= of_rows(SimpleNamespace(dense=block.dense, ids=[block.ids(index) for index in range(3)]))
    return found


def test_commas_formats_and_zones_are_the_same_through_every_door(tmp_path):
    rows = cells()
    texts = [spelled(row) for row in rows]
    file = tmp_path / "rows.csv"
    file.write_text(";".join(texts[0]) + "\n" + "".join(";".join(row.values()) + "\n" for row in texts))
    manifest = prepare_from_spec(spec_of(tmp_path / "data", file), tmp_path / "data").manifest
    right = of_files(tmp_path / "data", manifest)
    assert right == {row["number"]: (np.float32(row["price"]), np.float32(row["total"]), *(
        (row["at"].hour + 1, row["at"].day, row["at"].month) if row["number"] % 50 else (0, 0, 0))) for row in rows}
    mixed = [row if index % 3 else row | {"price": rows[index]["price"], "total": rows[index]["total"]}
             for index, row in enumerate(texts)]  # numbers of JSON beside text
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    pq.write_table(pa.table({name: [row[name] for row in (rows if name in ("price", "total") else texts)]
                             for name in texts[0]}), tmp_path / "rows.parquet")
    before = PreparedWith.of(str(tmp_path / "data"), manifest)
    for name in ("rows.csv", "rows.jsonl", "rows.parquet"):
        found, bad = write_later_rows(before, str(tmp_path / name), tmp_path / name[5:])
        assert (bad.num_bad, of_files(tmp_path / name[5:], found)) == (0, right)
    streamed = StreamSource(spec_of(tmp_path / "data", file)).rows_of_files(str(tmp_path / "rows.jsonl"))[0]
    assert of_rows(SimpleNamespace(dense=streamed.dense, ids=streamed.by_feature(streamed.ids))) == right
    schema = before.schema.unlabelled()
    scorer = RequestScorer(SimpleNamespace(info=SimpleNamespace(rows=SimpleNamespace(
        columns=schema, prepare=before.prepare)), encoder=before.row_encoder()), None)
    names = [name for name in texts[0] if name != "label"]
    for request in (JsonColumns(mixed), TensorColumns(NUM_ROWS, {
            name: pa.array([row[name].encode() for row in texts], pa.binary()) for name in names})):
        raw = scorer.parse(request)
        assert isinstance(raw, RawRows), raw
        assert of_rows(before.row_encoder().encode(raw)) == right


NUMBERS = {",": {"2,55": 2.55, "1.234,50": 1234.5, "-1.234.567": -1234567, "7": 7, "+,5": 0.5, "1e3": 1000, "3,": 3,
                 " 1,5 ": 1.5, "": math.nan, "nan": math.nan, "2.55": None, "1,2,3": None, "1.23,4": None, "x": None},
           ".": {"1,234.50": 1234.5, "2.55": 2.55, "-1,234,567": -1234567, "12,34": None, "1.234.5": None}}


@pytest.mark.parametrize("sign", NUMBERS)
def test_a_number_has_its_decimal_sign_and_whole_thousands(sign):
    values, is_bad = CellParser(("",)).numbers(pa.array(list(NUMBERS[sign])), decimal=sign)
    assert is_bad.tolist() == [value is None for value in NUMBERS[sign].values()]
    np.testing.assert_array_equal(values, [math.nan if value is None else value for value in NUMBERS[sign].values()])


@pytest.mark.parametrize(("texts", "sign"), [
    (["2,55", "1,5", "7"], ","), (["1.234,50"], ","), (["1,234.50"], "."), (["1,234"], None), (["1,234", "0,5"], ","),
    (["2.55"], None), (["1,234", "x"], None), (["1,234,567"], ".")])
def test_a_decimal_sign_is_guessed_where_only_one_can_be_meant(texts, sign):
    assert decimal_sign(texts) == sign


def test_columns_of_decimal_commas_are_numbers_and_say_so(tmp_path):
    path, inputs = tmp_path / "rows.csv", Inputs()
    path.write_text("label;price;shop;odd\n" + "".join(
        f"{index % 2};{index // 7},{index % 90:02};shop {index % 5};{index % 9 + 1},{index:03}\n"
        for index in range(400)))
    spec = resolve({"data": {"kind": "prepared", "path": "x", "prepare": {"input": str(path)}}})
    schema = guess_schema(spec, inputs, inputs.find(str(path)))
    assert (schema.dense, schema.decimals) == (("price",), {"price": ","})
    assert schema.why["price"] == "holds numbers such as 0,00; ',' is its decimal sign"
    assert "if these are numbers, say their data.prepare.decimal" in schema.why["odd"]
    said = spec.model_copy(update={"data": spec.data.model_copy(update={
        "dense_columns": ("price", "odd"), "prepare": spec.data.prepare.model_copy(update={"decimal": ","})})})
    assert guess_schema(said, inputs, inputs.find(str(path))).decimals == {"label": ",", "price": ",", "odd": ","}


@pytest.mark.parametrize("decimal", ["", ","])
def test_spaces_around_what_means_no_number_do_not_count(decimal):
    cells = pa.array([" ", "NA ", "\t", " 2 ", "7", "x"])
    numbers, is_bad = CellParser(("", "NA")).numbers(cells, decimal=decimal)
    np.testing.assert_array_equal(numbers, [np.nan, np.nan, np.nan, 2, 7, np.nan])
    assert is_bad.tolist() == [False] * 5 + [True]


def test_files_in_memory_have_the_decimal_sign_that_is_said(tmp_path):
    (tmp_path / "rows.csv").write_text("label;price;item\n" + "1;2,5;1\n0;1.000,25;2\n" * 5)
    data = {"kind": "columns", "path": str(tmp_path / "rows.csv"), "dense_columns": ["price"], "eval_fraction": 1e-9}
    model = {"num_dense": 1, "tables": [{"name": "item", "rows": 3}]}
    plain = {"numbers": "none", "missing_flags": False}
    source = open_source(resolve({"model": model, "data": data | {"prepare": {"decimal": ","}}, "features": plain}))
    assert set(source.train_rows(0, 0, 10).dense[:, 0].tolist()) == {2.5, 1000.25}
    with pytest.raises(DataError, match="'2,5' is not a number"):
        open_source(resolve({"model": model, "data": data}))

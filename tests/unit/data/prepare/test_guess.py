"""What the spec leaves open is guessed with a reason; what cannot be guessed is an error with the lines to add."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import random
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data.prepare.guess import guess_schema, table_name
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.readers import CsvReader
from embark.errors import DataError, MissingPackage
from embark.features.arrow.cells import hash_words
from embark.features.schema import Schema, SparseColumn
from embark.spec.data import DataSpec, PrepareSpec
from embark.spec.model import ModelSpec, Table
from embark.spec.run import RunSpec

NUM_ROWS = 400


def spec_of(model: ModelSpec | None = None, label: str = "label", dense: tuple[str, ...] = (), **prepare) -> RunSpec:
    data = DataSpec(kind="prepared", path="x", label=label, dense_columns=dense, prepare=PrepareSpec(**prepare))
    return RunSpec(model=model or ModelSpec(), data=data)


def guess(folder: Path, content: bytes | str, name: str = "data.csv", **spec) -> Schema:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    inputs = Inputs(str(folder))
    return guess_schema(spec_of(**spec), inputs, inputs.find(name))


def shop(delimiter: str = ",", has_header: bool = True, num_rows: int = NUM_ROWS) -> str:
    draw = random.Random(1)
    written = io.StringIO()
    out = csv.writer(written, delimiter=delimiter, lineterminator="\n")
    if has_header:
        out.writerow(SHOP)
    for i in range(num_rows):
        out.writerow([
            i, draw.randrange(2), f"u{draw.randrange(50)}", draw.randrange(10_000), f"{draw.random() * 9:.2f}",
            int(draw.paretovariate(0.6)), draw.randrange(5), "|".join(draw.sample("abcdefgh", draw.randrange(1, 4))),
            f"Review {i}: it is, well, {draw.random()}", 1_600_000_000 + i * 977, "2024-01-02",
            f"{draw.randrange(1 << 32):08x}", "", f"{draw.randrange(900):05d}",
        ])
    return written.getvalue()


SHOP = ["row", "label", "user", "item_id", "price", "visits", "Day of Week", "tags", "review", "when", "date", "hash",
        "empty", "zip"]
ROLES = {
    "row": "ignored", "label": "label", "user": "words", "item_id": "integer ids", "price": "dense", "visits": "dense",
    "Day of Week": "integer ids, table Day_of_Week", "tags": "list of words, at most 32", "review": "ignored",
    "when": "ignored", "date": "ignored", "hash": "hexadecimal ids", "empty": "ignored", "zip": "words",
}


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "\x01"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "gzip"])
def test_columns_are_taken_for_what_they_look_like(tmp_path, delimiter, is_packed):
    text = shop(delimiter).encode()
    schema = guess(tmp_path, gzip.compress(text) if is_packed else text)
    assert (schema.format, schema.delimiter, schema.has_header) == ("csv", delimiter, True)
    assert {row["column"]: row["taken_for"] for row in schema.describe()} == ROLES
    assert set(schema.why) == set(SHOP)
    assert all(schema.why.values())
    assert "'|' stands in" in schema.why["tags"]
    assert schema.why["row"] == "numbers the rows"
    assert "seconds since 1970" in schema.why["when"]
    assert schema.examples["user"].startswith("u")


def test_parquet_says_itself_what_it_holds(tmp_path):
    table = pa.table({
        "label": pa.array([0, 1] * 200, pa.int8()), "u": [f"user {i % 7}" for i in range(400)],
        "cart": [[i % 9, 3] for i in range(400)], "words": [["a", "b"]] * 400, "x": [i / 7 for i in range(400)],
        "is_new": [i % 3 == 0 for i in range(400)], "when": pa.array(range(400), pa.timestamp("s")),
        "deep": [{"a": 1}] * 400, "nothing": pa.nulls(400), "f": [float(i % 60) for i in range(400)],
    })
    pq.write_table(table, tmp_path / "data.parquet")
    inputs = Inputs(str(tmp_path))
    schema = guess_schema(spec_of(), inputs, inputs.find("data.parquet"))
    assert {row["column"]: row["taken_for"] for row in schema.describe()} == {
        "label": "label", "u": "words", "cart": "list of integer ids, at most 32", "words": "list of words, at most 32",
        "x": "dense", "is_new": "integer ids", "when": "ignored", "deep": "ignored", "nothing": "ignored", "f": "dense",
    }
    schema = guess_schema(spec_of(sparse_columns=("f", "cart")), inputs, inputs.find("data.parquet"))
    assert schema.sparse == (SparseColumn("cart", "integer", is_list=True, max_ids=32), SparseColumn("f", "integer"))


def test_what_the_lines_say_is_guessed_the_same(tmp_path):
    first = guess(tmp_path, shop())
    payload = tomllib.loads(first.to_toml(PrepareSpec()))
    assert payload["data"]["prepare"]["list_columns"] == ["tags"]
    spec = RunSpec(data=DataSpec.model_validate({"kind": "prepared", "path": "x", **payload["data"]}))
    inputs = Inputs(str(tmp_path))
    again = guess_schema(spec, inputs, inputs.find("data.csv"))
    assert (again.dense, set(again.sparse), again.ignored, again.delimiter, again.has_header, again.columns) == (
        first.dense, set(first.sparse), first.ignored, first.delimiter, first.has_header, first.columns)
    awkward = Schema("csv", 'a "b"\n', ("\x7f é 😀",), (SparseColumn("x", "text"),) * 60, ("x",), delimiter="\t")
    payload = tomllib.loads(awkward.to_toml(PrepareSpec()))
    assert (payload["data"]["label"], payload["data"]["dense_columns"]) == ('a "b"\n', ["\x7f é 😀"])
    assert payload["data"]["prepare"]["sparse_columns"] == ["x"] * 60


def test_the_lines_keep_what_the_spec_sets_itself():
    names = tuple(f"raw/part-{number}, of a-long-list-of-files.csv" for number in range(30))
    given = PrepareSpec(input=names, label_above=3.5, min_count=10, ids="frequency", missing=("?",), header=True)
    schema = Schema("csv", "rating", (), (SparseColumn("user", "integer"),), ("user", "rating"), delimiter=",")
    prepare = tomllib.loads(schema.to_toml(given))["data"]["prepare"]
    assert prepare == {
        "input": list(names), "label_above": 3.5, "min_count": 10, "ids": "frequency", "missing": ["?"],
        "format": "csv", "delimiter": ",", "header": False, "column_names": ["user", "rating"],
        "sparse_columns": ["user"]}


def criteo_row(draw: random.Random, label: str = "1") -> str:
    integers = [draw.choice(["", str(draw.randrange(-2, 9_999))]) for _ in range(13)]
    return "\t".join([*([label] if label else []), *integers, *(f"{draw.randrange(1 << 32):08x}" for _ in range(26))])


def test_criteo_is_known_by_its_columns(tmp_path):
    draw = random.Random(2)
    text = "\n".join(criteo_row(draw, str(i % 2)) for i in range(50)) + "\nrubbish\n"
    for name, content in (("day_0", text.encode()), ("day_0.gz", gzip.compress(text.encode()))):
        schema = guess(tmp_path, content, name)
        assert schema.format == "criteo"
        assert schema.columns == ("label", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26)))
        assert schema.sparse == tuple(SparseColumn(f"cat_{i}", "hex") for i in range(26))
        assert len(schema.describe()) == 40
    rows = tuple(range(100, 126))
    schema = guess(tmp_path, text, model=ModelSpec(num_tables=26, rows_per_table=rows))
    assert [column.rows for column in schema.sparse] == list(rows)
    own = ModelSpec(tables=tuple(Table(name=f"t{i}", rows=5 + i) for i in range(26)))
    assert guess(tmp_path, text, model=own).sparse[3] == SparseColumn("t3", "hex", rows=8, column="cat_3")


@pytest.mark.parametrize(("spec", "what"), [
    ({"model": ModelSpec(num_tables=8)}, "8 tables, and 26 columns were taken for ids"),
    ({"model": ModelSpec(num_dense=4)}, "num_dense = 4, and the dense columns are: int_0"),
    ({"sparse_columns": ("cat_0",)}, "whose columns are all taken"),
])
def test_criteo_with_other_columns_is_refused(tmp_path, spec, what):
    with pytest.raises(DataError, match=what):
        guess(tmp_path, "\n".join([criteo_row(random.Random(2))] * 5), **spec)


def movielens(num_rows: int = 300) -> str:
    draw = random.Random(3)
    return "\n".join(f"{draw.randrange(1, 60)}::{draw.randrange(1, 900)}::{draw.randrange(1, 6)}::{978_300_000 + i}"
                     for i in range(num_rows))


def test_movielens_wants_names_and_a_threshold_and_reports_it(tmp_path):
    with pytest.raises(DataError, match=r"no column .label..*no column holds just 0 and 1") as caught:
        guess(tmp_path, movielens(), "ratings.dat")
    assert "column_0, column_1, column_2, column_3" in caught.value.fix
    assert "data.prepare.column_names" in caught.value.fix
    names = ("user", "movie", "rating", "timestamp")
    with pytest.raises(DataError, match="'rating', which holds 1, 2, 3, 4, 5 and not 0 and 1") as caught:
        guess(tmp_path, movielens(), "ratings.dat", label="rating", column_names=names)
    assert "--set data.prepare.label_above=3" in caught.value.fix  # right beside an inline `prepare = {…}` too
    schema = guess(tmp_path, movielens(), "ratings.dat", label="rating", column_names=names, label_above=3.0)
    assert (schema.delimiter, schema.has_header, schema.ignored) == ("::", False, ("timestamp",))
    assert schema.sparse == (SparseColumn("user", "integer"), SparseColumn("movie", "integer"))


def test_a_missing_label_is_an_error_with_the_candidates(tmp_path):
    with pytest.raises(DataError, match=r"no column 'label'.*these hold 0 and 1: clicked, bought") as caught:
        guess(tmp_path, "user,clicked,bought\na,0,true\nb,1,false\na,1,true\n")
    assert caught.value.fix.endswith("in the spec or with --set data.label=clicked")


def test_unknown_names_are_reported_all_at_once_with_the_nearest(tmp_path):
    with pytest.raises(DataError) as caught:
        guess(tmp_path, shop(), dense=("prise",), sparse_columns=("usr",), list_columns=("tag",),
              ignored_columns=("zip",), hex_columns=("hsah",))
    for line in ("data.dense_columns names 'prise': did you mean 'price'?", "data.prepare.sparse_columns names 'usr'",
                 "data.prepare.list_columns names 'tag': did you mean 'tags'?",
                 "data.prepare.hex_columns names 'hsah'"):
        assert line in caught.value.what
    assert "zip" not in caught.value.what


def test_what_the_spec_names_wins(tmp_path):
    schema = guess(tmp_path, shop(), dense=("item_id", "when"), ignored_columns=("user",))
    assert schema.dense == ("item_id", "when")
    assert "not among data.dense_columns" in schema.why["price"]
    assert {"user", "price", "visits"} <= set(schema.ignored)
    assert [column.name for column in schema.sparse] == ["Day_of_Week", "tags", "hash", "zip"]


def test_named_sparse_columns_leave_nothing_to_guess(tmp_path):
    schema = guess(tmp_path, shop(), sparse_columns=("row", "user"), list_columns=("tags",), max_ids=5)
    assert schema.dense == ()
    assert schema.sparse == (
        SparseColumn("row", "integer"), SparseColumn("user", "text"), SparseColumn("tags", "text", True, 5))
    assert "names the sparse columns and no dense one" in schema.why["price"]
    schema = guess(tmp_path, shop(), sparse_columns=("user",), model=ModelSpec(num_dense=2))
    assert schema.dense == ("price", "visits")


def test_tables_of_the_model_are_the_sparse_columns(tmp_path):
    tables = (Table(name="tags", rows=50, multi_hot=4), Table(name="Day_of_Week", rows=7), Table(name="user", rows=99))
    schema = guess(tmp_path, shop(), model=ModelSpec(tables=tables))
    assert schema.sparse == (
        SparseColumn("tags", "text", True, 4, 50), SparseColumn("Day_of_Week", "integer", rows=7, column="Day of Week"),
        SparseColumn("user", "text", rows=99))
    with pytest.raises(DataError, match=r"model.tables names 'usr': did you mean 'user'"):
        guess(tmp_path, shop(), model=ModelSpec(tables=(Table(name="usr", rows=5),)))


def test_a_number_of_tables_is_checked_against_the_columns(tmp_path):
    schema = guess(tmp_path, shop(), sparse_columns=("user", "Day of Week"),
                   model=ModelSpec(num_tables=2, rows_per_table=(10, 20)))
    assert schema.sparse == (SparseColumn("cat_0", "text", rows=10, column="user"),
                             SparseColumn("cat_1", "integer", rows=20, column="Day of Week"))
    with pytest.raises(DataError, match=r"has 26 tables, and 6 columns were taken for ids: user, item_id"):
        guess(tmp_path, shop(), model=ModelSpec(rows_per_table=10))


def test_a_number_of_dense_columns_is_checked_against_the_columns(tmp_path):
    with pytest.raises(DataError, match="num_dense = 3, and the dense columns are: price, visits"):
        guess(tmp_path, shop(), model=ModelSpec(num_dense=3))


@pytest.mark.parametrize(("text", "label", "columns"), [
    ("label,user\n1,a\n0,b\n", "label", ["label", "user"]),
    ("1,a\n0,b\n", "column_0", None),
    ("true,ann\nfalse,bob\ntrue,eve\n", "column_0", None),
    ("y,name\nfalse,ann\ntrue,bob\n", "y", ["y", "name"]),
    ("x,user\n1,a\n0,b\n", "x", ["x", "user"]),
    (",label,x\n0,1,a\n1,0,b\n", "label", ["column_0", "label", "x"]),
])
def test_a_header_is_distinguished_from_a_row(tmp_path, text, label, columns):
    schema = guess(tmp_path, text, label=label)
    assert schema.has_header is (columns is not None)
    assert list(schema.columns) == (columns or ["column_0", "column_1"])


def test_what_the_spec_says_of_the_header_is_so(tmp_path):
    schema = guess(tmp_path, "label,a\n1,b\n0,a\n1,b\n", header=False, label="column_0", label_above=0.5)
    assert schema.columns == ("column_0", "column_1")
    with pytest.raises(DataError, match="column_names is for files without a header"):
        guess(tmp_path, "label,a\n1,b\n", header=True, column_names=("x", "y"))
    with pytest.raises(DataError, match=r"3 fields a row between ',', and data.prepare.column_names has 2 names"):
        guess(tmp_path, "1,2,3\n", column_names=("x", "y"))
    with pytest.raises(DataError, match="two columns named 'a'"):
        guess(tmp_path, "label,a,a\n1,b,c\n")


def test_names_that_tables_cannot_have_are_changed_and_stay_apart(tmp_path):
    assert [table_name(name) for name in ("User ID", "1st", "prix (€)", "…", "a_b")] == [
        "User_ID", "_1st", "prix", "column", "a_b"]
    text = "label,User ID,User-ID,User_ID\n" + "".join(f"{i % 2},a{i % 3},b{i % 3},c{i % 3}\n" for i in range(9))
    schema = guess(tmp_path, text)
    assert [(column.name, column.source) for column in schema.sparse] == [
        ("User_ID_2", "User ID"), ("User_ID_3", "User-ID"), ("User_ID", "User_ID")]
    inputs = Inputs(str(tmp_path))
    reader = CsvReader(schema, spec_of().data.prepare, inputs)
    rows = next(reader.read(reader.segments(inputs.find("data.csv")[0], 1 << 20)[0], 1 << 20))
    wanted = [hash_words(pa.array([f"{letter}{i % 3}" for i in range(9)])).tolist() for letter in "abc"]
    assert [keys.tolist() for keys in rows.keys] == wanted


def test_words_that_come_late_are_seen(tmp_path):
    """A column that is all digits at the start of a large file, and not in the middle of it."""
    rows = [f"{i % 2},{i % 977}\n" for i in range(40_000)] + [f"{i % 2},x{i % 977}\n" for i in range(60_000)]
    schema = guess(tmp_path, "label,code\n" + "".join(rows), sparse_columns=("code",))
    assert schema.sparse == (SparseColumn("code", "text"),)


@pytest.mark.parametrize(("content", "name", "what"), [
    (b"", "data.csv", "the file is empty"),
    (b"\n\n  \n", "data.csv", "has no rows"),
    (b"label,user\n", "data.csv", "has columns, but no rows"),
    (b"just words\nand more of it all\nno\n", "data.csv", "nothing cuts its rows into fields"),
    (b"PK\x03\x04xxxx", "data.zip", "is a zip archive"),
    (b"\xff\xfel\0a\0", "data.csv", "is text in UTF-16"),
    (b"\x28\xb5\x2f\xfd....", "data.csv.zst", "is packed by zstd"),
    (b"PAR1 and no more", "data.parquet", "is not a Parquet file"),
    (b"label,user\n1,a\n", "data.parquet", "is not a Parquet file"),
    (gzip.compress(b"label,user\n1,a\n" * 500, mtime=0)[:40], "data.csv.gz", "gzip file is cut short"),
    (b"label,x\n" + b"".join(b"%d,2024-05-0%d\n" % (i % 2, i) for i in range(1, 9)), "data.csv",
     "no column was taken for ids or numbers"),
], ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "")
def test_what_cannot_be_read_is_refused_by_name(tmp_path, content, name, what):
    with pytest.raises(DataError, match=rf"{name}.*{what}"):
        guess(tmp_path, content, name)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    pq.write_table(pa.table({"label": [1], "user": ["a"]}), tmp_path / "b.parquet")
    inputs = Inputs(str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arrow = ("embark.features.arrow", "embark.data.prepare.readers")
    for name in [name for name in sys.modules if name.startswith(arrow)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingPackage) as caught:
        guess_schema(spec_of(), inputs, inputs.find("b.parquet"))
    assert "embark-rec[columns]" in caught.value.fix
    with pytest.raises(MissingPackage, match="pyarrow reads delimited text"):
        importlib.import_module("embark.data.prepare.readers")


@pytest.mark.parametrize(("yes", "no"), [("yes", "no"), ("Yes", "No"), ("TRUE", "FALSE"), ("true", "false")])
def test_a_label_of_words_for_yes_and_no_is_one(tmp_path, yes, no):
    text = "user,bought\n" + "".join(f"u{i % 7},{yes if i % 3 else no}\n" for i in range(60))
    schema = guess(tmp_path, text, label="bought")
    inputs = Inputs(str(tmp_path))
    (file,) = inputs.find("data.csv")
    reader = CsvReader(schema, PrepareSpec(), inputs)
    (rows,) = [rows for segment in reader.segments(file, 1 << 20) for rows in reader.read(segment, 1 << 20)]
    assert rows.label.tolist() == [float(i % 3 > 0) for i in range(60)]
    assert not rows.bad


def test_semicolons_between_values_are_found_where_no_bar_is(tmp_path):
    text = "user,tags,label\n" + "".join(f"u{i % 9},{'a;b' if i % 2 else 'c'},{i % 2}\n" for i in range(60))
    schema = guess(tmp_path, text)
    assert schema.list_delimiter == ";"
    assert [column.is_list for column in schema.sparse] == [False, True]
    assert tomllib.loads(schema.to_toml(PrepareSpec()))["data"]["prepare"]["list_delimiter"] == ";"
    assert guess(tmp_path, text.replace(";", "|")).list_delimiter == "|"
    assert guess(tmp_path, text, list_delimiter="|").sparse[1].is_list is False


def test_integers_of_more_than_64_bits_are_words(tmp_path):
    rows = "".join(f"{i % 2},{2**64 + 977 * i},{2**64 - 1 - i % 60},{'9' * 5000}\n" for i in range(120))
    schema = guess(tmp_path, f"label,wide_id,id,longest_id\n{rows}".encode())
    taken = {row["column"]: row["taken_for"] for row in schema.describe()}
    assert taken["wide_id"] == taken["longest_id"] == "words"
    assert taken["id"] == "integer ids"
    assert "more than 64 bits" in schema.why["wide_id"]


def integers(folder: Path, **columns) -> dict[str, str]:
    """The roles that columns of integers are taken for, beside a column of words."""
    num = len(next(iter(columns.values())))
    columns = {"label": [i % 2 for i in range(num)], "shop": [f"s{i % 9}" for i in range(num)], **columns}
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    schema = guess(folder, "\n".join(lines) + "\n")
    assert all(schema.why.values())
    return {row["column"]: row["taken_for"] for row in schema.describe()[2:]}


def test_numbers_of_rows_are_dropped_wherever_they_begin(tmp_path):
    draw = random.Random(5)
    shuffled = draw.sample(range(1, 1001), 600)
    found = integers(tmp_path, RowNumber=shuffled, part=list(range(7_001, 7_601)), key=draw.sample(range(10**9), 600),
                     row_id=draw.sample(range(10**6), 600))
    assert found == dict.fromkeys(("RowNumber", "part", "key", "row_id"), "ignored")


def test_amounts_with_many_values_and_small_counts_are_numbers(tmp_path):
    draw = random.Random(6)
    weights = [round(draw.lognormvariate(12, 0.5)) for _ in range(3_000)]
    hours = [40 if draw.random() < 0.5 else draw.randrange(1, 100) for _ in range(3_000)]
    evenly = [draw.randrange(10**6, 2 * 10**6) for _ in range(3_000)]
    found = integers(tmp_path, fnlwgt=weights, hours_per_week=hours, work=hours, visitor=weights, who=evenly)
    assert found == {"fnlwgt": "dense", "hours_per_week": "dense", "work": "dense", "visitor": "integer ids",
                     "who": "integer ids"}


def test_criteo_with_a_header_has_the_roles_of_criteo_without(tmp_path):
    draw = random.Random(2)
    header = "\t".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
    text = "\n".join([header, *(criteo_row(draw, str(i % 2)) for i in range(300))]) + "\n"
    schema = guess(tmp_path, text)
    assert schema.dense == tuple(f"I{i}" for i in range(1, 14))
    assert [(column.name, column.kind) for column in schema.sparse] == [(f"C{i}", "hex") for i in range(1, 27)]
    assert schema.why["I5"] == "is one of Criteo's 13 integers"


def test_data_of_numbers_alone_has_tables_of_their_buckets(tmp_path):
    content = "label,x,y\n" + "".join(f"{i % 2},{i}.5,{i % 7}.25\n" for i in range(90))
    found = guess(tmp_path, content)
    assert [(column.name, column.kind, column.rows, column.parts) for column in found.sparse] == [
        ("x_bucket", "bucket", 17, ("x",)), ("y_bucket", "bucket", 17, ("y",))]
    said = {row["column"]: row["taken_for"] for row in found.describe()}
    assert said["x_bucket"] == "quantile buckets of x"
    assert tomllib.loads(found.to_toml(PrepareSpec()))["features"] == {"bucket_tables": True}
    with_ids = guess(tmp_path, content.replace("label,x,y", "label,x,y,user").replace("5\n", "5,a\n"))
    assert [column.name for column in with_ids.sparse] == ["user"]

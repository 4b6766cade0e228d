"""Parquet of any common type is read as the values say, by row groups, and only the columns that are needed."""

from __future__ import annotations

import datetime
import decimal
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data.prepare.inputs import InputFile, Inputs
from embark.data.prepare.readers import ParquetReader
from embark.errors import DataError
from embark.features.arrow.cells import hash_bytes
from embark.features.rows import RawRows
from embark.features.schema import Schema, SparseColumn
from embark.spec.data import PrepareSpec


class RemoteInputs(Inputs):
    """The same files, as if they were not on this machine; it keeps what was asked for."""

    asked: list[int] = []  # noqa: RUF012

    def local_path(self, uri: str) -> str | None:
        return None

    def read(self, uri: str, start: int, num_bytes: int) -> bytes:
        self.asked.append(num_bytes)
        return super().read(uri, start, num_bytes)


def key(text: str) -> int:
    return int(hash_bytes(pa.array([text]))[0])


def read_table(folder: Path, table: pa.Table, schema: Schema, *, segment_bytes: int = 1 << 30,
               chunk_bytes: int = 1 << 20, row_group_size: int | None = None, is_remote: bool = False,
               **prepare) -> list[RawRows]:
    pq.write_table(table, folder / "data.parquet", row_group_size=row_group_size)
    inputs = (RemoteInputs if is_remote else Inputs)(str(folder))
    reader = ParquetReader(schema, PrepareSpec(**prepare), inputs)
    file = inputs.find("data.parquet")[0]
    return [rows for segment in reader.segments(file, segment_bytes) for rows in reader.read(segment, chunk_bytes)]


def one_column(column: str, kind: str = "text", **more) -> Schema:
    return Schema("parquet", "y", (), (SparseColumn(column, kind, **more),), ("y", column))


WHEN = datetime.datetime(2021, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
DENSE = [
    (pa.array([1, None, -3], pa.int8()), [1, None, -3]),
    (pa.array([1, None, 2**40], pa.int64()), [1, None, 2**40]),
    (pa.array([1.5, None, math.nan], pa.float32()), [1.5, None, None]),
    (pa.array([0.25, None, -2], pa.float16()), [0.25, None, -2]),
    (pa.array([True, None, False]), [1, None, 0]),
    (pa.array([decimal.Decimal("1.25"), None, decimal.Decimal("-3.50")]), [1.25, None, -3.5]),
    (pa.array(["1.5", "NA", " 2 "]), [1.5, None, 2]),
    (pa.array(["1.5", None, "2"]).dictionary_encode(), [1.5, None, 2]),
    (pa.nulls(3), [None, None, None]),
]


@pytest.mark.parametrize(("array", "expected"), DENSE, ids=[str(array.type) for array, _ in DENSE])
def test_every_type_of_number_can_be_dense(tmp_path, array, expected):
    table = pa.table({"y": [0, 1, 0], "x": array, "u": ["a", "b", "c"]})
    schema = Schema("parquet", "y", ("x",), (SparseColumn("u", "text"),), ("y", "x", "u"))
    (rows,) = read_table(tmp_path, table, schema)
    got = [None if math.isnan(v) else v for v in rows.dense[:, 0].tolist()]
    assert got == [None if v is None else float(np.float32(v)) for v in expected]
    assert rows.num_bad == 0


IDS = [
    ("integer", pa.array([1, None, -3], pa.int32()), [1, None, 2**64 - 3]),
    ("integer", pa.array([1, None, 2**64 - 1], pa.uint64()), [1, None, 2**64 - 1]),
    ("integer", pa.array([True, None, False]), [1, None, 0]),
    ("integer", pa.array([5.0, None, math.nan]), [5, None, None]),
    ("integer", pa.array(["12", "", "-1"]), [12, None, 2**64 - 1]),
    ("hex", pa.array(["ff", None, "0A"]), [255, None, 10]),
    ("text", pa.array(["a", None, " b "]), [key("a"), None, key("b")]),
    ("text", pa.array(["a", None, "b"], pa.large_string()), [key("a"), None, key("b")]),
    ("text", pa.array(["a", None, "b"], pa.string_view()), [key("a"), None, key("b")]),
    ("text", pa.array([b"a", None, b"b"], pa.binary()), [key("a"), None, key("b")]),
    ("text", pa.array([b"ab", None, b"cd"], pa.binary(2)), [key("ab"), None, key("cd")]),
    ("text", pa.array(["a", None, "b"]).dictionary_encode(), [key("a"), None, key("b")]),
    ("text", pa.array([WHEN.date(), None, WHEN.date()]), [key("2021-03-04"), None, key("2021-03-04")]),
    ("text", pa.nulls(3), [None, None, None]),
]


@pytest.mark.parametrize(("kind", "array", "expected"), IDS, ids=[f"{kind} {array.type}" for kind, array, _ in IDS])
def test_every_type_can_be_an_id(tmp_path, kind, array, expected):
    (rows,) = read_table(tmp_path, pa.table({"y": [0, 1, 0], "u": array}), one_column("u", kind))
    missing = rows.is_missing[0] if rows.is_missing[0] is not None else np.zeros(3, bool)
    got = [None if m else k for m, k in zip(missing.tolist(), rows.keys[0].tolist(), strict=True)]
    assert got == expected


LISTS = [
    ("integer", pa.array([[1, 2, 3, 4], None, [], [5, None]], pa.list_(pa.int64())), [[2, 3, 4], [], [], [5]]),
    # Without a null: pyarrow before 26 writes no such list with one, or cannot read it.
    ("integer", pa.array([[1, 2], [7, 8], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)), [[1, 2], [7, 8], [3, 4], [5, 6]]),
    ("text", pa.array([["a"], None, [], ["b", " c ", ""]], pa.large_list(pa.string())),
     [[key("a")], [], [], [key("b"), key("c")]]),
    ("text", pa.array(["a|b", None, "", "c"]), [[key("a"), key("b")], [], [], [key("c")]]),
    ("integer", pa.array([7, None, 8, 9], pa.int64()), [[7], [], [8], [9]]),
]


@pytest.mark.parametrize(("kind", "array", "expected"), LISTS, ids=[f"{kind} {array.type}" for kind, array, _ in LISTS])
def test_lists_of_every_kind_are_read(tmp_path, kind, array, expected):
    schema = one_column("g", kind, is_list=True, max_ids=3)
    (rows,) = read_table(tmp_path, pa.table({"y": [0, 1, 0, 1], "g": array}), schema)
    assert rows.lengths[0].tolist() == [len(ids) for ids in expected]
    assert rows.keys[0].tolist() == [k for ids in expected for k in ids]
    assert rows.num_cut == (4 in [len(v or []) for v in array.to_pylist() if isinstance(v, list)])


def test_long_lists_are_read_in_slices_and_come_out_the_same(tmp_path):
    cells = ["|".join(f"w{(i * j) % 50}" for j in range(i % 60)) for i in range(20_000)]
    schema = one_column("g", is_list=True, max_ids=40)
    assert pa.array(cells).nbytes > 1 << 21
    (rows,) = read_table(tmp_path, pa.table({"y": [0, 1] * 10_000, "g": cells}), schema, chunk_bytes=1 << 30)
    expected = [[w for w in cell.split("|") if w][-40:] for cell in cells]
    known = {w: key(w) for w in {w for words in expected for w in words}}
    assert rows.lengths[0].tolist() == [len(words) for words in expected]
    assert rows.keys[0].tolist() == [known[w] for words in expected for w in words]
    assert rows.num_cut == sum(cell.count("|") >= 40 for cell in cells)


@pytest.mark.parametrize(("array", "kind", "why"), [
    (pa.array([1.5, 1.0]), "integer", "column 'u': 1.5 is not an integer"),
    (pa.array(["x", "1"]), "integer", "column 'u': 'x' is not an integer"),
    (pa.array(["x", "1"]), "hex", "column 'u': 'x' is not a hexadecimal number"),
])
def test_a_bad_cell_makes_a_bad_row(tmp_path, array, kind, why):
    (rows,) = read_table(tmp_path, pa.table({"y": [0, 1], "u": array}), one_column("u", kind))
    assert [(bad.line, bad.why) for bad in rows.bad] == [(0, why)]
    assert (rows.label.tolist(), rows.keys[0].tolist(), rows.num_bad) == ([1], [1], 1)


def test_labels_are_checked(tmp_path):
    table = pa.table({"y": [0.0, 1.0, 2.0, None, math.nan], "u": list("abcde")})
    (rows,) = read_table(tmp_path, table, one_column("u"))
    assert rows.label.tolist() == [0, 1]
    assert [bad.line for bad in rows.bad] == [2, 3, 4]
    (rows,) = read_table(tmp_path, pa.table({"y": [True, False], "u": list("ab")}), one_column("u"))
    assert rows.label.tolist() == [1, 0]


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("segment_bytes", [1, 40_000, 1 << 30])
def test_each_row_comes_once_whatever_the_size_of_the_pieces(tmp_path, segment_bytes, is_remote):
    draw = np.random.default_rng(5)
    items, count = draw.integers(0, 1 << 40, 25_000), 25_000
    table = pa.table({"y": items % 2, "item": items, "unused": [f"{i:>200}" for i in range(count)]})
    portions = read_table(tmp_path, table, one_column("item", "integer"), segment_bytes=segment_bytes,
                          chunk_bytes=40_000, row_group_size=4_000, is_remote=is_remote)
    assert np.concatenate([rows.keys[0] for rows in portions]).tolist() == items.tolist()
    assert np.concatenate([rows.positions for rows in portions]).tolist() == list(range(count))
    assert max(len(rows) for rows in portions) < 4_000


def test_of_a_remote_file_only_the_needed_columns_are_fetched(tmp_path):
    draw = np.random.default_rng(5)
    unused = draw.bytes(3_000_000).hex(" ", 300).split()
    table = pa.table({"y": [0, 1] * 5_000, "item": range(10_000), "unused": unused})
    RemoteInputs.asked.clear()
    read_table(tmp_path, table, one_column("item", "integer"), is_remote=True)
    assert sum(RemoteInputs.asked) < 500_000 < (tmp_path / "data.parquet").stat().st_size


def test_what_nvtabular_writes_is_read_as_it_is(tmp_path):
    """Its files are part_0.parquet, …: int64 ids, lists of them, float32 dense, an int8 label, and marks beside."""
    for part in range(2):
        table = pa.table({
            "C1": pa.array([1, 2, 3], pa.int64()), "C2": pa.array([[1, 2], [], [3]], pa.list_(pa.int64())),
            "I1": pa.array([0.5, 1.5, 2.5], pa.float32()), "label": pa.array([0, 1, part], pa.int8()),
        })
        pq.write_table(table, tmp_path / f"part_{part}.parquet")
    for name in ("_metadata", "_file_list.txt", "_metadata.json"):
        (tmp_path / name).write_text("no data")
    inputs = Inputs(str(tmp_path))
    files = inputs.find(".")
    assert [file.name for file in files] == ["part_0.parquet", "part_1.parquet"]
    schema = Schema("parquet", "label", ("I1",), (SparseColumn("C1", "integer"), SparseColumn(
        "C2", "integer", is_list=True, max_ids=4)), ("C1", "C2", "I1", "label"))
    reader = ParquetReader(schema, PrepareSpec(), inputs)
    portions = [rows for file in files for s in reader.segments(file, 1) for rows in reader.read(s, 1 << 20)]
    assert [rows.label.tolist() for rows in portions] == [[0, 1, 0], [0, 1, 1]]
    assert [rows.keys[1].tolist() for rows in portions] == [[1, 2, 3]] * 2
    assert [rows.lengths[1].tolist() for rows in portions] == [[2, 0, 1]] * 2


@pytest.mark.parametrize("break_it", [lambda b: b[: len(b) // 2], lambda b: b"PAR1 is not all",
                                      lambda b: b[:4] + b"\xaa" * 400 + b[404:],
                                      lambda b: b.replace(b"\x19\x18\x01u", b"\x19\x18\x01\x80")],
                         ids=["cut short", "not one", "damaged", "a column's name in its chunk is no text"])
def test_a_broken_file_is_named(tmp_path, break_it):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"y": [0, 1] * 500, "u": range(1_000)}), path)
    path.write_bytes(break_it(path.read_bytes()))
    inputs = Inputs(str(tmp_path))
    reader = ParquetReader(one_column("u", "integer"), PrepareSpec(), inputs)
    with pytest.raises(DataError, match=r"^data.parquet: is not a Parquet file that can be read"):
        [list(reader.read(s, 1 << 20)) for s in reader.segments(inputs.find("data.parquet")[0], 1)]


def test_a_file_with_other_columns_or_types_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"data.parquet: has no column 'user'") as caught:
        read_table(tmp_path, pa.table({"y": [0], "usr": [1]}), one_column("user", "integer"))
    assert "did you mean 'usr'" in caught.value.fix
    nested = pa.array([[[1]]], pa.list_(pa.list_(pa.int64())))
    with pytest.raises(DataError, match=r"data.parquet: column 'g' holds list<.*lists of lists are not read"):
        read_table(tmp_path, pa.table({"y": [0], "g": nested}), one_column("g", "integer", is_list=True))
    with pytest.raises(DataError, match=r"data.parquet: column 'g' holds struct<.*not an integer"):
        read_table(tmp_path, pa.table({"y": [0], "g": [{"a": 1}]}), one_column("g", "integer"))


def test_a_file_without_rows_gives_none(tmp_path):
    assert sum(map(len, read_table(tmp_path, pa.table({"y": pa.array([], pa.int8()), "u": pa.array([], pa.int8())}),
                                   one_column("u", "integer")))) == 0
    assert InputFile("s3://bucket/a/b.parquet", 1).name == "b.parquet"

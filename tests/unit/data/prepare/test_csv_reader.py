"""Delimited text is read as Python's csv module and plain Python would read it, however it is cut."""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.data.prepare import text_stream
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.readers import CsvReader
from embark.data.prepare.text_stream import RowBlock, UnterminatedRow, head, split_rows
from embark.errors import DataError
from embark.features.arrow.cells import hash_bytes
from embark.features.rows import RawRows
from embark.features.schema import Schema, SparseColumn
from embark.spec.data import PrepareSpec

SPARSE = (
    SparseColumn("user", "text"), SparseColumn("tags", "text", is_list=True, max_ids=3),
    SparseColumn("item", "integer"), SparseColumn("code", "hex"),
)
COLUMNS = ("label", "price", "user", "tags", "item", "code")
HEADER = ",".join(COLUMNS).encode() + b"\n"


def schema_of(**changes) -> Schema:
    values = {"format": "csv", "label": "label", "dense": ("price",), "sparse": SPARSE, "columns": COLUMNS,
              "delimiter": ",", "has_header": True}
    return Schema(**{**values, **changes})


def reader_in(folder: Path, schema: Schema | None = None, **prepare) -> CsvReader:
    return CsvReader(schema or schema_of(), PrepareSpec(**prepare), Inputs(str(folder)))


def read_all(folder: Path, text: bytes, schema: Schema | None = None, *, segment_bytes: int = 1 << 20,
             chunk_bytes: int = 1 << 20, name: str = "data.csv", **prepare) -> list[RawRows]:
    """All portions; the lines are counted from the start of the file."""
    (folder / name).write_bytes(text)
    reader = reader_in(folder, schema, **prepare)
    file = Inputs(str(folder)).find(name)[0]
    portions, first_line = [], 0
    for segment in reader.segments(file, segment_bytes):
        line = first_line
        for rows in reader.read(segment, chunk_bytes):
            portions.append((rows, first_line))
            line += rows.num_lines
        first_line = line
    return [with_lines(rows, shift) for rows, shift in portions]


def with_lines(rows: RawRows, shift: int) -> RawRows:
    from dataclasses import replace

    return replace(rows, bad=tuple(replace(bad, line=bad.line + shift) for bad in rows.bad))


def flat(portions: list[RawRows]) -> list[tuple]:
    """Each row as plain values."""
    out = []
    for rows in portions:
        starts = [None if n is None else np.concatenate([[0], np.cumsum(n)]) for n in rows.lengths]
        for i in range(len(rows)):
            cells: list = []
            for c, keys in enumerate(rows.keys):
                if starts[c] is not None:
                    cells.append(tuple(keys[starts[c][i] : starts[c][i + 1]].tolist()))
                else:
                    missing = rows.is_missing[c]
                    cells.append(None if missing is not None and missing[i] else int(keys[i]))
            dense = tuple(None if math.isnan(v) else v for v in rows.dense[i].tolist())
            out.append((int(rows.positions[i]), float(rows.label[i]), dense, *cells))
    return out


def key(text: str) -> int:
    import pyarrow as pa

    return int(hash_bytes(pa.array([text.encode()], pa.binary()))[0])


def test_every_kind_of_cell_is_read(tmp_path):
    text = HEADER + (
        b'1,2.5,"Doe, ""J""",a| b |c|d,-5,ff\r\n'
        b"0,NA, bob ,,7,\n"
        b'1.0,-1e3,"two\nlines",x,9223372036854775807,0xABCDEF0123456789\n'
        b"\n"
        b"true,+4,,|y|,18446744073709551615,0"
    )
    portions = read_all(tmp_path, text)
    assert flat(portions) == [
        (text.index(b"1,2.5"), 1.0, (2.5,), key('Doe, "J"'), (key("b"), key("c"), key("d")), 2**64 - 5, 0xFF),
        (text.index(b"0,NA"), 0.0, (None,), key("bob"), (), 7, None),
        (text.index(b"1.0,-1e3"), 1.0, (-1000.0,), key("two\nlines"), (key("x"),), 2**63 - 1, 0xABCDEF0123456789),
        (text.index(b"true"), 1.0, (4.0,), None, (key("y"),), 2**64 - 1, 0),
    ]
    assert sum(rows.num_lines for rows in portions) == 7
    assert sum(rows.num_cut for rows in portions) == 1
    assert sum(rows.num_bad for rows in portions) == 0


BAD = [
    (b"2,1,u,t,1,1", "column 'label': '2' is neither 0 nor 1"),
    (b"x,1,u,t,1,1", "column 'label': 'x' is neither 0 nor 1"),
    (b",1,u,t,1,1", "column 'label' is empty; the label must be 0 or 1"),
    (b"1,abc,u,t,1,1", "column 'price': 'abc' is not a number"),
    (b"1,inf,u,t,1,1", "column 'price': 'inf' is not a number"),
    (b"1,1e99,u,t,1,1", "column 'price': '1e99' is not a number"),
    (b"1,1_000,u,t,1,1", "column 'price': '1_000' is not a number"),
    (b"1,1,u,t,1.5,1", "column 'item': '1.5' is not an integer"),
    (b"1,1,u,t,99999999999999999999,1", "column 'item': '99999999999999999999' is not an integer"),
    (b"1,1,u,t,1,xyz", "column 'code': 'xyz' is not a hexadecimal number"),
    (b"1,1,u,t,1,00000000000000001", "column 'code': '00000000000000001' is not a hexadecimal number"),
    (b"1,1,u,t,1", "its fields are 5 instead of 6"),
    (b"1,1,u,t,1,1,1", "its fields are 7 instead of 6"),
    (b"\xff\xfe\x00\x81 rubbish", "its fields are 1 instead of 6"),
    (b"\xff,1,u,t,1,1", "column 'label': '\ufffd' is neither 0 nor 1"),
]


@pytest.mark.parametrize(("row", "why"), BAD, ids=[why for _, why in BAD])
def test_a_bad_row_is_left_out_and_reported_with_its_line(tmp_path, row: bytes, why: str):
    good = b'0,1,"a\nb",t,1,1\n'
    portions = read_all(tmp_path, HEADER + good + row + b"\n" + good)
    assert len(flat(portions)) == 2
    assert [(bad.line, bad.why.startswith(why)) for rows in portions for bad in rows.bad] == [(3, True)]
    assert sum(rows.num_bad for rows in portions) == 1


def test_all_the_bad_rows_are_counted_and_some_quoted(tmp_path):
    rows = [b"2,1,u,t,1,1\n", b"1,1\n"] * 50
    (portion,) = read_all(tmp_path, HEADER + b"".join(rows))
    assert (len(portion), portion.num_bad, len(portion.bad)) == (0, 100, 20)
    assert [bad.line for bad in portion.bad] == list(range(1, 21))
    assert portion.num_lines == 101


def test_a_label_can_be_what_is_above_a_threshold(tmp_path):
    text = HEADER + b"3,1,u,t,1,1\n3.5,1,u,t,1,1\nmany,1,u,t,1,1\n,1,u,t,1,1\n5,1,u,t,1,1\n"
    (portion,) = read_all(tmp_path, text, label_above=3.0)
    assert portion.label.tolist() == [0, 1, 1]
    assert [bad.why for bad in portion.bad] == ["column 'label': 'many' is not a number; the label must be a number",
                                               "column 'label' is empty; the label must be a number"]


def test_what_is_missing_is_for_the_spec_to_say(tmp_path):
    text = HEADER + b"1,?,?,?|a,?,?\n"
    (portion,) = read_all(tmp_path, text, missing=("?",))
    assert flat([portion]) == [(len(HEADER), 1.0, (None,), None, (key("a"),), None, None)]


SIZES = [(1, 1 << 20), (300, 7), (1_000, 1 << 20), (1 << 20, 1)]


@pytest.mark.parametrize(("style", "newline"), [
    ("quotes", b"\n"), ("quotes", b"\r\n"), ("plain", b"\n"), ("stray quotes", b"\r\n")])
def test_however_it_is_cut_each_row_comes_once_and_in_order(tmp_path, style: str, newline: bytes):
    text = random_text(style, newline)
    complete = read_all(tmp_path, text)
    assert len(flat(complete)) > 50
    for segment_bytes, chunk_bytes in SIZES:
        portions = read_all(tmp_path, text, segment_bytes=segment_bytes, chunk_bytes=chunk_bytes)
        assert flat(portions) == flat(complete)
        assert [b for rows in portions for b in rows.bad] == [b for rows in complete for b in rows.bad]
        assert sum(rows.num_lines for rows in portions) == sum(rows.num_lines for rows in complete)
    assert len(reader_in(tmp_path).segments(Inputs(str(tmp_path)).find("data.csv")[0], 500)) >= 5


def random_text(style: str, newline: bytes) -> bytes:
    draw = random.Random(7)
    rows = [HEADER.strip()]
    for i in range(80):
        user = f"user {draw.randrange(30)}"
        if style == "quotes" and i % 3 == 0:
            user = f'"{user}, ""the{draw.choice([" ", newline.decode(), newline.decode() * 3])}{i}"""'
        if style == "stray quotes":
            user = draw.choice([user, f'5"{i}', f'{i}"', f'"{user}" the {i}"', f'"{user}{newline.decode()},{i}"'])
        row = f"{i % 2},{draw.random():.3f},{user},a|b{i % 5},{draw.randrange(-99, 99)},{draw.randrange(1 << 32):x}"
        rows.append(row.encode())
        if i % 40 == 0:
            rows += [b"", b"not,a,row"]
    return newline.join(rows) + (newline if style == "plain" else b"")


FIELD = st.text(st.sampled_from('ab,"\n\r| é;\t'), max_size=6)


@settings(max_examples=60)
@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=12), st.sampled_from(["\n", "\r\n"]),
       st.sampled_from([",", ";", "\t"]), st.integers(1, 60), st.booleans())
def test_what_pythons_csv_writes_is_read_back(tmp_path_factory, fields, newline, delimiter, size, quotes_all):
    written = io.StringIO()
    # Left to itself it writes a \r without quotes, and does not read it back either.
    quoting = csv.QUOTE_ALL if quotes_all or any("\r" in cell for row in fields for cell in row) else csv.QUOTE_MINIMAL
    csv.writer(written, lineterminator=newline, delimiter=delimiter, quoting=quoting).writerows(
        [1, *row] for row in fields)
    schema = Schema("csv", "y", (), (SparseColumn("a", "text"), SparseColumn("b", "text")), ("y", "a", "b"),
                    delimiter=delimiter)
    folder = tmp_path_factory.mktemp("csv")
    text = written.getvalue().encode()
    portions = read_all(folder, text, schema, segment_bytes=size, chunk_bytes=size, missing=("",))
    # Spaces around a cell are no part of it.
    expected = [tuple(key(cell.strip(" \n\r\t")) if cell.strip(" \n\r\t") else None for cell in row) for row in fields]
    assert [row[3:] for row in flat(portions)] == expected
    assert sum(rows.num_bad for rows in portions) == 0


@settings(max_examples=120)
@given(st.binary(max_size=60).map(lambda b: bytes(b'a,"\n\r x'[c % 7] for c in b)), st.integers(1, 60))
def test_rubbish_is_cut_into_the_same_rows_whatever_the_pieces(text: bytes, size: int):
    complete = list(split_rows(iter([text]), b",", max_row_bytes=20))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    cut = list(split_rows(iter(pieces), b",", max_row_bytes=20))
    assert rows_of(cut) == rows_of(complete)


def rows_of(cuts: list[RowBlock | UnterminatedRow]) -> list:
    rows: list = []
    for cut in cuts:
        if isinstance(cut, UnterminatedRow):
            rows.append(("runaway", cut.line))
            continue
        ends = [*(cut.starts[1:] - cut.starts[0]).tolist(), len(cut.text)]
        starts = (cut.starts - cut.starts[0]).tolist()
        rows += [(int(line), int(at), cut.text[s:e].replace(b"\r", b"\n")) for line, at, s, e in
                 zip(cut.lines, cut.starts, starts, ends, strict=True)]
    return rows


@settings(max_examples=50)
@given(st.binary(max_size=80).map(lambda b: bytes(b'a1,,"\n\r| '[c % 9] for c in b)), st.integers(1, 90))
def test_no_rubbish_breaks_the_reader_and_no_line_is_lost(tmp_path_factory, text: bytes, size: int):
    schema = Schema("csv", "y", (), (SparseColumn("a", "text"),), ("y", "a"), delimiter=",")
    portions = read_all(tmp_path_factory.mktemp("csv"), text, schema, segment_bytes=size, chunk_bytes=size)
    num_lines = len(text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"))
    ends = text.endswith((b"\n", b"\r"))
    assert sum(rows.num_lines for rows in portions) == (num_lines - 1 if ends or not text else num_lines)


def test_a_quote_that_is_never_closed_costs_one_row(tmp_path, monkeypatch):
    defaults = {**text_stream.split_rows.__kwdefaults__, "max_row_bytes": 1_000}
    monkeypatch.setattr(text_stream.split_rows, "__kwdefaults__", defaults)
    good = b"0,1,u,t,1,1\n"
    text = HEADER + good + b'1,1,"open,t,1,1\n' + good * 300
    for chunk_bytes in (100, 1 << 20):
        portions = read_all(tmp_path, text, chunk_bytes=chunk_bytes, segment_bytes=500)
        assert len(flat(portions)) == 301
        assert [(b.line, b.why[:17]) for rows in portions for b in rows.bad] == [(2, "a quote opens in ")]
    long = read_all(tmp_path, HEADER + good + b"x" * 5_000 + b"\n" + good, chunk_bytes=300)
    assert [(b.line, b.why[:9]) for rows in long for b in rows.bad] == [(2, "it is lon")]
    assert len(flat(long)) == 2


def test_a_byte_order_mark_and_a_missing_last_newline_change_nothing(tmp_path):
    text = HEADER + b"1,2,u,t,3,4\n0,2,u,t,3,4"
    plain, marked = flat(read_all(tmp_path, text)), flat(read_all(tmp_path, b"\xef\xbb\xbf" + text, chunk_bytes=20))
    assert len(plain) == 2
    assert [(row[0] + 3, *row[1:]) for row in plain] == marked


def test_movielens_is_read_with_its_delimiter_of_two_characters(tmp_path):
    schema = Schema("csv", "rating", (), (SparseColumn("user", "integer"), SparseColumn("title", "text"),
                                          SparseColumn("genres", "text", is_list=True, max_ids=8)),
                    ("user", "title", "genres", "rating"), delimiter="::")
    rows = [("1", "Toy Story (1995)", "Animation|Children's|Comedy", "5"),
            ("2", '"Great Performances" Cats: a', "Musical", "2"), ("3", "5\" of: it", "", "4")]
    text = "\n".join("::".join(row) for row in rows).encode("latin-1") + b"\n4::a\n"
    for size in (20, 1_000):
        portions = read_all(tmp_path, text, schema, segment_bytes=size, chunk_bytes=size, name="ml.dat",
                            label_above=3.0)
        assert [(row[1], row[3], row[4], row[5]) for row in flat(portions)] == [
            (float(int(r) > 3), int(u), key(t), tuple(key(g) for g in genres.split("|") if g))
            for u, t, genres, r in rows
        ]
        assert [(b.line, b.why) for p in portions for b in p.bad] == [(3, "its fields are 2 instead of 4")]


def test_gzip_reads_as_the_plain_file_does(tmp_path):
    text = random_text("quotes", b"\n")
    middle = len(text) // 2
    expected = flat(read_all(tmp_path, text))
    for packed in (gzip.compress(text), gzip.compress(text[:middle]) + gzip.compress(text[middle:])):
        assert flat(read_all(tmp_path, packed, name="data.csv.gz", segment_bytes=500, chunk_bytes=700)) == expected
    file = Inputs(str(tmp_path)).find("data.csv.gz")[0]
    assert head(Inputs(str(tmp_path)), file, 50) == text[:50]


@pytest.mark.parametrize(
    "break_it", [lambda b: b[: len(b) // 2], lambda b: b[:-4], lambda b: b[:5_000] + b"\xaa" * 50 + b[5_050:]],
    ids=["half of it", "without its end", "damaged"],
)
def test_a_broken_gzip_is_never_taken_for_a_complete_one(tmp_path, break_it):
    draw = random.Random(3)
    numbers = [draw.randrange(1 << 40) for _ in range(3_000)]
    text = HEADER + b"".join(b"1,%d,u%d,t,1,1\n" % (number, number ^ 12_345) for number in numbers)
    packed = break_it(gzip.compress(text))
    with pytest.raises(DataError, match=r"data.csv.gz: the gzip file is (cut short|damaged).*bytes of text"):
        read_all(tmp_path, packed, name="data.csv.gz", chunk_bytes=4_000)


def test_a_file_that_ends_sooner_than_it_did_is_refused(tmp_path):
    (tmp_path / "data.csv").write_bytes(HEADER + b"1,2,u,t,3,4\n" * 100)
    reader, file = reader_in(tmp_path), Inputs(str(tmp_path)).find("data.csv")[0]
    segments = reader.segments(file, 300)
    (tmp_path / "data.csv").write_bytes(HEADER)
    with pytest.raises(DataError, match=r"data.csv: ends at byte .* when the preparation began"):
        [list(reader.read(segment, 100)) for segment in segments]


def test_each_file_may_have_its_own_order_of_columns(tmp_path):
    first = flat(read_all(tmp_path, HEADER + b"1,2,u,t,3,4\n"))
    turned = flat(read_all(tmp_path, b"code,more,item,tags,user,price,label\n4,?,3,t,u,2,1\n"))
    assert first[0][1:] == turned[0][1:]
    with pytest.raises(DataError, match=r"data.csv: its header has no column 'price'") as caught:
        read_all(tmp_path, b"label,prise,user,tags,item,code\n1,2,u,t,3,4\n")
    assert "did you mean 'prise'" in caught.value.fix


def test_lists_of_numbers_are_read_and_one_bad_number_makes_a_bad_row(tmp_path):
    schema = Schema("csv", "y", (), (SparseColumn("a", "integer", is_list=True, max_ids=9),
                                     SparseColumn("b", "hex", is_list=True, max_ids=2)), ("y", "a", "b"), delimiter=",")
    text = b"1,3;4;5,ff;0a;1\n0,,\n1,3;x,1\n1,-7;NA;8,1;;2\n"
    (portion,) = read_all(tmp_path, text, schema, list_delimiter=";")
    assert [row[3:] for row in flat([portion])] == [
        ((3, 4, 5), (10, 1)), ((), ()), ((2**64 - 7, 8), (1, 2)),
    ]
    assert [(bad.line, bad.why) for bad in portion.bad] == [(2, "column 'a': '3;x' is not an integer")]
    assert portion.num_cut == 1


def test_criteo_rows_read_as_delimited_text_match_its_own_reader(tmp_path):
    from embark.data.prepare.criteo_reader import CriteoReader

    draw = random.Random(11)
    dense, sparse = [f"int_{i}" for i in range(13)], [f"cat_{i}" for i in range(26)]
    lines = []
    for i in range(300):
        integers = [draw.choice(["", str(draw.randrange(-3, 10**draw.randrange(1, 9)))]) for _ in dense]
        ids = [draw.choice(["", f"{draw.randrange(1 << 32):08x}"]) for _ in sparse]
        lines.append("\t".join([str(i % 2), *integers, *ids]))
    lines[7:7] = ["1\t2\t3", "x" + lines[0]]
    schema = Schema("csv", "label", tuple(dense), tuple(SparseColumn(name, "hex") for name in sparse),
                    ("label", *dense, *sparse))
    mine = read_all(tmp_path, "\n".join(lines).encode(), schema, missing=("",))
    inputs = Inputs(str(tmp_path))
    criteo = CriteoReader(schema, inputs)
    theirs = [rows for segment in criteo.segments(inputs.find("data.csv")[0], 1 << 20)
              for rows in criteo.read(segment, 1 << 20)]
    assert len(flat(mine)) == 300
    assert flat(mine) == flat(theirs)
    assert sorted(b.line for p in mine for b in p.bad) == sorted(b.line for p in theirs for b in p.bad) == [7, 8]


@pytest.mark.parametrize("chunk_bytes", [40, 1 << 20])
def test_words_of_another_encoding_are_refused_with_their_place(tmp_path, chunk_bytes):
    schema = Schema("csv", "label", (), (SparseColumn("user", "text"),), ("label", "user", "note"), delimiter=",")
    rows = [f"{i % 2},us\u00e9r{i},n" for i in range(40)]
    assert len(flat(read_all(tmp_path, "\n".join(rows).encode(), schema, chunk_bytes=chunk_bytes))) == 40
    text = "\n".join(rows[:30]).encode() + b"\n1,caf\xe9,n\n" + "\n".join(rows[30:]).encode()
    at = text.index(b"1,caf")
    with pytest.raises(DataError, match=rf"the row at byte {at} has b'caf\\xe9' in column 'user'") as caught:
        read_all(tmp_path, text, schema, chunk_bytes=chunk_bytes)
    assert "iconv -f latin1 -t utf-8" in caught.value.fix
    unused = "\n".join(rows[:30]).encode() + b"\n1,cafe,\xe9\n"
    assert len(flat(read_all(tmp_path, unused, schema, chunk_bytes=chunk_bytes))) == 31

"""Criteo's text gives the numbers that plain Python gives, and says which lines are none."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embark.data.prepare import criteo_reader
from embark.data.prepare.criteo_reader import CriteoReader
from embark.data.prepare.text_stream import MAX_LINE_BYTES
from embark.errors import DataError


class Remote:
    """The same files, but only by ranges of bytes."""

    def __init__(self, inputs):
        self._inputs = inputs

    def find(self, pattern):
        return self._inputs.find(pattern)

    def read(self, uri, start, num_bytes):
        return self._inputs.read(uri, start, min(num_bytes, 50_000))

    def local_path(self, uri):
        return None


def read_all(criteo, inputs, path: Path, segment_bytes=1 << 30, chunk_bytes=1 << 20):
    """(rows as (position, label, integers, ids), bad (line, why) by absolute line, number of lines, number bad)"""
    reader = CriteoReader(criteo.schema(), inputs)
    (file,) = inputs.find(str(path))
    rows, bad, before, num_bad = [], [], 0, 0
    for segment in reader.segments(file, segment_bytes):
        line_in_segment = 0
        for piece in reader.read(segment, chunk_bytes):
            assert len(piece) == len(piece.positions) == len(piece.dense)
            keys = [k.tolist() for k in piece.keys]
            missing = [None if m is None else m.tolist() for m in piece.is_missing]
            for i in range(len(piece)):
                ids = [None if m is not None and m[i] else k[i] for k, m in zip(keys, missing, strict=True)]
                integers = [None if math.isnan(v) else v for v in piece.dense[i].tolist()]
                rows.append((int(piece.positions[i]), int(piece.label[i]), integers, ids))
            bad += [(before + b.line, b.why) for b in piece.bad]
            num_bad += piece.num_bad
            assert sum(piece.reasons.values()) == piece.num_bad
            line_in_segment += piece.num_lines
        before += line_in_segment
    return rows, bad, before, num_bad


def expected(criteo, lines: list[bytes], newline: bytes = b"\n"):
    """What plain Python finds in the lines."""
    rows, bad, position = [], [], 0
    for number, line in enumerate(lines):
        found = criteo.parsed(line)
        if found is None:
            bad.append(number)
        else:
            label, integers, ids = found
            rows.append((position, label, [None if v is None else float(np.float32(v)) for v in integers], ids))
        position += len(line) + len(newline)
    return rows, bad


@pytest.mark.parametrize(("segment_bytes", "chunk_bytes", "slab_bytes"),
                         [(1 << 30, 1 << 20, 1 << 18), (40_000, 1 << 20, 1 << 14), (7_777, 1, 5_000)])
def test_rows_are_what_plain_python_reads_however_the_file_is_cut(
    criteo, inputs, tmp_path, monkeypatch, segment_bytes, chunk_bytes, slab_bytes
):
    monkeypatch.setattr(criteo_reader, "SLAB_BYTES", slab_bytes)
    lines = criteo.lines(1500)
    path = tmp_path / "day_0"
    path.write_bytes(b"\n".join(lines) + b"\n")
    rows, bad, num_lines, _ = read_all(criteo, inputs, path, segment_bytes, chunk_bytes)
    assert rows == expected(criteo, lines)[0]
    assert (bad, num_lines) == ([], 1500)


def test_a_chunk_limit_that_splits_lines_anywhere_loses_none(criteo, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("embark.data.prepare.text_stream.MAX_LINE_BYTES", 1000)
    lines = criteo.lines(400)
    path = tmp_path / "day_0"
    path.write_bytes(b"\n".join(lines))
    for chunk_bytes in (2_000, 2_001, 3_333):
        for source in (inputs, Remote(inputs)):
            rows, bad, num_lines, _ = read_all(criteo, source, path, 10_000, chunk_bytes)
            assert rows == expected(criteo, lines)[0]
            assert (bad, num_lines) == ([], 400)


def test_windows_line_ends_and_no_newline_at_the_end_change_nothing(criteo, inputs, tmp_path):
    lines = criteo.lines(300)
    path = tmp_path / "train.txt"
    path.write_bytes(b"\r\n".join(lines))
    rows, bad, num_lines, _ = read_all(criteo, inputs, path, 9_999)
    assert rows == expected(criteo, lines, b"\r\n")[0]
    assert (bad, num_lines) == ([], 300)


def test_gzip_gives_the_same_rows_and_positions_even_in_several_members(criteo, inputs, tmp_path):
    lines = criteo.lines(900)
    text = b"\n".join(lines) + b"\n"
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(text[:70_001]) + gzip.compress(text[70_001:]))
    for source in (inputs, Remote(inputs)):
        rows, bad, num_lines, _ = read_all(criteo, source, path, 10_000)
        assert rows == expected(criteo, lines)[0]
        assert (bad, num_lines) == ([], 900)


def test_every_kind_of_rubbish_is_counted_and_the_rest_is_read(criteo, inputs, tmp_path):
    lines = criteo.lines(600)
    fields = lines[0].split(b"\t")

    def with_field(place: int, value: bytes) -> bytes:
        return b"\t".join([*fields[:place], value, *fields[place + 1 :]])

    zoo = {
        3: (b"\t".join(fields[:39]), "39 fields instead of 40"),
        10: (lines[10] + b"\tdeadbeef", "41 fields instead of 40"),
        11: (b"", "an empty line"),
        50: (with_field(0, b"2"), "the label is '2', neither 0 nor 1"),
        51: (with_field(0, b""), "the label is '', neither 0 nor 1"),
        77: (with_field(4, b"1.5"), "int_3 is '1.5', not an integer"),
        78: (with_field(5, b"-"), "int_4 is '-', not an integer"),
        79: (with_field(6, b"1" * 19), "int_5 is '1111111111111111111', not an integer"),
        80: (with_field(6, b"+5"), "int_5 is '+5', not an integer"),
        81: (with_field(13, b"12 "), "int_12 is '12 ', not an integer"),
        100: (with_field(14, b"0123456g"), "cat_0 is '0123456g', not 1 to 8 hexadecimal digits"),
        101: (with_field(39, b"123456789"), "cat_25 is '123456789', not 1 to 8 hexadecimal digits"),
        102: (with_field(20, b"0x12"), "cat_6 is '0x12', not 1 to 8 hexadecimal digits"),
        103: (with_field(20, b":;<=>?@`"), "cat_6 is ':;<=>?@`', not 1 to 8 hexadecimal digits"),
        104: (with_field(21, b"\xff\xfe\x80\x00"), "cat_7 is '\\xff\\xfe\\x80\\x00', not 1 to 8 hexadecimal digits"),
        200: (bytes(range(256)).replace(b"\n", b"") * 3, None),
        201: (b"\x00" * 39, "1 field instead of 40"),
        599: (b"\x01".join(fields), "1 field instead of 40"),
    }
    for number, (line, _) in zoo.items():
        lines[number] = line
    path = tmp_path / "day_0"
    path.write_bytes(b"\n".join(lines) + b"\n")
    for segment_bytes in (1 << 30, 5_000):
        rows, bad, num_lines, num_bad = read_all(criteo, inputs, path, segment_bytes)
        assert rows == expected(criteo, lines)[0]
        assert [line for line, _ in bad] == list(zoo)
        assert (num_lines, num_bad) == (600, len(zoo))
        for number, why in bad:
            assert zoo[number][1] in (why, None)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_in_any_place_are_judged_as_plain_python_judges_them(criteo, inputs, tmp_path, data):
    lines = criteo.lines(12, seed=data.draw(st.integers(0, 5)))
    for _ in range(data.draw(st.integers(1, 6))):
        number = data.draw(st.integers(0, 11))
        at = data.draw(st.integers(0, len(lines[number])))
        some = data.draw(st.one_of(
            st.sampled_from([b"\t", b"-", b"0", b"\r", b" ", b"\x00", b"A", b"g", b":", b"/", b"`", b"@", b"G", b"~"]),
            st.binary(max_size=10)))
        rest = lines[number][at + data.draw(st.integers(0, 2)) :]
        lines[number] = (lines[number][:at] + some + rest).replace(b"\n", b"")
    path = tmp_path / "day_0"
    path.write_bytes(b"\n".join(lines) + b"\n")
    try:
        rows, bad, num_lines, num_bad = read_all(criteo, inputs, path)
    except DataError:
        assert all(line.count(b"\t") == 38 for line in lines[:10])
        return
    wanted, unreadable = expected(criteo, lines)
    assert rows == wanted
    assert [line for line, _ in bad] == unreadable
    assert (num_lines, num_bad) == (12, len(unreadable))


def test_a_line_longer_than_a_chunk_is_one_bad_row(criteo, inputs, tmp_path):
    lines = criteo.lines(50)
    lines[20] = b"\x07" * (9 * MAX_LINE_BYTES)
    path = tmp_path / "day_0"
    path.write_bytes(b"\n".join(lines) + b"\n")
    rows, bad, num_lines, num_bad = read_all(criteo, inputs, path, chunk_bytes=2 * MAX_LINE_BYTES)
    assert rows == expected(criteo, lines)[0]
    assert ([line for line, _ in bad], num_lines, num_bad) == ([20], 50, 1)


@pytest.mark.parametrize("keep", [0.2, 0.9999])
def test_a_gzip_file_cut_short_is_refused_with_how_far_it_got(criteo, inputs, tmp_path, keep):
    packed = gzip.compress(b"\n".join(criteo.lines(2000)) + b"\n")
    path = tmp_path / "day_0.gz"
    path.write_bytes(packed[: int(len(packed) * keep)])
    with pytest.raises(DataError, match=r"day_0\.gz: the gzip file is cut short at [\d,]+ of [\d,]+ bytes, after "):
        read_all(criteo, inputs, path)


def test_a_damaged_gzip_file_is_refused(criteo, inputs, tmp_path):
    packed = bytearray(gzip.compress(b"\n".join(criteo.lines(2000)) + b"\n"))
    packed[len(packed) // 2] ^= 0xFF
    packed[len(packed) // 2 + 1] ^= 0xFF
    path = tmp_path / "day_0.gz"
    path.write_bytes(bytes(packed))
    with pytest.raises(DataError, match=r"day_0\.gz: the gzip file is damaged"):
        read_all(criteo, inputs, path)

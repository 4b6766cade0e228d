"""Lines of files that grow, are cut, are replaced, or hold what is no event."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.events.events import parse_event
from embark.report import run_files as reading
from embark.report.run_files import RunFiles, Tail


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def tail(tmp_path: Path) -> Tail:
    return Tail(RunFiles(tmp_path), "events.jsonl")


def test_a_line_is_reported_once_and_only_when_it_is_complete(file: Path, tail: Tail):
    file.write_bytes(b"one\ntw")
    assert tail.look().lines == (b"one",)
    assert tail.look().lines == ()
    with file.open("ab") as more:
        more.write(b"o\nthree\n")
    assert tail.look().lines == (b"two", b"three")


def test_a_file_that_is_not_there_yet_or_any_more_is_no_fault(file: Path, tail: Tail):
    assert tail.look().is_missing
    file.write_bytes(b"one\n")
    assert tail.look().lines == (b"one",)
    file.unlink()
    gone = tail.look()
    assert (gone.is_missing, gone.is_new, gone.lines) == (True, True, ())
    file.write_bytes(b"new\n")
    assert tail.look().lines == (b"new",)


def test_a_file_that_became_shorter_is_read_from_its_start(file: Path, tail: Tail):
    file.write_bytes(b"one\ntwo\nthree\n")
    tail.look()
    file.write_bytes(b"four\n")
    again = tail.look()
    assert (again.is_new, again.lines) == (True, (b"four",))


def test_a_file_that_was_replaced_by_a_longer_one_is_read_from_its_start(file: Path, tail: Tail):
    file.write_bytes(b"one\ntwo\n")
    tail.look()
    file.write_bytes(b"uno\ndue\ntre\nquattro\n")
    again = tail.look()
    assert (again.is_new, again.lines) == (True, (b"uno", b"due", b"tre", b"quattro"))


def test_a_long_file_is_read_a_block_at_a_time(file: Path, tail: Tail, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 100)
    lines = [f"line {i}".encode() for i in range(100)]
    file.write_bytes(b"\n".join(lines) + b"\n")
    found: list[bytes] = []
    num_looks = 0
    while not (read := tail.look()).is_end:
        found += read.lines
        num_looks += 1
    assert found + list(read.lines) == lines
    assert num_looks > 5


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=12), st.data())
def test_however_the_bytes_come_the_same_lines_are_reported(tmp_path_factory, lines, data):
    folder = tmp_path_factory.mktemp("run")
    complete = b"".join(line + b"\n" for line in lines)
    tail, found, at = Tail(RunFiles(folder), "events.jsonl"), [], 0
    with (folder / "events.jsonl").open("ab", buffering=0) as file:
        while at < len(complete):
            piece = complete[at : at + data.draw(st.integers(1, 40))]
            file.write(piece)
            at += len(piece)
            found += tail.look().lines
    assert found == lines


@pytest.mark.parametrize("line", [
    b"", b"{", b"null", b"[]", b"[1]", b'"event"', b"{}", b'{"event": "step"}', b'{"event": 3, "time_s": 1}',
    b'{"event": "step", "time_s": "soon"}', b'{"event": "step", "time_s": NaN}', b'{"event": "step", "time_s": null}',
    b'{"event": "step", "time_s": 1e999}', b"\xff\xfe\x00junk", b"[" * 100_000, b'{"a":' * 100_000,
    b'{"event": "step", "time_s": ' + b"9" * 5000 + b"}", b'{"event": "step", "time_s": 1, "step": 2',
])
def test_what_is_no_event_is_none(line: bytes):
    assert parse_event(line) is None


def test_an_event_without_a_rank_or_with_a_nan_is_one():
    event = parse_event(b'{"event": "step", "time_s": 5, "loss": NaN, "step": 3}')
    assert event is not None
    assert (event.kind, event.time_s, event.rank, event.values["step"]) == ("step", 5.0, 0, 3)

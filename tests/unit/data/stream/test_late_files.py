"""Files that appear late, grow, change or vanish: their rows are trained once, or the files are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from embark.data.stream import files_reader
from embark.data.stream.files_reader import FilesReader
from embark.errors import DataError


def line(number: int) -> bytes:
    return json.dumps({"n": number}).encode() + b"\n"


def lines(*numbers: int) -> bytes:
    return b"".join(map(line, numbers))


class Followed:
    """Reads a folder; `restart` goes on from the offset of some record, as from a checkpoint."""

    def __init__(self, folder: Path, mode: str = "read") -> None:
        self.folder, self.mode, self.offsets, self.reports = folder, mode, [], []
        folder.mkdir(exist_ok=True)
        self.restart()

    def restart(self, behind: int = -1) -> None:
        self.reader = FilesReader(str(self.folder), self.mode)
        del self.offsets[behind + 1 or len(self.offsets) :]
        self.reader.open({"": json.loads(json.dumps(self.offsets[-1]))} if self.offsets else {})

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def read(self) -> list[int]:
        found = []
        while messages := self.reader.poll("", 1.0):
            self.offsets += [message.offset for message in messages]
            self.reports += [(message.file, message.why) for message in messages if message.why]
            found += [json.loads(message.value)["n"] for message in messages if not message.why]
        return found


def test_a_file_with_an_earlier_name_and_added_rows_are_read(tmp_path):
    followed = Followed(tmp_path)
    followed.write("b.jsonl", lines(1, 2))
    followed.write("d.jsonl", lines(3))
    assert followed.read() == [1, 2, 3]
    followed.write("a.jsonl", lines(4))
    followed.write("c.csv", b"n\n")
    assert followed.read() == [4]
    followed.restart()
    assert followed.read() == []
    followed.write("b.jsonl", lines(1, 2, 5, 6))
    followed.write("e.jsonl", lines(7))
    assert followed.read() == [5, 6, 7]
    followed.write("e.jsonl", lines(7, 8))
    followed.restart()
    assert followed.read() == [8]
    assert followed.reports == []


@pytest.mark.parametrize("behind", range(6))
def test_a_resumed_reader_gives_each_row_once_behind_any_of_them(tmp_path, behind):
    followed = Followed(tmp_path)
    followed.write("b.jsonl", lines(0, 1, 2))
    assert followed.read() == [0, 1, 2]
    followed.write("a.jsonl", lines(3, 4))
    followed.write("b.jsonl", lines(0, 1, 2, 5))
    assert followed.read() == [3, 4, 5]
    followed.restart(behind)
    assert sorted(followed.read()) == list(range(behind + 1, 6))


def test_files_that_come_late_or_grow_are_named_once_if_not_read(tmp_path):
    followed = Followed(tmp_path, "report")
    followed.write("b.jsonl", lines(1, 2))
    assert followed.read() == [1, 2]
    followed.write("a.jsonl", lines(3))
    followed.write("b.jsonl", lines(1, 2, 4))
    followed.write("c.jsonl", lines(5))
    assert followed.read() == [5]
    followed.restart()
    assert followed.read() == []
    assert followed.reports == [("a.jsonl", "the file appeared after one with a later name was read"),
                                ("b.jsonl", "the file grew or changed after it was read")]
    followed.write("a.jsonl", lines(3, 6))
    assert followed.read() == []
    assert len(followed.reports) == 3


def test_a_file_rewritten_with_other_rows_is_named_and_not_read(tmp_path):
    followed = Followed(tmp_path)
    followed.write("a.jsonl", lines(1, 2))
    assert followed.read() == [1, 2]
    followed.write("a.jsonl", lines(9, 2, 3))
    assert followed.read() == []
    assert followed.reports == [("a.jsonl", "the file was rewritten after it was read")]
    followed.write("a.jsonl", lines(9, 2, 3, 4))
    assert followed.read() == [4]


@pytest.mark.parametrize("mode", ["read", "report"])
def test_a_file_that_was_not_complete_is_named_and_read_when_it_is(tmp_path, mode):
    followed, whole = Followed(tmp_path, mode), gzip.compress(lines(1, 2), mtime=0)
    followed.write("a.jsonl.gz", whole[:-9])
    followed.write("b.jsonl", lines(3))
    assert followed.read() == [3]
    [(name, why)] = followed.reports
    assert name == "a.jsonl.gz"
    assert why.startswith("the file cannot be read: Compressed file ended before the end-of-stream marker")
    followed.restart()
    assert followed.read() == []
    followed.write("a.jsonl.gz", whole)
    assert followed.read() == [1, 2]


def test_a_line_that_is_not_complete_is_read_when_it_is(tmp_path):
    followed = Followed(tmp_path)
    for name, head, tail in (("a.jsonl", lines(1) + b'{"n": ', b"2}\n"), ("b.jsonl", line(3), line(4).rstrip()),
                             ("c.jsonl", line(5).rstrip(), b"\n" + line(6))):
        followed.write(name, head)
        followed.read()
        followed.write(name, head + tail)
    assert followed.reports == [("a.jsonl", "the file ends within a record")]
    followed = Followed(tmp_path)
    assert followed.read() == [1, 2, 3, 4, 5, 6]
    assert followed.reports == []


def test_a_file_that_vanishes_or_is_read_and_deleted_stops_nothing(tmp_path):
    followed = Followed(tmp_path)
    (tmp_path / "a.jsonl").symlink_to("nowhere")  # listed, and not there when it is read
    followed.write("b.jsonl", lines(1))
    assert followed.read() == [1]
    assert followed.reports == [("a.jsonl", "the file vanished, or may not be read")]
    (tmp_path / "b.jsonl").unlink()
    followed.restart()
    assert followed.read() == []
    (tmp_path / "a.jsonl").unlink()
    followed.write("a.jsonl", lines(2))
    assert followed.read() == [2]
    assert len(followed.reports) == 1


def test_the_rest_of_a_file_that_is_lost_or_rewritten_is_missed(tmp_path):
    followed = Followed(tmp_path)
    followed.write("a.jsonl", lines(1, 2, 3))
    assert followed.read() == [1, 2, 3]
    followed.write("a.jsonl", lines(1, 2, 4, 5))
    with pytest.raises(DataError, match=r"a\.jsonl: was rewritten since the run's checkpoint"):
        followed.restart(behind=1)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="put the file back") as caught:
        followed.restart()
    assert "a.jsonl" in caught.value.what


def test_what_is_known_of_files_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(files_reader, "MAX_KNOWN", 3)
    followed = Followed(tmp_path)
    for number in range(6):
        followed.write(f"{number}.jsonl", lines(number))
    assert followed.read() == list(range(6))
    assert sorted(followed.offsets[-1][3]) == ["3.jsonl", "4.jsonl", "5.jsonl"]
    followed.write("4a.jsonl", lines(7))
    followed.restart()
    assert followed.read() == [7]

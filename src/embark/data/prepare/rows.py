"""Rows between a reader and the prepared format, and those that could not be read: counted by reason, the first quoted
with their lines, too many of them refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from embark.errors import DataError
from embark.features.rows import MAX_QUOTED, BadRow, RawRows
from embark.values import JsonDict, frozen
from .inputs import InputFile

_VALUE = re.compile(r"b?'(?:[^'\\]|\\.)*'…?|b?\"(?:[^\"\\]|\\.)*\"…?")
_MAX_EXAMPLES = 5
_MIN_BAD_TO_GIVE_UP = 10_000


@frozen
class Segment:
    """A piece of one file that is prepared on its own: the unit of work, and of resuming after an interruption."""

    file: InputFile
    index: int  # Among the segments of the file.
    start: int  # First byte of text, or first row group of Parquet.
    stop: int  # First that belongs to the next segment.


class Reader(Protocol):
    """Reads one format."""

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Cut a file into pieces of about that size that can be read on their own."""

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """Yield the segment's rows in order, in portions of about `chunk_bytes` of input."""


def reason_of(why: str) -> str:
    """Remove the value from a reason, so that rows with the same fault count as one reason."""
    return re.sub(r"\s+", " ", _VALUE.sub("…", why))


@dataclass(slots=True)
class SegmentCounts:
    """Counts the rows of one segment, read and left out."""

    num_lines: int = 0
    num_rows: int = 0
    num_cut: int = 0
    bad: list[BadRow] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, rows: RawRows) -> None:
        """Count a portion."""
        self.num_lines += rows.num_lines
        self.num_rows += len(rows)
        self.num_cut += rows.num_cut
        self.bad += rows.bad[: MAX_QUOTED - len(self.bad)]
        self.reasons.update(rows.reasons)

    def to_json(self) -> JsonDict:
        return {"lines": self.num_lines, "rows": self.num_rows, "bad": self.reasons.total(), "cut": self.num_cut,
                "examples": [[bad.line, bad.why] for bad in self.bad], "reasons": dict(sorted(self.reasons.items()))}


@frozen
class BadRows:
    """The rows of all files that were left out."""

    num_rows: int
    num_bad: int
    num_cut: int
    files: dict[str, dict[str, int]]  # Number of bad rows, by file and reason.
    examples: tuple[tuple[str, int, str], ...]  # File, line counted from 1, reason.

    @property
    def share(self) -> float:
        return self.num_bad / max(1, self.num_rows + self.num_bad)

    @staticmethod
    def collect(files: Sequence[InputFile], records: Sequence[Sequence[JsonDict]]) -> BadRows:
        """Collect the records of each file's segments, in order: their lines become lines of the file."""
        examples: list[tuple[str, int, str]] = []
        by_file: dict[str, dict[str, int]] = {}
        for file, segments in zip(files, records, strict=True):
            before = 0
            reasons: Counter[str] = Counter()
            for record in segments:
                found = [(file.uri, before + line + 1, why) for line, why in record["examples"]]
                examples += found[: MAX_QUOTED - len(examples)]
                reasons.update(record["reasons"])
                before += record["lines"]
            if reasons:
                by_file[file.uri] = dict(reasons.most_common())
        every = [record for segments in records for record in segments]
        num_rows, num_bad, num_cut = (sum(record[name] for record in every) for name in ("rows", "bad", "cut"))
        return BadRows(num_rows, num_bad, num_cut, by_file, tuple(examples))

    def to_json(self) -> JsonDict:
        """Return the entry of the manifest."""
        examples = [{"file": file, "line": line, "why": why} for file, line, why in self.examples]
        return {"num": self.num_bad, "share": self.share, "num_lists_cut": self.num_cut, "files": self.files,
                "examples": examples}

    def check(self, max_share: float) -> None:
        """Refuse input that lost more rows than the spec allows."""
        if self.share > max_share:
            examples = "".join(f"\n  {file}, line {line:,}: {why}" for file, line, why in self.examples[:_MAX_EXAMPLES])
            enough = min(1.0, -(-self.share * 1000 // 1) / 1000)
            raise DataError(
                f"{self.num_bad:,} of {self.num_rows + self.num_bad:,} rows cannot be read ({self.share:.2%}), more "
                f"than data.prepare.max_bad_share = {max_share:g} allows. The first:{examples}",
                "fix the input, or what [data.prepare] says of it; if these rows may be lost, set "
                    f"data.prepare.max_bad_share = {enough:g}"
            )


def should_give_up(num_rows: int, num_bad: int, max_share: float) -> bool:
    """Return whether so many rows are bad that reading on is useless: the input is something else."""
    return num_bad >= _MIN_BAD_TO_GIVE_UP and num_bad > max(0.5, max_share) * (num_rows + num_bad)

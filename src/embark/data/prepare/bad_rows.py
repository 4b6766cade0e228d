"""Rows that could not be read: counted by reason, the first told with their lines, too many of them refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from embark.data.prepare.pieces import MAX_TOLD, BadRow, InputFile, RawRows
from embark.errors import DataError

_VALUE = re.compile(r"b?'(?:[^'\\]|\\.)*'…?|b?\"(?:[^\"\\]|\\.)*\"…?")
_EXAMPLES = 5
_UNTOLD = "not told one by one"
_HOPELESS = 0.5
_ENOUGH = 10_000


def reason_of(why: str) -> str:
    """Without the value that was met, so that rows with the same fault count as one reason."""
    return re.sub(r"\s+", " ", _VALUE.sub("…", why))


@dataclass(slots=True)
class SegmentTally:
    """Of one segment."""

    num_lines: int = 0
    num_rows: int = 0
    num_bad: int = 0
    num_cut: int = 0
    told: list[BadRow] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, rows: RawRows) -> None:
        """Count a portion."""
        self.num_lines += rows.num_lines
        self.num_rows += len(rows)
        self.num_bad += rows.num_bad
        self.num_cut += rows.num_cut
        self.told += rows.bad[: MAX_TOLD - len(self.told)]
        reasons = Counter(rows.reasons) or Counter(reason_of(bad.why) for bad in rows.bad)
        if (untold := rows.num_bad - reasons.total()) > 0:
            reasons[_UNTOLD] = untold
        self.reasons += reasons

    def to_json(self) -> dict[str, Any]:
        return {"lines": self.num_lines, "rows": self.num_rows, "bad": self.num_bad, "cut": self.num_cut,
                "told": [[bad.line, bad.why] for bad in self.told], "reasons": dict(sorted(self.reasons.items()))}


@dataclass(frozen=True, slots=True)
class BadRows:
    """Of all files."""

    num_rows: int
    num_bad: int
    num_cut: int
    files: dict[str, dict[str, int]]
    """By file and reason."""
    told: tuple[tuple[str, int, str], ...]
    """File, line from 1 on, why."""

    @property
    def share(self) -> float:
        return self.num_bad / max(1, self.num_rows + self.num_bad)

    def to_json(self) -> dict[str, Any]:
        """As the manifest holds it."""
        told = [{"file": file, "line": line, "why": why} for file, line, why in self.told]
        return {"num": self.num_bad, "share": self.share, "num_lists_cut": self.num_cut, "files": self.files,
                "told": told}


def gather(files: Sequence[InputFile], records: Sequence[Sequence[dict[str, Any]]]) -> BadRows:
    """From the records of each file's segments, in order: lines become those of the file."""
    told: list[tuple[str, int, str]] = []
    by_file: dict[str, dict[str, int]] = {}
    for file, segments in zip(files, records, strict=True):
        before = 0
        reasons: Counter[str] = Counter()
        for record in segments:
            told += [(file.uri, before + line + 1, why) for line, why in record["told"]][: MAX_TOLD - len(told)]
            reasons.update(record["reasons"])
            before += record["lines"]
        if reasons:
            by_file[file.uri] = dict(reasons.most_common())
    every = [record for segments in records for record in segments]
    num_rows, num_bad, num_cut = (sum(record[name] for record in every) for name in ("rows", "bad", "cut"))
    return BadRows(num_rows, num_bad, num_cut, by_file, tuple(told))


def refuse_too_many(bad: BadRows, max_share: float) -> None:
    """Nothing is taken for whole that lost more rows than the spec allows."""
    if bad.share > max_share:
        examples = "".join(f"\n  {file}, line {line:,}: {why}" for file, line, why in bad.told[:_EXAMPLES])
        raise DataError(
            f"{bad.num_bad:,} of {bad.num_rows + bad.num_bad:,} rows cannot be read ({bad.share:.2%}), more than "
            f"data.prepare.max_bad_share = {max_share:g} allows. The first:{examples}",
            fix="mend the input or what [data.prepare] says of it; or, if these rows may be lost, "
                f"data.prepare.max_bad_share = {_above(bad.share):g}",
        )


def is_hopeless(num_rows: int, num_bad: int, max_share: float) -> bool:
    """No use to read on: it is not what it was taken for."""
    return num_bad >= _ENOUGH and num_bad > max(_HOPELESS, max_share) * (num_rows + num_bad)


def _above(share: float) -> float:
    return min(1.0, -(-share * 1000 // 1) / 1000)

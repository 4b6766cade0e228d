"""Rows between a reader and the prepared format, and those that could not be read: counted by reason, the first quoted
with their lines, too many of them refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from embark.data.hashing import hash_counters, stream_key, uniform
from embark.data.prepare.inputs import InputFile
from embark.data.prepare.schema import TIME_ROWS, Schema
from embark.data.prepared.manifest import SPLITS
from embark.errors import DataError, UserError
from embark.spec.data import DataSpec, PrepareSpec

Keys = NDArray[np.uint64] | NDArray[np.uint32]  # 32 bits where they always suffice.
MAX_QUOTED = 20  # Bad rows that are reported one by one.
_VALUE = re.compile(r"b?'(?:[^'\\]|\\.)*'…?|b?\"(?:[^\"\\]|\\.)*\"…?")
_MAX_EXAMPLES = 5
_MIN_BAD_TO_GIVE_UP = 10_000


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one file that is prepared on its own: the unit of work, and of resuming after an interruption."""

    file: InputFile
    index: int  # Among the segments of the file.
    start: int  # First byte of text, or first row group of Parquet.
    stop: int  # First that belongs to the next segment.


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read."""

    line: int  # Counted from 0 within the segment.
    why: str


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows as the input has them, in columns."""

    positions: NDArray[np.int64]
    """[n]: the byte of the file, decompressed, at which each row begins; of Parquet, the row of the file. A random
    split draws by it, so that the size of the pieces changes nothing."""
    label: NDArray[np.float32]  # [n]: 0 or 1.
    dense: NDArray[np.float32]  # [n, D], as they are; NaN where missing.
    keys: tuple[Keys, ...]
    """Of each sparse column: the number, or 64 bits of hash of the text. [n]; of a list, those of all rows."""
    lengths: tuple[NDArray[np.int32] | None, ...]  # [n] of each list, after cutting; None of the others.
    is_missing: tuple[NDArray[np.bool_] | None, ...]
    """[n] of each column that is not a list: where there is no value; None where none is missing."""
    split: NDArray[np.uint8] | None = None  # [n]: position in SPLITS, where a column says it.
    bad: tuple[BadRow, ...] = ()  # Rows left out among these; at most MAX_QUOTED.
    reasons: Mapping[str, int] = field(default_factory=dict)  # How many rows were left out for each reason.
    num_cut: int = 0  # Lists that were longer than their column's `max_ids`.
    num_lines: int = 0  # Lines this piece took, including bad ones and the header.
    read_bytes: int = 0  # Bytes of the input, as stored, that this piece took.
    time: NDArray[np.int64] | None = None  # [n]: microseconds since 1970, where rows are split by it.

    def __len__(self) -> int:
        return len(self.label)

    @property
    def num_bad(self) -> int:
        return sum(self.reasons.values())

    def select(self, mask: NDArray[np.bool_]) -> RawRows:
        """The rows of the mask."""
        keys = (k[mask] if n is None else k[np.repeat(mask, n)] for k, n in zip(self.keys, self.lengths, strict=True))
        return replace(
            self, positions=self.positions[mask], label=self.label[mask], dense=self.dense[mask], keys=tuple(keys),
            lengths=tuple(None if lengths is None else lengths[mask] for lengths in self.lengths),
            is_missing=tuple(None if missing is None else missing[mask] for missing in self.is_missing),
            split=None if self.split is None else self.split[mask],
            time=None if self.time is None else self.time[mask],
        )

    @staticmethod
    def join(several: Sequence[RawRows]) -> RawRows:
        """All of them as one."""
        if len(several) == 1:
            return several[0]

        def joined(name: str, column: int | None = None) -> Any:
            arrays = [getattr(rows, name) for rows in several]
            arrays = arrays if column is None else [of[column] for of in arrays]
            if name == "is_missing" and any(array is not None for array in arrays):
                arrays = [np.zeros(len(rows), np.bool_) if array is None else array
                          for rows, array in zip(several, arrays, strict=True)]
            return None if arrays[0] is None else np.concatenate(arrays)

        columns = range(len(several[0].keys))
        return RawRows(
            joined("positions"), joined("label"), joined("dense"), tuple(joined("keys", i) for i in columns),
            tuple(joined("lengths", i) for i in columns), tuple(joined("is_missing", i) for i in columns),
            joined("split"), tuple(bad for rows in several for bad in rows.bad)[:MAX_QUOTED],
            sum((Counter(rows.reasons) for rows in several), Counter()),
            num_cut=sum(rows.num_cut for rows in several), num_lines=sum(rows.num_lines for rows in several),
            read_bytes=sum(rows.read_bytes for rows in several), time=joined("time"),
        )


class Reader(Protocol):
    """Reads one format."""

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Pieces of about that size that can be read on their own."""

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """The segment's rows in order, in portions of about `chunk_bytes` of input."""


def reason_of(why: str) -> str:
    """Without the value, so that rows with the same fault count as one reason."""
    return re.sub(r"\s+", " ", _VALUE.sub("…", why))


@dataclass(slots=True)
class SegmentCounts:
    """Rows of one segment, read and left out."""

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

    def to_json(self) -> dict[str, Any]:
        return {"lines": self.num_lines, "rows": self.num_rows, "bad": self.reasons.total(), "cut": self.num_cut,
                "examples": [[bad.line, bad.why] for bad in self.bad], "reasons": dict(sorted(self.reasons.items()))}


@dataclass(frozen=True, slots=True)
class BadRows:
    """Rows of all files that were left out."""

    num_rows: int
    num_bad: int
    num_cut: int
    files: dict[str, dict[str, int]]  # By file and reason.
    examples: tuple[tuple[str, int, str], ...]  # File, line counted from 1, reason.

    @property
    def share(self) -> float:
        return self.num_bad / max(1, self.num_rows + self.num_bad)

    @staticmethod
    def collect(files: Sequence[InputFile], records: Sequence[Sequence[dict[str, Any]]]) -> BadRows:
        """From the records of each file's segments, in order: their lines become lines of the file."""
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

    def to_json(self) -> dict[str, Any]:
        """As the manifest holds it."""
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
                fix="fix the input, or what [data.prepare] says of it; if these rows may be lost, set "
                    f"data.prepare.max_bad_share = {enough:g}",
            )


def should_give_up(num_rows: int, num_bad: int, max_share: float) -> bool:
    """So many rows are bad that reading on is useless: the input is something else."""
    return num_bad >= _MIN_BAD_TO_GIVE_UP and num_bad > max(0.5, max_share) * (num_rows + num_bad)


DenseTransform = Literal["mlperf", "log", "none"]
IdMethod = Literal["hash", "frequency"]
TRAIN, VALIDATION, TEST = range(3)  # Positions in SPLITS.
_DRAW = 0x5117


def dense_transform(prepare: PrepareSpec, schema: Schema) -> DenseTransform:
    """What `auto` means for this input."""
    if prepare.dense == "auto":
        return "mlperf" if schema.format == "criteo" else "log"
    return prepare.dense


def transform_dense(dense: NDArray[np.float32], method: DenseTransform) -> None:
    """Change the array in place. A missing value counts as 0 first, as in the MLPerf reference."""
    np.copyto(dense, 0, where=np.isnan(dense))
    if method == "mlperf":
        np.maximum(dense, np.float32(-2), out=dense)
        dense += np.float32(3)
        np.log(dense, out=dense)
    elif method == "log":
        size = np.abs(dense)
        np.log1p(size, out=size)
        np.copysign(size, dense, out=dense)


def id_methods(prepare: PrepareSpec, schema: Schema) -> tuple[IdMethod, ...]:
    """Of each sparse column."""
    if prepare.ids == "auto":
        return tuple("frequency" if column.rows is None else "hash" for column in schema.sparse)
    without = [column.name for column in schema.sparse if column.rows is None]
    if prepare.ids == "hash" and without:
        raise UserError(f"data.prepare.ids = \"hash\" needs the rows of every table; not given: {', '.join(without)}",
                        fix="give them in [[model.tables]], or set data.prepare.ids = \"frequency\"")
    # An hour or a weekday is its id, and a weight is none.
    return tuple("hash" if column.kind in TIME_ROWS or column.weights_of else prepare.ids for column in schema.sparse)


def hash_ids(keys: Keys, is_missing: NDArray[np.bool_] | None, rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """key mod rows; 0 where the value is missing."""
    # Two steps, for numpy divides by a scalar with vector instructions, and takes remainders one by one.
    ids = keys // keys.dtype.type(rows)
    ids *= keys.dtype.type(rows)
    np.subtract(keys, ids, out=ids)
    narrow = ids.astype(dtype)
    if is_missing is not None:
        np.copyto(narrow, 0, where=is_missing)
    return narrow


def check_splits(data: DataSpec, files: Sequence[InputFile]) -> None:
    """Refuse splits that leave nothing to train on, or name files that are not in the input."""
    prepare = data.prepare
    if prepare.split in ("fraction", "time") and data.eval_fraction + prepare.test_fraction >= 1:
        raise UserError(
            f"data.eval_fraction = {data.eval_fraction} and data.prepare.test_fraction = {prepare.test_fraction} "
            "leave no rows to train on", fix="make their sum smaller than 1",
        )
    if prepare.split != "file":
        return
    for pattern in (*prepare.validation_files, *prepare.test_files):
        if not any(_is_named(file, (pattern,)) for file in files):
            names = ", ".join(file.name for file in files[:5]) + (", …" if len(files) > 5 else "")
            raise DataError(f"data.prepare names {pattern!r} for a split, and no file of the input has that name",
                            fix=f"the files are: {names}")
    if all(_split_of_file(data, file) != TRAIN for file in files):
        raise DataError("data.prepare gives every file to validation or test", fix="leave some to train on")


def split_rows(
    data: DataSpec, file_index: int, segment: Segment, rows: RawRows, starts: Sequence[int] = ()
) -> NDArray[np.uint8]:
    """[n]: position in SPLITS of each row. It depends on the row's own position, not on how the file was cut; by time
    on the row's time and the first moments of validation and test."""
    prepare = data.prepare
    if prepare.split == "time":
        assert rows.time is not None
        return np.searchsorted(np.asarray(starts, np.int64), rows.time, side="right").astype(np.uint8)
    if prepare.split == "file":
        return np.full(len(rows), _split_of_file(data, segment.file), np.uint8)
    if prepare.split == "column":
        if rows.split is None:
            raise UserError("data.prepare.split = \"column\" needs data.prepare.split_column",
                            fix=f"name the column that holds {', '.join(SPLITS)}")
        return rows.split
    draw = uniform(hash_counters(stream_key(data.seed, _DRAW, file_index), rows.positions))
    split = (draw < data.eval_fraction + prepare.test_fraction).astype(np.uint8)
    if prepare.test_fraction:
        split += draw < prepare.test_fraction
    return split


def _split_of_file(data: DataSpec, file: InputFile) -> int:
    if _is_named(file, data.prepare.validation_files):
        return VALIDATION
    return TEST if _is_named(file, data.prepare.test_files) else TRAIN


def _is_named(file: InputFile, patterns: Sequence[str]) -> bool:
    """By name, or by name without `.gz` and the like: `day_23` is `day_23.gz` too."""
    names = (file.uri, file.name, file.name.removesuffix(".gz"), file.name.split(".")[0])
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

"""Which rows are for training, validation and test: by chance, by file, or by time."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from embark.data.prepared.manifest import SPLITS
from embark.errors import DataError
from embark.features.arrays import Bytes, Int64s
from embark.features.hashing import hash_counters, stream_key, uniform
from embark.features.rows import RawRows
from embark.features.values import micros_of, moment_text
from embark.spec import DataSpec, moment
from .inputs import InputFile
from .rows import Segment

_CHUNK_ROWS = 1 << 20
_NUM_BINS = 1 << 16
TRAIN, VALIDATION, TEST = range(3)  # Positions in SPLITS.
_DRAW = 0x5117


def describe_time_split(data: DataSpec) -> str:
    """Describe a split by time that is still to be done."""
    prepare = data.prepare
    if prepare.validation_from:
        how = f"validation from {prepare.validation_from}, test from {prepare.test_from or 'none'}"
    else:
        how = f"the newest {prepare.test_fraction:g} to test, the {data.eval_fraction:g} before them to validation" if \
            prepare.test_fraction else f"the newest {data.eval_fraction:g} to validation"
    return f"by time, column {data.time_column}: {how}"


def time_split_record(data: DataSpec, starts: Sequence[int]) -> dict[str, str]:
    """Return the manifest's record of a split by time."""
    return {"column": data.time_column} | dict(zip(SPLITS[1:], map(moment_text, starts), strict=False))


def given_starts(data: DataSpec) -> tuple[int, ...]:
    """Return the first moment of validation, and of test if there is one, as the spec gives them; empty if it does
    not."""
    prepare = data.prepare
    return tuple(micros_of(moment(text)) for text in (prepare.validation_from, prepare.test_from) if text)


def newest_starts(data: DataSpec, files: Sequence[Path]) -> tuple[int, ...]:
    """Return where the newest shares of the rows begin, whose times are in files of int64. Rows of one moment stay
    together, so that a split has at least its share."""
    num_rows = sum(path.stat().st_size for path in files) // 8
    if not num_rows:
        raise DataError(f"no row has a time in column {data.time_column!r}", "name another data.time_column")
    num_test = round(num_rows * data.prepare.test_fraction)
    num_held_out = max(num_test + 1, round(num_rows * (data.prepare.test_fraction + data.eval_fraction)))
    starts = [newest(files, num_held_out), *([newest(files, num_test)] if num_test else [])]
    if len(set(starts)) < len(starts):
        raise DataError(f"validation and test both begin at {moment_text(starts[0])}: too many rows of column "
                        f"{data.time_column!r} have the same time",
                        "make data.eval_fraction larger, or set data.prepare.validation_from and test_from")
    return tuple(starts)


def newest(files: Sequence[Path], rank: int) -> int:
    """Return the time of the `rank`-th newest row, in a few passes over the files and little memory."""
    low = min(int(some.min()) for some in _chunks(files))
    high = max(int(some.max()) for some in _chunks(files))
    while low < high:
        width = -(-(high - low + 1) // _NUM_BINS)
        counts = np.zeros(_NUM_BINS, np.int64)
        for some in _chunks(files):
            inside = some[(some >= low) & (some <= high)]
            counts += np.bincount((inside - low) // width, minlength=_NUM_BINS)
        from_newest = np.cumsum(counts[::-1])
        bin = int(np.searchsorted(from_newest, rank))
        rank -= int(from_newest[bin - 1]) if bin else 0
        low += (_NUM_BINS - 1 - bin) * width
        high = min(high, low + width - 1)
    return low


def _chunks(files: Sequence[Path]) -> Iterator[Int64s]:
    for path in files:
        with path.open("rb") as file:
            while len(some := np.fromfile(file, np.int64, _CHUNK_ROWS)):
                yield some


def check_splits(data: DataSpec, files: Sequence[InputFile]) -> None:
    """Refuse splits that leave nothing to train on, or name files that are not in the input."""
    prepare = data.prepare
    if prepare.split != "file":
        return
    for pattern in (*prepare.validation_files, *prepare.test_files):
        if not any(_is_named(file, (pattern,)) for file in files):
            names = ", ".join(file.name for file in files[:5]) + (", …" if len(files) > 5 else "")
            raise DataError(f"data.prepare names {pattern!r} for a split, and no file of the input has that name",
                            f"the files are: {names}")
    if all(_split_of_file(data, file) != TRAIN for file in files):
        raise DataError("data.prepare gives every file to validation or test", "leave some to train on")


def assign_splits(
    data: DataSpec, file_index: int, segment: Segment, rows: RawRows, starts: Sequence[int] = ()
) -> Bytes:
    """Return [n]: the position in SPLITS of each row. It depends on the row's own position, not on how the file was
    cut; in a split by time on the row's time and the first moments of validation and test."""
    prepare = data.prepare
    if prepare.split == "time":
        assert rows.time is not None
        return np.searchsorted(np.asarray(starts, np.int64), rows.time, side="right").astype(np.uint8)
    if prepare.split == "file":
        return np.full(len(rows), _split_of_file(data, segment.file), np.uint8)
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
    """Return whether a pattern matches the file's name, with or without `.gz` and the like: `day_23` is `day_23.gz`
    too."""
    names = (file.uri, file.name, file.name.removesuffix(".gz"), file.name.split(".")[0])
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

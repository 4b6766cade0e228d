"""Where a split by time begins: at given moments, or so that the newest share of the rows is held out."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.time_format import micros_of, moment_text
from embark.data.prepared.manifest import SPLITS
from embark.errors import DataError
from embark.spec.data import DataSpec, moment

_CHUNK_ROWS = 1 << 20
_NUM_BINS = 1 << 16


def describe(data: DataSpec) -> str:
    """For people to read, before it is done."""
    prepare = data.prepare
    if prepare.validation_from:
        how = f"validation from {prepare.validation_from}, test from {prepare.test_from or 'none'}"
    else:
        how = f"the newest {prepare.test_fraction:g} to test, the {data.eval_fraction:g} before them to validation" if \
            prepare.test_fraction else f"the newest {data.eval_fraction:g} to validation"
    return f"by time, column {data.time_column}: {how}"


def record(data: DataSpec, starts: Sequence[int]) -> dict[str, str]:
    """For the manifest, after it is done."""
    return {"column": data.time_column} | dict(zip(SPLITS[1:], map(moment_text, starts), strict=False))


def given_starts(data: DataSpec) -> tuple[int, ...]:
    """The first moment of validation, and of test if there is one, as the spec gives them; empty where it does not."""
    prepare = data.prepare
    return tuple(micros_of(moment(text)) for text in (prepare.validation_from, prepare.test_from) if text)


def newest_starts(data: DataSpec, files: Sequence[Path]) -> tuple[int, ...]:
    """The same by shares, of rows whose times are in files of int64. Rows of one moment stay together, so that a
    split has at least its share."""
    num_rows = sum(path.stat().st_size for path in files) // 8
    if not num_rows:
        raise DataError(f"no row has a time in column {data.time_column!r}", fix="name another data.time_column")
    num_test = round(num_rows * data.prepare.test_fraction)
    num_held_out = max(num_test + 1, round(num_rows * (data.prepare.test_fraction + data.eval_fraction)))
    starts = [newest(files, num_held_out), *([newest(files, num_test)] if num_test else [])]
    if len(set(starts)) < len(starts):
        raise DataError(f"validation and test both begin at {moment_text(starts[0])}: too many rows of column "
                        f"{data.time_column!r} have the same time",
                        fix="make data.eval_fraction larger, or set data.prepare.validation_from and test_from")
    return tuple(starts)


def newest(files: Sequence[Path], rank: int) -> int:
    """The time of the `rank`-th newest row, in a few passes over the files and little memory."""
    low = min(int(some.min()) for some in _chunks(files))
    high = max(int(some.max()) for some in _chunks(files))
    while low < high:
        width = -(-(high - low + 1) // _NUM_BINS)
        counts = np.zeros(_NUM_BINS, np.int64)
        for some in _chunks(files):
            inside = some[(some >= low) & (some <= high)]
            counts += np.bincount((inside - low) // width, minlength=_NUM_BINS)
        from_newest = np.cumsum(counts[::-1])
        place = int(np.searchsorted(from_newest, rank))
        rank -= int(from_newest[place - 1]) if place else 0
        low += (_NUM_BINS - 1 - place) * width
        high = min(high, low + width - 1)
    return low


def _chunks(files: Sequence[Path]) -> Iterator[NDArray[np.int64]]:
    for path in files:
        with path.open("rb") as file:
            while len(some := np.fromfile(file, np.int64, _CHUNK_ROWS)):
                yield some

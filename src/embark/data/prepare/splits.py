"""Which rows train, which validate, which test."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from embark.data.hashing import hash_counters, stream_key, uniform
from embark.data.prepare.pieces import InputFile, RawRows, Segment
from embark.data.prepared.manifest import SPLITS
from embark.errors import DataError, UserError
from embark.spec.data import DataSpec

TRAIN, VALIDATION, TEST = range(3)
"""Positions in SPLITS."""
_DRAW = 0x5117


def check_splits(data: DataSpec, files: Sequence[InputFile]) -> None:
    """Refuse what leaves nothing to train on, or names files that are not there."""
    asked = data.prepare
    if asked.split == "fraction" and data.eval_fraction + asked.test_fraction >= 1:
        raise UserError(
            f"data.eval_fraction = {data.eval_fraction} and data.prepare.test_fraction = {asked.test_fraction} "
            "leave no rows to train on", fix="make their sum smaller than 1",
        )
    if asked.split != "file":
        return
    for pattern in (*asked.validation_files, *asked.test_files):
        if not any(_is_named(file, (pattern,)) for file in files):
            names = ", ".join(file.name for file in files[:5]) + (", …" if len(files) > 5 else "")
            raise DataError(f"data.prepare names {pattern!r} for a split, but no file of the input is called so",
                            fix=f"the files are: {names}")
    if all(split_of_file(data, file) != TRAIN for file in files):
        raise DataError("data.prepare gives every file to validation or test", fix="leave some to train on")


def split_of_file(data: DataSpec, file: InputFile) -> int:
    """Where all rows of a file go under `split = "file"`."""
    if _is_named(file, data.prepare.validation_files):
        return VALIDATION
    return TEST if _is_named(file, data.prepare.test_files) else TRAIN


def split_rows(data: DataSpec, file_index: int, segment: Segment, rows: RawRows) -> NDArray[np.uint8]:
    """[n]: position in SPLITS of each row. It depends on the row's own place, not on how the file was cut."""
    asked = data.prepare
    if asked.split == "file":
        return np.full(len(rows), split_of_file(data, segment.file), np.uint8)
    if asked.split == "column":
        if rows.split is None:
            raise UserError("data.prepare.split = \"column\" needs data.prepare.split_column",
                            fix=f"name the column that says {', '.join(SPLITS)}")
        return rows.split
    if rows.positions is None:
        key, counters = stream_key(data.seed, _DRAW, file_index, segment.start), rows.lines
    else:
        key, counters = stream_key(data.seed, _DRAW, file_index), rows.positions
    draw = uniform(hash_counters(key, counters))
    split = (draw < data.eval_fraction + asked.test_fraction).astype(np.uint8)
    if asked.test_fraction:
        split += draw < asked.test_fraction
    return split


def _is_named(file: InputFile, patterns: Sequence[str]) -> bool:
    """By name, or by name without `.gz` and the like: `day_23` is `day_23.gz` too."""
    names = (file.uri, file.name, file.name.removesuffix(".gz"), file.name.split(".")[0])
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

"""From raw values to prepared ones: dense transforms, ids by hash, and the split of each row."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embark.data.hashing import hash_counters, stream_key, uniform
from embark.data.prepare.inputs import InputFile
from embark.data.prepare.rows import Keys, RawRows, Segment
from embark.data.prepare.schema import Schema
from embark.data.prepared.manifest import SPLITS
from embark.errors import DataError, UserError
from embark.spec.data import DataSpec, PrepareSpec

DenseTransform = Literal["mlperf", "log", "none"]
IdMethod = Literal["hash", "frequency"]
TRAIN, VALIDATION, TEST = range(3)
"""Positions in SPLITS."""
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
    return (prepare.ids,) * len(schema.sparse)


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
    if prepare.split == "fraction" and data.eval_fraction + prepare.test_fraction >= 1:
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


def split_rows(data: DataSpec, file_index: int, segment: Segment, rows: RawRows) -> NDArray[np.uint8]:
    """[n]: position in SPLITS of each row. It depends on the row's own position, not on how the file was cut."""
    prepare = data.prepare
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

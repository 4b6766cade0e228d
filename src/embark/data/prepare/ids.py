"""Keys to ids by hashing, and which columns are numbered how."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.pieces import Keys, Schema, SparseColumn
from embark.data.prepared.layout import Feature
from embark.errors import UserError
from embark.spec.data import PrepareSpec

How = Literal["hash", "frequency"]


def how_of(prepare: PrepareSpec, schema: Schema) -> tuple[How, ...]:
    """Of each sparse column."""
    if prepare.ids == "auto":
        return tuple("frequency" if column.rows is None else "hash" for column in schema.sparse)
    without = [column.name for column in schema.sparse if column.rows is None]
    if prepare.ids == "hash" and without:
        raise UserError(f"data.prepare.ids = \"hash\" needs the rows of every table; not given: {', '.join(without)}",
                        fix="give them in [[model.tables]], or take data.prepare.ids = \"frequency\"")
    return (prepare.ids,) * len(schema.sparse)


def feature_of(column: SparseColumn, rows: int) -> Feature:
    """The prepared column with a table of `rows`."""
    return Feature(column.name, rows, column.max_ids if column.is_list else 1, is_ragged=column.is_list)


def hashed(keys: Keys, is_missing: NDArray[np.bool_] | None, rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """key mod rows; 0 where the value is missing."""
    # Two steps, for numpy divides by a scalar with vector instructions, and takes remainders one by one.
    ids = keys // keys.dtype.type(rows)
    ids *= keys.dtype.type(rows)
    np.subtract(keys, ids, out=ids)
    narrow = ids.astype(dtype)
    if is_missing is not None:
        np.copyto(narrow, 0, where=is_missing)
    return narrow

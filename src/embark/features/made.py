"""Sparse columns that are made of others: crosses, and several hashes of a value. Readers of rows make them last."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from .arrays import Floats, Hashes, Int32s, Int64s, Mask
from .hashing import hash_counters, stream_key
from .rows import Keys, RawRows
from .schema import Schema, SparseColumn

_MAX_COMPARED = 64  # Boundaries that a value is compared with one by one.
_CROSS, _HASH = 0xC2055, 0x4A54
_MISSING = np.uint64(stream_key(_CROSS, 0))
"""The key of no value, where that is a value like others."""


def filled_keys(keys: Keys, is_missing: Mask | None) -> Hashes:
    """Return one key for each row, of 64 bits, also for rows without a value. Of several hashes it is the first."""
    wide: Hashes = (keys if keys.ndim == 1 else keys[:, 0]).astype(np.uint64)
    if is_missing is not None:
        wide[is_missing] = _MISSING
    return wide


def bucket_ids(column: SparseColumn, schema: Schema, dense: Floats) -> Int64s:
    """Return the rows of numbers in the table of their buckets: 0 for a missing one, and for all until the boundaries
    are known."""
    values = dense[:, schema.dense_names.index(column.parts[0])]
    if not column.buckets:
        return np.zeros(len(values), np.int64)
    bounds = np.asarray(column.buckets[0], np.float32)
    if len(bounds) > _MAX_COMPARED:
        found = np.searchsorted(bounds, values, side="right") + 1
        found[np.isnan(values)] = 0
        return found
    values = np.ascontiguousarray(values)
    below = (~np.isnan(values)).view(np.uint8)
    for bound in bounds:  # a fifth of the time of a search
        below += values >= bound
    return below.astype(np.int64)


def _bucket_keys(values: Floats, bounds: Sequence[float]) -> Hashes:
    """Return the number of the bucket of each value; a value on a boundary is above it."""
    found = np.searchsorted(np.asarray(bounds, np.float32), values, side="right")
    return filled_keys(found.astype(np.uint64), np.isnan(values))


def crossed(parts: list[Hashes]) -> Hashes:
    """Return the key of values that occur together. Id maps outlive the program, so this hash never changes."""
    return reduce(hash_counters, parts, np.full(len(parts[0]), stream_key(_CROSS, 1), np.uint64))


def _hashes(keys: Keys, num: int) -> Hashes:
    """Return [..., num]: the key itself, and other hashes of it."""
    wide = keys.astype(np.uint64)
    return np.stack([wide, *(hash_counters(stream_key(_HASH, i), wide) for i in range(1, num))], axis=-1)


def with_made(raw: RawRows, schema: Schema) -> RawRows:
    """Return rows that have only the columns of `schema.read` with all columns of `schema.sparse`."""
    if len(schema.read) == len(schema.sparse) and all(column.num_hashes == 1 for column in schema.sparse):
        return raw
    read = {column.name: position for position, column in enumerate(schema.read)}

    def part(name: str, bounds: Sequence[float]) -> Hashes:
        if bounds:
            return _bucket_keys(raw.dense[:, schema.dense_names.index(name)], bounds)
        return filled_keys(raw.keys[read[name]], raw.is_missing[read[name]])

    all_keys: list[Keys] = []
    all_lengths: list[Int32s | None] = []
    all_missing: list[Mask | None] = []
    for column in schema.sparse:
        lengths = is_missing = None
        if column.kind == "bucket":
            keys: Keys = bucket_ids(column, schema, raw.dense).astype(np.uint64)
        elif column.kind == "cross":
            keys = crossed([part(*one) for one in zip(column.parts, column.buckets, strict=True)])
        else:
            at = read[column.name]
            keys, lengths, is_missing = raw.keys[at], raw.lengths[at], raw.is_missing[at]
        if column.num_hashes > 1:
            keys = _hashes(keys, column.num_hashes)
            if lengths is not None:
                keys, lengths = keys.reshape(-1), lengths * np.int32(column.num_hashes)
        all_keys.append(keys)
        all_lengths.append(lengths)
        all_missing.append(is_missing)
    return replace(raw, keys=tuple(all_keys), lengths=tuple(all_lengths), is_missing=tuple(all_missing))

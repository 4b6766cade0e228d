"""Sparse columns that are made of others: crosses, and several hashes of a value. Readers of rows make them last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from embark.features.arrays import Floats, Hashes, Mask
from embark.features.hashing import hash_counters, stream_key
from embark.features.rows import Keys, RawRows
from embark.features.schema import Schema

_CROSS, _HASH = 0xC2055, 0x4A54
_MISSING = np.uint64(stream_key(_CROSS, 0))
"""The key of no value, where that is a value like others."""


def filled_keys(keys: Keys, is_missing: Mask | None) -> Hashes:
    """Return one key for each row, of 64 bits, also for rows without a value. Of several hashes it is the first."""
    wide: Hashes = (keys if keys.ndim == 1 else keys[:, 0]).astype(np.uint64)
    if is_missing is not None:
        wide[is_missing] = _MISSING
    return wide


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
    read = {column.name: cells for column, *cells in
            zip(schema.read, raw.keys, raw.lengths, raw.is_missing, strict=True)}
    made = []
    for column in schema.sparse:
        if column.kind == "cross":
            cells = [crossed([
                _bucket_keys(raw.dense[:, schema.dense_names.index(name)], bounds) if bounds else
                filled_keys(read[name][0], read[name][2])
                for name, bounds in zip(column.parts, column.buckets, strict=True)
            ]), None, None]
        else:
            cells = read[column.name]
        keys, lengths, is_missing = cells
        if column.num_hashes > 1:
            keys = _hashes(keys, column.num_hashes)
            if lengths is not None:
                keys, lengths = keys.reshape(-1), lengths * column.num_hashes
        made.append((keys, lengths, is_missing))
    keys, lengths, is_missing = zip(*made, strict=True)
    return replace(raw, keys=keys, lengths=lengths, is_missing=is_missing)

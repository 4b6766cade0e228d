"""The arithmetic of dynamic tables: hashes of ids, the bucket of a hash, and back. The same of numpy's and torch's
arrays of int64, and of Triton's kernels: all wrap around."""

import zlib
from typing import Any, TypeVar

import numpy as np

from embark.features.arrays import Int64s
from embark.features.hashing import FIRST, SECOND, STEP, stream_key

NO_ID = -(2**63)
"""Where a sample has fewer ids than others."""
FREE = -1
"""Stands for the step in which the id of a row was seen last, if the row is free."""
MAP, CHANCE, COUNTER, VALUE = range(4)
"""What a key is for: the slot of an id, whether it is admitted, its counter, its first values."""

Ids = TypeVar("Ids", bound=Any)


def signed(bits: int) -> int:
    """Return 64 bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits


_FIRST, _SECOND = signed(FIRST), signed(SECOND)
_FIRST_INVERSE, _SECOND_INVERSE = (signed(pow(factor, -1, 1 << 64)) for factor in (FIRST, SECOND))
SIGNED_STEP = signed(STEP)


def table_key(seed: int, table: str, purpose: int) -> int:
    """Return the key of one table of a run."""
    return signed(stream_key(seed, zlib.crc32(table.encode()), purpose))


def mixed(ids: Ids, keys: Any) -> Ids:
    """Hash the ids with SplitMix64; different ids have different hashes."""
    bits = ids ^ keys
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)  # type: ignore[no-any-return]


def unmixed(hashes: Int64s, key: int) -> Int64s:
    """Return the ids that have these hashes."""
    bits = _unshifted(hashes, 31) * np.int64(_SECOND_INVERSE)
    bits = _unshifted(bits, 27) * np.int64(_FIRST_INVERSE)
    return _unshifted(bits, 30) ^ np.int64(key)


def bucket_of(hashes: Ids, num_buckets: Any) -> Ids:
    """Return the bucket of each hash. It rises with the hash, so that sorted hashes lie bucket by bucket."""
    return (((hashes >> 32) + 2**31) * num_buckets) >> 32  # type: ignore[no-any-return]


def fraction_of(bits: Any) -> Any:
    """Return the upper 32 bits, as an integer from 0."""
    return (bits >> 32) + 2**31


def _shifted(bits: Any, by: int) -> Any:
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _unshifted(bits: Int64s, by: int) -> Int64s:
    """Invert `bits ^ _shifted(bits, by)`."""
    found = bits
    for _ in range(64 // by):
        found = bits ^ _shifted(found, by)
    return found

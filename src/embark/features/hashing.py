"""Random numbers that are functions of a counter: any one can be had without the ones before it."""

import numpy as np
from numpy.typing import NDArray

from .arrays import Doubles, Floats, Hashes

# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1



def stream_key(*parts: int) -> int:
    """Return the key of one stream, such as (seed, split, column)."""
    key = 0
    for part in parts:
        key = (key + part + STEP) & _MASK
        key = ((key ^ (key >> 30)) * FIRST) & _MASK
        key = ((key ^ (key >> 27)) * SECOND) & _MASK
        key ^= key >> 31
    return key


def stream_keys(*parts: int, columns: int) -> Hashes:
    """Return the keys of `columns` streams that differ in the last part."""
    return np.array([stream_key(*parts, column) for column in range(columns)], np.uint64)


def hash_counters(keys: Hashes | int, counters: NDArray[np.integer]) -> Hashes:
    """Return 64 random bits for every counter of the keyed streams; the two broadcast."""
    bits: Hashes = counters.astype(np.uint64) * np.uint64(STEP) + np.asarray(keys, np.uint64)
    shifted = np.right_shift(bits, np.uint64(30))
    bits ^= shifted
    bits *= np.uint64(FIRST)
    np.right_shift(bits, np.uint64(27), out=shifted)
    bits ^= shifted
    bits *= np.uint64(SECOND)
    np.right_shift(bits, np.uint64(31), out=shifted)
    bits ^= shifted
    return bits


def uniform(bits: Hashes) -> Doubles:
    """Return numbers in [0, 1), to 53 bits."""
    fraction = (bits >> np.uint64(11)).view(np.int64).astype(np.float64)
    fraction *= 2.0**-53
    return fraction


def bell(bits: Hashes) -> Floats:
    """Return numbers of mean 0 and variance 1, nearly normal: the sum of the four 16-bit quarters, which lies within
    ±3.47."""
    halves = np.uint64(0x0000FFFF0000FFFF)
    pair_sums = (bits & halves) + ((bits >> np.uint64(16)) & halves)
    sums = (pair_sums & np.uint64(0xFFFFFFFF)) + (pair_sums >> np.uint64(32))
    values = sums.view(np.int64).astype(np.float32)
    values -= np.float32(2 * 65535)
    values *= np.float32(3**0.5 / 65536)
    return values


def quarter(bits: Hashes, which: int) -> Floats:
    """Return numbers of mean 0 and variance 1, even over ±1.73, from one of the four 16-bit quarters of each hash."""
    values = bits.view(np.uint16)[..., which::4].astype(np.float32)
    values -= np.float32(65535 / 2)
    values *= np.float32(12**0.5 / 65536)
    return values

"""Random numbers that are functions of a counter: any one can be had without the ones before it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

Hashes = NDArray[np.uint64]


def stream_key(*parts: int) -> int:
    """The key of one stream, such as (seed, split, column)."""
    key = 0
    for part in parts:
        key = (key + part + _STEP) & _MASK
        key = ((key ^ (key >> 30)) * _FIRST) & _MASK
        key = ((key ^ (key >> 27)) * _SECOND) & _MASK
        key ^= key >> 31
    return key


def stream_keys(*parts: int, columns: int) -> Hashes:
    """The keys of `columns` streams that differ in the last part."""
    return np.array([stream_key(*parts, column) for column in range(columns)], np.uint64)


def hash_counters(keys: Hashes | int, counters: NDArray[np.integer]) -> Hashes:
    """64 random bits for every counter of the keyed streams; the two broadcast."""
    bits: Hashes = counters.astype(np.uint64) * np.uint64(_STEP) + np.asarray(keys, np.uint64)
    shifted = np.right_shift(bits, np.uint64(30))
    bits ^= shifted
    bits *= np.uint64(_FIRST)
    np.right_shift(bits, np.uint64(27), out=shifted)
    bits ^= shifted
    bits *= np.uint64(_SECOND)
    np.right_shift(bits, np.uint64(31), out=shifted)
    bits ^= shifted
    return bits


def uniform(bits: Hashes) -> NDArray[np.float64]:
    """In [0, 1), to 53 bits."""
    fraction = (bits >> np.uint64(11)).view(np.int64).astype(np.float64)
    fraction *= 2.0**-53
    return fraction


def bell(bits: Hashes) -> NDArray[np.float32]:
    """Mean 0, variance 1, nearly normal: the sum of the four 16-bit quarters, which lies within ±3.47."""
    halves = np.uint64(0x0000FFFF0000FFFF)
    pair_sums = (bits & halves) + ((bits >> np.uint64(16)) & halves)
    sums = (pair_sums & np.uint64(0xFFFFFFFF)) + (pair_sums >> np.uint64(32))
    values = sums.view(np.int64).astype(np.float32)
    values -= np.float32(2 * 65535)
    values *= np.float32(3**0.5 / 65536)
    return values


def quarter(bits: Hashes, which: int) -> NDArray[np.float32]:
    """Mean 0, variance 1, even over ±1.73, from one of the four 16-bit quarters of each hash."""
    values = bits.view(np.uint16)[..., which::4].astype(np.float32)
    values -= np.float32(65535 / 2)
    values *= np.float32(12**0.5 / 65536)
    return values


_KEY = 0x656D6261726B2D77
_TRIAL_ROWS = 4_096
_WORTH_SHARE = 0.5


def hash_words(array: Any) -> Hashes:
    """[n]: the hash of each text of a String, Binary, LargeString or LargeBinary array, without the spaces around it;
    of a null, anything.

    Id maps outlive the program, so this hash never changes: its definition is the plain one in the tests.
    """
    import pyarrow as pa

    if isinstance(array, pa.DictionaryArray):
        encoded = array
    elif _repeats(array):
        encoded = array.dictionary_encode()
    else:
        return hash_bytes(trim(array))
    words = trim(encoded.dictionary)
    if not len(words):
        return np.zeros(len(array), np.uint64)
    hashes: Hashes = hash_bytes(words)[encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    return hashes


def hash_bytes(array: Any) -> Hashes:
    """The hash of each value, eight of its bytes at a time; of a null, anything."""
    starts, lengths, text = buffers_of(array)
    # Eight more bytes, so that the last word of the last value can be read.
    padded = np.concatenate([text, np.zeros(8, np.uint8)])
    words = np.ndarray((len(text) + 1,), "<u8", padded.data, strides=(1,))
    hashes = hash_counters(_KEY, lengths)
    rows = np.flatnonzero(lengths > 0)
    at, left = starts[rows], lengths[rows]
    while len(rows):
        word = words[at]
        is_last = left < 8
        if is_last.any():
            word[is_last] &= (np.uint64(1) << (left[is_last] * 8).astype(np.uint64)) - np.uint64(1)
        hashes[rows] = hash_counters(hashes[rows], word)
        is_longer = left > 8
        rows, at, left = rows[is_longer], at[is_longer] + 8, left[is_longer] - 8
    return hashes


def trim(array: Any) -> Any:
    """Without ASCII white space at the ends; the same array where there is none."""
    import pyarrow.compute as pc

    starts, lengths, text = buffers_of(array)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return array
    first, last = text[starts[filled]], text[starts[filled] + lengths[filled] - 1]
    if first.min() > 32 and last.min() > 32:
        return array
    return pc.ascii_trim_whitespace(as_text(array))


def as_text(array: Any) -> Any:
    """Binary as String, in place and without validation."""
    import pyarrow as pa

    return _reinterpreted(array, {pa.binary(): pa.string(), pa.large_binary(): pa.large_string()})


def as_bytes(array: Any) -> Any:
    """String as Binary, in place."""
    import pyarrow as pa

    return _reinterpreted(array, {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()})


def _reinterpreted(array: Any, types: dict[Any, Any]) -> Any:
    import pyarrow as pa

    if array.type not in types:
        return array
    return pa.Array.from_buffers(types[array.type], len(array), array.buffers(), array.null_count, array.offset)


def buffers_of(array: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Where each value starts, how long it is (0 of a null), and the bytes they lie in."""
    import pyarrow.types as types

    is_large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    _, offsets_buffer, data = array.buffers()
    if not len(array) or offsets_buffer is None:
        return np.zeros(len(array), np.int64), np.zeros(len(array), np.int64), np.zeros(0, np.uint8)
    offsets = np.frombuffer(offsets_buffer, "<i8" if is_large else "<i4")
    offsets = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    # Only the bytes in use: a slice of a long array would drag all of it along.
    text = text[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    lengths = np.diff(offsets)
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return offsets[:-1], lengths, text


def _repeats(array: Any) -> bool:
    """Whether to hash each distinct word once instead of each value; judged by the first few thousand."""
    some = array.slice(0, _TRIAL_ROWS)
    return len(some) > 0 and len(some.unique()) < _WORTH_SHARE * len(some)

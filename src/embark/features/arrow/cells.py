"""Cells of an Arrow column as numbers and as keys; those that cannot be read are marked, never raised."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from embark.errors import DataError
from embark.features.arrays import Array, Bytes, Doubles, Hashes, Int32s, Int64s, Mask, last_of_lists
from embark.features.hashing import hash_counters
from embark.features.schema import SparseColumn
from embark.features.values import GROUPED, INTEGER, NUMBER
from embark.values import frozen

Numbers = tuple[Array, Mask | None]
"""[n] values, NaN where missing or bad; [n] where there is a value that is not a finite 32-bit number."""

_LIST_BYTES = 1 << 20
_TRUE, _FALSE = ["true", "yes"], ["false", "no"]
LARGEST = float(np.finfo(np.float32).max)
_ALL_BITS = (1 << 64) - 1
_KEY = 0x656D6261726B2D77
_TRIAL_ROWS = 4_096
_NO_WORD = r"[^\p{L}\p{M}\p{N}]+"  # What stands between words.
_WORTH_SHARE = 0.5


@frozen
class SparseCells:
    """The keys of a sparse column."""

    keys: Hashes  # [n]; for a list column, the values of all rows one after another.
    lengths: Int32s | None = None  # [n]: values of each row of a list column.
    is_missing: Mask | None = None  # [n], for columns that are no lists.
    is_bad: Mask | None = None  # [n]: the cell, or one value of the list, is not what the column holds.
    num_cut: int = 0

    def cut(self, max_ids: int) -> Self:
        """Shorten lists to their last `max_ids` values."""
        if self.lengths is None:
            return self
        keys, lengths, num_cut = last_of_lists(self.keys, self.lengths, max_ids)
        return replace(self, keys=keys, lengths=lengths, num_cut=num_cut)


@frozen
class CellParser:
    """Reads the cells of an input."""

    missing: tuple[str, ...]  # Text that stands for no value.
    list_delimiter: str = "|"  # Between the values of a cell of text; empty: `|` or `;`.

    def numbers(self, array: Any, *, may_be_text: bool = False, decimal: str = "") -> Numbers:
        """Read a dense column, or a label, which `may_be_text`: true, false, yes or no. `decimal`: the decimal sign of
        text that may have the other sign between thousands."""
        if isinstance(array, np.ndarray):
            return _finite(array, array)
        kind = (array := normalize_array(array)).type
        if types.is_null(kind):
            return np.full(len(array), np.nan), None
        if is_text(kind):
            array = _with_points(self._trimmed(array), decimal) if decimal else self.without_missing(array)
            return self._numbers_of_text(array, may_be_text)
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
            return _finite(_floats(array), array)
        raise DataError(f"holds {kind}, which is not a number")

    def is_one_of(self, array: Any, words: Sequence[str]) -> Numbers:
        """Return 1 where a cell is one of the words, 0 where it is anything else, NaN where it is missing."""
        array = self.text(normalize_array(array))
        is_one = pc.is_in(as_bytes(array), value_set=pa.array([word.encode() for word in words], as_bytes(array).type))
        return np.where(array.is_null(), np.nan, np.asarray(is_one)), None

    def keys(self, array: Any, column: SparseColumn) -> SparseCells:
        """Read a sparse column: one key a row, or a list of them."""
        if isinstance(array, np.ndarray):
            kind = np.uint64 if array.dtype == np.uint64 else np.int64
            return SparseCells(array.astype(kind, copy=False).view(np.uint64))
        array = normalize_array(array)
        if not column.is_list:
            return self._one_key(array, column.kind)
        # Short values in long cells come to many times their text while they are hashed, so not all at once.
        step = max(1, -(-len(array) // max(1, -(-array.nbytes // _LIST_BYTES))))
        slices = [self._lists(array[i : i + step], column) for i in range(0, max(1, len(array)), step)]
        return _joined(slices) if len(slices) > 1 else slices[0]

    def _lists(self, array: Any, column: SparseColumn) -> SparseCells:
        if column.is_words:
            words, lengths = self._words_of(array)
            return SparseCells(hash_words(words), lengths.astype(np.int32)).cut(column.max_ids)
        values, lengths = self._values_of_lists(array)
        found = self._one_key(values, column.kind)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        is_bad = None
        if found.is_bad is not None:
            is_bad = np.bincount(owner[found.is_bad], minlength=len(lengths)) > 0
        keys = found.keys
        if found.is_missing is not None:
            is_there = ~found.is_missing
            keys, owner = keys[is_there], owner[is_there]
            lengths = np.bincount(owner, minlength=len(lengths))
        return SparseCells(keys, lengths.astype(np.int32), None, is_bad).cut(column.max_ids)

    def without_missing(self, array: Any) -> Any:
        """Replace text that stands for no value by null."""
        if not self.missing:
            return array
        # Most columns have none of them, and only short cells can be one.
        _, lengths, _ = buffers_of(array)
        longest = max(len(text.encode()) for text in self.missing)
        if not len(lengths) or lengths.min() > longest:
            return array
        kind = pa.binary() if array.type in (pa.binary(), pa.string()) else pa.large_binary()
        spellings = pa.array([text.encode() for text in self.missing], kind)
        is_missing = pc.is_in(as_bytes(array), value_set=spellings)
        return pc.if_else(is_missing, pa.scalar(None, array.type), array)

    def _trimmed(self, array: Any) -> Any:
        return self.without_missing(trim(array))

    def _numbers_of_text(self, array: Any, may_be_text: bool) -> Numbers:
        with suppress(pa.ArrowInvalid):
            return _finite(_floats(as_text(array).cast(pa.float64())), array)
        array = self._trimmed(array)
        text = as_text(array)
        if may_be_text:
            word = pc.ascii_lower(text)
            text = pc.if_else(pc.is_in(word, value_set=pa.array(_TRUE)), "1",
                              pc.if_else(pc.is_in(word, value_set=pa.array(_FALSE)), "0", text))
        is_number = pc.match_substring_regex(text, f"^{NUMBER}$")
        numbers = pc.if_else(is_number, text, pa.scalar(None, text.type))
        return _finite(_floats(pc.replace_substring_regex(numbers, r"^\+", "").cast(pa.float64())), array)

    def _one_key(self, array: Any, kind: str) -> SparseCells:
        if types.is_null(array.type):
            array = array.cast(pa.string())
        if kind == "number":  # of weights: the bits of a float64
            values, is_bad = self.numbers(array)
            return SparseCells(np.asarray(values, np.float64).view(np.uint64), is_bad=is_bad)
        if kind == "text":
            array = self.text(array)
            return SparseCells(hash_words(array), is_missing=_nulls(array))
        if is_text(array.type):
            array = self._trimmed(array)
            keys, is_bad = _hexadecimal(array) if kind == "hex" else _integers_of_text(array)
        else:
            keys, is_bad = _integers(array)
        is_missing = _nulls(array)
        if types.is_floating(array.type):
            is_nan = np.isnan(_floats(array))
            is_missing = is_nan if is_nan.any() else None
        return SparseCells(keys, is_missing=is_missing, is_bad=is_bad)

    def words(self, array: Any, column: SparseColumn) -> Any:
        """Return the distinct values of a column of text, whose `hash_bytes` are its keys."""
        array = normalize_array(array)
        if column.is_words:
            return self._words_of(array)[0].unique()
        if column.is_list:
            array, _ = self._values_of_lists(array)
        return self.text(array).drop_null().unique()

    def text(self, array: Any) -> Any:
        """Return the values of a column as text without spaces around them, null where one is missing."""
        if types.is_nested(array.type):
            raise DataError(f"holds {array.type} where one value must be")
        if not is_text(array.type):
            array = array.cast(pa.string())
        return self._trimmed(array)

    def _words_of(self, array: Any) -> tuple[Any, Int64s]:
        """Return the words of all rows one after the other, in lower case, and how many each row has."""
        if is_list(array.type):
            values, lengths = self._values_of_lists(array)
            words, nums = self._words_of(values)
            owner = np.repeat(np.arange(len(lengths)), lengths)
            return words, np.bincount(owner, nums, len(lengths)).astype(np.int64)
        text = pc.utf8_lower(pc.utf8_normalize(as_utf8(self.text(array)), "NFKC"))
        found = pc.split_pattern_regex(text, _NO_WORD)
        words, owner = pc.list_flatten(found), pc.list_parent_indices(found).to_numpy()
        is_word = pc.not_equal(words, "")
        return words.filter(is_word), np.bincount(owner[np.asarray(is_word)], minlength=len(array))

    def _values_of_lists(self, array: Any) -> tuple[Any, Int64s]:
        """Return all values one after the other, and how many each row has."""
        if is_text(array.type):
            array = self._trimmed(array)
            text = as_text(array)
            array = pc.split_pattern(text, self.list_delimiter) if self.list_delimiter else \
                pc.split_pattern_regex(text, "[|;]")
        elif not is_list(array.type):
            # One value is a list of one, no value an empty one.
            is_there = np.asarray(array.is_valid())
            return array.drop_null(), is_there.astype(np.int64)
        counted = pc.list_value_length(array).fill_null(0)
        lengths = np.asarray(counted).astype(np.int64)
        values = normalize_array(pc.list_flatten(array))
        if is_list(values.type) or types.is_nested(values.type):
            raise DataError(f"holds {array.type}: lists of lists are not read")
        return values, lengths


def _joined(slices: list[SparseCells]) -> SparseCells:
    lengths = [s.lengths for s in slices if s.lengths is not None]
    bad = [np.zeros(len(n), np.bool_) if s.is_bad is None else s.is_bad for s, n in zip(slices, lengths, strict=True)]
    return SparseCells(
        np.concatenate([s.keys for s in slices]), np.concatenate(lengths),
        is_bad=np.concatenate(bad) if any(s.is_bad is not None for s in slices) else None,
        num_cut=sum(s.num_cut for s in slices)
    )


def normalize_array(array: Any) -> Any:
    """Return one chunk with dictionaries decoded, views and fixed sizes as plain binary; numpy's arrays as Arrow's."""
    if isinstance(array, np.ndarray):
        return pa.array(array)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_string_view(array.type):
        array = array.cast(pa.string())
    elif types.is_binary_view(array.type) or types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    return array


def is_text(kind: Any) -> bool:
    """Return whether a type is strings or bytes."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def is_list(kind: Any) -> bool:
    """Return whether a type has several values a cell."""
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _with_points(array: Any, decimal: str) -> Any:
    """Rewrite numbers with a decimal sign, and no sign between thousands; others become what is no number."""
    text = as_text(array)
    fits = pc.match_substring_regex(text, f"^{GROUPED[decimal]}$")
    plain = pc.replace_substring(pc.replace_substring(text, "," if decimal == "." else ".", ""), ",", ".")
    is_nan = pc.equal(pc.ascii_lower(text), "nan")
    return pc.if_else(fits, plain, pc.if_else(is_nan, text, "?"))


def _finite(values: Array, array: Any) -> Numbers:
    """Mark values that are not finite 32-bit numbers as bad; NaN means missing."""
    is_odd = ~(np.abs(values) <= LARGEST)
    if not is_odd.any():
        return values, None
    is_bad = is_odd & ~np.isnan(values)
    if not isinstance(array, np.ndarray) and is_text(array.type):
        is_nan = pc.equal(pc.ascii_lower(pc.ascii_trim_whitespace(as_text(array))), "nan").fill_null(True)
        is_bad |= is_odd & ~np.asarray(is_nan)
    if not is_bad.any():
        return values, None
    return np.where(is_bad, np.nan, values), is_bad


def _floats(array: Any) -> Doubles:
    """Convert to float64; nulls become NaN."""
    if array.type != pa.float64():
        array = array.cast(pa.float64(), safe=False)
    result: Doubles = np.asarray(array)
    return result


def _integers(array: Any) -> tuple[Hashes, Mask | None]:
    if types.is_floating(array.type) or types.is_decimal(array.type):
        values = _floats(array)
        is_odd = ~((np.floor(values) == values) & (np.abs(values) < 2.0**63))
        is_bad = is_odd & ~np.isnan(values)
        keys = np.where(is_odd, 0, values).astype(np.int64).view(np.uint64)
        return keys, is_bad if is_bad.any() else None
    if not (types.is_integer(array.type) or types.is_boolean(array.type)):
        raise DataError(f"holds {array.type}, which is not an integer")
    array = array.cast(pa.uint64() if types.is_uint64(array.type) else pa.int64())
    values_64: Array = np.asarray(array.fill_null(0))
    return values_64.view(np.uint64), None


def _integers_of_text(array: Any) -> tuple[Hashes, Mask | None]:
    text = as_text(array)
    if not (buffers_of(array)[2] > ord("9")).any():  # pyarrow would read 0x10 where all cells are integers to it
        with suppress(pa.ArrowInvalid):
            return _integers(text.cast(pa.int64()))
    # One by one: among cells that a cast to 64 bits with sign refuses, few are distinct.
    encoded = as_bytes(array).dictionary_encode()
    found = [_integer(word) for word in encoded.dictionary.to_pylist()]
    indices = np.asarray(encoded.indices.fill_null(len(found)))
    keys = np.array([(value or 0) & _ALL_BITS for value in (*found, 0)], np.uint64)[indices]
    return keys, np.array([value is None for value in (*found, 0)])[indices]


def _integer(word: bytes) -> int | None:
    """Return an integer of 64 bits, with sign or without; None if it is anything else."""
    value = int(word) if len(word) <= 40 and re.fullmatch(INTEGER.encode(), word) else 1 << 64
    return value if -(1 << 63) <= value < 1 << 64 else None


def _hexadecimal(array: Any) -> tuple[Hashes, Mask | None]:
    """Read up to 16 digits, with `0x` before them or not."""
    text = as_text(array)
    if pc.any(pc.starts_with(text, "0x", ignore_case=True)).as_py():
        text = pc.replace_substring_regex(text, "^0[xX]", "")
    is_hex = pc.match_substring_regex(text, "^[0-9a-fA-F]{1,16}$")
    digits = pc.utf8_lpad(pc.if_else(is_hex.fill_null(False), text, "0"), 16, "0")
    _, _, padded = buffers_of(digits)
    keys = np.frombuffer(bytes.fromhex(padded.tobytes().decode()), ">u8").astype(np.uint64)
    return keys, ~np.asarray(is_hex.fill_null(True))


def _nulls(array: Any) -> Mask | None:
    if not array.null_count:
        return None
    result: Mask = np.asarray(array.is_null())
    return result


def hash_words(array: Any) -> Hashes:
    """Return [n]: the hash of each text of a String, Binary, LargeString or LargeBinary array, without the spaces
    around it; for a null, anything.

    Id maps outlive the program, so this hash never changes: its definition is the plain one in the tests.
    """
    if not _repeats(array):
        return hash_bytes(trim(array))
    encoded = array.dictionary_encode()
    words = trim(encoded.dictionary)
    if not len(words):
        return np.zeros(len(array), np.uint64)
    hashes: Hashes = hash_bytes(words)[np.asarray(encoded.indices.fill_null(0))]
    return hashes


def hash_bytes(array: Any) -> Hashes:
    """Hash each value, eight of its bytes at a time; for a null, anything."""
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
    """Remove ASCII white space at the ends; return the same array if there is none."""
    starts, lengths, text = buffers_of(array)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return array
    first, last = text[starts[filled]], text[starts[filled] + lengths[filled] - 1]
    if first.min() > 32 and last.min() > 32:
        return array
    return pc.ascii_trim_whitespace(as_text(array))


def as_text(array: Any) -> Any:
    """View Binary as String, without validation."""
    return array.view({pa.binary(): pa.string(), pa.large_binary(): pa.large_string()}.get(array.type, array.type))


def as_bytes(array: Any) -> Any:
    """View String as Binary."""
    return array.view({pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(array.type, array.type))


def as_utf8(array: Any) -> Any:
    """Return text for people to read: a byte that is no UTF-8 becomes U+FFFD."""
    words = array.cast(pa.large_binary())
    try:
        return words.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.array([word and word.decode(errors="replace") for word in words.to_pylist()], pa.large_string())


def buffers_of(array: Any) -> tuple[Int64s, Int64s, Bytes]:
    """Return where each value starts, how long it is (0 for a null), and the bytes they lie in."""
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
        lengths[np.asarray(array.is_null())] = 0
    return offsets[:-1], lengths, text


def _repeats(array: Any) -> bool:
    """Return whether to hash each distinct word once instead of each value, judged by the first few thousand."""
    some = array.slice(0, _TRIAL_ROWS)
    return len(some) > 0 and len(some.unique()) < _WORTH_SHARE * len(some)

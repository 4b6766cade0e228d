"""Criteo's text: label, 13 integers, 26 hexadecimal ids, tab-separated, no header; a slab of lines at once, by numpy.

One scan finds the ends of all fields. The eight bytes before the end of an integer are fetched as one 64-bit word, and
arithmetic on all words at once makes numbers of the digits in them. Every byte is turned into the hexadecimal digit it
may be, neighbours are joined to numbers of four digits, and the ids are picked from those. Lines that are not regular
enough (`Slab.doubtful`) are read one by one, by `read_line`.

All temporary arrays lie in a workspace that stays in the processor's cache: made anew for each slab, they would cost
more than all the arithmetic.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.features.arrays import Array, Bytes, Floats, Hashes, Int64s, Mask, UInt32s
from embark.features.made import with_made
from embark.features.rows import MAX_QUOTED, BadRow, RawRows
from embark.features.schema import Schema
from embark.values import frozen
from .inputs import InputFile, Inputs
from .rows import Segment, reason_of
from .text_stream import PAD_BYTES, LineChunk, line_chunks, line_segments

NUM_DENSE = 13
NUM_SPARSE = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_SPARSE
SLAB_BYTES = 512 << 10
"""So small that a slab and the arrays made of it stay in a core's own cache, so large that calls cost little."""
_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = 9, 10, 13, ord("-"), ord("0")
_INTEGER = re.compile(rb"-?[0-9]{1,18}")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")


class CriteoReader:
    """Reads Kaggle's `train.txt` and the days of the 1TB set, plain or gzip."""

    def __init__(self, schema: Schema, inputs: Inputs) -> None:
        self._inputs, self._schema = inputs, schema
        self._names = (schema.label, *schema.dense, *(column.name for column in schema.read))

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Cut a file into byte ranges; each owns the lines that begin in it. A gzip file is one range."""
        return line_segments(self._inputs, file, segment_bytes)

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """Yield the segment's rows in order."""
        decoder, line, text_bytes = SlabDecoder(), 0, 0
        slabs: list[RawRows] = []
        for chunk in line_chunks(self._inputs, segment, SLAB_BYTES):
            slabs.append(self._rows(decoder.decode(chunk.text), chunk, line))
            line, text_bytes = line + slabs[-1].num_lines, text_bytes + len(chunk.text)
            if text_bytes >= chunk_bytes:
                yield with_made(RawRows.join(slabs), self._schema)
                slabs, text_bytes = [], 0
        if slabs:
            yield with_made(RawRows.join(slabs), self._schema)

    def _rows(self, slab: Slab, chunk: LineChunk, first_line: int) -> RawRows:
        slab, bad = _with_doubtful(slab, chunk.text[PAD_BYTES:-PAD_BYTES], self._names)
        starts = slab.line_starts if len(slab.lines) == len(slab.line_starts) else slab.line_starts[slab.lines]
        has_missing = np.logical_or.reduce(slab.is_missing, axis=1).tolist()
        return RawRows(
            starts + chunk.position, slab.label.astype(np.float32), slab.dense, tuple(slab.keys), (None,) * NUM_SPARSE,
            tuple(mask if has else None for mask, has in zip(slab.is_missing, has_missing, strict=True)),
            bad=tuple(BadRow(first_line + line, why) for line, why in bad[:MAX_QUOTED]),
            reasons=Counter(reason_of(why) for _, why in bad), num_lines=len(slab.line_starts)
        )


def read_line(line: bytes, names: tuple[str, ...]) -> tuple[int, list[int | None], list[int | None]]:
    """Return label, integers and ids of one line without its newline; a ValueError says what is wrong with it."""
    if not line.strip():
        raise ValueError("an empty line")
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != NUM_FIELDS:
        raise ValueError(f"{len(fields)} {'field' if len(fields) == 1 else 'fields'} instead of {NUM_FIELDS}")
    if fields[0] not in (b"0", b"1"):
        raise ValueError(f"the label is {_shown(fields[0])}, neither 0 nor 1")
    integers = [_number(f, _INTEGER, 10, "not an integer", n) for f, n in zip(fields[1:14], names[1:14], strict=True)]
    ids = [_number(f, _HEX, 16, "not 1 to 8 hexadecimal digits", n)
           for f, n in zip(fields[14:], names[14:], strict=True)]
    return int(fields[0]), integers, ids


def _number(field: bytes, form: re.Pattern[bytes], base: int, why: str, name: str) -> int | None:
    if not field:
        return None
    if not form.fullmatch(field):
        raise ValueError(f"{name} is {_shown(field)}, {why}")
    return int(field, base)


def _shown(field: bytes) -> str:
    text = repr(field[:24])[1:]
    return text if len(field) <= 24 else f"{text}…"


def _with_doubtful(slab: Slab, text: Bytes, names: tuple[str, ...]) -> tuple[Slab, list[tuple[int, str]]]:
    """Read the slab's doubtful lines one by one and put them in their order; also return the bad ones and why they
    are."""
    if not len(slab.doubtful):
        return slab, []
    stops = np.append(slab.line_starts[1:], len(text))
    good: list[tuple[int, tuple[int, list[int | None], list[int | None]]]] = []
    bad: list[tuple[int, str]] = []
    for line in slab.doubtful.tolist():
        raw = text[slab.line_starts[line] : stops[line]].tobytes().removesuffix(b"\n")
        try:
            good.append((line, read_line(raw, names)))
        except ValueError as error:
            bad.append((line, str(error)))
    if not good:
        return slab, bad
    lines = np.concatenate([slab.lines, [line for line, _ in good]])
    order = np.argsort(lines, kind="stable")

    def merged(first: Array, more: list[Any], axis: int = 0) -> Array:
        second = np.array(more, first.dtype)
        return np.concatenate([first, second.T if axis else second], axis).take(order, axis)

    return replace(
        slab, lines=lines[order], label=merged(slab.label, [label for _, (label, _, _) in good]),
        dense=merged(slab.dense, [[np.nan if v is None else v for v in values] for _, (_, values, _) in good]),
        keys=merged(slab.keys, [[v or 0 for v in keys] for _, (_, _, keys) in good], 1),
        is_missing=merged(slab.is_missing, [[v is None for v in keys] for _, (_, _, keys) in good], 1)
    ), bad


@frozen
class Slab:
    """Rows of some lines, in columns."""

    lines: Int64s  # The line of each row, from 0 within the slab.
    label: Bytes
    dense: Floats  # [n, 13], NaN where the field is empty.
    keys: UInt32s  # [26, n], anything where the field is empty.
    is_missing: Mask  # [26, n]
    line_starts: Int64s  # First byte of every line, within the slab.
    doubtful: Int64s  # Lines that are not among the rows: too few fields, or something that is not simple.


class SlabDecoder:
    """Decodes one slab after the other."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def decode(self, text: Bytes) -> Slab:
        """Decode complete lines, which have PAD_BYTES of anything on either side."""
        slab = text[PAD_BYTES:-PAD_BYTES]
        is_end = self._array("mask", len(slab), np.bool_)
        ends = np.flatnonzero(np.less_equal(slab, _NEWLINE, out=is_end))
        table, lines, odd, line_starts = self._regular_rows(slab, ends)
        # The byte eight before the end of each field, and first of the field before the first.
        tails = self._array("tails", (NUM_FIELDS + 1, len(table)), np.int64)
        np.add(line_starts if len(lines) == len(line_starts) else line_starts[lines], PAD_BYTES - 9, out=tails[0])
        np.add(table.T, PAD_BYTES - 8, out=tails[1:])
        is_return = text.take(tails[-1] + 7) == _RETURN
        if is_return.any():
            tails[-1] -= is_return
        label = text.take(tails[1] + 7)
        label -= np.uint8(_ZERO)
        is_bad = (label > 1) | (tails[1] - tails[0] != 2)
        dense, num_negative = self._integers(text, tails[1 : 2 + NUM_DENSE], is_bad)
        num_digits = len(slab) - len(ends) - num_negative - int(np.count_nonzero(is_return))
        keys, is_missing = self._hexadecimals(text, tails[1 + NUM_DENSE :], num_digits, is_bad)
        if is_bad.any():
            good, odd = np.flatnonzero(~is_bad), np.union1d(odd, lines[is_bad])
            lines, label, dense = lines[good], label[good], dense[good]
            keys, is_missing = keys[:, good], is_missing[:, good]
        return Slab(lines, label, dense, keys, is_missing, line_starts, odd)

    def _array(self, name: str, shape: int | tuple[int, ...], dtype: type[np.generic]) -> Array:
        """Return the workspace of that name, with any content."""
        num = shape if isinstance(shape, int) else math.prod(shape)
        array = self._arrays.get(name)
        if array is None or len(array) < num:
            array = self._arrays[name] = np.empty(num + num // 4, dtype)
        return array[:num].reshape(shape)

    def _regular_rows(self, slab: Bytes, ends: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return [m, 40] ends of the fields of the lines that have 40, their lines, the other lines, and where each
        line begins. `ends` are all tabs, newlines and bytes below them."""
        num_lines, rest = divmod(len(ends), NUM_FIELDS)
        if not rest:
            table = ends.reshape(num_lines, NUM_FIELDS)
            last = table[:, -1]
            num_tabs = np.count_nonzero(np.equal(slab, _TAB, out=self._array("mask", len(slab), np.bool_)))
            if num_tabs == num_lines * (NUM_FIELDS - 1) and (slab.take(last) == _NEWLINE).all():
                starts = np.zeros(num_lines, np.int64)
                np.add(last[:-1], 1, out=starts[1:])
                return table, np.arange(num_lines), np.empty(0, np.int64), starts
        delimiters = slab.take(ends)
        newlines = np.flatnonzero(delimiters == _NEWLINE)
        is_regular = np.diff(newlines, prepend=-1) == NUM_FIELDS
        is_regular[np.searchsorted(newlines, np.flatnonzero(delimiters < _TAB))] = False
        lines = np.flatnonzero(is_regular)
        table = ends[newlines[lines][:, None] + np.arange(1 - NUM_FIELDS, 1)]
        return table, lines, np.flatnonzero(~is_regular), np.concatenate([[0], ends[newlines[:-1]] + 1])

    def _integers(self, text: Bytes, tails: Int64s, is_bad: Mask) -> tuple[Floats, int]:
        """Return [n, 13] numbers, NaN where the field is empty, and how many are negative. `tails` begins with that of
        the field before. Rows that need a second look are marked in `is_bad`."""
        lengths = self._lengths(tails)
        tails = tails[1:]
        digits = self._words(text, tails)
        digits ^= _ASCII_ZEROS
        own = self._array("own bytes", tails.shape, np.uint64)
        digits &= _OWN_BYTES.take(lengths, mode="clip", out=own)
        values = _eight_digits(digits, own)
        is_empty = np.equal(lengths, 0, out=self._array("empty", lengths.shape, np.bool_))
        # An empty field has come out as 0, all of whose bits are 0.
        values.view(np.uint32)[:] |= np.multiply(is_empty, _NAN_BITS, dtype=np.uint32)
        num_negative = 0
        if len(is_bad):
            is_odd = digits.view(np.uint8).reshape(len(tails), -1).max(axis=1) > 9
            for i in np.flatnonzero(is_odd | (lengths.max(axis=1) > 8)):
                is_wrong, num = self._signed(text, tails[i], lengths[i], digits[i], values[i])
                is_bad |= is_wrong
                num_negative += num
        return np.ascontiguousarray(values.T), num_negative

    def _signed(
        self, text: Bytes, tails: Int64s, lengths: Int64s, digits: Hashes, values: Floats
    ) -> tuple[Mask, int]:
        """Correct the negative values of a column in which not all bytes are digits. Return which rows need a second
        look, and how many are negative."""
        is_wrong = ~_is_digits(digits) | (lengths > 8)
        rows = np.flatnonzero(is_wrong)
        sizes, tails = lengths[rows], tails[rows]
        is_negative = (text.take(tails + 8 - sizes) == _MINUS) & (sizes > 1) & (sizes <= 9)
        rows, sizes, tails = rows[is_negative], sizes[is_negative], tails[is_negative]
        digits = (self._words(text, tails, "signed") ^ _ASCII_ZEROS) & _OWN_BYTES.take(sizes - 1)
        is_right = _is_digits(digits)
        rows, digits = rows[is_right], digits[is_right]
        values[rows] = -_eight_digits(digits, np.empty_like(digits))
        is_wrong[rows] = False
        return is_wrong, len(rows)

    def _hexadecimals(
        self, text: Bytes, tails: Int64s, num_digits: int, is_bad: Mask
    ) -> tuple[UInt32s, Mask]:
        """Return [26, n] numbers, and where the field is empty. `num_digits`: bytes of the lines that are neither
        between fields nor signs. Rows that need a second look are marked in `is_bad`."""
        sizes = np.subtract(tails[1:], tails[:-1], out=self._array("sizes", (NUM_SPARSE, tails.shape[1]), np.int64))
        is_missing = sizes == 1
        is_eight = np.equal(sizes, 9, out=self._array("eight", sizes.shape, np.bool_))
        num_simple = np.count_nonzero(is_missing) + np.count_nonzero(is_eight)
        if num_simple < sizes.size or not self._nibbles(text, num_digits):
            return self._any_hexadecimals(text, tails, is_bad)
        fours = self._four_digits(len(text))
        # A field begins behind the end of the one before, which is 8 behind its tail.
        picked = self._array("picked", sizes.shape, np.uint16)
        keys = fours[9:].take(tails[:-1], mode="clip", out=picked).astype(np.uint32)
        keys *= np.uint32(1 << 16)
        keys |= fours[13:].take(tails[:-1], mode="clip", out=picked)
        return keys, is_missing

    def _nibbles(self, text: Bytes, num_digits: int) -> bool:
        """Write the meaning of each byte as a hexadecimal digit into the workspace. Return whether `num_digits` of the
        lines' bytes are digits or small letters."""
        nibbles = np.bitwise_xor(text, np.uint8(_ZERO), out=self._array("nibbles", len(text), np.uint8))
        # Now 0 to 9, and 0x51 to 0x56 for a to f.
        is_letter = np.greater(nibbles, 9, out=self._array("letters", len(text), np.bool_))
        inner = slice(PAD_BYTES, -PAD_BYTES)
        num_found = len(text) - 2 * PAD_BYTES - np.count_nonzero(is_letter[inner])
        other = np.multiply(is_letter.view(np.uint8), np.uint8(0x51 - 10),
                            out=self._array("other bytes", len(text), np.uint8))
        nibbles -= other
        np.subtract(nibbles, np.uint8(10), out=other)
        num_found += np.count_nonzero(np.less(other, 6, out=is_letter)[inner])
        return bool(num_found == num_digits)

    def _four_digits(self, size: int) -> NDArray[np.uint16]:
        """Return the number that each byte's digit makes with the three digits behind it."""
        # Products, for numpy shifts small numbers one by one and multiplies many at once.
        nibbles, pairs = self._array("nibbles", size, np.uint8), self._array("other bytes", size, np.uint8)[:-1]
        np.multiply(nibbles[:-1], np.uint8(16), out=pairs)
        pairs |= nibbles[1:]
        wide = self._array("wide", size - 1, np.uint16)
        wide[:] = pairs
        fours: NDArray[np.uint16] = self._array("fours", size - 3, np.uint16)
        np.multiply(wide[:-2], np.uint16(256), out=fours)
        fours |= wide[2:]
        return fours

    def _any_hexadecimals(self, text: Bytes, tails: Int64s, is_bad: Mask) -> tuple[UInt32s, Mask]:
        """Read hexadecimal fields of any length, with capitals too."""
        lengths = self._lengths(tails)
        nibbles, own = self._words(text, tails[1:]), _OWN_BYTES.take(lengths, mode="clip")
        # Control characters, of which the next step would make digits, have neither of two bits.
        control = ~(nibbles | nibbles << np.uint64(1)) & _repeated(0x40) & own
        is_bad |= np.bitwise_or.reduce(control, axis=0) != 0
        nibbles |= _repeated(0x20)  # small letters
        nibbles ^= _ASCII_ZEROS
        nibbles &= own
        is_letter = nibbles >> np.uint64(6)
        is_letter &= _repeated(1)
        nibbles -= is_letter * np.uint64(0x51 - 10)
        # Right is what lies within 0 to 15, and above 9 just where it was a letter.
        wrong = ((nibbles + _repeated(6)) >> np.uint64(4)) ^ is_letter
        wrong &= _repeated(0x0F)
        wrong |= nibbles & _repeated(0xF0)
        is_bad |= np.bitwise_or.reduce(wrong, axis=0) != 0
        is_bad |= lengths.max(axis=0, initial=0) > 8
        # Two nibbles make a byte in every second position; the narrowing cast closes the gaps.
        nibbles |= nibbles << np.uint64(12)
        keys = (nibbles.view(np.uint16) >> np.uint16(8)).astype(np.uint8).view(np.uint32)
        return keys.byteswap(inplace=True), lengths == 0

    def _lengths(self, tails: Int64s) -> Int64s:
        shape = (len(tails) - 1, tails.shape[1])
        lengths: Int64s = np.subtract(tails[1:], tails[:-1], out=self._array("lengths", shape, np.int64))
        lengths -= 1
        return lengths

    def _words(self, text: Bytes, tails: Int64s, name: str = "words") -> Hashes:
        """Return the eight bytes from each position on as a number. Two aligned words hold them, which is faster than
        numpy is with words that begin anywhere."""
        aligned = text[: len(text) & ~7].view(np.uint64)
        indexes = np.right_shift(tails, 3, out=self._array(f"{name} indexes", tails.shape, np.int64))
        words: Hashes = aligned.take(indexes, mode="clip", out=self._array(name, tails.shape, np.uint64))
        above = aligned[1:].take(indexes, mode="clip", out=self._array(f"{name} above", tails.shape, np.uint64))
        shifts = np.bitwise_and(tails, 7, out=indexes)
        shifts *= 8
        words >>= shifts.view(np.uint64)
        np.subtract(64, shifts, out=shifts)
        above <<= shifts.view(np.uint64)  # by 64 gives 0 in numpy
        words |= above
        return words


def _repeated(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


# The bytes of the word that are a field's own, by its length. The last serves all that are longer.
_OWN_BYTES = np.array([~0 << (64 - 8 * n) & (1 << 64) - 1 for n in range(9)] + [(1 << 64) - 1], np.uint64)
_ASCII_ZEROS = _repeated(_ZERO)
_NAN_BITS = np.float32(np.nan).view(np.uint32)
_STEPS = tuple((np.uint64(f), np.uint64(s), np.uint64(m)) for f, s, m in (
    (10 << 8 | 1, 8, 0x00FF00FF00FF00FF), (100 << 16 | 1, 16, 0x0000FFFF0000FFFF), (10_000 << 32 | 1, 32, 0xFFFFFFFF)))


def _eight_digits(digits: Hashes, scratch: Hashes) -> Floats:
    """Return the number that eight bytes of 0 to 9 mean, the first byte counting most: pairs, fours, all eight."""
    value = digits
    for factor, shift, mask in _STEPS:
        value = np.multiply(value, factor, out=scratch)
        value >>= shift
        value &= mask
    return value.view(np.int64).astype(np.float32)


def _is_digits(digits: Hashes) -> Mask:
    """Mark the words whose bytes are all 0 to 9."""
    is_digits: Mask = (((digits + _repeated(0x80 - 10)) | digits) & _repeated(0x80)) == 0
    return is_digits

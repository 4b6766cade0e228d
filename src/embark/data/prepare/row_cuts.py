"""Where the rows of delimited text end: at line ends that are outside of quotes.

A quote opens only at the start of a field and is closed by the next single one, as pyarrow and Python's csv read it;
anywhere else it is a character like any other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_ROW_BYTES = 1 << 20
"""A longer row is an unclosed quote, or not text."""
_QUOTE, _LF, _CR = 34, 10, 13


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Complete rows, one after the other."""

    text: bytes
    starts: NDArray[np.int64]
    """[r]: where in the stream each row begins."""
    lines: NDArray[np.int64]
    """[r]: the line each begins in, from 0 in the stream."""
    is_blank: NDArray[np.bool_]
    """[r]: it is an empty line."""
    stop_line: int
    """The line behind the last row."""


@dataclass(frozen=True, slots=True)
class Runaway:
    """A row without an end. Only its first line is left out: the rest is read as if a row began there."""

    line: int
    why: str
    stop_line: int


def cut_rows(pieces: Iterator[bytes], delimiter: bytes, *, has_quotes: bool = True, first_byte: int = 0,
             max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[RowBlock | Runaway]:
    """The rows of a stream that begins with a row. How it is cut into pieces changes no row."""
    at, line, rest = first_byte, 0, b""
    is_skipping = is_end = False
    while not is_end:
        piece = next(pieces, None)
        is_end = piece is None
        rest += piece or b""
        if is_end and rest and not rest.endswith(b"\n"):
            rest += b"\n"
        while rest:
            if is_skipping:
                end = _first_line_end(rest)
                used = end or len(rest.removesuffix(b"\r"))
                at, rest = at + used, rest[used:]
                if not end:
                    break
                line, is_skipping = line + 1, False
                continue
            ends, line_numbers = _row_ends(rest, delimiter, has_quotes)
            is_long = np.diff(ends, prepend=0) > max_row_bytes
            num_short = int(is_long.argmax()) if is_long.any() else len(ends)
            if num_short:
                block = _block(rest, ends[:num_short], line_numbers[:num_short], at, line)
                yield block
                used = int(ends[num_short - 1])
                at, line, rest = at + used, block.stop_line, rest[used:]
            if num_short == len(ends) and len(rest) <= max_row_bytes and not is_end:
                break
            if rest:
                limit = f"{max_row_bytes / (1 << 20):g} MiB"
                why = (f"a quote opens in it that is not closed within {limit}" if b'"' in rest[:max_row_bytes]
                       else f"it is longer than {limit}")
                yield Runaway(line, why, line + 1)
                is_skipping = True


def without_odd_rows(
    text: bytes, delimiter: bytes, num_fields: int, *, has_quotes: bool
) -> tuple[bytes, dict[int, int]]:
    """Complete rows without those that have another number of fields; how many these have, by their position among the
    rows that are not empty lines."""
    ends, _ = _row_ends(text, delimiter, has_quotes)
    raw = np.frombuffer(text, np.uint8)
    between = np.flatnonzero(raw == delimiter[0])
    if has_quotes and b'"' in text:
        between = between[~_is_inside(text, raw, delimiter, between)]
    found = np.diff(np.searchsorted(between, ends), prepend=0) + 1
    sizes = np.diff(ends, prepend=0)
    is_blank = _is_blank(raw, ends - sizes, sizes)
    is_odd = (found != num_fields) & ~is_blank
    place = np.cumsum(~is_blank) - 1
    odd = {int(place[row]): int(found[row]) for row in np.flatnonzero(is_odd)}
    return raw[: int(sizes.sum())][np.repeat(~is_odd, sizes)].tobytes(), odd


def _block(text: bytes, ends: NDArray[np.int64], line_numbers: NDArray[np.int64], at: int, line: int) -> RowBlock:
    starts = np.concatenate([[0], ends[:-1]])
    lines = np.concatenate([[0], line_numbers[:-1]]) + line
    sizes = ends - starts
    is_blank = _is_blank(np.frombuffer(text, np.uint8), starts, sizes)
    used = int(ends[-1])
    rows = text if used == len(text) else text[:used]
    if rows.endswith(b"\r"):
        rows = rows[:-1] + b"\n"  # alone at the end it could be half of \r\n
    return RowBlock(rows, starts + at, lines, is_blank, stop_line=line + int(line_numbers[-1]))


def _is_blank(raw: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    is_blank: NDArray[np.bool_] = sizes == 1
    two = np.flatnonzero(sizes == 2)
    is_blank[two] = raw[starts[two]] == _CR
    return is_blank


def _row_ends(text: bytes, delimiter: bytes, has_quotes: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The byte behind each row, and how many lines end up to there."""
    raw = np.frombuffer(text, np.uint8)
    breaks = np.flatnonzero(raw == _LF)
    if b"\r" in text:
        returns = np.flatnonzero(raw[:-1] == _CR)
        alone = returns[raw[returns + 1] != _LF]
        if len(alone):
            breaks = np.sort(np.concatenate([breaks, alone]))
    numbers = np.arange(1, len(breaks) + 1)
    if has_quotes and b'"' in text:
        is_outside = ~_is_inside(text, raw, delimiter, breaks)
        breaks, numbers = breaks[is_outside], numbers[is_outside]
    return breaks + 1, numbers


def _is_inside(text: bytes, raw: NDArray[np.uint8], delimiter: bytes, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the places are within quotes."""
    quotes = np.flatnonzero(raw == _QUOTE)
    opening = quotes[::2]
    before = raw[opening - 1]
    may_open = (before == delimiter[0]) | (before == _LF) | (before == _CR) | (opening == 0)
    may_open[1:] |= quotes[1:-1:2] == opening[1:] - 1  # the second of a doubled one
    if may_open.all():
        is_odd: NDArray[np.bool_] = np.searchsorted(quotes, places) % 2 == 1
        return is_odd
    # A quote stands in the middle of a field, and from there on counting them says nothing.
    field = rb'(?:(?<=[\r\n' + re.escape(delimiter) + rb'])|\A)"[^"]*(?:""[^"]*)*(?:"|\Z)'
    spans = np.array([found.span() for found in re.finditer(field, text)], np.int64).reshape(-1, 2)
    position = np.searchsorted(spans[:, 0], places) - 1
    inside: NDArray[np.bool_] = (position >= 0) & (places < spans[position, 1]) if len(spans) else places < 0
    return inside


def _first_line_end(text: bytes) -> int | None:
    """The byte behind the first line; None if it is not complete. A last `\\r` may be half of `\\r\\n`."""
    found = re.search(rb"\r?\n|\r(?=.)", text, re.DOTALL)
    return found.end() if found else None

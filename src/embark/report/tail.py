"""Lines of a file that grows, is cut, is replaced, or is far too long to read before anything is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from embark.events.events import Event
from embark.report.locations import Place

BLOCK_BYTES = 1 << 20
FAR_BLOCK_BYTES = 8 << 20
"""Where each block is a request."""
MAX_LINE_BYTES = 4 << 20
"""A line longer than that is no event; it is passed over without being held."""
_CHECKED_BYTES = 64
SAMPLE_PIECES = 500
SAMPLE_FAR_PIECES = 48
SAMPLE_LINES = 4
"""Of a piece's length, in lines of the usual length; the first and the last are seldom whole."""
SAMPLE_PIECE_BYTES = (1 << 10, 64 << 10)
SAMPLE_END_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Read:
    """What one look found."""

    lines: tuple[bytes, ...] = ()
    """Whole ones only."""
    is_gone: bool = False
    is_new: bool = False
    """The file was replaced or cut, so that what was read before is no longer of it."""
    is_end: bool = True
    """Nothing more was there when it looked."""


class Tail:
    """The lines of a file, a block at a time, from where the last look ended."""

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self._name = name
        self._offset = 0
        self._last = b""
        self._rest = b""
        self._is_skipping = False

    @property
    def offset(self) -> int:
        """How many bytes have been read."""
        return self._offset

    def look(self) -> Read:
        size = self._place.size_bytes(self._name)
        if size is None:
            was_there = self._offset > 0
            self._forget()
            return Read(is_gone=True, is_new=was_there)
        if size == self._offset:
            return Read()
        is_new = size < self._offset
        if is_new:
            self._forget()
        block = self._next_block()
        if block is None:  # what stands before is not what was read there: another file
            is_new = True
            self._forget()
            block = self._next_block() or b""
        self._offset += len(block)
        self._last = (self._last + block)[-_CHECKED_BYTES:]
        return Read(tuple(self._whole_lines(block)), is_new=is_new, is_end=self._offset >= size or not block)

    def _next_block(self) -> bytes | None:
        """The bytes that follow; None where those before them have changed."""
        known = len(self._last)
        block_bytes = FAR_BLOCK_BYTES if self._place.is_remote else BLOCK_BYTES
        read = self._place.read(self._name, self._offset - known, known + block_bytes)
        return read[known:] if read[:known] == self._last else None

    def _whole_lines(self, block: bytes) -> Iterator[bytes]:
        *lines, rest = (self._rest + block).split(b"\n")
        if self._is_skipping and lines:
            self._is_skipping = False
            lines = lines[1:]
        if len(rest) > MAX_LINE_BYTES:
            self._is_skipping = True
        self._rest = b"" if self._is_skipping else rest
        yield from lines

    def _forget(self) -> None:
        self._offset = 0
        self._last = b""
        self._rest = b""
        self._is_skipping = False


def sample(place: Place, name: str, size_bytes: int) -> Iterator[bytes]:
    """Whole lines from all over a long file, in order: its beginning, its end, and many places between."""
    head = place.read(name, 0, SAMPLE_END_BYTES).split(b"\n")[:-1]
    yield from head
    least, most = SAMPLE_PIECE_BYTES
    wanted = SAMPLE_LINES * (SAMPLE_PIECES // SAMPLE_FAR_PIECES if place.is_remote else 1)
    piece_bytes = min(most, max(least, wanted * SAMPLE_END_BYTES // max(1, len(head))))
    end = max(SAMPLE_END_BYTES, size_bytes - SAMPLE_END_BYTES)
    num_pieces = SAMPLE_FAR_PIECES if place.is_remote else SAMPLE_PIECES
    for piece in range(num_pieces):
        start = SAMPLE_END_BYTES + (end - SAMPLE_END_BYTES) * piece // num_pieces
        room = min(piece_bytes, end - start)
        if room > 0:
            yield from place.read(name, start, room).split(b"\n")[1:-1]
    yield from place.read(name, end, size_bytes - end).split(b"\n")[1:]


def parse(line: bytes) -> Event | None:
    """One event; None for a line that is none: cut short, no JSON, or not of our making."""
    try:
        values: Any = json.loads(line)
        kind, time_s = values.pop("event"), float(values.pop("time_s"))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        return None
    rank = values.pop("rank", 0)
    if not isinstance(kind, str) or not math.isfinite(time_s):
        return None
    return Event(kind, values, time_s, rank if isinstance(rank, int) else 0)

"""Lines of a file that grows, is truncated or replaced, or is too long to be read before anything is shown."""

from collections.abc import Iterator
from dataclasses import dataclass

from embark.report.run_files import RunFiles

BLOCK_BYTES = 1 << 20
REMOTE_BLOCK_BYTES = 8 << 20
"""Where each block is a request."""
MAX_LINE_BYTES = 4 << 20
"""A longer line is no event; it is skipped without being held in memory."""
_CHECKED_BYTES = 64
SAMPLE_PIECES = 500
SAMPLE_REMOTE_PIECES = 48
SAMPLE_LINES = 4
"""The length of a piece, in lines of usual length; the first and the last are seldom complete."""
SAMPLE_PIECE_BYTES = (1 << 10, 64 << 10)
SAMPLE_END_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Read:
    """What one call of `look` found."""

    lines: tuple[bytes, ...] = ()
    """Complete ones only."""
    is_missing: bool = False
    is_new: bool = False
    """The file was replaced or truncated: what was read before is no longer part of it."""
    is_end: bool = True
    """There was nothing more to read."""


class Tail:
    """The lines of a file, a block at a time, from where the last call ended."""

    def __init__(self, files: RunFiles, name: str) -> None:
        self._files = files
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
        size = self._files.size_bytes(self._name)
        if size is None:
            was_there = self._offset > 0
            self._reset()
            return Read(is_missing=True, is_new=was_there)
        if size == self._offset:
            return Read()
        is_new = size < self._offset
        if is_new:
            self._reset()
        block = self._next_block()
        if block is None:  # the bytes before have changed: another file
            is_new = True
            self._reset()
            block = self._next_block() or b""
        self._offset += len(block)
        self._last = (self._last + block)[-_CHECKED_BYTES:]
        return Read(tuple(self._complete_lines(block)), is_new=is_new, is_end=self._offset >= size or not block)

    def _next_block(self) -> bytes | None:
        """The bytes that follow; None where those before them have changed."""
        known = len(self._last)
        block_bytes = REMOTE_BLOCK_BYTES if self._files.is_remote else BLOCK_BYTES
        read = self._files.read(self._name, self._offset - known, known + block_bytes)
        return read[known:] if read[:known] == self._last else None

    def _complete_lines(self, block: bytes) -> Iterator[bytes]:
        *lines, rest = (self._rest + block).split(b"\n")
        if self._is_skipping and lines:
            self._is_skipping = False
            lines = lines[1:]
        if len(rest) > MAX_LINE_BYTES:
            self._is_skipping = True
        self._rest = b"" if self._is_skipping else rest
        yield from lines

    def _reset(self) -> None:
        self._offset = 0
        self._last = b""
        self._rest = b""
        self._is_skipping = False


def sample(files: RunFiles, name: str, size_bytes: int) -> Iterator[bytes]:
    """Complete lines of a long file, in order: its beginning, its end, and samples between."""
    head = files.read(name, 0, SAMPLE_END_BYTES).split(b"\n")[:-1]
    yield from head
    least, most = SAMPLE_PIECE_BYTES
    wanted = SAMPLE_LINES * (SAMPLE_PIECES // SAMPLE_REMOTE_PIECES if files.is_remote else 1)
    piece_bytes = min(most, max(least, wanted * SAMPLE_END_BYTES // max(1, len(head))))
    end = max(SAMPLE_END_BYTES, size_bytes - SAMPLE_END_BYTES)
    num_pieces = SAMPLE_REMOTE_PIECES if files.is_remote else SAMPLE_PIECES
    for piece in range(num_pieces):
        start = SAMPLE_END_BYTES + (end - SAMPLE_END_BYTES) * piece // num_pieces
        num_bytes = min(piece_bytes, end - start)
        if num_bytes > 0:
            yield from files.read(name, start, num_bytes).split(b"\n")[1:-1]
    yield from files.read(name, end, size_bytes - end).split(b"\n")[1:]

"""The bytes of a text file, plain or gzip, read and decompressed by a thread ahead of the parser, also as lines."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.inputs import InputFile, Inputs
from embark.data.prepare.rows import Segment
from embark.errors import DataError

PAD_BYTES = 64
"""Bytes before and behind the text of a chunk, so that words may be read around its first and last byte."""
MAX_LINE_BYTES = 64 << 10
"""Of a line that does not fit a chunk, only so much is read: enough for the error."""

GZIP_MAGIC = b"\x1f\x8b"
_PACKED_BYTES = 1 << 20
_DEPTH = 2
_GZIP = 16 + zlib.MAX_WBITS


def is_gzip(inputs: Inputs, file: InputFile) -> bool:
    """By its first bytes, whatever it is called."""
    return inputs.read(file.uri, 0, 2) == GZIP_MAGIC


class TextStream:
    """Bytes `start` to `stop` of a plain file; all of a gzip file, decompressed. It holds at most four pieces."""

    def __init__(self, inputs: Inputs, file: InputFile, start: int, stop: int, piece_bytes: int) -> None:
        self._reported_bytes = self._read_bytes = 0
        self.pieces: Iterator[bytes]
        if is_gzip(inputs, file):
            self.pieces = read_ahead(decompress(inputs, file, piece_bytes, self._count))
        else:
            self.pieces = read_ahead(_plain(inputs, file, start, stop, piece_bytes, self._count))

    def take_read_bytes(self) -> int:
        """Bytes of the file, as stored, since the last call."""
        before, self._reported_bytes = self._reported_bytes, self._read_bytes
        return self._read_bytes - before

    def _count(self, num_bytes: int) -> None:
        self._read_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Complete lines of a file."""

    text: NDArray[np.uint8]
    """The lines, the last with its newline, between PAD_BYTES of anything on either side."""
    position: int
    """In the file, decompressed, of the first line."""
    read_bytes: int
    """Of the file, as stored, since the previous chunk."""


def line_segments(inputs: Inputs, file: InputFile, segment_bytes: int) -> list[Segment]:
    """Equal byte ranges of about that size, each owning the lines that begin in it; a gzip file is one segment."""
    num = 1 if is_gzip(inputs, file) else max(1, round(file.size_bytes / segment_bytes))
    cuts = [file.size_bytes * i // num for i in range(num + 1)]
    return [Segment(file, i, start, stop) for i, (start, stop) in enumerate(pairwise(cuts))]


def line_chunks(inputs: Inputs, segment: Segment, chunk_bytes: int) -> Iterator[LineChunk]:
    """The lines that begin in the segment, by about `chunk_bytes`. The last line of a file gets a newline."""
    file, chunk_bytes = segment.file, max(chunk_bytes, 2 * MAX_LINE_BYTES)
    # A line begins at `start` if the byte before it is a newline, so that byte is read too.
    position = max(segment.start - 1, 0)
    stop = 1 << 62 if segment.start == 0 and is_gzip(inputs, file) else segment.stop
    stream = TextStream(inputs, file, position, file.size_bytes, chunk_bytes)
    text, is_skipping = b"", segment.start > 0
    for piece in chain(stream.pieces, [None]):
        text += piece or b""
        if is_skipping:
            end = text.find(b"\n") + 1
            position += end or len(text)
            text, is_skipping = text[end or len(text) :], not end
        if is_skipping or not text:
            continue
        if position >= stop:
            return
        if piece is None:
            text += b"\n"
        # Behind the newline that ends the last line of the segment, or of the chunk.
        end = text.find(b"\n", stop - 1 - position) + 1
        is_last = end > 0
        end = end or text.rfind(b"\n") + 1
        if end:
            yield _chunk(memoryview(text)[:end], position, stream)
            position, text = position + end, text[end:]
        elif len(text) >= chunk_bytes:
            yield _chunk(text[:MAX_LINE_BYTES] + b"\n", position, stream)
            position, text, is_skipping = position + MAX_LINE_BYTES, text[MAX_LINE_BYTES:], True
        if is_last:
            return


def _chunk(lines: bytes | memoryview, position: int, stream: TextStream) -> LineChunk:
    padded = np.empty(len(lines) + 2 * PAD_BYTES, np.uint8)
    padded[PAD_BYTES:-PAD_BYTES] = np.frombuffer(lines, np.uint8)
    return LineChunk(padded, position, stream.take_read_bytes())


def head(inputs: Inputs, file: InputFile, num_bytes: int) -> bytes:
    """The first bytes of the text; fewer where it is shorter."""
    if not is_gzip(inputs, file):
        return inputs.read(file.uri, 0, num_bytes)
    pieces, size = [], 0
    for piece in decompress(inputs, file, num_bytes):
        pieces.append(piece)
        size += len(piece)
        if size >= num_bytes:
            break
    return b"".join(pieces)[:num_bytes]


def decompress(
    inputs: Inputs, file: InputFile, piece_bytes: int, count: Callable[[int], object] = lambda _: None
) -> Iterator[bytes]:
    """The text of a gzip file of any number of members; one that is cut short or damaged is refused."""
    unpacker, at, num_out, num_lines = zlib.decompressobj(_GZIP), 0, 0, 0
    is_open = False
    while packed := inputs.read(file.uri, at, _PACKED_BYTES):
        at += len(packed)
        count(len(packed))
        while packed:
            if not is_open:
                packed = packed.lstrip(b"\0")  # tapes and some tools fill up with zeros behind the last member
                if not packed:
                    break
                is_open = True
            try:
                text = unpacker.decompress(packed, piece_bytes)
            except zlib.error as error:
                raise _damaged(file, "damaged within the first", at, num_lines, num_out, f" ({error})") from None
            packed = unpacker.unconsumed_tail
            if unpacker.eof:
                packed, unpacker, is_open = unpacker.unused_data, zlib.decompressobj(_GZIP), False
            if text:
                num_out += len(text)
                num_lines += text.count(b"\n")
                yield text
    if is_open:
        text = unpacker.flush()
        if not unpacker.eof:
            raise _damaged(file, "cut short at", at, num_lines + text.count(b"\n"), num_out + len(text))
        yield text


def _damaged(file: InputFile, what: str, at: int, num_lines: int, num_out: int, why: str = "") -> DataError:
    return DataError(
        f"{file.uri}: the gzip file is {what} {at:,} of {file.size_bytes:,} bytes, after {num_lines:,} lines, "
        f"{num_out:,} bytes of text{why}",
        fix="copy or download it again: this copy has lost what comes after that place",
    )


def _plain(
    inputs: Inputs, file: InputFile, start: int, stop: int, piece_bytes: int, count: Callable[[int], object]
) -> Iterator[bytes]:
    while start < stop:
        piece = inputs.read(file.uri, start, min(piece_bytes, stop - start))
        if not piece:
            raise DataError(f"{file.uri}: ends at byte {start:,}, and had {file.size_bytes:,} bytes when the "
                            "preparation began", fix="let nothing write to it, and start again")
        start += len(piece)
        count(len(piece))
        yield piece


def read_ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, made by a thread; an error comes where the piece would have."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(_DEPTH)
    is_over = threading.Event()

    def put(item: bytes | BaseException | None) -> bool:
        while not is_over.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def produce() -> None:
        try:
            for piece in pieces:
                if not put(piece):
                    return
            put(None)
        except BaseException as error:
            put(error)

    threading.Thread(target=produce, name="embark-read-ahead", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_over.set()

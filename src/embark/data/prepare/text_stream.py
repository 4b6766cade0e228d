"""The bytes of a text file, plain or gzip, read and unpacked by a thread ahead of who parses them."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from embark.data.prepare.pieces import InputFile, Inputs
from embark.errors import DataError

Made = TypeVar("Made")

GZIP_MAGIC = b"\x1f\x8b"
_PACKED_BYTES = 1 << 20
_DEPTH = 2
_GZIP = 16 + zlib.MAX_WBITS


def _nobody(_num_bytes: int) -> None: ...


def is_gzip(inputs: Inputs, file: InputFile) -> bool:
    """By its first bytes, whatever it is called."""
    return inputs.read(file.uri, 0, 2) == GZIP_MAGIC


class TextStream:
    """Bytes `start` to `stop` of a plain file; all of a gzip one, unpacked. At most four pieces are held at a time."""

    def __init__(self, inputs: Inputs, file: InputFile, start: int, stop: int, piece_bytes: int) -> None:
        self._told_bytes = self._read_bytes = 0
        self.pieces: Iterator[bytes]
        if is_gzip(inputs, file):
            self.pieces = ahead(unpacked(inputs, file, piece_bytes, self._count))
        else:
            self.pieces = ahead(_plain(inputs, file, start, stop, piece_bytes, self._count))

    def take_read_bytes(self) -> int:
        """Of the file as it lies there, since this was asked last."""
        told, self._told_bytes = self._told_bytes, self._read_bytes
        return self._told_bytes - told

    def _count(self, num_bytes: int) -> None:
        self._read_bytes += num_bytes


def head(inputs: Inputs, file: InputFile, num_bytes: int) -> bytes:
    """The first bytes of the text; fewer where it is shorter."""
    if not is_gzip(inputs, file):
        return inputs.read(file.uri, 0, num_bytes)
    pieces, size = [], 0
    for piece in unpacked(inputs, file, num_bytes):
        pieces.append(piece)
        size += len(piece)
        if size >= num_bytes:
            break
    return b"".join(pieces)[:num_bytes]


def unpacked(
    inputs: Inputs, file: InputFile, piece_bytes: int, count: Callable[[int], None] = _nobody
) -> Iterator[bytes]:
    """What a gzip file holds, of however many members; one that is cut short or damaged is refused."""
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
        fix="copy or download it again: what comes behind that place is lost in this copy",
    )


def _plain(
    inputs: Inputs, file: InputFile, start: int, stop: int, piece_bytes: int, count: Callable[[int], None]
) -> Iterator[bytes]:
    while start < stop:
        piece = inputs.read(file.uri, start, min(piece_bytes, stop - start))
        if not piece:
            raise DataError(f"{file.uri}: ends at byte {start:,}, and was {file.size_bytes:,} bytes long when it was "
                            "looked at", fix="let nothing write to it, and start again")
        start += len(piece)
        count(len(piece))
        yield piece


def ahead(pieces: Iterator[Made]) -> Generator[Made, None, None]:
    """The same pieces, made by a thread; an error comes where the piece would have."""
    ready: queue.Queue[Made | BaseException | None] = queue.Queue(_DEPTH)
    is_over = threading.Event()

    def put(item: Made | BaseException | None) -> bool:
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

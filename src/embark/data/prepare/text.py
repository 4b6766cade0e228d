"""Text files as chunks of whole lines: plain ones by byte range, gzip as a stream that a thread unpacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.pieces import InputFile, Inputs, Segment
from embark.data.prepare.text_stream import ahead, is_gzip, unpacked

PAD_BYTES = 64
"""Bytes before and behind the text in a chunk's buffer, so that words may be read around its first and last byte."""
LONGEST_LINE_BYTES = 64 << 10
"""What is kept of a line that does not fit a chunk: enough to say what it is."""
_TEXT_BYTES = 4 << 20
_REMOTE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Whole lines of a file. The buffer is used again for the next chunk."""

    text: NDArray[np.uint8]
    """The lines, the last with its newline, between PAD_BYTES of anything on either side."""
    position: int
    """In the file, unpacked, of the first line."""
    read_bytes: int
    """Of the file as it lies there, since the chunk before."""


def text_segments(inputs: Inputs, file: InputFile, segment_bytes: int) -> list[Segment]:
    """Equal byte ranges of about that size, each owning the lines that begin in it; one of a gzip file."""
    num = 1 if is_gzip(inputs, file) else max(1, round(file.size_bytes / segment_bytes))
    cuts = [file.size_bytes * i // num for i in range(num + 1)]
    return [Segment(file, i, start, stop) for i, (start, stop) in enumerate(pairwise(cuts))]


def text_chunks(inputs: Inputs, segment: Segment, chunk_bytes: int) -> Iterator[TextChunk]:
    """The lines that begin in the segment, in chunks of at most `chunk_bytes`. Each file's last line gets a newline."""
    file = segment.file
    chunk_bytes = max(chunk_bytes, 2 * LONGEST_LINE_BYTES)
    # A line begins at `start` if the byte before it is a newline, so that byte is read too.
    first, stop = max(segment.start - 1, 0), segment.stop
    source: _Source
    if segment.start == 0 and is_gzip(inputs, file):
        source, stop = _Stream(_unpacked(inputs, file)), 1 << 62
    elif (path := inputs.local_path(file.uri)) is not None:
        source = _LocalFile(path, first)
    else:
        source = _Stream(_remote(inputs, file, first, min(chunk_bytes, _REMOTE_BYTES)))
    with closing(source):
        yield from _whole_lines(source, first, stop, chunk_bytes, is_in_line=segment.start > 0)


def _whole_lines(
    source: _Source, position: int, stop: int, chunk_bytes: int, is_in_line: bool
) -> Iterator[TextChunk]:
    """Lines that begin before `stop`; with `is_in_line` what comes before the first newline is not of them."""
    buffer = np.empty(PAD_BYTES + chunk_bytes + 1 + PAD_BYTES, np.uint8)
    start = end = PAD_BYTES
    """Of what is read and not given yet; `position` is that of `start`."""
    told_bytes = 0
    is_whole = False
    while position < stop:
        if not is_whole:
            num, is_whole = _fill(source, buffer[end : PAD_BYTES + chunk_bytes])
            end += num
        if is_in_line:
            newline = _find(buffer, start, end)
            position += (end if newline is None else newline + 1) - start
            start = end if newline is None else newline + 1
            is_in_line = newline is None
            if is_in_line and is_whole:
                return
            start, end = _moved(buffer, start, end)
            continue
        if start == end and is_whole:
            return
        # The newline that ends the last line of the segment, or of the chunk.
        at_stop = start + stop - 1 - position
        last = _find(buffer, at_stop, end) if at_stop < end else None
        is_last = last is not None
        if last is None:
            last = _find_last(buffer, start, end)
        if last is None and is_whole:
            buffer[end] = 10
            last, end, is_last = end, end + 1, True
        read_bytes, told_bytes = source.read_bytes - told_bytes, source.read_bytes
        if last is not None:
            yield TextChunk(buffer[start - PAD_BYTES : last + 1 + PAD_BYTES], position, read_bytes)
            if is_last:
                return
        else:
            last = start + LONGEST_LINE_BYTES
            buffer[last] = 10
            is_in_line = True
            yield TextChunk(buffer[start - PAD_BYTES : last + 1 + PAD_BYTES], position, read_bytes)
        position += last + 1 - start
        start, end = _moved(buffer, last + 1, end)


def _moved(buffer: NDArray[np.uint8], start: int, end: int) -> tuple[int, int]:
    """What is left, moved to the front."""
    buffer[PAD_BYTES : PAD_BYTES + end - start] = buffer[start:end].copy()
    return PAD_BYTES, PAD_BYTES + end - start


def _find(buffer: NDArray[np.uint8], start: int, end: int) -> int | None:
    for at in range(start, end, 1 << 16):
        found = buffer[at : min(at + (1 << 16), end)] == 10
        if found.any():
            return at + int(found.argmax())
    return None


def _find_last(buffer: NDArray[np.uint8], start: int, end: int) -> int | None:
    for at in range(end, start, -(1 << 12)):
        found = buffer[max(at - (1 << 12), start) : at] == 10
        if found.any():
            return at - 1 - int(found[::-1].argmax())
    return None


class _Source(Protocol):
    """Bytes one after the other."""

    read_bytes: int
    """Taken so far of the file as it lies there."""

    def readinto(self, view: memoryview) -> int: ...

    def close(self) -> None: ...


def _fill(source: _Source, target: NDArray[np.uint8]) -> tuple[int, bool]:
    """How many bytes came, and whether they were the last."""
    done = 0
    while done < len(target):
        num = source.readinto(target[done:].data)
        if num == 0:
            return done, True
        done += num
    return done, False


class _LocalFile:
    """Read, not mapped: what is mapped would count as the process's memory."""

    def __init__(self, path: str, start: int) -> None:
        self.read_bytes = 0
        self._file = FileIO(path)
        self._file.seek(start)

    def readinto(self, view: memoryview) -> int:
        num = self._file.readinto(view) or 0
        self.read_bytes += num
        return num

    def close(self) -> None:
        self._file.close()


class _Stream:
    """What an iterator gives, made ahead of time by a thread."""

    def __init__(self, blocks: Iterator[tuple[bytes, int]]) -> None:
        self.read_bytes = 0
        self._blocks = ahead(blocks)
        self._block = memoryview(b"")

    def readinto(self, view: memoryview) -> int:
        if not self._block:
            got = next(self._blocks, None)
            if got is None:
                return 0
            self._block = memoryview(got[0])
            self.read_bytes += got[1]
        num = min(len(view), len(self._block))
        view[:num] = self._block[:num]
        self._block = self._block[num:]
        return num

    def close(self) -> None:
        self._blocks.close()


def _remote(inputs: Inputs, file: InputFile, start: int, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    while block := inputs.read(file.uri, start, block_bytes):
        yield block, len(block)
        start += len(block)


def _unpacked(inputs: Inputs, file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Text, and how many packed bytes it took."""
    packed_bytes = told_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal packed_bytes
        packed_bytes += num_bytes

    for text in unpacked(inputs, file, _TEXT_BYTES, count):
        yield text, packed_bytes - told_bytes
        told_bytes = packed_bytes

"""The bytes of a text file, plain or gzip, read and decompressed by a thread ahead of the parser, also as lines."""

import csv
import io
import re
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Bytes, Int64s, Mask
from embark.values import frozen
from .inputs import InputFile, Inputs
from .rows import Segment

PAD_BYTES = 64  # Bytes before and behind the text of a chunk, so that words may be read around its first and last byte.
MAX_LINE_BYTES = 64 << 10  # A line that does not fit a chunk is read up to here: enough for the error.

BOM = b"\xef\xbb\xbf"
_PACKED_BYTES = 1 << 20
_DEPTH = 2
_GZIP = 16 + zlib.MAX_WBITS


def is_gzip(inputs: Inputs, file: InputFile) -> bool:
    """Return whether the first bytes are those of gzip, whatever the file is called."""
    return inputs.read(file.uri, 0, 2) == b"\x1f\x8b"


class TextStream:
    """Reads bytes `start` to `stop` of a plain file; all of a gzip file, decompressed. It holds at most four pieces."""

    def __init__(self, inputs: Inputs, file: InputFile, start: int, stop: int, piece_bytes: int) -> None:
        self._left = memoryview(b"")
        self.pieces: Iterator[bytes] = read_ahead(
            decompress(inputs, file, piece_bytes) if is_gzip(inputs, file) else
            _plain(inputs, file, start, stop, piece_bytes))

    def readinto(self, target: memoryview) -> int:
        """Fill a buffer with the next bytes of the text; 0 at its end."""
        self._left = self._left or memoryview(next(self.pieces, b""))
        num_bytes = min(len(target), len(self._left))
        target[:num_bytes], self._left = self._left[:num_bytes], self._left[num_bytes:]
        return num_bytes


@frozen
class LineChunk:
    """Complete lines of a file. The buffer is used again for the next chunk."""

    text: Bytes  # The lines, the last with its newline, between PAD_BYTES of anything on either side.
    position: int  # The first line's position in the file, decompressed.


def line_segments(inputs: Inputs, file: InputFile, segment_bytes: int) -> list[Segment]:
    """Cut a file into equal byte ranges of about that size, each owning the lines that begin in it; a gzip file is one
    segment."""
    num = 1 if is_gzip(inputs, file) else max(1, round(file.size_bytes / segment_bytes))
    cuts = [file.size_bytes * i // num for i in range(num + 1)]
    return [Segment(file, i, start, stop) for i, (start, stop) in enumerate(pairwise(cuts))]


def line_chunks(inputs: Inputs, segment: Segment, chunk_bytes: int) -> Iterator[LineChunk]:
    """Yield the lines that begin in the segment, by at most `chunk_bytes`. The last line of a file gets a newline.

    All chunks lie in one buffer, which stays in the processor's cache.
    """
    chunk_bytes = max(chunk_bytes, 2 * MAX_LINE_BYTES)
    is_packed = segment.start == 0 and is_gzip(inputs, segment.file)
    # A line begins at `start` if the byte before it is a newline, so that byte is read too.
    position, stop = max(segment.start - 1, 0), 1 << 62 if is_packed else segment.stop
    path = inputs.local_path(segment.file.uri)
    if path is None or is_packed:
        stream = TextStream(inputs, segment.file, position, segment.file.size_bytes, chunk_bytes)
        yield from _cut_lines(stream, position, stop, chunk_bytes, is_skipping=segment.start > 0)
        return
    # Read, not mapped: what is mapped would count as the process's memory.
    with io.FileIO(path) as opened:
        opened.seek(position)
        yield from _cut_lines(opened, position, stop, chunk_bytes, is_skipping=segment.start > 0)


def _cut_lines(
    source: TextStream | io.FileIO, position: int, stop: int, chunk_bytes: int, *, is_skipping: bool
) -> Iterator[LineChunk]:
    """Yield lines that begin before `stop`; with `is_skipping` the text begins in a line that is not one of them."""
    buffer = bytearray(chunk_bytes + 1 + 2 * PAD_BYTES)
    view, array, end = memoryview(buffer), np.frombuffer(buffer, np.uint8), PAD_BYTES
    is_end = False
    while not is_end and position < stop:
        num_bytes = source.readinto(view[end : PAD_BYTES + chunk_bytes])
        is_end, end, first = num_bytes == 0, end + num_bytes, PAD_BYTES
        if is_skipping:
            newline = buffer.find(b"\n", first, end)
            first, is_skipping = (newline + 1, False) if newline >= 0 else (end, True)
            position += first - PAD_BYTES
        if first < end and position < stop:
            # Behind the newline that ends the last line of the segment, or of the chunk.
            cut = buffer.find(b"\n", min(first + stop - 1 - position, end), end) + 1
            is_last = cut > 0
            cut = cut or buffer.rfind(b"\n", first, end) + 1
            if not cut and (is_end or end - first >= chunk_bytes):
                # The file's last line, or one that fits no chunk, of which the rest is skipped.
                is_skipping = not is_end
                cut = end + 1 if is_end else first + MAX_LINE_BYTES + 1
                buffer[cut - 1] = 10
            if cut:
                yield LineChunk(array[first - PAD_BYTES : cut + PAD_BYTES], position)
                position, first = position + cut - first, min(cut, end)
            if is_last:
                return
        buffer[PAD_BYTES : PAD_BYTES + end - first] = buffer[first:end]
        end = PAD_BYTES + end - first


def head(inputs: Inputs, file: InputFile, num_bytes: int) -> bytes:
    """Return the first bytes of the text; fewer if it is shorter."""
    if not is_gzip(inputs, file):
        return inputs.read(file.uri, 0, num_bytes)
    text = b""
    for piece in decompress(inputs, file, num_bytes):
        text += piece
        if len(text) >= num_bytes:
            break
    return text[:num_bytes]


def decompress(inputs: Inputs, file: InputFile, piece_bytes: int) -> Iterator[bytes]:
    """Yield the text of a gzip file of any number of members; one that is cut short or damaged is refused."""
    unpacker, at, num_out = zlib.decompressobj(_GZIP), 0, 0
    is_open = False
    while packed := inputs.read(file.uri, at, _PACKED_BYTES):
        at += len(packed)
        while packed:
            is_open = True
            try:
                text = unpacker.decompress(packed, piece_bytes)
            except zlib.error as error:
                raise _damaged(file, "damaged within the first", at, num_out, f" ({error})") from None
            packed = unpacker.unconsumed_tail
            if unpacker.eof:
                packed, unpacker, is_open = unpacker.unused_data, zlib.decompressobj(_GZIP), False
            if text:
                num_out += len(text)
                yield text
    if is_open:
        text = unpacker.flush()
        if not unpacker.eof:
            raise _damaged(file, "cut short at", at, num_out + len(text))
        yield text


def _damaged(file: InputFile, what: str, at: int, num_out: int, why: str = "") -> DataError:
    return DataError(
        f"{file.uri}: the gzip file is {what} {at:,} of {file.size_bytes:,} bytes, after "
        f"{num_out:,} bytes of text{why}",
        "copy or download it again: this copy has lost what comes after that"
    )


def _plain(inputs: Inputs, file: InputFile, start: int, stop: int, piece_bytes: int) -> Iterator[bytes]:
    while start < stop:
        piece = inputs.read(file.uri, start, min(piece_bytes, stop - start))
        if not piece:
            raise DataError(f"{file.uri}: ends at byte {start:,}, and had {file.size_bytes:,} bytes when the "
                            "preparation began", "let nothing write to it, and start again")
        start += len(piece)
        yield piece


def read_ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same pieces, made by a thread; an error is raised where the piece would have been."""
    thread = ThreadPoolExecutor(1, "embark-read-ahead")
    try:
        ahead = deque(thread.submit(next, pieces, None) for _ in range(_DEPTH))
        while (piece := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, pieces, None))
            yield piece
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


MAX_ROW_BYTES = 1 << 20  # A longer row is an unclosed quote, or not text.
_QUOTE, _LF, _CR = 34, 10, 13


@frozen
class RowBlock:
    """Complete rows, one after the other."""

    text: bytes
    starts: Int64s  # [r]: where in the stream each row begins.
    lines: Int64s  # [r]: the line each begins in, from 0 in the stream.
    is_blank: Mask  # [r]: it is an empty line.
    stop_line: int  # The line behind the last row.


@frozen
class UnterminatedRow:
    """A row without an end. Only its first line is left out: the rest is read as if a row began there."""

    line: int
    why: str
    stop_line: int


def split_rows(pieces: Iterator[bytes], delimiter: bytes, *, has_quotes: bool = True, first_byte: int = 0,
             max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[RowBlock | UnterminatedRow]:
    """Yield the rows of a stream that begins with a row. How it is cut into pieces changes no row."""
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
                yield UnterminatedRow(line, why, line + 1)
                is_skipping = True


def drop_malformed_rows(
    text: bytes, delimiter: bytes, num_fields: int, *, has_quotes: bool
) -> tuple[bytes, dict[int, int]]:
    """Drop rows that have another number of fields. Return that number by their position among the rows that are not
    empty lines."""
    ends, _ = _row_ends(text, delimiter, has_quotes)
    raw = np.frombuffer(text, np.uint8)
    between = np.flatnonzero(raw == delimiter[0])
    if has_quotes and b'"' in text:
        between = between[~_is_inside(text, raw, delimiter, between)]
    found = np.diff(np.searchsorted(between, ends), prepend=0) + 1
    sizes = np.diff(ends, prepend=0)
    is_blank = _is_blank(raw, ends - sizes, sizes)
    is_malformed = (found != num_fields) & ~is_blank
    index = np.cumsum(~is_blank) - 1
    malformed = {int(index[row]): int(found[row]) for row in np.flatnonzero(is_malformed)}
    return raw[: int(sizes.sum())][np.repeat(~is_malformed, sizes)].tobytes(), malformed


def _block(text: bytes, ends: Int64s, line_numbers: Int64s, at: int, line: int) -> RowBlock:
    starts = np.concatenate([[0], ends[:-1]])
    lines = np.concatenate([[0], line_numbers[:-1]]) + line
    sizes = ends - starts
    is_blank = _is_blank(np.frombuffer(text, np.uint8), starts, sizes)
    used = int(ends[-1])
    rows = text if used == len(text) else text[:used]
    if rows.endswith(b"\r"):
        rows = rows[:-1] + b"\n"  # alone at the end it could be half of \r\n
    return RowBlock(rows, starts + at, lines, is_blank, stop_line=line + int(line_numbers[-1]))


def _is_blank(raw: Bytes, starts: Int64s, sizes: Int64s) -> Mask:
    is_blank: Mask = sizes == 1
    two = np.flatnonzero(sizes == 2)
    is_blank[two] = raw[starts[two]] == _CR
    return is_blank


def _row_ends(text: bytes, delimiter: bytes, has_quotes: bool) -> tuple[Int64s, Int64s]:
    """Return the byte behind each row, and how many lines end up to there."""
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


def _is_inside(
    text: bytes, raw: Bytes, delimiter: bytes, positions: Int64s
) -> Mask:
    """Mark the positions that are within quotes."""
    quotes = np.flatnonzero(raw == _QUOTE)
    opening = quotes[::2]
    before = raw[opening - 1]
    may_open = (before == delimiter[0]) | (before == _LF) | (before == _CR) | (opening == 0)
    may_open[1:] |= quotes[1:-1:2] == opening[1:] - 1  # the second of a doubled one
    if may_open.all():
        is_odd: Mask = np.searchsorted(quotes, positions) % 2 == 1
        return is_odd
    # A quote stands in the middle of a field, and from there on counting them says nothing.
    field = rb'(?:(?<=[\r\n' + re.escape(delimiter) + rb'])|\A)"[^"]*(?:""[^"]*)*(?:"|\Z)'
    spans = np.array([found.span() for found in re.finditer(field, text)], np.int64).reshape(-1, 2)
    position = np.searchsorted(spans[:, 0], positions) - 1
    inside: Mask = (position >= 0) & (positions < spans[position, 1]) if len(spans) else positions < 0
    return inside


def _first_line_end(text: bytes) -> int | None:
    """Return the byte behind the first line; None if it is not complete. A last `\\r` may be half of `\\r\\n`."""
    found = re.search(rb"\r?\n|\r(?=.)", text, re.DOTALL)
    return found.end() if found else None


def fields_of(text: bytes, delimiter: str, encoding: str) -> Iterator[list[str]]:
    """Yield rows of text as Python's csv reads them: for the few that a header or a guess needs. Bytes that are not of
    the encoding become half of a character."""
    words = text.decode(encoding, errors="surrogateescape").replace("\0", "\ufffd")
    if len(delimiter) > 1:
        yield from (line.split(delimiter) if line else [] for line in words.splitlines())
        return
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    try:
        yield from csv.reader(io.StringIO(words, newline=""), delimiter=delimiter)
    except csv.Error:
        return


def header_names(cells: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns; one without a name, such as the index that pandas writes, is named by its
    position."""
    return tuple(cell.strip() or f"column_{position}" for position, cell in enumerate(cells))

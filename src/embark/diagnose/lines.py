"""Lines of a log that may be huge, coloured, interleaved, cut in half or no text at all."""

import re
import string
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 20
"""A longer line is looked at in pieces."""
SHORT_BYTES = 1 << 14
"""Of a longer one, only what is around the words that are looked for."""
AROUND_BYTES = 2000
MAX_PIECES = 50

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_FOLD = bytes.maketrans((string.ascii_uppercase + string.digits).encode(), (string.ascii_lowercase + "0" * 10).encode())
_RANKS = tuple(re.compile(pattern) for pattern in (
    r"\[rank(\d{1,5})\]:", r"\[[Rr]ank (\d{1,5})\]", r"\bRank (\d{1,5})\]", r"^\[(?:default)?(\d{1,5})\]:",
    r"(?i)\brank[ =:]{1,2}(\d{1,5})\b",
))
_ISO = re.compile(r"\b20\d\d-(\d\d-\d\d)[T _](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,9})")


class Line(NamedTuple):
    """One line."""

    number: int
    data: bytes
    """Without colours."""
    key: bytes
    """The same, as long, in lower case with every digit 0: lines that differ in figures alone are looked at once."""


def lines(file: BinaryIO) -> Iterator[list[Line]]:
    """The file in lists of whole lines, so that memory is bounded whatever the file."""
    rest = b""
    number = 1
    while data := file.read(BLOCK_BYTES):
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) < MAX_LINE_BYTES:
            rest = data
            continue
        cut = cut or len(data)
        rest = data[cut:]
        yield _split(data[:cut], number)
        number += data.count(b"\n", 0, cut)
    if rest:
        yield _split(rest, number)


def fold(text: str) -> bytes:
    """As keys have it."""
    return text.encode().translate(_FOLD)


def pieces(line: Line, needle: bytes) -> Iterator[str]:
    """The line's text; of a progress bar or a very long line, what is around each place of the needle."""
    if len(line.data) <= SHORT_BYTES and b"\r" not in line.data:
        yield line.data.decode("utf-8", "replace")
        return
    place, last = line.key.find(needle), -1
    for _ in range(MAX_PIECES):
        if place < 0:
            return
        begin = max(line.data.rfind(b"\r", 0, place) + 1, place - AROUND_BYTES)
        back = line.data.find(b"\r", place)
        end = min(back if back >= 0 else len(line.data), place + AROUND_BYTES)
        if begin != last:
            yield line.data[begin:end].decode("utf-8", "replace")
        last = begin
        place = line.key.find(needle, end)


def rank_of(text: str) -> int | None:
    """Whose line it is, where it says so."""
    head = text[:400]
    return next((int(found[1]) for pattern in _RANKS if (found := pattern.search(head))), None)


def time_of(text: str) -> str:
    """When it was written, without the year, since some forms have none."""
    head = text[:200]
    if found := _ISO.search(head):
        return f"{found[1]} {found[2]}.{(found[3] or '0'):0<6.6}"
    if found := _GLOG.search(head):
        return f"{int(found[1]):02d}-{found[2]} {found[3]}.{found[4]:0<6.6}"
    return ""


def _split(data: bytes, number: int) -> list[Line]:
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    data = data.replace(b"\r\n", b"\n")
    each = data.removesuffix(b"\n").split(b"\n")
    keys = data.translate(_FOLD).removesuffix(b"\n").split(b"\n")
    return [Line(number + place, *both) for place, both in enumerate(zip(each, keys, strict=True))]

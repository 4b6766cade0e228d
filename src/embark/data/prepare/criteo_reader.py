"""Criteo's text: label, 13 integers, 26 hexadecimal ids, tab-separated, no header.

It is decoded by slabs of lines; lines that are not regular enough are read one by one, by `read_line`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.criteo_slab import NUM_FIELDS, NUM_SPARSE, Slab, SlabDecoder
from embark.data.prepare.inputs import InputFile, Inputs
from embark.data.prepare.rows import MAX_QUOTED, BadRow, RawRows, Segment, reason_of
from embark.data.prepare.schema import Schema
from embark.data.prepare.text_stream import PAD_BYTES, LineChunk, line_chunks, line_segments
from embark.errors import DataError

SLAB_BYTES = 512 << 10
"""So small that a slab and the arrays made of it stay in a core's own cache, so large that calls cost little."""


class CriteoReader:
    """Kaggle's `train.txt` and the days of the 1TB set, plain or gzip."""

    def __init__(self, schema: Schema, inputs: Inputs) -> None:
        self._inputs = inputs
        self._names = (schema.label, *schema.dense, *(column.name for column in schema.sparse))

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Byte ranges; each owns the lines that begin in it. A gzip file is one."""
        return line_segments(self._inputs, file, segment_bytes)

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """The segment's rows in order."""
        portion, decoder = _Portion(), SlabDecoder()
        for chunk in line_chunks(self._inputs, segment, SLAB_BYTES):
            if segment.index == 0 and chunk.position == 0:
                _refuse_unlabelled(segment.file, chunk.text)
            portion.add(decoder.decode(chunk.text), chunk, self._names)
            if portion.text_bytes >= chunk_bytes:
                yield portion.rows()
                portion = _Portion(portion.line)
        if portion.slabs:
            yield portion.rows()


def read_line(line: bytes, names: tuple[str, ...]) -> tuple[int, list[int | None], list[int | None]]:
    """Label, integers and ids of one line without its newline; ValueError says why it is none."""
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


_INTEGER = re.compile(rb"-?[0-9]{1,18}")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")


def _number(field: bytes, form: re.Pattern[bytes], base: int, why: str, name: str) -> int | None:
    if not field:
        return None
    if not form.fullmatch(field):
        raise ValueError(f"{name} is {_shown(field)}, {why}")
    return int(field, base)


def _shown(field: bytes) -> str:
    text = repr(field[:24])[1:]
    return text if len(field) <= 24 else f"{text}…"


def _refuse_unlabelled(file: InputFile, text: NDArray[np.uint8]) -> None:
    head = text[PAD_BYTES : min(PAD_BYTES + 8192, len(text) - PAD_BYTES)].tobytes().split(b"\n")[:-1][:10]
    if head and all(line.count(b"\t") == NUM_FIELDS - 2 for line in head):
        raise DataError(f"{file.uri}: its lines have {NUM_FIELDS - 1} fields, one fewer than Criteo's {NUM_FIELDS}: "
                        "it looks like Kaggle's test file, which has no label",
                        fix="leave it out of data.prepare.input: rows without a label cannot be trained on")


class _Portion:
    """Slabs that are passed on together."""

    def __init__(self, line: int = 0) -> None:
        self.slabs: list[Slab] = []
        self.text_bytes = self.read_bytes = 0
        self.line = self._first_line = line
        """The segment's next line."""
        self._positions: list[NDArray[np.int64]] = []
        self._bad: list[BadRow] = []
        self._reasons: Counter[str] = Counter()

    def add(self, slab: Slab, chunk: LineChunk, names: tuple[str, ...]) -> None:
        slab, bad = _with_doubtful(slab, chunk.text[PAD_BYTES:-PAD_BYTES], names)
        self.slabs.append(slab)
        starts = slab.line_starts if len(slab.lines) == len(slab.line_starts) else slab.line_starts[slab.lines]
        self._positions.append(starts + chunk.position)
        self._bad += [BadRow(self.line + n, why) for n, why in bad[: MAX_QUOTED - len(self._bad)]]
        self._reasons.update(reason_of(why) for _, why in bad)
        self.line += len(slab.line_starts)
        self.text_bytes += len(chunk.text)
        self.read_bytes += chunk.read_bytes

    def rows(self) -> RawRows:
        keys = np.concatenate([s.keys for s in self.slabs], axis=1)
        is_missing = np.concatenate([s.is_missing for s in self.slabs], axis=1)
        has_missing = np.logical_or.reduce(is_missing, axis=1)
        return RawRows(
            positions=np.concatenate(self._positions),
            label=np.concatenate([s.label for s in self.slabs]).astype(np.float32),
            dense=np.concatenate([s.dense for s in self.slabs]), keys=tuple(keys), lengths=(None,) * NUM_SPARSE,
            is_missing=tuple(is_missing[i] if has_missing[i] else None for i in range(NUM_SPARSE)),
            bad=tuple(self._bad), reasons=dict(self._reasons), num_lines=self.line - self._first_line,
            read_bytes=self.read_bytes,
        )


def _with_doubtful(slab: Slab, text: NDArray[np.uint8], names: tuple[str, ...]) -> tuple[Slab, list[tuple[int, str]]]:
    """The slab with its doubtful lines read one by one and put in place; and of bad ones, why."""
    if not len(slab.doubtful):
        return slab, []
    stops = np.append(slab.line_starts[1:], len(text))
    good: list[int] = []
    bad: list[tuple[int, str]] = []
    numbers: list[tuple[int, list[int | None], list[int | None]]] = []
    for line in slab.doubtful.tolist():
        raw = text[slab.line_starts[line] : stops[line]].tobytes().removesuffix(b"\n")
        try:
            numbers.append(read_line(raw, names))
            good.append(line)
        except ValueError as error:
            bad.append((line, str(error)))
    if not good:
        return slab, bad
    lines = np.concatenate([slab.lines, np.array(good, np.int64)])
    order = np.argsort(lines, kind="stable")

    def merged(first: NDArray[Any], more: list[Any], axis: int) -> NDArray[Any]:
        second = np.array(more, first.dtype)
        return np.concatenate([first, second.T if axis else second], axis).take(order, axis)

    return Slab(
        lines[order],
        merged(slab.label, [label for label, _, _ in numbers], 0),
        merged(slab.dense, [[np.nan if v is None else v for v in values] for _, values, _ in numbers], 0),
        merged(slab.keys, [[v or 0 for v in keys] for _, _, keys in numbers], 1),
        merged(slab.is_missing, [[v is None for v in keys] for _, _, keys in numbers], 1),
        slab.line_starts, slab.doubtful,
    ), bad

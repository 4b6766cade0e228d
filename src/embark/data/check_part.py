"""Whether a part file holds what its manifest says: its bytes, and every value in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embark.data.blocks import Block, Span, spans
from embark.data.prepared import Manifest, Part

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it must be."""

    where: str
    """A file, or a column."""
    what: str


def check_part(
    manifest: Manifest, part: Part, data: NDArray[np.uint8], tell: Callable[[int], None] | None = None
) -> list[Problem]:
    """What is wrong with the bytes `data` of a part; `tell` hears of bytes as they are read."""
    problems = []
    if len(data) != part.size_bytes:
        return [Problem(part.file, f"has {len(data):,} bytes, the manifest says {part.size_bytes:,}")]
    digest = hashlib.sha256()
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        digest.update(np.ascontiguousarray(piece).data)
        if tell:
            tell(len(piece))
    if digest.hexdigest() != part.sha256:
        problems.append(Problem(part.file, "its checksum is not the manifest's: it was damaged or replaced"))
    num_blocks = -(-part.rows // manifest.block_rows)
    if not manifest.layout.is_fixed and len(part.block_starts) != num_blocks:
        return [*problems, Problem(part.file, f"has {num_blocks} blocks, the manifest gives {len(part.block_starts)}")]
    faults = _Faults(part)
    for span in spans(manifest, part):
        block = _block(manifest, span, data)
        if block is None:
            problems.append(Problem(part.file, f"the block of row {span.first_row:,} is not as long as its rows"))
        else:
            _look(block, span, faults)
    return problems + faults.told()


class _Faults:
    """Values that must not be, by column."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, column: str, what: str, is_bad: NDArray[np.bool_], first_row: int) -> None:
        """Those of a block; `is_bad` is [n] or [n, …]."""
        if is_bad.any():
            row = first_row + int(is_bad.reshape(-1).argmax()) // (is_bad.size // len(is_bad))
            self.add_num(column, what, int(is_bad.sum()), row)

    def add_num(self, column: str, what: str, num: int, row: int) -> None:
        before, first = self._seen.get((column, what), (0, row))
        self._seen[column, what] = before + num, first

    def told(self) -> list[Problem]:
        return [
            Problem(column, f"{what}: {num:,}, the first in row {row:,} of {self._part.file}")
            for (column, what), (num, row) in self._seen.items()
        ]


def _block(manifest: Manifest, span: Span, data: NDArray[np.uint8]) -> Block | None:
    """None where the bytes are no block of so many rows."""
    layout, held = manifest.layout, data[span.start : span.stop]
    if len(held) < 8 * len(layout.ragged) or span.start < 0:
        return None
    counts = [int(c) for c in np.ascontiguousarray(held[: 8 * len(layout.ragged)]).view("<i8")]
    limits = [span.num_rows * layout.features[i].multi_hot for i in layout.ragged]
    if any(not 0 <= count <= limit for count, limit in zip(counts, limits, strict=True)):
        return None
    where = layout.map(span.num_rows, counts)
    return Block(layout, where, held) if where.size_bytes == len(held) else None


def _look(block: Block, span: Span, faults: _Faults) -> None:
    layout, first = block.layout, span.first_row
    faults.add("label", "labels that are neither 0 nor 1", block.label > 1, first)
    if layout.dense and not np.isfinite(block.dense).all():
        for i, name in enumerate(layout.dense):
            faults.add(name, "values that are not finite", ~np.isfinite(block.dense[:, i]), first)
    for i, feature in enumerate(layout.features):
        ids, lengths = block.ids(i), block.lengths(i)
        if lengths is not None:
            faults.add(feature.name, f"rows of more than {feature.multi_hot} ids", lengths > feature.multi_hot, first)
            if int(lengths.sum(dtype="i8")) != len(ids):
                faults.add_num(feature.name, "blocks whose lengths are not those of its ids", 1, first)
                continue
        if ids.size and (int(ids.max()) >= feature.rows or int(ids.min()) < 0):
            is_bad, what = (ids >= feature.rows) | (ids < 0), f"ids outside 0 to {feature.rows - 1:,}"
            if lengths is None:
                faults.add(feature.name, what, is_bad, first)
            else:
                row = int(np.searchsorted(np.cumsum(lengths), int(is_bad.argmax()), side="right"))
                faults.add_num(feature.name, what, int(is_bad.sum()), first + row)

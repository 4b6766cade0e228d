"""The blocks of part files, one after the other, with every column at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared import Layout, Manifest, Part, Split
from embark.data.prepared.layout import Map
from embark.errors import DataError


@dataclass(frozen=True, slots=True)
class Span:
    """Where a block lies in its part file."""

    start: int
    stop: int
    num_rows: int
    first_row: int
    """Of the part."""


@dataclass(frozen=True)
class Block:
    """Rows of a part, as they lie."""

    layout: Layout
    where: Map
    data: NDArray[np.uint8]

    @property
    def label(self) -> NDArray[np.uint8]:
        return self.where.label.of(self.data)

    @cached_property
    def positive(self) -> NDArray[np.intp]:
        """Rows whose label is 1."""
        return np.flatnonzero(self.label != 0)

    @property
    def dense(self) -> NDArray[Any]:
        """[n, D]"""
        return self.where.dense.of(self.data)

    def ids(self, feature: int) -> NDArray[Any]:
        """[n, multi_hot], or, where it is ragged, all one after the other."""
        if self.layout.features[feature].is_ragged:
            return self.where.ragged[self.layout.ragged.index(feature)][1].of(self.data)
        for group, field in zip(self.layout.groups, self.where.groups, strict=True):
            if feature in group.members:
                found: NDArray[Any] = field.of(self.data)[group.members.index(feature)]
                return found
        raise IndexError(feature)

    def lengths(self, feature: int) -> NDArray[Any] | None:
        """[n] where it is ragged."""
        if not self.layout.features[feature].is_ragged:
            return None
        return self.where.ragged[self.layout.ragged.index(feature)][0].of(self.data)


def spans(manifest: Manifest, part: Part) -> list[Span]:
    """The blocks of a part."""
    starts: tuple[int, ...] = part.block_starts
    num_blocks = -(-part.rows // manifest.block_rows)
    if manifest.layout.is_fixed:
        size_bytes = manifest.layout.map(manifest.block_rows).size_bytes
        starts = tuple(size_bytes * i for i in range(num_blocks))
    stops = (*starts[1:], part.size_bytes)
    return [
        Span(start, stop, min(manifest.block_rows, part.rows - i * manifest.block_rows), i * manifest.block_rows)
        for i, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def open_part(directory: Path, part: Part) -> NDArray[np.uint8]:
    """The file's bytes, mapped; one that is missing or of another size is an error."""
    path = directory / part.file
    try:
        size_bytes = path.stat().st_size
    except OSError:
        raise DataError(f"{path}: no such file, but the manifest lists it",
                        fix="copy or prepare the data again") from None
    if size_bytes != part.size_bytes:
        raise DataError(f"{path}: has {size_bytes:,} bytes, the manifest says {part.size_bytes:,}",
                        fix="copy or prepare the data again")
    return np.memmap(path, np.uint8, "r") if size_bytes else np.zeros(0, np.uint8)


def blocks(directory: Path, manifest: Manifest, split: Split, at_most: int | None = None) -> Iterator[Block]:
    """Every block of a split in order, or `at_most` of them, spread evenly."""
    listed = [(part, span) for part in manifest.parts.get(split, ()) for span in spans(manifest, part)]
    if at_most is not None and len(listed) > at_most:
        listed = [listed[i * len(listed) // at_most] for i in range(at_most)]
    opened: tuple[Part, NDArray[np.uint8]] | None = None
    where: Map | None = None
    for part, span in listed:
        if opened is None or opened[0] is not part:
            opened = part, open_part(directory, part)
        # Plain bytes: slices of a memmap are memmaps, and cost microseconds each.
        data = np.asarray(opened[1])[span.start : span.stop]
        if where is None or not manifest.layout.is_fixed or where.num_rows != span.num_rows:
            where = manifest.layout.map_of(data, span.num_rows)
        yield Block(manifest.layout, where, data)

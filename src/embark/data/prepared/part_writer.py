"""Rows to part files: block by block, hashed on the way, under another name until they are complete."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from embark.data.prepared.layout import Layout, Rows, fill
from embark.data.prepared.manifest import BLOCK_ROWS, Part

PART_BYTES = 64 << 20
"""About how large a part file grows: an object store serves it in a second or two."""


class PartWriter:
    """Takes rows in any portions and writes parts `<stem>-00000.bin`, `<stem>-00001.bin`, … below `directory`.

    A part appears under its name when it is complete and on disk. What a killed writer leaves ends in `.part`.
    """

    def __init__(
        self, directory: Path, stem: str, layout: Layout, *, block_rows: int = BLOCK_ROWS, part_bytes: int = PART_BYTES
    ) -> None:
        self.parts: list[Part] = []
        self._directory, self._stem, self._layout = directory, stem, layout
        self._block_rows, self._part_bytes = block_rows, part_bytes
        self._waiting: list[Rows] = []
        self._num_waiting = 0
        self._open_part()

    def add(self, rows: Rows) -> None:
        """Take rows; full blocks are written at once."""
        if len(rows):
            self._waiting.append(rows)
            self._num_waiting += len(rows)
        if self._num_waiting < self._block_rows:
            return
        joined, start = Rows.join(self._waiting), 0
        while len(joined) - start >= self._block_rows:
            self._write(joined.cut(start, start + self._block_rows))
            start += self._block_rows
            if self._size >= self._part_bytes:
                self._end_part()
        rest = joined.cut(start, len(joined))
        self._waiting, self._num_waiting = ([rest] if len(rest) else []), len(rest)

    def close(self) -> list[Part]:
        """Write what is left; all parts of this writer, in order."""
        if self._num_waiting:
            self._write(Rows.join(self._waiting))
            self._waiting, self._num_waiting = [], 0
        if self._rows:
            self._end_part()
        return self.parts

    def _open_part(self) -> None:
        self._rows = self._size = 0
        self._starts: list[int] = []
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None

    def _write(self, rows: Rows) -> None:
        if self._file is None:
            name = self._directory / f"{self._stem}-{len(self.parts):05d}.bin"
            name.parent.mkdir(parents=True, exist_ok=True)
            self._name = name
            self._file = open(f"{name}.part", "wb")  # noqa: SIM115
        block = fill(self._layout, rows)
        self._file.write(block.data)
        self._digest.update(block.data)
        self._starts.append(self._size)
        self._size += len(block)
        self._rows += len(rows)

    def _end_part(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(f"{self._name}.part", self._name)
        starts = () if self._layout.is_fixed else tuple(self._starts)
        file = self._name.relative_to(self._directory).as_posix()
        self.parts.append(Part(file, self._rows, self._size, self._digest.hexdigest(), starts))
        self._open_part()

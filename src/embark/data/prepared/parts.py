"""Part files in memory: mapped when first used, and opened ahead of time by a thread."""

import hashlib
import mmap
import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from embark.errors import DataError
from embark.features.layout import REPAIR, Block, Layout, Rows, fill
from embark.store import commit, explain_data
from .manifest import BLOCK_ROWS, Manifest, Part, Split

_MOST_MAPPED = 4_096  # A process may have 65,530 mappings, the kernel's default.
_MOST_BLOCKS = 64
_MOST_ADVISED_BYTES = 1 << 30
_HASHED_BYTES = 4 << 20


class OpenPart:
    """One mapped file. It is unmapped with the last reference to it."""

    def __init__(self, path: Path, part: Part, layout: Layout, block_rows: int) -> None:
        self._layout, self._part, self._block_rows = layout, part, block_rows
        try:
            with path.open("rb") as file:
                if (size_bytes := os.fstat(file.fileno()).st_size) != part.size_bytes:
                    raise DataError(f"{path}: has {size_bytes:,} bytes, the manifest says {part.size_bytes:,}",
                                    REPAIR)
                if not size_bytes:  # which cannot be mapped
                    raise DataError(f"{path}: is empty", REPAIR)
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise explain_data(error, path, REPAIR) from None
        if len(mapped) <= _MOST_ADVISED_BYTES:
            mapped.madvise(mmap.MADV_WILLNEED)
        self.path = path
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._block_bytes = layout.map(block_rows).size_bytes if layout.is_fixed else 0
        self._blocks: dict[int, Block] = {}

    def sha256(self) -> str:
        """Return the checksum of all bytes. Other threads run meanwhile."""
        digest = hashlib.sha256()
        for start in range(0, len(self._bytes), _HASHED_BYTES):
            digest.update(self._bytes[start : start + _HASHED_BYTES].data)
        return digest.hexdigest()

    def block(self, index: int) -> Block:
        """Return the arrays of a block; the latest are cached."""
        found = self._blocks.get(index)
        if found is None:
            start = index * self._block_bytes if self._layout.is_fixed else self._part.block_starts[index]
            num_rows = min(self._block_rows, self._part.rows - index * self._block_rows)
            found = Block.of(self._layout, self._bytes[start:], num_rows)
            if any(offsets[-1] != len(ids) for _, ids, offsets in found.ragged):
                raise DataError(f"{self._part.file}: block {index} has not as many ids as its rows say", REPAIR)
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[index] = found
        return found


def iter_blocks(directory: Path, manifest: Manifest, split: Split) -> Iterator[Block]:
    """Yield every block of a split in order. One part is mapped at a time."""
    for part in manifest.parts.get(split, ()):
        opened = OpenPart(directory / part.file, part, manifest.layout, manifest.block_rows)
        for index in range(-(-part.rows // manifest.block_rows)):
            yield opened.block(index)


class Parts(Protocol):
    """Provides part files."""

    def using(self, part: Part) -> AbstractContextManager[OpenPart]:
        """Provide a part, which stays mapped inside the `with` block; copy anything that is needed longer."""

    def expect(self, parts: Sequence[Part]) -> None:
        """Announce the parts that are used next, in this order."""


class LocalParts:
    """Provides the parts below a directory."""

    def __init__(self, directory: Path, layout: Layout, block_rows: int) -> None:
        self._directory, self._layout, self._block_rows = directory, layout, block_rows
        self._open: OrderedDict[str, OpenPart] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead = ReadAhead(self._opened)
        self._verifier = PartVerifier()

    @contextmanager
    def using(self, part: Part) -> Iterator[OpenPart]:
        self._verifier.raise_if_damaged()
        yield self._open.get(part.file) or self._opened(part)

    def expect(self, parts: Sequence[Part]) -> None:
        self._ahead.start(parts[:2])

    def _opened(self, part: Part) -> OpenPart:
        with self._lock:
            found = self._open.get(part.file)
            if found is None:
                found = OpenPart(self._directory / part.file, part, self._layout, self._block_rows)
                if len(self._open) >= _MOST_MAPPED:
                    self._open.popitem(last=False)
                self._open[part.file] = found
                self._verifier.add(part, found)
            return found


class PartVerifier:
    """Compares each part with its checksum once, in a thread, while training reads it. The ranks of a machine share the
    parts. A damaged one stops the run at the next part that is used."""

    def __init__(self) -> None:
        self._rank = int(os.getenv("LOCAL_RANK", "0"))
        self._num_ranks = int(os.getenv("LOCAL_WORLD_SIZE", "1"))
        self._seen: set[str] = set()
        self._todo: deque[tuple[Part, OpenPart]] = deque()
        self._lock = threading.Lock()
        self._is_running = False
        self._damage: DataError | None = None

    def add(self, part: Part, opened: OpenPart) -> None:
        """Verify a part when its turn comes, unless it was verified before or is another rank's."""
        with self._lock:
            if part.file in self._seen or zlib.crc32(part.file.encode()) % self._num_ranks != self._rank:
                return
            self._seen.add(part.file)
            self._todo.append((part, opened))
            must_start, self._is_running = not self._is_running, True
        if must_start:
            threading.Thread(target=self._run, name="embark-verify", daemon=True).start()

    def raise_if_damaged(self) -> None:
        if self._damage is not None:
            raise self._damage

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._is_running = False
                    return
                part, opened = self._todo.popleft()
            if (found := opened.sha256()) != part.sha256:
                self._damage = DataError(
                    f"{opened.path}: its checksum is {found[:16]}…, the manifest says {part.sha256[:16]}…: it was "
                    "damaged or replaced, and this run may have trained on it",
                    f"{REPAIR}; then start over, or from a checkpoint of before this start")


class ReadAhead:
    """Opens parts before they are used. Its threads live while there is something to do."""

    def __init__(self, open_part: Callable[[Part], object], num_threads: int = 1) -> None:
        self._open_part, self._num_threads = open_part, num_threads
        self._todo: list[Part] = []
        self._lock = threading.Lock()
        self._num_running = 0

    def start(self, parts: Sequence[Part]) -> None:
        """Open these parts, and forget what was to be opened before."""
        with self._lock:
            self._todo = list(parts)
            num_more = min(len(parts), self._num_threads) - self._num_running
            self._num_running += max(0, num_more)
        for _ in range(num_more):
            threading.Thread(target=self._run, name="embark-read-ahead", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._num_running -= 1
                    return
                part = self._todo.pop(0)
            with suppress(Exception):  # using the part raises the same error
                self._open_part(part)


PART_BYTES = 64 << 20  # About how large a part file grows: an object store serves it in a second or two.


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
        """Write what is left; return all parts of this writer, in order."""
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
        commit(self._file, self._name)
        starts = () if self._layout.is_fixed else tuple(self._starts)
        file = self._name.relative_to(self._directory).as_posix()
        self.parts.append(Part(file, self._rows, self._size, self._digest.hexdigest(), starts))
        self._open_part()

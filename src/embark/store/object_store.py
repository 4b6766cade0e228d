"""The interface to bytes: one way to read, write, list and delete, whether they live in a folder or in a bucket.

A path is relative to the store's uri, with `/` between its parts. A store may be used from many threads at once.
"""

from __future__ import annotations

import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast
from uuid import uuid4

from embark.errors import EmbarkError, Fault, UserError
from embark.store.atomic_file import scratch_for
from embark.store.errors import NotFound, explain

MIB = 1 << 20
PIECE_BYTES = 16 * MIB
"""What one request of a large read asks for: enough to hide its latency, little enough to repeat."""
F = TypeVar("F", bound=Callable[..., Any])
Piece = bytes | bytearray | memoryview
Data = Piece | Path | Iterable[Piece]
Progress = Callable[[int, int], None]  # Called with the bytes done so far and the bytes in all.
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file behind a store."""

    path: str
    size_bytes: int
    modified_s: float | None = field(default=None, compare=False)
    """Unix time of its last change, where the store says it."""


Entries = list[Entry]  # Inside the class, `list` is a method.


def translate_errors(operation: str) -> Callable[[F], F]:
    """Turns what the library under a method raises into an error of the tree; the method's first argument is a path."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def guarded(store: ObjectStore, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(store, *args, **kwargs)
            except EmbarkError:
                raise
            except store.library_errors as error:
                path = str([*args, *kwargs.values(), ""][0])
                trouble = explain(error, operation, store.where(path))
            # Not inside of `except`: a chained original goes into tracebacks, with the secrets it may quote.
            raise trouble

        return cast(F, guarded)

    return wrap


class ObjectStore(ABC):
    """Bytes by name. What fails raises `Fault` where a retry may help, `UserError` where it will not, `Missing`
    where the file is not there."""

    library_errors: tuple[type[Exception], ...] = (OSError,)
    """What the library below raises of its own; anything else is a mistake in Python code and goes through as it is."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @abstractmethod
    def read(self, path: str) -> bytes:
        """All of a file."""

    @abstractmethod
    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Fill `into` with the file's bytes from `start` on; a file that ends before that is a `Fault`."""

    @abstractmethod
    def write(self, path: str, data: Data, size_bytes: int | None = None) -> None:
        """Make the file be `data`: its bytes, a local file's, or those of the pieces one after another. Readers see
        the old file or the new one, whole. `size_bytes` is what the pieces come to, where it is known."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Make the file be `data` unless there is one: False then. Of several that try at once, one succeeds."""

    @abstractmethod
    def list(self, prefix: str = "") -> Entries:
        """Every file below the folder `prefix`, at any depth, in order of their paths."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Of a file, in bytes."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; it is no error that there is none."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> None:
        """Remove every file below the folder `prefix`."""

    def unfinished(self, prefix: str = "") -> Entries:
        """What writes that never ended left below `prefix`, where the store shows such."""
        return []

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes from `start` on."""
        buffer = bytearray(length)
        if length:
            self.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def exists(self, path: str) -> bool:
        """Is there such a file?"""
        try:
            self.size(path)
        except NotFound:
            return False
        return True

    @translate_errors("download")
    def download(self, path: str, to: Path) -> None:
        """Copy a file to this machine: it appears at `to` whole, or not at all."""
        size = self.size(path)
        with scratch_for(to) as scratch, scratch.open("wb") as file:
            file.truncate(size)
            target = file.fileno()

            def fetch(start: int) -> None:
                left = memoryview(bytearray(min(PIECE_BYTES, size - start)))
                self.read_into(path, start, left)
                while left:
                    written = os.pwrite(target, left, start)
                    left, start = left[written:], start + written

            for_each_parallel(fetch, range(0, size, PIECE_BYTES), parallel=4)

    def upload_many(
        self, pairs: Iterable[tuple[Path, str]], parallel: int = 8, progress: Progress | None = None
    ) -> None:
        """Write each local file to its path. The first failure stops the rest and is raised."""
        todo = [(local, path, _local_size(local)) for local, path in pairs]
        tell = count_progress(progress, sum(size for *_, size in todo))

        def upload(item: tuple[Path, str, int]) -> None:
            local, path, size = item
            self.write(path, local)
            tell(size)

        for_each_parallel(upload, todo, parallel)

    def download_many(
        self, pairs: Iterable[tuple[str, Path]], parallel: int = 8, progress: Progress | None = None
    ) -> None:
        """Copy each path to its local file. The first failure stops the rest and is raised."""
        wanted = [(path, to, self.size(path) if progress else 0) for path, to in pairs]
        tell = count_progress(progress, sum(size for *_, size in wanted))

        def download(item: tuple[str, Path, int]) -> None:
            path, to, size = item
            self.download(path, to)
            tell(size)

        for_each_parallel(download, wanted, parallel)

    def check(self) -> None:
        """Write, read back and delete a small file: what a run does first, to fail before it trains, not after."""
        path, text = f"embark-check-{uuid4().hex}", b"may be deleted"
        self.write(path, text)
        try:
            if self.read(path) != text:
                raise Fault(f"{self.uri}: a file read back is not what was written",
                            fix="a proxy or a cache may stand between: go around it")
        finally:
            self.delete(path)

    def where(self, path: str) -> str:
        """The uri of a file, for messages."""
        return f"{self.uri.rstrip('/')}/{path}" if path else self.uri


def normalize_path(path: str, may_be_empty: bool = False) -> str:
    """A relative path inside a folder or store, as every store writes it; one that would leave it is refused.

    Whatever names a file in text that others may have written (manifest, index, commit record) passes through here.
    """
    parts = PurePosixPath(path).parts
    try:
        can_be_named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        can_be_named = False
    if ".." in parts or path.startswith("/") or (not parts and not may_be_empty) or not can_be_named:
        raise UserError(f"{path!r} is not a path inside a store", fix="write it relative to the store's uri, no `..`")
    return "/".join(parts)


def count_progress(progress: Progress | None, total_bytes: int) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0

    def tell(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            if progress:
                progress(done, total_bytes)

    return tell


def _local_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise explain(error, "read", str(path)) from None


def for_each_parallel(call: Callable[[T], None], items: Sequence[T], parallel: int) -> None:
    """Call it for each item, `parallel` at a time; after a failure no further one is begun."""
    if len(items) <= 1 or parallel <= 1:
        for item in items:
            call(item)
        return
    with ThreadPoolExecutor(min(parallel, len(items)), thread_name_prefix="embark-store") as pool:
        running = [pool.submit(call, item) for item in items]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for done in running:
        if not done.cancelled():
            done.result()

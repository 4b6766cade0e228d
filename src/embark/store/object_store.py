"""The interface to bytes, which live in a folder or in a bucket, and the store that a uri names.

    runs/big, file:///data/big    a folder of this machine
    s3://bucket/prefix            Amazon S3 and what speaks like it (AWS_ENDPOINT_URL)
    gs://bucket/prefix            Google Cloud Storage
    az://container/prefix         Azure Blob Storage; the account is AZURE_STORAGE_ACCOUNT_NAME
    anything else                 by fsspec, if the package for its scheme is installed

A path is relative to the store's uri, with `/` between its parts. A store may be used from many threads at once.
Credentials come from where each cloud's own tools look for them, and never from a uri.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from embark.errors import EmbarkError, Fault, MissingPackage, UserError
from embark.values import frozen
from .atomic_file import SCRATCH_SUFFIX, create_atomic, replace_atomic, scratch_for
from .errors import DAMAGED, NotFound, RetryPolicy, explain

MIB = 1 << 20
PIECE_BYTES = 16 * MIB
"""What one request of a large read asks for: enough to hide its latency, little enough to repeat."""
NUM_PARALLEL = 8  # Files that are copied at a time.
F = TypeVar("F", bound=Callable[..., Any])
Piece = bytes | bytearray | memoryview
Data = Piece | Path | Iterable[Piece]
Progress = Callable[[int, int], None]  # Called with the bytes done so far and the bytes in all.
T = TypeVar("T")


@frozen
class Entry:
    """A file in a store."""

    path: str
    size_bytes: int
    modified_s: float | None = field(default=None, compare=False)
    """Unix time of its last change, if the store says it."""


Entries = list[Entry]  # Inside the class, `list` is a method.


def translate_errors(operation: str) -> Callable[[F], F]:
    """Turn what the library under a method raises into an error of the tree; the method's first argument is a path."""

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
            try:
                raise trouble
            finally:
                del trouble  # It would hold this frame, and with it the caller's variables, until garbage is collected.

        return cast(F, guarded)

    return wrap


class ObjectStore(ABC):
    """Bytes by name. A failure raises `Fault` if a retry may help, `UserError` if not, and `NotFound` if there is no
    such file."""

    library_errors: tuple[type[Exception], ...] = (OSError,)
    """What the library below raises; anything else is a mistake in Python code and is not translated."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Read a complete file."""

    @abstractmethod
    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Fill `into` with the file's bytes from `start` on; a file that ends before that is a `Fault`."""

    @abstractmethod
    def write(self, path: str, data: Data, size_bytes: int | None = None) -> None:
        """Make the file be `data`: its bytes, a local file's, or those of the pieces one after another. Readers see the
        complete old file or the complete new one. `size_bytes` is the sum of the pieces, if it is known."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Make the file be `data` unless there is one; returns False then. If several try at once, one succeeds."""

    @abstractmethod
    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        """Make the file be `data` if it is `expected` now; returns False otherwise. If several try at once, one
        succeeds, as long as no content ever comes back: put a counter or a time into it."""

    @abstractmethod
    def list(self, prefix: str = "") -> Entries:
        """List every file below the folder `prefix`, at any depth, in order of their paths."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file, if there is one."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> None:
        """Remove every file below the folder `prefix`."""

    def unfinished(self, prefix: str = "") -> Entries:
        """List what writes that never ended left below `prefix`, if the store shows it."""
        return []

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read `length` bytes from `start` on."""
        buffer = bytearray(length)
        if length:
            self.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except NotFound:
            return False
        return True

    @translate_errors("download")
    def download(self, path: str, to: Path) -> None:
        """Copy a file to this machine: it appears at `to` complete, or not at all."""
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

    def upload_many(self, pairs: Sequence[tuple[Path, str]]) -> None:
        """Write each local file to its path. The first failure stops the rest and is raised."""
        for_each_parallel(lambda pair: self.write(pair[1], pair[0]), pairs, NUM_PARALLEL)

    def download_many(self, pairs: Sequence[tuple[str, Path]]) -> None:
        """Copy each path to its local file. The first failure stops the rest and is raised."""
        for_each_parallel(lambda pair: self.download(*pair), pairs, NUM_PARALLEL)

    def sha256(self, path: str, size_bytes: int, on_bytes: Callable[[int], None] | None = None) -> str:
        """Hash a file piece by piece; `on_bytes` gets the number of bytes of each."""
        digest = hashlib.sha256()
        # One buffer for all pieces: fresh memory costs more than the hashing.
        buffer = memoryview(bytearray(min(PIECE_BYTES, size_bytes)))
        for start in range(0, size_bytes, PIECE_BYTES):
            piece = buffer[: size_bytes - start]
            self.read_into(path, start, piece)
            digest.update(piece)
            if on_bytes:
                on_bytes(len(piece))
        return digest.hexdigest()

    def check(self) -> None:
        """Write, read back and delete a small file: a run does this first, to fail before it trains, not after."""
        path, text = f"embark-check-{uuid4().hex}", b"may be deleted"
        self.write(path, text)
        try:
            if self.read(path) != text:
                raise Fault(f"{self.uri}: a file read back is not what was written",
                            "a proxy or a cache may stand between: go around it")
        finally:
            self.delete(path)

    def where(self, path: str) -> str:
        """Return the uri of a file, for messages."""
        return f"{self.uri.rstrip('/')}/{path}" if path else self.uri


def normalize_path(path: str, may_be_empty: bool = False) -> str:
    """Check a relative path inside a store; one that would leave it is refused. Whatever names a file in text that
    others may have written (manifest, index, commit record) passes through here."""
    parts = PurePosixPath(path).parts
    try:
        can_be_named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        can_be_named = False
    if ".." in parts or path.startswith("/") or (not parts and not may_be_empty) or not can_be_named:
        raise UserError(f"{path!r} is not a path inside a store", "write it relative to the store's uri, no `..`")
    return "/".join(parts)


def count_progress(progress: Progress | None, total_bytes: int) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0

    def on_bytes(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            if progress:
                progress(done, total_bytes)

    return on_bytes


def for_each_parallel(call: Callable[[T], None], items: Sequence[T], parallel: int) -> None:
    """Call it for each item, `parallel` at a time; after a failure no further call begins."""
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


class LocalStore(ObjectStore):
    """Files below `root`, a folder that is created with the first one."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root.expanduser()

    @translate_errors("read")
    def read(self, path: str) -> bytes:
        return (self.root / normalize_path(path)).read_bytes()

    @translate_errors("read")
    def read_into(self, path: str, start: int, into: memoryview) -> None:
        with (self.root / normalize_path(path)).open("rb", buffering=0) as file:
            file.seek(start)
            done = 0
            while done < len(into):
                count = file.readinto(into[done:])
                if not count:
                    raise Fault(f"{self.where(path)} ends {len(into) - done} bytes before what was asked of it",
                                DAMAGED)
                done += count

    @translate_errors("write")
    def write(self, path: str, data: Data, size_bytes: int | None = None) -> None:
        with scratch_for(self.root / normalize_path(path)) as scratch:
            if isinstance(data, Path):
                shutil.copyfile(data, scratch)
                return
            pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
            with scratch.open("wb") as file:
                for piece in pieces:
                    file.write(piece)

    @translate_errors("write")
    def create(self, path: str, data: bytes) -> bool:
        return create_atomic(self.root / normalize_path(path), data)

    @translate_errors("write")
    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        return replace_atomic(self.root / normalize_path(path), data, expected)

    @translate_errors("list")
    def list(self, prefix: str = "") -> Entries:
        return [entry for entry in self._below(prefix) if not entry.path.endswith(SCRATCH_SUFFIX)]

    @translate_errors("list")
    def unfinished(self, prefix: str = "") -> Entries:
        return [entry for entry in self._below(prefix) if entry.path.endswith(SCRATCH_SUFFIX)]

    @translate_errors("look at")
    def size(self, path: str) -> int:
        file = self.root / normalize_path(path)
        if not file.is_file():
            raise FileNotFoundError(path)
        return file.stat().st_size

    @translate_errors("delete")
    def delete(self, path: str) -> None:
        """Remove a file, unless it lies behind a linked folder: what a link leads to does not belong to this store."""
        file = self.root / normalize_path(path)
        if not any(folder.is_symlink() for folder in file.parents if self.root in folder.parents):
            file.unlink(missing_ok=True)

    @translate_errors("delete")
    def delete_prefix(self, prefix: str) -> None:
        folder = self.root / normalize_path(prefix)
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            shutil.rmtree(folder)

    @translate_errors("read")
    def download(self, path: str, to: Path) -> None:
        with scratch_for(to) as scratch:
            shutil.copyfile(self.root / normalize_path(path), scratch)

    def _below(self, prefix: str) -> Entries:
        """List all files, of a linked folder only those directly in it: a link may lead anywhere. A link to nothing is
        an empty file."""
        found: Entries = []
        for folder, folders, names in os.walk(self.root / normalize_path(prefix, may_be_empty=True)):
            linked = [Path(folder, name) for name in folders if Path(folder, name).is_symlink()]
            files = [*(Path(folder, name) for name in names), *(file for link in linked for file in link.iterdir())]
            for file in files:
                # Another process may remove a file while this walks.
                with suppress(FileNotFoundError):
                    about = file.stat() if file.exists() else file.lstat()
                    if not stat.S_ISDIR(about.st_mode):
                        found.append(Entry(file.relative_to(self.root).as_posix(), about.st_size, about.st_mtime))
        return sorted(found, key=lambda entry: entry.path)


def open_store(uri: str | Path, retry: RetryPolicy | None = None) -> ObjectStore:
    """Open the object store at `uri`. Nothing is contacted before the first call; `ObjectStore.check` does it at
    once."""
    text = str(uri)
    scheme = text.partition("://")[0] if "://" in text else ""
    retry = retry or RetryPolicy()
    if scheme in ("", "file"):
        return LocalStore(_folder_of(text) if scheme else Path(text))
    _refuse_secrets(text)
    # The emulator of Google's store answers its JSON interface only, which gcsfs speaks and obstore does not.
    is_cloud = scheme in ("s3", "az") or (scheme == "gs" and "STORAGE_EMULATOR_HOST" not in os.environ)
    try:  # imported here, because their libraries are optional
        if is_cloud:
            from .cloud_store import open_cloud_store

            return open_cloud_store(text, retry)
        from .fsspec_store import open_fsspec_store

        return open_fsspec_store(text, retry)
    except ModuleNotFoundError as error:
        extra = "cloud" if is_cloud else "other-stores"
        raise MissingPackage(f"{scheme}:// needs {error.name}, which is not installed",
                             f"pip install 'embark-rec[{extra}]'") from None


def _folder_of(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise UserError(f"{uri} names a file on another machine", f"for a folder of this one: file:///{parts.netloc}…")
    return Path(unquote(parts.path))


def _refuse_secrets(uri: str) -> None:
    """Refuse a uri with secrets: it is written into specs, logs and messages."""
    scheme, _, rest = uri.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    in_cloud = scheme in ("s3", "gs", "az")
    if (at and (in_cloud or ":" in user)) or "sig=" in rest or (in_cloud and "?" in rest):
        raise UserError(f"the {scheme}:// uri holds credentials or options; it may hold only a bucket and a prefix",
                        "put credentials where the cloud's own tools look for them: environment, profile, role")

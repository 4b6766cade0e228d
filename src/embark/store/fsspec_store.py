"""The store for any scheme that fsspec knows: HDFS, SFTP, …, and Google's store when it is an emulator."""

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import fsspec

from embark.errors import EmbarkError, Fault, MissingPackage, UserError
from embark.values import JsonDict
from .atomic_file import SCRATCH_SUFFIX
from .errors import DAMAGED, NotFound, RetryPolicy, call_with_retries
from .object_store import Data, Entries, Entry, ObjectStore, normalize_path, translate_errors

T = TypeVar("T")

ATOMIC_UPLOADS = ("gs", "gcs", "s3", "s3a", "abfs", "abfss", "adl", "oss", "oci", "memory")
"""Schemes whose uploads appear whole by themselves; elsewhere a file is written beside and renamed."""
ATOMIC_CREATES = ("gs", "gcs", "s3", "s3a", "memory")
"""Schemes that create a file for one of several writers; elsewhere each looks again whether it was the last."""
SETTLE_S = 2.0
_REPLACING = threading.Lock()
FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError,
         TypeError, ImportError, NotImplementedError, EmbarkError)


class FsspecStore(ObjectStore):
    """Files of an fsspec file system below a root."""

    library_errors = (Exception,)

    def __init__(self, uri: str, file_system: Any, root: str, retry: RetryPolicy) -> None:
        super().__init__(uri)
        self._fs = file_system
        self._root = root.rstrip("/")
        self._retry = retry

    @translate_errors("read")
    def read(self, path: str) -> bytes:
        return bytes(self._do(lambda: self._fs.cat_file(self._full(path))))

    @translate_errors("read")
    def read_into(self, path: str, start: int, into: memoryview) -> None:
        if not len(into):
            return
        data = self._do(lambda: self._fs.cat_file(self._full(path), start=start, end=start + len(into)))
        if len(data) != len(into):
            raise Fault(f"{self.where(path)} ended {len(into) - len(data)} bytes early", DAMAGED)
        into[:] = data

    @translate_errors("write")
    def write(self, path: str, data: Data, size_bytes: int | None = None) -> None:
        if isinstance(data, Path | bytes | bytearray | memoryview):
            self._do(lambda: self._write(path, data))
            return
        # A file first: the pieces come once, and a retry needs them again.
        with tempfile.NamedTemporaryFile(suffix=SCRATCH_SUFFIX) as file:
            for piece in data:
                file.write(piece)
            file.flush()
            self._do(lambda: self._write(path, Path(file.name)))

    @translate_errors("write")
    def create(self, path: str, data: bytes) -> bool:
        scheme = self.uri.partition("://")[0]
        try:
            self._do(lambda: self._create(path, data, scheme))
        except FileExistsError:
            return self.read(path) == data  # sent again, because the answer to the first request was lost
        if scheme not in ATOMIC_CREATES:
            time.sleep(SETTLE_S)
        return scheme in ATOMIC_CREATES or self.read(path) == data

    @translate_errors("write")
    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        """Replace it: in memory under a lock; elsewhere each looks again whether it was the last."""
        try:
            with _REPLACING:
                if self.read(path) != expected:
                    return False
                self.write(path, data)
                if not self.uri.startswith("memory:"):
                    time.sleep(SETTLE_S)
                return self.read(path) == data
        except NotFound:
            return False

    @translate_errors("list")
    def list(self, prefix: str = "") -> Entries:
        folder = normalize_path(prefix, may_be_empty=True)
        return self._do(lambda: self._list(folder))

    def size(self, path: str) -> int:
        return int(self._info(path)["size"])

    @translate_errors("delete")
    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._do(lambda: self._fs.rm_file(self._full(path)))

    def delete_prefix(self, prefix: str) -> None:
        for entry in self.list(normalize_path(prefix)):
            self.delete(entry.path)

    @translate_errors("look at")
    def _info(self, path: str) -> JsonDict:
        def look() -> JsonDict:
            self._fs.invalidate_cache()
            info: JsonDict = self._fs.info(self._full(path))
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return info

        return self._do(look)

    def _list(self, folder: str) -> Entries:
        self._fs.invalidate_cache()
        top = f"{self._root}/{folder}".rstrip("/")
        found: dict[str, JsonDict] = self._fs.find(top, detail=True)
        start = len(self._root.lstrip("/")) + 1
        entries = [Entry(name.lstrip("/")[start:], int(info["size"])) for name, info in found.items()]
        below = f"{folder}/" if folder else ""
        return sorted((entry for entry in entries if entry.path.startswith(below) and entry.path != below
                       and not entry.path.endswith(SCRATCH_SUFFIX)), key=lambda entry: entry.path)

    def _write(self, path: str, data: Path | bytes | bytearray | memoryview) -> None:
        full = self._full(path)
        is_whole_at_once = self.uri.partition("://")[0] in ATOMIC_UPLOADS
        target = full if is_whole_at_once else f"{full}.{uuid4().hex[:12]}{SCRATCH_SUFFIX}"
        if not is_whole_at_once:
            self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        if isinstance(data, Path):
            self._fs.put_file(str(data), target)
        else:
            self._fs.pipe_file(target, bytes(data))
        if not is_whole_at_once:
            self._fs.mv(target, full)

    def _create(self, path: str, data: bytes, scheme: str) -> None:
        if scheme in ATOMIC_CREATES and scheme != "memory":
            self._fs.pipe_file(self._full(path), data, mode="create")
            return
        if self._fs.exists(self._full(path)):
            raise FileExistsError(path)
        self._write(path, data)

    def _full(self, path: str) -> str:
        return f"{self._root}/{normalize_path(path)}"

    def _do(self, call: Callable[[], T]) -> T:
        return call_with_retries(call, self._retry, lambda error: not isinstance(error, FINAL))


def open_fsspec_store(uri: str, retry: RetryPolicy) -> FsspecStore:
    """Open a store with the package that fsspec names for the scheme."""
    scheme = uri.partition("://")[0]
    try:
        file_system, root = fsspec.core.url_to_fs(uri)
    except ValueError:
        raise UserError(f"{uri}: no store has the scheme {scheme}://",
                        "a path, s3://, gs://, az://, or a scheme that fsspec lists") from None
    except ImportError as error:
        raise MissingPackage(f"{uri}: {error}", "install that package") from None
    return FsspecStore(uri.rstrip("/"), file_system, root, retry)

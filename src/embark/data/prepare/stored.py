"""Tasks whose files are in an object store, or in a folder that several machines share.

A task is done in a folder of its own, with the parts of other tasks' files that it needs. Then each file that it made
appears in the store complete, the task's record last. So a task may be done again at any time, also by two machines at
once: it makes the same bytes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING
from uuid import uuid4

from embark.data.workers import Report
from embark.errors import UserError
from embark.store import LocalStore, NotFound, ObjectStore, for_each_parallel, open_store, writing
from embark.store.atomic_file import move
from embark.store.object_store import PIECE_BYTES
from embark.values import JsonDict, frozen
from .journal import ATTEMPTS, PREPARING, SETTINGS, record_path

if TYPE_CHECKING:
    from .tasks import Preparation, Task

_NUM_PARALLEL = 4  # Pieces that are fetched at once: their memory counts as the task's.
_ABANDONED_S = 60.0


@frozen
class Extent:
    """A part of a file of the store; all of it without a size."""

    path: str
    start: int = 0
    size_bytes: int | None = None

    def pieces(self) -> Iterable[Extent]:
        if self.size_bytes is None:
            return [self]
        stop = self.start + self.size_bytes
        return [Extent(self.path, at, min(PIECE_BYTES, stop - at))
                for at in range(self.start, max(stop, self.start + 1), PIECE_BYTES)]


class TaskFolder:
    """A folder with what is needed of a store's files, at the same paths, and with those that are made.

    A shared folder's own files are linked, and those that are made move there. The driver of a preparation is the only
    one that works in the shared folder itself.
    """

    def __init__(self, store: ObjectStore, *, is_driver: bool = False) -> None:
        self._store, self._fetched = store, {""}
        self._shared = store.root.absolute() if isinstance(store, LocalStore) else None
        self.uri = str(self._shared or store.uri)
        self.is_direct = is_driver and self._shared is not None
        parent = self._shared / ATTEMPTS if self._shared else Path(gettempdir(), f"embark-prepare-{os.getuid()}")
        self.path = self._shared if self.is_direct and self._shared else parent / uuid4().hex
        self.where = self._shared or parent
        self.field = "data.path" if self._shared else f"TMPDIR of {socket.gethostname()}"
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        if not self._shared:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            _remove_abandoned(parent)

    def fetch(self, extents: Iterable[Extent]) -> None:
        """Have these parts of files here. What is between the parts of a file takes no space."""
        if self.is_direct:
            return
        pieces = [piece for extent in extents for piece in extent.pieces()]
        for path in {piece.path for piece in pieces}:
            (self.path / path).parent.mkdir(parents=True, exist_ok=True)
            if self._shared and path not in self._fetched:
                (self.path / path).symlink_to(self._shared / path)
            self._fetched.add(path)
        if not self._shared:
            for_each_parallel(self._download, pieces, _NUM_PARALLEL)

    def put(self, last: str = "") -> None:
        """Put the files that were made into the store, `last` after all others."""
        if self.is_direct:
            return
        made = {file.relative_to(self.path).as_posix() for file in self.path.rglob("*") if file.is_file()}
        for path in sorted(made - self._fetched, key=lambda path: (path == last, path)):
            if self._shared:
                move(self.path / path, self._shared / path)
            else:
                self._store.write(path, self.path / path)
            self._fetched.add(path)

    def close(self) -> None:
        if not self.is_direct:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _download(self, piece: Extent) -> None:
        target = self.path / piece.path
        if piece.size_bytes is None:
            self._store.download(piece.path, target)
            return
        data = self._store.read_range(piece.path, piece.start, piece.size_bytes)
        file = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            while data:
                written = os.pwrite(file, data, piece.start + piece.size_bytes - len(data))
                data = data[written:]
        finally:
            os.close(file)


@contextmanager
def driver_folder(store: ObjectStore) -> Iterator[TaskFolder]:
    """Give the folder of the process that hands out the tasks: the data's own, if it is on this machine."""
    root = store.root if isinstance(store, LocalStore) else None
    with writing(root or Path(gettempdir()), "data.path" if root else "TMPDIR"):
        folder = TaskFolder(store, is_driver=True)
        try:
            yield folder
        finally:
            folder.close()


@dataclass(frozen=True)
class StoredPreparation:
    """A preparation's tasks, done on any machine that reaches the store at `uri`."""

    work: Preparation
    uri: str

    def do(self, task: Task, report: Report) -> Callable[[], JsonDict]:
        """Do the task; calling what is returned puts its files into the store."""
        store = open_store(self.uri)
        settings = self._settings(store)
        folder = TaskFolder(store)
        try:
            with writing(folder.where, folder.field):
                work = self.work.moved(folder.path)
                for extents in work.needed(task):
                    folder.fetch(extents)
                finish = work.do(task, report)
        except BaseException:
            folder.close()
            raise

        def put() -> JsonDict:
            try:
                with writing(folder.where, folder.field):
                    record = finish()
                    if self._settings(store) != settings:  # of a driver that is no more, when another has begun
                        raise UserError(f"{self.uri}: another preparation has begun there",
                                        "wait for it, or set another data.path")
                    folder.put(last=record_path(task.record))
                    return record
            finally:
                folder.close()

        return put

    def _settings(self, store: ObjectStore) -> bytes:
        try:
            return store.read(f"{PREPARING}/{SETTINGS}")
        except NotFound:
            raise UserError(
                f"{self.uri}: the machine {socket.gethostname()} finds no preparation there",
                "data.path must be in an object store, or in a folder that all machines share") from None


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.iterdir():
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                if time.time() - os.fstat(lock).st_mtime > _ABANDONED_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)

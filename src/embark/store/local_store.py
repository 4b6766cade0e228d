"""A folder of this machine, or one mounted on it, as an object store."""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from embark.errors import Fault
from embark.store.atomic_file import SCRATCH_SUFFIX, create_atomic, scratch_for
from embark.store.errors import DAMAGED
from embark.store.object_store import Data, Entries, Entry, ObjectStore, normalize_path, translate_errors


class LocalStore(ObjectStore):
    """Files below `root`, which comes into being with the first one."""

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
                                fix=DAMAGED)
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
        """Nothing behind a linked folder goes: what a link leads to is not this store's."""
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
        """Of a linked folder only its own files: a link may lead anywhere. A link to nothing is an empty file."""
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

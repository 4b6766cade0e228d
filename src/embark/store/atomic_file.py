"""Files that appear complete or not at all, and a spec's file that is edited in place."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from embark.errors import UserError
from embark.spec import load_spec, set_in_text

SCRATCH_SUFFIX = ".embark-part"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # Mounted buckets have none.
NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


def write_atomic(path: Path, text: str) -> None:
    """Replace the file's text; a reader sees the old text or the new, never a part."""
    with scratch_for(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def scratch_for(path: Path) -> Iterator[Path]:
    """Give a file beside `path` that is renamed to it, durably, when the block succeeds, and is deleted otherwise."""
    scratch = _scratch(path)
    try:
        yield scratch
        _sync(scratch)
        scratch.replace(path)
        _sync(path.parent)  # a rename is on disk only when its directory is
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def scratch_folder_for(path: Path) -> Iterator[Path]:
    """Give a folder beside `path`, deleted at the end of the block. Those that killed processes left for `path` are
    deleted first: no process holds their locks."""
    for left in path.parent.glob(f".{escape(path.name[:100])}.{12 * '?'}{SCRATCH_SUFFIX}"):
        with suppress(OSError), ExitStack() as at_end:
            _lock(left, at_end)
            shutil.rmtree(left)
    scratch = _scratch(path)
    scratch.mkdir()
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        with suppress(OSError):  # a file system without locks, where nothing is deleted that others may use
            _lock(scratch, at_end)
        yield scratch


def _lock(folder: Path, until: ExitStack) -> None:
    """Lock a folder until then; raises `OSError` if another process has, or if there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    until.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def make_directory(path: Path) -> None:
    """Create a directory and those above it that are missing, durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent)


def create_atomic(path: Path, data: bytes) -> bool:
    """Create the file, durably; returns False if it exists. If several processes try at once, one succeeds, over NFS
    too."""
    scratch = _scratch(path)
    try:
        scratch.write_bytes(data)
        _sync(scratch)
        os.link(scratch, path)
    except FileExistsError:
        if path.is_symlink() and not path.exists():  # reading it finds no file, so a caller would try without end
            raise UserError(f"{path}: is a link to nothing", "remove the link") from None
        return scratch.stat().st_nlink == 2  # it was linked, and NFS lost the answer to the first request
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        _sync(path)
    finally:
        scratch.unlink(missing_ok=True)
    _sync(path.parent)
    return True


def replace_atomic(path: Path, data: bytes, expected: bytes) -> bool:
    """Replace the file's bytes, durably, if they are `expected`; returns False otherwise. Of several processes that try
    at once, one succeeds; the lock of one that is killed is gone with it."""
    try:
        with path.open("rb+" if os.access(path, os.W_OK) else "rb") as file:  # NFS locks only what could be written
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            # By its name: another process may have renamed a new file to it while this one waited for the lock. Where
            # the bytes are the expected ones, it has not, and whoever expects the same waits for the same lock.
            if path.read_bytes() != expected:
                return False
            with scratch_for(path) as scratch:
                scratch.write_bytes(data)
    except FileNotFoundError:
        return False
    return True


def commit(file: BinaryIO, path: Path) -> None:
    """Close an open file of `path`'s directory and rename it to `path`, durably."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    move(Path(file.name), path)


def move(file: Path, path: Path) -> None:
    """Rename a file that is on disk to `path`, durably."""
    make_directory(path.parent)
    os.replace(file, path)
    _sync(path.parent)


def _scratch(path: Path) -> Path:
    make_directory(path.parent)
    return path.with_name(f".{path.name[:100]}.{uuid4().hex[:12]}{SCRATCH_SUFFIX}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_in_file(path: Path, sets: Sequence[str]) -> tuple[str, ...]:
    """Write `key=value` settings into a TOML spec, whose comments and order stay; returns the lines that are new.

    A setting that `load_spec` refuses raises before anything is written.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", "`embark init` writes a starter spec")
    load_spec(str(path), sets)
    text, lines = set_in_text(path.read_text(encoding="utf-8"), sets, where=str(path))
    if lines:
        try:
            write_atomic(path, text)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", "make the file writable, or copy it") from error
    return lines

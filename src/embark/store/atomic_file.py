"""Files that appear complete or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

SCRATCH_SUFFIX = ".embark-part"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # As buckets that are mounted answer.


def write_atomic(path: Path, text: str) -> None:
    """Replace the file's text; a reader sees the old text or the new, never a part."""
    with scratch_for(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def scratch_for(path: Path) -> Iterator[Path]:
    """A file beside `path` that is renamed to it, durably, when the block succeeds; otherwise it is deleted."""
    scratch = _scratch(path)
    try:
        yield scratch
        _sync(scratch)
        scratch.replace(path)
        _sync(path.parent)  # a rename is on disk only when its directory is
    finally:
        scratch.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Create it and those above it that are missing, durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent)


def create_atomic(path: Path, data: bytes) -> bool:
    """Create the file, durably; False where it exists. Of processes that try at once one succeeds, over NFS too."""
    scratch = _scratch(path)
    try:
        scratch.write_bytes(data)
        _sync(scratch)
        os.link(scratch, path)
    except FileExistsError:
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


def commit(file: BinaryIO, path: Path) -> None:
    """Close an open file of `path`'s directory and rename it to `path`, durably."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
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

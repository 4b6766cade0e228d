"""A folder of rendered files beside a fresh rendering: what is new, what changed, what a person edited."""

import difflib
import hashlib
import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from embark.errors import UserError
from embark.store.atomic_file import scratch_for

RECORD = ".embark-render.json"  # In the folder: the checksum of each file as it was last written.
State = Literal["new", "same", "changed", "edited", "left over"]


@dataclass(frozen=True, slots=True)
class File:
    """One file to hand over."""

    path: str  # Relative to the directory that is rendered into, with `/`.
    text: str = ""
    is_executable: bool = False
    data: bytes = field(default=b"", repr=False)  # Of a file that is not text.

    @property
    def content(self) -> bytes:
        return self.data or self.text.encode()


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file of the folder, the rendering, or both."""

    path: str
    state: State
    """`edited`: a person changed it since it was rendered, and a fresh rendering differs from what is there."""
    diff: str  # From the file to its fresh rendering.
    new: bytes = field(default=b"", repr=False)
    is_executable: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class FolderReport:
    """A folder after a rendering, or as a rendering would change it."""

    folder: str
    files: tuple[FileChange, ...]
    skipped: tuple[str, ...]  # Not written: edited by hand, or no longer rendered.
    is_written: bool

    def paths(self, state: State) -> list[str]:
        return [file.path for file in self.files if file.state == state]


def update_folder(folder: Path, files: Sequence[File], *, diff: bool = False, force: bool = False) -> FolderReport:
    """Write the files that are new or changed; with `force` also those that were edited by hand, with `diff` none."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is not a folder", fix="--out another one")
    changes = compare(folder, files)
    skipped = [] if diff else write(folder, changes, force=force)
    return FolderReport(str(folder), tuple(changes), tuple(change.path for change in skipped), is_written=not diff)


def compare(folder: Path, files: Sequence[File]) -> list[FileChange]:
    """Each file, in the order it was rendered; then those that were rendered once and are no more."""
    record = _record(folder)
    changes = []
    for file in files:
        old = _read(folder / file.path)
        state: State = "new" if old is None else "same" if old == file.content else \
            "changed" if checksum(old) == record.get(file.path) else "edited"
        changes.append(FileChange(file.path, state, _diff(file.path, old or b"", file.content), file.content,
                                  file.is_executable))
    for path in sorted(set(record) - {file.path for file in files}):
        old = _read(folder / path)
        if old is not None:
            changes.append(FileChange(path, "left over", _diff(path, old, b"")))
    return changes


def write(folder: Path, changes: Sequence[FileChange], *, force: bool, must_record: bool = True) -> list[FileChange]:
    """Write what is new or changed; with `force` also what a person edited. Returns what was skipped.

    Without the record, a later rendering takes every file for a person's.
    """
    record = _record(folder)
    skipped = []
    for one in changes:
        if one.state == "left over" or (one.state == "edited" and not force):
            skipped.append(one)
            continue
        path = folder / one.path
        if one.state != "same":
            _write(path, one.new)
        if one.is_executable:
            path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        record[one.path] = checksum(one.new)
    if changes and must_record:
        _write(folder / RECORD, f"{json.dumps(record, indent=1, sort_keys=True)}\n".encode())
    return skipped


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _record(folder: Path) -> dict[str, str]:
    """By path. One that cannot be read knows no file: then everything that differs counts as edited."""
    try:
        read = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in read.items()} if isinstance(read, dict) else {}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be compared: {error}", fix="--out another folder") from error


def _write(path: Path, data: bytes) -> None:
    try:
        with scratch_for(path) as scratch:  # a full disk leaves the old file whole
            scratch.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", fix="--out a folder that can be written") from error


def _diff(path: str, old: bytes, new: bytes) -> str:
    try:
        lines = difflib.unified_diff(old.decode().splitlines(keepends=True), new.decode().splitlines(keepends=True),
                                     f"{path} (there)", f"{path} (rendered)")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    except UnicodeDecodeError:
        return "" if old == new else f"{path}: {len(old):,} bytes there, {len(new):,} rendered; not text\n"

"""A folder of rendered files beside a fresh rendering: what is new, what changed, what a person edited."""

import difflib
import hashlib
import json
import stat
from collections.abc import Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Literal

from embark.errors import UserError
from embark.spec import RunSpec
from embark.store.atomic_file import scratch_for
from embark.values import frozen

RECORD = ".embark-render.json"
SPEC = "run.toml"
State = Literal["new", "same", "changed", "edited", "left over"]


@frozen
class File:
    """One file to hand over."""

    path: str  # Relative to the directory that is rendered into, with `/`.
    text: str = ""
    is_executable: bool = False
    data: bytes = field(default=b"", repr=False)  # The content of a file that is not text.

    @property
    def content(self) -> bytes:
        return self.data or self.text.encode()


Files = list[File]


@frozen
class Record:
    """The entries of the folder's `RECORD` about its last rendering."""

    spec: str = ""  # The file of the folder that it was rendered from.
    origin: tuple[str, ...] = ()
    """The spec that this file is a copy of, as a path from the folder or a preset, and the settings
    that were given with it; empty where it is not a copy."""
    checksums: dict[str, str] = field(default_factory=dict)  # Each file as it was last written, by path.


@frozen
class FolderSpec:
    """The spec of a folder, as its next rendering writes it."""

    folder: Path
    spec: RunSpec
    file: File
    origin: tuple[str, ...]
    settings: tuple[str, ...]  # The lines that `--set` adds to the folder's own spec.


@frozen
class FileChange:
    """A file of the folder, of the rendering, or of both."""

    path: str
    state: State
    """`edited`: a person changed it since it was rendered, and a fresh rendering differs from what is there."""
    diff: str  # The change from the file to its fresh rendering.
    new: bytes = field(default=b"", repr=False)
    is_executable: bool = field(default=False, repr=False)
    is_binary: bool = field(default=False, repr=False)  # Packed, not edited: it is always replaced, and not recorded.


@frozen
class FolderReport:
    """A folder after a rendering, or as a rendering would change it."""

    folder: str
    files: tuple[FileChange, ...]
    skipped: tuple[str, ...]  # Files that were not written: edited by hand, or no longer rendered.
    is_written: bool
    spec: str  # The file of the folder that the others are rendered from.
    settings: tuple[str, ...]  # The lines that are new in it, as TOML.
    unread: str = ""  # Why the files lack values that follow from the data; empty if they have them.

    def paths(self, state: State) -> list[str]:
        return [file.path for file in self.files if file.state == state]


def update_folder(
    source: FolderSpec, files: Sequence[File], *, diff: bool, force: bool
) -> FolderReport:
    """Write the spec and what is new or changed; with `force` also what was edited by hand, with `diff` nothing."""
    folder = source.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is not a folder", "--out another one")
    changes = compare(source, files)
    skipped = [] if diff else write(source, changes, force=force)
    return FolderReport(str(folder), tuple(changes), tuple(change.path for change in skipped), is_written=not diff,
                        spec=source.file.path, settings=source.settings)


def compare(source: FolderSpec, files: Sequence[File]) -> list[FileChange]:
    """Compare the spec and each file, in the order of rendering, then files that are rendered no more."""
    folder, record = source.folder, read_record(source.folder)
    changes = []
    for file in (source.file, *files):
        old = _read(folder / file.path)
        is_ours = file is source.file or file.data or (old and checksum(old) == record.checksums.get(file.path))
        state: State = "new" if old is None else "same" if old == file.content else "changed" if is_ours else "edited"
        changes.append(FileChange(file.path, state, _diff(file.path, old or b"", file.content), file.content,
                                  file.is_executable, is_binary=bool(file.data)))
    for path in sorted(set(record.checksums) - {file.path for file in (source.file, *files)}):
        old = _read(folder / path)
        if old is not None:
            changes.append(FileChange(path, "left over", _diff(path, old, b"")))
    return changes


def write(source: FolderSpec, changes: Sequence[FileChange], *, force: bool) -> list[FileChange]:
    """Write what is new or changed; with `force` also what a person edited. Returns what was skipped."""
    folder, old = source.folder, read_record(source.folder).checksums
    checksums: dict[str, str] = {}
    skipped = []
    for one in changes:
        if one.state == "left over" or (one.state == "edited" and not force):
            skipped.append(one)
            checksums |= {one.path: old[one.path]} if one.path in old else {}
            continue
        path = folder / one.path
        if one.state != "same":
            _write(path, one.new)
        if one.is_executable:
            path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        checksums |= {} if one.is_binary else {one.path: checksum(one.new)}
    record = Record(source.file.path, source.origin, checksums)
    _write(folder / RECORD, f"{json.dumps(asdict(record), indent=1, sort_keys=True)}\n".encode())
    return skipped


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_record(folder: Path) -> Record:
    """Read the record; without a readable one, every file that differs counts as edited."""
    try:
        read = json.loads((folder / RECORD).read_text())
        spec = str(read["spec"])
        if spec != Path(spec).name or not (folder / spec).exists():
            raise ValueError(f"{spec!r} is no file of the folder")
        return Record(spec, tuple(map(str, read["origin"])),
                      {str(path): str(text) for path, text in read["checksums"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Record()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be compared: {error}", "--out another folder") from error


def _write(path: Path, data: bytes) -> None:
    try:
        with scratch_for(path) as scratch:  # a full disk leaves the old file whole
            scratch.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "--out a folder that can be written") from error


def _diff(path: str, old: bytes, new: bytes) -> str:
    try:
        lines = difflib.unified_diff(old.decode().splitlines(keepends=True), new.decode().splitlines(keepends=True),
                                     f"{path} (there)", f"{path} (rendered)")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    except UnicodeDecodeError:
        return "" if old == new else f"{path}: {len(old):,} bytes there, {len(new):,} rendered; not text\n"

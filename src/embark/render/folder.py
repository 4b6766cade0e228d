"""A folder of rendered files beside a fresh rendering: what is new, what changed, what a person edited."""

from __future__ import annotations

import difflib
import hashlib
import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embark.errors import UserError
from embark.render.file import File

RECORD = ".embark-render.json"
"""In the folder: the checksum of each file as it was last written."""
State = Literal["new", "same", "changed", "edited", "left over"]


@dataclass(frozen=True, slots=True)
class Found:
    """One file of the folder, the rendering, or both."""

    path: str
    state: State
    """`edited`: a person changed it since it was rendered, and a fresh rendering differs from what is there."""
    old: str
    new: str
    is_executable: bool = False

    @property
    def diff(self) -> str:
        """From what is there to what would be written."""
        if self.state == "same":
            return ""
        return "".join(_lines(self.path, self.old, self.new))


def compare(folder: Path, files: Sequence[File]) -> list[Found]:
    """Each file, in the order it was rendered; then those that were rendered once and are no more."""
    record = _record(folder)
    found = []
    for file in files:
        old = _read(folder / file.path)
        found.append(Found(file.path, _state(old, file.text, record.get(file.path, "")), old or "", file.text,
                           file.is_executable))
    rendered = {file.path for file in files}
    for path in sorted(set(record) - rendered):
        old = _read(folder / path)
        if old is not None:
            found.append(Found(path, "left over", old, ""))
    return found


def write(folder: Path, found: Sequence[Found], *, force: bool, must_record: bool = True) -> list[Found]:
    """Write what is new or changed; with `force` what a person edited, too. Returns what was left as it is.

    Without the record, a later rendering takes every file for a person's.
    """
    record = _record(folder)
    kept = []
    for one in found:
        if one.state == "left over" or (one.state == "edited" and not force):
            kept.append(one)
            continue
        path = folder / one.path
        if one.state != "same":
            _write(path, one.new)
        if one.is_executable:
            path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        record[one.path] = checksum(one.new)
    if found and must_record:
        _write(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
    return kept


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _state(old: str | None, new: str, recorded: str) -> State:
    if old is None:
        return "new"
    if old == new:
        return "same"
    return "changed" if checksum(old) == recorded else "edited"


def _record(folder: Path) -> dict[str, str]:
    """By path. One that cannot be read knows no file: then everything that differs counts as edited."""
    try:
        read = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in read.items()} if isinstance(read, dict) else {}


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be compared: {error}", fix="--out another folder") from error


def _write(path: Path, text: str) -> None:
    # Beside it first, so that a full disk leaves the old one whole.
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", fix="--out a folder that can be written") from error


def _lines(path: str, old: str, new: str) -> Iterator[str]:
    for line in difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True),
                                     f"{path} (there)", f"{path} (rendered)"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"

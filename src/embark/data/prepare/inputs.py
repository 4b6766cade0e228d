"""Files of this machine as input, and what a glob means there and in a bucket alike."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from embark.data.prepare.pieces import InputFile
from embark.errors import DataError

_WILD = re.compile(r"[*?[]")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class LocalInputs:
    """Paths, globs (`**` crosses folders) and folders."""

    root: str = field(default_factory=os.getcwd)
    """What a path is relative to: a worker process may start elsewhere."""

    def find(self, pattern: str) -> list[InputFile]:
        """The files that a path or a glob means, sorted; a folder means the data files in it."""
        path = _path_of(pattern)
        whole = self._whole(path)
        if whole.is_file():
            return [self._file(path)]
        if whole.is_dir():
            inside = sorted(p.name for p in whole.iterdir() if p.is_file())
            found = [f"{path.rstrip('/')}/{name}" for name in data_files(inside)]
            if not found:
                raise DataError(f"{pattern}: the folder holds no data files", fix="name the files, or a glob of them")
            return [self._file(name) for name in found]
        folder, rest = split_glob(path)
        if not rest:
            raise nothing_found(pattern, self._names_beside(path))
        found = [name for name in self._below(folder, rest) if is_data(name)]
        if not found:
            raise nothing_found(pattern, self._names_beside(folder + rest.split("/", 1)[0]))
        return [self._file(name) for name in sorted(found)]

    def read(self, uri: str, start: int, num_bytes: int) -> bytes:
        """Bytes of a file; fewer at its end."""
        try:
            with open(self._whole(uri), "rb", buffering=0) as file:
                file.seek(start)
                pieces = []
                while num_bytes > 0 and (piece := file.read(num_bytes)):
                    pieces.append(piece)
                    num_bytes -= len(piece)
        except OSError as error:
            raise DataError(f"{uri}: {error.strerror or error}") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def local_path(self, uri: str) -> str | None:
        """Where it is on this machine."""
        return str(self._whole(uri))

    def _whole(self, path: str) -> Path:
        return Path(self.root, Path(path).expanduser())

    def _file(self, path: str) -> InputFile:
        try:
            found = self._whole(path).stat()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        return InputFile(path, found.st_size, changed=str(found.st_mtime_ns))

    def _below(self, folder: str, rest: str) -> list[str]:
        """Files below `folder` that the glob `rest` matches."""
        is_match, depth = glob_pattern(rest), None if "**" in rest else rest.count("/")
        found = []
        top = self._whole(folder or ".")
        for where, folders, names in os.walk(top, followlinks=True):
            inside = Path(where).relative_to(top).parts
            folders[:] = [] if depth is not None and len(inside) >= depth else sorted(folders)
            found += [folder + name for name in ("/".join((*inside, n)) for n in names) if is_match.fullmatch(name)]
        return found

    def _names_beside(self, path: str) -> list[str]:
        parent = self._whole(path).parent
        head = path[: path.rfind("/") + 1]
        return sorted(head + p.name for p in parent.iterdir()) if parent.is_dir() else []


def split_glob(path: str) -> tuple[str, str]:
    """The folder before the first wild part, with its slash, and the rest; no rest where nothing is wild."""
    wild = _WILD.search(path)
    if not wild:
        return path, ""
    cut = path.rfind("/", 0, wild.start()) + 1
    return path[:cut], path[cut:]


def glob_pattern(glob: str) -> re.Pattern[str]:
    """`*` and `?` stay within a folder, `**/` crosses any number of them, `[…]` is one character."""
    regex, at = "", 0
    while at < len(glob):
        if glob.startswith("**/", at):
            regex, at = regex + "(?:[^/]+/)*", at + 3
        elif glob.startswith("**", at):
            regex, at = regex + ".*", at + 2
        elif glob[at] == "[" and (end := glob.find("]", at + 2)) > 0:
            inside = glob[at + 1 : end].replace("\\", "\\\\")
            regex, at = regex + "[" + ("^" + inside[1:] if inside[0] == "!" else inside) + "]", end + 1
        else:
            regex, at = regex + {"*": "[^/]*", "?": "[^/]"}.get(glob[at], re.escape(glob[at])), at + 1
    return re.compile(regex, re.DOTALL)


def data_files(names: Iterable[str]) -> list[str]:
    """Of a folder's files those that hold rows: its Parquet files where there are such, else all but marks."""
    some = [name for name in names if is_data(name)]
    return [name for name in some if name.lower().endswith((".parquet", ".pq"))] or some


def is_data(path: str) -> bool:
    """Not one of the marks that programs leave beside data: `_metadata`, `_SUCCESS`, `.part.crc`."""
    return not path.rsplit("/", 1)[-1].startswith(("_", "."))


def nothing_found(pattern: str, there: Sequence[str]) -> DataError:
    """No file is meant by `pattern`; what is `there` beside it may be what was."""
    close = difflib.get_close_matches(pattern, there, n=_MAX_NAMED, cutoff=0.6)
    fix = "paths are looked up from the directory the command starts in"
    if close:
        fix = "did you mean " + " or ".join(map(repr, close)) + "?"
    elif there:
        more = f" and {len(there) - _MAX_NAMED} more" if len(there) > _MAX_NAMED else ""
        fix = "there is: " + ", ".join(there[:_MAX_NAMED]) + more
    return DataError(f"{pattern}: there is no such file", fix=fix)


def _path_of(pattern: str) -> str:
    return unquote(urlsplit(pattern).path) if pattern.startswith("file://") else pattern

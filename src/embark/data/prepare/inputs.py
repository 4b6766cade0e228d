"""The files that `embark data prepare` reads, on this machine and in object stores; a glob means the same in both."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from embark.errors import DataError, did_you_mean, near_names
from embark.formatting import shortlist
from embark.store import ObjectStore, open_store
from embark.store.errors import explain_data

_WILD = re.compile(r"[*?[]")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input."""

    uri: str
    size_bytes: int
    changed: str = ""  # Distinguishes this content from another under the same name.

    @property
    def name(self) -> str:
        return self.uri.rsplit("/", 1)[-1]


def open_inputs(patterns: str | Iterable[str]) -> tuple[Inputs, list[InputFile]]:
    """Find every file that the paths, globs and URIs mean, each once, in the order in which they are named."""
    inputs = Inputs()
    files: dict[str, InputFile] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for file in inputs.find(pattern):
            files.setdefault(file.uri, file)
    if not files:
        raise DataError("data.prepare.input names no files to prepare",
                        fix="name them in data.prepare.input, in the spec or with --set data.prepare.input=clicks.csv")
    return inputs, list(files.values())


@dataclass(slots=True)
class Inputs:
    """Opens paths, and URIs of any store that `embark.store` opens. A process it is sent to opens its own stores."""

    root: str = field(default_factory=os.getcwd)  # What a path is relative to: a worker process may start elsewhere.
    sizes: dict[str, int] = field(default_factory=dict)  # Bytes of the remote files that were found.
    _stores: dict[str, ObjectStore] = field(default_factory=dict, repr=False, compare=False)

    def find(self, pattern: str) -> list[InputFile]:
        """Find the files that a path or a glob (`**` crosses folders) means, sorted; a folder means the data files in
        it."""
        if _is_remote(pattern):
            return self._find_remote(pattern)
        path = unquote(urlsplit(pattern).path) if pattern.startswith("file://") else pattern
        target = self._absolute(path)
        found = [path]
        if target.is_dir():
            found = _data_files(f"{path.rstrip('/')}/{p.name}" for p in sorted(target.iterdir()) if p.is_file())
            if not found:
                raise DataError(f"{pattern}: the folder holds no data files", fix="name the files, or a glob of them")
        elif not target.is_file():
            matched = glob.glob(os.path.expanduser(path), root_dir=self.root, recursive=True)
            found = sorted(name for name in matched if _is_data(name) and self._absolute(name).is_file())
        if not found:
            beside = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
            folder = path[: path.rfind("/") + 1]
            raise _not_found(pattern, [folder + p.name for p in beside], looked_in=str(target.parent))
        return [self._file(name) for name in found]

    def read(self, uri: str, start: int, num_bytes: int) -> bytes:
        """Read bytes of a file; fewer at its end."""
        if _is_remote(uri):
            bucket, path = _split_uri(uri)
            store = self._store(bucket)
            if uri not in self.sizes:
                self.sizes[uri] = store.size(path)
            return store.read_range(path, start, max(0, min(num_bytes, self.sizes[uri] - start)))
        try:
            with open(self._absolute(uri), "rb") as file:
                file.seek(start)
                return file.read(num_bytes)
        except OSError as error:
            raise explain_data(error, uri) from error

    def local_path(self, uri: str) -> str | None:
        """Return where the file is on this machine, or None."""
        return None if _is_remote(uri) else str(self._absolute(uri))

    def _find_remote(self, pattern: str) -> list[InputFile]:
        bucket, path = _split_uri(pattern)
        folder, rest = _split_glob(path)
        parent = folder if rest else path.rpartition("/")[0]
        entries = {entry.path: entry for entry in self._store(bucket).list(parent.strip("/"))}
        if rest:
            found = [p for p in entries if matches_glob(p.removeprefix(folder).split("/"), rest.split("/"))
                     and _is_data(p)]
        elif path in entries:
            found = [path]
        else:
            inside = f"{path.rstrip('/')}/"
            found = _data_files(p for p in entries if p.startswith(inside) and "/" not in p.removeprefix(inside))
        if not found:
            raise _not_found(pattern, [f"{bucket}/{p}" for p in entries])
        files = [InputFile(f"{bucket}/{p}", entries[p].size_bytes, changed=str(entries[p].modified_s or ""))
                 for p in sorted(found)]
        self.sizes.update((file.uri, file.size_bytes) for file in files)
        return files

    def _store(self, bucket: str) -> ObjectStore:
        if bucket not in self._stores:
            self._stores[bucket] = open_store(bucket)
        return self._stores[bucket]

    def _absolute(self, path: str) -> Path:
        return Path(self.root, Path(path).expanduser())

    def _file(self, path: str) -> InputFile:
        try:
            found = self._absolute(path).stat()
        except OSError as error:
            raise explain_data(error, path) from error
        return InputFile(path, found.st_size, changed=str(found.st_mtime_ns))

    def __reduce__(self) -> tuple[Any, ...]:
        return Inputs, (self.root, self.sizes)


def _is_remote(uri: str) -> bool:
    return "://" in uri and not uri.startswith("file://")


def _split_uri(uri: str) -> tuple[str, str]:
    """Split a URI into `s3://bucket` and the path in it."""
    scheme, _, rest = uri.partition("://")
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise DataError(f"{uri}: names no bucket", fix=f"{scheme}://bucket/path")
    return f"{scheme}://{bucket}", path


def _split_glob(path: str) -> tuple[str, str]:
    """Split a path at the first wildcard into the folder before it, with its slash, and the rest; no rest without a
    wildcard."""
    wild = _WILD.search(path)
    if not wild:
        return path, ""
    cut = path.rfind("/", 0, wild.start()) + 1
    return path[:cut], path[cut:]


def matches_glob(parts: Sequence[str], glob: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a glob, of which `**` is any number of folders."""
    if not glob:
        return not parts
    if glob[0] == "**":
        return any(matches_glob(parts[i:], glob[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], glob[0]) and matches_glob(parts[1:], glob[1:])


def _data_files(names: Iterable[str]) -> list[str]:
    """Select the files of a folder that hold rows: its Parquet files if there are any, else all but markers."""
    some = [name for name in names if _is_data(name)]
    return [name for name in some if name.lower().endswith((".parquet", ".pq"))] or some


def _is_data(path: str) -> bool:
    """Return whether the file is not a marker that programs leave beside data: `_metadata`, `_SUCCESS`, `.part.crc`."""
    return not path.rsplit("/", 1)[-1].startswith(("_", "."))


def _not_found(pattern: str, beside: Sequence[str], looked_in: str = "") -> DataError:
    """Say that no file matches `pattern`, and which of the files `beside` it may be meant."""
    close = near_names(pattern, beside, _MAX_NAMED)
    fix = did_you_mean(close) or (
        "relative paths of a spec go by the spec's own folder, those of --set by the current directory")
    if beside and not close:
        fix = "files in this directory: " + shortlist(beside, _MAX_NAMED)
    return DataError(f"{pattern}: there is no such file" + (f" in {looked_in}" if looked_in else ""), fix=fix)

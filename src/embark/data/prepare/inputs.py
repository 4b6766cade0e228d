"""The files that `embark data prepare` reads, on this machine and in object stores; a glob means the same in both."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from embark.errors import DataError, did_you_mean, near_names
from embark.formatting import shortlist
from embark.store import ObjectStore, explain_data, open_store
from embark.values import frozen

if TYPE_CHECKING:
    from .lake_tables import LakeTable

_WILD = re.compile(r"[*?[]")
_TABLE = re.compile(r"(.+)#(version=\d+|snapshot=\d+(?:,schema=\d+)?|ref=[^:]+)(:.+)?")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_MAX_NAMED = 5


@frozen
class TableVersion:
    """A version of a Delta or an Iceberg table."""

    kind: str
    name: str
    id: str  # It stays when the table is renamed or moved.
    version: str  # As it stands behind the `#` of a path.

    def __str__(self) -> str:
        return f"{self.kind} table {self.name}#{self.version}"


@frozen
class InputFile:
    """One file of the input."""

    uri: str
    size_bytes: int
    changed: str = ""  # Distinguishes this content from another under the same name.
    table: TableVersion | None = None  # The table that it is a file of.
    constants: tuple[tuple[str, Any], ...] = ()  # Values of all its rows, by column: text, or of a table Arrow scalars.

    @property
    def name(self) -> str:
        return self.uri.rsplit("/", 1)[-1]


def tables_of(files: Iterable[InputFile]) -> list[TableVersion]:
    """Return the versions of the tables that files belong to."""
    return list(dict.fromkeys(file.table for file in files if file.table))


def open_inputs(patterns: str | Iterable[str]) -> tuple[Inputs, list[InputFile]]:
    """Find every file that the paths, globs and URIs mean, each once, in the order in which they are named."""
    inputs = Inputs()
    files: dict[str, InputFile] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for file in inputs.find(pattern):
            files.setdefault(file.uri, file)
    if not files:
        raise DataError("data.prepare.input names no files to prepare",
                        "name them in data.prepare.input, in the spec or with --set data.prepare.input=clicks.csv")
    return inputs, list(files.values())


@dataclass(slots=True)
class Inputs:
    """Opens paths, and URIs of any store that `embark.store` opens. A process it is sent to opens its own stores."""

    root: str = field(default_factory=os.getcwd)  # What a path is relative to: a worker process may start elsewhere.
    sizes: dict[str, int] = field(default_factory=dict)  # Bytes of the remote files that were found.
    _stores: dict[str, ObjectStore] = field(default_factory=dict, repr=False, compare=False)
    _tables: dict[tuple[str, str], LakeTable] = field(default_factory=dict, repr=False, compare=False)

    def find(self, pattern: str) -> list[InputFile]:
        """Find the files that a path or a glob (`**` crosses folders) means, sorted; a folder means the data files in
        it, or in its folders `column=value`, or the table that it is."""
        named = _TABLE.fullmatch(pattern)
        path, version, file = named.groups() if named else (pattern, "", None)
        if path.startswith("file://"):
            path = unquote(urlsplit(path).path)
        if named or is_iceberg(path):
            return self._of_table(path, version, file or "")
        if _is_remote(path):
            return self._find_remote(path)
        target = self._absolute(path)
        found = [path]
        if target.is_dir():
            folder, names = path.rstrip("/"), sorted(_walk(target))
            if _is_delta(folder, names):
                return self._of_table(folder)
            found = [f"{folder}/{name}" for name in _data_files(folder, names)]
        elif not target.is_file():
            matched = glob.glob(os.path.expanduser(path), root_dir=self.root, recursive=True)
            found = sorted(name for name in matched if _is_data(name) and self._absolute(name).is_file())
        if not found:
            beside = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
            folder = path[: path.rfind("/") + 1]
            raise _not_found(pattern, [folder + p.name for p in beside], looked_in=str(target.parent))
        for above in dict.fromkeys(parent for name in found for parent in self._absolute(name).parents):
            if any((*above.glob("_delta_log"), *above.glob("metadata/*.metadata.json"))):
                raise _inside_table(pattern, str(above))
        return [self._file(name) for name in found]

    def table_of(self, file: InputFile) -> LakeTable:
        """Return the table that a file belongs to."""
        uri, version, _ = _TABLE.fullmatch(file.uri).groups()  # type: ignore[union-attr]
        return self._table(uri, version)

    def _of_table(self, uri: str, version: str = "", file: str = "") -> list[InputFile]:
        table = self._table(uri.rstrip("/"), version)
        found = [one for one in table.files.values() if one.uri.endswith(file)]
        if not found:
            raise DataError(f"{uri}{file}: the {table.version} has no rows", "name another version of the table")
        return found

    def _table(self, uri: str, version: str) -> LakeTable:
        if (uri, version) not in self._tables:
            from .lake_tables import open_table

            table = open_table(self, uri, version)
            self._tables[uri, version] = self._tables[uri, table.version.version] = table
        return self._tables[uri, version]

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
        inside = f"{path.rstrip('/')}/"
        listed = self._store(bucket).list((folder if rest else path).strip("/"))
        if not listed and not rest:
            listed = self._store(bucket).list(path.rpartition("/")[0])
        entries = {entry.path: entry for entry in listed}
        if rest:
            found = [p for p in entries if matches_glob(p.removeprefix(folder).split("/"), rest.split("/"))
                     and _is_data(p)]
        elif path in entries:
            found = [path]
        else:
            names = [p.removeprefix(inside) for p in entries if p.startswith(inside)]
            if _is_delta(pattern, names):
                return self._of_table(pattern)
            found = [inside + name for name in _data_files(pattern, names)] if names else []
        tables = {p.partition("_delta_log/")[0] for p in entries if "_delta_log/" in p}
        if table := next((one for one in tables if any(p.startswith(one) for p in found)), None):
            raise _inside_table(pattern, f"{bucket}/{table}".rstrip("/"))
        if not found:
            raise _not_found(pattern, [f"{bucket}/{p}" for p in entries])
        files = [_file(f"{bucket}/{p}", entries[p].size_bytes, entries[p].modified_s or "") for p in sorted(found)]
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
        return _file(path, found.st_size, found.st_mtime_ns)

    def __reduce__(self) -> tuple[Any, ...]:
        return Inputs, (self.root, self.sizes)


def _is_remote(uri: str) -> bool:
    return "://" in uri and not uri.startswith("file://")


def _split_uri(uri: str) -> tuple[str, str]:
    """Split a URI into `s3://bucket` and the path in it."""
    scheme, _, rest = uri.partition("://")
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise DataError(f"{uri}: names no bucket", f"{scheme}://bucket/path")
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


def _walk(folder: Path, above: str = "") -> Iterator[str]:
    """Yield the files of a folder, of those in it that hold a partition, and of the logs of tables."""
    for path in folder.iterdir():
        name = above + path.name
        if path.is_file():
            yield name
        elif "=" in path.name or path.name in ("_delta_log", "metadata"):
            yield from _walk(path, f"{name}/")


def _is_delta(folder: str, names: Sequence[str]) -> bool:
    """Tell whether a folder of these files is a Delta table; that of an Iceberg table is refused."""
    if any(name.startswith("metadata/") and name.endswith(".metadata.json") for name in names):
        raise DataError(f"{folder}: is the folder of an Iceberg table, whose catalog knows the current metadata file",
                        f"name iceberg://CATALOG/NAMESPACE.TABLE, or one of {folder}/metadata/*.metadata.json; as "
                            f"a Delta table, if it is one too: {folder}#version=NUMBER")
    return any(name.startswith("_delta_log/") for name in names)


def _data_files(folder: str, names: Iterable[str]) -> list[str]:
    """Select the files of a folder that hold rows: its Parquet files if there are any, in folders `column=value` too,
    else all but markers."""
    some = [name for name in names if _is_data(name)]
    direct = [name for name in some if "/" not in name]
    parquet = [name for name in some if name.lower().endswith((".parquet", ".pq"))
               and all("=" in part for part in name.split("/")[:-1])]
    partitions = {", ".join(dict(_partitions_of(name))) or "none" for name in parquet}
    if len(partitions) > 1:
        raise DataError(f"{folder}: its Parquet files have different partition columns: "
                        + shortlist([f"({one})" for one in sorted(partitions)], _MAX_NAMED),
                        "name the folder, or the glob, of one data set")
    if not (parquet or direct):
        raise DataError(f"{folder}: the folder holds no data files", "name the files, or a glob of them")
    return parquet or direct


def _partitions_of(uri: str) -> tuple[tuple[str, str | None], ...]:
    """Return the columns that the folders of a file give it: `dt=2026-01-01/part.parquet`."""
    pairs = (unquote(part).partition("=") for part in uri.split("/")[:-1] if "=" in part[1:])
    return tuple((name, None if value == _NO_VALUE else value) for name, _, value in pairs)


def _file(uri: str, size_bytes: int, changed: object) -> InputFile:
    return InputFile(uri, size_bytes, str(changed), constants=_partitions_of(uri))


def is_iceberg(uri: str) -> bool:
    """Tell whether this names a table of a catalog, or a metadata file."""
    return uri.startswith("iceberg://") or uri.endswith(".metadata.json")


def _inside_table(pattern: str, table: str) -> DataError:
    return DataError(f"{pattern}: is within the table {table}, whose log says which files and rows count",
                     f"name the table: {table}")


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
    return DataError(f"{pattern}: there is no such file" + (f" in {looked_in}" if looked_in else ""), fix)

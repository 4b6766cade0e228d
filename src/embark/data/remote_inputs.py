"""What `embark data prepare` reads: files of this machine and of object stores alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from embark.data.prepare.inputs import LocalInputs, data_files, glob_pattern, is_data, nothing_found, split_glob
from embark.data.prepare.pieces import InputFile, Inputs
from embark.errors import DataError
from embark.store import ObjectStore, open_store


def open_inputs(patterns: str | Iterable[str]) -> tuple[Inputs, list[InputFile]]:
    """Every file that the paths, globs and uris mean, each once, in the order they are named."""
    inputs = StoreInputs()
    named = [patterns] if isinstance(patterns, str) else list(patterns)
    files: dict[str, InputFile] = {}
    for pattern in named:
        for file in inputs.find(pattern):
            files.setdefault(file.uri, file)
    if not files:
        raise DataError("data.prepare.input names no file", fix='set it: input = "data/*.csv"')
    return inputs, list(files.values())


@dataclass(slots=True)
class StoreInputs:
    """Paths, and uris of any store that `embark.store` opens. A process it is sent to opens its own stores."""

    local: LocalInputs = field(default_factory=LocalInputs)
    sizes: dict[str, int] = field(default_factory=dict)
    """In bytes, of the remote files that were found."""
    _stores: dict[str, ObjectStore] = field(default_factory=dict, repr=False, compare=False)

    def find(self, pattern: str) -> list[InputFile]:
        """The files that a path or a glob means, sorted; a folder means the data files in it."""
        if _is_local(pattern):
            return self.local.find(pattern)
        bucket, path = _parts(pattern)
        store = self._store(bucket)
        folder, rest = split_glob(path)
        parent = folder if rest else path.rpartition("/")[0]
        entries = {entry.path: entry for entry in store.list(parent.strip("/"))}
        if rest:
            is_match = glob_pattern(rest)
            found = [p for p in entries if is_match.fullmatch(p.removeprefix(folder)) and is_data(p)]
        elif path in entries:
            found = [path]
        else:
            inside = f"{path.rstrip('/')}/"
            found = data_files(p for p in entries if p.startswith(inside) and "/" not in p.removeprefix(inside))
        if not found:
            raise nothing_found(pattern, [f"{bucket}/{p}" for p in entries])
        files = [InputFile(f"{bucket}/{p}", entries[p].size_bytes, changed=str(entries[p].modified_s or ""))
                 for p in sorted(found)]
        self.sizes.update((file.uri, file.size_bytes) for file in files)
        return files

    def read(self, uri: str, start: int, num_bytes: int) -> bytes:
        """Bytes of a file; fewer at its end."""
        if _is_local(uri):
            return self.local.read(uri, start, num_bytes)
        bucket, path = _parts(uri)
        store = self._store(bucket)
        if uri not in self.sizes:
            self.sizes[uri] = store.size(path)
        return store.read_range(path, start, max(0, min(num_bytes, self.sizes[uri] - start)))

    def local_path(self, uri: str) -> str | None:
        """Where it is on this machine, if it is."""
        return self.local.local_path(uri) if _is_local(uri) else None

    def _store(self, bucket: str) -> ObjectStore:
        if bucket not in self._stores:
            self._stores[bucket] = open_store(bucket)
        return self._stores[bucket]

    def __getstate__(self) -> tuple[Any, ...]:
        return self.local, self.sizes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.local, self.sizes = state
        self._stores = {}


def _is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file://")


def _parts(uri: str) -> tuple[str, str]:
    """`s3://bucket` and the path in it."""
    scheme, _, rest = uri.partition("://")
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise DataError(f"{uri}: names no bucket", fix=f"{scheme}://bucket/path")
    return f"{scheme}://{bucket}", path

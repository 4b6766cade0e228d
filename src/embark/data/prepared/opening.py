"""Opening a prepared data set, in a folder or in an object store: it is whole, or an error says what is missing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from embark.data.prepared.cache import CachedParts, PartStore
from embark.data.prepared.manifest import MANIFEST, Manifest, Part
from embark.data.prepared.parts import AGAIN, LocalParts, Parts
from embark.data.prepared.source import Allocate, PreparedSource
from embark.errors import DataError
from embark.spec.run import RunSpec

_MOST_TOLD = 5


class DataStore(PartStore, Protocol):
    """The way into a store, handed in by who knows stores."""

    def read(self, path: str) -> bytes: ...

    def exists(self, path: str) -> bool: ...

    def list(self, prefix: str = "") -> Iterable[Any]:
        """Entries with a `path` and a `size_bytes`."""
        ...


OpenStore = Callable[[str], DataStore]


def open_prepared(spec: RunSpec, open_store: OpenStore | None = None, allocate: Allocate | None = None) -> PreparedSource:
    """The data at `data.path`, for a spec that fits it (`fitting.fitted`)."""
    data = spec.data
    manifest = read_manifest(data.path, open_store)
    wanted = [*manifest.parts.get("train", ()), *manifest.parts.get(data.eval_split, ())]
    _refuse_bad_block_sizes(data.path, manifest, wanted)
    folder = local_folder(data.path)
    parts: Parts
    if folder is not None:
        _refuse_incomplete(data.path, wanted, {part.file: _size_of(folder / part.file) for part in wanted})
        parts = LocalParts(folder, manifest.layout, manifest.block_rows)
    else:
        store = _store(data.path, open_store)
        _refuse_incomplete(data.path, wanted, {entry.path: entry.size_bytes for entry in store.list()})
        parts = CachedParts(
            store, cache_directory(data.path, data.cache_dir), round(data.cache_gb * 1e9), manifest.layout,
            manifest.block_rows, max((part.size_bytes for part in wanted), default=0),
        )
    return PreparedSource(manifest, [t.name for t in spec.model.table_list()], data, parts, allocate)


def read_manifest(path: str, open_store: OpenStore | None = None) -> Manifest:
    """Of the data set at `path`, a folder or a uri."""
    where = f"{path.rstrip('/')}/{MANIFEST}"
    folder = local_folder(path)
    if folder is None:
        store = _store(path, open_store)
        if not store.exists(MANIFEST):
            raise _no_data(path, f"there is no {MANIFEST}")
        return Manifest.from_text(store.read(MANIFEST).decode("utf-8", "replace"), where)
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise _no_data(path, f"has no {MANIFEST}" if folder.is_dir() else "no such folder") from None
    except OSError as error:
        raise _no_data(path, error.strerror or str(error)) from None
    return Manifest.from_text(text, where)


def local_folder(path: str) -> Path | None:
    """The folder of this machine that `path` means, if it does."""
    if path.startswith("file://"):
        return Path(unquote(urlsplit(path).path))
    return None if "://" in path else Path(path).expanduser()


def cache_directory(uri: str, chosen: str = "") -> Path:
    """Where parts of `uri` are kept: below the chosen directory, or the user's cache directory."""
    base = Path(chosen).expanduser() if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:24]
    return (base if chosen else base / "embark" / "data") / name


def _store(path: str, open_store: OpenStore | None) -> DataStore:
    if open_store is None:
        raise DataError(f"{path}: only folders of this machine are read here", fix="copy it first: embark data copy")
    return open_store(path)


def _no_data(path: str, what: str) -> DataError:
    return DataError(f"{path}: no prepared data: {what}", fix="`embark data prepare SPEC` writes it to data.path")


def _size_of(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _refuse_incomplete(path: str, wanted: Sequence[Part], sizes: dict[str, Any]) -> None:
    wrong = [
        f"{part.file} " + (
            "is missing" if sizes.get(part.file) is None
            else f"has {sizes[part.file]:,} bytes, the manifest says {part.size_bytes:,}"
        )
        for part in wanted if sizes.get(part.file) != part.size_bytes
    ]
    _refuse(path, wrong)


def _refuse_bad_block_sizes(path: str, manifest: Manifest, wanted: Sequence[Part]) -> None:
    """A manifest that a person changed would have blocks looked for where they are not."""
    layout, block_rows = manifest.layout, manifest.block_rows
    wrong = []
    for part in wanted:
        num_whole, rest = divmod(part.rows, block_rows)
        if layout.is_fixed:
            size_bytes = num_whole * layout.map(block_rows).size_bytes + (layout.map(rest).size_bytes if rest else 0)
            is_right = size_bytes == part.size_bytes
        else:
            is_right = len(part.block_starts) == num_whole + bool(rest)
        if not is_right:
            wrong.append(f"{part.file}: its rows, blocks and bytes in the manifest do not go together")
    _refuse(path, wrong)


def _refuse(path: str, wrong: list[str]) -> None:
    if wrong:
        more = [f"and {len(wrong) - _MOST_TOLD} more"] if len(wrong) > _MOST_TOLD else []
        raise DataError("\n  ".join([f"{path}: the data is not whole", *wrong[:_MOST_TOLD], *more]), fix=AGAIN)

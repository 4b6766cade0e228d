"""Opening a prepared data set, in a folder or in an object store: it is complete, or an error says what is missing."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from embark.data.prepared.cache import CachedParts
from embark.data.prepared.manifest import MANIFEST, Manifest, Part
from embark.data.prepared.parts import REPAIR, LocalParts, Parts
from embark.data.prepared.source import Allocate, PreparedSource
from embark.errors import DataError
from embark.spec.run import RunSpec
from embark.store import open_store
from embark.store.errors import NotFound
from embark.store.local_store import LocalStore

_MAX_NAMED = 5


def open_prepared(spec: RunSpec, allocate: Allocate | None = None) -> PreparedSource:
    """The data at `data.path`, for a spec that agrees with it (`resolve.resolve_from_manifest`)."""
    data = spec.data
    manifest = read_manifest(data.path)
    wanted = [*manifest.parts.get("train", ()), *manifest.parts.get(data.eval_split, ())]
    _refuse(data.path, _inconsistent_parts(manifest, wanted))
    folder = local_folder(data.path)
    parts: Parts
    if folder is not None:
        _refuse(data.path, _incomplete_parts(wanted, {part.file: _size_of(folder / part.file) for part in wanted}))
        parts = LocalParts(folder, manifest.layout, manifest.block_rows)
    else:
        store = open_store(data.path)
        _refuse(data.path, _incomplete_parts(wanted, {entry.path: entry.size_bytes for entry in store.list()}))
        parts = CachedParts(
            store, cache_directory(data.path, data.cache_dir), round(data.cache_gb * 1e9), manifest.layout,
            manifest.block_rows, max((part.size_bytes for part in wanted), default=0),
        )
    return PreparedSource(manifest, [t.name for t in spec.model.table_list()], data, parts, allocate)


def read_manifest(path: str) -> Manifest:
    """Of the data set at `path`, a folder or a URI."""
    store = open_store(path)
    try:
        text = store.read(MANIFEST)
    except NotFound:
        raise DataError(f"{path}: no prepared data: there is no {MANIFEST}",
                        fix="`embark data prepare SPEC` writes it to data.path") from None
    return Manifest.from_text(text.decode("utf-8", "replace"), f"{path.rstrip('/')}/{MANIFEST}")


def local_folder(path: str) -> Path | None:
    """The folder of this machine that `path` names; None of an object store's URI."""
    if "://" in path and not path.startswith("file://"):
        return None
    return cast(LocalStore, open_store(path)).root


def cache_directory(uri: str, chosen: str = "") -> Path:
    """Where parts of `uri` are cached: below the chosen directory, or the user's cache directory."""
    base = Path(chosen).expanduser() if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:24]
    return (base if chosen else base / "embark" / "data") / name


def _size_of(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _incomplete_parts(wanted: Sequence[Part], sizes: dict[str, Any]) -> list[str]:
    return [
        f"{part.file} " + ("is missing" if sizes.get(part.file) is None
                           else f"has {sizes[part.file]:,} bytes, the manifest says {part.size_bytes:,}")
        for part in wanted if sizes.get(part.file) != part.size_bytes
    ]


def _inconsistent_parts(manifest: Manifest, wanted: Sequence[Part]) -> list[str]:
    """A manifest that a person changed would have blocks looked for where they are not."""
    layout, block_rows = manifest.layout, manifest.block_rows
    wrong = []
    for part in wanted:
        num_full, rest = divmod(part.rows, block_rows)
        if layout.is_fixed:
            size_bytes = num_full * layout.map(block_rows).size_bytes + (layout.map(rest).size_bytes if rest else 0)
            is_right = size_bytes == part.size_bytes
        else:
            is_right = len(part.block_starts) == num_full + bool(rest)
        if not is_right:
            wrong.append(f"{part.file}: its rows, blocks and bytes in the manifest contradict each other")
    return wrong


def _refuse(path: str, wrong: list[str]) -> None:
    if wrong:
        more = [f"and {len(wrong) - _MAX_NAMED} more"] if len(wrong) > _MAX_NAMED else []
        raise DataError("\n  ".join([f"{path}: the data is incomplete", *wrong[:_MAX_NAMED], *more]), fix=REPAIR)

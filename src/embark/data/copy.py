"""Data from one place to another: a folder, a file or an object store; resumable, and never over other data."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from embark.errors import DataError, UserError
from embark.formatting import shortlist
from embark.store import Entry, LocalStore, ObjectStore, open_store
from embark.store.transfer import COPY_STATE, CopyItem, CopyPlan, Transfer
from embark.values import JsonDict, frozen
from .prepare.journal import PREPARING
from .prepared import MANIFEST, Manifest

ShowProgress = Callable[[int, int], None]


@frozen
class CopyResult:
    """The copied files, or in a dry run those that would be copied."""

    source: str
    target: str
    items: tuple[CopyItem, ...]
    num_existing: int  # Files that were at the target already, with the same content.
    size_bytes: int  # Bytes of all files.
    is_verified: bool  # Checksums were compared, not only sizes.
    elapsed_s: float
    is_dry_run: bool

    @property
    def copied_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)

    def to_dict(self) -> JsonDict:
        both = {"source": self.source, "target": self.target, "num_there_already": self.num_existing,
                "copied_bytes": self.copied_bytes}
        if self.is_dry_run:
            return both | {"dry_run": True, "files": [item.path for item in self.items]}
        return both | {"num_copied": len(self.items), "size_bytes": self.size_bytes, "elapsed_s": self.elapsed_s,
                       "verified_by": "checksums" if self.is_verified else "sizes"}


@frozen
class _Content:
    """The files to copy."""

    store: ObjectStore
    items: tuple[CopyItem, ...]
    mark: str  # Distinguishes this content from another at the same URI.
    is_prepared: bool


def copy(
    source: str, target: str, *, verify: bool = False, dry_run: bool = False, force: bool = False,
    progress: AbstractContextManager[ShowProgress] | None = None
) -> CopyResult:
    """Copy every file below `source` to the same path below `target`."""
    content, to = _content(source), open_store(target)
    _refuse_same_uri(content.store, to)
    if content.is_prepared and not force:
        _refuse_other_data(content, to)
    is_verified = verify or (content.is_prepared and isinstance(to, LocalStore))
    transfer = Transfer(content.store, to, content.items, mark=content.mark)
    # Without its manifest the rest is not data, so it comes last.
    plan = transfer.plan([item.path for item in content.items if item.path.rpartition("/")[2] == MANIFEST])
    if not content.is_prepared and not force:
        _refuse_to_overwrite(transfer, plan, to)
    began_s = time.monotonic()
    if not dry_run:
        with progress or nullcontext() as show:
            transfer.run(plan, verify=is_verified, progress=show)
    return CopyResult(content.store.uri, to.uri, (*plan.todo, *plan.last), len(plan.done),
                      sum(item.size_bytes for item in content.items), is_verified, time.monotonic() - began_s, dry_run)


def _content(source: str) -> _Content:
    store = open_store(source)
    every = store.list()
    entries = [entry for entry in every if _is_content(entry)]
    if not entries:
        return _one_file(source)
    sizes = {entry.path: entry.size_bytes for entry in entries}
    if MANIFEST not in sizes:
        if any(entry.path.startswith(f"{PREPARING}/") for entry in every):
            raise UserError(f"{source}: holds an unfinished preparation", "finish it first: embark data prepare")
        return _Content(store, tuple(CopyItem(e.path, e.size_bytes) for e in entries), _mark(entries),
                        is_prepared=False)
    text = store.read(MANIFEST)
    manifest = Manifest.from_text(text.decode("utf-8", "replace"), store.where(MANIFEST))
    checksums = {part.file: part.sha256 for part in manifest.all_parts()}
    checksums[MANIFEST] = hashlib.sha256(text).hexdigest()
    wrong = [part.file for part in manifest.all_parts() if sizes.get(part.file) != part.size_bytes]
    if wrong:
        raise DataError(f"{source}: is incomplete: {wrong[0]} is missing or cut"
                        + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                        "`embark data check` lists them; prepare or copy the data again")
    items = tuple(CopyItem(e.path, e.size_bytes, checksums.get(e.path, "")) for e in entries)
    return _Content(store, items, checksums[MANIFEST], is_prepared=True)


def _one_file(source: str) -> _Content:
    parent, _, name = source.rstrip("/").rpartition("/")
    store = open_store(parent or ("/" if source.startswith("/") else "."))
    if not name or parent.endswith(":/") or not store.exists(name):
        raise UserError(f"{source}: there is nothing to copy", "name a file, a folder, or a prefix of a bucket")
    entry = Entry(name, store.size(name))
    return _Content(store, (CopyItem(name, entry.size_bytes),), _mark([entry]), is_prepared=False)


def _is_content(entry: Entry) -> bool:
    """Return whether the entry is not the remainder of an unfinished command."""
    is_partial = entry.path.startswith(f"{PREPARING}/") or entry.path.endswith(".bin.part")
    return entry.path != COPY_STATE and not is_partial


def _mark(entries: list[Entry]) -> str:
    content = [(entry.path, entry.size_bytes, entry.modified_s) for entry in entries]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _refuse_same_uri(source: ObjectStore, target: ObjectStore) -> None:
    if isinstance(source, LocalStore) and isinstance(target, LocalStore):
        a, b = Path(source.root).resolve(), Path(target.root).resolve()
        is_same = a == b or a in b.parents
    else:
        is_same = f"{target.uri.rstrip('/')}/".startswith(f"{source.uri.rstrip('/')}/")
    if is_same:
        raise UserError(f"{target.uri} is the same as {source.uri}, or inside it", "name another target")


def _refuse_other_data(content: _Content, to: ObjectStore) -> None:
    if to.exists(MANIFEST) and hashlib.sha256(to.read(MANIFEST)).hexdigest() != content.mark:
        raise UserError(f"{to.uri}: holds other prepared data", "name another target, or --force to replace it")


def _refuse_to_overwrite(transfer: Transfer, plan: CopyPlan, to: ObjectStore) -> None:
    if transfer.is_resuming:
        return
    existing = {entry.path for entry in to.list()}
    lost = [item.path for item in (*plan.todo, *plan.last) if item.path in existing]
    if lost:
        raise UserError(f"{shortlist([to.where(path) for path in lost], 1)}: exists already, with other content",
                        "name another target, or --force to replace it")

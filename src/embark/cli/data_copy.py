"""`embark data copy`: data from one place to another, as a person and a program see it."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from embark.cli.console import Console
from embark.data.check import each_part
from embark.data.make import PREPARING
from embark.data.prepared import MANIFEST, STATISTICS, Manifest
from embark.errors import DataError, ExitCode, UserError
from embark.formatting import format_bytes, format_duration, pluralize
from embark.store import Entry, ObjectStore, open_store
from embark.store.local_store import LocalStore
from embark.store.transfer import COPY_STATE, CopyItem, CopyPlan, Transfer

_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class _Load:
    """What is to be copied."""

    store: ObjectStore
    items: tuple[CopyItem, ...]
    mark: str
    """Tells this content from another at the same place."""
    is_prepared: bool

    @property
    def last(self) -> tuple[str, ...]:
        """Without these the rest is nothing."""
        return tuple(item.path for item in self.items if item.path.rpartition("/")[2] == MANIFEST)

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def copy(
    console: Console, source: str, target: str, *, verify: bool = False, dry_run: bool = False, force: bool = False
) -> ExitCode:
    """Every file below `source`, to the same path below `target`."""
    load, to = _load(source), open_store(target)
    _refuse_same_place(load.store, to)
    if load.is_prepared and not force:
        _refuse_other_data(load, to)
    is_verified = verify or (load.is_prepared and isinstance(to, LocalStore))
    transfer = Transfer(load.store, to, load.items, mark=load.mark)
    plan = transfer.plan(load.last)
    if not load.is_prepared and not force:
        _refuse_to_overwrite(transfer, plan, to)
    if dry_run:
        return _would_copy(console, load, to, plan)
    began_s = time.monotonic()
    with console.progress("copying") as show:
        transfer.run(plan, verify=is_verified, progress=show)
    elapsed_s = time.monotonic() - began_s
    num_copied, num_bytes = len(plan.todo) + len(plan.last), sum(i.size_bytes for i in (*plan.todo, *plan.last))
    console.data({
        "source": load.store.uri, "target": to.uri, "num_copied": num_copied, "copied_bytes": num_bytes,
        "num_there_already": len(plan.done), "size_bytes": load.size_bytes, "elapsed_s": elapsed_s,
        "verified_by": "checksums" if is_verified else "sizes",
    })
    how = "checksums compared" if is_verified else "sizes compared"
    there = f", {pluralize(len(plan.done), 'file')} there already" if plan.done else ""
    if not num_copied:
        console.result(f"nothing to copy: all {pluralize(len(plan.done), 'file')} are at {to.uri} already, {how}")
        return ExitCode.DONE
    console.result(f"copied to {to.uri}: {pluralize(num_copied, 'file')}, {format_bytes(num_bytes)} in {format_duration(elapsed_s)}, "
                   f"{format_bytes(num_bytes / max(elapsed_s, 1e-3))}/s{there}, {how}")
    return ExitCode.DONE


def _would_copy(console: Console, load: _Load, to: ObjectStore, plan: CopyPlan) -> ExitCode:
    todo = [*plan.todo, *plan.last]
    num_bytes = sum(item.size_bytes for item in todo)
    if not console.json and todo:
        console.table([{"file": item.path, "size": format_bytes(item.size_bytes)} for item in todo[:_MAX_SHOWN]])
        if len(todo) > _MAX_SHOWN:
            console.text(f"… and {len(todo) - _MAX_SHOWN:,} more")
    console.data({"source": load.store.uri, "target": to.uri, "dry_run": True, "num_there_already": len(plan.done),
                  "copied_bytes": num_bytes, "files": [item.path for item in todo]})
    console.result(f"would copy {pluralize(len(todo), 'file')}, {format_bytes(num_bytes)}, to {to.uri}; "
                   f"{pluralize(len(plan.done), 'file')} there already")
    return ExitCode.DONE


def _load(source: str) -> _Load:
    store = open_store(source)
    entries = [entry for entry in store.list() if _is_content(entry)]
    if not entries:
        return _one_file(source)
    paths = {entry.path: entry.size_bytes for entry in entries}
    if MANIFEST not in paths:
        if any(entry.path.startswith(f"{PREPARING}/") for entry in store.list()):
            raise UserError(f"{source}: `embark data prepare` has not ended here", fix="run it again to its end first")
        return _Load(store, tuple(CopyItem(e.path, e.size_bytes) for e in entries), _mark(entries), is_prepared=False)
    text = store.read(MANIFEST)
    manifest = Manifest.from_text(text.decode("utf-8", "replace"), store.where(MANIFEST))
    known = {part.file: part.sha256 for part in each_part(manifest)} | {MANIFEST: hashlib.sha256(text).hexdigest()}
    if manifest.statistics_sha256:
        known[STATISTICS] = manifest.statistics_sha256
    wrong = [part.file for part in each_part(manifest) if paths.get(part.file) != part.size_bytes]
    if wrong:
        raise DataError(f"{source}: is not whole: {wrong[0]} is missing or cut"
                        + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                        fix="`embark data check` lists them; prepare or copy the data again")
    items = tuple(CopyItem(e.path, e.size_bytes, known.get(e.path, "")) for e in entries)
    return _Load(store, items, known[MANIFEST], is_prepared=True)


def _one_file(source: str) -> _Load:
    parent, _, name = source.rstrip("/").rpartition("/")
    store = open_store(parent or ("/" if source.startswith("/") else "."))
    if not name or parent.endswith(":/") or not store.exists(name):
        raise UserError(f"{source}: there is nothing to copy", fix="name a file, a folder, or a prefix of a bucket")
    entry = Entry(name, store.size(name))
    return _Load(store, (CopyItem(name, entry.size_bytes),), _mark([entry]), is_prepared=False)


def _is_content(entry: Entry) -> bool:
    """Not what writers at work leave."""
    return entry.path != COPY_STATE and not entry.path.startswith(f"{PREPARING}/") and not entry.path.endswith(".bin.part")


def _mark(entries: list[Entry]) -> str:
    told = [(entry.path, entry.size_bytes, entry.modified_s) for entry in entries]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _refuse_same_place(source: ObjectStore, target: ObjectStore) -> None:
    if isinstance(source, LocalStore) and isinstance(target, LocalStore):
        a, b = Path(source.root).resolve(), Path(target.root).resolve()
        is_same = a == b or a in b.parents
    else:
        a_uri, b_uri = f"{source.uri.rstrip('/')}/", f"{target.uri.rstrip('/')}/"
        is_same = b_uri.startswith(a_uri)
    if is_same:
        raise UserError(f"{target.uri} is the same place as {source.uri}, or inside of it", fix="name another target")


def _refuse_other_data(load: _Load, to: ObjectStore) -> None:
    if to.exists(MANIFEST) and hashlib.sha256(to.read(MANIFEST)).hexdigest() != load.mark:
        raise UserError(f"{to.uri}: holds other prepared data", fix="name another target, or --force to replace it")


def _refuse_to_overwrite(transfer: Transfer, plan: CopyPlan, to: ObjectStore) -> None:
    if transfer.is_resuming:
        return
    there = {entry.path for entry in to.list()}
    lost = [item.path for item in (*plan.todo, *plan.last) if item.path in there]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UserError(f"{to.where(lost[0])}{more}: there already, with other content",
                        fix="name another target, or --force to replace them")

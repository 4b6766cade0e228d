"""Parts of an object store, cached on the local disk: never more than a stated size, shared by all ranks of a machine.

In the cache's directory:

    <sha256>.bin            a part, complete and checked
    <sha256>.bin.reserved   as large as a part that is being fetched: reserves its space
    locks/<sha256>          exclusive to fetch or remove the part, shared to use it
    locks/space             exclusive to reserve or free space
    locks/wanted            touched when there is no space: other processes release parts that they do not use

Locks are the kernel's (`flock`), so those of a process that dies are free.
"""

import fcntl
import hashlib
import io
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import cast

import numpy as np

from embark.errors import DataError, EmbarkError, Fault
from embark.features.arrays import Array, Int32s, Int64s
from embark.features.layout import REPAIR, Layout
from embark.spec import RunSpec
from embark.store import LocalStore, NotFound, ObjectStore, explain_data, normalize_path, open_store
from embark.store.errors import RetryPolicy
from embark.store.run_dir import user_cache
from embark.values import JsonDict
from .manifest import LOG_SPLITS, MANIFEST, SEQUENCES, Manifest, Part, Split
from .parts import LocalParts, OpenPart, Parts, PartVerifier, ReadAhead
from .sequences import SequenceSource
from .source import Allocate, PreparedSource

_POLL_S = 0.02
_MAX_WAIT_S = 120.0
_MAX_AHEAD = 4
_WANTED_S = 1.0
_MAX_NAMED = 5


@dataclass(slots=True)
class _PinnedPart:
    """A part that this process has mapped, and that no process removes."""

    open: OpenPart
    lock: int
    num_users: int = 0


class CachedParts:
    """Fetches parts of a store into a directory of at most `limit_bytes`."""

    def __init__(
        self, store: ObjectStore, directory: Path, limit_bytes: int, layout: Layout, block_rows: int, largest_bytes: int
    ) -> None:
        if largest_bytes > limit_bytes:
            raise DataError(f"{store.uri}: has a part of {largest_bytes / 1e9:.3g} GB, more than data.cache_gb = "
                            f"{limit_bytes / 1e9:.3g}",
                            f"set data.cache_gb to {2 * largest_bytes / 1e9:.2g} or more")
        self._store, self._directory, self._limit_bytes = store, directory, limit_bytes
        self._layout, self._block_rows = layout, block_rows
        self._num_ahead = min(_MAX_AHEAD, limit_bytes // max(1, largest_bytes) - 1)
        self._pinned: OrderedDict[str, _PinnedPart] = OrderedDict()
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}
        self._ahead = ReadAhead(self._read_ahead, num_threads=_MAX_AHEAD)
        self._verifier = PartVerifier()
        self._wanted = directory / "locks" / "wanted"
        self._is_closed = threading.Event()
        try:
            (directory / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_data(error, directory, "set data.cache_dir to a writable directory") from None

    @contextmanager
    def using(self, part: Part) -> Iterator[OpenPart]:
        """Use a part; it is fetched if it is not here."""
        self._verifier.raise_if_damaged()
        pinned = self._take(part)
        try:
            yield pinned.open
        finally:
            with self._lock:
                pinned.num_users -= 1
                self._release(most=self._num_ahead + 2)

    def expect(self, parts: Sequence[Part]) -> None:
        """Fetch these parts while there is space."""
        self._ahead.start(parts[: self._num_ahead])

    def close(self) -> None:
        """Release everything that is not in use."""
        self._is_closed.set()
        self._ahead.start(())
        with self._lock:
            self._release(most=0)

    def _take(self, part: Part) -> _PinnedPart:
        """Pin a part for one more user."""
        with self._lock:
            fetch_lock = self._fetching.setdefault(part.sha256, threading.Lock())
        with fetch_lock:
            with self._lock:
                pinned = self._pinned.get(part.sha256)
                if pinned:
                    pinned.num_users += 1
                    self._pinned.move_to_end(part.sha256)
                    return pinned
            return self._pin(part, self._lock_fetched(part, must=True), num_users=1)

    def _read_ahead(self, part: Part) -> None:
        with self._lock:
            fetch_lock = self._fetching.setdefault(part.sha256, threading.Lock())
        with fetch_lock:
            if part.sha256 not in self._pinned and (lock := self._lock_fetched(part, must=False)) is not None:
                self._pin(part, lock, num_users=0)

    def _pin(self, part: Part, lock: int | None, num_users: int) -> _PinnedPart:
        assert lock is not None
        file = self._file(part)
        with suppress(OSError):
            os.utime(file)
        pinned = _PinnedPart(OpenPart(file, part, self._layout, self._block_rows), lock, num_users)
        self._verifier.add(part, pinned.open)  # another run may have fetched it, long ago
        with self._lock:
            is_first = not self._pinned
            self._pinned[part.sha256] = pinned
        if is_first:
            threading.Thread(target=_watch_for_demand, args=(weakref.ref(self),), daemon=True).start()
        return pinned

    def _release(self, most: int) -> None:
        """Release all but `most` parts and those in use. They stay in the cache while there is space. The caller holds
        the lock."""
        for name in [n for n, pinned in self._pinned.items() if not pinned.num_users]:
            if len(self._pinned) > most:
                os.close(self._pinned.pop(name).lock)

    def _release_if_wanted(self) -> bool:
        """Release what another process waits for; return whether anything is still pinned."""
        with suppress(FileNotFoundError):
            if abs(time.time() - self._wanted.stat().st_mtime) < _WANTED_S:
                with self._lock:
                    self._release(most=0)
        with self._lock:
            return bool(self._pinned)

    def _lock_fetched(self, part: Part, *, must: bool) -> int | None:
        """Return a shared lock on the part, which is there; None if it is not and need not be."""
        file, began = self._file(part), time.monotonic()
        lock = self._lock_file(part.sha256)
        is_returned = False
        try:
            while True:
                if _is_complete(file, part):
                    if _try_lock(lock, fcntl.LOCK_SH) and _is_complete(file, part):
                        is_returned = True
                        return lock
                elif _try_lock(lock, fcntl.LOCK_EX):
                    if not _is_complete(file, part) and self._make_space(part, must=must):
                        self._fetch(part)
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    if _is_complete(file, part):
                        continue
                    if must:
                        self._wanted.touch()
                else:
                    began = time.monotonic()  # another process fetches it, which may take long
                if not must:
                    return None
                if time.monotonic() - began > _MAX_WAIT_S:
                    raise Fault(f"{self._directory}: no space for {part.file}: other processes use all "
                                f"{self._limit_bytes / 1e9:.3g} GB",
                                "set data.cache_gb higher, or data.cache_dir to another directory")
                time.sleep(_POLL_S)
        finally:
            if not is_returned:
                os.close(lock)

    def _fetch(self, part: Part) -> None:
        """Fetch a part. The caller holds its lock and has reserved its space."""
        reserved = self._reservation(part)
        try:
            for is_last in (False, True):
                self._store.download(part.file, reserved)
                with reserved.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found == part.sha256:
                    with self._exclusive():  # a count sees the one name or the other
                        os.replace(reserved, self._file(part))
                    return
                if is_last:
                    raise DataError(
                        f"{self._store.uri.rstrip('/')}/{part.file}: its checksum is {found[:16]}…, the manifest says "
                        f"{part.sha256[:16]}…", REPAIR
                    )
        finally:
            reserved.unlink(missing_ok=True)

    def _make_space(self, part: Part, *, must: bool) -> bool:
        """Remove the least recently used parts until there is space for this one, and reserve it.

        Where it must, this process releases the parts that it does not use, and so do the others. A process that
        waits pins nothing, so that of processes that wait for each other one always finds space.
        """
        if self._reserve(part):
            return True
        if must:
            with self._lock:
                self._release(most=0)
        return must and self._reserve(part)

    def _reserve(self, part: Part) -> bool:
        with self._exclusive():
            used_bytes, parts = self._used(part)
            for size_bytes, file in parts:
                if used_bytes + part.size_bytes > self._limit_bytes and self._remove_unused(file):
                    used_bytes -= size_bytes
            if used_bytes + part.size_bytes > self._limit_bytes:
                return False
            with self._reservation(part).open("wb") as reserved:
                reserved.truncate(part.size_bytes)
            return True

    def _used(self, mine: Part) -> tuple[int, list[tuple[int, Path]]]:
        """Return the bytes in the cache, and the parts in it, the least recently used first.

        What dead processes left is removed, and what there is of `mine`, which is about to be fetched.
        """
        used_bytes, parts = 0, []
        for file in list(self._directory.iterdir()):
            with suppress(FileNotFoundError):
                status = file.stat()
                if mine.sha256 in file.name:
                    file.unlink()
                elif file.name.endswith(".bin"):
                    parts.append((status.st_mtime_ns, status.st_size, file))
                    used_bytes += status.st_size
                elif ".bin.reserved" in file.name and not self._remove_unused(file) and file.name.endswith(".reserved"):
                    used_bytes += status.st_size
        return used_bytes, [(size_bytes, file) for _, size_bytes, file in sorted(parts)]

    def _remove_unused(self, file: Path) -> bool:
        """Remove a file unless a process uses or fetches it."""
        lock = self._lock_file(file.name.lstrip(".").split(".")[0])
        try:
            if not _try_lock(lock, fcntl.LOCK_EX):
                return False
            file.unlink(missing_ok=True)
            return True
        finally:
            os.close(lock)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        lock = self._lock_file("space")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _lock_file(self, name: str) -> int:
        return os.open(self._directory / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _file(self, part: Part) -> Path:
        return self._directory / f"{part.sha256}.bin"

    def _reservation(self, part: Part) -> Path:
        return self._directory / f"{part.sha256}.bin.reserved"


def _watch_for_demand(cached: weakref.ref[CachedParts]) -> None:
    """Release parts in a thread: a rank that waits for the others at a step must not keep space from them."""
    while (alive := cached()) is not None and alive._release_if_wanted():
        is_closed = alive._is_closed
        del alive
        if is_closed.wait(_WANTED_S / 4):
            return


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_complete(file: Path, part: Part) -> bool:
    try:
        return file.stat().st_size == part.size_bytes
    except FileNotFoundError:
        return False


BAD_ARRAY = (OSError, ValueError, EOFError, OverflowError, TypeError, SyntaxError, TokenError)
"""Raised by `np.load` for a file that is no array."""


def read_array(path: str, name: str) -> tuple[Array, bytes]:
    """Read an array, or map it if it lies on this machine; return also its file's SHA-256."""
    folder = local_folder(path)
    try:
        if folder is not None:
            with (folder / name).open("rb") as file:
                return np.load(folder / name, mmap_mode="r"), hashlib.file_digest(file, "sha256").digest()
        data = open_store(path).read(name)
        return np.load(io.BytesIO(data), allow_pickle=False), hashlib.sha256(data).digest()
    except BAD_ARRAY as error:
        raise DataError(f"{path}/{name}: cannot be read ({error})", REPAIR) from None


def read_items(path: str, manifest: Manifest) -> tuple[Int32s, Int64s]:
    """Return the rows of a prepared log's items, rising, and how often each is in the log. Items of earlier data whose
    ids it continues are no items of it."""
    item = manifest.layout.features[0]
    about = (manifest.settings.get("id_maps") or {}).get(item.name) or {}
    ids, counts = (read_array(path, normalize_path(str(about.get(name))))[0] for name in ("ids", "counts"))
    if ids.ndim == 1 and ids.shape == counts.shape and {ids.dtype.kind, counts.dtype.kind} == {"i"} and len(ids):
        order = np.argsort(ids, kind="stable")
        rows, nums = ids[order], counts[order]
        are_rows = rows[0] > 0 and rows[-1] < item.rows and (rows[1:] > rows[:-1]).all()
        if are_rows and nums.min() >= 0 and nums.any():
            return rows[nums > 0].astype(np.int32), nums[nums > 0].astype(np.int64)
    raise DataError(f"{path}: the items are not those that the data was prepared with", REPAIR)


def open_prepared(spec: RunSpec, allocate: Allocate | None = None) -> PreparedSource | SequenceSource:
    """Open the data at `data.path`, for a spec that agrees with it (`resolve_from_manifest`)."""
    data = spec.data
    manifest = read_manifest(data.path)
    splits: tuple[Split, ...] = LOG_SPLITS if SEQUENCES in manifest.settings else ("train", data.eval_split)
    wanted = [part for split in splits for part in manifest.parts.get(split, ())]
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
            manifest.block_rows, max((part.size_bytes for part in wanted), default=0)
        )
    if SEQUENCES in manifest.settings:
        return SequenceSource(manifest, spec.model, data, parts, read_items(data.path, manifest))
    return PreparedSource(manifest, spec.model.table_list(), data, parts, allocate, spec.model.tasks)


def read_manifest(path: str) -> Manifest:
    """Read the manifest of the data set at `path`, a folder or a URI."""
    try:
        return _read_manifest(path)
    except NotFound:
        raise DataError(f"{path}: no prepared data: there is no {MANIFEST}",
                        "`embark data prepare SPEC` writes it to data.path") from None


def find_manifest(path: str, retry: RetryPolicy) -> tuple[Manifest | None, str]:
    """Read the manifest of the data set at `path`, or return None and why it cannot be read from here. A damaged one
    is an error."""
    try:
        return _read_manifest(path, retry), ""
    except EmbarkError as error:  # not there, no rights, no network, no package for the store
        if isinstance(error, DataError):
            raise
        return None, f"there is no {MANIFEST}" if isinstance(error, NotFound) else error.what


def _read_manifest(path: str, retry: RetryPolicy | None = None) -> Manifest:
    text = open_store(path, retry).read(MANIFEST)
    return Manifest.from_text(text.decode("utf-8", "replace"), f"{path.rstrip('/')}/{MANIFEST}")


def local_folder(path: str) -> Path | None:
    """Return the folder of this machine that `path` names; None for an object store's URI."""
    if "://" in path and not path.startswith("file://"):
        return None
    return cast(LocalStore, open_store(path)).root


def cache_directory(uri: str, chosen: str = "") -> Path:
    """Return where parts of `uri` are cached: below the chosen directory, or the user's cache directory."""
    name = hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:24]
    return (Path(chosen).expanduser() if chosen else user_cache() / "data") / name


def _size_of(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain_data(error, file, REPAIR) from None


def _incomplete_parts(wanted: Sequence[Part], sizes: JsonDict) -> list[str]:
    return [
        f"{part.file} " + ("is missing" if sizes.get(part.file) is None
                           else f"has {sizes[part.file]:,} bytes, the manifest says {part.size_bytes:,}")
        for part in wanted if sizes.get(part.file) != part.size_bytes
    ]


def _inconsistent_parts(manifest: Manifest, wanted: Sequence[Part]) -> list[str]:
    """Find parts that contradict the layout: in a manifest that a person changed, blocks would be looked for where
    they are not."""
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
        raise DataError("\n  ".join([f"{path}: the data is incomplete", *wrong[:_MAX_NAMED], *more]), REPAIR)

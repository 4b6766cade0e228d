"""Parts of an object store, kept on the local disk: never more than a stated size, shared by all ranks of a machine.

In the cache's directory:

    <sha256>.bin          a part, whole and checked
    <sha256>.bin.room     as large as a part that is being fetched: its room is taken
    locks/<sha256>        held alone by who fetches or removes the part, together by all who use it
    locks/room            held by who makes room
    locks/wanted          touched by who finds none: others let go of what they only keep at hand

Locks are the kernel's (`flock`), so those of a process that dies are free.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from embark.data.prepared.layout import Layout
from embark.data.prepared.manifest import Part
from embark.data.prepared.parts import REPAIR, OpenPart, ReadAhead
from embark.errors import DataError, Fault
from embark.store import ObjectStore

_POLL_S = 0.02
_LONGEST_WAIT_S = 120.0
_MOST_AHEAD = 4
_WANTED_S = 1.0


@dataclass(slots=True)
class _Held:
    """A part that this process has mapped; nobody removes it."""

    open: OpenPart
    lock: int
    num_users: int = 0


class CachedParts:
    """Parts behind a store, through a directory of at most `limit_bytes`."""

    def __init__(
        self, store: ObjectStore, directory: Path, limit_bytes: int, layout: Layout, block_rows: int, largest_bytes: int
    ) -> None:
        if largest_bytes > limit_bytes:
            raise DataError(
                f"{store.uri}: has a part of {largest_bytes / 1e9:.3g} GB, more than data.cache_gb = "
                f"{limit_bytes / 1e9:.3g}",
                fix=f"set data.cache_gb to {2 * largest_bytes / 1e9:.2g} or more",
            )
        self._store, self._directory, self._limit_bytes = store, directory, limit_bytes
        self._layout, self._block_rows = layout, block_rows
        self._num_ahead = min(_MOST_AHEAD, limit_bytes // max(1, largest_bytes) - 1)
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}
        self._ahead = ReadAhead(self._read_ahead, num_threads=_MOST_AHEAD)
        self._wanted = directory / "locks" / "wanted"
        self._is_closed = threading.Event()
        try:
            (directory / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{directory}: {error.strerror}",
                            fix="set data.cache_dir to a writable directory") from None

    @contextmanager
    def using(self, part: Part) -> Iterator[OpenPart]:
        """The part, fetched if it is not here."""
        held = self._take(part)
        try:
            yield held.open
        finally:
            with self._lock:
                held.num_users -= 1
                self._let_go(most=self._num_ahead + 2)

    def expect(self, parts: Sequence[Part]) -> None:
        """Fetch these while there is room."""
        self._ahead.start(parts[: self._num_ahead])

    def close(self) -> None:
        """Let go of everything that is not in use."""
        self._is_closed.set()
        self._ahead.start(())
        with self._lock:
            self._let_go(most=0)

    def _take(self, part: Part) -> _Held:
        """Held, with one user more."""
        with self._lock:
            one_at_a_time = self._fetching.setdefault(part.sha256, threading.Lock())
        with one_at_a_time:
            with self._lock:
                held = self._held.get(part.sha256)
                if held:
                    held.num_users += 1
                    self._held.move_to_end(part.sha256)
                    return held
            return self._hold(part, self._fetched(part, must=True), num_users=1)

    def _read_ahead(self, part: Part) -> None:
        with self._lock:
            one_at_a_time = self._fetching.setdefault(part.sha256, threading.Lock())
        with one_at_a_time:
            if part.sha256 not in self._held and (lock := self._fetched(part, must=False)) is not None:
                self._hold(part, lock, num_users=0)

    def _hold(self, part: Part, lock: int | None, num_users: int) -> _Held:
        assert lock is not None
        file = self._file(part)
        with suppress(OSError):
            os.utime(file)
        held = _Held(OpenPart(file, part, self._layout, self._block_rows), lock, num_users)
        with self._lock:
            is_first = not self._held
            self._held[part.sha256] = held
        if is_first:
            threading.Thread(target=_give_way, args=(weakref.ref(self),), name="embark-cache", daemon=True).start()
        return held

    def _let_go(self, most: int) -> None:
        """Under the lock: keep hold of at most so many, and of those in use. They stay in the cache while they can."""
        for name in [n for n, held in self._held.items() if not held.num_users]:
            if len(self._held) > most:
                os.close(self._held.pop(name).lock)

    def _gives_way(self) -> bool:
        """Let go of what another process starves for; whether there may be something to let go of later."""
        with suppress(FileNotFoundError):
            if abs(time.time() - self._wanted.stat().st_mtime) < _WANTED_S:
                with self._lock:
                    self._let_go(most=0)
        with self._lock:
            return bool(self._held)

    def _fetched(self, part: Part, *, must: bool) -> int | None:
        """A shared lock on the part, which is there; None where it need not be and is not easily had."""
        file, began = self._file(part), time.monotonic()
        lock = self._lock_file(part.sha256)
        is_kept = False
        try:
            while True:
                if _is_whole(file, part):
                    if _locked(lock, fcntl.LOCK_SH) and _is_whole(file, part):
                        is_kept = True
                        return lock
                elif _locked(lock, fcntl.LOCK_EX):
                    if not _is_whole(file, part) and self._make_room(part, must=must):
                        self._fetch(part)
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    if _is_whole(file, part):
                        continue
                    if must:
                        self._wanted.touch()
                else:
                    began = time.monotonic()  # another process fetches it, and that may take long
                if not must:
                    return None
                if time.monotonic() - began > _LONGEST_WAIT_S:
                    raise Fault(
                        f"{self._directory}: no room for {part.file}: other processes use all "
                        f"{self._limit_bytes / 1e9:.3g} GB",
                        fix="set data.cache_gb higher, or data.cache_dir to a directory of its own",
                    )
                time.sleep(_POLL_S)
        finally:
            if not is_kept:
                os.close(lock)

    def _fetch(self, part: Part) -> None:
        """Under the part's own lock, and with room for it."""
        room = self._room(part)
        try:
            for is_last in (False, True):
                self._store.download(part.file, room)
                with room.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found == part.sha256:
                    with self._alone():  # who counts sees the one name or the other
                        os.replace(room, self._file(part))
                    return
                if is_last:
                    raise DataError(
                        f"{self._store.uri.rstrip('/')}/{part.file}: its checksum is {found[:16]}…, the manifest says "
                        f"{part.sha256[:16]}…", fix=REPAIR,
                    )
        finally:
            room.unlink(missing_ok=True)

    def _make_room(self, part: Part, *, must: bool) -> bool:
        """Remove what was not used for longest until the part has room, and take that room.

        Where it must, this process lets go of the parts it does not use right now, and so do the others. Who waits
        holds nothing, so that of processes that wait for each other's room one always finds some.
        """
        if self._took_room(part):
            return True
        if must:
            with self._lock:
                self._let_go(most=0)
        return must and self._took_room(part)

    def _took_room(self, part: Part) -> bool:
        with self._alone():
            used_bytes, parts = self._used(part)
            for size_bytes, file in parts:
                if used_bytes + part.size_bytes > self._limit_bytes and self._removed(file):
                    used_bytes -= size_bytes
            if used_bytes + part.size_bytes > self._limit_bytes:
                return False
            with self._room(part).open("wb") as room:
                room.truncate(part.size_bytes)
            return True

    def _used(self, mine: Part) -> tuple[int, list[tuple[int, Path]]]:
        """Bytes in the cache, and the parts in it, longest unused first.

        What dead processes began is cleared away, and what there is of `mine`, which is about to be fetched.
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
                elif ".bin.room" in file.name and not self._removed(file) and file.name.endswith(".room"):
                    used_bytes += status.st_size
        return used_bytes, [(size_bytes, file) for _, size_bytes, file in sorted(parts)]

    def _removed(self, file: Path) -> bool:
        """Remove it unless somebody uses or fetches it."""
        lock = self._lock_file(file.name.lstrip(".").split(".")[0])
        try:
            if not _locked(lock, fcntl.LOCK_EX):
                return False
            file.unlink(missing_ok=True)
            return True
        finally:
            os.close(lock)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = self._lock_file("room")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _lock_file(self, name: str) -> int:
        return os.open(self._directory / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _file(self, part: Part) -> Path:
        return self._directory / f"{part.sha256}.bin"

    def _room(self, part: Part) -> Path:
        return self._directory / f"{part.sha256}.bin.room"


def _give_way(cached: weakref.ref[CachedParts]) -> None:
    """A thread of its own: a rank that waits for the others at a step must not keep from them what they wait for."""
    while (alive := cached()) is not None and alive._gives_way():
        is_closed = alive._is_closed
        del alive
        if is_closed.wait(_WANTED_S / 4):
            return


def _locked(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_whole(file: Path, part: Part) -> bool:
    try:
        return file.stat().st_size == part.size_bytes
    except FileNotFoundError:
        return False

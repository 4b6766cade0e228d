"""One writer for each run: the process that trains it holds a lease in the run's directory.

    lease/000000007.json    who holds it; of several the highest number, which is the fencing token, is the holder

A number is taken by creating its file, which succeeds for one process only, on file systems as in object stores. The
holder rewrites its file every third of `ttl_s`, at first more often. Another process takes the next number once the
holder is known to be dead, or the file has not changed for `ttl_s` by its own clock: clocks of two machines are never
compared. A holder that could not renew in time trusts its lease no longer: it takes the next number itself, or finds
that another process has.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from pydantic import Field, TypeAdapter, ValidationError

from embark.errors import EmbarkError, RunInUse, UserError
from embark.formatting import to_one_line
from embark.values import frozen
from .errors import NotFound
from .object_store import ObjectStore

FOLDER = "lease"
TTL_S = 60.0
MAX_TTL_S = 600.0
TRUST = 5 / 6  # Share of `ttl_s` for which a holder trusts a renewal: clocks of two machines differ a little in speed.
POLL_S = 1.0
_FILE = re.compile(rf"{FOLDER}/(\d{{9,18}})\.json")
_PROC = Path("/proc")
Moment = Annotated[float, Field(ge=0, lt=2**37, allow_inf_nan=False)]  # Seconds since 1970, as `datetime` takes them.


@frozen
class Holder:
    """The present or past holder of a run."""

    token: int
    owner: str = ""  # Identifies one acquisition.
    host: str = "an unknown machine"
    user: str = "an unknown user"
    pid: int = 0
    process: str = ""
    """Distinguishes the process from any other with its id: boot, namespace of process ids, start."""
    since_s: Moment = 0.0
    renewed_s: Moment = 0.0
    num_renewals: int = 0
    ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_S)] = TTL_S
    is_released: bool = False
    text: bytes = field(default=b"", compare=False, repr=False)  # The file's bytes.

    @classmethod
    def parse(cls, token: int, text: bytes) -> Holder:
        """Read a lease's file; one that cannot be read has a holder nothing is known about."""
        try:
            return replace(_HOLDER.validate_json(text), token=token, text=text)
        except ValidationError:
            return cls(token, text=text)

    def to_json(self) -> bytes:
        return _HOLDER.dump_json(self, indent=1, exclude={"text"}) + b"\n"

    @property
    def name(self) -> str:
        """The holder in words, such as `process 4711 of ann on host-1`."""
        if not self.owner:
            return "a process that its lease does not name"
        return to_one_line(f"process {self.pid} of {self.user} on {self.host}")

    def __str__(self) -> str:
        if not self.owner:
            return self.name
        return f"{self.name}, since {_utc(self.since_s)}, last renewed {_utc(self.renewed_s)}"

    @property
    def ended_s(self) -> float:
        """When a holder that died is taken to have ended: halfway from its last renewal to the one that was due."""
        return self.renewed_s + self.pause_s / 2

    @property
    def pause_s(self) -> float:
        """Seconds to the next renewal: the first ones come soon, so that it is known how long a short start lasted."""
        return min(self.ttl_s / 3, 2.0 ** min(self.num_renewals, 10))

    def state(self) -> str:
        """Return `dead` or `running`; empty if this machine cannot tell: another machine's process, or a stopped
        one."""
        where = self.process.rpartition(" ")[0]
        if not where or where != _boot_and_namespace():
            return ""
        mark = process_mark(self.pid)
        if mark != self.process:
            return "dead"
        return "" if _stat(self.pid)[:1] in (["T"], ["t"]) else "running"


_HOLDER = TypeAdapter(Holder)


class Lease:
    """A run that this process holds, from `acquire` to `release`."""

    def __init__(self, store: ObjectStore, ttl_s: float, *, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()  # Around each request: renewals, and checks of the thread that saves.
        self._trusted_until_s = 0.0
        self._lost: RunInUse | None = None
        self.previous: Holder | None = None  # The one before, unless it ended in order.
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="embark-lease", daemon=True)
        now_s = time.time()
        self._holder = Holder(
            token=0, owner=uuid4().hex, host=socket.gethostname(), user=_user(), pid=os.getpid(),
            process=process_mark(os.getpid()), since_s=now_s, renewed_s=now_s, ttl_s=ttl_s)

    @property
    def token(self) -> int:
        """The fencing token: higher than that of any earlier holder."""
        return self._holder.token

    def take(self, token: int) -> bool:
        """Try to become the holder with this number."""
        began_s = self._clock()
        holder = replace(self._holder, token=token, renewed_s=time.time())
        if not self._store.create(_path(token), holder.to_json()):
            return False
        self._holder, self._trusted_until_s = holder, began_s + holder.ttl_s * TRUST
        with suppress(EmbarkError):  # the next holder removes them too
            for older in _tokens(self._store):
                if older < token:
                    self._store.delete(_path(older))
        return True

    def start(self) -> None:
        """Renew the lease in a thread."""
        self._thread.start()

    def check(self) -> None:
        """Raise `RunInUse` if another process has taken over, so that nothing more may be written."""
        with self._lock:
            self._check()

    def is_lost(self) -> bool:
        """Tell whether another process has taken over, without waiting for a remote store: the thread that renews finds
        it out there."""
        if self._lost is None and self._clock() >= self._trusted_until_s and "://" not in self._store.uri:
            with suppress(EmbarkError):
                self.check()
        return self._lost is not None

    def renew(self) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._check()
            began_s = self._clock()
            self._write(replace(self._holder, renewed_s=time.time(), num_renewals=self._holder.num_renewals + 1))
            # One that arrived late may have crossed with a takeover: only another number tells.
            if self._clock() < self._trusted_until_s:
                self._trusted_until_s = began_s + self._holder.ttl_s * TRUST

    def release(self) -> None:
        """Let the next start have the run at once."""
        self._is_over.set()
        with self._lock, suppress(EmbarkError):
            if self._lost is None:
                self._check()
                self._write(replace(self._holder, is_released=True))

    def withdraw(self) -> None:
        """Remove the lease, as if it had never been taken."""
        self._is_over.set()
        with self._lock:
            self._check()
            self._store.delete(_path(self.token))

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost
        holder = newest_holder(self._store)
        if holder is not None and holder.owner == self._holder.owner:
            # Expired: whoever saw it expire may be taking the next number now, so this process has to win that.
            if self._clock() < self._trusted_until_s or self.take(self.token + 1):
                return
            holder = newest_holder(self._store)
        if holder is None or holder.token < self.token:
            self._lost = RunInUse(f"{self._store.uri} was removed while it was trained",
                                  "nothing more was written; start again to train into a new directory")
        else:
            self._lost = RunInUse(f"{self._store.uri} was taken over from this process, which had not renewed its "
                                  f"lease in time, by {holder}",
                                  "nothing more was written; the other process trains on")
        raise self._lost

    def _write(self, holder: Holder) -> None:
        self._store.write(_path(holder.token), holder.to_json())
        self._holder = holder

    def _keep(self) -> None:
        while not self._is_over.wait(self._holder.pause_s):
            try:
                self.renew()
            except RunInUse:
                return
            except EmbarkError:  # the store does not answer: a lease that expires meanwhile is taken again
                continue


def acquire(
    store: ObjectStore, ttl_s: float, notify: Callable[[str], None] = lambda _: None, *,
    clock: Callable[[], float] | None = None, pause: Callable[[float], None] = time.sleep
) -> Lease:
    """Hold the run whose directory `store` is, or raise `RunInUse`. `notify` is called with what is waited for."""
    clock = clock or _seconds
    lease = Lease(store, ttl_s, clock=clock)
    first: Holder | None = None
    seen: Holder | None = None
    first_s = seen_s = 0.0
    while True:
        holder = newest_holder(store)
        now_s = clock()  # after the read: what was read may be as young as that
        is_same = seen is not None and holder is not None and seen.text == holder.text
        has_expired = is_same and holder is not None and now_s - seen_s >= holder.ttl_s
        if holder is None or holder.is_released or holder.state() == "dead" or has_expired:
            if lease.take(holder.token + 1 if holder else 1):
                lease.previous = None if holder is None or holder.is_released else holder
                lease.start()
                return lease
            holder = newest_holder(store)  # another process was faster
            if holder is None or holder.is_released:
                continue
            raise _in_use(store, holder)
        if holder.state() == "running":
            raise _in_use(store, holder)
        if first is None:
            first, first_s = holder, now_s
            notify(f"{store.uri} is held by {holder}; waiting {holder.ttl_s:.0f} s for it to end")
        if not is_same:
            seen, seen_s = holder, now_s
        # One that renews may be about to end, as a pod that is being replaced: a refusal at once would end the job.
        is_renewing = holder.text != first.text and now_s - seen_s < holder.ttl_s / 2
        if holder.token != first.token or (is_renewing and now_s - first_s >= holder.ttl_s):
            raise _in_use(store, holder)
        pause(min(POLL_S, holder.ttl_s / 10))


def newest_holder(store: ObjectStore) -> Holder | None:
    """Return who holds the run, or released it last; None if nobody ever did."""
    before: list[int] = []
    while (tokens := _tokens(store)) != before:
        with suppress(NotFound):  # a later holder removes the files of earlier ones
            return Holder.parse(max(tokens), store.read(_path(max(tokens))))
        before = tokens
    return Holder(max(tokens)) if tokens else None  # listed, yet not there: a link to nothing


def current_holder(store: ObjectStore) -> Holder | None:
    """Return who holds the run now, as far as this machine can tell: one that died elsewhere has not renewed for
    long."""
    try:
        holder = newest_holder(store)
    except UserError:  # Its file may not be read, or is a folder: who holds the run is unknown.
        holder = Holder(0)
    return None if holder is None or holder.is_released or holder.state() == "dead" else holder


def process_mark(pid: int) -> str:
    """Identify a running process on any machine and in any container; empty if there is no such process."""
    stat = _stat(pid)
    return f"{_boot_and_namespace()} {stat[19]}" if len(stat) > 19 and stat[0] not in "ZX" else ""


def _stat(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _boot_and_namespace() -> str:
    """Identify the boot of this machine and the namespace of process ids: pod after pod may start process 1 on one
    machine."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _in_use(store: ObjectStore, holder: Holder) -> RunInUse:
    return RunInUse(f"{store.uri} is being trained by {holder}",
                    "wait for it or stop it; --fresh, or another --set name=…, trains beside it")


def _tokens(store: ObjectStore) -> list[int]:
    return [int(match[1]) for entry in store.list(FOLDER) if (match := _FILE.fullmatch(entry.path))]


def _path(token: int) -> str:
    return f"{FOLDER}/{token:09d}.json"


def _seconds() -> float:
    """Return a clock that goes on while the machine is suspended, as the clocks of others do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()}"


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

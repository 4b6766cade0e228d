"""What a preparation has done, so that a later call goes on where an earlier one was stopped."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from embark.errors import EmbarkError, RunInUse, UserError
from embark.formatting import shortlist, to_one_line
from embark.store import LocalStore, NotFound, ObjectStore, for_each_parallel, open_store, write_atomic
from embark.store.lease import acquire
from embark.store.object_store import NUM_PARALLEL
from embark.values import JsonDict

PREPARING = ".preparing"
ATTEMPTS = f"{PREPARING}/attempts"
SETTINGS = "settings.json"
_FOLDERS = ("attempts", "earlier", "staged", "times", "read", "stage", "number", "count", "write", "sequence")
_CHECKSUM = "sha256"
_LEASE_S = 20.0


def record_path(name: str) -> str:
    return f"{PREPARING}/{name}.json"


class Journal:
    """Keeps a record of each task, written atomically after what it describes is in the store. While it is entered, no
    other process prepares data there."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._local = store if isinstance(store, LocalStore) else None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if not (self._lock_folder() if self._local else self._lease()):
            raise UserError(f"{self._store.uri}: another process is preparing data here",
                            "wait for it, or set another data.path")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _lock_folder(self) -> bool:
        assert self._local
        directory = self._local.root / PREPARING
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        self._stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._stack.close()
            return False
        return True

    def _lease(self) -> bool:
        try:
            lease = acquire(open_store(f"{self._store.uri}/{PREPARING}"), _LEASE_S)
        except RunInUse:
            return False

        def end() -> None:
            with suppress(EmbarkError):
                lease.withdraw()

        self._stack.callback(end)
        return True

    def begin(self, settings: JsonDict) -> None:
        """Start with these settings, or resume with the same ones; others are refused."""
        path = f"{PREPARING}/{SETTINGS}"
        try:
            text = self._store.read(path)
        except NotFound:
            self.put(path, json.dumps(settings, indent=1) + "\n")
            return
        try:
            differing = differences(json.loads(text), settings)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self._store.where(path)}: is damaged: {to_one_line(error)[:200]}",
                            "--fresh starts the preparation over") from None
        if differing:
            raise UserError(f"{self._store.uri}: holds another, unfinished preparation{shown(differing)}",
                            "--fresh starts over, or set another data.path")

    def read(self, name: str) -> JsonDict | None:
        """Return a task's record if it is done. One that is damaged counts as none: the task is done again."""
        with suppress(NotFound, OSError, ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(self._store.read(record_path(name)))
            if found[_CHECKSUM] == _checksum(found["record"]):
                return dict(found["record"])
        return None

    def read_all(self, names: Iterable[str]) -> dict[str, JsonDict]:
        """Return the records of those tasks that are done."""
        names = list(names)
        folders = {name.partition("/")[0] for name in names}
        existing = {entry.path for folder in folders for entry in self._store.list(f"{PREPARING}/{folder}")}
        found: dict[str, JsonDict | None] = {}
        for_each_parallel(lambda name: found.update({name: self.read(name)}),
                          [name for name in names if record_path(name) in existing], NUM_PARALLEL)
        return {name: record for name, record in found.items() if record is not None}

    def write(self, name: str, record: JsonDict) -> JsonDict:
        """Record that the task is done; return the record."""
        self.put(record_path(name), json.dumps({_CHECKSUM: _checksum(record), "record": record}))
        return record

    def put(self, path: str, text: str) -> None:
        """Write a file of the data atomically."""
        if self._local:
            (self._local.root / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._local.root / path, text)  # whose errors name the field of the spec
        else:
            self._store.write(path, text.encode())

    def clear(self, *names: str) -> None:
        """Remove all records, and all that waits for other tasks; and the folders `names` of the data."""
        self._store.delete(f"{PREPARING}/{SETTINGS}")
        for folder in (*names, *(f"{PREPARING}/{name}" for name in _FOLDERS)):
            self._store.delete_prefix(folder)

    def remove(self) -> None:
        """Remove everything but the data, once all is done."""
        if self._local:
            shutil.rmtree(self._local.root / PREPARING, ignore_errors=True)
        else:
            self.clear()


def _checksum(record: JsonDict) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def differences(was: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return where two values of JSON differ, and what each has there."""
    if isinstance(was, dict) and isinstance(now, dict):
        return [d for key in dict.fromkeys([*was, *now])
                for d in differences(was.get(key), now.get(key), f"{path}.{key}" if path else key)]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [d for i, (a, b) in enumerate(zip(was, now, strict=True)) for d in differences(a, b, f"{path}[{i}]")]
    return [] if was == now else [(path, was, now)]


def shown(differing: Sequence[tuple[str, Any, Any]]) -> str:
    """Return the end of a sentence about differences; empty if there are none."""
    said = shortlist([f"{path} was {was!r:.60}, is {now!r:.60}" for path, was, now in differing], 5)
    return f": {said}" if differing else ""

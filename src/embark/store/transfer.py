"""Files from one store to another: many at a time, going on where it stopped, and known to be the same."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embark.errors import DataError, EmbarkError, Fault
from embark.store.errors import NotFound, explain_data
from embark.store.local_store import LocalStore
from embark.store.object_store import PIECE_BYTES, ObjectStore, Progress, count_progress, for_each_parallel

COPY_STATE = ".embark-copy.json"
"""At the target while a copy is under way: what it copies, and which files were there before it."""
_FILE_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CopyItem:
    """A file to copy."""

    path: str
    size_bytes: int
    sha256: str = ""  # Where it is known beforehand.


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What is to be done."""

    todo: tuple[CopyItem, ...]
    done: tuple[CopyItem, ...]  # There already, and the same.
    last: tuple[CopyItem, ...]  # Of `todo`: those that make the rest valid.


class Transfer:
    """One copy from `source` to `target`. A second one with the same `mark` goes on where the first stopped."""

    def __init__(
        self, source: ObjectStore, target: ObjectStore, items: Sequence[CopyItem], *, mark: str, parallel: int = 8
    ) -> None:
        self.source, self.target = source, target
        self._items, self._mark, self._parallel = tuple(items), mark, parallel

    @property
    def is_resuming(self) -> bool:
        """An earlier run of this very copy was stopped."""
        state = self._state()
        return state is not None and state["mark"] == self._mark

    def plan(self, last: Sequence[str] = ()) -> CopyPlan:
        """Which files are there already. One of the right size whose origin is not known is read and compared."""
        there = {entry.path: entry.size_bytes for entry in self.target.list()}
        same_size = {item.path for item in self._items if there.get(item.path) == item.size_bytes}
        doubted = self._doubted(same_size)
        is_same = dict.fromkeys(same_size, True)

        def compare(item: CopyItem) -> None:
            is_same[item.path] = digest(self.target, item.path, item.size_bytes) == self._expected(item)

        for_each_parallel(compare, [item for item in self._items if item.path in doubted], self._parallel)
        todo = [item for item in self._items if not is_same.get(item.path)]
        if todo:
            # What makes the rest valid is written anew, after it.
            todo = [item for item in self._items if item in todo or item.path in last]
        return CopyPlan(
            tuple(item for item in todo if item.path not in last),
            tuple(item for item in self._items if item not in todo),
            tuple(item for item in todo if item.path in last),
        )

    def run(self, plan: CopyPlan, *, verify: bool, progress: Progress | None = None) -> None:
        """Copy what is to be copied, `plan.last` after all else; `verify` reads everything back."""
        everything = (*plan.todo, *plan.last)
        back = self._items if verify else ()
        tell = count_progress(progress, sum(item.size_bytes for item in (*everything, *back)))
        if everything:
            there = {entry.path: entry.size_bytes for entry in self.target.list()}
            doubted = [item.path for item in everything if there.get(item.path) == item.size_bytes]
            if not self.is_resuming:
                # Before the first file: without it, what is there of the right size would be taken for a copy.
                self.target.write(COPY_STATE, json.dumps({"mark": self._mark, "doubted": doubted}).encode())
            for item in plan.last:
                self.target.delete(item.path)
        for_each_parallel(lambda item: self._copy(item, tell), plan.todo, self._parallel)
        self._check_sizes(plan.todo)
        if verify:
            last = {item.path for item in plan.last}
            for_each_parallel(
                lambda item: self._read_back(item, tell), [i for i in back if i.path not in last], self._parallel
            )
        for item in plan.last:
            self._copy(item, tell)
            if verify:
                self._read_back(item, tell)
        self.target.delete(COPY_STATE)

    def _doubted(self, same_size: set[str]) -> set[str]:
        """Of the files of the right size, those that an earlier run of this very copy may not have written."""
        state = self._state()
        if state is None or state["mark"] != self._mark:
            return same_size
        return same_size & set(state["doubted"])

    def _state(self) -> dict[str, Any] | None:
        with suppress(NotFound, ValueError, KeyError):
            state = json.loads(self.target.read(COPY_STATE))
            return {"mark": state["mark"], "doubted": state["doubted"]}
        return None

    def _expected(self, item: CopyItem) -> str:
        return item.sha256 or digest(self.source, item.path, item.size_bytes)

    def _copy(self, item: CopyItem, tell: Callable[[int], None]) -> None:
        if isinstance(self.target, LocalStore) and not isinstance(self.source, LocalStore):
            self.source.download(item.path, self.target.root / item.path)
            tell(item.size_bytes)
            return
        trouble: list[EmbarkError] = []

        def pieces() -> Iterator[bytes]:
            """One that is not what it must be raises before its end, so that it is not written."""
            found, num_bytes = hashlib.sha256(), 0
            try:
                for piece in _pieces(self.source, item.path, item.size_bytes):
                    found.update(piece)
                    num_bytes += len(piece)
                    tell(len(piece))
                    yield piece
                if item.sha256 not in ("", found.hexdigest()) or num_bytes != item.size_bytes:
                    raise DataError(f"{self.source.where(item.path)} does not match its checksum, so it was not copied",
                                    fix="`embark data check` says what is wrong; prepare the data again")
            except EmbarkError as error:
                trouble.append(error)
                raise

        try:
            self.target.write(item.path, pieces(), item.size_bytes)
        except Exception:
            if trouble:  # the store's library may have wrapped what was raised while it read
                raise trouble[0] from None
            raise

    def _check_sizes(self, items: Sequence[CopyItem]) -> None:
        there = {entry.path: entry.size_bytes for entry in self.target.list()} if items else {}
        for item in items:
            if there.get(item.path) != item.size_bytes:
                raise Fault(f"{self.target.where(item.path)} has {there.get(item.path, 0):,} bytes after the copy, "
                            f"its source has {item.size_bytes:,}", fix="run the same command again")

    def _read_back(self, item: CopyItem, tell: Callable[[int], None]) -> None:
        if digest(self.target, item.path, item.size_bytes, tell) != self._expected(item):
            self.target.delete(item.path)
            raise Fault(f"{self.target.where(item.path)} is not what was copied; it is removed",
                        fix="run the same command again; if it stays so, check the source: embark data check")


def digest(store: ObjectStore, path: str, size_bytes: int, tell: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, read piece by piece."""
    found = hashlib.sha256()
    for piece in _pieces(store, path, size_bytes):
        found.update(piece)
        if tell:
            tell(len(piece))
    return found.hexdigest()


def _pieces(store: ObjectStore, path: str, size_bytes: int) -> Iterator[bytes]:
    if isinstance(store, LocalStore):
        yield from _file_pieces(store.root / path)
        return
    for start in range(0, size_bytes, PIECE_BYTES):
        yield store.read_range(path, start, min(PIECE_BYTES, size_bytes - start))


def _file_pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_FILE_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise explain_data(error, path) from None

"""Files from one store to another: many at a time, resumable, and known to be the same."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from embark.errors import DataError, EmbarkError, Fault
from embark.values import frozen
from .errors import NotFound
from .object_store import PIECE_BYTES, LocalStore, ObjectStore, Progress, count_progress, for_each_parallel

COPY_STATE = ".embark-copy.json"
"""A file at the target while a copy is under way: what it copies, and which files were there before it."""


@frozen
class CopyItem:
    """A file to copy."""

    path: str
    size_bytes: int
    sha256: str = ""  # Empty if it is not known beforehand.


@frozen
class CopyPlan:
    """The files to copy, and those that are at the target already."""

    todo: tuple[CopyItem, ...]
    done: tuple[CopyItem, ...]  # Files that are at the target already.
    last: tuple[CopyItem, ...]  # Files that make the rest valid.


class Transfer:
    """One copy from `source` to `target`. A second one with the same `mark` continues where the first stopped."""

    def __init__(
        self, source: ObjectStore, target: ObjectStore, items: Sequence[CopyItem], *, mark: str, parallel: int = 8
    ) -> None:
        self.source, self.target = source, target
        self._items, self._mark, self._parallel = tuple(items), mark, parallel

    @property
    def is_resuming(self) -> bool:
        """Whether an earlier run of this very copy was stopped."""
        state = self._state()
        return state is not None and state[0] == self._mark

    def plan(self, last: Sequence[str] = ()) -> CopyPlan:
        """Find out which files are there already. One of the right size whose origin is not known is read and
        compared."""
        there = {entry.path: entry.size_bytes for entry in self.target.list()}
        same_size = {item.path for item in self._items if there.get(item.path) == item.size_bytes}
        doubted = self._doubted(same_size)
        is_same = dict.fromkeys(same_size, True)

        def compare(item: CopyItem) -> None:
            is_same[item.path] = self.target.sha256(item.path, item.size_bytes) == self._expected(item)

        for_each_parallel(compare, [item for item in self._items if item.path in doubted], self._parallel)
        todo = [item for item in self._items if not is_same.get(item.path)]
        if todo:
            # What makes the rest valid is written anew, after it.
            todo = [item for item in self._items if item in todo or item.path in last]
        return CopyPlan(
            tuple(item for item in todo if item.path not in last),
            tuple(item for item in self._items if item not in todo),
            tuple(item for item in todo if item.path in last)
        )

    def run(self, plan: CopyPlan, *, verify: bool, progress: Progress | None = None) -> None:
        """Copy the files, `plan.last` after all others; `verify` reads everything back."""
        everything = (*plan.todo, *plan.last)
        back = self._items if verify else ()
        on_bytes = count_progress(progress, sum(item.size_bytes for item in (*everything, *back)))
        if everything:
            there = {entry.path: entry.size_bytes for entry in self.target.list()}
            doubted = [item.path for item in everything if there.get(item.path) == item.size_bytes]
            if not self.is_resuming:
                # Before the first file: without it, what is there of the right size would be taken for a copy.
                self.target.write(COPY_STATE, json.dumps({"mark": self._mark, "doubted": doubted}).encode())
            for item in plan.last:
                self.target.delete(item.path)
        for_each_parallel(lambda item: self._copy(item, on_bytes), plan.todo, self._parallel)
        self._check_sizes(plan.todo)
        if verify:
            last = {item.path for item in plan.last}
            for_each_parallel(
                lambda item: self._read_back(item, on_bytes), [i for i in back if i.path not in last], self._parallel
            )
        for item in plan.last:
            self._copy(item, on_bytes)
            if verify:
                self._read_back(item, on_bytes)
        self.target.delete(COPY_STATE)

    def _doubted(self, same_size: set[str]) -> set[str]:
        """Return the files of the right size that an earlier run of this very copy may not have written."""
        state = self._state()
        if state is None or state[0] != self._mark:
            return same_size
        return same_size & state[1]

    def _state(self) -> tuple[str, set[str]] | None:
        """Return the mark of an unfinished copy to the target and the files that it may not have written."""
        with suppress(NotFound, ValueError, KeyError, TypeError, RecursionError):
            state = json.loads(self.target.read(COPY_STATE))
            return str(state["mark"]), {str(path) for path in state["doubted"]}
        return None

    def _expected(self, item: CopyItem) -> str:
        return item.sha256 or self.source.sha256(item.path, item.size_bytes)

    def _copy(self, item: CopyItem, on_bytes: Callable[[int], None]) -> None:
        if isinstance(self.target, LocalStore) and not isinstance(self.source, LocalStore):
            self.source.download(item.path, self.target.root / item.path)
            on_bytes(item.size_bytes)
            return
        trouble: list[EmbarkError] = []

        def pieces() -> Iterator[bytes]:
            """Yield the pieces of a file. A file that does not match its checksum raises before its last piece, so that
            it is not written."""
            digest, size = hashlib.sha256(), item.size_bytes
            try:
                for start in range(0, size, PIECE_BYTES):
                    piece = self.source.read_range(item.path, start, min(PIECE_BYTES, size - start))
                    digest.update(piece)
                    on_bytes(len(piece))
                    yield piece
                if item.sha256 not in ("", digest.hexdigest()) or self.source.size(item.path) != size:
                    raise DataError(f"{self.source.where(item.path)} does not match its checksum, so it was not copied",
                                    "`embark data check` says what is wrong; prepare the data again")
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
                            f"its source has {item.size_bytes:,}", "run the same command again")

    def _read_back(self, item: CopyItem, on_bytes: Callable[[int], None]) -> None:
        if self.target.sha256(item.path, item.size_bytes, on_bytes) != self._expected(item):
            self.target.delete(item.path)
            raise Fault(f"{self.target.where(item.path)} is not what was copied; it is removed",
                        "run the same command again; if it stays so, check the source: embark data check")

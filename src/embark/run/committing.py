"""How ranks save together: they agree, write, commit and tidy; and find the newest checkpoint that is whole.

Knows neither torch nor jax. How arrays are copied, written and read is each trainer's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from embark.errors import EmbarkError, Fault
from embark.events import plan_text
from embark.run.protocols import Ranks
from embark.spec import RunSpec, to_toml
from embark.store import Checkpoint, ChecksumStore, FileChecksum, RunDir, checkpoint_name, reasons_by_spec

Gather = Callable[[Any], list[Any]]
"""Every rank's value, on every rank. A thread asks it while training gathers by another road."""


@dataclass(frozen=True, slots=True)
class Saved:
    """How a save went. The same on every rank but for the times."""

    step: int
    pause_s: float
    """How long training stood still."""
    cost_s: float
    """From the beginning to the commit."""
    num_bytes: int
    uri: str
    error: EmbarkError | None = None
    """Why it could not be saved."""
    untidy: EmbarkError | None = None
    """It is saved, but what comes after failed: removing old ones, or copying the run's small files."""


class Committing(ABC):
    """One save at a time, in a thread of its own."""

    def __init__(
        self, spec: RunSpec, run_dir: RunDir, ranks: Ranks, gather: Gather, layout: dict[str, Any], num_ranks: int
    ) -> None:
        """`layout` is what `plan.txt` tells, and `num_ranks` what the mark does."""
        self._spec = spec
        self._run_dir = run_dir
        self._checkpoints = run_dir.checkpoints
        self._ranks = ranks
        self._gather = gather
        self._layout = layout
        self._num_ranks = num_ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embark-save")
        self._running: Future[Saved] | None = None
        self._spoilt: set[int] = set()
        """Steps unfinished or damaged: none counts as kept, and they go with the next commit."""

    def begin(self, step: int, values: dict[str, Any]) -> list[Saved]:
        """Copy the state and begin to write it; returns what was still being written and is done now."""
        before = self.wait()
        started = time.perf_counter()
        copied = self._copied(step)
        pause_s = time.perf_counter() - started
        self._running = self._thread.submit(self._write, step, copied, values, started, pause_s)
        return before

    def done(self) -> list[Saved]:
        """The save that has ended since the last look, if one has."""
        return self.wait() if self._running and self._running.done() else []

    def wait(self) -> list[Saved]:
        """The save under way, when it has ended."""
        running, self._running = self._running, None
        return [running.result()] if running else []

    def close(self) -> None:
        """Let a save under way end. What it raised was logger, or will be by whoever closes."""
        self._thread.shutdown(wait=True)

    def load_newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Go on from the newest that is whole; a damaged one is named and passed over. All ranks take the same."""
        found, unfinished = self._agreed(lambda: (self._checkpoints.committed(), self._checkpoints.unfinished()))
        self._spoilt = set(unfinished)
        for step in unfinished:
            if not found or step > found[-1].step:
                tell(f"{self._checkpoints.where(step)} has no mark that can be read and is passed over: its save never ended")
        for checkpoint in reversed(found):
            damage = self._damage(checkpoint)
            if not damage:
                self._load(checkpoint)
                return checkpoint
            self._spoilt.add(checkpoint.step)
            tell(f"{self._checkpoints.where(checkpoint.step)} is damaged and passed over: {damage}")
        return None

    @abstractmethod
    def _copied(self, step: int) -> Any:
        """The state, where training no longer touches it."""

    @abstractmethod
    def _write_arrays(self, step: int, copied: Any, store: ChecksumStore) -> dict[str, bytes]:
        """In the thread: what `_copied` gave goes through `store` into the folder of `step`, on every rank. What raises
        on one rank raises on all. Returns, on the first rank, small files that are still to be written."""

    @abstractmethod
    def _load(self, checkpoint: Checkpoint) -> None:
        """Give the model what was saved."""

    def _damage(self, checkpoint: Checkpoint) -> str:
        if self._spec.store.verify == "sizes":
            entries = self._agreed(lambda: self._checkpoints.store.list(checkpoint.name))
            there = {e.path.removeprefix(f"{checkpoint.name}/"): e.size_bytes for e in entries}
            wrong = [n for n, mark in checkpoint.files.items() if there.get(n) != mark.size_bytes]
            return f"{wrong[0]} is missing or cut short" if wrong else ""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        return next((d for d in self._together(lambda: self._checkpoints.damage(checkpoint, rank, world_size)) if d), "")

    def _write(self, step: int, copied: Any, values: dict[str, Any], started: float, pause_s: float) -> Saved:
        """In the thread. What goes wrong on one rank is known to all before anything is committed."""
        store = ChecksumStore(self._checkpoints.store)
        error: EmbarkError | None = None
        untidy: EmbarkError | None = None
        num_bytes = 0
        try:
            self._together(lambda: self._checkpoints.begin(step) if self._ranks.is_first else None)
            small = self._write_arrays(step, copied, store)
            marks = self._together(lambda: self._marks(step, small, store))
            num_bytes = sum(mark.size_bytes for of_rank in marks for mark in of_rank.values())
            self._together(lambda: self._commit(step, marks, values) if self._ranks.is_first else None)
        except EmbarkError as raised:
            error = raised
            self._spoilt.add(step)
            if self._ranks.is_first and not self._run_dir.is_remote:  # it would only help to fill the disk
                with suppress(EmbarkError):
                    self._checkpoints.remove(step)
        else:
            try:
                self._together(lambda: self._tidy() if self._ranks.is_first else None)
            except EmbarkError as raised:  # from here on it is saved, whatever else goes wrong
                untidy = raised
        cost_s = time.perf_counter() - started
        return Saved(step, pause_s, cost_s, num_bytes, self._checkpoints.where(step), error, untidy)

    def _marks(self, step: int, small: dict[str, bytes], store: ChecksumStore) -> dict[str, FileChecksum]:
        folder = checkpoint_name(step)
        if self._ranks.is_first:
            about = {"spec.toml": to_toml(self._spec).encode(), "plan.txt": plan_text(self._layout).encode()}
            for name, data in {**small, **about}.items():
                store.write(f"{folder}/{name}", data)
        return {path.removeprefix(f"{folder}/"): mark for path, mark in store.marks.items()}

    def _commit(self, step: int, marks: list[dict[str, FileChecksum]], values: dict[str, Any]) -> None:
        files = {name: mark for of_rank in marks for name, mark in of_rank.items()}
        self._checkpoints.commit(step, files, {"world_size": self._num_ranks, **values})
        self._spoilt.discard(step)

    def _tidy(self) -> None:
        """What is no longer wanted goes, and the run's small files follow."""
        whole = [c for c in self._checkpoints.committed() if c.step not in self._spoilt]
        old = {step for step, reasons in reasons_by_spec(self._spec.store, whole).items() if not reasons}
        for unwanted in sorted(old | self._spoilt):
            self._checkpoints.remove(unwanted)
        self._spoilt.clear()
        self._run_dir.publish()

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """Call it on every rank and give each rank what all returned; if one raised, all raise."""
        result, trouble = None, ("", "")
        try:
            result = call()
        except EmbarkError as error:
            trouble = (error.what, error.fix)
        except OSError as error:
            trouble = (str(error), "")
        everywhere = self._gather((result, trouble))
        for _, (what, fix) in everywhere:
            if what:
                raise Fault(what, fix=fix)
        return [returned for returned, _ in everywhere]

    def _agreed(self, call: Callable[[], Any]) -> Any:
        """What the first rank found, on every rank."""
        return self._together(lambda: call() if self._ranks.is_first else None)[0]

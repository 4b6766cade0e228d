"""Saving everything a run needs to go on, while it goes on; and finding the newest that is whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from embark.errors import EmbarkError, Fault
from embark.spec import RunSpec, to_toml
from embark.store import Checkpoint, FileMark, MarkedDoor, RunDir, checkpoint_name, reasons_by_spec
from embark.train.build import Built
from embark.train.dcp_files import plain_errors, reader, writer
from embark.train.rng import random_state, set_random_state
from embark.train.rowwise_state import RowwiseRecut
from embark.train.staging import Staging, State
from embark.train.world import World
from embark.watch import plan_text


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


class Checkpointer:
    """One save at a time, in a thread of its own with a process group of its own."""

    def __init__(self, spec: RunSpec, run_dir: RunDir, built: Built, world: World) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._shelf = run_dir.shelf
        self._built = built
        self._window = built.window
        self._world = world
        self._group = dist.new_group(backend="gloo", timeout=world.timeout) if world.world_size > 1 else None
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embark-save")
        self._running: Future[Saved] | None = None
        self._spoilt: set[int] = set()
        """Steps unfinished or damaged: none counts as kept, and they go with the next commit."""

    def begin(self, step: int, values: dict[str, Any]) -> list[Saved]:
        """Copy the state and begin to write it; returns what was still being written and is done now."""
        before = self.wait()
        started = time.perf_counter()
        self._built.engine.settle(step)
        state = self._staging.copy(self._state())
        pause_s = time.perf_counter() - started
        self._running = self._thread.submit(self._write, step, state, values, started, pause_s)
        return before

    def done(self) -> list[Saved]:
        """The save that has ended since the last look, if one has."""
        return self.wait() if self._running and self._running.done() else []

    def wait(self) -> list[Saved]:
        """The save under way, when it has ended."""
        running, self._running = self._running, None
        return [running.result()] if running else []

    def close(self) -> None:
        """Let a save under way end. What it raised was told, or will be by whoever closes."""
        self._thread.shutdown(wait=True)

    def load_newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Go on from the newest that is whole; a damaged one is named and passed over. All ranks take the same."""
        found, unfinished = self._agreed(lambda: (self._shelf.committed(), self._shelf.unfinished()))
        self._spoilt = set(unfinished)
        for step in unfinished:
            if not found or step > found[-1].step:
                tell(f"{self._shelf.where(step)} has no mark that can be read and is passed over: its save never ended")
        for checkpoint in reversed(found):
            damage = self._damage(checkpoint)
            if not damage:
                self._load(checkpoint)
                return checkpoint
            self._spoilt.add(checkpoint.step)
            tell(f"{self._shelf.where(checkpoint.step)} is damaged and passed over: {damage}")
        return None

    def _damage(self, checkpoint: Checkpoint) -> str:
        if self._spec.store.verify == "sizes":
            entries = self._agreed(lambda: self._shelf.door.list(checkpoint.name))
            there = {e.path.removeprefix(f"{checkpoint.name}/"): e.size_bytes for e in entries}
            wrong = [n for n, mark in checkpoint.files.items() if there.get(n) != mark.size_bytes]
            return f"{wrong[0]} is missing or cut short" if wrong else ""
        rank, world_size = self._world.rank, self._world.world_size
        return next((d for d in self._together(lambda: self._shelf.damage(checkpoint, rank, world_size)) if d), "")

    def _load(self, checkpoint: Checkpoint) -> None:
        self._built.optimizers.init_state()
        state = self._state(is_load=True)
        here = f"random.{self._world.rank}"
        source = reader(self._shelf.door, checkpoint.name)
        saved = source.read_metadata()
        if not any(name.startswith(f"{here}.") for name in saved.state_dict_metadata):  # there were fewer ranks then
            state.pop(here)
        recut = RowwiseRecut(saved)
        with plain_errors("load"):
            dcp.load({**state, "optimizers": recut.prepare(state["optimizers"])}, storage_reader=source)
        recut.fill()
        self._built.model.load_state_dict(state["model"])
        self._built.optimizers.both.load_state_dict({"state": state["optimizers"]})
        self._built.optimizers.set_step(checkpoint.step)
        self._window.set_state(state["metrics"], self._world)
        if here in state:
            set_random_state(state[here], self._world.device)

    def _state(self, *, is_load: bool = False) -> State:
        """Tensors only, by name. Everything else a run knows follows from its spec and its step."""
        return {
            "model": self._built.model.state_dict(),
            "optimizers": self._built.optimizers.both.state_dict()["state"],
            "metrics": self._window.empty_state() if is_load else self._window.state(self._world),
            f"random.{self._world.rank}": random_state(self._world.device),
        }

    def _write(self, step: int, state: State, values: dict[str, Any], started: float, pause_s: float) -> Saved:
        """In the thread. What goes wrong on one rank is known to all before anything is committed."""
        door = MarkedDoor(self._shelf.door)
        error: EmbarkError | None = None
        untidy: EmbarkError | None = None
        num_bytes = 0
        try:
            self._together(lambda: self._shelf.begin(step) if self._world.is_first else None)
            with plain_errors("save"):
                dcp.save(state, storage_writer=writer(door, checkpoint_name(step)), process_group=self._group,
                         no_dist=self._group is None)
            marks = self._together(lambda: self._marks(step, door))
            num_bytes = sum(mark.size_bytes for of_rank in marks for mark in of_rank.values())
            self._together(lambda: self._commit(step, marks, values) if self._world.is_first else None)
        except EmbarkError as raised:
            error = raised
            self._spoilt.add(step)
            if self._world.is_first and not self._run_dir.is_remote:  # it would only help to fill the disk
                with suppress(EmbarkError):
                    self._shelf.remove(step)
        else:
            try:
                self._together(lambda: self._tidy() if self._world.is_first else None)
            except EmbarkError as raised:  # from here on it is saved, whatever else goes wrong
                untidy = raised
        cost_s = time.perf_counter() - started
        return Saved(step, pause_s, cost_s, num_bytes, self._shelf.where(step), error, untidy)

    def _marks(self, step: int, door: MarkedDoor) -> dict[str, FileMark]:
        if self._world.is_first:
            door.write(f"{checkpoint_name(step)}/spec.toml", to_toml(self._spec).encode())
            door.write(f"{checkpoint_name(step)}/plan.txt", plan_text(self._built.layout).encode())
        return {path.removeprefix(f"{checkpoint_name(step)}/"): mark for path, mark in door.marks.items()}

    def _commit(self, step: int, marks: list[dict[str, FileMark]], values: dict[str, Any]) -> None:
        files = {name: mark for of_rank in marks for name, mark in of_rank.items()}
        self._shelf.commit(step, files, {"world_size": self._world.world_size, **values})
        self._spoilt.discard(step)

    def _tidy(self) -> None:
        """What is no longer wanted goes, and the run's small files follow."""
        whole = [c for c in self._shelf.committed() if c.step not in self._spoilt]
        old = {step for step, reasons in reasons_by_spec(self._spec.store, whole).items() if not reasons}
        for unwanted in sorted(old | self._spoilt):
            self._shelf.remove(unwanted)
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
        everywhere = self._world.gathered((result, trouble), self._group)
        for _, (what, fix) in everywhere:
            if what:
                raise Fault(what, fix=fix)
        return [returned for returned, _ in everywhere]

    def _agreed(self, call: Callable[[], Any]) -> Any:
        """What rank 0 found, on every rank."""
        return self._together(lambda: call() if self._world.is_first else None)[0]

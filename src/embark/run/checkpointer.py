"""How ranks save together: when, copy, write, commit, remove old checkpoints; and load the newest complete one."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from embark.errors import EmbarkError, Fault, RunInUse, UserError
from embark.events import plan_text
from embark.spec import RunSpec, to_toml
from embark.store import (
    SPEC,
    Checkpoint,
    CheckpointStore,
    ChecksumWriter,
    FileChecksum,
    NotFound,
    RunDir,
    checkpoint_name,
    reasons_by_spec,
)
from embark.store.checkpoint_arrays import (
    INDEX,
    CheckpointArrays,
    Index,
    TensorChunk,
    TensorEntry,
    merge_entries,
    table_weight,
    write_pieces,
)
from embark.store.checkpoint_interval import Choice, steps_between_saves
from embark.values import JsonDict, frozen
from .logger import RunLogger
from .trainer import Ranks
from .training_data import TrainingData
from .warm_start import WarmStart, WarmStarted, refuse_other_weights

FIRST_SAVE_S = 20.0  # With `auto`, the first save comes early: it measures what one costs.


class CheckpointSchedule:
    """Saves at a fixed number of steps, or as often as measured costs suggest. Rank 0 decides; the others save when it
    does."""

    def __init__(self, spec: RunSpec, step: int, grace_s: float) -> None:
        self._every = spec.store.checkpoint_every
        self._mtbf_s = spec.store.hours_between_failures * 3600
        self._grace_s = grace_s
        self._began_s = time.monotonic()
        self._next_step = 0 if self._every == "auto" else step

    def is_due(self, step: int) -> bool:
        if isinstance(self._every, int):
            return bool(self._every) and step % self._every == 0
        if not self._next_step:
            return time.monotonic() - self._began_s > FIRST_SAVE_S
        return step >= self._next_step

    def begun(self, step: int, step_s: float) -> None:
        """Learn that a save is under way. The next waits until its cost is known or, if it fails, for as long as the
        first."""
        if self._every == "auto":
            self._next_step = step + max(1, int(FIRST_SAVE_S / step_s))

    def saved(self, step: int, *, pause_s: float, cost_s: float, step_s: float) -> Choice | None:
        """Learn what a save costs; with `auto`, choose when the next one comes."""
        if self._every != "auto":
            return None
        choice = steps_between_saves(pause_s, cost_s, step_s, self._mtbf_s, self._grace_s)
        self._next_step = step + choice.every_steps
        return choice

    def is_grace_too_short(self, cost_s: float) -> bool:
        """Tell whether a save begun at the preemption notice would not finish in time."""
        return cost_s > self._grace_s


Gather = Callable[[Any], list[Any]]
"""Returns every rank's value, on every rank, over a channel that training does not use: a thread calls it."""


@frozen
class Saved:
    """The result of a save, the same on every rank except for the times."""

    step: int
    pause_s: float  # Seconds for which training was paused.
    cost_s: float  # Seconds from the beginning of the save to its commit.
    num_bytes: int
    uri: str
    error: EmbarkError | None = None  # Why it could not be saved.
    cleanup_error: EmbarkError | None = None
    """Why removing old checkpoints or copying the run's small files failed after the commit."""


class Checkpointer(ABC):
    """Saves and loads the arrays that a trainer names, one save at a time in a thread of its own."""

    def __init__(
        self, spec: RunSpec, run_dir: RunDir, ranks: Ranks, gather: Gather, layout: JsonDict, num_ranks: int
    ) -> None:
        """`layout` goes into `plan.txt`, `num_ranks` into the commit record."""
        self._spec, self._run_dir = spec, run_dir
        self._checkpoints = run_dir.checkpoints
        self._ranks, self._gather, self._layout, self._num_ranks = ranks, gather, layout, num_ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embark-save")
        self._running: Future[Saved] | None = None
        self._unfinished: set[int] = set()  # Retention ignores these, and the next commit removes them.
        self._damaged: set[int] = set()  # Retention ignores these too; each stays until its step is saved again.

    def begin(self, step: int, values: JsonDict, files: Mapping[str, bytes] | None = None) -> list[Saved]:
        """Copy the state and begin to write it, with these `files` beside it; returns the save before it, if that was
        still being written."""
        before = self.wait()
        started = time.perf_counter()
        pieces = self._copied(step)
        pause_s = time.perf_counter() - started
        self._running = self._thread.submit(self._write, step, pieces, values, files or {}, (started, pause_s))
        return before

    def done(self) -> list[Saved]:
        """Return the save that has ended since the last call, if one has."""
        return self.wait() if self._running and self._running.done() else []

    def wait(self) -> list[Saved]:
        """Wait for the save under way, and return it."""
        running, self._running = self._running, None
        return [running.result()] if running else []

    def add_values(self, step: int, values: JsonDict) -> EmbarkError | None:
        """Add to the commit record of a step, and apply retention again; returns why it could not be done."""
        try:
            self._from_first(lambda: self._add_values(step, values))
        except EmbarkError as error:
            return error
        return None

    def close(self) -> None:
        """Wait for a save under way."""
        self._thread.shutdown(wait=True)

    def load_newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Resume from the newest complete checkpoint; damaged ones are named and skipped. All ranks take the same."""
        found: list[Checkpoint]
        found, unfinished, unreadable = self._from_first(lambda: (
            self._checkpoints.committed(), self._checkpoints.unfinished(), self._checkpoints.unreadable()))
        self._unfinished = set(unfinished)
        damages = dict.fromkeys(unreadable, "its commit record cannot be read")
        for step in unfinished:
            if not found or step > found[-1].step:
                warn(f"{self._checkpoints.where(step)} has no commit record; skipped: its save never finished")
        intact = None
        for checkpoint in reversed(found):
            damage = self._damage(checkpoint)
            if not damage:
                intact = checkpoint
                break
            damages[checkpoint.step] = damage
        if damages and not intact:
            raise UserError(
                "\n  ".join([f"{self._run_dir.uri}: no checkpoint is intact; nothing was changed",
                            *(f"{checkpoint_name(step)}: {damages[step]}" for step in sorted(damages))]),
                "put the named files back, from a copy or by mounting their disk, and run the same command; or "
                    "start over from step 0: --fresh does so in a new directory, and moving the folder checkpoints/ "
                    "away in this one")
        for step in sorted(damages, reverse=True):
            if intact and step > intact.step:
                warn(f"{self._checkpoints.where(step)} is damaged; skipped: {damages[step]}")
        self._damaged = set(damages)
        if intact:
            self._on_all_ranks(partial(self._load_checkpoint, intact))
        return intact

    def start(self, other: WarmStart | None, warn: Callable[[str], None]) -> WarmStarted | None:
        """Begin at step 0, with initial weights or those of the `other` run's newest complete checkpoint."""
        if other is None:
            self._start()
            return None
        uri, found = self._from_first(other.checkpoints)
        run, damages = RunDir(uri), []
        for checkpoint in found:
            if damage := self._damage(checkpoint, run.checkpoints):
                damages.append(f"{run.checkpoints.where(checkpoint.step)} is damaged: {damage}")
                continue
            for text in damages:
                warn(f"{text}; train.warm_start takes step {checkpoint.step}")
            loaded: WarmStarted = self._on_all_ranks(partial(self._load_other, other, run, checkpoint))[0]
            return loaded
        raise UserError("\n  ".join(["train.warm_start: no checkpoint is intact", *damages]),
                        "put the named files back, or name another run or step")

    def load(self, checkpoint: Checkpoint) -> None:
        """Load one checkpoint; a damaged one is refused."""
        if damage := self._damage(checkpoint):
            raise UserError(f"{self._checkpoints.where(checkpoint.step)} is damaged: {damage}",
                            "put the file back, or name another step; `embark checkpoints RUN --verify` reads all")
        self._on_all_ranks(partial(self._load_checkpoint, checkpoint))

    def _load_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._load(CheckpointArrays(self._checkpoints.store, checkpoint.name), checkpoint.step)

    def _load_other(self, other: WarmStart, run: RunDir, checkpoint: Checkpoint) -> WarmStarted:
        other.check_ids(run, checkpoint)
        arrays = CheckpointArrays(run.checkpoints.store, checkpoint.name)
        tables = {table_weight(table.name, is_sequence=table.is_sequence) for table in self._spec.model.stored_tables()}
        refuse_other_weights(arrays, self._weight_sizes(), tables)
        self._load_weights(arrays)
        return other.started(run, checkpoint, arrays)

    def _start(self) -> None:  # noqa: B027
        """Give the model its initial weights, if building it did not: there is no checkpoint."""

    @abstractmethod
    def _copied(self, step: int) -> list[TensorChunk]:
        """Copy this rank's part of the state, so that training may change it."""

    @abstractmethod
    def _load(self, arrays: CheckpointArrays, step: int) -> None:
        """Load the saved state into the model."""

    @abstractmethod
    def _weight_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the complete sizes of tables and dense weights, by their names in a checkpoint."""

    @abstractmethod
    def _load_weights(self, arrays: CheckpointArrays) -> None:
        """Give a model with initial weights those of another run, except the rows beyond its tables."""

    def _damage(self, checkpoint: Checkpoint, checkpoints: CheckpointStore | None = None) -> str:
        checkpoints = checkpoints or self._checkpoints
        if self._spec.store.verify == "sizes":
            entries = self._from_first(lambda: checkpoints.store.list(checkpoint.name))
            there = {e.path.removeprefix(f"{checkpoint.name}/"): e.size_bytes for e in entries}
            wrong = [n for n in checkpoint.array_files if there.get(n) != checkpoint.files[n].size_bytes]
            return f"{wrong[0]} is missing or truncated" if wrong else ""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        damages = self._on_all_ranks(lambda: checkpoints.damage(checkpoint, rank, world_size))
        return next((damage for damage in damages if damage), "")

    def _write(
        self, step: int, pieces: list[TensorChunk], values: JsonDict, files: Mapping[str, bytes],
        times_s: tuple[float, float]
    ) -> Saved:
        """Write a checkpoint, in the thread. A failure on one rank is known to all before anything is committed."""
        started, pause_s = times_s
        folder, store = checkpoint_name(step), ChecksumWriter(self._checkpoints.store)
        error: EmbarkError | None = None
        cleanup_error: EmbarkError | None = None
        num_bytes = 0
        try:
            self._from_first(lambda: self._checkpoints.begin(step))
            entries = self._on_all_ranks(
                lambda: write_pieces(store, folder, self._ranks.rank, pieces, self._run_dir.attempt))
            marks = self._on_all_ranks(lambda: self._marks(folder, entries, store, files))
            num_bytes = sum(mark.size_bytes for of_rank in marks for mark in of_rank.values())
            self._from_first(lambda: self._commit(step, marks, values))
        except EmbarkError as raised:
            error = raised
            self._unfinished.add(step)
            if self._ranks.is_first and not self._run_dir.is_remote:  # else it helps to fill the disk
                with suppress(EmbarkError):
                    self._checkpoints.remove(step)
        else:
            try:
                self._from_first(self._clean_up)
            except EmbarkError as raised:  # it is committed, whatever else goes wrong
                cleanup_error = raised
        cost_s = time.perf_counter() - started
        return Saved(step, pause_s, cost_s, num_bytes, self._checkpoints.where(step), error, cleanup_error)

    def _marks(
        self, folder: str, entries: list[dict[str, TensorEntry]], store: ChecksumWriter, files: Mapping[str, bytes]
    ) -> dict[str, FileChecksum]:
        """Return the checksums of the files that this rank wrote; the first rank also writes the index and the small
        files."""
        if self._ranks.is_first:
            self._run_dir.check_lease()
            for name, data in ((INDEX, Index(merge_entries(entries)).to_json()),
                               (SPEC, to_toml(self._spec).encode()),
                               ("plan.txt", plan_text(self._layout).encode()), *files.items()):
                store.write(f"{folder}/{name}", data)
        return {path.removeprefix(f"{folder}/"): mark for path, mark in store.marks.items()}

    def _commit(self, step: int, marks: list[dict[str, FileChecksum]], values: JsonDict) -> None:
        files = {name: mark for of_rank in marks for name, mark in of_rank.items()}
        lease = {"lease": self._run_dir.lease.token} if self._run_dir.lease else {}
        self._checkpoints.commit(step, files, {"world_size": self._num_ranks, **lease, **values})
        self._unfinished.discard(step)
        self._damaged.discard(step)

    def _add_values(self, step: int, values: JsonDict) -> None:
        for checkpoint in self._checkpoints.committed():
            if checkpoint.step == step:
                self._checkpoints.commit(step, checkpoint.files, {**checkpoint.values, **values})
                self._clean_up()

    def _clean_up(self) -> None:
        """Remove checkpoints past retention, and publish the run's small files."""
        complete = [c for c in self._checkpoints.committed() if c.step not in self._unfinished | self._damaged]
        old = {step for step, reasons in reasons_by_spec(self._spec.store, complete).items() if not reasons}
        for unwanted in sorted(old | self._unfinished):
            self._checkpoints.remove(unwanted)
        self._unfinished.clear()
        self._run_dir.publish()

    def _on_all_ranks(self, call: Callable[[], Any]) -> list[Any]:
        """Call it on every rank and give each rank what all returned; if one raised, all raise that."""
        result: Any = None
        failure: EmbarkError | None = None
        try:
            result = call()
        except NotFound as error:  # of a checkpoint that was whole a moment ago
            failure = Fault(error.what, "start the run again: it resumes from its last complete checkpoint")
        except EmbarkError as error:
            failure = error
        except OSError as error:
            failure = Fault(str(error))
        except Exception as error:
            failure = Fault(f"rank {self._ranks.rank}: {type(error).__name__}: {error}",
                            "start the run again: it resumes from its last committed checkpoint")
        everywhere = self._gather((result, failure))
        for _, raised in everywhere:
            if raised:
                raise raised
        return [returned for returned, _ in everywhere]

    def _from_first(self, call: Callable[[], Any]) -> Any:
        """Call a function on the first rank, and return its result on every rank."""
        return self._on_all_ranks(lambda: call() if self._ranks.is_first else None)[0]


@dataclass
class CheckpointManager:
    """Begins saves, logs how they went, and learns from them when to save next."""

    checkpointer: Checkpointer
    schedule: CheckpointSchedule
    logger: RunLogger
    saved_step: int
    data: TrainingData
    values: Callable[[], JsonDict]
    """Returns the entries of each commit record besides its evaluation, at the time of the save."""
    _step_s = 0.0
    _reason = ""
    _longest_s = 0.0

    def longest_s(self) -> float:
        """Return the duration of the longest save so far, from its beginning to the commit."""
        return self._longest_s

    def is_due(self, step: int) -> bool:
        return self.schedule.is_due(step) and step > self.saved_step

    def begin(self, step: int, evaluated: JsonDict, step_s: float) -> None:
        """Copy the state; writing continues in the background."""
        self._step_s = max(step_s, 1e-6)
        self._log(self.checkpointer.begin(step, {"eval": evaluated, **self.values()},
                                           self.data.checkpoint_files(step)))
        self.saved_step = step
        self.schedule.begun(step, self._step_s)

    def log_done(self) -> None:
        """Log a save that has finished meanwhile."""
        self._log(self.checkpointer.done())

    def wait(self) -> None:
        self._log(self.checkpointer.wait())

    def finish(self, step: int, evaluated: JsonDict, *, wants_last: bool) -> None:
        """Save for the last time, and wait. A failure fails the run: no later save could make up for it."""
        if wants_last and step > self.saved_step:
            self.begin(step, evaluated, self._step_s)
        failed = self._log(self.checkpointer.wait(), is_last=True)
        if failed and failed.error:
            raise failed.error

    def add_evaluation(self, step: int, evaluated: JsonDict) -> None:
        """Add an evaluation to the commit record of the last save, which came before it."""
        if step == self.saved_step and (problem := self.checkpointer.add_values(
                step, {"eval": evaluated, **self.values()})):
            text = f"step {step} is saved, but without its evaluation: {problem.what}. {problem.fix}"
            self.logger.warn(text.strip())

    def _log(self, saves: Sequence[Saved], *, is_last: bool = False) -> Saved | None:
        failed = None
        for saved in saves:
            if isinstance(lost := saved.error or saved.cleanup_error, RunInUse):
                raise lost
            if saved.error:
                failed = saved
                if not is_last:
                    self.logger.warn(f"step {saved.step} could not be saved: {saved.error.what}. Training continues; "
                                      f"the previous checkpoint is intact. {saved.error.fix}".strip())
                continue
            self._longest_s = max(self._longest_s, saved.cost_s)
            self.logger.log("save", {"step": saved.step, "path": saved.uri, "bytes": saved.num_bytes,
                                      "save_s": saved.cost_s, "pause_s": saved.pause_s})
            self.data.committed(saved.step)
            if problem := saved.cleanup_error:
                self.logger.warn(f"step {saved.step} is saved, but {problem.what}. {problem.fix}".strip())
            choice = self.schedule.saved(saved.step, pause_s=saved.pause_s, cost_s=saved.cost_s,
                                          step_s=max(self._step_s, 1e-6))
            if is_last:
                continue
            if choice and choice.why != self._reason:
                self._reason = choice.why
                self.logger.note(choice.why)
            elif self.schedule.is_grace_too_short(saved.cost_s) and not self._reason:
                self._reason = "a save takes longer than the notice of a preemption"
                self.logger.warn(f"a save takes {saved.cost_s:.1f} s, longer than the notice a preempted machine gets:"
                                  ' save more often, or set store.checkpoint_every = "auto"')
        return failed

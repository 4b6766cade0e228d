"""A run's checkpoints: which are complete, damaged or unfinished, why each is kept, which to prune, and which one a
person names."""

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Literal

from embark.errors import UserError
from embark.spec import RunSpec, StoreSpec, resolve
from embark.spec.run import DATA, KEY
from embark.values import frozen
from .checkpoint_store import (
    CHECKPOINT_NAME,
    COMMIT_FILE,
    LOWER_IS_BETTER,
    Checkpoint,
    Reason,
    best_step_of,
    metric_of,
    reasons_by_spec,
)
from .errors import NotFound
from .lease import TTL_S, acquire, current_holder
from .object_store import Entry, Progress, count_progress
from .run_dir import SPEC, RunDir, find_run

State = Literal["committed", "damaged", "unfinished"]
MAY_BE_LIVE_S = 3600.0
"""A save that wrote something this recently may be in progress: a bucket shows nothing of a large file yet."""


@frozen
class CheckpointInfo:
    """One checkpoint, or what an unfinished save left of one."""

    step: int
    state: State
    size_bytes: int
    time_s: float | None  # Unix time of its commit, or of its newest file.
    num_ranks: int | None = None
    metric: float | None = None
    metric_step: int | None = None  # The step at which the metric was measured: at or before the save.
    kept: tuple[Reason, ...] = ()
    damage: tuple[str, ...] = ()  # Arrays that are damaged: the run does not resume from it.
    changed_texts: tuple[str, ...] = ()  # `spec.toml` or `plan.txt` if they changed: the run resumes all the same.
    uri: str = ""
    committed: Checkpoint | None = field(default=None, repr=False)


@frozen
class CheckpointList:
    """All of a run's checkpoints, oldest first."""

    run: str
    best_by: str | None  # The metric by which the best are kept.
    checkpoints: tuple[CheckpointInfo, ...]
    rules: StoreSpec | None = field(repr=False)
    """The run's `[store]`; without it nothing is known about what to keep."""
    rules_error: str = ""  # Why there are no rules.
    held_by: str = ""  # The process that trains the run.

    @property
    def size_bytes(self) -> int:
        """Bytes that `verify` reads."""
        return sum(one.committed.num_bytes for one in self.checkpoints if one.committed)

    def num(self, state: State) -> int:
        return sum(one.state == state for one in self.checkpoints)

    def committed(self, step: int) -> Checkpoint:
        """Return the committed checkpoint of `step`, or raise a UserError."""
        for one in self.checkpoints:
            if one.step == step and one.committed:
                return one.committed
        steps = ", ".join(f"{one.step}" for one in self.checkpoints if one.committed) or "none"
        raise UserError(f"step {step}: no committed checkpoint", f"committed steps: {steps}")

    def best(self) -> Checkpoint:
        """Return the best checkpoint by early stopping; without it, by `store.best_by` of those evaluated when
        saved."""
        committed = [one for one in self.checkpoints if one.committed]
        if committed and (step := best_step_of(committed[-1].committed)):  # type: ignore[arg-type]
            return self.committed(step)
        measured = [(one.metric, one.step) for one in committed if one.metric is not None
                    and math.isfinite(one.metric) and one.metric_step == one.step]
        if not measured:
            raise UserError(f"{self.run}: no checkpoint was evaluated, so none is the best",
                            "train it with train.early_stopping_patience, or name a step; `embark checkpoints RUN` "
                                "lists them")
        return self.committed((min if self.best_by in LOWER_IS_BETTER else max)(measured)[1])


@frozen
class PruneDecision:
    """Whether pruning removes a checkpoint that no rule keeps, and why."""

    step: int
    size_bytes: int
    is_removed: bool
    reason: str


@frozen
class PruneResult:
    """The checkpoints that pruning removes, or would remove, and those that it leaves although no rule keeps them;
    oldest first."""

    run: str
    dry_run: bool
    checkpoints: tuple[PruneDecision, ...]

    @property
    def removed(self) -> tuple[PruneDecision, ...]:
        return tuple(one for one in self.checkpoints if one.is_removed)

    @property
    def removed_bytes(self) -> int:
        return sum(one.size_bytes for one in self.removed)


def list_checkpoints(run: RunDir | str) -> CheckpointList:
    """List a run's checkpoints by names, sizes and commit files; no tensor is read."""
    run = find_run(run) if isinstance(run, str) else run
    files: dict[str, list[Entry]] = defaultdict(list)
    for entry in [*run.checkpoints.store.list(), *run.checkpoints.store.unfinished()]:
        files[entry.path.split("/")[0]].append(entry)
    committed = {checkpoint.name: checkpoint for checkpoint in run.checkpoints.committed()}
    found = [
        replace(_info(int(match[1]), entries, committed.get(name)), uri=run.checkpoints.where(int(match[1])))
        for name, entries in files.items() if (match := CHECKPOINT_NAME.match(name))
    ]
    rules, rules_error = _rules_of(run)
    if rules:
        complete = [one.committed for one in found if one.state == "committed" and one.committed]
        reasons = reasons_by_spec(rules, complete)
        found = [_with_rules(one, rules, reasons.get(one.step, ())) for one in found]
    return CheckpointList(run.uri, rules.best_by if rules else None, tuple(sorted(found, key=lambda one: one.step)),
                          rules, rules_error, str(current_holder(run.store) or ""))


def verify(run: RunDir, listed: CheckpointList, progress: Progress | None = None) -> CheckpointList:
    """Read every byte of every committed checkpoint and compare it with the checksums of its commit file."""
    count = count_progress(progress, listed.size_bytes)
    return replace(listed, checkpoints=tuple(_verified(run, one, count) for one in listed.checkpoints))


def decide_pruning(listed: CheckpointList, now_s: float) -> PruneResult:
    """Decide what pruning would remove under the run's own rules. A damaged checkpoint does not count as kept, so that
    no complete one is removed for its sake; it is left in place, so that it can be examined."""
    if not listed.rules:
        raise UserError(f"what to keep is not known: {listed.rules_error}",
                        "restore the run's spec.toml, whose [store] says it, or remove checkpoints by hand")
    newest_s = max((one.time_s or 0.0 for one in listed.checkpoints if one.state == "committed"), default=0.0)
    decisions = tuple(_decide(one, now_s, newest_s) for one in listed.checkpoints if not one.kept)
    return PruneResult(listed.run, dry_run=True, checkpoints=decisions)


def prune(run: RunDir, planned: PruneResult, notify: Callable[[str], None] = lambda _: None) -> PruneResult:
    """Remove what was decided; raises `RunInUse` while a process trains the run. `notify` is called with what is waited
    for."""
    if planned.removed:
        lease = acquire(run.store, TTL_S, notify)
        try:
            held = replace(run, lease=lease)
            for one in planned.removed:
                held.checkpoints.remove(one.step)
        finally:
            lease.release()
    return replace(planned, dry_run=False)


def _info(step: int, entries: Sequence[Entry], committed: Checkpoint | None) -> CheckpointInfo:
    there = {entry.path.partition("/")[2]: entry for entry in entries}
    size_bytes = sum(entry.size_bytes for entry in entries)
    time_s = max((entry.modified_s for entry in entries if entry.modified_s), default=None)
    if not committed:
        if COMMIT_FILE not in there and "" not in there:
            return CheckpointInfo(step, "unfinished", size_bytes, time_s)
        return CheckpointInfo(step, "damaged", size_bytes, time_s,
                              damage=(f"{COMMIT_FILE} cannot be read, or is of another step" if COMMIT_FILE in there
                                      else "a link to a folder that is not there",))

    def wrong(names: Sequence[str]) -> tuple[str, ...]:
        sizes = {name: there[name].size_bytes if name in there else None for name in names}
        return tuple(f"{committed.name}/{name}: {'is missing' if size is None else 'is cut short or too long'}"
                     for name, size in sizes.items() if size != committed.files[name].size_bytes)

    damage = wrong(committed.array_files)
    commit_s, ranks = committed.values.get("time_s"), committed.values.get("world_size")
    if not isinstance(commit_s, int | float):
        commit_s = there[COMMIT_FILE].modified_s if COMMIT_FILE in there else None
    return CheckpointInfo(
        step, "damaged" if damage else "committed", committed.num_bytes, commit_s,
        num_ranks=ranks if isinstance(ranks, int) else None, damage=damage,
        changed_texts=wrong(committed.text_files), committed=committed
    )


def _with_rules(one: CheckpointInfo, rules: StoreSpec, kept: tuple[Reason, ...]) -> CheckpointInfo:
    if not one.committed:
        return one
    metric = metric_of(rules, one.committed)
    step = one.committed.values.get("eval", {}).get("step") if metric is not None else None
    return replace(one, metric=metric, metric_step=step if isinstance(step, int) else None, kept=kept)


def _rules_of(run: RunDir) -> tuple[StoreSpec | None, str]:
    try:
        text = run.store.read(SPEC).decode()
        return resolve(tomllib.loads(text), where=run.store.where(SPEC), text=text).store, ""
    except NotFound:
        return None, f"{run.store.where(SPEC)} is not there"
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        return None, f"{run.store.where(SPEC)} cannot be read: {error}"
    except UserError as error:
        return None, error.what


def _verified(run: RunDir, one: CheckpointInfo, count: Callable[[int], None]) -> CheckpointInfo:
    if not one.committed:
        return one
    damage, changed = (tuple(run.checkpoints.damages(one.committed, names, on_bytes=count))
                       for names in (one.committed.array_files, one.committed.text_files))
    return replace(one, state="damaged" if damage else "committed", damage=damage, changed_texts=changed)


def _decide(one: CheckpointInfo, now_s: float, newest_commit_s: float) -> PruneDecision:
    if one.state == "committed":
        return PruneDecision(one.step, one.size_bytes, True, "no rule of [store] keeps it")
    if one.state == "damaged":
        return PruneDecision(one.step, one.size_bytes, False, f"damaged: {one.damage[0]}; remove it by hand")
    # A run saves one checkpoint at a time: a save from before the newest commit is not in progress.
    age_s = now_s - (one.time_s or 0.0)
    if age_s < MAY_BE_LIVE_S and (one.time_s or 0.0) >= newest_commit_s:
        return PruneDecision(one.step, one.size_bytes, False,
                             f"unfinished, but modified {age_s / 60:.0f} min ago: its save may be in progress")
    return PruneDecision(one.step, one.size_bytes, True, "its save never finished")


_AT = re.compile(r"(.+)@(\d+|best)")


@frozen
class TrainedRun:
    """A checkpoint, and the spec that was saved with it."""

    run_dir: RunDir
    checkpoint: Checkpoint
    spec: RunSpec
    best_step: int | None = None  # The best by early stopping, if that checkpoint exists.

    @property
    def fingerprint(self) -> str:
        """Checksum of the data that the run was trained on."""
        return str((self.checkpoint.values.get(KEY) or {}).get(DATA, ""))


def find_trained(run: str, step: int | None = None, sets: Sequence[str] = ()) -> TrainedRun:
    """Find the best checkpoint of a run with early stopping, and of another one the newest; or that of `step`, which
    `RUN@STEP` names too. `sets` are `key=value` settings over its spec."""
    run, which = split_run(run)
    if which and step is not None:
        raise UserError(f"{run}@{which} and step {step} name two checkpoints", "name one")
    run_dir = find_run(run)
    listed = list_checkpoints(run_dir)
    committed = [one.committed for one in listed.checkpoints if one.committed]
    if not committed:
        raise UserError(f"{run_dir.uri}: has no checkpoint", "train it with store.checkpoint_at_end = true")
    best = best_step_of(committed[-1])
    best = best if best in {one.step for one in committed} else None
    if which == "best":
        checkpoint = listed.best()
    elif which or step is not None:
        checkpoint = listed.committed(int(which) if which else step or 0)
    else:
        checkpoint = committed[-1] if best is None else listed.committed(best)
    store = run_dir.checkpoints.store
    path = f"{checkpoint.name}/{SPEC}"
    text = store.read(path).decode("utf-8", "replace")
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{store.where(path)}: cannot be read: {error}",
                        "name another checkpoint with --step; `embark checkpoints RUN` lists them") from None
    return TrainedRun(run_dir, checkpoint, resolve(raw, sets, where=store.where(path), text=text), best)


def split_run(word: str) -> tuple[str, str]:
    """Split `RUN@best` and `RUN@12` into the run and its checkpoint; the second is empty for any other word."""
    match = _AT.fullmatch(word)
    return (match[1], match[2]) if match else (word, "")

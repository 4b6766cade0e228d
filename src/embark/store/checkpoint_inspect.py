"""What stands in a run's checkpoint store: every checkpoint, whether it is whole, why it is kept, and what may go."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from embark.errors import UserError
from embark.spec import StoreSpec, resolve
from embark.store.checkpoint_store import CHECKPOINT_NAME, COMMIT_FILE, Checkpoint
from embark.store.errors import NotFound
from embark.store.object_store import Entry
from embark.store.retention import Reason, metric_of, reasons_by_spec
from embark.store.run_dir import RunDir

State = Literal["committed", "damaged", "unfinished"]
OnBytes = Callable[[int], None]
"""Called with the bytes looked at since the last call, from several threads."""
MAY_BE_LIVE_S = 3600.0
"""A save that wrote something so recently may still be going on: of a large file a bucket shows nothing yet."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint, or what a save that never ended left of one."""

    step: int
    state: State
    size_bytes: int
    time_s: float | None
    """Unix time of its commit, or of its newest file."""
    num_ranks: int | None = None
    metric: float | None = None
    metric_step: int | None = None
    """When that was measured: at or before the save."""
    kept: tuple[Reason, ...] = ()
    damage: tuple[str, ...] = ()
    committed: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """All of a run's, oldest first."""

    standing: tuple[CheckpointInfo, ...]
    rules: StoreSpec | None
    """The run's own `[store]`; without it nothing is known to be kept."""
    no_rules: str = ""
    """Why there are none."""

    def committed(self, step: int) -> Checkpoint:
        """That of `step`; it is an error that there is none."""
        for one in self.standing:
            if one.step == step and one.committed:
                return one.committed
        steps = ", ".join(f"{one.step}" for one in self.standing if one.committed) or "there is none"
        raise UserError(f"step {step}: no committed checkpoint", fix=f"committed steps: {steps}")


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """What pruning does with one of them."""

    step: int
    size_bytes: int
    goes: bool
    why: str


def take_inventory(run: RunDir) -> Inventory:
    """Look at the names, sizes and marks; the tensors are not read."""
    files: dict[str, list[Entry]] = defaultdict(list)
    for entry in [*run.checkpoints.store.list(), *run.checkpoints.store.unfinished()]:
        files[entry.path.split("/")[0]].append(entry)
    committed = {checkpoint.name: checkpoint for checkpoint in run.checkpoints.committed()}
    standing = [
        _standing(int(match[1]), entries, committed.get(name))
        for name, entries in files.items() if (match := CHECKPOINT_NAME.match(name))
    ]
    rules, no_rules = _rules_of(run)
    if rules:
        whole = [one.committed for one in standing if one.state == "committed" and one.committed]
        reasons = reasons_by_spec(rules, whole)
        standing = [_with_rules(one, rules, reasons.get(one.step, ())) for one in standing]
    return Inventory(tuple(sorted(standing, key=lambda one: one.step)), rules, no_rules)


def num_bytes_to_verify(stock: Inventory) -> int:
    """What `verify` will read."""
    return sum(one.committed.num_bytes for one in stock.standing if one.committed)


def verify(run: RunDir, stock: Inventory, tell: OnBytes | None = None) -> Inventory:
    """Read every byte of every committed one and compare it with its mark."""
    return replace(stock, standing=tuple(_verified(run, one, tell) for one in stock.standing))


def decide_pruning(stock: Inventory, now_s: float) -> list[PruneDecision]:
    """What the run's own rules let go, and what is left alone although no rule keeps it; oldest first.

    A damaged one counts for nothing, so that no whole one goes for its sake; and stays, so that it can be looked at.
    """
    if not stock.rules:
        raise UserError(f"what to keep is not known: {stock.no_rules}",
                        fix="the run's spec.toml says it, in [store]; put it back, or remove checkpoints by hand")
    newest_s = max((one.time_s or 0.0 for one in stock.standing if one.state == "committed"), default=0.0)
    return [_verdict(one, now_s, newest_s) for one in stock.standing if not one.kept]


def prune(run: RunDir, verdicts: Sequence[PruneDecision], removed: Callable[[PruneDecision], None] | None = None) -> None:
    """Remove what goes."""
    for verdict in verdicts:
        if verdict.goes:
            run.checkpoints.remove(verdict.step)
            if removed:
                removed(verdict)


def _standing(step: int, entries: Sequence[Entry], committed: Checkpoint | None) -> CheckpointInfo:
    there = {entry.path.partition("/")[2]: entry for entry in entries}
    size_bytes = sum(entry.size_bytes for entry in entries)
    time_s = max((entry.modified_s for entry in entries if entry.modified_s), default=None)
    if not committed:
        if COMMIT_FILE not in there:
            return CheckpointInfo(step, "unfinished", size_bytes, time_s)
        return CheckpointInfo(step, "damaged", size_bytes, time_s, damage=(f"{COMMIT_FILE} cannot be read, or is of another step",))
    wrong = tuple(
        f"{committed.name}/{name}: {'is missing' if name not in there else 'is cut short or too long'}"
        for name, mark in committed.files.items()
        if name not in there or there[name].size_bytes != mark.size_bytes
    )
    said_s, ranks = committed.values.get("time_s"), committed.values.get("world_size")
    return CheckpointInfo(
        step, "damaged" if wrong else "committed", committed.num_bytes,
        float(said_s) if isinstance(said_s, int | float) else there[COMMIT_FILE].modified_s if COMMIT_FILE in there else None,
        num_ranks=ranks if isinstance(ranks, int) else None, damage=wrong, committed=committed,
    )


def _with_rules(one: CheckpointInfo, rules: StoreSpec, kept: tuple[Reason, ...]) -> CheckpointInfo:
    if not one.committed:
        return one
    metric = metric_of(rules, one.committed)
    step = one.committed.values.get("eval", {}).get("step") if metric is not None else None
    return replace(one, metric=metric, metric_step=step if isinstance(step, int) else None, kept=kept)


def _rules_of(run: RunDir) -> tuple[StoreSpec | None, str]:
    try:
        text = run.store.read("spec.toml").decode()
        return resolve(tomllib.loads(text), where=run.store.where("spec.toml"), text=text).store, ""
    except NotFound:
        return None, f"{run.store.where('spec.toml')} is not there"
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return None, f"{run.store.where('spec.toml')} cannot be read: {error}"
    except UserError as error:
        return None, error.what


def _verified(run: RunDir, one: CheckpointInfo, tell: OnBytes | None) -> CheckpointInfo:
    if not one.committed:
        return one
    damage = tuple(run.checkpoints.damages(one.committed, tell=tell))
    return replace(one, state="damaged" if damage else "committed", damage=damage)


def _verdict(one: CheckpointInfo, now_s: float, newest_commit_s: float) -> PruneDecision:
    if one.state == "committed":
        return PruneDecision(one.step, one.size_bytes, True, "no rule of [store] keeps it")
    if one.state == "damaged":
        return PruneDecision(one.step, one.size_bytes, False, f"damaged: {one.damage[0]}; remove it by hand")
    # A run saves one at a time, so that a save from before the newest commit is not going on.
    age_s = now_s - (one.time_s or 0.0)
    if age_s < MAY_BE_LIVE_S and (one.time_s or 0.0) >= newest_commit_s:
        return PruneDecision(one.step, one.size_bytes, False,
                       f"unfinished, but touched {age_s / 60:.0f} min ago: it may be being written")
    return PruneDecision(one.step, one.size_bytes, True, "its save never ended")

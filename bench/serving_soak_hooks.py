"""What `serving_soak.py` does inside a process of Embark: hold a publisher at a point, end it there, plant a defect."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Patches = list[tuple[Any, str, Any]]

PLANT = "EMBARK_SOAK_PLANT"
HOLD_S = 300.0


def disturb(rank: int, plant: str = "", hold: str = "", die_after: str = "") -> None:
    """Plant a defect, if one is named; `hold` is a file at which a publisher with a verdict waits until it is gone;
    `die_after` is a function of the publisher behind whose first call it is killed."""
    if plant:
        os.environ[PLANT] = plant  # for `planted/sitecustomize.py`, in processes that this one starts
        plant_defect(plant)
    if hold:
        hold_verdict(Path(hold))
    if die_after:
        from embark.publish import publisher

        call = getattr(publisher, die_after)

        def call_and_die(*words: Any, **more: Any) -> None:
            call(*words, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(publisher, die_after, call_and_die)


def hold_verdict(mark: Path) -> None:
    """Say by a file that the verdict is made, and wait until the file is gone."""
    from embark.publish import publisher

    judge = publisher.judge

    def judge_and_wait(*words: Any, **more: Any) -> Any:
        verdict, until = judge(*words, **more), time.monotonic() + HOLD_S
        mark.touch()
        while mark.exists() and time.monotonic() < until:
            time.sleep(0.005)
        return verdict

    publisher.judge = judge_and_wait


def plant_defect(name: str) -> Callable[[], None]:
    """Plant a defect in this process; return what takes it out again."""
    patches = PLANTS[name].patches()
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    for owner, attribute, planted in patches:
        setattr(owner, attribute, planted)

    def take_out() -> None:
        for owner, attribute, original in before:
            setattr(owner, attribute, original)

    return take_out


def parent_by_number() -> Patches:
    """What a version is, its number says: a delta is written into the tables of whatever had its parent's number."""
    from embark.export import artifact, delta, write_version  # noqa: F401
    from embark.publish import publisher  # noqa: F401

    original = delta.identity_of
    return [(module, "identity_of", lambda committed: str(committed.step)) for module in list(sys.modules.values())
            if getattr(module, "identity_of", None) is original]


def reused_number() -> Patches:
    """The number of a version that was deleted is given to the next."""
    from embark.export import write_version

    return [(write_version, "_next_number", lambda versions: 1 + max(
        (0, *(one.step for one in versions.committed()), *versions.unfinished(), *versions.unreadable())))]


def trained_twice() -> Patches:
    """A resumed follower reads from the last record on that it has trained, and not from the one behind it."""
    from embark.data.stream.files_reader import FilesReader

    open_at = FilesReader.open

    def open_before(self: FilesReader, offsets: Any) -> Any:
        earlier = {name: [value[0], value[1] - 1, *value[2:]] if isinstance(value, list) and value[1] > 0 else value
                   for name, value in offsets.items()}
        return open_at(self, earlier)

    return [(FilesReader, "open", open_before)]


def unchecked_switch() -> Patches:
    """A server switches to a version whose files it has not compared with their checksums."""
    from embark.export import artifact
    from embark.store import CheckpointStore

    damages = CheckpointStore.damages

    def absences(self: CheckpointStore, committed: Any, *words: Any) -> list[str]:
        there = {entry.path for entry in self.store.list(committed.name)}
        return [one for one in damages(self, committed, *words) if one.partition(":")[0] not in there]

    return [(CheckpointStore, "damages", absences), (artifact, "_check_tensors", lambda *_, **__: None)]


def unseen_rollback() -> Patches:
    """A publisher makes its version current, whatever was made current since its verdict."""
    from embark.publish import publisher

    def settled(versions: Any, trained: Any, candidate: Any, against: Any, record: dict[str, Any]) -> dict[str, Any]:
        if record["passed"]:
            publisher.set_current(versions, candidate.step, reason="publish")
        return record

    return [(publisher, "_settled", settled)]


class Plant(NamedTuple):
    """A defect: what it replaces, and the actions that show it."""

    patches: Callable[[], Patches]
    actions: str


PLANTS = {
    "parent_by_number": Plant(parent_by_number, "wipe"),
    "reused_number": Plant(reused_number, "reuse"),
    "trained_twice": Plant(trained_twice, "kill_follower"),
    "unchecked_switch": Plant(unchecked_switch, "damage_next"),
    "unseen_rollback": Plant(unseen_rollback, "roll_back_while_judged"),
}

"""What `serving_soak.py` does inside a process of Embark: hold a publisher at a point, end it there, plant a defect."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

PLANTS = ("parent_by_number", "reused_number", "trained_twice", "unchecked_switch", "unseen_rollback")
PLANT = "EMBARK_SOAK_PLANT"
HOLD_S = 60.0


def disturb(rank: int, plant: str = "", hold: str = "", die_after: str = "") -> None:
    """Plant a defect, if one is named; `hold` is a file at which a publisher with a verdict waits until it is gone;
    `die_after` is a function of the publisher behind whose first call it is killed."""
    if plant:
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


def plant_defect(name: str) -> None:
    """Plant a defect in this process, and by `planted/sitecustomize.py` in those that it starts."""
    os.environ[PLANT] = name
    {"parent_by_number": plant_parent_by_number, "reused_number": plant_reused_number,
     "trained_twice": plant_trained_twice, "unchecked_switch": plant_unchecked_switch,
     "unseen_rollback": plant_unseen_rollback}[name]()


def plant_parent_by_number() -> None:
    """What a version is, its number says: a delta is written into the tables of whatever had its parent's number."""
    from embark.export import artifact, delta, write_version
    from embark.publish import publisher

    original = delta.identity_of
    for module in (artifact, delta, write_version, publisher, *sys.modules.values()):
        if getattr(module, "identity_of", None) is original:
            module.identity_of = lambda committed: str(committed.step)  # type: ignore[attr-defined]


def plant_reused_number() -> None:
    """The number of a version that was deleted is given to the next."""
    from embark.export import write_version

    write_version._next_number = lambda versions: 1 + max(
        (0, *(one.step for one in versions.committed()), *versions.unfinished(), *versions.unreadable()))


def plant_trained_twice() -> None:
    """A resumed follower reads from the last record on that it has trained, and not from the one behind it."""
    from embark.data.stream.files_reader import FilesReader

    open_at = FilesReader.open

    def open_before(self: FilesReader, offsets: Any) -> Any:
        earlier = {name: [value[0], value[1] - 1, *value[2:]] if isinstance(value, list) and value[1] > 0 else value
                   for name, value in offsets.items()}
        return open_at(self, earlier)

    FilesReader.open = open_before  # type: ignore[method-assign]


def plant_unchecked_switch() -> None:
    """A server switches to a version whose files it has not compared with their checksums."""
    from embark.export import artifact
    from embark.store import CheckpointStore

    CheckpointStore.damages = lambda *_, **__: []  # type: ignore[method-assign]
    artifact._check_tensors = lambda *_, **__: None


def plant_unseen_rollback() -> None:
    """A publisher makes its version current, whatever was made current since its verdict."""
    from embark.publish import publisher

    set_current = publisher.set_current
    publisher._switch = lambda versions, trained, candidate, record: (  # type: ignore[assignment]
        record.pop(publisher.JUDGED_AGAINST),
        record["passed"] and set_current(versions, candidate.step, reason="publish"),
        publisher.write_gate(versions, candidate.step, record), True)[-1]

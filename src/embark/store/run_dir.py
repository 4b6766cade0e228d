"""The layout of a run on disk, and what in it counts as there."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_NAME = re.compile(r"^step-(\d{9,})$")
COMMIT_MARK = "commit.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was committed whole."""

    path: Path
    step: int
    commit: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunDir:
    """`<root>/<name>`: spec, plan, events, curves, checkpoints."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.txt"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of `step` goes. Until it is committed nobody takes it for one."""
        return self.checkpoints / f"step-{step:09d}"

    def committed(self) -> list[Checkpoint]:
        """The whole checkpoints, oldest first."""
        found = (read_checkpoint(path) for path in sorted(self.checkpoints.glob("step-*")))
        return sorted((c for c in found if c), key=lambda c: c.step)

    def newest(self) -> Checkpoint | None:
        """The last whole checkpoint."""
        whole = self.committed()
        return whole[-1] if whole else None

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep`. The mark goes first, so that a half-removed one is none."""
        for checkpoint in self.committed()[:-keep]:
            (checkpoint.path / COMMIT_MARK).unlink()
            shutil.rmtree(checkpoint.path)


def numbered(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, …: the first that does not exist yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def begin_checkpoint(path: Path) -> None:
    """An empty directory, with what an unfinished save left there gone."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def commit_checkpoint(path: Path, values: dict[str, Any]) -> None:
    """Make the checkpoint exist: the sizes of its files, written last and in one rename."""
    files = {f.relative_to(path).as_posix(): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()}
    write_whole(path / COMMIT_MARK, json.dumps({**values, "files": files}, indent=1) + "\n")


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or None unless every file its mark names is there at its full size."""
    match = STEP_NAME.match(path.name)
    try:
        commit = json.loads((path / COMMIT_MARK).read_text())
        is_whole = all((path / name).stat().st_size == size for name, size in commit["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return Checkpoint(path, int(match[1]), commit) if match and is_whole else None


def write_whole(path: Path, text: str) -> None:
    """Write so that a reader sees the old text or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)

"""Runs that were handed over, one small file each, so that any terminal of this user can follow them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from embark.errors import UserError, nearest
from embark.launch.backend import RunHandle
from embark.store import write_atomic

FORMAT = 1


class RunNotLaunchedHere(UserError):
    """No run of that name was launched from here."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as its file has it."""

    handle: RunHandle
    spec_toml: str
    submitted_s: float
    is_submitted: bool
    """False: the launch was cut off, and only a part of it may be there."""
    last_state: str = ""
    last_reason: str = ""
    """As last seen: a cluster forgets finished jobs after a day."""
    path: Path | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RegistryContents:
    """All of them, newest first, and the files that cannot be read."""

    runs: tuple[RunRecord, ...]
    broken: tuple[Path, ...]


def save_record(run: RunRecord) -> RunRecord:
    """Written whole or not at all; of the same run at the same place, instead of the older one."""
    path = run.path or record_path(run.handle)
    handle = {**asdict(run.handle), "where": dict(run.handle.where)}
    told = {
        "format": FORMAT, "handle": handle, "spec_toml": run.spec_toml, "submitted_s": run.submitted_s,
        "is_submitted": run.is_submitted, "last_state": run.last_state, "last_reason": run.last_reason,
    }
    try:
        write_atomic(path, json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: the run could not be remembered",
                        fix="set XDG_DATA_HOME to a folder that can be written") from error
    return RunRecord(run.handle, run.spec_toml, run.submitted_s, run.is_submitted, run.last_state, run.last_reason,
                      path)


def delete_record(run: RunRecord) -> None:
    if run.path is not None:
        run.path.unlink(missing_ok=True)


def list_runs(context: str = "") -> RegistryContents:
    """`context`: only those of it."""
    runs, broken = [], []
    folder = registry_dir()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        read = _read(path)
        if read is None:
            broken.append(path)
        elif not context or read.handle.where.get("context") == context:
            runs.append(read)
    return RegistryContents(tuple(sorted(runs, key=lambda run: -run.submitted_s)), tuple(broken))


def find_run(word: str, context: str = "") -> RunRecord:
    """By its name; of two with one name, by NAME@PLACE, or by kubectl's context."""
    runs = list_runs(context).runs
    name, _, place = word.partition("@")
    found = [run for run in runs if run.handle.name == name and (not place or location_hash(run.handle) == place)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{name} was launched in {len(found)} places",
                        fix="one of: " + ", ".join(f"{name}@{location_hash(run.handle)}" for run in found))
    raise RunNotLaunchedHere(f"{word}: no run of that name was launched from here", fix=_known(name, runs))


def location_hash(handle: RunHandle) -> str:
    """A short mark of where it is."""
    keys = ("context", "namespace", "folder")
    place = json.dumps([handle.backend, *(str(handle.where.get(key, "")) for key in keys)])
    return hashlib.sha256(place.encode()).hexdigest()[:6]


def record_path(handle: RunHandle) -> Path:
    return registry_dir() / f"{handle.name}.{location_hash(handle)}.json"


def registry_dir() -> Path:
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "embark" / "runs"


def now_s() -> float:
    return time.time()


def _read(path: Path) -> RunRecord | None:
    """None where it is not a file of ours, whole."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        handle = told["handle"]
        cost = handle["usd_per_hour"]
        return RunRecord(
            RunHandle(
                name=str(handle["name"]), backend=str(handle["backend"]),
                where={str(k): v if isinstance(v, int) else str(v) for k, v in handle["where"].items()},
                title=str(handle["title"]), run_uri=str(handle["run_uri"]),
                usd_per_hour=None if cost is None else float(cost),
            ),
            spec_toml=str(told["spec_toml"]), submitted_s=float(told["submitted_s"]),
            is_submitted=bool(told["is_submitted"]), last_state=str(told["last_state"]),
            last_reason=str(told["last_reason"]), path=path,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _known(name: str, runs: Sequence[RunRecord]) -> str:
    return nearest(name, {run.handle.name for run in runs}) if runs else "embark launch SPEC hands one over"

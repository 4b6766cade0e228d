"""Launched runs: one small file each, so that any terminal of this user finds them; their state, and how they ended."""

import fcntl
import hashlib
import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from embark.catalog.load import user_data_dir
from embark.errors import EmbarkError, UserError, nearest
from embark.events.events import Event, parse_event, split_lines
from embark.spec import RunSpec, parse_spec
from embark.store import BRIEF_RETRY, EVENTS, ObjectStore, open_store, write_atomic
from embark.values import JsonDict, frozen
from .backend import DamagedRecord, Replica, RunEvent, RunHandle, Status, backend_of
from .shell import Notify, Shell

FORMAT = 2
BLOCK_BYTES = 8 << 20  # One request each.
WRITABLE = "set XDG_DATA_HOME to a folder that can be written"


@frozen
class RunRecord:
    """A launched run as its file in the registry has it."""

    handle: RunHandle
    spec_toml: str
    submitted_s: float
    is_submitted: bool  # False: the launch was interrupted, and only a part of it may exist.
    is_cancelled: bool = False
    path: Path | None = field(default=None, compare=False)

    @property
    def spec(self) -> RunSpec | None:
        """The run's spec; None if another version of Embark wrote it and this one cannot read it."""
        return parse_spec(self.spec_toml)


@frozen
class RegistryContents:
    """All runs, newest first, and the files that cannot be read."""

    runs: tuple[RunRecord, ...]
    broken: tuple[Path, ...]


def save_record(run: RunRecord) -> RunRecord:
    """Write the record atomically; it replaces an earlier one of the same run at the same location."""
    path = run.path or record_path(run.handle)
    record = {"format": FORMAT, **asdict(run)}
    del record["path"]
    try:
        write_atomic(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: the run could not be recorded", WRITABLE) from error
    return replace(run, path=path)


def delete_record(run: RunRecord) -> None:
    if run.path is not None:
        run.path.unlink(missing_ok=True)


@contextmanager
def launch_lock(handle: RunHandle) -> Iterator[None]:
    """Allow one launch of a run at a time: of two, one would hand over its spec and the other start it."""
    path = record_path(handle).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: the run could not be recorded", WRITABLE) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{handle.name} is being launched by another command",
                            f"embark status {handle.name}") from None
        yield


def list_runs(context: str = "") -> RegistryContents:
    """Return all launched runs, or only those of one context of kubectl."""
    folder = registry_dir()
    found = [(path, _read(path)) for path in sorted(folder.glob("*.json"))]
    runs = [run for _, run in found if run and (not context or run.handle.where.get("context") == context)]
    return RegistryContents(runs=tuple(sorted(runs, key=lambda run: -run.submitted_s)),
                            broken=tuple(path for path, run in found if run is None))


def lookup_run(name: str, context: str = "") -> RunRecord | None:
    """Find a run by its name; of two with one name, by NAME@LOCATION or by kubectl's context. None: not launched from
    here."""
    bare, _, location = name.partition("@")
    found = [run for run in list_runs(context).runs
             if run.handle.name == bare and location in ("", location_hash(run.handle))]
    if len(found) > 1:
        raise UserError(f"{bare} was launched in {len(found)} places",
                        "one of: " + ", ".join(f"{bare}@{location_hash(run.handle)}" for run in found))
    return found[0] if found else None


def find_run(name: str, context: str = "") -> RunRecord:
    """Find a run as `lookup_run` does; raises if there is none."""
    if (run := lookup_run(name, context)) is not None:
        return run
    listed = list_runs(context)
    for path in listed.broken:
        if path.name.startswith(f"{name.partition('@')[0]}."):
            raise DamagedRecord(f"{path}: not the record of a launched run", path)
    names = {run.handle.name for run in listed.runs}
    known = nearest(name.partition("@")[0], names) if names else "embark launch SPEC launches one"
    if (local := Path(RUNS_FOLDER, name) / EVENTS).is_file():
        known = f"it was trained without embark launch: embark watch {shlex.quote(str(local.parent))} shows it"
    raise UserError(f"{name}: nothing was launched under that name from here", known)


def location_hash(handle: RunHandle) -> str:
    keys = ("context", "namespace", "folder")
    location = json.dumps([handle.backend, *(str(handle.where.get(key, "")) for key in keys)])
    return hashlib.sha256(location.encode()).hexdigest()[:6]


def record_path(handle: RunHandle) -> Path:
    return registry_dir() / f"{handle.name}.{location_hash(handle)}.json"


def registry_dir() -> Path:
    return user_data_dir() / "runs"


def _read(path: Path) -> RunRecord | None:
    """Return the record in a file; None if it is not complete."""
    try:
        run = TypeAdapter(RunRecord).validate_json(path.read_bytes())
        where = RecordedLocation(run.handle.where)
        where.path = path
        if any(type(value) is not int for key, value in where.items() if key.startswith(("num_", "min_", "grace_"))):
            return None
        if not isinstance(where.get("folder", ""), str) or not math.isfinite(run.submitted_s):
            return None
        return replace(run, handle=replace(run.handle, where=where), path=path)
    except (OSError, ValueError):
        return None


class RecordedLocation(JsonDict):
    """A location as its file has it, which may lack a value."""

    path: Path

    def __missing__(self, key: str) -> Any:
        raise DamagedRecord(f"{self.path}: where.{key} is missing", self.path)


def stored_events(store: ObjectStore) -> list[Event]:
    """Return all events in a run's directory."""
    size = store.size(EVENTS) if store.exists(EVENTS) else 0
    blocks = (store.read_range(EVENTS, at, min(BLOCK_BYTES, size - at)) for at in range(0, size, BLOCK_BYTES))
    return list(filter(None, map(parse_event, split_lines(blocks))))


def run_outcome(run_uri: str, since_s: float) -> str | None:
    """`done`, `budget` or `interrupted`; empty if it has not ended since then; None if its events cannot be read."""
    try:
        events = stored_events(open_store(run_uri.removeprefix("file://"), BRIEF_RETRY))
    except (EmbarkError, ImportError, OSError):
        return None
    return next((str(event.values.get("outcome", "")) for event in reversed(events)
                 if event.kind == "end" and event.time_s >= since_s), "")


NUM_EVENTS = 5
RUNS_FOLDER = "runs"


@frozen
class RunStatus:
    """The status of a launched run, for a person."""

    name: str
    title: str
    backend: str
    state: str  # `unknown` where its platform does not answer.
    reason: str
    fix: str
    num_restarts: int
    since_s: float | None
    launched_s: float
    usd_per_hour: float | None
    run_uri: str
    is_submitted: bool
    replicas: tuple[Replica, ...] = ()
    events: tuple[RunEvent, ...] = ()  # The last that its platform reported.


@frozen
class RunStatusList:
    """All runs that were launched from here."""

    runs: tuple[RunStatus, ...]
    unreadable: tuple[Path, ...]  # Files of the registry.


def run_status(run: RunRecord, shell: Shell, notify: Notify, *, is_hasty: bool = False) -> RunStatus:
    """Return the full status of one run. `is_hasty`: do not wait for a platform that does not answer, nor ask it for
    events."""
    backend = backend_of(run.handle, shell, notify, is_hasty=is_hasty)
    status = backend.status(run.handle)
    if run.is_cancelled and status.state in ("failed", "lost", "restarting"):
        status = status.become("gone", "it had to be killed: its last checkpoint may be older",
                               f"its checkpoints are in {run.handle.run_uri}")
    events: list[RunEvent] = []
    if status.state != "gone" and not is_hasty:
        try:
            events = backend.events(run.handle)[-NUM_EVENTS:]
        except EmbarkError as error:
            notify(f"cannot read its events: {error.what}")
    return _make(run, _explain_gone(run, status) if status.state == "gone" else status, tuple(events))


def list_statuses(shell: Shell, notify: Notify, *, context: str) -> RunStatusList:
    found = list_runs(context)
    names = [run.handle.name for run in found.runs]
    rows = []
    for run in found.runs:
        try:
            row = run_status(run, shell, notify, is_hasty=True)
        except EmbarkError as error:  # one cluster that is away does not hide the others
            row = replace(_make(run, Status("gone", error.what, error.fix)), state="unknown")
        if names.count(row.name) > 1:
            row = replace(row, name=f"{row.name}@{location_hash(run.handle)}")
        rows.append(row)
    return RunStatusList(runs=tuple(rows), unreadable=found.broken)


def _explain_gone(run: RunRecord, status: Status) -> Status:
    """Platforms forget finished jobs after a while; the run's own events do not."""
    if not run.is_submitted:
        return status.become("gone", "its launch was interrupted before it was created",
                             f"launch it again, or embark cancel {run.handle.name}")
    if run.is_cancelled:
        return replace(status, reason=f"cancelled; {status.reason}")
    outcome = run_outcome(run.handle.run_uri, run.submitted_s) if run.handle.run_uri else ""
    return replace(status, reason=f"{status.reason}; by its events it ended: {outcome}") if outcome else status


def _make(run: RunRecord, status: Status, events: tuple[RunEvent, ...] = ()) -> RunStatus:
    handle = run.handle
    return RunStatus(
        name=handle.name, title=handle.title or handle.name, backend=handle.backend, state=status.state,
        reason=status.reason, fix=status.fix, num_restarts=status.num_restarts, since_s=status.since_s,
        launched_s=run.submitted_s, usd_per_hour=handle.usd_per_hour, run_uri=handle.run_uri,
        is_submitted=run.is_submitted, replicas=status.replicas, events=events)

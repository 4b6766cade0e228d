"""The state of launched runs. Reads only: nothing is created, deleted or recorded."""

from dataclasses import dataclass, replace
from pathlib import Path

from embark.errors import EmbarkError
from embark.launch.backend import Replica, RunEvent, Status, backend_of
from embark.launch.run_registry import RunRecord, list_runs, location_hash, run_outcome
from embark.launch.shell import Notify, Shell

NUM_EVENTS = 5
RUNS_FOLDER = "runs"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One launched run."""

    name: str
    title: str
    backend: str
    state: str
    """`unknown` where its platform does not answer."""
    reason: str
    fix: str
    num_restarts: int
    since_s: float | None
    launched_s: float
    usd_per_hour: float | None
    run_uri: str
    is_submitted: bool
    replicas: tuple[Replica, ...] = ()
    events: tuple[RunEvent, ...] = ()
    """The last that its platform reported."""


@dataclass(frozen=True, slots=True)
class RunStatusList:
    """All runs that were launched from here."""

    runs: tuple[RunStatus, ...]
    unreadable: tuple[Path, ...]
    """Files of the registry."""
    num_local_runs: int
    """Run directories in ./runs, which `embark watch` shows."""


def run_status(run: RunRecord, shell: Shell, notify: Notify, *, is_hasty: bool = False) -> RunStatus:
    """One run in full. `is_hasty`: a platform that does not answer is not waited for, and not asked for events."""
    backend = backend_of(run.handle, shell, notify, is_hasty=is_hasty)
    status = backend.status(run.handle)
    events: list[RunEvent] = []
    if status.state != "gone" and not is_hasty:
        try:
            events = backend.events(run.handle)[-NUM_EVENTS:]
        except EmbarkError as error:
            notify(f"cannot read its events: {error.what}")
    return _make(run, _explain_gone(run, status) if status.state == "gone" else status, tuple(events))


def list_statuses(shell: Shell, notify: Notify, *, context: str = "") -> RunStatusList:
    found = list_runs(context)
    names = [run.handle.name for run in found.runs]
    rows = []
    for run in found.runs:
        try:
            row = run_status(run, shell, notify, is_hasty=True)
        except EmbarkError as error:  # one cluster that is away does not hide the others
            row = replace(_make(run, Status(state="gone", reason=error.what, fix=error.fix)), state="unknown")
        is_ambiguous = names.count(row.name) > 1
        rows.append(replace(row, name=f"{row.name}@{location_hash(run.handle)}") if is_ambiguous else row)
    local = list(Path(RUNS_FOLDER).glob("*/events.jsonl")) if not rows else []
    return RunStatusList(runs=tuple(rows), unreadable=found.broken, num_local_runs=len(local))


def _explain_gone(run: RunRecord, status: Status) -> Status:
    """Platforms forget finished jobs after a while; the run's own events do not."""
    if not run.is_submitted:
        return replace(status, reason="its launch was interrupted before it was created",
                       fix=f"launch it again, or embark cancel {run.handle.name}")
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

"""The runs of a directory: listed with how they ended, and removed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from embark.errors import UserError
from embark.store import RunDir, find_run
from embark.store.lease import TTL_S, acquire, current_holder
from embark.values import frozen
from .context import State, read_run
from .run_files import find_runs


@frozen
class LocalRun:
    """A run on this machine: its state, figures and size."""

    name: str
    uri: str
    state: State
    step: int
    num_steps: int
    held_out_auc: float | None
    held_out_normalized_entropy: float | None
    size_bytes: int
    changed_s: float | None  # Unix time of its last event.
    held_by: str = ""  # The process that trains it.


@frozen
class LocalRuns:
    """The runs of a directory, the newest first."""

    folder: str
    runs: tuple[LocalRun, ...]


def list_local_runs(folder: str = "") -> LocalRuns:
    """List the runs of a folder, by default of ./runs."""
    found = find_runs([folder] if folder else [])()
    return LocalRuns(folder or "runs", tuple(_local_run(Path(files.uri)) for files in found))


def removable_run(word: str) -> LocalRun:
    """Return the run that a person names, for `remove_run`."""
    run_dir = find_run(word)
    if run_dir.is_remote:
        raise UserError(f"{run_dir.uri}: only runs on this machine can be removed",
                        "delete the prefix with the tools of its cloud")
    if run_dir.path.is_symlink():
        raise UserError(f"{run_dir.uri} is a link to {run_dir.path.resolve()}",
                        "name that directory, or remove the link")
    return _local_run(run_dir.path)


def remove_run(run: LocalRun, notify: Callable[[str], None]) -> None:
    """Delete a run's directory; raises `RunInUse` while a process trains it."""
    run_dir = RunDir(run.uri)
    lease = acquire(run_dir.store, TTL_S, notify)
    # Renamed first: a run that starts meanwhile gets a directory of its own, and none is seen half removed.
    path, gone = run_dir.path, run_dir.path.with_name(f".{run_dir.path.name}.removed-{uuid4().hex[:8]}")
    try:
        path.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}", "make the directory writable") from error
    finally:
        lease.release()


def _local_run(path: Path) -> LocalRun:
    context = read_run(str(path), is_brief=True)
    record = context.record
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return LocalRun(
        name=context.name, uri=str(path), state=context.status.state, step=record.steps_done,
        num_steps=record.num_steps or 0, held_out_auc=record.held_out.get("auc"),
        held_out_normalized_entropy=record.held_out.get("normalized_entropy"),
        size_bytes=sum(file.stat().st_size for file in files), changed_s=record.last_s,
        held_by=holder.name if (holder := current_holder(RunDir(str(path)).store)) else "")

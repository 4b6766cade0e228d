"""`embark runs`: list and remove the runs of this machine."""

import time

from embark.errors import Interrupted, UserError
from embark.formatting import format_bytes, format_duration, pluralize
from embark.report.local_runs import LocalRuns, list_local_runs, removable_run, remove_run
from embark.values import frozen
from .console import Console, Flag


@frozen
class RemovedRuns:
    """The runs that were deleted, and their size."""

    runs: tuple[str, ...]
    size_bytes: int


def list_(folder: str = "", /, *, console: Console = Console()) -> None:
    """List the runs of a directory: state, steps, held-out results, size.

    Parameters
    ----------
    folder
        A directory of runs; ./runs by default.
    """
    console.show(list_local_runs(folder), _render)


def remove(*runs: str, yes: Flag = False, console: Console = Console()) -> None:
    """Delete runs of this machine with their checkpoints. A run that is being trained is refused.

    Parameters
    ----------
    runs
        Directories, or names under ./runs.
    yes
        Do not ask for confirmation.
    """
    if not runs:
        raise UserError("no run is named", "embark runs list shows them")
    found = [removable_run(run) for run in runs]
    size_bytes = sum(run.size_bytes for run in found)
    what = f"{', '.join(run.uri for run in found)} ({format_bytes(size_bytes)})"
    if not yes and not console.confirm(f"Delete {what}?", "--yes"):
        raise Interrupted("nothing was deleted")
    for run in found:
        remove_run(run, console.warning)
    console.show(RemovedRuns(tuple(run.uri for run in found), size_bytes),
                 lambda console, _: console.result(f"deleted {what}"))


def _render(console: Console, found: LocalRuns) -> None:
    if not found.runs:
        console.result(f"no runs in {found.folder}")
        return
    now_s = time.time()
    is_held = any(run.held_by for run in found.runs)
    rows = [{"run": run.name, "state": run.state,
             "step": f"{run.step:,} of {run.num_steps:,}" if run.num_steps else run.step,
             "held-out AUC": run.held_out_auc, "held-out NE": run.held_out_normalized_entropy,
             **({"held by": run.held_by} if is_held else {}), "size": format_bytes(run.size_bytes),
             "last event": "" if run.changed_s is None else f"{format_duration(max(0.0, now_s - run.changed_s))} ago"}
            for run in found.runs]
    console.table(rows, droppable=("size", "last event", "held-out NE"))
    console.text(f"{pluralize(len(found.runs), 'run')} in {found.folder}, "
                 f"{format_bytes(sum(run.size_bytes for run in found.runs))}", style="dim")

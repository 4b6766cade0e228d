"""`embark status`, `logs` and `cancel`: the state of launched runs, what they print, and how they end."""

import time
from datetime import datetime
from typing import Annotated

from cyclopts import Parameter

from embark.errors import ExitCode, Interrupted
from embark.formatting import format_duration, pluralize, strip_control_chars, to_one_line
from embark.launch.backend import CancelResult, backend_of
from embark.launch.launching import cancel_run
from embark.launch.run_registry import RunStatus, RunStatusList, find_run, list_statuses, run_status
from embark.launch.shell import DryRunShell, Shell
from .console import Console, Flag


def status(run: str = "", /, *, context: str = "", console: Console = Console()) -> int:
    """Show the state of a launched run and the reason, or of all runs. Exit code 1 if the run has failed.

    Parameters
    ----------
    run
        The run's name; all runs launched from here by default.
    context
        Only runs in this kubectl context.
    """
    if not run:
        console.show(list_statuses(Shell(), console.warning, context=context), _render_all)
        return ExitCode.DONE
    found = run_status(find_run(run, context), Shell(), console.warning)
    console.show(found, _render)
    return ExitCode.OTHER if found.state == "failed" else ExitCode.DONE


def logs(
    run: Annotated[str, Parameter(help="The run's name, as embark status lists it.")], /, *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="", show_default=False)] = False,
    console: Console = Console()
) -> int:
    """Print the logs of all machines of a launched run, merged by time. With --json, prints one object per line.

    Parameters
    ----------
    follow
        Print new lines until the run ends, and what it waits for. Exit code 1 if it fails.
    """
    record = find_run(run)
    backend = backend_of(record.handle, Shell(), console.warning)
    for line in backend.logs(record.handle, follow=follow):
        console.show_line(line, lambda one: f"{_clock(one.time_ns / 1e9)} {to_one_line(one.source)} | "
                                            f"{strip_control_chars(one.text)}")
    if not follow:
        return ExitCode.DONE
    status = run_status(record, Shell(), console.warning)
    console.text(_sentence(status), style="bold")
    return ExitCode.OTHER if status.state == "failed" else ExitCode.DONE


def _render_all(console: Console, found: RunStatusList) -> None:
    if not found.runs:
        console.result("nothing launched from here")
    else:
        now_s = time.time()
        rows = [{"name": run.name, "state": run.state, "launched": f"{format_duration(now_s - run.launched_s)} ago",
                 "$/hour": run.usd_per_hour, "run": to_one_line(run.title), "reason": run.reason} for run in found.runs]
        console.table(rows)
    for path in found.unreadable:
        console.warning(f"skipped {path}: not the record of a launched run; delete it if you know where the run is")


def _render(console: Console, run: RunStatus) -> None:
    console.result(_sentence(run))
    if run.fix:
        console.text(f"  fix: {run.fix}", style="green")
    if run.replicas:
        console.table([{"replica": one.name, "machine": one.index, "state": one.state, "reason": one.why}
                       for one in run.replicas])
    if run.events:
        console.table([{"time": _clock(one.time_s), "object": to_one_line(one.source), "event": one.reason,
                        f"last events from {run.backend}": one.text} for one in run.events])
    if not run.is_submitted and run.state != "gone":
        console.warning(f"its launch was interrupted: embark cancel {run.name} removes what exists")


def _sentence(run: RunStatus) -> str:
    since = f" for {format_duration(time.time() - run.since_s)}" if run.since_s and run.state == "running" else ""
    return f"{to_one_line(run.title)}: {run.state}{since}" + (f": {run.reason}" if run.reason else "")


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%H:%M:%S") if time_s else "--:--:--"


def cancel(
    run: Annotated[str, Parameter(help="The run's name, as embark status lists it.")], /, *, yes: Flag = False,
    dry_run: Flag = False, console: Console = Console()
) -> int:
    """Stop a launched run after a last checkpoint, and list the resources that remain and how to remove them.

    Parameters
    ----------
    yes
        Do not ask for confirmation.
    dry_run
        Print the commands without running them.
    """
    record = find_run(run)
    title = to_one_line(record.handle.title or record.handle.name)
    if not yes and not dry_run and not console.confirm(f"Cancel {title}?", "--yes"):
        raise Interrupted("nothing was cancelled", "")
    shell = DryRunShell(lambda line: None if console.json else console.raw(f"{line}\n")) if dry_run else Shell()
    result = cancel_run(record, shell, console.warning)
    console.show(result, _render_cancelled)
    return ExitCode.DONE if result.is_complete else ExitCode.OTHER


def _render_cancelled(console: Console, result: CancelResult) -> None:
    title = to_one_line(result.title or result.name)
    if not result.is_complete:
        console.result(f"{title}: stopping; embark cancel {result.name} waits for it again")
    elif result.removed:
        console.result(f"{title}: removed {', '.join(result.removed)}")
    else:
        console.result(f"{title}: already finished; removed from the list")
    if result.last_checkpoint:
        console.text(f"last complete checkpoint: {result.last_checkpoint}")
    console.text(f"{pluralize(len(result.remains), 'resource')} remaining:")
    for resource in result.remains:
        console.text(f"  {resource.what}: {resource.remove}")

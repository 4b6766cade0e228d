"""`embark cancel`: stop a launched run after a last checkpoint."""

from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console, Flag
from embark.errors import ExitCode, Interrupted
from embark.formatting import pluralize, to_one_line
from embark.launch.launching import Cancellation, cancel_run
from embark.launch.run_registry import find_run
from embark.launch.shell import DryRunShell, Shell


def cancel(
    run: Annotated[str, Parameter(help="The run's name, as embark status lists it.")], /, *, yes: Flag = False,
    dry_run: Flag = False, console: Console = Console(),
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
        raise Interrupted("nothing was cancelled", fix="")
    shell = DryRunShell(lambda line: None if console.json else console.raw(f"{line}\n")) if dry_run else Shell()
    result = cancel_run(record, shell, console.warning)
    console.show(result, _render)
    return ExitCode.DONE if result.is_complete else ExitCode.OTHER


def _render(console: Console, result: Cancellation) -> None:
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

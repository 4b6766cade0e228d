"""The verbs about runs that are under way: hand one over, ask how it stands, read its lines and end it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag, Settings, Spec

Run = Annotated[str, Parameter(help="The run's name, as embark status lists it.")]


def launch(
    spec: Spec,
    /,
    *,
    set_: Settings = (),
    yes: Flag = False,
    dry_run: Flag = False,
    budget: float | None = None,
    context: str = "",
    console: Console = Console(),
) -> int:
    """Hand a run to where its spec says: here, Kubernetes, Ray, TorchX, Vertex AI, plain machines, TPU VMs.

    Says verdict and price, and asks before it spends.

    Parameters
    ----------
    yes
        Go on without asking.
    dry_run
        Say every command, and run none.
    budget
        Dollars: before the run would cost more it saves, ends and is not started again. The same as place.budget_usd.
    context
        Of kubectl, where its current one is not meant.
    """
    from embark.cli.launch_output import launch_run
    from embark.spec import load_spec

    sets = [*set_, *([f"place.budget_usd={budget}"] if budget is not None else [])]
    return launch_run(console, load_spec(spec, sets), yes=yes, dry_run=dry_run, context=context)


def status(run: str = "", /, *, context: str = "", console: Console = Console()) -> int:
    """Say how a run stands, and why. Exit code 1 if it has failed.

    Parameters
    ----------
    run
        The run's name; left out, all that were launched from here.
    context
        Only runs of this context of kubectl.
    """
    from embark.cli.launch_output import status_run

    return status_run(console, run, context=context)


def logs(
    run: Run,
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="", show_default=False)] = False,
    console: Console = Console(),
) -> int:
    """Print the lines of all machines of a run, merged by time.

    Parameters
    ----------
    follow
        Go on until the run ends; exit code 1 if it has failed.
    """
    from embark.cli.launch_output import logs_run

    return logs_run(console, run, follow=follow)


def cancel(run: Run, /, *, yes: Flag = False, dry_run: Flag = False, console: Console = Console()) -> int:
    """End a run after a last checkpoint, and say what is left and how to remove it.

    Parameters
    ----------
    yes
        Go on without asking.
    dry_run
        Say every command, and run none.
    """
    from embark.cli.launch_output import cancel_run

    return cancel_run(console, run, yes=yes, dry_run=dry_run)

"""The verbs about being ready and about money: is the machine or the account fit, and what does a run cost."""

from __future__ import annotations

from embark.cli.console import Console
from embark.cli.options import Flag, Settings
from embark.errors import UserError


def doctor(
    spec: str = "",
    /,
    *,
    set_: Settings = (),
    cloud: Flag = False,
    machine: str = "",
    console: Console = Console(),
) -> int:
    """Is this machine ready: versions that match, GPUs, links, memory, disk, limits. With --cloud: is the account.

    Exit code 1 if something is wrong; a warning changes nothing.

    Parameters
    ----------
    spec
        With --cloud: the spec whose machines, region and bucket are asked about.
    cloud
        Ask the account instead: who pays, quotas, whether the machine is sold there, budgets, the bucket.
    machine
        With --cloud: a machine of embark catalog list, where no spec names one.
    """
    from embark.cli.doctor import examine_cloud, examine_machine

    if not cloud:
        if spec or machine or set_:
            raise UserError("a spec, --machine and --set are for --cloud", fix="embark doctor --cloud SPEC")
        return examine_machine(console)
    from embark.spec import load_spec

    return examine_cloud(console, load_spec(spec or "quickstart", [*([f"place.machine={machine}"] if machine else []),
                                                                   *set_]))


def cost(
    run: str,
    /,
    *,
    budget: float | None = None,
    stop: Flag = False,
    yes: Flag = False,
    console: Console = Console(),
) -> int:
    """Say what a run has cost so far, what it went into, and what it will come to. Exit code 1 if past its budget.

    Parameters
    ----------
    run
        The name it was launched by, its directory, its name under ./runs, or its uri.
    budget
        Dollars it may cost; else its own place.budget_usd, at which it stops by itself.
    stop
        End a launched run that has passed the budget, or will at its pace, after a last checkpoint.
    yes
        With --stop: do not ask.
    """
    from embark.cli.cost_output import show_cost

    if not stop:
        return show_cost(console, run, budget_usd=budget)
    if console.json:
        raise UserError("--stop tells people what it ends, and --json programs what is", fix="leave one of them out")
    from embark.cli.launch_output import cancel_run

    return show_cost(console, run, budget_usd=budget,
                     stop=lambda name: cancel_run(console, name, yes=yes, dry_run=False))

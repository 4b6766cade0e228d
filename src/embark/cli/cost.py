"""`embark cost`: its flags."""

from __future__ import annotations

from embark.cli.console import Console
from embark.cli.options import Flag
from embark.errors import UserError


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

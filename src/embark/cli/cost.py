"""`embark cost`: what a run has cost so far, what for, and what it will cost."""

from embark.errors import ExitCode, UserError
from embark.events.spending import Spending, losses_sentence, usd_for
from embark.formatting import format_count, format_duration, format_usd, pluralize, to_one_line
from embark.launch.costs import RunCost, run_cost
from .console import Console


def cost(run: str, /, *, budget: float | None = None, console: Console = Console()) -> int:
    """Show what a run has cost so far, for what, and what it will cost. Exit code 1 if it exceeds its budget.

    Parameters
    ----------
    run
        A launched run's name, a run's directory, its name under ./runs, or its URI.
    budget
        Budget in dollars; place.budget_usd by default, at which the run stops by itself.
    """
    if budget is not None and budget <= 0:
        raise UserError("--budget must be greater than 0", "--budget 50")
    found = run_cost(run, console.warning, budget_usd=budget)
    console.show(found, _render)
    if found.is_within_budget is None and budget is not None:
        raise UserError(f"{found.name} has no price: --budget has no effect",
                        "name place.machine in its spec, or start it with EMBARK_USD_PER_HOUR set: the dollars per "
                            "hour of all its machines")
    return ExitCode.OTHER if found.is_within_budget is False else ExitCode.DONE


def _render(console: Console, found: RunCost) -> None:
    console.result(f"{to_one_line(found.title)}: {_spent(found)}")
    if found.held_s:
        console.table(_rows(found))
    if found.spending:
        for line in (losses_sentence(found.spending.lost), _without_step(found, found.spending)):
            if line:
                console.text(line)
    if left := _left(found):
        console.text(left)
    console.text("price: unknown, so hours only; EMBARK_USD_PER_HOUR sets a run's price" if found.usd_per_hour is None
                 else f"price: {format_usd(found.usd_per_hour)} an hour, {found.price_source}")
    for note in found.notes:
        console.warning(note)
    if found.budget_verdict:
        styles = {True: "green", False: "bold red", None: "yellow"}
        console.text(found.budget_verdict, style=styles[found.is_within_budget])


def _spent(found: RunCost) -> str:
    if found.spending is None and not found.lead_s:
        return "nothing spent yet"
    usd = "" if found.spent_usd is None else f"{format_usd(found.spent_usd)} in "
    return f"{usd}{format_duration(found.held_s)} so far"


def _without_step(found: RunCost, spending: Spending) -> str:
    parts = []
    if spending.num_without_step:
        parts.append(f"{pluralize(spending.num_without_step, 'start')} ended before the first step: "
                     f"{_priced(found, spending.without_step_s)}")
    if spending.estimated_s:
        parts.append(f"about {_priced(found, spending.estimated_s)} estimated, after the last events of killed starts")
    return "; ".join(parts)


def _priced(found: RunCost, seconds: float) -> str:
    usd = usd_for(found.usd_per_hour, seconds)
    return format_duration(seconds) if usd is None else f"{format_usd(usd)} in {format_duration(seconds)}"


def _rows(found: RunCost) -> list[dict[str, object]]:
    parts = [("starting", found.lead_s, "machines that have not reported yet")]
    if found.spending is not None:
        parts = [("useful", found.spending.useful_s, "steps, saves, evaluations"),
                 ("repeated", found.spending.redone_s, "steps lost to interruptions"),
                 ("waiting", found.spending.waiting_s + found.lead_s, "starting, loading, waiting for machines")]
    return [{"": name, "time": format_duration(seconds), **({} if found.usd_per_hour is None else {
                "$": None if found.spent_usd is None else round(found.spent_usd * seconds / found.held_s, 2)}),
             "share": f"{seconds / found.held_s:.0%}", "what": what} for name, seconds, what in parts]


def _left(found: RunCost) -> str:
    spending = found.spending
    if spending is None or not found.left_s:
        return "" if found.predicted_usd is None else f"the plan predicts {format_usd(found.predicted_usd)} for the run"
    price = f"{format_usd(found.left_usd)} and " if found.left_usd is not None else ""
    steps = (f"{format_count(spending.num_steps - spending.step)} of {format_count(spending.num_steps)} steps, "
             f"{spending.wall_step_s * 1e3:,.3g} ms each")
    total = f"; {format_usd(found.total_usd)} in all" if found.total_usd is not None else ""
    plan = f", the plan predicted {format_usd(found.predicted_usd)}" if found.predicted_usd is not None else ""
    return f"remaining: {price}{format_duration(found.left_s)} ({steps}){total}{plan}"

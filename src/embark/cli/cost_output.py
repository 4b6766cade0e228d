"""`embark cost`: what a run has cost so far, what it went into, and what it will come to."""

from __future__ import annotations

from collections.abc import Callable

from embark.cli.console import Console
from embark.errors import ExitCode, UserError
from embark.events.interruptions import losses_sentence
from embark.formatting import format_count, format_duration, to_one_line
from embark.launch.costs import RunCost, run_cost

Stop = Callable[[str], object]
"""Ends a run by the name it was launched by, after a last checkpoint."""
_HEADINGS = {"part": "", "time": "time", "usd": "$", "share": "share", "what": "what"}


def show_cost(console: Console, word: str, *, budget_usd: float | None, stop: Stop | None = None) -> ExitCode:
    """Exit code 1 where it has passed its budget, or will at its pace. With `stop` such a run is ended by it."""
    if budget_usd is not None and budget_usd <= 0:
        raise UserError(f"--budget {budget_usd:g} is no money", fix="--budget 50")
    cost = run_cost(word, console.warning)
    limit = budget_usd if budget_usd is not None else cost.budget_usd
    if stop is not None and limit is None:
        raise UserError("--stop needs a budget to stop at", fix="--budget 50, or place.budget_usd in the spec")
    told = _against(cost, limit)
    console.data(_for_programs(cost, limit, told))
    if not console.json:
        _for_people(console, cost, told)
    if stop is not None and told and not told[0] and cost.spent_usd is not None:
        _end(console, cost, stop)
    return ExitCode.OTHER if told and not told[0] else ExitCode.DONE


def _end(console: Console, cost: RunCost, stop: Stop) -> None:
    if cost.can_be_stopped:
        stop(cost.name)
    elif cost.is_up:
        raise UserError(f"{cost.name} is up and was not launched from here, so it cannot be stopped from here",
                        fix="stop it where it was started: it saves on SIGTERM")
    else:
        console.text("it is not up: there is nothing to stop")


def _against(cost: RunCost, limit: float | None) -> tuple[bool, str] | None:
    """Whether the budget holds, and a sentence; None where there is none to hold or no price."""
    if limit is None:
        return None
    if cost.spent_usd is None:
        return False, f"whether ${limit:,.2f} is enough is not known: the run has no price"
    if cost.spent_usd >= limit:
        return False, f"the budget of ${limit:,.2f} is spent"
    total = cost.total_usd
    if total is not None and total > limit:
        stop = (f"it stops itself at ${cost.budget_usd:,.2f}" if cost.budget_usd is not None
                else f"--stop, or embark cancel {cost.name}, ends it after a checkpoint; place.budget_usd would have")
        return False, f"at this pace it will pass its budget of ${limit:,.2f} by ${total - limit:,.2f}; {stop}"
    return True, f"within its budget of ${limit:,.2f}"


def _for_people(console: Console, cost: RunCost, told: tuple[bool, str] | None) -> None:
    console.result(f"{to_one_line(cost.title)}: {_spent(cost)}")
    rows = _rows(cost)
    if rows:
        console.table(rows, _HEADINGS if cost.usd_per_hour is not None else
                      {key: text for key, text in _HEADINGS.items() if key != "usd"})
    if cost.spending and (lost := losses_sentence(cost.spending.lost)):
        console.text(lost)
    if (left := _left(cost)):
        console.text(left)
    console.text(f"price: ${cost.usd_per_hour:,.2f} an hour, {cost.price}" if cost.usd_per_hour is not None else
                 "price: none is known of where it runs, so hours only; EMBARK_USD_PER_HOUR tells a run its price")
    for note in cost.notes:
        console.warning(note)
    if told:
        console.text(told[1], style="green" if told[0] else "bold red")


def _spent(cost: RunCost) -> str:
    held = format_duration(cost.held_s)
    if cost.spending is None and not cost.lead_s:
        return "nothing spent yet"
    if cost.spent_usd is None:
        return f"{held} so far"
    return f"${cost.spent_usd:,.2f} in {held} so far"


def _rows(cost: RunCost) -> list[dict[str, object]]:
    if not cost.held_s:
        return []
    parts = [("useful", cost.spending.useful_s, "steps, saves, evaluations"),
             ("redone", cost.spending.redone_s, "steps that an interruption undid"),
             ("waiting", cost.spending.waiting_s + cost.lead_s, "starting, loading, waiting for machines"),
             ] if cost.spending else [("held", cost.lead_s, "machines that have told nothing yet")]
    return [{"part": name, "time": format_duration(seconds), "share": f"{seconds / cost.held_s:.0%}", "what": what,
             "usd": None if cost.spent_usd is None else round(cost.spent_usd * seconds / cost.held_s, 2)}
            for name, seconds, what in parts]


def _left(cost: RunCost) -> str:
    found = cost.spending
    if found is None or found.left_s is None or not found.left_s:
        predicted = cost.predicted_usd
        return "" if predicted is None else f"the plan says ${predicted:,.2f} for the whole run"
    price = f"${cost.left_usd:,.2f} and " if cost.left_usd is not None else ""
    pace = f"{found.wall_step_s * 1e3:,.3g} ms each"
    steps = f"{format_count(found.num_steps - found.step)} of {format_count(found.num_steps)} steps, {pace}"
    in_all = f"; ${cost.total_usd:,.2f} in all" if cost.total_usd is not None else ""
    plan = f", the plan said ${cost.predicted_usd:,.2f}" if cost.predicted_usd is not None else ""
    return f"to go: {price}{format_duration(found.left_s)} ({steps}){in_all}{plan}"


def _for_programs(cost: RunCost, limit: float | None, told: tuple[bool, str] | None) -> dict[str, object]:
    found = cost.spending
    answer: dict[str, object] = {
        "name": cost.name, "is_up": cost.is_up, "spent_usd": cost.spent_usd, "held_s": cost.held_s,
        "usd_per_hour": cost.usd_per_hour, "price": cost.price, "left_s": cost.left_s, "left_usd": cost.left_usd,
        "total_usd": cost.total_usd, "predicted_usd": cost.predicted_usd, "budget_usd": limit,
        "is_within_budget": told[0] if told else None, "notes": list(cost.notes), "lead_s": cost.lead_s,
    }
    if found is not None:
        answer |= {
            "useful_s": found.useful_s, "redone_s": found.redone_s, "waiting_s": found.waiting_s + cost.lead_s,
            "step": found.step, "num_steps": found.num_steps, "outcome": found.outcome, "num_starts": found.num_starts,
            "num_interruptions": found.lost.num, "lost_steps": found.lost.lost_steps, "lost_usd": found.lost.usd,
        }
    return answer

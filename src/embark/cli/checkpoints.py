"""`embark checkpoints`: what `store/` finds on a run's checkpoint store, as a person and a program read it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag
from embark.errors import ExitCode, UserError
from embark.formatting import MISSING, format_bytes, format_float, pluralize
from embark.store import RunDir, find_run
from embark.store.checkpoint_diff import Change, CheckpointDiff, TensorChange, diff_checkpoints
from embark.store.checkpoint_inspect import (
    CheckpointInfo,
    Inventory,
    PruneDecision,
    decide_pruning,
    num_bytes_to_verify,
    prune,
    take_inventory,
    verify,
)


def checkpoints(
    run: str,
    /,
    *,
    verify: Flag = False,
    prune: Flag = False,
    diff: Annotated[tuple[int, int] | None, Parameter(negative="", show_default=False)] = None,
    yes: Flag = False,
    dry_run: Flag = False,
    console: Console = Console(),
) -> int:
    """List a run's checkpoints: step, time, size, and why each is kept.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI.
    verify
        Read every byte and report damaged checkpoints. Exit code 1 if there is one.
    prune
        Remove the checkpoints that the run's [store] rules do not keep, and leftovers of unfinished saves.
    diff
        Show what differs between the checkpoints of two steps.
    yes
        With --prune: do not ask for confirmation.
    dry_run
        With --prune: only show what would be removed.
    """
    if verify + prune + (diff is not None) > 1:
        raise UserError("--verify, --prune and --diff are mutually exclusive", fix="use one at a time")
    if (yes or dry_run) and not prune:
        raise UserError("--yes and --dry-run need --prune", fix="add --prune, or leave them out")
    found = find_run(run)
    if diff is not None:
        return show_diff(console, found, *diff)
    if prune:
        return clear(console, found, is_sure=yes, dry_run=dry_run)
    return check(console, found) if verify else show(console, found)


def show(console: Console, run: RunDir) -> ExitCode:
    """What there is."""
    stock = take_inventory(run)
    if console.json:
        console.data(_as_data(run, stock))
        return ExitCode.DONE
    _table(console, run, stock)
    return ExitCode.DONE


def check(console: Console, run: RunDir) -> ExitCode:
    """Whether every byte of it is what was written."""
    stock = take_inventory(run)
    with console.progress("reading") as show_done:
        stock = verify(run, stock, _adding(show_done, num_bytes_to_verify(stock)))
    damaged = [one for one in stock.standing if one.state == "damaged"]
    code = ExitCode.OTHER if damaged else ExitCode.DONE
    if console.json:
        console.data(_as_data(run, stock))
        return code
    _table(console, run, stock, has_rows=not console.quiet)
    num_whole = sum(one.state == "committed" for one in stock.standing)
    said = f", {pluralize(len(damaged), 'checkpoint')} damaged" if damaged else ", none is damaged"
    console.result(f"{pluralize(num_whole, 'checkpoint')} whole{said}; {format_bytes(num_bytes_to_verify(stock))} read")
    return code


def clear(console: Console, run: RunDir, *, is_sure: bool, dry_run: bool) -> ExitCode:
    """Remove what the run's own rules let go."""
    verdicts = decide_pruning(take_inventory(run), time.time())
    going = [verdict for verdict in verdicts if verdict.goes]
    total = format_bytes(sum(verdict.size_bytes for verdict in going))
    if not console.json:
        _verdicts(console, run, verdicts)
    is_agreed = is_sure or dry_run or not going
    if not is_agreed and not console.confirm(f"Remove {pluralize(len(going), 'checkpoint')}, {total}?", "--yes"):
        console.result("nothing was removed")
        return ExitCode.DONE
    removed: list[int] = []
    if not dry_run:
        prune(run, going, lambda verdict: removed.append(verdict.step))
    console.data({"run": run.uri, "removed": removed, "dry_run": dry_run, "checkpoints": verdicts})
    would = "would be removed" if dry_run else "removed"
    console.result(f"{pluralize(len(going), 'checkpoint')} {would}, {total}" if going else "nothing to remove")
    return ExitCode.DONE


def show_diff(console: Console, run: RunDir, step_a: int, step_b: int) -> ExitCode:
    """What differs between two of them."""
    stock = take_inventory(run)
    a, b = stock.committed(step_a), stock.committed(step_b)
    with console.progress("comparing") as show_done:
        found = diff_checkpoints(run.checkpoints, a, b, show_done)
    if console.json:
        console.data({"run": run.uri, "difference": found})
        return ExitCode.DONE
    for title, changes in (("spec", found.spec), ("plan", found.plan), ("values", found.values),
                           ("shapes", found.shapes)):
        _change_table(console, title, changes, found)
    for step, names in ((found.a, found.only_in_a), (found.b, found.only_in_b)):
        if names:
            console.table([{"name": name} for name in names], {"name": f"only in step {step}"})
    if found.tensors:
        console.table([_tensor_row(change) for change in found.tensors], title="tensors")
    num_other = len(found.tensors) + len(found.shapes) + len(found.only_in_a) + len(found.only_in_b)
    console.result(f"differing: {num_other:,} of {pluralize(num_other + found.num_same, 'tensor')}, "
                   f"{pluralize(len(found.spec), 'field')} of the spec, {pluralize(len(found.plan), 'line')} of the plan")
    return ExitCode.DONE


def _table(console: Console, run: RunDir, stock: Inventory, *, has_rows: bool = True) -> None:
    metric = stock.rules.best_by if stock.rules else ""
    headings = {"step": "step", "when": "when", "size": "size", "ranks": "ranks", "metric": metric.replace("_", " "),
                "kept": "kept because"}
    if not metric:
        del headings["metric"]
    if has_rows:
        console.table([_row(one) for one in stock.standing], headings, title=run.checkpoints.store.uri)
    if stock.no_rules:
        console.warning(f"why each is kept is not known: {stock.no_rules}")
    for one in stock.standing:
        for damage in one.damage:
            console.warning(f"step {one.step} is damaged: {damage}")


def _row(one: CheckpointInfo) -> dict[str, object]:
    kept = ", ".join(one.kept) or "no rule"
    measured = format_float(one.metric) if one.metric is not None else ""
    if measured and one.metric_step not in (None, one.step):
        measured += f" (step {one.metric_step})"
    return {"step": one.step, "when": _when(one.time_s), "size": format_bytes(one.size_bytes), "ranks": one.num_ranks,
            "metric": measured, "kept": kept if one.state == "committed" else one.state.upper()}


def _verdicts(console: Console, run: RunDir, verdicts: Sequence[PruneDecision]) -> None:
    if verdicts and not console.quiet:
        rows = [{"step": v.step, "size": format_bytes(v.size_bytes), "": "goes" if v.goes else "stays", "why": v.why}
                for v in verdicts]
        console.table(rows, title=run.checkpoints.store.uri)


def _change_table(console: Console, title: str, changes: Sequence[Change], found: CheckpointDiff) -> None:
    if changes:
        headings = {"what": title, "a": f"step {found.a}", "b": f"step {found.b}"}
        console.table([{"what": c.what, "a": _shown(c.a), "b": _shown(c.b)} for c in changes], headings)


def _tensor_row(change: TensorChange) -> dict[str, object]:
    not_finite = {"NaN or infinite": change.num_not_finite} if change.num_not_finite else {}
    return {
        "tensor": change.name, "dtype": change.dtype, "shape": " × ".join(f"{n:,}" for n in change.shape) or "scalar",
        "elements differing": change.num_differing, "max abs": change.max_abs, "max relative": change.max_relative,
        **not_finite,
    }


def _as_data(run: RunDir, stock: Inventory) -> dict[str, object]:
    return {
        "run": run.uri, "best_by": stock.rules.best_by if stock.rules else None,
        "checkpoints": [
            {"step": one.step, "state": one.state, "time_s": one.time_s, "size_bytes": one.size_bytes,
             "num_ranks": one.num_ranks, "metric": one.metric, "metric_step": one.metric_step, "kept": one.kept,
             "damage": one.damage, "uri": run.checkpoints.where(one.step)}
            for one in stock.standing
        ],
    }


def _when(time_s: float | None) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S") if time_s else MISSING


def _shown(value: Any) -> object:
    return value if value is None or isinstance(value, int | float) else str(value)


def _adding(show_done: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0

    def tell(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            show_done(done, total)

    return tell

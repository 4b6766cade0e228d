"""`embark checkpoints`: what `store/` finds on a run's shelf, as a person and a program read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from embark.console import Console
from embark.errors import ExitCode
from embark.store import RunDir
from embark.store.compare import Change, Difference, compare
from embark.store.inspect import Standing, Stock, Verdict, judge, num_bytes_to_verify, prune, take_stock, verify
from embark.watch.words import NOTHING, figure, many, size


def show(console: Console, run: RunDir) -> ExitCode:
    """What there is."""
    stock = take_stock(run)
    if console.json:
        console.data(_as_data(run, stock))
        return ExitCode.DONE
    _table(console, run, stock)
    return ExitCode.DONE


def check(console: Console, run: RunDir) -> ExitCode:
    """Whether every byte of it is what was written."""
    stock = take_stock(run)
    with console.progress("reading", num_bytes_to_verify(stock)) as show_done:
        stock = verify(run, stock, _adding(show_done))
    damaged = [one for one in stock.standing if one.state == "damaged"]
    code = ExitCode.OTHER if damaged else ExitCode.DONE
    if console.json:
        console.data(_as_data(run, stock))
        return code
    _table(console, run, stock)
    num_whole = sum(one.state == "committed" for one in stock.standing)
    said = f", {many(len(damaged), 'checkpoint')} damaged" if damaged else ", none is damaged"
    console.result(f"{many(num_whole, 'checkpoint')} whole{said}; {size(num_bytes_to_verify(stock))} read")
    return code


def clear(console: Console, run: RunDir, *, is_sure: bool, dry_run: bool) -> ExitCode:
    """Remove what the run's own rules let go."""
    verdicts = judge(take_stock(run), time.time())
    going = [verdict for verdict in verdicts if verdict.goes]
    total = size(sum(verdict.size_bytes for verdict in going))
    if not console.json:
        _verdicts(console, run, verdicts)
    is_agreed = is_sure or dry_run or not going
    if not is_agreed and not console.confirm(f"Remove {many(len(going), 'checkpoint')}, {total}?", "--yes"):
        console.result("nothing was removed")
        return ExitCode.DONE
    removed: list[int] = []
    if not dry_run:
        prune(run, going, lambda verdict: removed.append(verdict.step))
    console.data({"run": run.uri, "removed": removed, "dry_run": dry_run, "checkpoints": verdicts})
    would = "would be removed" if dry_run else "removed"
    console.result(f"{many(len(going), 'checkpoint')} {would}, {total}" if going else "nothing to remove")
    return ExitCode.DONE


def diff(console: Console, run: RunDir, step_a: int, step_b: int) -> ExitCode:
    """What differs between two of them."""
    stock = take_stock(run)
    a, b = stock.committed(step_a), stock.committed(step_b)
    with console.progress("comparing", 1) as show_done:
        found = compare(run.shelf, a, b, lambda done, total: show_done(done / max(total, 1)))
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
    console.result(f"{many(num_other, 'tensor')} differ, {found.num_same:,} the same; "
                   f"{many(len(found.spec), 'field')} of the spec and {many(len(found.plan), 'line')} of the plan differ")
    return ExitCode.DONE

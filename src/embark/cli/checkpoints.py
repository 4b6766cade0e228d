"""`embark checkpoints`: list, verify, compare or prune the checkpoints of a run."""

import time
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from embark.errors import ExitCode, UserError
from embark.formatting import format_bytes, format_float, format_time, pluralize
from embark.store import RunDir, checkpoint_inspect, find_run
from embark.store.checkpoint_diff import Change, CheckpointDiff, TensorChange, diff_checkpoints
from embark.store.checkpoint_inspect import CheckpointInfo, CheckpointList, PruneResult, list_checkpoints
from .console import Console, Flag


def checkpoints(
    run: str, /, *, verify: Flag = False, prune: Flag = False,
    diff: Annotated[tuple[int, int] | None, Parameter(negative="", show_default=False)] = None, yes: Flag = False,
    dry_run: Flag = False, console: Console = Console()
) -> int:
    """List a run's checkpoints: step, time, size, and why each is kept.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI.
    verify
        Read every byte and report damaged checkpoints. Exit code 1 if there is one.
    prune
        Remove checkpoints that the [store] rules do not keep, and unfinished saves. Refused while the run is trained.
    diff
        Show what differs between the checkpoints of two steps.
    yes
        With --prune: do not ask for confirmation.
    dry_run
        With --prune: only show what would be removed.
    """
    if verify + prune + (diff is not None) > 1:
        raise UserError("--verify, --prune and --diff are mutually exclusive", "use one at a time")
    if (yes or dry_run) and not prune:
        raise UserError("--yes and --dry-run need --prune", "add --prune, or leave them out")
    found = find_run(run)
    if prune:
        _prune(console, found, is_confirmed=yes, dry_run=dry_run)
        return ExitCode.DONE
    listed = list_checkpoints(found)
    if diff is not None:
        a, b = map(listed.committed, diff)
        with console.progress("comparing") as progress:
            changes = diff_checkpoints(found.checkpoints, a, b, progress)
        console.show(changes, _render_diff)
        return ExitCode.DONE
    if not verify:
        console.show(listed, _render)
        return ExitCode.DONE
    with console.progress("reading") as progress:
        listed = checkpoint_inspect.verify(found, listed, progress)
    console.show(listed, _render_verified)
    return ExitCode.OTHER if listed.num("damaged") else ExitCode.DONE


def _prune(console: Console, run: RunDir, *, is_confirmed: bool, dry_run: bool) -> None:
    planned = checkpoint_inspect.decide_pruning(list_checkpoints(run), time.time())
    if planned.removed and not (is_confirmed or dry_run):
        question = f"Remove {pluralize(len(planned.removed), 'checkpoint')}, {format_bytes(planned.removed_bytes)}?"
        if not console.json:
            _render_decisions(console, planned)
        if not console.confirm(question, "--yes"):
            console.result("nothing was removed")
            return
    console.show(planned if dry_run else checkpoint_inspect.prune(run, planned, console.warning), _render_pruned)


def _render(console: Console, listed: CheckpointList) -> None:
    metric = (listed.best_by or "").replace("_", " ")
    console.table([_row(one, metric) for one in listed.checkpoints], title=f"{listed.run}/checkpoints")
    if listed.held_by:
        console.text(f"being trained by {listed.held_by}", style="dim")
    _render_warnings(console, listed)


def _render_verified(console: Console, listed: CheckpointList) -> None:
    if console.quiet:
        _render_warnings(console, listed)
    else:
        _render(console, listed)
    damaged = pluralize(listed.num("damaged"), "checkpoint") if listed.num("damaged") else "none"
    console.result(f"{pluralize(listed.num('committed'), 'checkpoint')} complete, {damaged} damaged; "
                   f"{format_bytes(listed.size_bytes)} read")


def _render_warnings(console: Console, listed: CheckpointList) -> None:
    if listed.rules_error:
        console.warning(f"cannot determine why each is kept: {listed.rules_error}")
    for one in listed.checkpoints:
        for damage in one.damage:
            console.warning(f"step {one.step} is damaged: {damage}")
        for text in one.changed_texts:
            console.warning(f"step {one.step} is complete: resuming does not read this text: {text}")


def _row(one: CheckpointInfo, metric_name: str) -> dict[str, object]:
    metric = format_float(one.metric) if one.metric is not None else ""
    if metric and one.metric_step not in (None, one.step):
        metric += f" (step {one.metric_step})"
    when = format_time(one.time_s)
    kept = (", ".join(one.kept) or "no rule") if one.state == "committed" else one.state.upper()
    return {"step": one.step, "when": when, "size": format_bytes(one.size_bytes), "ranks": one.num_ranks,
            **({metric_name: metric} if metric_name else {}), "kept because": kept}


def _render_decisions(console: Console, pruned: PruneResult) -> None:
    if pruned.checkpoints and not console.quiet:
        console.table([{"step": one.step, "size": format_bytes(one.size_bytes),
                        "": "remove" if one.is_removed else "keep", "why": one.reason} for one in pruned.checkpoints],
                      title=f"{pruned.run}/checkpoints")


def _render_pruned(console: Console, pruned: PruneResult) -> None:
    if pruned.dry_run:
        _render_decisions(console, pruned)
    done = "would be removed" if pruned.dry_run else "removed"
    console.result(f"{pluralize(len(pruned.removed), 'checkpoint')} {done}, {format_bytes(pruned.removed_bytes)}"
                   if pruned.removed else "nothing to remove")


def _render_diff(console: Console, found: CheckpointDiff) -> None:
    for title, changes in (("spec", found.spec), ("values", found.values), ("shapes", found.shapes)):
        _render_changes(console, title, changes, found)
    for step, names in ((found.a, found.only_in_a), (found.b, found.only_in_b)):
        if names:
            console.table([{f"only in step {step}": name} for name in names])
    if found.tensors:
        console.table([_tensor_row(change) for change in found.tensors], title="tensors")
    num_other = len(found.tensors) + len(found.shapes) + len(found.only_in_a) + len(found.only_in_b)
    console.result(f"different: {num_other:,} of {pluralize(num_other + found.num_same, 'tensor')}, "
                   f"{pluralize(len(found.spec), 'spec field')}")


def _render_changes(console: Console, title: str, changes: Sequence[Change], found: CheckpointDiff) -> None:
    if changes:
        rows = [{"what": change.what, **{side: value if value is None or isinstance(value, int | float) else str(value)
                                         for side, value in (("a", change.a), ("b", change.b))}} for change in changes]
        console.table(rows, {"what": title, "a": f"step {found.a}", "b": f"step {found.b}"})


def _tensor_row(change: TensorChange) -> dict[str, object]:
    return {
        "tensor": change.name, "dtype": change.dtype, "shape": " × ".join(f"{n:,}" for n in change.shape) or "scalar",
        "elements differing": change.num_differing, "max abs": change.max_abs
    }

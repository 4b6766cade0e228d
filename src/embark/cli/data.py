"""`embark data prepare`, `make`, `check` and `copy`: their flags and their output."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from embark.errors import ExitCode, UserError
from embark.formatting import format_bytes, format_clock, format_duration, format_si, pluralize
from .console import Console, Flag, Settings, Spec

if TYPE_CHECKING:
    from embark.data.column_report import Report
    from embark.data.copy import CopyResult
    from embark.data.make import MakeResult
    from embark.data.prepare.prepare import PrepareResult, Preview
    from embark.data.progress import OnProgress, Progress
    from embark.spec import RunSpec

_MAX_BAD_ROWS = 10
_MAX_FILES = 20
_HEADINGS = {
    "column": "column", "kind": "kind", "rows": "rows", "num_values": "values", "top_share": "most frequent",
    "zero_share": "zero", "spread": "range", "auc_alone": "AUC alone"
}


def prepare(
    spec: Spec, /, *, set_: Settings = (), dry_run: Flag = False, fresh: Flag = False, console: Console = Console()
) -> None:
    """Turn the files of [data.prepare] into prepared data at data.path.

    Detects what the spec does not say about the columns; --dry-run shows the result. Resumes after an interruption.

    Parameters
    ----------
    dry_run
        Only show how each column is read and why, and how much memory the preparation needs.
    fresh
        Start over, even if data.path exists.
    """
    from embark.data.prepare.prepare import prepare_from_spec, preview
    from embark.spec import load_spec

    loaded = load_spec(spec, set_)
    if dry_run:
        console.show(preview(loaded), lambda console, shown: _render_preview(console, shown, loaded.data.path))
        return
    with _stages(console) as show:
        result = prepare_from_spec(loaded, on_progress=show, fresh=fresh)
    console.show(result, lambda console, result: _render_prepared(console, result, spec))


def make(
    spec: Spec, /, *, set_: Settings = (), out: str = "", force: Flag = False, console: Console = Console()
) -> None:
    """Write a spec's synthetic samples as prepared data: any size, any skew, one id or many.

    Parameters
    ----------
    out
        The folder to write; by default data.path.
    force
        Replace existing prepared data.
    """
    from embark.data.make import make as make_data
    from embark.spec import load_spec

    loaded = load_spec(spec, set_)
    if not out and loaded.data.kind != "prepared":
        raise UserError("no folder to write to", '--out FOLDER, or data.kind = "prepared" and data.path')
    folder = _folder(out or loaded.data.path, "make")
    with _stages(console) as show:
        result = make_data(loaded, folder, on_progress=show, force=force)
    console.show(result, lambda console, result: console.result(f"made {_summary(result)}"))


def check(data: str, /, *, set_: Settings = (), console: Console = Console()) -> int:
    """Verify data: checksums, value ranges, columns that leak the label; for a custom source, what training relies on.

    Exit code 1 if there is a problem; hints do not count.

    Parameters
    ----------
    data
        A folder or a URI of prepared data, or a spec that names it, files with columns, or code of yours, which is run.
    """
    from embark.data.check import check as check_data
    from embark.data.column_report import check_columns
    from embark.data.custom_contract import check_contract

    path = _data_path(data, set_)
    with _stages(console) as show:
        if isinstance(path, str):
            report = check_data(path, on_progress=show)
        else:
            report = check_contract(path) if path.data.is_custom else check_columns(path)
    console.show(report, _render_checked)
    return ExitCode.OTHER if report.problems else ExitCode.DONE


def copy(
    source: str, target: str, /, *, verify: Flag = False, dry_run: Flag = False, force: Flag = False,
    console: Console = Console()
) -> None:
    """Copy data between this machine and s3://, gs://, az://. Resumes after an interruption.

    Parameters
    ----------
    source
        A folder, a file or a URI. Files keep their relative paths under TARGET.
    target
        A folder or a URI.
    verify
        Read everything back and compare checksums; always done when copying prepared data to this machine.
    dry_run
        Only show what would be copied.
    force
        Replace existing files at TARGET.
    """
    from embark.data.copy import copy as copy_data

    result = copy_data(source, target, verify=verify, dry_run=dry_run, force=force,
                       progress=console.progress("copying"))
    console.show(result, _render_copy_plan if dry_run else _render_copied)


def _render_preview(console: Console, shown: Preview, out: str) -> None:
    schema, budget = shown.schema, shown.budget
    num = budget.num_workers
    workers = f"at most: {pluralize(num, 'worker')} of" if num else "for each task of Ray:"
    console.table(schema.describe(), title=f"{pluralize(len(shown.files), 'file')} of {schema.format}, "
                                           f"{format_bytes(shown.input_bytes)}")
    console.text(
        "".join(f"\ntable   {table}" for table in shown.tables) +
        f"\nrows    {shown.splits}\n"
        f"ids     {shown.ids}\n"
        f"memory  {format_bytes(budget.memory_bytes)} {workers} at most {format_bytes(budget.worker_bytes)}, "
        f"{format_bytes(budget.chunk_bytes)} of input at a time\n"
        f"to      {out}\n\n"
        f"The same as TOML, in place of label, dense_columns and prepare in the spec:\n\n{shown.toml}"
    )
    console.result("nothing was written; run it without --dry-run to prepare the data")


def _render_prepared(console: Console, result: PrepareResult, spec: str) -> None:
    from embark.data.prepared.manifest import SEQUENCES
    from embark.features.rows import CUT_LISTS

    out = result.path
    if result.was_complete:
        console.result(f"{out}: already prepared, from the same files with the same settings; --fresh starts over")
        return
    manifest, bad = result.manifest, result.manifest.bad_rows
    about = manifest.settings.get(SEQUENCES)
    if not console.quiet:
        maps = manifest.settings["id_maps"] if result.id_map_from else {}
        tables = manifest.id_features
        if about:
            tables = (replace(tables[0], multi_hot=about["longest"]),)
        headings = {"known": "known ids", "new": "new ids"} if maps else {}
        console.table([{"table": f.name, "rows": f.rows, "ids per row": f"up to {f.multi_hot}" if f.is_ragged else
                        str(f.multi_hot), **{text: maps[f.name].get(key) for key, text in headings.items()}}
                       for f in tables])
    if about:
        left_out = f"; {pluralize(about['left_out'], 'row')} of rare items left out" if about["left_out"] else ""
        console.text(f"\nusers: {_rows(manifest.rows_by_split, manifest.time_split)}; {about['interactions']:,} rows, "
                     f"up to {about['longest']:,} for a user{left_out}")
    else:
        console.text(f"\nrows: {_rows(manifest.rows_by_split, manifest.time_split)}; "
                     f"{pluralize(len(manifest.layout.dense), 'dense column')}")
    if result.id_map_from:
        numbers = "" if about else "; numbers are transformed as there"
        console.text(f"known ids have the rows that they have in {result.id_map_from}{numbers}")
    if result.dropped:
        console.text("dropped columns: " + "; ".join(f"{name}: {why}" if why else name
                                                     for name, why in result.dropped.items()))
    for hint in result.hints:
        console.text(f"hint: {hint.where}: {hint.what}", style="yellow")
    if bad.get("num"):
        console.warning(f"skipped {bad['num']:,} unreadable rows, {bad['share']:.4%} of all")
        if not console.quiet:
            console.table([{"file": file, "rows": num, "why": why} for file, reasons in bad["files"].items()
                           for why, num in reasons.items()][:_MAX_BAD_ROWS])
            console.table(bad["examples"][:_MAX_BAD_ROWS], title="the first of them")
    if bad.get("num_lists_cut"):
        console.warning(f"{CUT_LISTS}: {bad['num_lists_cut']:,}")
    console.result(f"prepared {_summary(result)}, {format_bytes(result.memory_bytes)} of memory at most")
    console.text(f"next: embark train {shlex.quote(spec)}, or embark data check {shlex.quote(str(out))} to look at it")


def _render_checked(console: Console, report: Report) -> None:
    for problem in report.problems:
        console.warning(f"{problem.where}: {problem.what}")
    if report.columns and not console.quiet:
        shown = [{**asdict(one), "top_share": f"{one.top_share:.1%}", "zero_share": f"{one.zero_share:.1%}",
                  "auc_alone": one.auc_alone and round(one.auc_alone, 3)} for one in report.columns]
        console.table(shown, _HEADINGS, title=report.path)
        console.text("")
    for hint in report.hints:
        console.text(f"hint: {hint.where}: {hint.what}", style="yellow")
    state = pluralize(len(report.problems), "problem") if report.problems else "complete"
    hints = f", {pluralize(len(report.hints), 'hint')}" if report.hints else ""
    size = f"; {format_bytes(report.size_bytes)} read" if report.size_bytes else ""
    console.result(f"{report.path}: {state}{hints}; rows: {_rows(report.rows, report.time_split)}{size}")


def _render_copy_plan(console: Console, result: CopyResult) -> None:
    if result.items:
        console.table([{"file": item.path, "size": format_bytes(item.size_bytes)}
                       for item in result.items[:_MAX_FILES]])
    if len(result.items) > _MAX_FILES:
        console.text(f"… and {len(result.items) - _MAX_FILES:,} more")
    console.result(f"would copy {pluralize(len(result.items), 'file')}, {format_bytes(result.copied_bytes)}, to "
                   f"{result.target}; {pluralize(result.num_existing, 'file')} already there")


def _render_copied(console: Console, result: CopyResult) -> None:
    how = "checksums compared" if result.is_verified else "sizes compared"
    existing = pluralize(result.num_existing, "file")
    if not result.items:
        console.result(f"nothing to copy: all {existing} are already at {result.target}, {how}")
        return
    rate = format_bytes(result.copied_bytes / max(result.elapsed_s, 1e-3))
    console.result(f"copied to {result.target}: {pluralize(len(result.items), 'file')}, "
                   f"{format_bytes(result.copied_bytes)} in {format_duration(result.elapsed_s)}, {rate}/s"
                   f"{f', {existing} already there' if result.num_existing else ''}, {how}")


def _data_path(data: str, settings: Sequence[str] = ()) -> str | RunSpec:
    """Return the data, or the data of the spec that names it; of files that are not prepared, the spec."""
    from embark.data.prepared import MANIFEST
    from embark.spec import PRESETS, load_spec

    if data.endswith(f"/{MANIFEST}") or "://" in data or Path(data).is_dir():
        if settings:
            raise UserError(f"--set: changes a spec, and {data} is prepared data", "name a spec, or leave it out")
        return data.removesuffix(f"/{MANIFEST}")
    fix = "name a folder or URI of prepared data, or a spec that does"
    if not Path(data).exists() and data not in PRESETS and ":" not in data and not data.endswith(".toml"):
        raise UserError(f"{data}: no such folder of prepared data", fix)
    spec = load_spec(data, settings)
    if spec.data.kind == "synthetic":
        raise UserError(f"{data}: data.kind is 'synthetic', so there is no data to check", fix)
    if spec.data.kind == "interactions":
        raise UserError(f"{data}: an interaction log has no labels to check", "`embark train` checks it")
    return spec.data.path if spec.data.kind == "prepared" else spec


def _folder(path: str, command: str) -> Path:
    from embark.data.prepared.cache import local_folder

    folder = local_folder(path)
    if folder is None:
        raise UserError(f"{path}: `embark data {command}` writes to a local folder",
                        f"{command} into a folder, then: embark data copy FOLDER {shlex.quote(path)}")
    return folder


def _rows(rows: Mapping[str, int], starts: Mapping[str, str]) -> str:
    return ", ".join(f"{split} {num:,}" + (f" from {starts[split]}" if split in starts else "")
                     for split, num in rows.items() if num) or "none"


def _summary(result: PrepareResult | MakeResult) -> str:
    manifest, elapsed_s = result.manifest, result.elapsed_s
    num_rows = sum(source.get("rows", 0) for source in manifest.sources) or sum(manifest.rows_by_split.values())
    return (f"{num_rows:,} rows in {format_duration(elapsed_s)}, {format_si(num_rows / max(elapsed_s, 1e-3))} rows/s: "
            f"{result.path}, {format_bytes(manifest.size_bytes)}")


@contextmanager
def _stages(console: Console) -> Iterator[OnProgress]:
    """Show progress as a bar, or as lines of a log."""
    with console.stages() as show:

        def show_progress(progress: Progress) -> None:
            more = []
            if progress.rows and progress.elapsed_s > 0:
                more.append(f"{format_si(progress.rows / progress.elapsed_s)} rows/s")
            if progress.left_s is not None:
                more.append(f"{format_clock(progress.left_s)} left")
            if progress.num_bad:
                more.append(f"{progress.num_bad:,} rows skipped")
            if progress.memory_bytes:
                more.append(format_bytes(progress.memory_bytes))
            show(progress.stage, progress.done / progress.total if progress.total else 0.0, " · ".join(more))

        yield show_progress

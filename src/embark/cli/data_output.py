"""`embark data prepare`, `make` and `check`: what `data/` does, as a person and a program see it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from embark.cli.console import Console
from embark.data.check import Reading, Report, check, each_part, statistics_problems
from embark.data.check_part import Problem, check_part
from embark.data.column_histograms import column_rows
from embark.data.make import estimate_bytes, make
from embark.data.prepare.pieces import Progress, Schema
from embark.data.prepared import MANIFEST, SPLITS, STATISTICS, Manifest, Part
from embark.data.prepared.opening import local_folder, read_manifest
from embark.data.processes import num_cores
from embark.errors import ExitCode, UserError
from embark.formatting import format_bytes, format_clock, format_duration, format_si, pluralize
from embark.spec import RunSpec, load_spec
from embark.store import ObjectStore, open_store
from embark.store.parallel import for_each_parallel

CHECK_BYTES = 2_000_000_000
"""Memory that counting may take."""
Tell = Callable[[Progress], None]
_MAX_SHOWN = 10

HEADINGS = {
    "column": "column", "kind": "kind", "rows": "rows", "used": "used", "top": "top id", "missing": "zero",
    "label_rate": "label rate of top ids", "range": "range", "new": "new ids", "auc_alone": "AUC alone",
    "picture": "how it spreads",
}


def prepare_data(console: Console, spec: RunSpec, name: str, *, dry_run: bool, fresh: bool) -> ExitCode:
    """Raw files to `data.path`. `name` is how the spec was called, for the next command."""
    out = _target(spec)
    if not spec.data.prepare.input:
        raise UserError("data.prepare.input names no files to prepare",
                        fix='[data.prepare] input = "clicks/*.csv", or --set data.prepare.input=clicks.csv')
    from embark.data.prepare.guess import describe, guess_schema, toml_of
    from embark.data.remote_inputs import open_inputs

    inputs, files = open_inputs(spec.data.prepare.input)
    schema = guess_schema(spec, inputs, files)
    total_bytes = sum(file.size_bytes for file in files)
    if dry_run:
        return _show_schema(console, spec, schema, describe(schema), toml_of(schema), len(files), total_bytes)
    from embark.data.prepare.prepare import prepare

    began_s, last = time.monotonic(), Progress("", 0, 0, 0, 0.0, None)

    with _telling(console) as show:

        def tell(progress: Progress) -> None:
            nonlocal last
            last = progress
            show(progress)

        manifest = prepare(spec, schema, inputs, files, out, tell=tell, fresh=fresh)
    elapsed_s = time.monotonic() - began_s
    num_rows = sum(manifest.num_rows(split) for split in SPLITS)
    console.data({
        "path": str(out), "input_bytes": total_bytes, "rows": {split: manifest.num_rows(split) for split in SPLITS},
        "size_bytes": manifest.size_bytes, "bad_rows": manifest.bad_rows, "elapsed_s": elapsed_s,
        "memory_bytes": last.memory_bytes, "was_whole_already": not last.stage, "layout": manifest.layout.to_json(),
    })
    if console.json:
        return ExitCode.DONE
    if not last.stage:
        console.result(f"{out}: is prepared already, of the same files in the same way; --fresh begins again")
        return ExitCode.DONE
    if not console.quiet:
        _show_made(console, manifest)
    _show_bad_rows(console, manifest)
    memory = f", {format_bytes(last.memory_bytes)} of memory at most" if last.memory_bytes else ""
    console.result(f"prepared {num_rows:,} rows in {format_duration(elapsed_s)}, {format_si(num_rows / max(elapsed_s, 1e-3))} "
                   f"rows/s{memory}: {out}, {format_bytes(manifest.size_bytes)}")
    console.text(f"next: embark train {name}   (or look at it: embark data check {out})")
    return ExitCode.DONE


def make_data(console: Console, spec: RunSpec, out: str, *, force: bool) -> ExitCode:
    """The spec's synthetic samples, written out."""
    if not out and spec.data.kind != "prepared":
        raise UserError("where should the data go?", fix='--out FOLDER, or data.kind = "prepared" and data.path')
    folder = _folder(out or spec.data.path, "make")
    needed, free = estimate_bytes(spec), shutil.disk_usage(_existing(folder)).free
    if needed > free:
        raise UserError(f"{folder}: the data takes {format_bytes(needed)}, and the disk has {format_bytes(free)} left",
                        fix="lower data.num_train_samples, or name a larger disk")
    began_s = time.monotonic()
    with _telling(console) as tell:
        manifest = make(spec, folder, tell=tell, force=force)
    elapsed_s = time.monotonic() - began_s
    num_rows = sum(manifest.num_rows(split) for split in SPLITS)
    console.data({"path": str(folder), "rows": {split: manifest.num_rows(split) for split in SPLITS},
                  "size_bytes": manifest.size_bytes, "elapsed_s": elapsed_s})
    console.result(f"made {num_rows:,} rows in {format_duration(elapsed_s)}, {format_si(num_rows / max(elapsed_s, 1e-3))} rows/s: "
                   f"{folder}, {format_bytes(manifest.size_bytes)}")
    return ExitCode.DONE


def check_data(console: Console, place: str) -> ExitCode:
    """A folder, a uri or a spec: is the data there, whole, and fit to learn from."""
    path = _place(place)
    manifest = read_manifest(path, open_store)
    folder = local_folder(path)
    with _telling(console) as tell:
        if folder is not None:
            report = check(folder, manifest, memory_bytes=CHECK_BYTES, tell=tell)
        else:
            report = _check_remote(open_store(path), manifest, tell)
    code = ExitCode.OTHER if report.problems else ExitCode.DONE
    columns = column_rows(manifest, report.statistics, report.alone) if report.statistics else []
    if console.json:
        console.data({
            "path": path, "rows": {split: manifest.num_rows(split) for split in SPLITS},
            "size_bytes": manifest.size_bytes, "label_rate": report.statistics.get("label_rate"),
            "problems": report.problems, "hints": report.hints, "columns": columns,
        })
        return code
    if columns and not console.quiet:
        console.table(columns, {key: heading for key, heading in HEADINGS.items()
                                if any(row[key] not in (None, "") for row in columns)}, title=path)
        console.text("")
    for problem in report.problems:
        console.warning(f"{problem.where}: {problem.what}")
    for hint in report.hints:
        console.text(f"hint: {hint.where}: {hint.what}", style="yellow")
    if folder is None and not report.problems:
        console.text("hints on single columns need the data here: embark data copy, then check the copy")
    rows = ", ".join(f"{split} {manifest.num_rows(split):,}" for split in SPLITS if manifest.num_rows(split))
    said = f"{pluralize(len(report.problems), 'problem')}" if report.problems else "whole"
    hints = f", {pluralize(len(report.hints), 'hint')}" if report.hints else ""
    console.result(f"{path}: {said}{hints}; rows: {rows or 'none'}; {format_bytes(manifest.size_bytes)} read")
    return code


def _check_remote(store: ObjectStore, manifest: Manifest, tell: Tell) -> Report:
    """Every byte of every part, as it comes; no more than a few parts are held."""
    there = {entry.path: entry.size_bytes for entry in store.list()}
    reading, problems = Reading(manifest, tell), list[Problem]()

    def look(part: Part) -> None:
        if there.get(part.file) != part.size_bytes:
            found = f"has {there[part.file]:,} bytes" if part.file in there else "is missing"
            problems.append(Problem(part.file, f"{found}, the manifest says {part.size_bytes:,} bytes"))
            return
        problems.extend(check_part(manifest, part, np.frombuffer(store.read(part.file), np.uint8), reading))

    for_each_parallel(look, list(each_part(manifest)), parallel=min(4, num_cores()))
    text = store.read(STATISTICS) if STATISTICS in there else None
    problems += statistics_problems(manifest, text)
    statistics: dict[str, Any] = json.loads(text) if text and not problems else {}
    return Report(manifest, statistics, problems=tuple(sorted(problems, key=lambda p: p.where)))


def _show_schema(
    console: Console, spec: RunSpec, schema: Schema, rows: list[dict[str, object]], toml: str, num_files: int,
    total_bytes: int,
) -> ExitCode:
    from embark.data.prepare.budget import budget_of
    from embark.data.prepare.ids import how_of

    prepare = spec.data.prepare
    hows = how_of(prepare, schema)
    budget = budget_of(prepare, schema, has_runs="frequency" in hows)
    splits = {
        "fraction": f"by chance: {spec.data.eval_fraction:g} to validation, {prepare.test_fraction:g} to test",
        "file": f"by file: {', '.join(prepare.validation_files)} to validation, "
                f"{', '.join(prepare.test_files) or 'none'} to test",
        "column": f"by column {prepare.split_column}",
    }[prepare.split]
    seen_less = f" or seen less than {prepare.min_count} times" if prepare.min_count > 1 else ""
    ids = "; ".join({
        "hash": "by hash, modulo the table's rows",
        "frequency": f"by frequency: 0 for what is missing{seen_less}, then by falling count",
    }[how] for how in dict.fromkeys(hows))
    console.data({
        "dry_run": True, "format": schema.format, "num_files": num_files, "input_bytes": total_bytes, "columns": rows,
        "toml": toml, "splits": splits, "ids": ids, "memory_bytes": budget.memory_bytes,
        "num_workers": budget.num_workers, "worker_bytes": budget.worker_bytes, "chunk_bytes": budget.chunk_bytes,
    })
    if console.json:
        return ExitCode.DONE
    console.table(rows, title=f"{pluralize(num_files, 'file')} of {schema.format}, {format_bytes(total_bytes)}")
    console.text(
        f"\nrows    {splits}\n"
        f"ids     {ids}\n"
        f"memory  {format_bytes(budget.memory_bytes)} at most: {pluralize(budget.num_workers, 'worker')} of at most "
        f"{format_bytes(budget.worker_bytes)}, {format_bytes(budget.chunk_bytes)} of input at a time\n"
        f"to      {spec.data.path}\n\n"
        f"These lines say the same, for what the spec leaves to be guessed:\n\n{toml}"
    )
    console.result("nothing was written; without --dry-run it is prepared")
    return ExitCode.DONE


def _show_made(console: Console, manifest: Manifest) -> None:
    console.table(
        [{"table": f.name, "rows": f.rows, "ids": f"up to {f.multi_hot}" if f.is_ragged else str(f.multi_hot)}
         for f in manifest.layout.features],
        {"table": "table", "rows": "rows", "ids": "ids a row"},
    )
    num_dense = len(manifest.layout.dense)
    rows = ", ".join(f"{split} {manifest.num_rows(split):,}" for split in SPLITS if manifest.num_rows(split))
    console.text(f"\nrows: {rows}; {pluralize(num_dense, 'dense column')}")


def _show_bad_rows(console: Console, manifest: Manifest) -> None:
    bad = manifest.bad_rows
    if bad.get("num"):
        console.warning(f"rows left out: {bad['num']:,}, {bad['share']:.4%} of all")
    if bad.get("num") and not console.quiet:
        console.table([
            {"file": file, "rows": num, "why": why}
            for file, reasons in bad["files"].items() for why, num in reasons.items()
        ][:_MAX_SHOWN])
        console.table([{"file": t["file"], "line": t["line"], "why": t["why"]} for t in bad["told"][:_MAX_SHOWN]],
                      title="the first of them")
    if bad.get("num_lists_cut"):
        console.warning(f"lists cut to their column's most ids: {bad['num_lists_cut']:,}")


def _place(place: str) -> str:
    """What the person means: data, or the spec that names it."""
    if place.endswith(f"/{MANIFEST}"):
        return place.removesuffix(f"/{MANIFEST}")
    if "://" in place or Path(place).is_dir():
        return place
    spec = load_spec(place)
    if spec.data.kind != "prepared":
        raise UserError(f"{place}: data.kind is {spec.data.kind!r}, and only prepared data can be checked",
                        fix="name a folder or uri of prepared data, or a spec that does")
    return spec.data.path


def _target(spec: RunSpec) -> Path:
    if spec.data.kind != "prepared":
        raise UserError(f"data.kind is {spec.data.kind!r}, and `embark data prepare` writes what \"prepared\" reads",
                        fix='set data.kind = "prepared" and data.path to the folder to write')
    return _folder(spec.data.path, "prepare")


def _folder(path: str, verb: str) -> Path:
    folder = local_folder(path)
    if folder is None:
        raise UserError(f"{path}: `embark data {verb}` writes to a folder of this machine",
                        fix=f"{verb} into a folder, then: embark data copy FOLDER {path}")
    return folder


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


@contextmanager
def _telling(console: Console) -> Iterator[Tell]:
    """Progress as a bar, or as lines of a log."""
    with console.stages() as show:

        def tell(progress: Progress) -> None:
            more = []
            if progress.rows and progress.elapsed_s > 0:
                more.append(f"{format_si(progress.rows / progress.elapsed_s)} rows/s")
            if progress.left_s is not None:
                more.append(f"{format_clock(progress.left_s)} left")
            if progress.num_bad:
                more.append(f"{progress.num_bad:,} rows left out")
            if progress.memory_bytes:
                more.append(format_bytes(progress.memory_bytes))
            show(progress.stage, progress.done / progress.total if progress.total else 0.0, " · ".join(more))

        yield tell



"""`embark render`: every file a target needs, linted, into a folder where nothing hand-edited is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.errors import ExitCode, UserError
from embark.formatting import pluralize, to_one_line
from embark.lint.check import lint_texts
from embark.lint.read import kind_of
from embark.render.folder import Found, compare, write
from embark.render.job import make_job
from embark.render.render import render
from embark.spec import RunSpec

STATES = {"new": "new", "changed": "changed", "same": "as it was", "edited": "EDITED by hand",
          "left over": "no longer rendered"}


def render_run(console: Console, spec: RunSpec, out: Path | None, *, diff: bool, force: bool) -> ExitCode:
    """Render, lint, compare with what is there; then show the difference, or write."""
    job = make_job(spec, load_catalog())
    files = render(job)
    _refuse_faults(console, {file.path: file.text for file in files})
    folder = out or Path("deploy") / job.name
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is no folder", fix="--out another one")
    found = compare(folder, files)
    if diff:
        return _show(console, folder, found)
    kept = write(folder, found, force=force)
    states = Counter(one.state for one in found)
    console.data({"folder": str(folder), "files": [{"path": one.path, "state": one.state} for one in found],
                  "left": [one.path for one in kept]})
    if not console.json:
        console.table([{"file": one.path, "": STATES[one.state]} for one in found])
        console.result(f"{to_one_line(job.title)}: {pluralize(len(files), 'file')} in {folder}, {states['new']} new, "
                       f"{states['changed']} changed; linted")
        _say_kept(console, folder, kept)
    return ExitCode.OTHER if any(one.state == "edited" for one in kept) else ExitCode.DONE


def _show(console: Console, folder: Path, found: list[Found]) -> ExitCode:
    """What would change. Exit code 1 if anything would."""
    differ = [one for one in found if one.state != "same"]
    console.data({"folder": str(folder), "files": [{"path": one.path, "state": one.state, "diff": one.diff}
                                                   for one in found]})
    if not console.json:
        for one in differ:
            console.text(f"{one.path}: {STATES[one.state]}", style="bold")
            console.text(one.diff.rstrip("\n"))
        console.result(f"{pluralize(len(differ), 'file')} of {len(found)} would change in {folder}" if differ
                       else f"{folder} is as it would be rendered")
    return ExitCode.OTHER if differ else ExitCode.DONE


def _refuse_faults(console: Console, texts: dict[str, str]) -> None:
    """A rendered file with an error in it is a fault of the renderer: it is not handed over."""
    findings = lint_texts({path: text for path, text in texts.items() if kind_of(Path(path), text[:200].encode())})
    errors = [one for one in findings if one.level == "error"]
    if errors:
        told = "\n".join(f"  {one.path}:{one.line}: {one.code} {one.what}" for one in errors)
        raise UserError(f"what would be rendered does not lint:\n{told}", fix="nothing was written; please report it")
    for one in findings:
        console.text(f"{one.path}:{one.line}: {one.code} {one.what}", style="yellow")


def _say_kept(console: Console, folder: Path, kept: list[Found]) -> None:
    edited = [one.path for one in kept if one.state == "edited"]
    if edited:
        console.result(f"not written, because they were edited by hand: {', '.join(edited)}\n"
                       f"embark render … --diff shows the difference, --force writes over them")
    leftover = [one.path for one in kept if one.state == "left over"]
    if leftover:
        console.text(f"left in {folder}, no longer rendered: {', '.join(leftover)}", style="dim")

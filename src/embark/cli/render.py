"""`embark render`: every file a target needs, linted, into a folder where no manual edit is lost."""

from pathlib import Path

from embark.cli.console import Console
from embark.cli.options import Flag, Settings, Spec
from embark.errors import ExitCode, UserError
from embark.formatting import pluralize
from embark.render.folder import FolderReport, update_folder

STATES = {"new": "new", "changed": "changed", "same": "unchanged", "edited": "EDITED by hand",
          "left over": "no longer rendered"}


def render(
    spec: Spec, /, *, set_: Settings = (), target: str = "", out: Path | None = None, diff: Flag = False,
    force: Flag = False, console: Console = Console(),
) -> int:
    """Write the files that place.target needs on place.machine: manifests, image, cluster, storage, scripts.

    All files are linted. Files edited by hand are kept and reported, with exit code 1.

    Parameters
    ----------
    target
        Instead of place.target: job, jobset, trainjob, pytorchjob, ray, torchx, vertex, vm, tpu-vm or compose.
    out
        The folder to write into; deploy/NAME by default.
    diff
        Only show what would change. Exit code 1 if anything would.
    force
        Also overwrite files edited by hand.
    """
    from embark.catalog import load_catalog
    from embark.lint.rendered import refuse_faults
    from embark.render.job import make_job
    from embark.render.render import render as render_files
    from embark.spec import load_spec

    if diff and force:
        raise UserError("--diff and --force are mutually exclusive", fix="leave one out")
    job = make_job(load_spec(spec, (*set_, f"place.target={target}") if target else set_), load_catalog())
    files = render_files(job)
    for one in refuse_faults(files):
        console.warning(f"{one.path}:{one.line}: {one.code} {one.what}")
    report = update_folder(out or Path("deploy") / job.name, files, diff=diff, force=force)
    console.show(report, _render)
    if diff:
        return ExitCode.OTHER if any(file.state != "same" for file in report.files) else ExitCode.DONE
    return ExitCode.OTHER if set(report.paths("edited")) & set(report.skipped) else ExitCode.DONE


def _render(console: Console, report: FolderReport) -> None:
    changed = [file for file in report.files if file.state != "same"]
    if not report.is_written:
        for file in changed:
            console.text(f"{file.path}: {STATES[file.state]}", style="bold")
            console.text(file.diff.rstrip("\n"))
        console.result(f"{pluralize(len(changed), 'file')} of {len(report.files)} would change in {report.folder}"
                       if changed else f"{report.folder} is up to date")
        return
    console.table([{"file": file.path, "": STATES[file.state]} for file in report.files])
    console.result(f"{pluralize(len(report.files), 'file')} in {report.folder}: {len(report.paths('new'))} new, "
                   f"{len(report.paths('changed'))} changed; linted")
    edited = [path for path in report.paths("edited") if path in report.skipped]
    if edited:
        console.result(f"not overwritten, because edited by hand: {', '.join(edited)}\n"
                       "embark render … --diff shows the differences, --force overwrites them")
    leftover = report.paths("left over")
    if leftover:
        console.text(f"left in {report.folder}, no longer rendered: {', '.join(leftover)}", style="dim")

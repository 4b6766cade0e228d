"""Every rendered file is linted before it is handed over, written or launched."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from embark.catalog import load_catalog
from embark.errors import UserError
from embark.render.folder import File, Files, FolderReport, update_folder
from embark.render.folder_spec import folder_spec
from embark.render.job import make_job
from embark.render.render import render
from embark.spec import RunSpec
from .check import lint_texts
from .read import kind_of
from .rule import Finding


def render_spec(spec: RunSpec) -> Files:
    """Return the files that `place.target` needs on `place.machine`, linted; nothing is written."""
    files = render(make_job(resolve_spec(spec)[0], load_catalog()))
    refuse_faults(files)
    return files


def render_folder(
    source: str, sets: Sequence[str] = (), *, out: Path | None = None, diff: bool = False, force: bool = False
) -> tuple[FolderReport, list[Finding]]:
    """Render a spec into its folder, or compare the two (`diff`); also returns the lint warnings."""
    folder = folder_spec(source, sets, out)
    spec, unread = resolve_spec(folder.spec)
    files = render(make_job(spec, load_catalog()))
    warnings = refuse_faults(files)
    return replace(update_folder(folder, files, diff=diff, force=force), unread=unread), warnings


def resolve_spec(spec: RunSpec) -> tuple[RunSpec, str]:
    """Return the spec with what its data decides, or why the data cannot be read from here."""
    if spec.data.kind == "synthetic":
        return spec, ""
    from embark.data import resolve_if_readable  # imports numpy

    return resolve_if_readable(spec)


def refuse_faults(files: Sequence[File], today: datetime.date | None = None) -> list[Finding]:
    """Return the lint warnings of rendered files; a lint error is a fault of the renderer, and is refused."""
    findings = lint_texts({file.path: file.text for file in files
                           if kind_of(Path(file.path), file.text[:200].encode())}, today)
    errors = [f"  {one.path}:{one.line}: {one.code} {one.what}" for one in findings if one.level == "error"]
    if errors:
        raise UserError("\n".join(["the rendered files have lint errors:", *errors]),
                        "nothing was written or launched; a newer Embark names newer versions of what a cloud "
                            "no longer offers; else please report this bug")
    return findings

"""`embark rollback`: an earlier version of an exported model as the current one."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.errors import UserError
from embark.formatting import MISSING, format_bytes, format_float

if TYPE_CHECKING:
    from embark.export.rollback import ExportedVersion, Rollback, VersionList


def rollback(
    artifact: str, version: Annotated[int | None, Parameter(show_default=False)] = None, /, *,
    list_: Annotated[bool, Parameter(name="--list", negative="", show_default=False)] = False,
    console: Console = Console(),
) -> None:
    """Make an earlier version of an exported model the current one; running servers switch to it.

    Changes no version; `embark rollback ARTIFACT VERSION` also goes forward again. Does not need torch.

    Parameters
    ----------
    artifact
        Where `embark export` wrote to: a folder or a URI.
    version
        The version; default: the newest before the current one.
    list_
        List the versions and change nothing.
    """
    from embark.export import rollback as versions

    if not list_:
        console.show(versions.rollback(artifact, version), _render)
        return
    if version is not None:
        raise UserError("--list lists all versions", fix="leave VERSION or --list out")
    console.show(versions.list_versions(artifact), _render_list)


def _render(console: Console, result: Rollback) -> None:
    if result.version == result.previous:
        console.result(f"{result.uri}: version {result.version} is current already")
        return
    before = f" (was {result.previous})" if result.previous else ""
    console.result(f"{result.uri}: version {result.version} is now current{before}")
    console.text("Running servers switch at their next look, every --poll-s seconds."
                 + (f" Undo: embark rollback {result.uri} {result.previous}" if result.previous else ""))


def _render_list(console: Console, listed: VersionList) -> None:
    headings = {"version": "version", "current": "current", "when": "exported", "run": "run", "step": "step",
                "tables": "tables", "parent": "delta of", "auc": "AUC", "size": "size"}
    console.table([_row(one) for one in listed.versions], headings, title=listed.uri)
    for one in listed.versions:
        if one.refused:
            console.text(f"version {one.version} was refused: {one.refused}")


def _row(one: ExportedVersion) -> dict[str, object]:
    when = datetime.fromtimestamp(one.time_s).strftime("%Y-%m-%d %H:%M:%S") if one.time_s else MISSING
    return {"version": one.version, "current": "yes" if one.is_current else "", "when": when, "run": one.run,
            "step": one.step, "tables": one.tables, "parent": one.parent or "",
            "auc": MISSING if one.auc is None else format_float(one.auc),
            "size": format_bytes(one.num_bytes)}

"""`embark lint`: what is wrong with manifests, images and scripts, as a person and a program see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from embark.cli.console import Console
from embark.errors import ExitCode, UserError
from embark.formatting import pluralize
from embark.lint.check import Change, fix_paths, lint_paths
from embark.lint.rule import Finding


def lint(
    console: Console,
    paths: Sequence[Path],
    *,
    fix: bool = False,
    dry_run: bool = False,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> ExitCode:
    """Tell what is found; with `fix`, mend what can be. Exit code 1 while an error is left."""
    if not paths:
        raise UserError("no file to look at", fix="embark lint FILE…, or a folder")
    if dry_run and not fix:
        raise UserError("--dry-run shows what --fix would change", fix="add --fix, or leave it out")
    findings = lint_paths(paths, select=select, ignore=ignore)
    changes: list[Change] = []
    if fix:
        changes, left = fix_paths(paths, select=select, ignore=ignore)
        num_mended = len(findings) - len(left)
        findings = findings if dry_run else left
        if not dry_run:
            for change in changes:
                _write(change)
    else:
        num_mended = 0
    _tell(console, findings, changes, num_mended, dry_run=dry_run)
    return ExitCode.OTHER if any(one.rule.level == "error" for one in findings) else ExitCode.DONE


def show_rules(console: Console) -> ExitCode:
    """All rules there are."""
    from embark.lint.rules import ALL_RULES

    console.table([{"code": rule.code, "name": rule.name, "level": rule.level, "fix": rule.can_fix,
                    "what happens": rule.happens} for rule in ALL_RULES])
    return ExitCode.DONE


def _tell(
    console: Console, findings: Sequence[Finding], changes: Sequence[Change], num_mended: int, *, dry_run: bool
) -> None:
    levels = Counter(one.rule.level for one in findings)
    console.data({
        "findings": [_row(one) for one in findings],
        "num_errors": levels["error"], "num_warnings": levels["warning"],
        "changes": [{"path": str(change.path), "diff": change.diff} for change in changes],
        "num_mended": num_mended, "dry_run": dry_run,
    })
    if console.json:
        return
    for one in findings:
        style = "bold red" if one.rule.level == "error" else "yellow"
        console.text(f"{one.path}:{one.line}: {one.rule.level} {one.rule.code} {one.rule.name}", style=style)
        console.text(f"    {one.hit.what}")
        console.text(f"    fix: {one.hit.fix}")
    for change in changes if dry_run else ():
        console.text(change.diff.rstrip("\n"))
    if changes:
        verb = "would mend" if dry_run else "mended"
        console.result(f"{verb} {pluralize(num_mended, 'finding')} in {pluralize(len(changes), 'file')}")
    if findings:
        fixable = sum(bool(one.hit.edits) for one in findings)
        hint = f"; --fix mends {fixable:,} of them" if fixable and not changes else ""
        console.result(f"{pluralize(levels['error'], 'error')} and {pluralize(levels['warning'], 'warning')}{hint}")
    else:
        console.result("nothing found")


def _row(one: Finding) -> dict[str, object]:
    return {"path": one.path, "line": one.line, "code": one.rule.code, "name": one.rule.name, "level": one.rule.level,
            "what": one.hit.what, "fix": one.hit.fix, "happens": one.rule.happens, "source": one.rule.source,
            "can_fix": bool(one.hit.edits)}


def _write(change: Change) -> None:
    """In place, with the file's own rights: a script stays one that can be run."""
    from embark.store import write_atomic

    try:
        path = change.path.resolve()
        mode = path.stat().st_mode & 0o7777
        write_atomic(path, change.new)
        path.chmod(mode)
    except OSError as error:
        raise UserError(f"{change.path}: {error.strerror}", fix="nothing of it was changed") from error

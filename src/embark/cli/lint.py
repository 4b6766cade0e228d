"""`embark lint`: its flags and its output."""

from collections.abc import Sequence
from pathlib import Path

from embark.errors import ExitCode
from embark.formatting import pluralize
from embark.lint.check import LintReport
from embark.lint.check import lint as lint_files
from embark.lint.rule import Rule
from embark.lint.rules import ALL_RULES
from .console import Console, Flag, Texts


def lint(
    *files: Path, fix: Flag = False, select: Texts = (), ignore: Texts = (), rules: Flag = False,
    console: Console = Console()
) -> int:
    """Find mistakes in manifests, Dockerfiles and scripts that pass validation, yet make a run hang or train nothing.

    Reads all files together: a Job may need a Service from another file. Exit code 1 if errors remain.

    Parameters
    ----------
    files
        Files and folders to check.
    fix
        Apply the automatic fixes.
    select
        Check only these rules: --select EMB101. Repeatable.
    ignore
        Skip these rules. Repeatable.
    rules
        Instead, list the rules.
    """
    if rules:
        console.show(ALL_RULES, _render_rules)
        return ExitCode.DONE
    report = lint_files(files, fix=fix, select=select, ignore=ignore)
    console.show(report, _render)
    return ExitCode.OTHER if report.num_errors else ExitCode.DONE


def _render_rules(console: Console, rules: Sequence[Rule]) -> None:
    console.table([{"code": rule.code, "name": rule.name, "level": rule.level, "fix": rule.can_fix,
                    "what happens": rule.happens} for rule in rules])


def _render(console: Console, report: LintReport) -> None:
    for one in report.findings:
        console.text(f"{one.path}:{one.line}: {one.level} {one.code} {one.name}",
                     style="bold red" if one.level == "error" else "yellow")
        console.text(f"    {one.what}")
        console.text(f"    fix: {one.fix}")
    if report.changes:
        console.result(f"fixed {pluralize(report.num_fixed, 'finding')} in "
                       f"{pluralize(len(report.changes), 'file')}")
    if report.findings:
        num_fixable = sum(one.can_fix for one in report.findings)
        hint = f"; --fix fixes {num_fixable:,} of them" if num_fixable and not report.changes else ""
        console.result(f"{pluralize(report.num_errors, 'error')} and {pluralize(report.num_warnings, 'warning')}{hint}")
    else:
        console.result("nothing found")

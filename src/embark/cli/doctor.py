"""`embark doctor`: is this machine ready and, with --cloud, the account."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from embark.cli.console import Console
from embark.doctor.check import Check
from embark.errors import ExitCode
from embark.formatting import pluralize
from embark.spec import RunSpec

_STYLES = {"ok": "", "warning": "yellow", "wrong": "bold red"}
_MARKS = {"ok": "ok", "warning": "warning", "wrong": "WRONG"}
_NAME_WIDTH = 16


def examine_machine(console: Console) -> ExitCode:
    """This machine. Exit code 1 if something is wrong; a warning changes nothing."""
    from embark.doctor import Here, examine

    return _tell(console, examine(Here(run_dir=Path("runs"))), "this machine")


def examine_cloud(console: Console, spec: RunSpec) -> ExitCode:
    """The account that would pay for the spec's machines."""
    from embark.doctor.account.examine import examine_account
    from embark.doctor.account.need import need_of
    from embark.launch.shell import Shell

    need = need_of(spec)
    about = f"{need.job.num_nodes} x {need.job.machine.name} {need.way} in {need.region}"
    console.text(f"{about}: {need.num_units} {need.unit}")
    return _tell(console, examine_account(need, Shell()), about)


def _tell(console: Console, checks: Iterable[Check], about: str) -> ExitCode:
    found: list[Check] = []
    for check in checks:
        found.append(check)
        _line(console, check)
    if console.json:
        console.table([{"verdict": c.verdict, "name": c.name, "found": c.found, "expected": c.expected, "fix": c.fix}
                       for c in found], ("verdict", "name", "found", "expected", "fix"))
    wrong = [check.name for check in found if check.verdict == "wrong"]
    warnings = [check.name for check in found if check.verdict == "warning"]
    worth = f"; worth a look: {', '.join(warnings)}" if warnings else ""
    if wrong:
        console.result(f"{about}: not ready: {', '.join(wrong)}{worth}")
        return ExitCode.OTHER
    console.result(f"{about}: ready ({pluralize(len(found), 'check')}){worth}")
    return ExitCode.DONE


def _line(console: Console, check: Check) -> None:
    """What is not well is told under `quiet` too, by the sentence at the end."""
    expected = f"; expected {check.expected}" if check.verdict != "ok" and check.expected else ""
    head = f"{_MARKS[check.verdict]:<8}{check.name:<{_NAME_WIDTH}} "
    for line in _folded(head, f"{check.found}{expected}", console.out.width if console.out.is_terminal else 0):
        console.text(line, style=_STYLES[check.verdict])
    if check.fix:
        console.text(f"{'':8}{'':{_NAME_WIDTH}} fix: {check.fix}", style="green")


def _folded(head: str, text: str, width: int) -> list[str]:
    """On a terminal what is found stays in its column; a fix is left whole, to be copied. 0: no terminal."""
    if not width or len(head) + len(text) <= width:
        return [head + text]
    return textwrap.wrap(text, max(width, len(head) + 20), initial_indent=head, subsequent_indent=" " * len(head),
                         break_long_words=False, break_on_hyphens=False)

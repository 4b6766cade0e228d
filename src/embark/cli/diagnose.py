"""`embark diagnose`: its flags and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag
from embark.errors import ExitCode

if TYPE_CHECKING:
    from embark.diagnose import Diagnosis

MAX_SHOWN = 8


def diagnose(
    *targets: Annotated[str, Parameter(allow_leading_hyphen=True)],
    spec: str = "",
    rules: Flag = False,
    console: Console = Console(),
) -> int:
    """Find out why a run failed or is slow: symptom, cause and fix, from logs, events, manifests and the spec together.

    The cause comes first, with the line that shows it. Exit code 1 if something is found, 0 if nothing is.

    Parameters
    ----------
    targets
        A run, by its directory, URI or the name it was launched by; log files; folders of them; manifests; - for stdin.
    spec
        The spec that ran, if no run is named: tells which network and how much memory to expect.
    rules
        List the rules instead.
    """
    from embark.diagnose import load_rules
    from embark.diagnose.targets import diagnose_targets
    from embark.formatting import pluralize, to_one_line

    if rules:
        console.table([{"code": rule.code, "name": rule.name, "kind": rule.kind, "looks at": ", ".join(rule.where),
                        "cause": rule.cause} for rule in load_rules()])
        return ExitCode.DONE
    found = diagnose_targets(targets, spec_path=spec, warn=console.warning)
    report = found.report
    for text in report.cut_short:
        console.warning(f"{text}: read as far as possible")
    if found.skipped:
        console.text(f"skipped, not text: {pluralize(len(found.skipped), 'file')}", style="dim")
    console.data({
        "diagnoses": [_row(one) for one in report.diagnoses], "num_sources": report.num_sources,
        "cut_short": list(report.cut_short),
        "runs": [{"name": run.name, "state": run.status.state if run.status else "",
                  "reason": run.status.reason if run.status else ""} for run in found.runs]})
    for run in found.runs:
        if run.status:
            console.text(to_one_line(": ".join(filter(None, (run.name, run.status.state, run.status.reason)))))
    for one in report.diagnoses[:MAX_SHOWN]:
        _show(console, one)
    if len(report.diagnoses) > MAX_SHOWN:
        console.text(f"and {len(report.diagnoses) - MAX_SHOWN} more: --json lists them", style="dim")
    if not report.diagnoses:
        console.result(f"nothing found in {pluralize(report.num_sources, 'file')}: no line shows a known fault")
        return ExitCode.DONE
    console.result(f"most likely: {report.diagnoses[0].cause}")
    return ExitCode.OTHER


def _show(console: Console, one: Diagnosis) -> None:
    console.text(f"{one.code} {one.name}", style="yellow" if one.kind == "slow" else "bold red")
    console.text(f"    {one.cause}")
    seen = ", ".join(word for word in (one.ranks_text, f"{one.num_lines:,} lines" * (one.num_lines > 1)) if word)
    console.text(f"    seen: {one.evidence.place}: {one.evidence.text}{f' ({seen})' if seen else ''}")
    if one.follows:
        console.text(f"    follows from it: {', '.join(one.follows)}")
    console.text(f"    fix: {one.fix}")
    if one.command:
        console.text(f"    try: {one.command}")


def _row(one: Diagnosis) -> dict[str, object]:
    return {
        "code": one.code, "name": one.name, "kind": one.kind, "cause": one.cause, "fix": one.fix,
        "command": one.command, "path": one.evidence.source, "line": one.evidence.line, "evidence": one.evidence.text,
        "time": one.evidence.time, "num_lines": one.num_lines, "ranks": list(one.ranks), "follows": list(one.follows),
        "source": one.source,
    }

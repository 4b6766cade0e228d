"""`embark diagnose`: its flags and its output."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from embark.diagnose.report import TargetReport, diagnose_targets
from embark.diagnose.scan import Diagnosis, Rule, load_rules
from embark.errors import ExitCode
from embark.formatting import pluralize, to_one_line
from .console import Console, Flag

MAX_SHOWN = 8


def diagnose(
    *targets: Annotated[str, Parameter(allow_leading_hyphen=True)], spec: str = "", rules: Flag = False,
    console: Console = Console()
) -> int:
    """Find why a run failed or is slow: cause, evidence and fix, from logs, events, manifests and the spec.

    Root causes come first. Exit code 1 if something is found.

    Parameters
    ----------
    targets
        Runs (directory, URI or launched name), log files, folders of them, manifests; - for stdin.
    spec
        The spec of the run, if no run is named; gives the expected network and memory.
    rules
        Instead, list the rules.
    """
    if rules:
        console.show(load_rules(), _render_rules)
        return ExitCode.DONE
    found = diagnose_targets(targets, spec_path=spec, warn=console.warning)
    for text in found.cut_short:
        console.warning(f"{text}: read as far as possible")
    console.show(found, _render)
    return ExitCode.OTHER if found.diagnoses else ExitCode.DONE


def _render_rules(console: Console, rules: Sequence[Rule]) -> None:
    console.table([{"code": rule.code, "name": rule.name, "kind": rule.kind, "looks at": ", ".join(rule.where),
                    "cause": rule.cause} for rule in rules])


def _render(console: Console, found: TargetReport) -> None:
    if found.skipped:
        console.text(f"skipped, not text: {pluralize(len(found.skipped), 'file')}", style="dim")
    for run in found.runs:
        if run.state:
            console.text(to_one_line(": ".join(filter(None, (run.name, run.state, run.reason)))))
    for one in found.diagnoses[:MAX_SHOWN]:
        _render_one(console, one)
    if len(found.diagnoses) > MAX_SHOWN:
        console.text(f"and {len(found.diagnoses) - MAX_SHOWN} more: --json lists them", style="dim")
    if found.diagnoses:
        console.result(f"most likely: {found.diagnoses[0].cause}")
    else:
        console.result(f"nothing found in {pluralize(found.num_sources, 'file')}: no line shows a known fault")


def _render_one(console: Console, one: Diagnosis) -> None:
    console.text(f"{one.code} {one.name}", style="yellow" if one.kind in ("slow", "quality") else "bold red")
    console.text(f"    {one.cause}")
    seen = ", ".join(word for word in (one.ranks_text, f"{one.num_lines:,} lines" * (one.num_lines > 1)) if word)
    console.text(f"    seen: {one.evidence.location}: {one.evidence.text}{f' ({seen})' if seen else ''}")
    if one.follows:
        console.text(f"    follows from it: {', '.join(one.follows)}")
    console.text(f"    fix: {one.fix}")
    if one.command:
        console.text(f"    try: {one.command}")

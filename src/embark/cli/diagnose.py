"""`embark diagnose`: what went wrong, as a person and a program see it."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embark.cli.console import Console
from embark.diagnose import Diagnosis, Report, Source, diagnose, load_rules, sources_of
from embark.diagnose.source import NOTHING, Given
from embark.errors import EmbarkError, ExitCode
from embark.formatting import pluralize, to_one_line
from embark.spec import RunSpec, load_spec

if TYPE_CHECKING:
    from embark.diagnose.launched_run import Launched

MOST_SHOWN = 8


def diagnose_words(console: Console, words: Sequence[str], *, spec: str = "") -> ExitCode:
    """Look through runs and logs. Exit code 1 where something is found, 0 where nothing is."""
    known = load_spec(spec) if spec else None
    with tempfile.TemporaryDirectory(prefix="embark-diagnose-") as folder:
        launched = _launched(console, words, Path(folder))
        given = _given(console, words, launched)
        if known is None and given.spec is not None:
            known = _own_spec(console, str(given.spec))
        known = known or next((run.spec for run in launched.values() if run.spec), None)
        is_run = len(words) == 1 and (bool(launched) or given.spec is not None)
        report = _look(given.sources, known, _names(spec or str(given.spec or ""), words[0] if is_run else ""))
    for text in report.cut_short:
        console.warning(f"{text}: looked at as far as it goes")
    if given.passed_over:
        console.text(f"passed over, as they hold no text: {pluralize(len(given.passed_over), 'file')}", style="dim")
    _tell(console, report, list(launched.values()))
    return ExitCode.OTHER if report.diagnoses else ExitCode.DONE


def show_rules(console: Console) -> ExitCode:
    """All rules there are."""
    console.table([{"code": rule.code, "name": rule.name, "kind": rule.kind, "looks at": ", ".join(rule.where),
                    "cause": rule.cause} for rule in load_rules()])
    return ExitCode.DONE


def _launched(console: Console, words: Sequence[str], folder: Path) -> dict[str, Launched]:
    """Of the words, those that a run was launched by. A file or folder of that name is meant where there is one."""
    from embark.diagnose.launched_run import launched_run

    found = {}
    for word in words:
        if word.startswith("-") or "/" in word or Path(word).exists():
            continue
        if (run := launched_run(word, folder, console.warning)) is not None:
            found[word] = run
            for note in run.notes:
                console.warning(note)
    return found


def _given(console: Console, words: Sequence[str], launched: Mapping[str, Launched]) -> Given:
    """What lies in files, and for a run that was launched what its place said and its own directory holds."""
    rest = [word for word in words if word not in launched]
    given = sources_of(rest) if rest or not launched else NOTHING
    for run in launched.values():
        given += Given(run.sources, None, ())
        try:
            given += sources_of([run.run_uri]) if run.run_uri else NOTHING
        except EmbarkError as error:
            console.warning(f"{run.name}: its directory cannot be read from here: {error.what}")
    return given


def _names(spec: str, run: str) -> dict[str, str]:
    """What stands for SPEC and RUN in a command, where it is known, so that it can be run as it is."""
    return {name: shlex.quote(word) for name, word in (("SPEC", spec), ("RUN", run)) if word}


def _look(sources: Sequence[Source], spec: RunSpec | None, names: Mapping[str, str]) -> Report:
    if spec is None:
        return diagnose(sources, names=names)
    from embark.catalog import load_catalog
    from embark.diagnose.alternatives import what_fits
    from embark.plan.predict import predict

    catalog = load_catalog()
    return diagnose(sources, spec=spec, catalog=catalog, names=names,
                    what_fits=lambda of, whose: what_fits(of, catalog, predict, whose))


def _own_spec(console: Console, path: str) -> RunSpec | None:
    """A run's own spec helps, and is not needed."""
    try:
        return load_spec(path)
    except EmbarkError as error:
        console.warning(f"{path} is not used: {error.what.splitlines()[0]}")
        return None


def _tell(console: Console, report: Report, launched: Sequence[Launched]) -> None:
    console.data({"diagnoses": [_row(one) for one in report.diagnoses], "num_sources": report.num_sources,
                  "cut_short": list(report.cut_short),
                  "runs": [{"name": run.name, "state": run.status.state if run.status else "",
                            "reason": run.status.reason if run.status else ""} for run in launched]})
    if console.json:
        return
    for run in launched:
        if run.words:
            console.text(f"{run.name}: {to_one_line(run.words)}")
    for one in report.diagnoses[:MOST_SHOWN]:
        _tell_one(console, one)
    if len(report.diagnoses) > MOST_SHOWN:
        console.text(f"and {len(report.diagnoses) - MOST_SHOWN} more: --json lists them", style="dim")
    if not report.diagnoses:
        console.result(f"nothing found in {pluralize(report.num_sources, 'file')}: no line shows a fault that Embark knows")
    else:
        console.result(f"most likely: {report.diagnoses[0].cause}")


def _tell_one(console: Console, one: Diagnosis) -> None:
    style = "yellow" if one.kind == "slow" else "bold red"
    console.text(f"{one.code} {one.name}", style=style)
    console.text(f"    {one.cause}")
    times = [one.ranks_words, f"{one.num_lines:,} lines" if one.num_lines > 1 else ""]
    seen = ", ".join(word for word in times if word)
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

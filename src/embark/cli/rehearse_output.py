"""`embark rehearse`: a job's manifest is run here, watched, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embark.cli.console import Console
from embark.errors import ExitCode, UserError
from embark.formatting import pluralize, to_one_line
from embark.lint.rule import Finding
from embark.rehearse.controller import Listener
from embark.rehearse.downscale import Change
from embark.rehearse.faults import FaultKind, read_duration
from embark.rehearse.objects import manifest_texts
from embark.rehearse.rehearsal import Asked, EngineName, Prepared, Rehearsed, prepare, rehearse

_MANIFESTS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Words:
    """The command line."""

    spec: str
    sets: tuple[str, ...]
    nodes: int | None
    processes: int
    files: Path | None
    engine: EngineName
    image: str
    steps: int
    limit: str
    keep: bool
    faults: tuple[tuple[FaultKind, tuple[str, ...]], ...]


def rehearse_words(console: Console, words: Words) -> ExitCode:
    """Read, lint, prepare, run, judge. Exit code 0 only where all of it holds."""
    if words.processes < 1 or words.steps < 1 or (words.nodes is not None and words.nodes < 1):
        raise UserError("--nodes, --processes and --steps are numbers from 1 on", fix="--processes 2")
    asked = Asked(words.processes, words.steps, words.engine, words.image, read_duration(words.limit, "--limit"),
                  words.faults, words.keep)
    texts, where = _texts(words)
    findings = _lint(texts)
    for one in findings:
        console.text(f"{one.path}:{one.line}: {one.code} {one.what}", style="yellow")
    prepared = prepare(texts, where, asked)
    pods = prepared.workload.pods
    console.text(f"{prepared.workload.kind} {prepared.workload.name}: {pluralize(len(pods), 'pod')} of "
                 f"{words.processes} {'process' if words.processes == 1 else 'processes'}", style="bold")
    told: list[Change] = []

    def say(changes: Sequence[Change], engine: str) -> None:
        told.extend(changes)
        console.text("Not as in the cluster:")
        for change in changes:
            console.text(f"  {change}", style="dim")
        console.text(engine)

    listener = Listener(
        lambda pod, rank, text: console.text(f"{pod}{f' [{rank}]' if rank else ''} | {text}"),
        lambda text: console.text(f"== {text}", style="cyan"),
    )
    done = rehearse(prepared, asked, listener, say=say)
    _tell(console, prepared, done, findings, told)
    return ExitCode.DONE if done.verdict.is_ok else ExitCode.OTHER


def _texts(words: Words) -> tuple[dict[str, str], str]:
    """The manifests, and what to call them."""
    path = words.files or Path(words.spec)
    if path.is_dir() or (path.suffix in _MANIFESTS and path.is_file()):
        if words.nodes is not None or (words.sets and words.files is None):
            raise UserError("--nodes and --set change a spec, and these are manifests",
                            fix="embark rehearse SPEC --nodes …, or render it anew")
        return manifest_texts(path), str(path)
    if words.files is not None or path.suffix in _MANIFESTS:
        raise UserError(f"{path}: is not there", fix="embark render SPEC --out FOLDER writes it")
    return _rendered(words), words.spec


def _rendered(words: Words) -> dict[str, str]:
    """What `embark render` would write."""
    from embark.catalog import load_catalog
    from embark.render.job import make_job
    from embark.render.render import own_files
    from embark.spec import load_spec

    sets = [*words.sets, *([f"place.nodes={words.nodes}"] if words.nodes is not None else [])]
    job = make_job(load_spec(words.spec, sets), load_catalog())
    target = job.spec.place.target
    if target not in ("job", "jobset", "trainjob", "pytorchjob"):
        raise UserError(f'place.target = "{target}" makes no pods that can be rehearsed',
                        fix="set it to job, jobset, trainjob or pytorchjob")
    return {file.path: file.text for file in own_files(job) if file.path.endswith(_MANIFESTS)}


def _lint(texts: Mapping[str, str]) -> list[Finding]:
    """Its errors: what is about to be seen to happen."""
    from embark.lint.check import lint_texts

    return [one for one in lint_texts(dict(texts)) if one.level == "error"]


def _tell(
    console: Console, prepared: Prepared, done: Rehearsed, findings: Sequence[Finding], changes: Sequence[Change]
) -> None:
    verdict, outcome = done.verdict, done.outcome
    progress = outcome.progress if outcome is not None else None
    console.data({
        "ok": verdict.is_ok, "verdict": verdict.sentence, "fix": verdict.fix, "evidence": verdict.evidence,
        "kind": prepared.workload.kind, "name": prepared.workload.name,
        "pods": [pod.name for pod in prepared.workload.pods], "engine": done.engine,
        "checks": [{"name": check.name, "ok": check.is_ok, "text": check.text} for check in verdict.checks],
        "final_loss": verdict.final_loss, "lost_steps": verdict.lost_steps,
        "world_sizes": progress.world_sizes if progress else [], "steps": progress.step if progress else 0,
        "evaluated": progress.evaluated if progress else {},
        "resumed_from": [one.step for one in progress.resumes] if progress else [],
        "ends": [{"pod": end.pod, "code": end.code, "at_s": round(end.at_s, 3), "preempted": end.is_disrupted}
                 for end in outcome.ends] if outcome else [],
        "elapsed_s": outcome.elapsed_s if outcome else 0.0,
        "lint": [{"path": one.path, "line": one.line, "code": one.code, "what": one.what}
                 for one in findings],
        "changes": [{"what": one.what, "there": one.there, "here": one.here} for one in changes],
        "kept": done.kept,
    })
    if console.json:
        return
    if verdict.checks:
        console.table([{"": "ok" if check.is_ok else "NO", "what": check.name, "how": check.text}
                       for check in verdict.checks])
    console.result(f"{'rehearsed' if verdict.is_ok else 'FAILED'}: {verdict.sentence}")
    if verdict.evidence:
        console.text(f"  seen: {to_one_line(verdict.evidence)}")
    if verdict.fix:
        console.text(f"  fix: {verdict.fix}")
    if done.kept:
        console.text(f"kept: {done.kept}")

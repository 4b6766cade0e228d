"""Diagnoses what a user names (launched runs, run directories, logs, folders of logs, manifests, standard input): which
finding is the cause, which ones only follow from it, and, if memory ran out, what the plan says would fit."""

import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from embark.errors import EmbarkError
from embark.events.quality import start_command
from embark.formatting import redact, to_one_line
from embark.launch.backend import LogLine, RunEvent, backend_of
from embark.launch.run_registry import lookup_run
from embark.launch.shell import Shell
from embark.plan.predict import predict
from embark.plan.prediction import Setup
from embark.spec import RunSpec, divides, load_spec
from embark.store import SPEC
from embark.values import frozen
from .checks import GIB, NcclLog, StepTimes, machine_of
from .scan import Diagnosis, Evidence, RuleMatch, Scan, load_rules
from .source import DiagnosedFile, sources_of

MemoryKind = Literal["device", "host"]
MAX_QUOTED = 300
DOUBLINGS = (2, 4, 8, 16, 32, 64)  # Factors for fewer samples or more nodes that are tried if memory ran out.
TIERS = {"cause": 0, "symptom": 1, "summary": 2, "quality": 3, "slow": 4}
ENDED_NOTHING = ("quality", "slow")
OUT_OF_MEMORY: Mapping[str, MemoryKind] = {
    "gpu-out-of-memory": "device", "tables-do-not-fit": "device", "host-out-of-memory": "host", "killed": "host"
}
"""Rules about which the plan has advice, and the memory that ran out."""


@frozen
class Report:
    """The findings of a diagnosis."""

    diagnoses: tuple[Diagnosis, ...]  # The cause first.
    num_sources: int
    cut_short: tuple[str, ...] = ()  # Sources that could not be read to their end.


def diagnose(
    sources: Sequence[DiagnosedFile], *, spec: RunSpec | None = None, names: Mapping[str, str] | None = None
) -> Report:
    """Search all sources together. With a spec, the expected network and memory count too. `names` replace placeholders
    like SPEC in commands."""
    nccl, steps = NcclLog(), StepTimes()
    scan = Scan(load_rules(), (*nccl.listeners, *steps.listeners))
    for order, source in enumerate(sources):
        if source.form == "events":
            for text, evidence in steps.read_events(source, order):
                scan.take_line(text, evidence)
        elif source.form == "manifest" and source.path is not None:
            scan.read(source, order, only=lambda rule: "manifest" in rule.where)
        else:
            scan.read(source, order)
    matches = [*scan.matches, *nccl.findings(spec), *steps.findings()]
    found = [_diagnosis(match, spec, names or {}) for match in _ranked(_without_weaker(_merged(matches)))]
    return Report(tuple(_joined(found)), len(sources), tuple(scan.cut_short))


def _merged(matches: Sequence[RuleMatch]) -> list[RuleMatch]:
    """Return one match for each rule, by the first line or check that shows it."""
    by_code: dict[str, RuleMatch] = {}
    for match in matches:
        known = by_code.get(match.rule.code)
        by_code[match.rule.code] = match if known is None else known.merged(match)
    return [match for match in by_code.values() if match.num_lines >= match.rule.num_least]


def _without_weaker(matches: Sequence[RuleMatch]) -> list[RuleMatch]:
    """Drop matches that another one states better."""
    codes = {match.rule.code for match in matches}
    return [match for match in matches if not codes & set(match.rule.unless)]


def _ranked(matches: Sequence[RuleMatch]) -> list[RuleMatch]:
    """Sort matches: causes, then symptoms, then summaries; equal kinds by time. A match that another one explains
    follows it."""
    has_times = all(match.first.time for match in matches)
    following = {code for match in matches for code in match.rule.explains}

    def key(match: RuleMatch) -> tuple[int, bool, str, tuple[int, int]]:
        time = match.first.time if has_times else ""
        return TIERS[match.rule.kind], match.rule.code in following, time, match.first.order

    return sorted(matches, key=key)


def _joined(found: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """List what follows from the first cause with it, not as a finding of its own."""
    fatal = [one for one in found if one.kind not in ENDED_NOTHING]
    if fatal:
        first, rest = fatal[0], fatal[1:]
        explained = next((rule.explains for rule in load_rules() if rule.code == first.code), ())
        follows = [one for one in rest if TIERS[one.kind] > TIERS[first.kind] or one.code in explained]
        yield replace(first, follows=tuple(one.name for one in follows))
        yield from (one for one in rest if one not in follows)
    yield from (one for one in found if one.kind in ENDED_NOTHING)


def _diagnosis(match: RuleMatch, spec: RunSpec | None, names: Mapping[str, str]) -> Diagnosis:
    rule, values = match.rule, _Values(match.values)
    fix = match.fix or rule.fix.format_map(values)
    memory = OUT_OF_MEMORY.get(rule.name)
    if memory is not None and spec is not None and (advice := memory_advice(spec, memory)):
        fix = f"{advice}. Else: {fix}"
    command = start_command(match.command or rule.command.format_map(values),
                            has_stream=spec is not None and spec.stream.is_on)
    for name, word in names.items():
        command = word.join(re.split(rf"(?<![\w-]){name}(?![\w-])", command))
    return Diagnosis(
        code=rule.code, name=rule.name, kind=rule.kind, cause=match.cause or rule.cause.format_map(values), fix=fix,
        command=command, evidence=_quoted(match.first), num_lines=match.num_lines, ranks=tuple(sorted(match.ranks)),
        source=rule.source
    )


def _quoted(evidence: Evidence) -> Evidence:
    """Return the line as it may be shown: one line, no control characters, no secrets, of readable length."""
    text = redact(to_one_line(evidence.text))
    if len(text) > MAX_QUOTED:
        text = text[: MAX_QUOTED - 1] + "…"
    return replace(evidence, source=to_one_line(evidence.source), text=text)


class _Values(dict[str, str]):
    """Values of a pattern's groups; a missing one remains as a word to fill in."""

    def __missing__(self, name: str) -> str:
        return name.upper()


def memory_advice(spec: RunSpec, memory_kind: MemoryKind = "device") -> str:
    """Return one sentence: whether the spec fits its machine, and the nearest change that does; empty if it names no
    machine.

    `memory_kind` is the memory that ran out.
    """
    if (machine := machine_of(spec)) is None:
        return ""
    setup = Setup(spec, machine, spec.place.min_nodes)
    now = predict(setup)
    where = f"{spec.place.min_nodes} x {machine.name}"
    memory = now.memory
    if now.fits and memory_kind == "host":
        parts = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in memory.host.items() if size)
        limit = f" of {memory.host_limit / GIB:,.1f}" if memory.host_limit else ""
        return (f"the plan says a host of {where} needs {memory.host_total / GIB:,.1f}{limit} GiB ({parts}): give the "
                "container at least that plus /dev/shm, or look for what else uses memory there")
    if now.fits:
        is_tpu = machine.gpu.kind == "tpu"
        device, command = ("chip", "fuser -v /dev/accel* /dev/vfio/*") if is_tpu else ("GPU", "nvidia-smi")
        return (f"the plan says it fits {where}, with {memory.device_total / GIB:,.1f} of "
                f"{memory.device_limit / GIB:,.1f} GiB on the fullest rank: look for another process on the {device} "
                f"({command}), or for memory that is not the model's")
    offers = [words for words in (_smaller_batch(setup), _more_nodes(setup)) if words]
    rest = f"; would fit: {', or '.join(offers)}" if offers else "; no smaller batch and no number of nodes up to " \
        f"{DOUBLINGS[-1] * spec.place.min_nodes} fits: use a machine with more memory, or train.table_dtype = \"fp16\""
    return f"the plan says it does not fit {where}: {now.why}{rest}"


def _smaller_batch(setup: Setup) -> str:
    for factor in DOUBLINGS:
        size = setup.spec.train.batch_size // factor // setup.num_ranks * setup.num_ranks
        if size < setup.num_ranks:
            break
        train = setup.spec.train.changed(batch_size=size)
        if predict(replace(setup, spec=setup.spec.changed(train=train))).fits:
            return f"--set train.batch_size={size}"
    return ""


def _more_nodes(setup: Setup) -> str:
    for factor in DOUBLINGS:
        larger = replace(setup, num_nodes=setup.num_nodes * factor)
        if divides(setup.spec.train.batch_size, larger.num_ranks) and predict(larger).fits:
            return f"--set place.nodes={larger.num_nodes}"
    return ""


Warn = Callable[[str], None]


@frozen
class LaunchedRun:
    """A run that was launched from here, and what its backend still has of it."""

    name: str
    state: str  # Empty if its backend does not answer.
    reason: str
    sources: tuple[DiagnosedFile, ...] = field(repr=False)
    spec: RunSpec | None = field(repr=False)
    run_uri: str = field(repr=False)


@frozen
class TargetReport(Report):
    """The diagnosis of everything that was named."""

    runs: tuple[LaunchedRun, ...] = ()
    skipped: tuple[str, ...] = ()  # Files that are not text.


def diagnose_targets(
    targets: Sequence[str | Path] | str | Path, *, spec_path: str = "", logs: Sequence[str] = (),
    warn: Warn = lambda _: None
) -> TargetReport:
    """Diagnose runs, logs and manifests together. What cannot be read is a warning. `logs` are more of the same run."""
    named = [str(one) for one in ([targets] if isinstance(targets, str | Path) else targets)]
    spec = load_spec(spec_path) if spec_path else None
    with tempfile.TemporaryDirectory(prefix="embark-diagnose-") as folder:
        runs = {target: run for target in named if (run := _launched_run(target, Path(folder), warn)) is not None}
        files = [*(target for target in named if target not in runs), *logs]
        found = [sources_of(files)] if files or not runs else []
        for run in runs.values():
            with _warning(warn, f"{run.name}: cannot read its run directory from here"):
                found += [sources_of([run.run_uri])] if run.run_uri else []
        own = next((one.spec for one in found if one.spec), None)
        own_spec = own.name if own else ""
        if spec is None and own is not None:
            with _warning(warn, f"{own_spec} is not used"):
                if own.data is not None:
                    (Path(folder) / SPEC).write_bytes(own.data)
                spec = load_spec(own_spec if own.data is None else str(Path(folder) / SPEC))
        spec = spec or next((run.spec for run in runs.values() if run.spec), None)
        sources = [source for run in runs.values() for source in run.sources]
        sources += [source for one in found for source in one.sources]
        names = {"SPEC": spec_path or own_spec, "RUN": named[0] if len(named) == 1 and (runs or own_spec) else ""}
        report = diagnose(sources, spec=spec, names={name: shlex.quote(word) for name, word in names.items() if word})
    return TargetReport(report.diagnoses, report.num_sources, report.cut_short, tuple(runs.values()),
                        tuple(path for one in found for path in one.skipped))


def _launched_run(name: str, folder: Path, warn: Warn) -> LaunchedRun | None:
    """Return a run's events and logs, written into the folder; None if no run of that name was launched from here.

    A file or folder of that name takes precedence.
    """
    if name.startswith("-") or "/" in name or Path(name).exists():
        return None
    run = lookup_run(name)
    if run is None:
        return None
    name, handle = run.handle.name, run.handle
    state, reason, sources = "", "", []
    with _warning(warn, f"{name}: {handle.backend} does not answer"):
        backend = backend_of(handle, Shell(), warn, is_hasty=True)
        status = backend.status(handle)
        state, reason = status.state, status.reason
        with _warning(warn, f"{name}: cannot read its events"):
            lines = map(_event_text, backend.events(handle))
            sources.append(_write(folder / f"{name}.events", f"{name} (events)", lines))
        with _warning(warn, f"{name}: cannot read its logs"):
            sources.append(_write(folder / f"{name}.log", f"{name} (logs)", map(_log_text, backend.logs(handle))))
    return LaunchedRun(name, state, reason, tuple(sources), run.spec, handle.run_uri)


@contextmanager
def _warning(warn: Warn, what: str) -> Iterator[None]:
    try:
        yield
    except EmbarkError as error:
        warn(f"{what}: {error.what.splitlines()[0]}")


def _write(path: Path, name: str, lines: Iterable[str]) -> DiagnosedFile:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return DiagnosedFile(name, "log", path)


def _event_text(event: RunEvent) -> str:
    """Return an event as `kubectl get events` prints it, which rules know."""
    kind = "Warning" if event.is_warning else "Normal"
    return f"{_timestamp(event.time_s)} {kind} {event.reason} pod/{event.source} {event.text}"


def _log_text(line: LogLine) -> str:
    timestamp = f"{_timestamp(line.time_ns / 1e9)} " if line.time_ns else ""
    return f"{timestamp}{line.source} | {line.text}"


def _timestamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

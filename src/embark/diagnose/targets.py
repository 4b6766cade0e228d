"""What a user names to diagnose: launched runs, run directories, logs, folders of logs, manifests, standard input."""

import shlex
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from embark.diagnose.diagnose import Report, diagnose
from embark.diagnose.source import DiagnosedFile, sources_of
from embark.errors import EmbarkError, UserError
from embark.launch.backend import LogLine, RunEvent, backend_of
from embark.launch.run_registry import lookup_run
from embark.launch.shell import Shell
from embark.spec import RunSpec, load_spec, resolve

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A run that was launched from here, and what its backend still has of it."""

    name: str
    state: str  # Empty if its backend does not answer.
    reason: str
    sources: tuple[DiagnosedFile, ...] = field(repr=False)
    spec: RunSpec | None = field(repr=False)
    run_uri: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TargetReport(Report):
    """The diagnosis of everything that was named."""

    runs: tuple[LaunchedRun, ...] = ()
    skipped: tuple[str, ...] = ()  # Files that are not text.


def diagnose_targets(
    targets: Sequence[str | Path] | str | Path, *, spec_path: str = "", logs: Sequence[str] = (),
    warn: Warn = lambda _: None,
) -> TargetReport:
    """Diagnose runs, logs and manifests together. What cannot be read is a warning. `logs`: more of the same run's."""
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
                spec = load_spec(own_spec) if own.data is None else _parse_spec(own.data, own_spec)
        spec = spec or next((run.spec for run in runs.values() if run.spec), None)
        sources = [source for run in runs.values() for source in run.sources]
        sources += [source for one in found for source in one.sources]
        names = {"SPEC": spec_path or own_spec, "RUN": named[0] if len(named) == 1 and (runs or own_spec) else ""}
        report = diagnose(sources, spec=spec, names={name: shlex.quote(word) for name, word in names.items() if word})
    return TargetReport(report.diagnoses, report.num_sources, report.cut_short, tuple(runs.values()),
                        tuple(path for one in found for path in one.skipped))


def _launched_run(name: str, folder: Path, warn: Warn) -> LaunchedRun | None:
    """Its events and logs, written into the folder; None where no run of that name was launched from here. A file or
    folder of that name takes precedence."""
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
    """As `kubectl get events` prints it, which rules know."""
    kind = "Warning" if event.is_warning else "Normal"
    return f"{_timestamp(event.time_s)} {kind} {event.reason} pod/{event.source} {event.text}"


def _log_text(line: LogLine) -> str:
    timestamp = f"{_timestamp(line.time_ns / 1e9)} " if line.time_ns else ""
    return f"{timestamp}{line.source} | {line.text}"


def _timestamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _parse_spec(data: bytes, name: str) -> RunSpec:
    text = data.decode(errors="replace")
    try:
        return resolve(tomllib.loads(text), where=name, text=text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not TOML: {error}", fix="strings are in quotes, sections in [brackets]") from error

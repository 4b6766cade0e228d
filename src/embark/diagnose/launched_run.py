"""A run that was handed over: what its place says of it, and what its machines wrote, as files to look through."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from embark.diagnose.source import Source
from embark.errors import EmbarkError, UserError
from embark.launch.backend import LogLine, RunEvent, Status, Tell
from embark.launch.backend_selection import Place, backend_of
from embark.launch.run_registry import RunRecord, find_run
from embark.launch.shell import Shell
from embark.spec import RunSpec, resolve


@dataclass(frozen=True, slots=True)
class Launched:
    """All that could be had of it."""

    name: str
    status: Status | None
    """None where its place does not answer."""
    sources: tuple[Source, ...]
    spec: RunSpec | None
    run_uri: str
    notes: tuple[str, ...]
    """What could not be had."""

    @property
    def words(self) -> str:
        """`pending: no node has enough GPUs free`; empty where nothing is known."""
        if self.status is None:
            return ""
        return f"{self.status.state}: {self.status.reason}" if self.status.reason else self.status.state


def launched_run(word: str, folder: Path, tell: Tell) -> Launched | None:
    """Its events and logs, written into the folder; None where no run of that name was launched from here."""
    try:
        run = find_run(word)
    except UserError as error:
        if "launched in" in error.what:  # which of several
            raise
        return None
    notes: list[str] = []
    status, sources = None, []
    try:
        place = backend_of(run.handle, Shell(), tell, is_hasty=True)
        status = place.status(run.handle)
        sources = list(_sources(place, run, folder, notes))
    except EmbarkError as error:
        notes.append(f"{run.handle.name}: its place cannot be asked: {error.what}")
    return Launched(run.handle.name, status, tuple(sources), _spec(run), run.handle.run_uri, tuple(notes))


def _sources(place: Place, run: RunRecord, folder: Path, notes: list[str]) -> Iterator[Source]:
    """What of it is not there, or not yet, is a note."""
    name = run.handle.name
    try:
        yield _written(folder / f"{name}.events", f"{name} (events)", map(_event_text, place.events(run.handle)))
    except EmbarkError as error:
        notes.append(f"{name}: its events cannot be had: {error.what}")
    try:
        yield _written(folder / f"{name}.log", f"{name} (logs)", map(_log_text, place.logs(run.handle)))
    except EmbarkError as error:
        notes.append(f"{name}: its logs cannot be had: {error.what}")


def _written(path: Path, name: str, lines: Iterable[str]) -> Source:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return Source(name, "log", path)


def _event_text(event: RunEvent) -> str:
    """As `kubectl get events` has it, which rules know."""
    kind = "Warning" if event.is_warning else "Normal"
    return f"{_stamp(event.time_s)} {kind} {event.reason} pod/{event.source} {event.text}"


def _log_text(line: LogLine) -> str:
    stamp = f"{_stamp(line.time_ns / 1e9)} " if line.time_ns else ""
    return f"{stamp}{line.source} | {line.text}"


def _stamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _spec(run: RunRecord) -> RunSpec | None:
    try:
        return resolve(tomllib.loads(run.spec_toml))
    except (EmbarkError, ValueError):
        return None

"""One run with all that is known about it: its events, status, spec, price, checkpoints and diagnosis."""

import shlex
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

from embark.catalog.pricing import RunPrice, price_of_run
from embark.diagnose.report import diagnose_targets
from embark.diagnose.scan import Diagnosis
from embark.errors import EmbarkError, UserError
from embark.events.quality import start_command
from embark.events.spending import Interruption, Spending
from embark.events.summary import outcome_sentence, resume_hint
from embark.events.traffic import WINDOW_S
from embark.formatting import format_count, format_duration, to_one_line
from embark.spec import parse_spec
from embark.store import EVENTS, SPEC, RunDir, find_run
from embark.store.checkpoint_inspect import CheckpointInfo, list_checkpoints
from embark.values import JsonDict, JsonMap, frozen
from .record import Record, read_record
from .run_files import LAUNCH_LOG, RunFiles

State = Literal["waiting", "running", "finished", "stopped", "failed", "killed", "deleted"]
LABELS: dict[State, str] = {"waiting": "not started", "deleted": "files deleted"}
MANY_GAPS = 10  # A run without an event for this many of its usual intervals counts as killed.
LEAST_SILENCE_S = 30.0
LEAST_SILENCE_BEFORE_STEPS_S = 900.0
"""Before the first step kernels are compiled, data is read and other machines are waited for."""
LEAST_SILENCE_REMOTE_S = 1800.0  # The events of a remote run arrive when it saves.
MAX_DIAGNOSED_BYTES = 64 << 20

Warn = Callable[[str], None]


@frozen
class Liveness:
    """The state of a run, and when it last gave a sign of life."""

    state: State
    sentence: str
    last_s: float | None  # Unix time of the last sign of life.
    silent_s: float  # Seconds since the last event.

    @property
    def label(self) -> str:
        return LABELS.get(self.state, self.state)


def status_of(
    record: Record, now_s: float, *, is_remote: bool = False, is_deleted: bool = False, heard_s: float | None = None
) -> Liveness:
    """Return the state of a run. Events do not say that a process was killed: a long silence does.

    `heard_s`: when the file was last seen to grow, by this machine's clock.
    """
    last_s = max((time_s for time_s in (record.last_s, heard_s) if time_s is not None), default=None)
    silent_s = 0.0 if last_s is None else max(0.0, now_s - last_s)
    if record.traffic and not is_deleted:
        return _serving(record, last_s, silent_s)
    state: State = "running"
    if is_deleted:
        state = "deleted"
    elif not record.num_events:
        state = "waiting"
    elif record.end or record.interrupt:
        outcome = record.end.get("outcome")
        state = "finished" if outcome == "done" else "failed" if outcome == "failed" else "stopped"
    elif record.error:
        state = "failed"
    elif silent_s > max_silence_s(record, is_remote=is_remote):
        state = "killed"
    return Liveness(state, _sentence(record, state, silent_s, is_remote=is_remote), last_s, silent_s)


def _serving(record: Record, last_s: float | None, silent_s: float) -> Liveness:
    """Return the state of a server, which writes an event every ten seconds."""
    served, state = record.traffic, "running"
    sentence = f"Serving {served.model}, {served.sentence()}."
    if served.has_ended:
        state, sentence = "stopped", f"The server of {served.model} ended; version {served.version} answered last."
    elif silent_s > MANY_GAPS * WINDOW_S:
        state, sentence = "killed", (f"No sign of life for {format_duration(silent_s)}: a server writes an event every "
                                     f"{WINDOW_S:g} s. Version {served.version} of {served.model} answered last.")
    return Liveness(cast(State, state), sentence, last_s, silent_s)


def max_silence_s(record: Record, *, is_remote: bool) -> float:
    """Return the silence after which a run counts as killed.

    A save or an evaluation may take as long as one did before, and half as long again.
    """
    if is_remote:
        return max(LEAST_SILENCE_REMOTE_S, MANY_GAPS * record.usual_save_gap_s)
    least_s = LEAST_SILENCE_S if record.step else LEAST_SILENCE_BEFORE_STEPS_S
    return max(least_s, MANY_GAPS * record.usual_gap_s, 1.5 * record.longest_gap_s)


def _sentence(record: Record, state: State, silent_s: float, *, is_remote: bool) -> str:
    if state == "deleted":
        return "Its files were deleted; this is what was read before."
    if state == "waiting":
        return "No events yet: the first comes when training starts."
    if state in ("finished", "stopped"):
        return outcome_sentence(record)
    at = f"step {format_count(record.steps_done)}"
    if record.num_steps:
        at += f" of {format_count(record.num_steps)}"
    if state == "running":
        left_s = record.seconds_left
        return f"Running: {at}" + (f", about {format_duration(left_s)} left." if left_s else ".")
    hint = resume_hint(record)
    if state == "failed":
        why = to_one_line(record.error_text.partition("\n")[0].partition(" fix: ")[0]).rstrip(".")
        return f"Failed at {at}{f': {why}' if why else ''}. {hint}"
    gap_s = record.usual_save_gap_s if is_remote else record.usual_gap_s
    usual = f" (usually an event every {format_duration(gap_s)})" if gap_s else ""
    return f"No sign of life for {format_duration(silent_s)}{usual}, at {at}. {hint}"


@dataclass(frozen=True)
class RunContext:
    """A run, as of `now_s`."""

    name: str
    uri: str
    record: Record
    now_s: float
    is_remote: bool = False
    spec: JsonMap = field(default_factory=dict)  # The values of its `spec.toml`; empty where there is none.
    spec_toml: str = ""
    price: RunPrice = field(default_factory=RunPrice)
    checkpoints: tuple[CheckpointInfo, ...] = ()
    best_by: str = ""  # The metric that checkpoints are ranked by.
    diagnoses: tuple[Diagnosis, ...] | None = None  # None: not diagnosed.

    @cached_property
    def status(self) -> Liveness:
        return status_of(self.record, self.now_s, is_remote=self.is_remote)

    @cached_property
    def interruptions(self) -> tuple[Interruption, ...]:
        return self.record.interruptions()

    @cached_property
    def spent(self) -> Spending | None:
        return self.record.spending(self.price.usd_per_hour, self.now_s if self.status.state == "running" else None)

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that repeat the run, or resume it."""
        is_done = self.status.state == "finished"
        command = start_command("embark train", has_stream=bool((self.spec.get("stream") or {}).get("source")))
        if self.is_remote:
            copy = shlex.join(["embark", "data", "copy", f"{self.uri}/{SPEC}", SPEC])
            return copy, f"{command} {SPEC}" + (" --fresh" if is_done else "")
        train = shlex.join([*command.split(), str(Path(self.uri.removeprefix("file://")) / SPEC)])
        return (f"{train} --fresh",) if is_done else (f"{train}   # resumes from its last checkpoint",
                                                      f"{train} --fresh")


def read_run(run: RunFiles | str, warn: Warn = lambda _: None, *, is_brief: bool = False) -> RunContext:
    """Read what is known about a run, by its files, its directory, its name under ./runs or its URI.

    What cannot be read is left out with a warning; `is_brief` leaves out checkpoints and diagnosis.
    """
    files = RunFiles(find_run(run).uri) if isinstance(run, str) else run
    record, spec_toml = read_record(files), files.read_text(SPEC)
    values: JsonDict = {}
    if spec_toml is None:
        warn(f"{files.uri}/{SPEC} does not exist: the report cannot show what was run")
    else:
        try:
            values = tomllib.loads(spec_toml)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            warn(f"{files.uri}/{SPEC}: {error}")
    checkpoints, best_by = ((), "") if is_brief else _checkpoints(files, warn)
    diagnoses = None
    if not is_brief:
        try:
            diagnoses = diagnose_run(files)
        except EmbarkError as error:
            warn(f"no diagnosis: {error.what}")
    return RunContext(
        name=files.name, uri=files.uri, record=record, now_s=time.time(), is_remote=files.is_remote, spec=values,
        spec_toml=spec_toml or "", price=price_of_run(parse_spec(spec_toml), record.start),
        checkpoints=checkpoints, best_by=best_by, diagnoses=diagnoses)


def diagnose_run(files: RunFiles) -> tuple[Diagnosis, ...]:
    """Return what `embark diagnose` finds in a run's files, and in what it printed where it was launched."""
    names = [EVENTS, *(log.name for log in files.logs())]
    sizes = {name: size for name in names if (size := files.size_bytes(name)) is not None}
    if sum(sizes.values()) > MAX_DIAGNOSED_BYTES:
        raise UserError(f"too long to diagnose here; run: embark diagnose {files.uri}")
    logs = [str(files.launch_log)] if LAUNCH_LOG in sizes else []
    run = files.uri if files.is_remote else str(files.root)
    return diagnose_targets([run], logs=logs).diagnoses if sizes else ()


def _checkpoints(files: RunFiles, warn: Warn) -> tuple[tuple[CheckpointInfo, ...], str]:
    try:
        found = list_checkpoints(RunDir(files.uri))
    except EmbarkError as error:
        warn(f"cannot read the checkpoints: {error.what}")
        return (), ""
    return found.checkpoints, found.best_by or ""

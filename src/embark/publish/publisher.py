"""`embark publish`: checkpoints of a run as versions that pass the gate, by hand or as saved.

A candidate is committed first, then judged by scoring with exactly what would be served, then made current. A publisher
that is killed anywhere goes on there. A version that is refused is kept, and is never current by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

from embark.errors import DataError, EmbarkError, UserError
from embark.export.artifact import (
    CANDIDATE,
    Artifact,
    current_version,
    delta_chain,
    open_artifact,
    open_versions,
    read_gate,
    set_current,
    write_gate,
)
from embark.export.delta import PARENT
from embark.export.export_run import export_uri, read_contents
from embark.export.write_version import write_version
from embark.publish.gate import GateVerdict, earlier_gate, judge, to_record
from embark.publish.gate_rows import GateRows, open_gate_rows
from embark.spec.serve import PublishSpec
from embark.spec.user_code import file_of
from embark.store import Checkpoint, CheckpointStore
from embark.store.checkpoint_inspect import TrainedRun, find_trained
from embark.trainers import build_index

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The result of publishing a checkpoint."""

    run: str
    step: int
    uri: str
    version: int
    is_current: bool
    is_new: bool  # False: it had its verdict before.
    parent: int | None
    num_bytes: int
    refused: str = ""  # Why the gate refused it; empty if it passed.
    verdict: GateVerdict | None = None  # None if there is no gate.
    export_s: float = 0.0
    gate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The gate's verdict on a checkpoint that is not published."""

    run: str
    step: int
    uri: str
    published: int  # The version it is compared with; 0: none.
    verdict: GateVerdict


def publish(run: str, *, to: str = "", gate: bool = True, sets: Sequence[str] = ()) -> PublishResult:
    """Write the newest checkpoint of a run as the next version at `to` (by default `publish.to`), as a delta if that is
    smaller, and make it current if it passes the gate. A checkpoint that has its verdict is left alone. `sets` are
    `publish.key=value` settings over the run's spec."""
    trained = _find(run, sets)
    bounds = trained.spec.publish.model_copy(update={} if gate else {"gate": False})
    uri = export_uri(trained, to or bounds.to)
    versions = open_versions(uri)
    started_s = time.perf_counter()
    candidate = _candidate(versions, trained)
    if candidate is not None and (record := read_gate(versions, candidate.step)) is not None:
        return _result(versions, trained, candidate, is_new=False, refused=str(record.get("why", "")))
    with open_gate_rows(trained, bounds) if bounds.gate else nullcontext() as rows:
        if candidate is None:
            contents = read_contents(trained, bounds.tables, build_index, source=rows.rows if rows else None)
            number = write_version(contents, uri, delta=True, candidate=True).version
            candidate = versions.find(number)
            assert candidate is not None
        exported_s = time.perf_counter()
        verdict = _judged(trained, rows, open_artifact(uri, candidate.step), versions, bounds) if rows else None
    record = to_record(verdict) if verdict else {"passed": True, "why": "", "notes": ["published without a gate"]}
    if record["passed"]:
        set_current(versions, candidate.step)
    # Last: one that is killed before is judged again, and a version that was rolled back since is not.
    write_gate(versions, candidate.step, record)
    if record["passed"]:
        _remove_old(versions, bounds.keep_versions)
    found = _result(versions, trained, candidate, is_new=True, refused=str(record["why"]))
    return replace(found, verdict=verdict, export_s=exported_s - started_s, gate_s=time.perf_counter() - exported_s)


def check(run: str, *, to: str = "", sets: Sequence[str] = ()) -> CheckResult:
    """Judge a checkpoint, by default the newest, against what is published, and write nothing."""
    trained = _find(run, sets)
    bounds = trained.spec.publish
    uri = export_uri(trained, to or bounds.to)
    versions = open_versions(uri)
    with TemporaryDirectory(prefix="embark-check-") as folder, open_gate_rows(trained, bounds) as rows:
        write_version(read_contents(trained, bounds.tables, build_index), folder)
        verdict = _judged(trained, rows, open_artifact(folder), versions, bounds)
    return CheckResult(trained.run_dir.uri, trained.checkpoint.step, uri, current_version(versions), verdict)


def watch(
    run: str, *, to: str = "", gate: bool = True, sets: Sequence[str] = (),
    on_result: Callable[[PublishResult], None], on_error: Callable[[EmbarkError], None], is_stopped: Callable[[], bool],
) -> None:
    """Publish each newest checkpoint, at most one in `publish.every_minutes`, until stopped. An error is reported once
    and retried."""
    last_step, next_s, last_error = 0, 0.0, ""
    while not is_stopped():
        try:
            trained = _find(run, sets)
            if trained.checkpoint.step != last_step and time.monotonic() >= next_s:
                started_s = time.monotonic()
                result = publish(run, to=to, gate=gate, sets=sets)
                last_step, last_error = result.step, ""
                if result.is_new:
                    next_s = started_s + 60 * trained.spec.publish.every_minutes
                    on_result(result)
        except EmbarkError as error:  # a checkpoint may be removed while it is read, a store may not answer
            if error.what != last_error:
                on_error(error)
            last_error = error.what
        time.sleep(POLL_S)


def _find(run: str, sets: Sequence[str]) -> TrainedRun:
    for one in sets:
        if not one.startswith("publish."):
            raise UserError(f"--set {one}: the run is trained; only fields of [publish] can be set now",
                            fix="--set publish.data=rows.parquet")
    return find_trained(run, sets=sets)


def _judged(
    trained: TrainedRun, rows: GateRows, candidate: Artifact, versions: CheckpointStore, bounds: PublishSpec
) -> GateVerdict:
    """Judge a candidate against the current version."""
    model_file = file_of(trained.spec.model.kind) if trained.spec.model.is_custom else ""
    notes: tuple[str, ...] = ()
    published, earlier = None, None
    if number := current_version(versions):
        try:
            published = open_artifact(versions.store.uri, number)
            earlier = earlier_gate(read_gate(versions, number) or {})
        except DataError as error:
            notes = (f"the published version {number} cannot be read, and is not compared: {error.what}",)
    scored = rows.scored(candidate, published, bounds, model_file, earlier)
    return replace(judge(scored, bounds), rows=rows.opened.description, notes=(*notes, *rows.opened.notes))


def _candidate(versions: CheckpointStore, trained: TrainedRun) -> Checkpoint | None:
    """Return the newest version of this checkpoint that was written to be published."""
    return next((one for one in reversed(versions.committed())
                 if one.values.get(CANDIDATE) and one.values.get("run") == trained.run_dir.uri
                 and one.values.get("step") == str(trained.checkpoint.step)), None)


def _result(versions: CheckpointStore, trained: TrainedRun, candidate: Checkpoint, *, is_new: bool, refused: str,
            ) -> PublishResult:
    parent = candidate.values.get(PARENT)
    return PublishResult(
        run=trained.run_dir.uri, step=trained.checkpoint.step, uri=versions.store.uri, version=candidate.step,
        is_current=current_version(versions) == candidate.step, is_new=is_new,
        parent=parent if isinstance(parent, int) else None, num_bytes=candidate.num_bytes, refused=refused)


def _remove_old(versions: CheckpointStore, keep: int) -> None:
    """Remove versions except the newest, the current one, those they are deltas of, and those that `embark export`
    wrote."""
    committed = versions.committed()
    if not keep or len(committed) <= keep:
        return
    needed = {one.step for one in committed if not one.values.get(CANDIDATE)}
    for one in committed:
        if one.step in {kept.step for kept in committed[-keep:]} | {current_version(versions)}:
            try:
                needed |= {link.step for link in delta_chain(versions, one)}
            except DataError:
                needed.add(one.step)
    for one in committed:
        if one.step not in needed:
            versions.remove(one.step)

"""`embark publish`: checkpoints of a run as versions that pass the gate, by hand or as saved.

A candidate is committed first, then judged by scoring with exactly what would be served, then made current. A publisher
that is killed anywhere goes on there. A version that is refused is kept, and is never current by itself.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory

from embark.errors import DataError, EmbarkError, UserError
from embark.events.heartbeat import beat
from embark.export.artifact import (
    CANDIDATE,
    Artifact,
    CurrentChanged,
    CurrentVersion,
    check_sizes,
    current,
    current_version,
    delta_chain,
    make_room,
    open_artifact,
    open_versions,
    read_gate,
    set_current,
    write_gate,
)
from embark.export.delta import PARENT, identity_of
from embark.export.export_run import export_uri, read_contents
from embark.export.write_version import CHECKPOINT, CHECKPOINT_TIME, WRITTEN_OVER, write_version
from embark.formatting import to_finite
from embark.spec import PublishSpec, file_of
from embark.store import Checkpoint, CheckpointStore
from embark.store.checkpoint_inspect import TrainedRun, find_trained
from embark.trainers import build_index
from embark.values import JsonDict, JsonMap, frozen
from .gate import GateVerdict, earlier_gate, judge, to_record
from .gate_rows import GateRows, open_gate_rows

POLL_S = 1.0


@frozen
class PublishResult:
    """The result of publishing a checkpoint."""

    run: str
    step: int
    uri: str
    version: int
    identity: str  # The checksum of the version's content.
    is_current: bool
    is_new: bool  # False: it had its verdict before.
    parent: int | None
    num_bytes: int
    refused: str = ""  # Why the gate refused it; empty if it passed.
    not_current: str = ""  # Why it was not made current, although it passed.
    verdict: GateVerdict | None = None  # None if there is no gate.
    export_s: float = 0.0
    gate_s: float = 0.0


@frozen
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
    record = read_gate(versions, candidate.step) if candidate else None
    if candidate is not None and record is not None:
        if current_version(versions) == candidate.step:
            check_sizes(versions, candidate, fix=f"`embark export {trained.run_dir.uri} --to {uri}` writes the run as "
                        f"a new version; `embark rollback {uri} VERSION` makes another one current")
        return _result(versions, trained, candidate, record, is_new=False)
    verdict = None
    with open_gate_rows(trained, bounds) if bounds.gate else nullcontext() as rows:
        if candidate is None:
            contents = read_contents(trained, bounds.tables, build_index, source=rows.rows if rows else None)
            candidate = versions.find(write_version(contents, uri, delta=True, candidate=True).version)
            assert candidate is not None
        exported_s = time.perf_counter()
        while record is None:
            against = current(versions)
            make_room(uri, candidate.step)  # a publisher that runs for weeks has two versions on its disk
            verdict = _judged(trained, rows, open_artifact(uri, candidate.step), against, versions, bounds) \
                if rows else None
            record = _settled(versions, trained, candidate, against, to_record(verdict) if verdict else {
                "passed": True, "why": "", "notes": ["published without a gate"]})
    write_gate(versions, candidate.step, record)
    if record["passed"]:
        _remove_old(versions, bounds.keep_versions)
    found = _result(versions, trained, candidate, record, is_new=True)
    return replace(found, verdict=verdict, export_s=exported_s - started_s, gate_s=time.perf_counter() - exported_s)


def _settled(
    versions: CheckpointStore, trained: TrainedRun, candidate: Checkpoint, against: CurrentVersion,
    record: JsonDict
) -> JsonDict | None:
    """Make a version that passed current, unless someone exported or rolled back since it was written, or a later step
    was published. Return its record, or None if another publisher was faster, so that the version must be judged
    against that one's.

    What was current when the version was written stands in its commit record. So a publisher that was killed anywhere,
    and judges the version again, does not undo a rollback either.
    """
    if not record["passed"]:
        return record
    text = against.text.decode() if against.text else None
    now, newer_step = against, _newer_step(versions, trained, against)
    if not newer_step and (against.reason == "publish" or candidate.values.get(WRITTEN_OVER, text) == text):
        try:
            now = set_current(versions, candidate.step, reason="publish", expected=against)
        except CurrentChanged as error:
            now, newer_step = error.now, _newer_step(versions, trained, error.now)
            if now.reason == "publish" and not newer_step:
                return None
    if now.version == candidate.step:
        return record
    by = f" by `embark {now.reason}`" if now.reason else ""
    return {**record, "not_current": f"version {now.version} is current, which is of step {newer_step:,} of the run"
            if newer_step else f"version {now.version} was made current{by} since this one was written"}


def _newer_step(versions: CheckpointStore, trained: TrainedRun, now: CurrentVersion) -> int:
    """Return the step of the current version if it is a later one of the same run, else 0. A run that was trained anew
    under its name, or another run of that name, has saved nothing since."""
    served, saved = versions.find(now.version), trained.checkpoint
    if served is None or served.values.get("run") != trained.run_dir.uri:
        return 0
    step, newest = int(served.values["step"]), trained.run_dir.checkpoints.committed()[-1:]
    served_s, saved_s = (to_finite(found) or 0.0 for found in (
        served.values.get(CHECKPOINT_TIME), saved.values.get("time_s")))
    return step if newest and min(step, newest[0].step) > saved.step and served_s > saved_s else 0


def check(run: str, *, to: str = "", sets: Sequence[str] = ()) -> CheckResult:
    """Judge a checkpoint, by default the newest, against what is published, and write nothing."""
    trained = _find(run, sets)
    bounds = trained.spec.publish
    uri = export_uri(trained, to or bounds.to)
    versions = open_versions(uri)
    with TemporaryDirectory(prefix="embark-check-") as folder, open_gate_rows(trained, bounds) as rows:
        write_version(read_contents(trained, bounds.tables, build_index), folder)
        against = current(versions)
        verdict = _judged(trained, rows, open_artifact(folder), against, versions, bounds)
    return CheckResult(trained.run_dir.uri, trained.checkpoint.step, uri, against.version, verdict)


def watch(
    run: str, *, to: str = "", gate: bool = True, sets: Sequence[str] = (),
    on_result: Callable[[PublishResult], None], on_error: Callable[[EmbarkError], None], is_stopped: Callable[[], bool]
) -> None:
    """Publish each newest checkpoint, at most one in `publish.every_minutes`, until stopped. An error is reported once
    and retried."""
    last, next_s, last_error = "", 0.0, ""
    while not is_stopped():
        beat()
        try:
            trained = _find(run, sets)
            if identity_of(trained.checkpoint) != last and time.monotonic() >= next_s:
                started_s = time.monotonic()
                result = publish(run, to=to, gate=gate, sets=sets)
                last, last_error = identity_of(trained.checkpoint), ""
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
                            "--set publish.data=rows.parquet")
    return find_trained(run, sets=sets)


def _judged(
    trained: TrainedRun, rows: GateRows, candidate: Artifact, against: CurrentVersion, versions: CheckpointStore,
    bounds: PublishSpec
) -> GateVerdict:
    """Judge a candidate against the current version."""
    model_file = file_of(trained.spec.model.kind) if trained.spec.model.is_custom else ""
    notes: tuple[str, ...] = ()
    published, earlier = None, None
    if number := against.version:
        try:
            published = open_artifact(versions.store.uri, number, identity=against.identity)
            earlier = earlier_gate(read_gate(versions, number) or {})
        except UserError as error:  # damaged, or gone
            notes = (f"the published version {number} cannot be read, and is not compared: {error.what}",)
    scored = rows.scored(candidate, published, bounds, model_file, earlier)
    return replace(judge(scored, bounds), rows=rows.opened.description, notes=(*notes, *rows.opened.notes))


def _candidate(versions: CheckpointStore, trained: TrainedRun) -> Checkpoint | None:
    """Return the newest version of this checkpoint that was written to be published."""
    identity = identity_of(trained.checkpoint)
    return next((one for one in reversed(versions.committed())
                 if one.values.get(CANDIDATE) and one.values.get(CHECKPOINT) == identity), None)


def _result(versions: CheckpointStore, trained: TrainedRun, candidate: Checkpoint, record: JsonMap, *,
            is_new: bool) -> PublishResult:
    parent, is_current = candidate.values.get(PARENT), current_version(versions) == candidate.step
    return PublishResult(
        run=trained.run_dir.uri, step=trained.checkpoint.step, uri=versions.store.uri, version=candidate.step,
        identity=identity_of(candidate), is_current=is_current, is_new=is_new,
        parent=parent if isinstance(parent, int) else None, num_bytes=candidate.num_bytes,
        refused=str(record.get("why", "")), not_current="" if is_current else str(record.get("not_current", "")))


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

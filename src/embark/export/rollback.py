"""`embark rollback`: the versions of an exported model, and which of them is current."""

from embark.errors import DataError, UserError
from embark.formatting import to_finite
from embark.store import Checkpoint, CheckpointStore
from embark.values import frozen
from .artifact import (
    CANDIDATE,
    check_sizes,
    current_version,
    no_versions,
    open_versions,
    read_gate,
    set_current,
)
from .delta import PARENT, identity_of


@frozen
class ExportedVersion:
    """A committed version."""

    version: int
    identity: str  # The checksum of its content.
    run: str
    step: int | None
    tables: str
    auc: float | None  # Held-out AUC of the run's last evaluation before the checkpoint.
    num_bytes: int
    time_s: float | None  # Unix time of its export.
    is_current: bool
    parent: int | None = None  # The version that a delta changes.
    refused: str = ""  # Why the gate refused it.


@frozen
class VersionList:
    """All versions at a URI, oldest first."""

    uri: str
    versions: tuple[ExportedVersion, ...]


@frozen
class Rollback:
    """The version that is current now, and the one before."""

    uri: str
    version: int
    identity: str  # The checksum of its content.
    previous: int  # 0 where `current.json` could not be read.


def list_versions(uri: str) -> VersionList:
    """List the versions of an exported model."""
    versions, committed = _committed(uri)
    current = current_version(versions)
    return VersionList(uri, tuple(
        _described(one, versions, is_current=one.step == current) for one in committed))


def rollback(uri: str, version: int | None = None) -> Rollback:
    """Make a version current, by default the newest one before the current one. No file of a version changes, and
    servers that poll the URI switch to it."""
    versions, committed = _committed(uri)
    numbers = [one.step for one in committed]
    every = "its versions: " + ", ".join(map(str, numbers))
    try:
        previous = current_version(versions)
    except DataError:
        if version is None:
            raise
        previous = 0
    chosen = version if version is not None else max((one for one in numbers if one < previous), default=0)
    if chosen not in numbers:
        no_earlier = f"version before {previous}, which is current" if previous else "current version: name one"
        raise UserError(f"{uri}: has no {no_earlier if version is None else f'version {version}'}", every)
    check_sizes(versions, committed[numbers.index(chosen)], every)
    now = set_current(versions, chosen, reason="rollback")
    return Rollback(uri, chosen, now.identity, now.previous or previous)


def _committed(uri: str) -> tuple[CheckpointStore, list[Checkpoint]]:
    versions = open_versions(uri)
    committed = versions.committed()
    if not committed:
        raise no_versions(uri)
    return versions, committed


def _described(one: Checkpoint, versions: CheckpointStore, *, is_current: bool) -> ExportedVersion:
    values = one.values
    verdict = read_gate(versions, one.step) if values.get(CANDIDATE) else None
    step, metrics = str(values.get("step")), values.get("eval")  # a damaged mark has others
    return ExportedVersion(
        version=one.step, identity=identity_of(one), parent=values.get(PARENT), refused=(verdict or {}).get("why", ""),
        run=values.get("run", ""), step=int(step) if step.isdecimal() and len(step) < 19 else None,
        tables=values.get("tables", ""), auc=to_finite(metrics.get("auc")) if isinstance(metrics, dict) else None,
        num_bytes=one.num_bytes, time_s=to_finite(values.get("time_s")), is_current=is_current)

"""The values that backends exchange with `embark launch`, `status`, `logs` and `cancel`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from embark.spec import RunSpec

State = Literal["pending", "running", "restarting", "lost", "succeeded", "failed", "gone"]
"""`restarting`: its platform brings it back. `lost`: only `embark launch --supervise` does. `gone`: it is not there."""
Notify = Callable[[str], None]
"""Shows a person a line while something takes its time."""
Location = Mapping[str, str | int]
"""What a backend needs to find a run: a namespace and a context, or a folder."""


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A launched run: all that is needed to find it again from another terminal."""

    name: str
    backend: str
    where: Location
    title: str = ""
    """`quickstart on 2 x p5.48xlarge: 16 ranks`."""
    run_uri: str = ""
    """Where its checkpoints and events are."""
    usd_per_hour: float | None = None
    """Of all its machines; None: unknown, or nothing to pay."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One machine's share of a run: a pod, or a process group."""

    name: str
    index: int | None
    """Which of the machines."""
    state: str
    why: str = ""
    since_s: float | None = None
    """Unix time since when it has its machine, where the backend knows."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run, for a person."""

    state: State
    reason: str = ""
    """Why it waits, failed or restarts; while it runs, anything worth knowing."""
    fix: str = ""
    replicas: tuple[Replica, ...] = ()
    since_s: float | None = None
    """Unix time when the run began."""
    num_restarts: int = 0
    is_recoverable: bool = False
    """A `lost` run that the backend's `recover` may bring back."""

    @property
    def has_ended(self) -> bool:
        return self.state in ("succeeded", "failed", "gone")


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence and, where there is one, the fix."""

    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of one rank or pod."""

    time_ns: int
    """Since 1970; 0 where it is unknown."""
    source: str
    """The pod or the rank."""
    text: str
    index: int | None = None
    """Which of the machines."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that the platform itself reported about the run."""

    time_s: float
    source: str
    reason: str
    text: str
    is_warning: bool


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that a launch creates or leaves, and the command that removes it."""

    what: str
    remove: str


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What was removed, and what remains."""

    removed: tuple[str, ...] = ()
    remains: tuple[Resource, ...] = ()
    is_complete: bool = True
    """False: it was told to end, and had not when the wait was over."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A run to launch."""

    spec: RunSpec
    handle: RunHandle
    record: Callable[[Resource], None] = field(default=lambda _: None)
    """Called before each resource is created, so that an interrupted launch can list what may exist."""


def checkpoints_of(handle: RunHandle) -> Resource:
    """What no backend ever removes."""
    return Resource(f"checkpoints and events in {handle.run_uri}", "kept until you delete them")


_RANK = re.compile(r"\[rank(\d{1,6})\]:")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


def split_rank_prefix(line: LogLine) -> LogLine:
    """Moves the rank that `embark.torchrun` put before the line into its source."""
    rank = _RANK.match(line.text)
    if rank is None:
        return line
    return replace(line, source=f"{line.source} rank {rank[1]}", text=line.text[rank.end():])


def time_ns(stamp: str) -> int:
    """`2026-11-15T09:14:59.123456789Z` since 1970; 0 for anything else."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return 0
    second, digits, zone = match.groups()
    try:
        at = datetime.fromisoformat(second + ("+00:00" if zone == "Z" else zone))
    except ValueError:
        return 0
    return int(at.timestamp()) * 1_000_000_000 + int((digits or "").ljust(9, "0")[:9])


def time_s(text: object) -> float | None:
    """ISO 8601, UTC where it names no zone; None for anything else."""
    try:
        at = datetime.fromisoformat(str(text or "").replace("Z", "+00:00").replace(" GMT", "+00:00"))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()

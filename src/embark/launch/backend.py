"""What every place a run can be handed to offers, and the words they share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from embark.spec import RunSpec

State = Literal["pending", "running", "restarting", "succeeded", "failed", "gone"]
"""`restarting`: a machine was taken away, and its controller brings the run back. `gone`: the place no longer knows."""
ENDED: tuple[State, ...] = ("succeeded", "failed", "gone")
Notify = Callable[[str], None]
"""For a person, while something takes its time."""


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A run that was handed over: all that is needed to find it again from another terminal."""

    name: str
    backend: str
    where: Mapping[str, str | int]
    """What the backend needs to find it: a namespace and a context, or a process and its folder."""
    title: str = ""
    """`quickstart on 2 x p5.48xlarge: 16 ranks`."""
    run_uri: str = ""
    """Where its checkpoints and events are."""
    usd_per_hour: float | None = None
    """Of all its machines; None: not known, or none to pay."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One machine's share of a run: a pod, or a process group."""

    name: str
    index: int | None
    """Which of the machines."""
    state: str
    why: str = ""
    since_s: float | None = None
    """Unix time since when it has its machine, where the place says."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a run stands, for a person."""

    state: State
    reason: str = ""
    """Why it waits, failed or restarts; what there is to say of it while it runs."""
    fix: str = ""
    parts: tuple[Replica, ...] = ()
    since_s: float | None = None
    """Unix time when the run began."""
    num_restarts: int = 0

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of one rank or pod."""

    time_ns: int
    """Since 1970; 0 where the place does not say."""
    source: str
    """The pod or the rank."""
    text: str
    index: int | None = None
    """Which of the machines."""


_RANK = re.compile(r"\[rank(\d{1,6})\]:")


def split_rank_prefix(line: LogLine) -> LogLine:
    """With the rank that `embark.torchrun` put before the line beside the machine it ran on."""
    rank = _RANK.match(line.text)
    if rank is None:
        return line
    return replace(line, source=f"{line.source} rank {rank[1]}", text=line.text[rank.end():])


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that the place itself said about the run."""

    time_s: float
    source: str
    reason: str
    text: str
    is_warning: bool


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that a launch makes or leaves, and the command that removes it."""

    what: str
    remove: str


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What was taken away, and what is still there."""

    removed: tuple[str, ...] = ()
    remains: tuple[Resource, ...] = ()
    is_complete: bool = True
    """False: it was told to end, and had not yet when the waiting was over."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A run to hand over."""

    spec: RunSpec
    handle: RunHandle
    note: Callable[[Resource], None] = field(default=lambda _: None)
    """Told of each thing before it is made, so that whatever stops a launch, what may be there is known."""


class Backend(Protocol):
    """One place that runs can be handed to."""

    def check(self, order: LaunchRequest) -> None:
        """Raises where it cannot be handed over; changes nothing."""
        ...

    def submit(self, order: LaunchRequest) -> None: ...

    def status(self, handle: RunHandle) -> Status: ...

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        """All parts' lines, merged by time. With `follow`, until the run ends."""
        ...

    def events(self, handle: RunHandle) -> list[RunEvent]: ...

    def cancel(self, handle: RunHandle) -> CancelResult:
        """Ends it so that its last checkpoint is whole. Of a run that is not there, what remains."""
        ...

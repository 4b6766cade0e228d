"""What a platform that runs are launched on offers to `embark launch`, `status`, `logs` and `cancel`, and which takes a
run."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Literal

from embark.errors import Interrupted, UserError
from embark.formatting import redact
from embark.launch.http import API_RETRY, NO_RETRY
from embark.launch.shell import Notify, Shell
from embark.render.job import FOLLOW, Job
from embark.render.serving import SERVE_TARGETS, artifact_of
from embark.render.settings import grace_s
from embark.spec import RunSpec
from embark.store import run_uri
from embark.store.errors import RetryPolicy

State = Literal["pending", "running", "restarting", "lost", "succeeded", "failed", "gone"]
"""`restarting`: its platform brings it back. `lost`: only `embark launch --supervise` does. `gone`: it is not there."""
Location = Mapping[str, str | int]  # What a backend needs to find a run: a namespace and a context, or a folder.


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A launched run: all that is needed to find it again from another terminal."""

    name: str
    backend: str
    where: Location
    title: str = ""  # `quickstart on 2 x p5.48xlarge: 16 ranks`.
    run_uri: str = ""  # Where its checkpoints and events are.
    usd_per_hour: float | None = None  # Of all its machines; None: unknown, or nothing to pay.

    @classmethod
    def of(cls, job: Job, backend: str, where: Location) -> RunHandle:
        """Of a run on machines of the catalog."""
        return cls(name=job.spec.name, backend=backend, where={**where, "grace_s": grace_s(job)}, title=job.title,
                   run_uri=run_uri(job.spec.store.root, job.spec.name), usd_per_hour=job.usd_per_hour)

    @property
    def folder(self) -> Path:
        """Of this machine, for what identifies the run."""
        return Path(str(self.where["folder"]))

    @property
    def checkpoints(self) -> Resource:
        """What no backend ever removes."""
        return Resource(f"checkpoints and events in {self.run_uri}", "remain until you delete them")


@dataclass(frozen=True, slots=True)
class Replica:
    """One machine's share of a run: a pod, or a process group."""

    name: str
    index: int | None  # Which of the machines.
    state: str
    why: str = ""
    since_s: float | None = None  # Unix time since when it has its machine, where the backend knows.


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run, for a person."""

    state: State
    reason: str = ""  # Why it waits, failed or restarts; while it runs, anything worth knowing.
    fix: str = ""
    replicas: tuple[Replica, ...] = ()
    since_s: float | None = None  # Unix time when the run began.
    num_restarts: int = 0
    is_recoverable: bool = False  # A `lost` run that the backend's `recover` may bring back.

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

    time_ns: int  # Since 1970; 0 where it is unknown.
    source: str  # The pod or the rank.
    text: str
    index: int | None = None  # Which of the machines.

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", redact(self.text))

    @classmethod
    def of(cls, time_ns: int, source: str, text: str, index: int | None) -> LogLine:
        """Moves the rank that `embark.torchrun` put before the line into its source."""
        rank = _RANK.match(text)
        return cls(time_ns, source, text, index) if rank is None else cls(
            time_ns, f"{source} rank {rank[1]}", text[rank.end():], index)

    def to_dict(self) -> dict[str, float | str | int | None]:
        return {"time_s": self.time_ns / 1e9, "source": self.source, "index": self.index, "text": self.text}


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that the platform itself reported about the run."""

    time_s: float
    source: str
    reason: str
    text: str
    is_warning: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", redact(self.text))


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
    is_complete: bool = True  # False: it was still stopping when the wait was over.


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A run to launch."""

    spec: RunSpec
    handle: RunHandle
    record: Callable[[Resource], None] = field(default=lambda _: None)
    """Called before each resource is created, so that an interrupted launch can list what may exist."""


class LaunchBackend(ABC):
    """One platform that runs can be launched on. `status`, `logs` and `events` only read."""

    can_recover = False
    """Lost machines are re-created by `recover`; else the platform does it, or there is nothing to re-create."""
    poll_s = 5.0

    def __init__(self, shell: Shell, *, notify: Notify, retry: RetryPolicy | None = None, context: str = "") -> None:
        """`context`: of kubectl, for a run that is launched; empty: the current one."""
        self._shell = shell
        self._notify = notify
        self._retry = retry or API_RETRY
        self._context = context

    @abstractmethod
    def handle_of(self, spec: RunSpec) -> RunHandle:
        """What the run will be found by. Refuses what cannot be rendered."""

    @abstractmethod
    def check(self, request: LaunchRequest) -> None:
        """Raises where it cannot be launched; changes nothing."""

    @abstractmethod
    def submit(self, request: LaunchRequest) -> None: ...

    @abstractmethod
    def status(self, handle: RunHandle) -> Status: ...

    @abstractmethod
    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        """All replicas' lines, merged by time. With `follow`, until the run ends."""

    @abstractmethod
    def cancel(self, handle: RunHandle) -> CancelResult:
        """Ends it after a last checkpoint. Of a run that is not there, what remains."""

    def events(self, handle: RunHandle) -> list[RunEvent]:
        """None where the platform has none: the run's own are in its directory."""
        return []

    def recover(self, handle: RunHandle) -> None:  # noqa: B027 - most platforms do it themselves
        """Re-creates lost machines, where `can_recover`."""

    def _wait(self, handle: RunHandle, has_ended: Callable[[], bool], limit_s: float) -> bool:
        """Until a run that is stopping has ended. False: not within the limit."""
        until_s = time.monotonic() + limit_s
        try:
            while not self._shell.is_dry and not has_ended():
                if time.monotonic() > until_s:
                    return False
                time.sleep(min(self.poll_s, 1.0))
        except KeyboardInterrupt:
            raise Interrupted(f"stopped waiting; {handle.name} is stopping",
                              fix=f"embark cancel {handle.name} again removes the rest") from None
        return True


BACKENDS = {
    "local": "local:Local", "local-server": "local_server:LocalServer",
    "kubernetes": "kubernetes.backend:Kubernetes", "kubernetes-server": "kubernetes.server:KubernetesServer",
    "ray": "ray.backend:Ray",
    "torchx": "torchx:TorchX", "torchx-local": "torchx:TorchXLocal",
    "vertex": "vertex:Vertex", "vm": "vm:Vm", "tpu-vm": "tpu_vm:TpuVm",
}
TARGETS = {
    "job": "kubernetes", "jobset": "kubernetes", "trainjob": "kubernetes", "pytorchjob": "kubernetes",
    "ray": "ray", "torchx": "torchx", "vertex": "vertex", "vm": "vm", "tpu-vm": "tpu-vm",
    "serve": "kubernetes-server", "kserve": "kubernetes-server",
}
"""By `place.target`, for a machine of a cloud."""
USES_KUBECTL = ("kubernetes", "kubernetes-server", "torchx")


def backend_for(spec: RunSpec, shell: Shell, notify: Notify, *, context: str = "") -> LaunchBackend:
    """By the spec's place: its target and, for some targets, whether it names a machine.

    `context`: of kubectl, if not its current one.
    """
    name = _name_of(spec)
    if not name:
        raise UserError(f'embark launch does not support place.target = "{spec.place.target}"',
                        fix="embark render writes its files and the script that starts it; or set place.target to "
                            + ", ".join(TARGETS))
    if context and name not in USES_KUBECTL:
        raise UserError(f"--context is kubectl's, and this run goes to {name}", fix="leave --context out")
    return _load(name, shell, notify, context=context)


def backend_of(handle: RunHandle, shell: Shell, notify: Notify, *, is_hasty: bool = False) -> LaunchBackend:
    """Of a launched run. `is_hasty`: a platform that does not answer is not waited for."""
    if handle.backend not in BACKENDS:
        raise UserError(f"{handle.name} was launched on {handle.backend!r}, which this version does not know",
                        fix="use the version that launched it")
    return _load(handle.backend, shell, notify, retry=NO_RETRY if is_hasty else None)


def _load(
    name: str, shell: Shell, notify: Notify, *, retry: RetryPolicy | None = None, context: str = ""
) -> LaunchBackend:
    module, _, kind = BACKENDS[name].partition(":")
    loaded = getattr(import_module(f"embark.launch.backends.{module}"), kind)
    backend: LaunchBackend = loaded(shell, notify=notify, retry=retry, context=context)
    return backend


def _name_of(spec: RunSpec) -> str:
    """Of the backend; empty where there is none."""
    place = spec.place
    is_here = not place.machine and not place.cloud
    if place.target in SERVE_TARGETS:
        is_here = is_here and "://" not in artifact_of(spec)
        return "local-server" if is_here and place.target == "serve" else TARGETS.get(place.target, "")
    if place.target == FOLLOW:
        return ""
    if place.target == "ray":
        from embark.launch.backends.ray.backend import address

        return "ray" if is_here or address() else "kubernetes"
    if is_here:
        return "torchx-local" if place.target == "torchx" else "local"
    return TARGETS.get(place.target, "")


_RANK = re.compile(r"\[rank(\d{1,6})\]:")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


def time_ns(stamp: str) -> int:
    """`2026-11-15T09:14:59.123456789Z` since 1970; 0 for anything else."""
    match = _STAMP.fullmatch(stamp)
    at_s = time_s(match[1] + match[3]) if match else None
    return int(at_s) * 1_000_000_000 + int((match[2] or "").ljust(9, "0")[:9]) if match and at_s is not None else 0


def time_s(text: object) -> float | None:
    """ISO 8601, UTC where it names no zone; None for anything else."""
    try:
        at = datetime.fromisoformat(str(text or "").replace("Z", "+00:00").replace(" GMT", "+00:00"))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()

"""What a launch platform offers to `embark launch`, `status`, `logs` and `cancel`, which platform takes a run, and
sentences that explain what platforms report."""

from __future__ import annotations

import heapq
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from embark.errors import Interrupted, UserError
from embark.formatting import redact, to_one_line
from embark.render.job import FOLLOW, SLURM, Job
from embark.render.serving import SERVE_TARGETS
from embark.render.settings import grace_s
from embark.render.targets.torchx import SUBMIT
from embark.spec import RunSpec
from embark.store import run_uri
from embark.store.errors import RetryPolicy
from embark.values import JsonMap, frozen, read_table
from .http import API_RETRY, NO_RETRY
from .shell import CommandResult, LineStream, Notify, Shell

State = Literal["pending", "running", "restarting", "lost", "succeeded", "failed", "gone"]
"""`restarting`: its platform brings it back. `lost`: only `embark launch --supervise` does. `gone`: it is not there."""
Location = JsonMap  # Values by which a backend finds a run: a namespace and a context, or a folder.


class DamagedRecord(UserError):
    """A file by which a launched run is found does not hold what Embark wrote."""

    def __init__(self, what: str, path: Path) -> None:
        super().__init__(what, fix=f"end its processes and machines yourself, then delete {path}; its checkpoints stay")


@frozen
class RunHandle:
    """A launched run: all that is needed to find it again from another terminal."""

    name: str
    backend: str
    where: Location
    title: str = ""  # `quickstart on 2 x p5.48xlarge: 16 ranks`.
    run_uri: str = ""  # URI of its checkpoints and events.
    usd_per_hour: float | None = None  # The price of all machines; None: unknown, or nothing to pay.

    @classmethod
    def of(cls, job: Job, backend: str, where: Location) -> RunHandle:
        """Return the handle of a run on machines of the catalog."""
        return cls(name=job.spec.name, backend=backend, where={**where, "grace_s": grace_s(job)}, title=job.title,
                   run_uri=run_uri(job.spec.store.root, job.spec.name), usd_per_hour=job.usd_per_hour)

    @property
    def folder(self) -> Path:
        """The folder of this machine that identifies the run."""
        return Path(self.where["folder"])

    @property
    def checkpoints(self) -> Resource:
        """The run's checkpoints, which no backend ever removes."""
        return Resource(f"checkpoints and events in {self.run_uri}", "remain until you delete them")


@frozen
class Replica:
    """One machine's share of a run: a pod, or a process group."""

    name: str
    index: int | None  # Index of the machine.
    state: str
    why: str = ""
    since_s: float | None = None  # Unix time since when it has its machine, where the backend knows.


@frozen
class Status:
    """The state of a run, for a person."""

    state: State
    reason: str = ""  # Why it waits, failed or restarts; while it runs, anything worth knowing.
    fix: str = ""
    replicas: tuple[Replica, ...] = ()
    since_s: float | None = None  # Unix time when the run began.
    num_restarts: int = 0
    is_recoverable: bool = False  # A `lost` run that the backend's `recover` may bring back.
    ended_s: float | None = None  # When its last process ended, where that was recorded.

    def become(self, state: State, reason: str = "", fix: str = "") -> Status:
        """Return this status in another state."""
        return replace(self, state=state, reason=to_one_line(reason), fix=to_one_line(fix))

    @property
    def has_ended(self) -> bool:
        return self.state in ("succeeded", "failed", "gone")


class Reason(NamedTuple):
    """A sentence and, if there is one, the fix."""

    text: str
    fix: str = ""


@frozen
class LogLine:
    """A line of one rank or pod."""

    time_ns: int  # Nanoseconds since 1970; 0 if unknown.
    source: str  # The pod or the rank.
    text: str
    index: int | None = None  # Index of the machine.

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", redact(self.text))

    @classmethod
    def of(cls, time_ns: int, source: str, text: str, index: int | None) -> LogLine:
        """Move the rank that `embark.torchrun` put before the line into its source."""
        rank, text = split_rank(text)
        return cls(time_ns, f"{source} rank {rank}" if rank else source, text, index)

    def to_dict(self) -> dict[str, float | str | int | None]:
        return {"time_s": self.time_ns / 1e9, "source": self.source, "index": self.index, "text": self.text}


ReadLines = Callable[[], Iterator[LogLine]]
"""Returns the complete lines that were written since its last call."""


@frozen
class LogSource:
    """A program that prints the new lines of one pod's or machine's log."""

    stream: LineStream
    parse: Callable[[str], LogLine | None]  # None: it was read before, or is no line of the log.
    on_failure: Callable[[CommandResult], None]  # Raises if trying again is of no use.

    def lines(self) -> Iterator[LogLine]:
        yield from filter(None, map(self.parse, self.stream))
        result = self.stream.wait()
        if not result.is_ok:
            self.on_failure(result)


def read_logs(sources: Sequence[LogSource]) -> Iterator[LogLine]:
    """Yield the lines of all sources by time."""
    try:
        yield from heapq.merge(*(source.lines() for source in sources), key=lambda line: line.time_ns)
    finally:
        for source in sources:
            source.stream.close()


@frozen
class RunEvent:
    """Something that the platform itself reported about the run."""

    time_s: float
    source: str
    reason: str
    text: str
    is_warning: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", redact(to_one_line(self.text)))


@frozen
class Resource:
    """Something that a launch creates or leaves, and the command that removes it."""

    what: str
    remove: str


@frozen
class CancelResult:
    """The resources that were removed, and those that remain."""

    removed: tuple[str, ...] = ()
    remains: tuple[Resource, ...] = ()
    is_complete: bool = True  # False: it was still stopping when the wait was over.
    name: str = ""
    title: str = ""
    last_checkpoint: str = ""  # The checkpoint's name; empty if none can be seen from here.


@frozen
class LaunchRequest:
    """A run to launch."""

    spec: RunSpec
    handle: RunHandle
    record: Callable[[Resource], None] = field(default=lambda _: None)
    """Called before each resource is created, so that an interrupted launch can list what may exist."""


class LaunchBackend(ABC):
    """One platform that runs can be launched on. `status`, `logs` and `events` only read."""

    can_recover = False
    """Whether `recover` re-creates lost machines; else the platform does it, or there is nothing to re-create."""
    poll_s = 2.0  # Time between two looks at the log.
    late_s = 0.0  # Time after the end at which the last lines of the log can be read.

    def __init__(self, shell: Shell, *, notify: Notify, retry: RetryPolicy | None = None, context: str = "") -> None:
        """`context` is kubectl's for a new run; empty means the current one."""
        self._shell = shell
        self._notify = notify
        self._retry = retry or API_RETRY
        self._context = context

    @abstractmethod
    def handle_of(self, spec: RunSpec) -> RunHandle:
        """Describe how the run will be found again. Refuses what cannot be rendered."""

    @abstractmethod
    def check(self, request: LaunchRequest) -> None:
        """Raise if the run cannot be launched. Changes nothing."""

    @abstractmethod
    def submit(self, request: LaunchRequest) -> None: ...

    @abstractmethod
    def status(self, handle: RunHandle) -> Status: ...

    @abstractmethod
    def log_reader(self, handle: RunHandle) -> ReadLines:
        """Return a function that returns the complete lines that were written since its last call."""

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        """Yield all replicas' lines, merged by time. With `follow`, until the run ends, and report why it waits."""
        read, has_lines, reported = self.log_reader(handle), False, ""
        while True:
            status = self.status(handle) if follow else None
            for line in read():
                has_lines = True
                yield line
            if status is None or status.has_ended:
                break
            if status.state != "running" and status.reason != reported:
                reported = status.reason
                self._notify(f"{handle.name} is {status.state}: {reported}" + (f"; {status.fix}" if status.fix else ""))
            time.sleep(self.poll_s)
        if follow and self.late_s:
            time.sleep(self.late_s)
            yield from read()
        if not follow and not has_lines and (status := self.status(handle)).state != "running":
            raise UserError(f"{handle.name} has no log: it is {status.state}. {status.reason}", status.fix)

    @abstractmethod
    def cancel(self, handle: RunHandle) -> CancelResult:
        """End the run after a last checkpoint. A run that does not exist only lists what remains."""

    def events(self, handle: RunHandle) -> list[RunEvent]:
        """Return events of the platform; the run's own are in its directory."""
        return []

    def recover(self, handle: RunHandle) -> None:  # noqa: B027 - most platforms do it themselves
        """Re-create lost machines, if `can_recover`."""

    def _exists(self, what: str, handle: RunHandle) -> UserError:
        """Return the refusal to launch a run that exists already."""
        return UserError(f"{what} already exists", f"embark status {handle.name}; embark cancel {handle.name} ends "
                         "it and keeps the checkpoints; or another --set name=…")

    def _wait(self, handle: RunHandle, has_ended: Callable[[], bool], limit_s: float) -> bool:
        """Wait until a stopping run has ended; False if the limit passes first."""
        until_s = time.monotonic() + limit_s
        try:
            while not self._shell.is_dry and not has_ended():
                if time.monotonic() > until_s:
                    return False
                time.sleep(min(self.poll_s, 1.0))
        except KeyboardInterrupt:
            raise Interrupted(f"stopped waiting; {handle.name} is stopping",
                              f"embark cancel {handle.name} again removes the rest") from None
        return True


BACKENDS = {
    "local": "local:Local",
    "kubernetes": "kubernetes.backend:Kubernetes", "kubernetes-server": "kubernetes.server:KubernetesServer",
    "kubernetes-follow": "kubernetes.server:KubernetesFollow",
    "ray": "ray:Ray",
    "vertex": "vertex:Vertex", "vm": "vm:Vm", "tpu-vm": "tpu_vm:TpuVm", SLURM: "slurm:Slurm"
}
TARGETS = {
    "job": "kubernetes", "jobset": "kubernetes", "trainjob": "kubernetes", "pytorchjob": "kubernetes",
    "ray": "ray", "vertex": "vertex", "vm": "vm", "tpu-vm": "tpu-vm", SLURM: SLURM,
    "serve": "kubernetes-server", "kserve": "kubernetes-server", "follow": "kubernetes-follow"
}
"""The backend of each `place.target`, for a machine of a cloud."""
RAY_DASHBOARD = "http://127.0.0.1:8265"
USES_KUBECTL = ("kubernetes", "kubernetes-server", "kubernetes-follow")


def backend_for(spec: RunSpec, shell: Shell, notify: Notify, *, context: str = "") -> LaunchBackend:
    """Select a backend by the spec's target and, for some targets, by whether it names a machine.

    `context` is kubectl's, if not its current one.
    """
    name = _name_of(spec)
    if not name:
        start = f"{SUBMIT.format(spec.place.namespace)} submits it" if spec.place.target == "torchx" else \
            "its script starts it"
        raise UserError(f'embark launch does not support place.target = "{spec.place.target}"',
                        f"embark render writes its files, and {start}; or set place.target to "
                            + ", ".join(TARGETS))
    if context and name not in USES_KUBECTL:
        raise UserError(f"--context applies to kubectl; this run is launched on {name}", "leave --context out")
    return _load(name, shell, notify, context=context)


def backend_of(handle: RunHandle, shell: Shell, notify: Notify, *, is_hasty: bool = False) -> LaunchBackend:
    """Return the backend that a run was launched on. `is_hasty`: do not wait for a platform that does not answer."""
    if handle.backend not in BACKENDS:
        raise UserError(f"{handle.name} was launched on {handle.backend!r}, which this version does not know",
                        "use the version that launched it")
    return _load(handle.backend, shell, notify, retry=NO_RETRY if is_hasty else None)


def _load(
    name: str, shell: Shell, notify: Notify, *, retry: RetryPolicy | None = None, context: str = ""
) -> LaunchBackend:
    module, _, kind = BACKENDS[name].partition(":")
    loaded = getattr(import_module(f"embark.launch.backends.{module}"), kind)
    backend: LaunchBackend = loaded(shell, notify=notify, retry=retry, context=context)
    return backend


def ray_address() -> str:
    """Return the cluster that Ray's own commands would use; empty if there is none."""
    for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        value = os.getenv(variable, "").rstrip("/")
        if value.startswith(("http://", "https://")):
            return value
        if value in ("auto", "local"):
            return RAY_DASHBOARD
        if value:
            raise UserError(f"{variable}={value} is not where a Ray cluster takes jobs",
                            f"export {variable}=http://HEAD:8265, the address of its dashboard")
    started = Path(os.getenv("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    return RAY_DASHBOARD if started.exists() else ""


def _name_of(spec: RunSpec) -> str:
    """Return the backend's name; empty if no backend takes the run."""
    place = spec.place
    is_here = not place.machine and not place.cloud
    if place.target == "ray":
        return "ray" if is_here or ray_address() else "kubernetes"
    if is_here and place.target not in (*SERVE_TARGETS, FOLLOW, SLURM):
        return "local"
    return TARGETS.get(place.target, "")


def absolute_run_uri(spec: RunSpec) -> str:
    """Return the run's URI, with a relative `store.root` from the current directory."""
    root = spec.store.root
    return run_uri(root if "://" in root else str(Path(root).expanduser().absolute()), spec.name)


def file_reader(path: Path, parse: Callable[[bytes], LogLine]) -> ReadLines:
    """Return a function that yields the complete lines that were written to a file since its last call."""
    offset = 0

    def read() -> Iterator[LogLine]:
        nonlocal offset
        if not path.is_file():
            return
        try:
            file = path.open("rb")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", "let this user read it") from None
        with file:
            file.seek(offset)
            for raw in file:
                if not raw.endswith(b"\n"):  # it is being written
                    return
                offset += len(raw)
                yield parse(raw.rstrip(b"\n"))

    return read


_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


def split_rank(text: str) -> tuple[str, str]:
    """Return the rank that torchrun put before a line, empty if there is none; and the rest of the line."""
    match = re.match(r"\[[a-z]+(\d{1,6})\]:", text)
    return (match[1], text[match.end():]) if match else ("", text)


def time_ns(stamp: str) -> int:
    """Return the nanoseconds since 1970 of `2026-11-15T09:14:59.123456789Z`; 0 for anything else."""
    match = _STAMP.fullmatch(stamp)
    at_s = time_s(match[1] + match[3]) if match else None
    return int(at_s) * 1_000_000_000 + int((match[2] or "").ljust(9, "0")[:9]) if match and at_s is not None else 0


def time_s(text: object) -> float | None:
    """Return the seconds since 1970 of an ISO 8601 time, UTC if it names no zone; None for anything else."""
    try:
        at = datetime.fromisoformat(str(text or "").replace(" GMT", "+00:00"))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def explain(topic: str, message: str, **values: str) -> list[Reason]:
    """Return every row of the topic whose pattern is in the message, in the table's order. `values` fill in {names}."""
    found = []
    for pattern, text, fix in _table()[topic]:
        match = pattern.search(message)
        if match:
            groups = {"{1}": (match[1] or "") if pattern.groups else "", **{f"{{{k}}}": v for k, v in values.items()}}
            for name, value in groups.items():
                text, fix = text.replace(name, value), fix.replace(name, value)
            found.append(Reason(text, fix))
    return found


def explain_exit(code: int, reason: str = "") -> Reason:
    found = explain("exit", reason if reason == "OOMKilled" else str(code))
    return found[0] if found else Reason(f"exit code {code}", "embark logs says why")


def explain_unschedulable(message: str) -> Reason:
    """Return every cause that the scheduler's message has, followed by the message."""
    found = explain("pod", message)
    if not found:
        return Reason(message or "not scheduled yet")
    return Reason(f"{'; '.join(dict.fromkeys(one.text for one in found))} ({message})", found[0].fix)


def explain_waiting(reason: str, message: str) -> Reason:
    """Explain why a container does not run."""
    known = explain("waiting", reason)
    if not known:
        return Reason(": ".join(part for part in (reason, message) if part))
    explained = explain_unschedulable(message) if message else Reason("")
    if explained.fix:
        return explained
    return Reason(f"{known[0].text} ({message})" if message else known[0].text, known[0].fix)


def explain_preemption(reason: str, message: str) -> str:
    return next((one.text for one in explain("preempted", reason)), message or reason)


@cache
def _table() -> dict[str, list[tuple[re.Pattern[str], str, str]]]:
    rows = read_table(__file__, "explanations.toml")
    return {topic: [(re.compile(row["pattern"], re.DOTALL), row["text"], row.get("fix", "")) for row in found]
            for topic, found in rows.items()}

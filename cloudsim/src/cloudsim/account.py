"""An account of one cloud: its programs, its resources, its clusters, and a record of every command it was given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from cloudsim.kubernetes.cluster import Cluster
from cloudsim.state import Clock, Refusal, Resources
from embark.launch.shell import CommandResult
from embark.rehearse.ray_job import INSTALL_RAY, NO_RAY

AnsweredBy = Literal["real", "stand-in"]


@dataclass(frozen=True, slots=True)
class Call:
    """A program as it was started."""

    program: str
    words: tuple[str, ...]  # Without the program.
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""

    def read(self, name: str) -> str:
        """A file that an argument names; `-` is stdin."""
        if name == "-":
            return self.stdin
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise Refusal(f"error: the path {name!r} cannot be read: {error.strerror}") from error


class Program(Protocol):
    """One command-line program: reads a call, changes the account, returns what it prints. Raises `Refusal`."""

    name: str
    answered_by: AnsweredBy

    def run(self, call: Call) -> str: ...


@dataclass(frozen=True, slots=True)
class Record:
    """One command and how it ended."""

    program: str
    words: tuple[str, ...]
    answered_by: AnsweredBy
    code: int
    error: str  # The first line of what it said where it failed.
    at: float  # By the clock.


@dataclass(frozen=True, slots=True)
class AccountReport:
    """What happened in an account."""

    cloud: str
    records: tuple[Record, ...]
    paid: tuple[str, ...]  # What still costs money.
    not_modelled: tuple[str, ...]
    elapsed_s: float  # By its clock.


class Registry(Protocol):
    """A cloud's registries. A text that is returned is the builder's error; empty means yes."""

    def login_error(self, host: str, user: str, password: str) -> str: ...

    def push_error(self, image: str, logins: set[str]) -> str:
        """`logins`: the hosts that this machine is logged in to."""
        ...


@dataclass(slots=True)
class Images:
    """Of one machine and of the registries it pushes to."""

    local: set[str] = field(default_factory=set)
    pushed: dict[str, str] = field(default_factory=dict)  # Name with tag to digest.
    logins: set[str] = field(default_factory=set)

    def is_pushed(self, image: str) -> bool:
        name, _, digest = image.partition("@")
        if digest:
            repository = name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name
            return any(found == digest and one.startswith(f"{repository}:") for one, found in self.pushed.items())
        return name in self.pushed


class Account:
    """One state that every program of a cloud answers from."""

    def __init__(self, cloud: str, folder: Path) -> None:
        self.cloud = cloud
        self.folder = folder  # For what must lie in files: volumes, buckets, logs.
        self.clock = Clock()
        self.resources = Resources(self.clock)
        self.clusters: dict[str, Cluster] = {}
        self.images = Images()
        self.registry: Registry | None = None  # The cloud's; set by the cloud.
        self.context = ""  # The cluster that kubectl and helm speak to: its key in `clusters`.
        self.programs: dict[str, Program] = {}
        self.environment: dict[str, str] = {}  # What a user's shell has: where the cloud's object store answers.
        self.on_close: list[Callable[[], None]] = []  # Ends servers and what they left.
        self.records: list[Record] = []
        self.not_modelled: list[str] = []  # Said to the user at the end.
        if find_spec("ray") is None:
            self.not_modelled.append(f"the drivers of RayJobs: {NO_RAY}, so their pods start and nothing trains in "
                                     f"them ({INSTALL_RAY})")

    def add_programs(self, programs: Sequence[Program]) -> None:
        self.programs |= {one.name: one for one in programs}

    def cluster(self) -> Cluster:
        """The one of kubectl's current context."""
        found = self.clusters.get(self.context)
        if found is None:
            raise Refusal("The connection to the server localhost:8080 was refused - did you specify the right host "
                          "or port?")
        return found

    def run(self, call: Call) -> CommandResult:
        """Answer one command, and let every cluster catch up with what it changed."""
        program = self.programs.get(call.program)
        if program is None:
            return CommandResult(127, err=f"{call.program}: command not found\n")
        try:
            done = CommandResult(0, out=program.run(call))
        except Refusal as refusal:
            done = CommandResult(refusal.code, err=f"{refusal.text}\n")
        for cluster in self.clusters.values():
            cluster.reconcile()
        error = next((line for line in done.err.splitlines() if line.strip()), "")
        self.records.append(Record(call.program, call.words, program.answered_by, done.code, error, self.clock.now))
        return done

    def close(self) -> None:
        while self.on_close:
            self.on_close.pop()()

    def report(self) -> "AccountReport":
        return AccountReport(self.cloud, tuple(self.records), tuple(self.paid()), tuple(self.not_modelled),
                             self.clock.now)

    def paid(self) -> list[str]:
        """What costs money by the hour and still exists: its kind and name."""
        return [f"{one.kind} {one.name}" for one in self.resources.paid()]

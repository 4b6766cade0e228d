"""An account of one cloud: its programs, its resources, its clusters, its images, and a record of every command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from cloudsim.kubernetes.cluster import Cluster
from cloudsim.kubernetes.troubles import find_troubles
from cloudsim.state import Clock, Refusal, Resources, load_facts
from embark.launch.shell import CommandResult
from embark.rehearse.running_servers import EndpointServer
from embark.rehearse.workload import INSTALL_RAY, NO_RAY
from embark.values import frozen

ARTIFACT_BYTES = "EMBARK_ARTIFACT_BYTES"  # Variable with the size of the artifact that a small one stands for.
AnsweredBy = Literal["real", "stand-in"]
READS = {"get", "describe", "show", "list", "logs", "events", "top", "exists", "wait", "status"}
"""Words of commands that change nothing."""
LOOKS = {"kubectl", "helm", "sleep"}
"""Programs with which a script looks at its cluster or waits for it."""


@frozen
class Call:
    """One start of a program, with its arguments and its environment."""

    program: str
    words: tuple[str, ...]  # The arguments, without the name of the program.
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""

    def read(self, name: str) -> str:
        """Return the text of a file that an argument names; `-` is stdin."""
        if name == "-":
            return self.stdin
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise Refusal(f"error: the path {name!r} cannot be read: {error.strerror}") from error


class Program(Protocol):
    """A command-line program: it reads a call, changes the account and returns what it prints, or raises `Refusal`."""

    name: str
    answered_by: AnsweredBy

    def run(self, call: Call) -> str: ...


class Registry(Protocol):
    """The container registries of a cloud. Each method returns the error that docker prints, or an empty text."""

    def login_error(self, host: str, user: str, password: str) -> str: ...

    def push_error(self, image: str, logins: set[str]) -> str:
        """Return why an image cannot be pushed; `logins` are the hosts that this machine is logged in to."""
        ...


@dataclass(slots=True)
class Images:
    """Container images that were built on this machine or pushed from it."""

    local: set[str] = field(default_factory=set)
    pushed: dict[str, str] = field(default_factory=dict)  # Maps a name with its tag to its digest.
    logins: set[str] = field(default_factory=set)

    def is_pushed(self, image: str) -> bool:
        name, _, digest = image.partition("@")
        if digest:
            repository = name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name
            return any(found == digest and one.startswith(f"{repository}:") for one, found in self.pushed.items())
        return name in self.pushed


LOGIN_COMMANDS = (("sso", "login"), ("login",), ("auth", "login"))
def check_login(account: "Account", call: Call) -> None:
    """Refuse what needs a login that has expired; logging in renews it."""
    if account.has_login or call.words[:2] == ("account", "show") or call.words in (("--version",), ("version",)):
        return
    expired, tokens = load_facts("logins.toml").values()
    if call.program in expired and call.words[:2 if call.program != "az" else 1] in LOGIN_COMMANDS:
        account.has_login = True
    elif call.program in expired:
        raise Refusal(expired[call.program], 255 if call.program == "aws" else 1)
    elif call.program in ("kubectl", "helm") and account.cloud in tokens:
        raise Refusal(f"Unable to connect to the server: getting credentials: exec: executable "
                      f"{tokens[account.cloud]}")


@frozen
class Record:
    """A command and how it ended."""

    program: str
    words: tuple[str, ...]
    answered_by: str  # `real` or `stand-in`.
    code: int
    error: str  # The error message; empty if the command succeeded.
    at: float  # Seconds on the account's clock.


@frozen
class AccountReport:
    """The commands that an account has answered, and what is left in it."""

    cloud: str
    records: tuple[Record, ...]
    paid: tuple[str, ...]  # Resources that still cost money.
    not_modelled: tuple[str, ...]
    elapsed_s: float  # Seconds on the account's clock.
    causes: tuple[str, ...] = ()  # What keeps jobs and servers of its clusters from running.


class Account:
    """The state that all programs of a cloud answer from."""

    def __init__(self, cloud: str, folder: Path) -> None:
        self.cloud = cloud
        self.folder = folder  # Volumes, buckets and logs are files below it.
        self.clock = Clock()
        self.resources = Resources(self.clock)
        self.clusters: dict[str, Cluster] = {}
        self.images = Images()
        self.registry: Registry | None = None  # Set by the cloud that opens the account.
        self.context = ""  # The key in `clusters` of the cluster that kubectl and helm use.
        self.programs: dict[str, Program] = {}
        self.environment: dict[str, str] = {}  # Variables of the user's shell, such as the object store's address.
        self.artifact_bytes = 0.0
        self.has_login = True  # False: the user's login has expired.
        self.on_close: list[Callable[[], None]] = []  # Functions that stop servers and remove their files.
        self.records: list[Record] = []
        self.causes: list[str] = []  # What kept jobs and servers from running when a command last looked.
        self.not_modelled: list[str] = [*load_facts("not_modelled.toml").get(cloud, ())]
        if find_spec("ray") is None:
            self.not_modelled.append(f"the drivers of RayJobs: {NO_RAY}, so their pods start and nothing trains in "
                                     f"them ({INSTALL_RAY})")

    def add_programs(self, programs: Sequence[Program]) -> None:
        self.programs |= {one.name: one for one in programs}

    def cluster(self) -> Cluster:
        """Return the cluster of kubectl's current context."""
        found = self.clusters.get(self.context)
        if found is None:
            raise Refusal("The connection to the server localhost:8080 was refused - did you specify the right host "
                          "or port?")
        return found

    def run(self, call: Call) -> CommandResult:
        """Answer one command, then let every cluster react to what it changed."""
        program = self.programs.get(call.program)
        if program is None:
            return CommandResult(127, err=f"{call.program}: command not found\n")
        self.artifact_bytes = float(call.env.get(ARTIFACT_BYTES) or 0)
        try:
            check_login(self, call)
            done = CommandResult(0, out=program.run(call))
        except Refusal as refusal:
            done = CommandResult(refusal.code, out=refusal.out, err=f"{refusal.text}\n" if refusal.text else "")
        for cluster in self.clusters.values():
            cluster.reconcile()
        # A script that gives up ends its machines, after which its pods wait for machines.
        if call.program in LOOKS or not self.clusters:
            self.causes = [one for cluster in self.clusters.values() for one in find_troubles(cluster)]
        error = done.err.strip() if done.code else ""
        self.records.append(Record(call.program, call.words, program.answered_by, done.code, error, self.clock.now))
        return done

    def close(self) -> None:
        for cluster in self.clusters.values():
            cluster.servers.close()
        while self.on_close:
            self.on_close.pop()()

    def make_server(self, name: str) -> EndpointServer:
        """Return a server for a managed endpoint; it ends with the account."""
        made = EndpointServer(name, self.folder / "endpoints", self.environment, self.artifact_bytes)
        self.on_close.append(made.close)
        return made

    def report(self) -> AccountReport:
        return AccountReport(self.cloud, tuple(self.records), tuple(self.paid()), tuple(self.not_modelled),
                             self.clock.now, tuple(self.causes))

    def quiet_s(self) -> float:
        """Return for how long nothing has changed, if nothing is going to change by itself either; else 0."""
        times = [one.at for one in self.records if one.code == 0 and not READS & set(one.words[:3])
                 and one.program != "sleep" and not any(word.startswith("describe-") for word in one.words[:3])]
        times += [one.ready_at for one in self.resources]
        for cluster in self.clusters.values():
            times += [node.ready_at for node in cluster.nodes if not cluster.pools[node.pool].join_error]
            times += [*cluster.ready_at.values(), *(run.ends_at for run in cluster.runs.values()),
                      *(event.at for event in cluster.events)]
        return max(0.0, self.clock.now - max(times, default=0.0))

    def paid(self) -> list[str]:
        """List the resources that cost money by the hour, as kind and name."""
        return [f"{one.kind} {one.name}" for one in self.resources.paid()]

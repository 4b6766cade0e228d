"""What each cloud's command line is asked about plain machines, in one form for all of them."""

from __future__ import annotations

import json
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import to_one_line
from embark.launch.backend import Resource, RunEvent
from embark.launch.backends.vm.ssh import Host
from embark.launch.shell import CommandResult, Shell
from embark.render.job import Job
from embark.render.location import Location, location_of
from embark.render.steps import Step, substitute
from embark.spec import RunSpec

MADE_S = 1200.0
"""For a command that makes or ends something: some come back only when it is there."""
RUN_FOLDER = "/var/lib/embark-run"
"""On the machine: what is handed over, and the log."""
MachineState = Literal["starting", "running", "stopped", "gone"]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the run as its cloud has it."""

    index: int
    id: str
    """What the cloud finds it by."""
    name: str
    state: MachineState
    inside: str = ""
    """What the others of the run reach it by."""
    outside: str = ""
    """What it is reached by from here; empty where a tunnel of the cloud leads there."""
    why: str = ""
    """Of one that is stopped or gone, as the cloud says it."""


class Cloud(ABC):
    """The machines of one job. Each cloud says how it makes, lists, reaches and ends them."""

    name = ""
    login = ""
    """The command that renews who one is."""
    tools: ClassVar[Mapping[str, str]] = {}
    """Programs that must be here, and where they come from."""

    def __init__(self, shell: Shell, job: Job, folder: Path, settings: Mapping[str, str]) -> None:
        self.shell = shell
        self.job = job
        self.location: Location = location_of(job)
        self.folder = folder
        self.values: dict[str, str | Sequence[str]] = dict(settings)

    @classmethod
    @abstractmethod
    def settings(cls, job: Job) -> dict[str, str]:
        """The same variables as the rendered script has, and the same ones may be set outside."""

    @abstractmethod
    def who(self) -> tuple[str, ...]:
        """The command that says whether one is logged in."""

    @abstractmethod
    def steps(self) -> list[Step]:
        """What stands around the machines, each made once."""

    def ready(self, note: Callable[[Resource], None]) -> None:  # noqa: B027 - most clouds need nothing
        """What must be found out or made before a machine is started, besides."""

    @abstractmethod
    def machines(self) -> list[Machine]:
        """One for each number that was ever started and is known yet."""

    @abstractmethod
    def create(self, index: int) -> None: ...

    @abstractmethod
    def wake(self, machine: Machine) -> None:
        """Starts one that is stopped."""

    @abstractmethod
    def delete(self, machines: Sequence[Machine]) -> None: ...

    @abstractmethod
    def host(self, machine: Machine) -> Host: ...

    @abstractmethod
    def host_key(self, machine: Machine) -> str:
        """As the cloud itself vouches for it; empty while it does not yet."""

    @abstractmethod
    def events(self) -> list[RunEvent]: ...

    @property
    def rest_goes_too(self) -> bool:
        """`delete` takes all that stood around the machines."""
        return False

    def check(self) -> None:
        """The programs are here, and someone is logged in."""
        for program, where in {**self.tools, "ssh": "Debian's openssh-client"}.items():
            flag = "-V" if program == "ssh" else "--version"
            try:
                self.shell.ask([program, flag])
            except UserError as error:
                raise UserError(error.what, fix=where) from error
        done = self.ask(self.who())
        if not done.is_ok:
            raise UserError(f"{self.name}: {to_one_line(done.err)[:300] or 'nobody is logged in'}", fix=self.login)

    def imagined(self) -> list[Machine]:
        """For a dry run, which makes none."""
        name = self.job.name
        return [Machine(index, f"{name}-{index}", f"{name}-{index}", "running", f"{name}-{index}", f"{name}-{index}")
                for index in range(self.job.num_nodes)]

    def rest(self) -> list[Resource]:
        """What stands around the machines, with the commands that remove it. It costs nothing."""
        return [self.thing(step) for step in self.steps() if step.what]

    def thing(self, step: Step) -> Resource:
        lines = [shlex.join(substitute(words, self.values)) for words in step.remove]
        return Resource(f"{step.what} ({self.name})", "; ".join(lines))

    def filled(self, words: Sequence[str], **more: str | Sequence[str]) -> list[str]:
        return substitute(words, {**self.values, **more})

    def ask(self, words: Sequence[str], **more: str) -> CommandResult:
        return self.shell.ask(self.filled(words, **more))

    def change(self, words: Sequence[str], **more: str | Sequence[str]) -> CommandResult:
        """Raises where it did not go well, with the cloud's own words and what helps."""
        done = self.shell.change(self.filled(words, **more), timeout_s=MADE_S)
        if not done.is_ok:
            raise command_error(self.name, done, self.login)
        return done

    def read(self, words: Sequence[str], **more: str) -> Any:
        """JSON; None of a dry run, which hears nothing."""
        done = self.ask(words, **more)
        if not done.is_ok:
            raise command_error(self.name, done, self.login)
        if self.shell.is_dry or not done.out.strip():
            return None
        try:
            return json.loads(done.out)
        except ValueError as error:
            raise Fault(f"{self.name} answered what is no JSON: {to_one_line(done.out)[:200]}") from error


def from_environment(**defaults: str) -> dict[str, str]:
    """Settings by their names, as this terminal's environment has them, else so."""
    return {name: os.environ.get(name) or default for name, default in defaults.items()}


def require_object_store(spec: RunSpec) -> None:
    """What is kept on a machine's own disk goes with the machine."""
    if "://" not in spec.store.root:
        raise UserError(f"store.root = {spec.store.root}: checkpoints there would go with the machine",
                        fix="--set store.root= to a bucket: s3://…, az://… or gs://…")


@dataclass(frozen=True, slots=True)
class _Row:
    pattern: str
    text: str
    fix: str


_ROWS = (
    _Row(r"InsufficientInstanceCapacity|ZONE_RESOURCE_POOL_EXHAUSTED|SkuNotAvailable|AllocationFailed|"
         r"OverconstrainedAllocationRequest|does not have enough resources",
         "the cloud has no such machine free there", "another --set place.zone=… or place.region=…, or later"),
    _Row(r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded|QuotaExceeded|QUOTA_EXCEEDED|OperationNotAllowed.*quota",
         "the account's quota is used up", "embark doctor --cloud shows it; ./budget.sh quota of the rendered folder "
                                           "says how to raise it"),
    _Row(r"ExpiredToken|InvalidClientTokenId|AuthFailure|Unable to locate credentials|az login|AADSTS|"
         r"gcloud auth login|Reauthentication|UNAUTHENTICATED|Token has expired",
         "who you are is not known any more", ""),
    _Row(r"UnauthorizedOperation|AccessDenied|AuthorizationFailed|PERMISSION_DENIED|Required '.*' permission",
         "you may not do that there", "ask the account's owner for the right that is named"),
)


def command_error(cloud: str, done: CommandResult, login: str) -> EmbarkError:
    """What a command line said, in words, with what helps."""
    told = to_one_line(done.err or done.out)[-400:]
    if done.has_timed_out:
        return Fault(f"{cloud} did not answer in time: {told}", fix="embark status looks again")
    for row in _ROWS:
        if re.search(row.pattern, done.err, re.DOTALL):
            return UserError(f"{cloud}: {row.text} ({told})", fix=row.fix or login)
    return Fault(f"{cloud}: {told or f'ended with {done.code}'}", fix="the cloud's own words say it")

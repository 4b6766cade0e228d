"""One interface to each cloud's command line, for plain VMs."""

import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import to_one_line
from embark.launch.backend import Resource, RunEvent
from embark.launch.backends.machines import RUN_FOLDER
from embark.launch.backends.ssh import Host, ssh_words
from embark.launch.explanations import explain
from embark.launch.shell import CommandResult, Shell
from embark.render.job import Job
from embark.render.location import Location, location_of
from embark.render.shell_text import Step, substitute

CHANGE_S = 1200.0
"""For a command that creates or deletes something: some return only when it is done."""
MachineState = Literal["starting", "running", "stopped", "gone"]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the run, as its cloud reports it."""

    index: int
    id: str
    name: str
    state: MachineState
    inside: str = ""
    """Its address for the other machines of the run."""
    outside: str = ""
    """Its address from here; empty where it is reached through the cloud's tunnel."""
    why: str = ""
    """Of one that is stopped or gone, in the cloud's words."""


class Cloud(ABC):
    """The machines of one job. Each cloud defines how it creates, lists, reaches and deletes them."""

    name = ""
    login = ""
    """The command that renews credentials."""
    tools: ClassVar[Mapping[str, str]] = {}
    """Programs that must be installed, and where they come from."""
    user = "embark"
    deletes_infrastructure = False
    """`delete` also removes everything created around the machines."""

    def __init__(self, shell: Shell, job: Job, folder: Path, settings: Mapping[str, str]) -> None:
        self.shell = shell
        self.job = job
        self.location: Location = location_of(job)
        self.folder = folder
        self.values: dict[str, str | Sequence[str]] = dict(settings)

    @classmethod
    @abstractmethod
    def settings(cls, job: Job) -> dict[str, str]:
        """The rendered script's variables; the environment may set them."""

    @abstractmethod
    def identity(self) -> tuple[str, ...]:
        """The command that fails unless somebody is logged in."""

    @abstractmethod
    def steps(self) -> list[Step]:
        """The infrastructure around the machines, each part created once."""

    def prepare(self, record: Callable[[Resource], None]) -> None:  # noqa: B027 - most clouds need nothing
        """Looks up or creates whatever else a machine needs before it is started."""

    @abstractmethod
    def machines(self) -> list[Machine]:
        """The newest of each index that the cloud still knows."""

    @abstractmethod
    def create(self, index: int) -> None: ...

    @abstractmethod
    def restart(self, machine: Machine) -> None:
        """Starts one that is stopped."""

    @abstractmethod
    def delete(self, machines: Sequence[Machine]) -> None: ...

    @abstractmethod
    def host(self, machine: Machine) -> Host: ...

    @abstractmethod
    def host_key(self, machine: Machine) -> str:
        """As the cloud itself reports it; empty while it does not yet."""

    @abstractmethod
    def events(self) -> list[RunEvent]: ...

    def check(self) -> None:
        """The programs are installed, and somebody is logged in."""
        for program, where in {**self.tools, "ssh": "Debian's openssh-client"}.items():
            flag = "-V" if program == "ssh" else "--version"
            try:
                self.shell.ask([program, flag])
            except UserError as error:
                raise UserError(error.what, fix=where) from error
        done = self.ask(self.identity())
        if not done.is_ok:
            raise UserError(f"{self.name}: {to_one_line(done.err)[:300] or 'nobody is logged in'}", fix=self.login)

    def placeholders(self) -> list[Machine]:
        """For a dry run, which creates none."""
        name = self.job.name
        return [Machine(index, f"{name}-{index}", f"{name}-{index}", "running", f"{name}-{index}", f"{name}-{index}")
                for index in range(self.job.num_nodes)]

    def infrastructure(self) -> list[Resource]:
        """With the commands that remove it. It costs nothing."""
        return [self.resource(step) for step in self.steps() if step.what]

    def resource(self, step: Step) -> Resource:
        lines = [shlex.join(substitute(words, self.values)) for words in step.remove]
        return Resource(f"{step.what} ({self.name})", "; ".join(lines))

    def host_at(self, machine: Machine, address: str, *, alias: str, proxy: Sequence[str] = ()) -> Host:
        words = ssh_words(address, user=self.user, key=self.folder / "key", known_hosts=self.folder / "known_hosts",
                          alias=alias, proxy=shlex.join(self.filled(proxy)) if proxy else "")
        return Host(name=machine.name, index=machine.index, words=words, folder=RUN_FOLDER, prefix=("sudo", "-n"))

    def filled(self, words: Sequence[str], **more: str | Sequence[str]) -> list[str]:
        return substitute(words, {**self.values, **more})

    def ask(self, words: Sequence[str], **more: str) -> CommandResult:
        return self.shell.ask(self.filled(words, **more))

    def change(self, words: Sequence[str], **more: str | Sequence[str]) -> CommandResult:
        """Raises where the command fails, with the cloud's message and the fix."""
        done = self.shell.change(self.filled(words, **more), timeout_s=CHANGE_S)
        if not done.is_ok:
            raise command_error(self.name, done, self.login)
        return done

    def read(self, words: Sequence[str], **more: str) -> Any:
        """JSON; None on a dry run."""
        done = self.ask(words, **more)
        if not done.is_ok:
            raise command_error(self.name, done, self.login)
        if self.shell.is_dry or not done.out.strip():
            return None
        try:
            return json.loads(done.out)
        except ValueError as error:
            raise Fault(f"{self.name} did not answer with JSON: {to_one_line(done.out)[:200]}") from error


def from_environment(**defaults: str) -> dict[str, str]:
    """Settings by name, as the environment sets them, else the default."""
    return {name: os.environ.get(name) or default for name, default in defaults.items()}


def command_error(cloud: str, done: CommandResult, login: str) -> EmbarkError:
    """A failed command of a cloud's command line, explained."""
    said = to_one_line(done.err or done.out)[-400:]
    if done.has_timed_out:
        return Fault(f"{cloud} did not answer in time: {said}", fix="embark status checks again")
    known = explain("cloud", done.err, login=login)
    if known:
        return UserError(f"{cloud}: {known[0].text} ({said})", fix=known[0].fix)
    return Fault(f"{cloud}: {said or f'exit code {done.code}'}", fix="see the cloud's own message")

"""The machines of a run in AWS, Azure or Google Cloud, managed by the commands of clouds.toml."""

import json
import os
import re
import shlex
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import to_one_line
from embark.launch.backend import Resource, explain
from embark.launch.shell import CommandResult, Shell
from embark.launch.supervisor_client import Host, ssh_words
from embark.render.clouds import aws, azure, gcp
from embark.render.job import Job
from embark.render.shell_text import LOGINS, Step, job_steps, job_words, split_words, substitute
from embark.store import write_atomic
from embark.values import JsonDict, frozen, read_table
from .machines import RUN_FOLDER

CHANGE_S = 1200.0  # Limit of a command that creates or deletes something: some return only when it is done.
SESSION_MANAGER_S = 20.0
MachineState = Literal["starting", "running", "stopped", "gone"]
TABLE: dict[str, JsonDict] = read_table(__file__, "clouds.toml")


@frozen
class Machine:
    """A machine of the run, as its cloud reports it."""

    index: int
    id: str
    name: str
    state: MachineState
    inside: str = ""  # Address for the other machines of the run.
    outside: str = ""  # Address from here; empty if it is reached through the cloud's tunnel.
    why: str = ""  # Why it is stopped or gone, in the cloud's words.


class CloudCommands:
    """A cloud's command line. A command is named as in the table, or given as words with variables."""

    def __init__(self, cloud: str, shell: Shell, values: Mapping[str, str]) -> None:
        self.name, self.shell, self.table = cloud, shell, TABLE[cloud]
        self.values: dict[str, str | Sequence[str]] = dict(values)

    def words(self, command: str | Sequence[str], **more: str) -> list[str]:
        if isinstance(command, str):
            command = split_words(self.table[command])
        return substitute(command, {**self.values, **more})

    def ask(self, command: str | Sequence[str], **more: str) -> CommandResult:
        return self.shell.ask(self.words(command, **more))

    def change(self, command: str | Sequence[str], **more: str) -> CommandResult:
        """Run a command that changes something. Raises the cloud's message, with a fix, if it fails."""
        done = self.shell.change(self.words(command, **more), timeout_s=CHANGE_S)
        if not done.is_ok:
            raise command_error(self.name, done)
        return done

    def run_steps(self, steps: Sequence[Step], record: Callable[[Resource], None] = lambda _: None) -> None:
        """Create the infrastructure that does not exist yet."""
        for step in steps:
            if step.unless and self.ask(step.unless).is_ok and not self.shell.is_dry:
                continue
            if step.what:
                record(self.resource(step))
            for words in step.commands:
                self.change(words)
            if step.wait_s and not self.shell.is_dry:
                time.sleep(step.wait_s)

    def resource(self, step: Step) -> Resource:
        return Resource(f"{step.what} ({self.name})", "; ".join(shlex.join(self.words(one)) for one in step.remove))

    def read(self, command: str | Sequence[str], *, missing: Sequence[str] = ()) -> Any:
        """Return the JSON that a command prints; None on a dry run, or if its error has one of the `missing` texts."""
        done = self.ask(command)
        if not done.is_ok:
            if any(text in done.err for text in missing):
                return None
            raise command_error(self.name, done)
        try:
            return json.loads(done.out) if done.out.strip() else None
        except ValueError as error:
            raise Fault(f"{self.name} did not answer with JSON: {to_one_line(done.out)[:200]}") from error

    def check_login(self) -> None:
        """Raise unless the programs are installed and somebody is logged in."""
        for program, where in {**self.table["tools"], "ssh": "Debian's openssh-client"}.items():
            try:
                self.shell.ask([program, "-V" if program == "ssh" else "--version"])
            except UserError as error:
                raise UserError(error.what, where) from error
        if not (done := self.ask("identity")).is_ok:
            said = to_one_line(done.err)[:300] or "nobody is logged in"
            raise UserError(f"{self.name}: {said}", LOGINS[self.name]["fix"])


class Cloud(CloudCommands, ABC):
    """The machines of one job. Each cloud defines how it creates, lists and deletes them."""

    deletes_infrastructure = False  # `delete` also removes everything created around the machines.

    def __init__(self, shell: Shell, job: Job, folder: Path, settings: Mapping[str, str]) -> None:
        super().__init__(job.cloud, shell, {**settings, "NAME": job.name})
        self.job, self.folder = job, folder

    @staticmethod
    @abstractmethod
    def settings(job: Job) -> dict[str, str]:
        """Return the rendered script's variables; the environment may set them."""

    @abstractmethod
    def steps(self) -> list[Step]:
        """Return the infrastructure around the machines, each part created once."""

    def prepare(self, record: Callable[[Resource], None]) -> None:
        """Look up or create whatever else a machine needs before it is started."""

    @abstractmethod
    def machine(self, row: JsonDict) -> Machine:
        """Read a machine from one row of the answer to `machines`."""

    @abstractmethod
    def create(self, index: int) -> None: ...

    @abstractmethod
    def delete(self, machines: Sequence[Machine]) -> None: ...

    def machines(self) -> list[Machine]:
        """Return the newest machine of each index that the cloud still knows."""
        rows = [row for row in self.rows("machines") if re.search(r"-\d+$", str(row["name"]))]
        return sorted(map(self.machine, rows), key=lambda machine: machine.index)

    def rows(self, command: str) -> list[JsonDict]:
        return self.read(command) or []

    def restart(self, machine: Machine) -> None:
        """Start a stopped machine."""
        self.change("restart", **_values(machine))

    def host_key(self, machine: Machine) -> str:
        """Return the public key that the cloud itself reports; empty until it does."""
        done = self.ask("host_key", **_values(machine))
        found = re.search(r"ssh-ed25519\s+([A-Za-z0-9+/=]+)", done.out)
        return f"ssh-ed25519 {found[1]}" if done.is_ok and found else ""

    def placeholders(self) -> list[Machine]:
        """Return machines for a dry run, which creates none."""
        names = [f"{self.job.name}-{index}" for index in range(self.job.num_nodes)]
        return [Machine(index, name, name, "running", name, name) for index, name in enumerate(names)]

    def infrastructure(self) -> list[Resource]:
        return [self.resource(step) for step in self.steps() if step.what]

    def alias(self, machine: Machine) -> str:
        return self.words("alias", **_values(machine))[0]

    def host(self, machine: Machine) -> Host:
        proxy = shlex.join(self.words("proxy", **_values(machine))) if "proxy" in self.table else ""
        words = ssh_words(self.words("address", **_values(machine))[0], user=self.table["user"], proxy=proxy,
                          key=self.folder / "key", known_hosts=self.folder / "known_hosts", alias=self.alias(machine))
        return Host(name=machine.name, index=machine.index, words=words, folder=RUN_FOLDER, prefix=("sudo", "-n"))


class Aws(Cloud):
    @staticmethod
    def settings(job: Job) -> dict[str, str]:
        location, found = job.location, from_environment(AMI=aws.AMI, SUBNET_ID="")
        if aws.num_cards(job) > 1 and not found["SUBNET_ID"]:
            raise UserError(f"{job.machine.name} has several network cards, and so no public address",
                            "set SUBNET_ID to a private subnet with a NAT gateway")
        return {**found, "REGION": location.region, "ZONE": location.zone, "NAME": job.name}

    def steps(self) -> list[Step]:
        steps = aws.role_steps(self.job, json.dumps(aws.ROLE_TRUST), json.dumps(aws.role_policy(self.job)))
        return [*steps, *(job_steps(self.job, "placement") if self.job.num_nodes > 1 else [])]

    def prepare(self, record: Callable[[Resource], None]) -> None:
        """Look up or create the subnet, the security group and the file with the ssh key."""
        if not self.values["SUBNET_ID"]:
            found = self.ask(job_words(self.job, "find_subnet")).out.strip()
            if found in ("", "None") and not self.shell.is_dry:
                raise UserError(f"the account has no default subnet in {self.values['ZONE']}",
                                "set SUBNET_ID to one of yours")
            self.values["SUBNET_ID"] = found or "SUBNET_ID"
        vpc = self.ask(job_words(self.job, "find_vpc")).out.strip() or "VPC_ID"
        group = self.ask(job_words(self.job, "find_group"), vpc=vpc).out.strip()
        if group in ("", "None"):
            record(self._group())
            group = self.change(job_words(self.job, "create_group"), vpc=vpc).out.strip() or "GROUP_ID"
            for rule in ("allow_inward", *(["allow_outward"] if aws.num_cards(self.job) else [])):
                self.change(job_words(self.job, rule), id=group)
        self.values["GROUP_ID"] = group
        self.values["CARDS"] = self.words(aws.card_words(aws.num_cards(self.job)))
        data = self.folder / "user_data.yaml"
        if not self.shell.is_dry:
            key = (self.folder / "key.pub").read_text().strip()
            write_atomic(data, f"#cloud-config\nssh_authorized_keys:\n- {json.dumps(key)}\n")
        self.values["USER_DATA"] = str(data)

    def infrastructure(self) -> list[Resource]:
        return [*super().infrastructure(), self._group()]

    def machines(self) -> list[Machine]:
        found: dict[int, Machine] = {}
        for machine in map(self.machine, sorted(self.rows("machines"), key=lambda row: str(row.get("LaunchTime")))):
            known = found.get(machine.index)
            if known is None or known.state == "gone" or machine.state != "gone":
                found[machine.index] = machine
        return [found[index] for index in sorted(found)]

    def machine(self, row: JsonDict) -> Machine:
        id, reason = str(row["InstanceId"]), row.get("StateReason") or {}
        return Machine(
            int(_tag(row, "embark-rank") or 0), id, _tag(row, "Name") or id,
            self.table["states"].get(row["State"]["Name"], "gone"), inside=str(row.get("PrivateIpAddress") or ""),
            why=str(reason.get("Message") or row.get("StateTransitionReason") or ""))

    def create(self, index: int) -> None:
        self.change(aws.start_words(self.job), **{"1": str(index)})

    def delete(self, machines: Sequence[Machine]) -> None:
        ids = [machine.id for machine in machines if machine.state != "gone"]
        if ids:
            self.change((*job_words(self.job, "end"), *ids[1:]), id=ids[0])

    def host_key(self, machine: Machine) -> str:
        """Session Manager runs the command on the machine, once its agent is up."""
        sent = self.ask("host_key", **_values(machine))
        until_s = time.monotonic() + SESSION_MANAGER_S
        while sent.is_ok and time.monotonic() < until_s:
            found = self.ask("host_key_answer", sent=sent.out.strip(), **_values(machine))
            if found.is_ok and found.out.startswith("ssh-"):
                return found.out.strip()
            time.sleep(1.0)
        return ""

    def rows(self, command: str) -> list[JsonDict]:
        found = self.read(command) or {}
        return [row for reservation in found.get("Reservations", ()) for row in reservation["Instances"]]

    def _group(self) -> Resource:
        """Return the security group; the command that removes it looks its id up by name."""
        remove = string.Template(self.table["remove_group"]).safe_substitute(
            {name: shlex.quote(str(self.values[name])) for name in ("REGION", "NAME")})
        return Resource("the security group of its machines (aws)", remove)


class Azure(Cloud):
    deletes_infrastructure = True

    @staticmethod
    def settings(job: Job) -> dict[str, str]:
        """EMBARK_SSH_FROM names the addresses that port 22 is open to, as Azure writes them; unset, this machine's."""
        found = from_environment(RESOURCE_GROUP=f"embark-{job.name}", VM_IMAGE=azure.IMAGE, EMBARK_SSH_FROM="")
        return {**found, "LOCATION": job.location.region, "STORAGE_ACCOUNT": job.spec.place.storage_account}

    def steps(self) -> list[Step]:
        self.values["EMBARK_SSH_FROM"] = self.values["EMBARK_SSH_FROM"] or self._own_address()
        return [*azure.network_steps(self.job), Step("", (split_words(self.table["allow_ssh"]),))]

    def machines(self) -> list[Machine]:
        return super().machines() if self.ask("group").is_ok else []

    def machine(self, row: JsonDict) -> Machine:
        name, power, phase = (str(row.get(key) or "") for key in ("name", "powerState", "provisioningState"))
        state = self.table["states"].get(power, "starting" if phase == "Creating" else "stopped")
        return Machine(
            int(name.rpartition("-")[2]), str(row.get("vmId") or name), name, "gone" if phase == "Deleting" else state,
            name, str(row.get("publicIps") or "").partition(",")[0], why="" if state == "running" else power)

    def create(self, index: int) -> None:
        job, rank = self.job, str(index)
        given = ("--ssh-key-values", str(self.folder / "key.pub"))
        self.change(azure.start_words(job, given), rank=rank)
        principal, machine = self._id("principal", rank=rank), self._id("machine", rank=rank)
        self.change(job_words(job, "grant_itself"), principal=principal, machine=machine)
        grants = azure.container_grants(job)
        account = self._id("account") if grants else ""
        for grant in grants:
            self.change(grant, principal=principal, account=account)

    def delete(self, machines: Sequence[Machine]) -> None:
        """Delete the complete resource group: a VM that is only shut down is still paid for."""
        if self.shell.is_dry or self.ask("group").is_ok:
            self.change(job_words(self.job, "end"))

    def _id(self, command: str, **more: str) -> str:
        found = self.ask((*job_words(self.job, command), "--output", "tsv"), **more)
        return found.out.strip() or command.upper()

    def _own_address(self) -> str:
        """Return the address by which the internet sees this machine; Azure itself does not tell it."""
        if self.shell.is_dry:
            return "YOUR_ADDRESS"
        found = self.ask("own_address").out.strip()
        try:
            return str(ip_address(found))
        except ValueError:
            raise UserError("the public address of this machine is not known, and ssh is opened to no other",
                            "set EMBARK_SSH_FROM to it, or to a range such as 203.0.113.0/24") from None


class Gcp(Cloud):
    @staticmethod
    def settings(job: Job) -> dict[str, str]:
        found = from_environment(NETWORK="default", IMAGE_FAMILY=gcp.IMAGE_FAMILY, IMAGE_PROJECT=gcp.IMAGE_PROJECT)
        zone = job.location.zone
        return {**found, "PROJECT": gcp_project(job), "ZONE": zone, "ZONE%-*": zone.rpartition("-")[0]}

    def steps(self) -> list[Step]:
        allow, allowed, forbid = (split_words(self.table[name]) for name in ("allow_ssh", "allows_ssh", "forbid_ssh"))
        return [*gcp.account_steps(self.job), *gcp.network_steps(self.job),
                Step("the firewall rule for ssh by Google's tunnel", (allow,), unless=allowed, remove=(forbid,))]

    def machine(self, row: JsonDict) -> Machine:
        name, status = str(row["name"]), str(row.get("status"))
        state = self.table["states"].get(status, "stopped")
        return Machine(int(name.rpartition("-")[2]), str(row.get("id") or name), name, state, inside=name,
                       why="" if state == "running" else status)

    def create(self, index: int) -> None:
        keys = self.folder / "ssh-keys"
        if not self.shell.is_dry:
            keys.write_text(f"{self.table['user']}:{(self.folder / 'key.pub').read_text().strip()}\n")
        given = ("--metadata=enable-guest-attributes=TRUE,enable-oslogin=FALSE",
                 f"--metadata-from-file=ssh-keys={keys}")
        self.change(gcp.start_words(self.job, given), rank=str(index))

    def restart(self, machine: Machine) -> None:
        self.change(job_words(self.job, "again"), **_values(machine))

    def delete(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            self.change(job_words(self.job, "end"), **_values(machine))


CLOUDS: dict[str, type[Cloud]] = {"aws": Aws, "azure": Azure, "gcp": Gcp}


def from_environment(**defaults: str) -> dict[str, str]:
    """Return settings by name: the environment's value, else the default."""
    return {name: os.getenv(name) or default for name, default in defaults.items()}


def gcp_project(job: Job) -> str:
    project = job.spec.place.account or os.getenv("PROJECT", "")
    if not project:
        raise UserError("no Google Cloud project is set", "--set place.account=PROJECT")
    return project


def command_error(cloud: str, done: CommandResult) -> EmbarkError:
    """Explain a failed command of a cloud's command line."""
    said = to_one_line(done.err or done.out)[-400:]
    if done.has_timed_out:
        return Fault(f"{cloud} did not answer in time: {said}", "embark status checks again")
    known = explain("cloud", done.err, login=LOGINS[cloud]["fix"])
    if known:
        return UserError(f"{cloud}: {known[0].text} ({said})", known[0].fix)
    return Fault(f"{cloud}: {said or f'exit code {done.code}'}", "see the cloud's own message")


def _values(machine: Machine) -> dict[str, str]:
    return {"id": machine.id, "name": machine.name, "rank": str(machine.index), "address": machine.outside}


def _tag(row: JsonDict, key: str) -> str:
    return next((str(tag["Value"]) for tag in row.get("Tags") or () if tag["Key"] == key), "")

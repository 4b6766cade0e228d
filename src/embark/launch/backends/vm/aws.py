"""EC2 instances through `aws`, reached by Session Manager's tunnel: no port is open to anyone."""

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from embark.errors import UserError
from embark.launch.backend import Resource, RunEvent, time_s
from embark.launch.backends.ssh import Host
from embark.launch.backends.vm.clouds import Cloud, Machine, MachineState, from_environment
from embark.render.clouds import aws as vm_aws
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.shell_text import Shell, Step, variable
from embark.store import write_atomic

STATES: dict[str, MachineState] = {
    "pending": "starting", "running": "running", "stopping": "stopped", "stopped": "stopped", "shutting-down": "gone",
    "terminated": "gone",
}
ANSWER_S = 20.0
_REGION = ("--region", variable("REGION"))
_HOST_KEY = "cat /etc/ssh/ssh_host_ed25519_key.pub"


class Aws(Cloud):
    name = "aws"
    user = "ubuntu"
    login = "aws sso login, or set AWS_PROFILE"
    tools: ClassVar[Mapping[str, str]] = {
        "aws": "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
        "session-manager-plugin": "https://docs.aws.amazon.com/systems-manager/latest/userguide/"
                                  "session-manager-working-with-install-plugin.html",
    }

    @classmethod
    def settings(cls, job: Job) -> dict[str, str]:
        location = location_of(job)
        found = from_environment(AMI=vm_aws.AMI, SUBNET_ID="")
        if vm_aws.num_cards(job) > 1 and not found["SUBNET_ID"]:
            raise UserError(f"{job.machine.name} has several network cards, and so no public address",
                            fix="set SUBNET_ID to a private subnet with a NAT gateway")
        return {**found, "REGION": location.region, "ZONE": location.zone, "NAME": job.name}

    def identity(self) -> tuple[str, ...]:
        return ("aws", "sts", "get-caller-identity", "--output", "json")

    def steps(self) -> list[Step]:
        steps = vm_aws.role_steps(self.job, json.dumps(vm_aws.ROLE_TRUST), json.dumps(vm_aws.role_policy(self.job)))
        return [*steps, *([vm_aws.placement_step()] if self.job.num_nodes > 1 else [])]

    def prepare(self, record: Callable[[Resource], None]) -> None:
        """Subnet, security group and the ssh key."""
        if not self.values["SUBNET_ID"]:
            found = self.ask(vm_aws.subnet_words()).out.strip()
            if found in ("", "None") and not self.shell.is_dry:
                raise UserError(f"the account has no default subnet in {self.values['ZONE']}",
                                fix="set SUBNET_ID to one of yours")
            self.values["SUBNET_ID"] = found or "SUBNET_ID"
        words = vm_aws.group_words(self.job)
        vpc = self.ask(words.vpc).out.strip() or "VPC_ID"
        group = self.ask(words.find, vpc=vpc).out.strip()
        if group in ("", "None"):
            record(self._group())
            group = self.change(words.create, vpc=vpc).out.strip() or "GROUP_ID"
            for rule in words.rules:
                self.change(rule, id=group)
        self.values["GROUP_ID"] = group
        self.values["CARDS"] = self.filled(vm_aws.card_words(vm_aws.num_cards(self.job)))
        data = self.folder / "user_data.yaml"
        if not self.shell.is_dry:
            key = (self.folder / "key.pub").read_text().strip()
            write_atomic(data, f"#cloud-config\nssh_authorized_keys:\n- {json.dumps(key)}\n")
        self.values["USER_DATA"] = str(data)

    def infrastructure(self) -> list[Resource]:
        return [*super().infrastructure(), self._group()]

    def machines(self) -> list[Machine]:
        newest: dict[int, dict[str, Any]] = {}
        for one in self._described():
            index = int(_tag(one, "embark-rank") or 0)
            known = newest.get(index)
            if known is None or _rank(one) > _rank(known):
                newest[index] = one
        return [_machine(index, one) for index, one in sorted(newest.items())]

    def create(self, index: int) -> None:
        self.change(vm_aws.start_words(self.job, self.location), **{"1": str(index)})

    def restart(self, machine: Machine) -> None:
        self.change(("aws", "ec2", "start-instances", *_REGION, "--instance-ids", machine.id))

    def delete(self, machines: Sequence[Machine]) -> None:
        ids = [machine.id for machine in machines if machine.state != "gone"]
        if ids:
            self.change((*vm_aws.end_words(), *ids[1:]), id=ids[0])

    def host(self, machine: Machine) -> Host:
        return self.host_at(machine, machine.id, alias=machine.id, proxy=(
            "aws", "ssm", "start-session", *_REGION, "--target", machine.id, "--document-name", "AWS-StartSSHSession",
            "--parameters", "portNumber=%p"))

    def host_key(self, machine: Machine) -> str:
        """Session Manager runs it on the machine, once its agent is up."""
        sent = self.ask(("aws", "ssm", "send-command", *_REGION, "--instance-ids", machine.id, "--document-name",
                         "AWS-RunShellScript", "--parameters", json.dumps({"commands": [_HOST_KEY]}),
                         "--query", "Command.CommandId", "--output", "text"))
        if not sent.is_ok:
            return ""
        until_s = time.monotonic() + ANSWER_S
        while time.monotonic() < until_s:
            found = self.ask(("aws", "ssm", "get-command-invocation", *_REGION, "--command-id", sent.out.strip(),
                             "--instance-id", machine.id, "--query", "StandardOutputContent", "--output", "text"))
            if found.is_ok and found.out.startswith("ssh-"):
                return found.out.strip()
            time.sleep(1.0)
        return ""

    def events(self) -> list[RunEvent]:
        found = []
        for one in self._described():
            name = f"{self.job.name}-{_tag(one, 'embark-rank')}"
            launched_s = time_s(one.get("LaunchTime")) or 0.0
            found.append(RunEvent(launched_s, name, "Launched", str(one["InstanceId"]), is_warning=False))
            reason, at = one.get("StateReason") or {}, re.search(r"\((.*)\)", one.get("StateTransitionReason") or "")
            if reason and at:
                is_taken = "Spot" in str(reason.get("Code"))
                found.append(RunEvent(time_s(at[1]) or 0.0, name, str(reason.get("Code")),
                                      str(reason.get("Message")), is_taken))
        return sorted(found, key=lambda event: event.time_s)

    def _group(self) -> Resource:
        """Its id is looked up by name when it is removed."""
        region, name = shlex.quote(str(self.values["REGION"])), shlex.quote(f"embark-{self.job.name}")
        find = (f"aws ec2 describe-security-groups --region {region} --filters Name=group-name,Values={name} "
                "--query 'SecurityGroups[0].GroupId' --output text")
        return Resource("the security group of its machines (aws)",
                     f'aws ec2 delete-security-group --region {region} --group-id "$({find})"')

    def _described(self) -> list[dict[str, Any]]:
        found = self.read(("aws", "ec2", "describe-instances", *_REGION, "--filters",
                          Shell('"Name=tag:embark-run,Values=$NAME"'), "--output", "json"))
        return [one for reservation in (found or {}).get("Reservations", ()) for one in reservation["Instances"]]


def _machine(index: int, one: dict[str, Any]) -> Machine:
    reason = one.get("StateReason") or {}
    return Machine(index, str(one["InstanceId"]), _tag(one, "Name") or str(one["InstanceId"]),
                STATES.get(one["State"]["Name"], "gone"), inside=str(one.get("PrivateIpAddress") or ""),
                why=str(reason.get("Message") or one.get("StateTransitionReason") or ""))


def _rank(one: dict[str, Any]) -> tuple[bool, str]:
    """Live ones first, then the newest."""
    return STATES.get(one["State"]["Name"]) != "gone", str(one.get("LaunchTime"))


def _tag(one: dict[str, Any], key: str) -> str:
    return next((str(tag["Value"]) for tag in one.get("Tags") or () if tag["Key"] == key), "")

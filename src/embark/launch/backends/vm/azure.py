"""Azure VMs through `az`, reached at public addresses by ssh with keys only."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from embark.launch.backend import RunEvent, time_s
from embark.launch.backends.ssh import Host
from embark.launch.backends.vm.clouds import Cloud, Machine, MachineState, from_environment
from embark.render.clouds import azure as vm_azure
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.shell_text import Step, variable

FROM = "EMBARK_SSH_FROM"
"""The addresses that port 22 is open to, as Azure writes them; unset: all."""
_GROUP = ("--resource-group", variable("RESOURCE_GROUP"))
_HOST_KEY = "cat /etc/ssh/ssh_host_ed25519_key.pub"


class Azure(Cloud):
    name = "azure"
    login = "az login"
    deletes_infrastructure = True
    tools: ClassVar[Mapping[str, str]] = {"az": "https://learn.microsoft.com/cli/azure/install-azure-cli"}

    @classmethod
    def settings(cls, job: Job) -> dict[str, str]:
        location = location_of(job)
        return {**from_environment(RESOURCE_GROUP=f"embark-{job.name}", VM_IMAGE=vm_azure.IMAGE, **{FROM: "*"}),
                "LOCATION": location.region, "STORAGE_ACCOUNT": job.spec.place.storage_account}

    def identity(self) -> tuple[str, ...]:
        return ("az", "account", "show", "--output", "json")

    def steps(self) -> list[Step]:
        let_in = Step("", ((
            "az", "network", "nsg", "rule", "create", *_GROUP, "--nsg-name", "embark", "--name", "ssh",
            "--priority", "1000", "--direction", "Inbound", "--access", "Allow", "--protocol", "Tcp",
            "--destination-port-ranges", "22", "--source-address-prefixes", variable(FROM)),))
        return [*vm_azure.network_steps(self.job, self.location), let_in]

    def machines(self) -> list[Machine]:
        if not self._is_there():
            return []
        found = self.read(("az", "vm", "list", *_GROUP, "--show-details", "--output", "json"))
        return sorted((_machine(one) for one in found or () if re.search(r"-\d+$", str(one["name"]))),
                      key=lambda machine: machine.index)

    def create(self, index: int) -> None:
        rank = str(index)
        given = ("--ssh-key-values", str(self.folder / "key.pub"))
        self.change(vm_azure.start_words(self.job, self.location, given), rank=rank)
        words = vm_azure.grant_words(self.job)
        if not words.grants:
            return
        principal = self.ask(words.principal, rank=rank).out.strip() or "PRINCIPAL"
        account = self.ask(words.account).out.strip() or "ACCOUNT"
        for grant in words.grants:
            self.change(grant, principal=principal, account=account)

    def restart(self, machine: Machine) -> None:
        self.change(("az", "vm", "start", *_GROUP, "--name", machine.name))

    def delete(self, machines: Sequence[Machine]) -> None:
        """A VM that is only shut down is still paid for: the whole resource group is deleted."""
        if self.shell.is_dry or self._is_there():
            self.change(vm_azure.end_words())

    def host(self, machine: Machine) -> Host:
        return self.host_at(machine, machine.outside, alias=machine.id)

    def host_key(self, machine: Machine) -> str:
        """Azure's agent runs it on the machine and reports what it printed within its own text."""
        done = self.ask(("az", "vm", "run-command", "invoke", *_GROUP, "--name", machine.name, "--command-id",
                         "RunShellScript", "--scripts", _HOST_KEY, "--query", "value[0].message", "--output", "tsv"))
        found = re.search(r"ssh-ed25519 [A-Za-z0-9+/=]+", done.out)
        return found[0] if done.is_ok and found else ""

    def events(self) -> list[RunEvent]:
        log = self.read(("az", "monitor", "activity-log", "list", *_GROUP, "--offset", "7d", "--output", "json"))
        return sorted((_event(one) for one in log or ()), key=lambda event: event.time_s)

    def _is_there(self) -> bool:
        # By its exit code: listing the VMs of a group that does not exist is an error like any other.
        return self.ask(("az", "group", "show", "--name", variable("RESOURCE_GROUP"))).is_ok


def _machine(one: dict[str, Any]) -> Machine:
    name, power = str(one["name"]), str(one.get("powerState") or "")
    state: MachineState = "stopped"
    if power == "VM running":
        state = "running"
    elif power in ("", "VM starting") or one.get("provisioningState") == "Creating":
        state = "starting"
    if one.get("provisioningState") == "Deleting":
        state = "gone"
    return Machine(int(name.rpartition("-")[2]), str(one.get("vmId") or name), name, state, inside=name,
                outside=str(one.get("publicIps") or "").partition(",")[0], why="" if state == "running" else power)


def _event(one: dict[str, Any]) -> RunEvent:
    said, status = one.get("operationName") or {}, one.get("status") or {}
    name = str(one.get("resourceId") or "").rpartition("/")[2]
    return RunEvent(time_s=time_s(one.get("eventTimestamp")) or 0.0, source=name,
                    reason=str(said.get("localizedValue") or said.get("value") or ""),
                    text=str(status.get("localizedValue") or status.get("value") or ""),
                    is_warning=str(one.get("level")) in ("Warning", "Error", "Critical"))

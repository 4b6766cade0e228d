"""Azure's machines through `az`. They have public addresses; ssh is let in, by keys alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from embark.launch.backend import RunEvent
from embark.launch.backends.vm.clouds import RUN_FOLDER, Cloud, Machine, MachineState, from_environment
from embark.launch.backends.vm.ssh import Host, ssh_words
from embark.render.clouds.azure import vm as vm_azure
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.shell_text import variable
from embark.render.steps import Step

USER = "embark"
FROM = "EMBARK_SSH_FROM"
"""The addresses that may knock at port 22, as Azure writes them; everyone's, where it is not set."""
_GROUP = ("--resource-group", variable("RESOURCE_GROUP"))
_HOST_KEY = "cat /etc/ssh/ssh_host_ed25519_key.pub"


class Azure(Cloud):
    name = "azure"
    login = "az login"
    tools: ClassVar[Mapping[str, str]] = {"az": "https://learn.microsoft.com/cli/azure/install-azure-cli"}

    @classmethod
    def settings(cls, job: Job) -> dict[str, str]:
        location = location_of(job)
        return {**from_environment(RESOURCE_GROUP=f"embark-{job.name}", VM_IMAGE=vm_azure.IMAGE, **{FROM: "*"}),
                "LOCATION": location.region, "STORAGE_ACCOUNT": job.spec.place.storage_account}

    def who(self) -> tuple[str, ...]:
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
        told = self.read(("az", "vm", "list", *_GROUP, "--show-details", "--output", "json"))
        return sorted((_made(one) for one in told or () if re.search(r"-\d+$", str(one["name"]))),
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

    def wake(self, machine: Machine) -> None:
        self.change(("az", "vm", "start", *_GROUP, "--name", machine.name))

    def delete(self, machines: Sequence[Machine]) -> None:
        """One that is only shut down is still paid for: the whole group goes."""
        if self.shell.is_dry or self._is_there():
            self.change(vm_azure.end_words())

    @property
    def rest_goes_too(self) -> bool:
        return True

    def host(self, machine: Machine) -> Host:
        words = ssh_words(machine.outside, user=USER, key=self.folder / "key",
                          known_hosts=self.folder / "known_hosts", alias=machine.id)
        return Host(machine.name, machine.index, words, RUN_FOLDER, ("sudo", "-n"))

    def host_key(self, machine: Machine) -> str:
        """Azure's agent runs it on the machine, and says what it printed between words of its own."""
        told = self.ask(("az", "vm", "run-command", "invoke", *_GROUP, "--name", machine.name, "--command-id",
                         "RunShellScript", "--scripts", _HOST_KEY, "--query", "value[0].message", "--output", "tsv"))
        found = re.search(r"ssh-ed25519 [A-Za-z0-9+/=]+", told.out)
        return found[0] if told.is_ok and found else ""

    def events(self) -> list[RunEvent]:
        told = self.read(("az", "monitor", "activity-log", "list", *_GROUP, "--offset", "7d", "--output", "json"))
        found = [_event(one) for one in told or ()]
        return sorted(found, key=lambda event: event.time_s)

    def _is_there(self) -> bool:
        # Asked about by its exit code: listing the machines of a group that is not there is an error like others.
        return self.ask(("az", "group", "show", "--name", variable("RESOURCE_GROUP"))).is_ok



def _made(one: dict[str, Any]) -> Machine:
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
    try:
        at_s = datetime.fromisoformat(str(one.get("eventTimestamp"))).timestamp()
    except ValueError:
        at_s = 0.0
    name = str(one.get("resourceId") or "").rpartition("/")[2]
    return RunEvent(at_s, name, str(said.get("localizedValue") or said.get("value") or ""),
                    str(status.get("localizedValue") or status.get("value") or ""),
                    str(one.get("level")) in ("Warning", "Error", "Critical"))



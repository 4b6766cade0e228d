"""Compute Engine VMs through `gcloud`, reached by its tunnel: ssh is open to that alone."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from embark.errors import UserError
from embark.launch.backend import RunEvent, time_s
from embark.launch.backends.ssh import Host
from embark.launch.backends.vm.clouds import Cloud, Machine, MachineState, from_environment
from embark.render.clouds import gcp as vm_gcp
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.shell_text import Step, option, variable

TUNNEL = "35.235.240.0/20"
"""Where the traffic of Identity-Aware Proxy comes from."""
STATES: dict[str, MachineState] = {"PROVISIONING": "starting", "STAGING": "starting", "RUNNING": "running",
                                   "REPAIRING": "starting"}
_PROJECT = option("--project", variable("PROJECT"))
_ZONE = option("--zone", variable("ZONE"))


class Gcp(Cloud):
    name = "gcp"
    login = "gcloud auth login"
    tools: ClassVar[Mapping[str, str]] = {"gcloud": "https://cloud.google.com/sdk/docs/install"}

    @classmethod
    def settings(cls, job: Job) -> dict[str, str]:
        found = from_environment(PROJECT=job.spec.place.account, NETWORK="default", IMAGE_FAMILY=vm_gcp.IMAGE_FAMILY,
                       IMAGE_PROJECT=vm_gcp.IMAGE_PROJECT)
        if job.spec.place.account:
            found["PROJECT"] = job.spec.place.account
        if not found["PROJECT"]:
            raise UserError("no Google Cloud project is set", fix="--set place.account=PROJECT")
        zone = location_of(job).zone
        return {**found, "ZONE": zone, "ZONE%-*": zone.rpartition("-")[0]}

    def identity(self) -> tuple[str, ...]:
        # Not print-access-token: what it prints is a secret.
        return ("gcloud", "projects", "describe", variable("PROJECT"), "--format=json")

    def steps(self) -> list[Step]:
        name = f"embark-{self.job.name}"
        let_in = Step(
            "the firewall rule for ssh by Google's tunnel",
            (("gcloud", "compute", "firewall-rules", "create", f"{name}-ssh",
              option("--network", variable("NETWORK")), "--allow=tcp:22", f"--source-ranges={TUNNEL}",
              f"--target-tags={name}", _PROJECT),),
            unless=("gcloud", "compute", "firewall-rules", "describe", f"{name}-ssh", _PROJECT),
            remove=(("gcloud", "compute", "firewall-rules", "delete", f"{name}-ssh", "--quiet", _PROJECT),))
        return [*vm_gcp.network_steps(self.job), let_in]

    def machines(self) -> list[Machine]:
        found = self.read(("gcloud", "compute", "instances", "list", f"--filter=labels.embark-run={self.job.name}",
                          "--format=json", _PROJECT))
        return sorted((_machine(one) for one in found or ()), key=lambda machine: machine.index)

    def create(self, index: int) -> None:
        keys = self.folder / "ssh-keys"
        if not self.shell.is_dry:
            keys.write_text(f"{self.user}:{(self.folder / 'key.pub').read_text().strip()}\n")
        given = ("--metadata=enable-guest-attributes=TRUE,enable-oslogin=FALSE",
                 f"--metadata-from-file=ssh-keys={keys}")
        self.change(vm_gcp.start_words(self.job, self.location, given), rank=str(index))

    def restart(self, machine: Machine) -> None:
        self.change(vm_gcp.again_words(self.job), rank=str(machine.index))

    def delete(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            self.change(vm_gcp.end_words(self.job), rank=str(machine.index))

    def host(self, machine: Machine) -> Host:
        return self.host_at(machine, machine.name, alias=f"compute.{machine.id}", proxy=(
            "gcloud", "compute", "start-iap-tunnel", machine.name, "%p", "--listen-on-stdin", _ZONE, _PROJECT,
            "--verbosity=warning"))

    def host_key(self, machine: Machine) -> str:
        """The machine writes it into its guest attributes as it boots."""
        done = self.ask(("gcloud", "compute", "instances", "get-guest-attributes", machine.name, _ZONE,
                         "--query-path=hostkeys/", "--format=value(key,value)", _PROJECT))
        rows = [line.split() for line in done.out.splitlines()] if done.is_ok else []
        return next((f"{row[0]} {row[1]}" for row in rows if len(row) == 2 and row[0] == "ssh-ed25519"), "")

    def events(self) -> list[RunEvent]:
        found = self.read(("gcloud", "compute", "operations", "list", option("--zones", variable("ZONE")),
                          f"--filter=targetLink~/instances/{self.job.name}-[0-9]+$", "--format=json", _PROJECT))
        return sorted((_event(one) for one in found or ()), key=lambda event: event.time_s)


def _machine(one: dict[str, Any]) -> Machine:
    name, status = str(one["name"]), str(one.get("status"))
    state = STATES.get(status, "stopped")
    return Machine(int(name.rpartition("-")[2]), str(one.get("id") or name), name, state, inside=name,
                why="" if state == "running" else status)


def _event(one: dict[str, Any]) -> RunEvent:
    kind = str(one.get("operationType") or "")
    at_s = time_s(one.get("insertTime")) or 0.0
    errors = [str(error.get("message")) for error in (one.get("error") or {}).get("errors", ())]
    is_taken = kind == "compute.instances.preempted"
    said = "; ".join(errors) or str(one.get("statusMessage") or one.get("status") or "")
    return RunEvent(at_s, str(one.get("targetLink") or "").rpartition("/")[2], kind, said, is_taken or bool(errors))

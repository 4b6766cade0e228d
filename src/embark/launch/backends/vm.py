"""Plain VMs of AWS, Azure or Google Cloud, without Kubernetes: created by the cloud's own command line, given the run
by ssh.

The supervisor on each machine restarts its ranks. Machines that are lost are re-created by `recover` alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from embark.catalog import load_catalog
from embark.formatting import format_usd, pluralize
from embark.launch.backend import LaunchRequest, Replica, Resource, RunHandle, Status
from embark.launch.run_registry import registry_dir
from embark.launch.supervisor_client import (
    Host,
    SupervisorState,
    job_json,
    make_key,
    status_of,
    wait_while,
    write_known_hosts,
)
from embark.render.clouds.aws import plugin_text
from embark.render.command import SPEC_PATH
from embark.render.job import Job, make_job
from embark.render.pod import config_data
from embark.render.shell_text import quote, script
from embark.render.targets.vm_node import node_program, off_program, refuse_volume, setup_program
from embark.render.wheel import wheel_bytes, wheel_name
from embark.spec import RunSpec
from .clouds import CLOUDS, Cloud, Machine
from .machines import RUN_FOLDER, Existing, MachinesBackend, end_later, submitted_s

READY = "/run/embark-ready"  # Gone after a reboot, and with it what was on the machine's own disks.


class Vm(MachinesBackend):
    """VMs of the cloud that sells the spec's machine."""

    boot_s = 900.0

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        refuse_volume(job)
        where = {
            "folder": str(registry_dir() / "vm" / job.cloud / job.name), "cloud": job.cloud, "object": job.name,
            "num_nodes": job.num_nodes, **CLOUDS[job.cloud].settings(job)
        }
        return RunHandle.of(job, "vm", where)

    def check(self, request: LaunchRequest) -> None:
        super().check(request)
        cloud = self._cloud(request.handle, make_job(request.spec, load_catalog()))
        cloud.check_login()
        if found := _not_gone(cloud):
            raise self._exists(", ".join(machine.name for machine in found), request.handle)

    def _submit(self, request: LaunchRequest, job: Job) -> None:
        folder = request.handle.folder
        request.record(Resource(f"the run's ssh key in {folder}", f"embark cancel {request.handle.name}"))
        make_key(self._shell, folder / "key", f"embark {job.name}")
        self._provision(request.handle, job, request.record, is_fresh=True)

    def _recreate(self, handle: RunHandle, job: Job) -> None:
        self._provision(handle, job, lambda _: None, is_fresh=False)

    def _existing(self, handle: RunHandle, job: Job) -> Existing:
        cloud = self._cloud(handle, job)
        machines = cloud.placeholders() if self._shell.is_dry else _not_gone(cloud)
        is_reachable = self._shell.is_dry or (handle.folder / "known_hosts").exists()
        hosts = [cloud.host(machine) for machine in machines if machine.state == "running" and is_reachable]
        return Existing(hosts=hosts, names=tuple(machine.name for machine in machines),
                        delete=lambda: cloud.delete(machines),
                        remains=() if cloud.deletes_infrastructure else tuple(cloud.infrastructure()))

    def _look(self, handle: RunHandle, job: Job) -> tuple[list[Host], Status]:
        cloud = self._cloud(handle, job)
        machines = {machine.index: machine for machine in cloud.machines()}
        if not machines and submitted_s(handle) is None:
            return [], Status("gone", f"{handle.name} has no machines", "embark launch creates them")
        hosts = [cloud.host(machine) for machine in machines.values() if machine.state == "running"]
        states: dict[int, SupervisorState | None] = dict.fromkeys(range(job.num_nodes))
        states.update(self._ssh.states(hosts))
        status = status_of(states, {index: f"{job.name}-{index}" for index in states}, handle.run_uri)
        if status.has_ended:
            return hosts, _with_cost(handle, status, len(hosts), job.num_nodes)
        status = _with_machines(status, machines)
        gone = [index for index in states if index not in machines or machines[index].state in ("stopped", "gone")]
        if gone:
            why = {index: f" ({machine.why})" for index, machine in machines.items() if machine.why}
            reason = "; ".join(f"machine {index} is gone{why.get(index, '')}" for index in gone)
            lost = self._lost(handle, reason, status, is_gone=True, may_recreate=job.is_spot)
            return hosts, _with_fewer(lost, job, gone)
        if any(state is not None and state.is_lost for state in states.values()):
            return hosts, self._lost(handle, status.reason, status, is_gone=False, may_recreate=True)
        return hosts, status

    def _provision(self, handle: RunHandle, job: Job, record: Callable[[Resource], None], *, is_fresh: bool) -> None:
        """Create what is missing, and give the run to each machine that does not have it."""
        cloud = self._cloud(handle, job)
        cloud.run_steps(cloud.steps(), record)
        cloud.prepare(record)
        new = self._start_missing(handle, cloud, record)
        machines = self._wait_until_running(cloud)
        self._learn_host_keys(cloud, machines)
        hosts = [cloud.host(machine) for machine in machines]
        self._ssh.wait_for(hosts, self.boot_s)
        master = next(machine.inside for machine in machines if machine.index == 0)
        self._ssh.start(hosts, lambda host: machine_files(job, host.index, master), is_fresh=is_fresh)
        if not is_fresh and 0 in new:  # the others look for the first machine at its old address
            self._ssh.restart([host for host in hosts if host.index not in new])

    def _start_missing(self, handle: RunHandle, cloud: Cloud, record: Callable[[Resource], None]) -> list[int]:
        existing, job = {machine.index: machine for machine in _not_gone(cloud)}, cloud.job
        new: list[int] = []
        for index in range(job.num_nodes):
            machine = existing.get(index)
            if machine is None:
                if not new:
                    record(Resource(f"up to {job.num_nodes} x {job.machine.name}, paid by the hour",
                                    f"embark cancel {handle.name}"))
                self._notify(f"creating machine {index} of {job.num_nodes}")
                cloud.create(index)
            elif machine.state == "stopped":
                cloud.restart(machine)
            else:
                continue
            new.append(index)
        return new

    def _wait_until_running(self, cloud: Cloud) -> list[Machine]:
        if self._shell.is_dry:
            return cloud.placeholders()
        up: list[Machine] = []

        def trouble() -> str:
            machines = cloud.machines()
            up[:] = [machine for machine in machines if machine.state == "running" and machine.inside]
            waiting = [f"{one.name} is {one.state} {one.why}".strip() for one in machines if one not in up]
            return "" if len(up) == cloud.job.num_nodes else "; ".join(waiting) or "machines are being created"

        wait_while(trouble, self.boot_s, self.poll_s, self._notify)
        return up

    def _learn_host_keys(self, cloud: Cloud, machines: Sequence[Machine]) -> None:
        """Record the keys of new machines, from the cloud itself and not from whatever answers at the address."""
        if self._shell.is_dry:
            return
        known_hosts = cloud.folder / "known_hosts"

        def trouble() -> str:
            known = known_hosts.read_text() if known_hosts.exists() else ""
            new = [machine for machine in machines if f"{cloud.alias(machine)} " not in known]
            keys = {machine: cloud.host_key(machine) for machine in new}
            write_known_hosts(known_hosts, {cloud.alias(one): key for one, key in keys.items() if key})
            waiting = [machine.name for machine, key in keys.items() if not key]
            return f"{cloud.name} reports no host key of {', '.join(waiting)} yet" if waiting else ""

        wait_while(trouble, self.boot_s, self.poll_s, self._notify)

    def _cloud(self, handle: RunHandle, job: Job) -> Cloud:
        return CLOUDS[job.cloud](self._shell, job, handle.folder, self._settings(handle))


def machine_files(job: Job, index: int, master: str) -> Mapping[str, str | bytes]:
    """Return the programs that a rendered machine would find at its first start.

    `master` is the address at which the others reach the first machine.
    """
    config = config_data(job)
    folder = SPEC_PATH.rpartition("/")[0]
    start = script(
        "Sets this machine up once after each boot, then becomes its ranks.",
        f"cd {RUN_FOLDER}\nmkdir -p {folder}\ncp {' '.join(quote(name) for name in config)} {folder}/",
        f"if [ ! -e {READY} ]; then\n  ./setup.sh\n  touch {READY}\nfi",
        "exec ./node.sh")
    identity = f"RANK={index}\nMASTER={quote(master)}{plugin_text(job)}"
    return {
        **config, **({} if job.spec.place.image else {wheel_name(): wheel_bytes()}),
        "setup.sh": setup_program(job, wheels=RUN_FOLDER), "node.sh": node_program(job, identity), "start.sh": start,
        "off.sh": off_program(job),
        "job.json": job_json([f"{RUN_FOLDER}/start.sh"], cwd="/", after=end_later())
    }


def _with_machines(status: Status, machines: Mapping[int, Machine]) -> Status:
    """Add what the cloud reports of machines that do not answer."""
    replicas = []
    for replica in status.replicas:
        machine = machines.get(replica.index or 0)
        if machine is None:
            replica = Replica(replica.name, replica.index, "gone", "deleted, or never created")
        elif machine.state != "running":
            replica = Replica(replica.name, replica.index, machine.state, machine.why)
        replicas.append(replica)
    if any(replica.state == "starting" for replica in replicas):
        status = status.become("pending", "its machines are starting")
    return replace(status, replicas=tuple(replicas))


def _with_fewer(lost: Status, job: Job, gone: Sequence[int]) -> Status:
    """An elastic run continues without machines that are gone, unless one of them is the first."""
    num_left = job.num_nodes - len(gone)
    if not job.is_elastic or 0 in gone or num_left < job.min_nodes or lost.state not in ("lost", "failed"):
        return lost
    reason = f"{lost.reason}; the others train on, {num_left} of {pluralize(job.num_nodes, 'machine')}"
    # What was created on demand stays gone until the run is launched again, and the run has not failed.
    return replace(lost, state="lost" if lost.state == "lost" else "running", reason=reason)


def _with_cost(handle: RunHandle, status: Status, num_up: int, num_nodes: int) -> Status:
    """Say that the run has ended and its machines still cost money."""
    if not num_up:
        return status
    cost = f" at {format_usd(handle.usd_per_hour * num_up / num_nodes)} an hour" if handle.usd_per_hour else ""
    reason = f"{status.reason}; its {pluralize(num_up, 'machine')} still running{cost}".removeprefix("; ")
    fix = "; ".join(part for part in (status.fix, f"embark cancel {handle.name} deletes them") if part)
    return replace(status, reason=reason, fix=fix)


def _not_gone(cloud: Cloud) -> list[Machine]:
    return [machine for machine in cloud.machines() if machine.state != "gone"]

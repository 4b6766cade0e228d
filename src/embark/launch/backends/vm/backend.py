"""Plain machines of a cloud, without Kubernetes: made by its own command line, handed the run by ssh.

Whoever looks brings the run back: a machine that was taken away is made again, one that was started again is handed
the run again. It needs no terminal that stays open, and no service that somebody must keep.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Fault, Interrupted, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.launch.backend import (
    CancelResult,
    LaunchRequest,
    LogLine,
    Notify,
    Replica,
    Resource,
    RunEvent,
    RunHandle,
    Status,
)
from embark.launch.backends.vm.clouds import Cloud, Machine, require_object_store
from embark.launch.backends.vm.ended import has_ended_well
from embark.launch.backends.vm.files import machine_files
from embark.launch.backends.vm.logs import MachineLogs
from embark.launch.backends.vm.ssh import (
    Host,
    Ssh,
    SupervisorState,
    Unreachable,
    make_key,
    status_of,
    write_known_hosts,
)
from embark.launch.run_registry import registry_dir
from embark.launch.shell import Shell
from embark.render.job import Job, make_job
from embark.render.settings import grace_s
from embark.render.targets.vm_node import refuse_volume
from embark.spec import RunSpec, load_spec, to_toml
from embark.store import run_uri, write_atomic

NAME = "vm"
HANDED = "handed_over"
END = "end.json"
SPEC = "spec.toml"
BOOT_S = 900.0
POLL_S = 15.0
STOP_MARGIN_S = 20.0
"""Beyond the grace: the last rank's end is seen by asking."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a run's machines are reached by and given; a test may have other ways."""

    cloud: Callable[[Shell, Job, Path, Mapping[str, str]], Cloud]
    settings: Callable[[Job], dict[str, str]]
    files: Callable[[Job, int, str], Mapping[str, str]] = machine_files
    poll_s: float = POLL_S
    boot_s: float = BOOT_S


class Vm:
    """AWS, Azure or Google Cloud, as the spec's machine says."""

    def __init__(self, shell: Shell, *, tell: Notify, is_hasty: bool = False,
                 means: Callable[[str], Means] | None = None) -> None:
        self._shell = shell
        self._tell = tell
        self._is_hasty = is_hasty
        self._means = means or means_of
        self._ssh = Ssh(shell, tell=tell)

    def handle_of(self, spec: RunSpec) -> RunHandle:
        """What the run will be found by. Refuses what cannot be rendered."""
        job = make_job(spec, load_catalog())
        refuse_volume(job)
        where: dict[str, str | int] = {
            "folder": str(registry_dir() / "vm" / job.cloud / job.name), "cloud": job.cloud, "object": job.name,
            "num_nodes": job.num_nodes, "grace_s": grace_s(job), **self._means(job.cloud).settings(job),
        }
        return RunHandle(spec.name, NAME, where, job.title, run_uri(spec.store.root, spec.name), job.usd_per_hour)

    def check(self, order: LaunchRequest) -> None:
        require_object_store(order.spec)
        cloud = self._cloud(order.handle, make_job(order.spec, load_catalog()))
        cloud.check()
        there = [machine for machine in cloud.machines() if machine.state != "gone"]
        if there:
            raise UserError(f"{', '.join(machine.name for machine in there)} of {order.handle.name} are there already",
                            fix=f"embark status {order.handle.name}; embark cancel {order.handle.name} ends them, and "
                                "the checkpoints stay; or another --set name=…")

    def submit(self, order: LaunchRequest) -> None:
        handle, folder = order.handle, _folder(order.handle)
        cloud = self._cloud(handle, make_job(order.spec, load_catalog()))
        order.note(Resource(f"the run's ssh key in {folder}", f"embark cancel {handle.name}"))
        if not self._shell.is_dry:
            for name in (HANDED, END):
                (folder / name).unlink(missing_ok=True)
            write_atomic(folder / SPEC, to_toml(order.spec))
        make_key(self._shell, folder / "key", f"embark {cloud.job.name}")
        self._raise(handle, cloud, order.note, is_fresh=True)
        if not self._shell.is_dry:
            write_atomic(folder / HANDED, json.dumps({"time_s": time.time()}))

    def status(self, handle: RunHandle) -> Status:
        return self._look(handle)[1]

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        hosts, status = self._look(handle)
        if not hosts and not follow:
            raise UserError(f"{handle.name} has no machine that could be read: it is {status.state}. {status.reason}",
                            fix=status.fix)
        reading = MachineLogs(self._ssh, tell=self._tell)
        yield from reading.now(hosts)
        if follow and not status.has_ended:
            yield from reading.on(lambda: self._look_on(handle), self._means(str(handle.where["cloud"])).poll_s)

    def events(self, handle: RunHandle) -> list[RunEvent]:
        """What the cloud has to say of the machines."""
        return self._cloud(handle, self._job(handle)).events() if self._is_kept(handle) else []

    def cancel(self, handle: RunHandle) -> CancelResult:
        """SIGTERM and the last checkpoint, then the machines go."""
        if not self._is_kept(handle):
            return CancelResult((), (_files_of(handle),))
        cloud = self._cloud(handle, self._job(handle))
        machines = [machine for machine in cloud.machines() if machine.state != "gone"]
        if self._shell.is_dry:
            machines = cloud.imagined()
        remains = [] if cloud.rest_goes_too else cloud.rest()
        remains.append(_files_of(handle))
        late = self._stop_ranks(handle, cloud, machines)
        # Nothing is brought back by a look that comes now.
        if not self._shell.is_dry:
            (_folder(handle) / HANDED).unlink(missing_ok=True)
        cloud.delete(machines)
        removed = [f"{machine.name}{late.get(machine.index, '')}" for machine in machines]
        if not self._shell.is_dry:
            shutil.rmtree(_folder(handle), ignore_errors=True)
        return CancelResult(tuple(removed), tuple(remains))

    def _raise(self, handle: RunHandle, cloud: Cloud, note: Callable[[Resource], None], *, is_fresh: bool) -> None:
        """Makes what is not there, and hands the run to each machine that does not have it."""
        for step in cloud.steps():
            if step.unless and self._shell.ask(cloud.filled(step.unless)).is_ok and not self._shell.is_dry:
                continue
            if step.what:
                note(cloud.thing(step))
            for words in step.commands:
                cloud.change(words)
            if step.wait_s and not self._shell.is_dry:
                time.sleep(step.wait_s)
        cloud.ready(note)
        before = {machine.index: machine for machine in cloud.machines() if machine.state != "gone"}
        anew: list[int] = []
        for index in range(cloud.job.num_nodes):
            machine = before.get(index)
            if machine is None:
                if not anew:
                    note(Resource(f"{cloud.job.num_nodes} x {cloud.job.machine.name} or some of them, paid by the hour",
                               f"embark cancel {handle.name}"))
                self._tell(f"machine {index} of {cloud.job.num_nodes} is made")
                cloud.create(index)
                anew.append(index)
            elif machine.state == "stopped":
                cloud.wake(machine)
                anew.append(index)
        machines = self._wait_until_running(cloud)
        hosts = [cloud.host(machine) for machine in machines]
        self._learn_keys(cloud, machines)
        self._ssh.wait_for(hosts, self._means(cloud.name).boot_s)
        files = self._means(cloud.name).files
        master = next(machine.inside for machine in machines if machine.index == 0)
        self._ssh.hand_over(hosts, lambda host: files(cloud.job, host.index, master), is_fresh=is_fresh)
        if not is_fresh and 0 in anew:  # the others look for the first one where it was
            self._ssh.again([host for host in hosts if host.index not in anew])

    def _wait_until_running(self, cloud: Cloud) -> list[Machine]:
        if self._shell.is_dry:
            return cloud.imagined()
        until_s = time.monotonic() + self._means(cloud.name).boot_s
        while True:
            machines = cloud.machines()
            up = [machine for machine in machines if machine.state == "running" and machine.inside]
            if len(up) == cloud.job.num_nodes:
                return up
            if time.monotonic() > until_s:
                missing = [f"{machine.name}: {machine.state} {machine.why}".strip() for machine in machines
                           if machine not in up]
                raise Fault(f"not all machines came up: {'; '.join(missing) or 'some are not there'}",
                            fix=f"embark status {cloud.job.spec.name} goes on from there")
            time.sleep(min(5.0, self._means(cloud.name).poll_s))

    def _learn_keys(self, cloud: Cloud, machines: Sequence[Machine]) -> None:
        """Of machines that are not known yet, by way of the cloud itself, not of whoever answers at the address."""
        if self._shell.is_dry:
            return
        known_hosts = cloud.folder / "known_hosts"
        known = known_hosts.read_text() if known_hosts.exists() else ""
        waiting = [machine for machine in machines if f"{_alias(cloud.host(machine))} " not in known]
        until_s, is_told = time.monotonic() + self._means(cloud.name).boot_s, False
        while waiting:
            for machine in list(waiting):
                key = cloud.host_key(machine)
                if key:
                    write_known_hosts(known_hosts, {_alias(cloud.host(machine)): key})
                    waiting.remove(machine)
            if waiting and time.monotonic() > until_s:
                names = ", ".join(machine.name for machine in waiting)
                raise Unreachable(f"{names} did not tell its host key to {cloud.name}",
                           fix=f"embark status {cloud.job.spec.name} asks again")
            if waiting:
                if not is_told:
                    self._tell(f"{pluralize(len(waiting), 'machine')} starting; this takes some minutes")
                    is_told = True
                time.sleep(min(5.0, self._means(cloud.name).poll_s))

    def _look(self, handle: RunHandle) -> tuple[list[Host], Status]:
        """How it stands; and brings back what was lost, where somebody looks who has time."""
        if not self._is_kept(handle):
            return [], Status("gone", f"the machines of {handle.name} were ended, or never made",
                              "embark launch makes them")
        cloud = self._cloud(handle, self._job(handle))
        machines = {machine.index: machine for machine in cloud.machines()}
        up = [machine for machine in machines.values() if machine.state == "running"]
        if not machines and not (_folder(handle) / HANDED).exists():
            return [], Status("gone", f"{handle.name} has no machines", "embark launch makes them")
        hosts = [cloud.host(machine) for machine in up]
        seen: dict[int, SupervisorState | None] = dict.fromkeys(range(cloud.job.num_nodes))
        seen.update(self._ssh.look(hosts))
        names = {index: f"{cloud.job.name}-{index}" for index in seen}
        status = status_of(seen, names, handle.run_uri)
        if status.has_ended:
            _keep_end(handle, status)
            return hosts, self._with_bill(handle, status, up)
        status = _with_machines(status, machines)
        lost = [index for index in seen if index not in machines or machines[index].state in ("stopped", "gone")]
        idle = [index for index, one in seen.items() if one is not None and one.is_lost]
        if not lost and not idle:
            return hosts, status
        return hosts, self._bring_back(handle, cloud, status, lost, machines)

    def _bring_back(self, handle: RunHandle, cloud: Cloud, status: Status, lost: list[int],
                    machines: Mapping[int, Machine]) -> Status:
        if not (_folder(handle) / HANDED).exists():
            return Status("pending", "its launch was cut off before all machines had the run",
                          f"embark cancel {handle.name}, then launch again", status.parts, status.since_s)
        if (kept := _kept_end(handle)) is not None:
            return kept
        ended = has_ended_well(handle, _launched_s(handle)) if lost else False
        if ended:
            return Status("succeeded", "its machines are gone, and its events say that it trained to the end", "",
                          status.parts, status.since_s, status.num_restarts)
        told = "; ".join(f"machine {index} was taken away" + _why(machines.get(index)) for index in lost)
        if lost and not cloud.job.is_spot:
            return Status("failed", told or "machines are gone",
                          f"embark cancel {handle.name} and embark launch: it goes on from the last checkpoint in "
                          f"{handle.run_uri}", status.parts, status.since_s, status.num_restarts)
        if ended is None:
            return Status("restarting", f"{told}; whether the run had ended cannot be read from here",
                          "embark launch once more, if it had not; see the extra embark-rec[cloud]", status.parts,
                          status.since_s, status.num_restarts)
        if self._is_hasty:
            return Status("restarting", told or status.reason, f"embark status {handle.name} brings it back",
                          status.parts, status.since_s, status.num_restarts)
        self._tell(f"{told or status.reason}: brought back")
        try:
            self._raise(handle, cloud, lambda _: None, is_fresh=False)
        except EmbarkError as error:
            return Status("restarting", f"{told or status.reason}; not back yet: {error.what}",
                          error.fix or "embark status tries again", status.parts, status.since_s, status.num_restarts)
        return Status("restarting", f"{told or status.reason}; brought back, and it goes on from its checkpoint", "",
                      status.parts, status.since_s, status.num_restarts + 1)

    def _look_on(self, handle: RunHandle) -> tuple[list[Host], bool]:
        hosts, status = self._look(handle)
        return hosts, status.has_ended

    def _stop_ranks(self, handle: RunHandle, cloud: Cloud, machines: Sequence[Machine]) -> dict[int, str]:
        """What is to be said of machines whose ranks could not save."""
        up = [machine for machine in machines if machine.state == "running"]
        if not up or (not self._shell.is_dry and not (_folder(handle) / "known_hosts").exists()):
            return {}
        grace = int(handle.where["grace_s"])
        self._tell(f"{pluralize(len(up), 'machine')} told to end; each saves a last checkpoint, within {format_duration(grace)}")
        try:
            late = self._ssh.stop([cloud.host(machine) for machine in up], grace + STOP_MARGIN_S)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped waiting; the ranks of {handle.name} were told to end, and its machines are "
                              "there yet", fix=f"embark cancel {handle.name} ends them") from None
        except EmbarkError as error:
            self._tell(f"the ranks could not be told to end: {to_one_line(error.what)[:300]}")
            return {machine.index: ", whose ranks could not be told" for machine in up}
        return {host.index: ", whose ranks were killed after their grace" for host in late}

    def _with_bill(self, handle: RunHandle, status: Status, up: Sequence[Machine]) -> Status:
        """It has ended, and its machines cost as if it had not."""
        if not up:
            return status
        cost = f" at ${handle.usd_per_hour:,.2f} an hour" if handle.usd_per_hour else ""
        reason = f"{status.reason}; its {pluralize(len(up), 'machine')} still there{cost}".removeprefix("; ")
        fix = "; ".join(part for part in (status.fix, f"embark cancel {handle.name} ends them") if part)
        return Status(status.state, reason, fix, status.parts, status.since_s, status.num_restarts)

    def _is_kept(self, handle: RunHandle) -> bool:
        """Its spec was written before the first change, and goes with the machines."""
        return (_folder(handle) / SPEC).exists()

    def _job(self, handle: RunHandle) -> Job:
        return make_job(load_spec(str(_folder(handle) / SPEC)), load_catalog())

    def _cloud(self, handle: RunHandle, job: Job) -> Cloud:
        settings = {key: str(value) for key, value in handle.where.items() if key.isupper() or "%" in key}
        return self._means(job.cloud).cloud(self._shell, job, _folder(handle), settings)


def means_of(cloud: str) -> Means:
    if cloud == "aws":
        from embark.launch.backends.vm.aws import Aws as Own
    elif cloud == "azure":
        from embark.launch.backends.vm.azure import Azure as Own  # type: ignore[assignment]
    else:
        from embark.launch.backends.vm.gcp import Gcp as Own  # type: ignore[assignment]
    return Means(Own, Own.settings)


def _with_machines(status: Status, machines: Mapping[int, Machine]) -> Status:
    """The parts, with what the cloud says of machines that do not answer."""
    parts = []
    for part in status.parts:
        machine = machines.get(part.index or 0)
        if machine is None:
            parts.append(Replica(part.name, part.index, "gone", "taken away, or never made"))
        elif machine.state == "running":
            parts.append(part)
        else:
            parts.append(Replica(part.name, part.index, machine.state, machine.why))
    state, reason = status.state, status.reason
    if any(part.state == "starting" for part in parts):
        state, reason = "pending", "its machines start"
    return Status(state, reason, status.fix, tuple(parts), status.since_s, status.num_restarts)


def _files_of(handle: RunHandle) -> Resource:
    return Resource(f"checkpoints and events in {handle.run_uri}", "nothing removes them unasked")


def _why(machine: Machine | None) -> str:
    return f" ({machine.why})" if machine is not None and machine.why else ""


def _alias(host: Host) -> str:
    return next(word.partition("=")[2] for word in host.words if word.startswith("HostKeyAlias="))


def _folder(handle: RunHandle) -> Path:
    return Path(str(handle.where["folder"]))


def _keep_end(handle: RunHandle, status: Status) -> None:
    """What was seen once: later its machines turn themselves off, and are not to be made again."""
    if status.state in ("succeeded", "failed") and (_folder(handle) / HANDED).exists():
        write_atomic(_folder(handle) / END, json.dumps({"state": status.state, "reason": status.reason,
                                                       "fix": status.fix, "since_s": status.since_s}))


def _kept_end(handle: RunHandle) -> Status | None:
    try:
        told = json.loads((_folder(handle) / END).read_text())
        return Status(told["state"], told["reason"], told["fix"], since_s=told["since_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _launched_s(handle: RunHandle) -> float:
    try:
        return float(json.loads((_folder(handle) / HANDED).read_text())["time_s"])
    except (OSError, ValueError, KeyError):
        return 0.0

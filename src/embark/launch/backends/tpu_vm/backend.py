"""Slices of TPUs, through `gcloud`: a request that waits in Google's queue, and hosts that start the run by themselves.

A request may be granted in the middle of the night, so what the hosts are to do goes with it as their startup script:
no terminal must be there when they come. One that was taken away is asked for again by whoever looks.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Interrupted, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.launch.backend import CancelResult, LaunchRequest, LogLine, Notify, Resource, RunEvent, RunHandle, Status
from embark.launch.backends.vm.clouds import MADE_S, RUN_FOLDER, command_error, from_environment, require_object_store
from embark.launch.backends.vm.ended import has_ended_well
from embark.launch.backends.vm.logs import MachineLogs
from embark.launch.backends.vm.ssh import (
    Host,
    Ssh,
    SupervisorState,
    job_json,
    names_of,
    pack_files,
    status_of,
    supervisor_text,
)
from embark.launch.run_registry import registry_dir
from embark.launch.shell import CommandResult, Shell
from embark.render.job import Job, make_job
from embark.render.location import location_of
from embark.render.settings import grace_s
from embark.render.shell_text import Shell as Text
from embark.render.shell_text import script
from embark.render.steps import substitute
from embark.render.targets import tpu_vm
from embark.render.targets.vm_node import STATE
from embark.spec import RunSpec, load_spec, to_toml
from embark.store import run_uri, write_atomic

NAME = "tpu-vm"
HANDED = "handed_over"
SPEC = "spec.toml"
STARTUP = "startup.sh"
LOGIN = "gcloud auth login"
POLL_S = 20.0
STOP_MARGIN_S = 20.0
WAITS = {
    "CREATING": "Google looks at the request", "ACCEPTED": "it waits in Google's queue",
    "WAITING_FOR_RESOURCES": "it waits in Google's queue until there is room", "PROVISIONING": "its hosts are made",
}
TAKEN = ("SUSPENDING", "SUSPENDED")


class TpuVm:
    """One queued request, for one slice or several."""

    def __init__(self, shell: Shell, *, tell: Notify, is_hasty: bool = False, poll_s: float = POLL_S) -> None:
        self._shell = shell
        self._tell = tell
        self._is_hasty = is_hasty
        self._poll_s = poll_s
        self._ssh = Ssh(shell, tell=tell)

    def handle_of(self, spec: RunSpec) -> RunHandle:
        """What the run will be found by. Refuses what cannot be rendered."""
        job = make_job(spec, load_catalog())
        given = from_environment(PROJECT=spec.place.account, RUNTIME_VERSION=tpu_vm.runtime_version(job))
        if not given["PROJECT"]:
            raise UserError("no Google Cloud project is named", fix="--set place.account=PROJECT")
        where: dict[str, str | int] = {
            "folder": str(registry_dir() / "tpu-vm" / job.name), "object": job.name, "grace_s": grace_s(job), **given,
            "ZONE": location_of(job).zone,
        }
        return RunHandle(spec.name, NAME, where, job.title, run_uri(spec.store.root, spec.name), job.usd_per_hour)

    def check(self, order: LaunchRequest) -> None:
        handle = order.handle
        require_object_store(order.spec)
        who = self._ask(handle, ("gcloud", "projects", "describe", Text('"$PROJECT"'), "--format=json"))
        if not who.is_ok:
            raise command_error("gcp", who, LOGIN)
        if not self._shell.is_dry and self._request(handle, make_job(order.spec, load_catalog())) is not None:
            raise UserError(f"the request {handle.where['object']} is there already",
                            fix=f"embark status {handle.name}; embark cancel {handle.name} takes it away, and its "
                                "checkpoints stay; or another --set name=…")

    def submit(self, order: LaunchRequest) -> None:
        handle, folder = order.handle, _folder(order.handle)
        job = make_job(order.spec, load_catalog())
        if not self._shell.is_dry:
            write_atomic(folder / SPEC, to_toml(order.spec))
            write_atomic(folder / STARTUP, startup_script(job))
        self._change(handle, tpu_vm.enable_words())
        order.note(Resource(f"the request for {job.num_nodes} x {job.machine.name}, paid by the hour once it is granted",
                         f"embark cancel {handle.name}"))
        self._change(handle, tpu_vm.create_words(job, str(folder / STARTUP)))
        if not self._shell.is_dry:
            write_atomic(folder / HANDED, json.dumps({"time_s": time.time()}))

    def status(self, handle: RunHandle) -> Status:
        return self._look(handle)[1]

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        hosts, status = self._look(handle)
        if not hosts and not follow:
            raise UserError(f"{handle.name} has no hosts that could be read: it is {status.state}. {status.reason}",
                            fix=status.fix)
        reading = MachineLogs(self._ssh, tell=self._tell)
        yield from reading.now(hosts)
        if follow and not status.has_ended:
            yield from reading.on(lambda: self._look_on(handle), self._poll_s)

    def events(self, handle: RunHandle) -> list[RunEvent]:
        """What Google says of the request: its latest state."""
        if not self._is_kept(handle):
            return []
        told = self._request(handle, self._job(handle))
        if told is None:
            return []
        state = _state(told)
        return [RunEvent(_launched_s(handle), str(handle.where["object"]), state, _said(told),
                         state in (*TAKEN, "FAILED"))]

    def cancel(self, handle: RunHandle) -> CancelResult:
        """SIGTERM and the last checkpoint, then the chips go back."""
        remains = (Resource(f"checkpoints and events in {handle.run_uri}", "nothing removes them unasked"),)
        if not self._is_kept(handle):
            return CancelResult((), remains)
        job, folder = self._job(handle), _folder(handle)
        told = self._request(handle, job)
        if told is None and not self._shell.is_dry:
            shutil.rmtree(folder, ignore_errors=True)
            return CancelResult((), remains)
        late = ""
        if self._shell.is_dry or _state(told) == "ACTIVE":
            hosts, grace = self._hosts(handle, job), int(handle.where["grace_s"])
            self._tell(f"{pluralize(len(hosts), 'host')} told to end; the run saves a checkpoint, within {format_duration(grace)}")
            try:
                late = ", whose ranks were killed after their grace" if self._ssh.stop(
                    hosts, grace + STOP_MARGIN_S) else ""
            except KeyboardInterrupt:
                raise Interrupted(f"stopped waiting; the hosts of {handle.name} were told to end, and its chips are "
                                  "there yet", fix=f"embark cancel {handle.name} gives them back") from None
            except EmbarkError as error:
                self._tell(f"the hosts could not be told to end: {to_one_line(error.what)[:300]}")
                late = ", whose hosts could not be told"
        if not self._shell.is_dry:
            (folder / HANDED).unlink(missing_ok=True)
        self._change(handle, tpu_vm.end_words(job))
        if not self._shell.is_dry:
            shutil.rmtree(folder, ignore_errors=True)
        return CancelResult((f"{job.num_nodes} x {job.machine.name}{late}",), remains)

    def _look(self, handle: RunHandle) -> tuple[list[Host], Status]:
        if not self._is_kept(handle):
            return [], Status("gone", f"{handle.name} was given back, or never asked for", "embark launch asks for it")
        job = self._job(handle)
        told = self._request(handle, job)
        if told is None:
            return [], Status("gone", f"the request {handle.where['object']} is not there", "embark launch makes it")
        state = _state(told)
        if state in WAITS:
            return [], Status("pending", f"{WAITS[state]} ({state})")
        if state == "FAILED":
            return [], Status("failed", f"Google refused the request: {_said(told) or 'without a word'}",
                              f"embark cancel {handle.name}, then another place.zone, or spot, or later")
        if state in TAKEN:
            return [], self._bring_back(handle, job, state)
        if state != "ACTIVE":
            return [], Status("pending", f"the request is {state}")
        hosts = self._hosts(handle, job)
        seen: dict[int, SupervisorState | None] = self._ssh.look(hosts)
        if all(one is None or one == SupervisorState() for one in seen.values()):
            return hosts, Status("pending", "its hosts boot, and have not begun yet")
        return hosts, status_of(seen, names_of(hosts), handle.run_uri)

    def _bring_back(self, handle: RunHandle, job: Job, state: str) -> Status:
        """A request that was suspended is not granted again by itself: it goes, and another comes."""
        taken = f"its chips were taken away ({state})"
        ended = has_ended_well(handle, _launched_s(handle))
        if ended:
            return Status("succeeded", f"{taken}, after it had trained to the end", f"embark cancel {handle.name}")
        if self._is_hasty or ended is None or not (_folder(handle) / HANDED).exists():
            why = "; whether the run had ended cannot be read from here" if ended is None else ""
            return Status("restarting", f"{taken}{why}", f"embark status {handle.name} asks for them again")
        self._tell(f"{taken}: asked for again")
        try:
            self._change(handle, tpu_vm.end_words(job))
            self._change(handle, tpu_vm.create_words(job, str(_folder(handle) / STARTUP)))
        except EmbarkError as error:
            return Status("restarting", f"{taken}; not asked for again: {error.what}", error.fix)
        return Status("restarting", f"{taken}; asked for again, and it goes on from its checkpoint", num_restarts=1)

    def _look_on(self, handle: RunHandle) -> tuple[list[Host], bool]:
        hosts, status = self._look(handle)
        return hosts, status.has_ended

    def _hosts(self, handle: RunHandle, job: Job) -> list[Host]:
        """Every host of every slice, each reached by gcloud, which knows its address, its key and ours."""
        found: list[Host] = []
        for node in tpu_vm.node_names(job):
            for worker in range(job.machine.num_hosts):
                words = substitute(tpu_vm.ssh_words(node, f"--worker={worker}"), _values(handle))
                found.append(Host(f"{node} host {worker}", len(found), (*words, "--quiet", "--command"), RUN_FOLDER,
                                  ("sudo", "-n")))
        return found

    def _request(self, handle: RunHandle, job: Job) -> dict[str, Any] | None:
        """None where there is none."""
        done = self._ask(handle, (*tpu_vm.describe_words(job), "--format=json"))
        if not done.is_ok:
            if "NOT_FOUND" in done.err or "not found" in done.err:
                return None
            raise command_error("gcp", done, LOGIN)
        try:
            told = json.loads(done.out or "null")
        except ValueError:
            told = None
        return told if isinstance(told, dict) else None

    def _is_kept(self, handle: RunHandle) -> bool:
        """Its spec was written before the first change, and goes with the request."""
        return (_folder(handle) / SPEC).exists()

    def _job(self, handle: RunHandle) -> Job:
        return make_job(load_spec(str(_folder(handle) / SPEC)), load_catalog())

    def _ask(self, handle: RunHandle, words: tuple[str, ...]) -> CommandResult:
        return self._shell.ask(substitute(words, _values(handle)))

    def _change(self, handle: RunHandle, words: tuple[str, ...]) -> None:
        done = self._shell.change(substitute(words, _values(handle)), timeout_s=MADE_S)
        if not done.is_ok:
            raise command_error("gcp", done, LOGIN)


def startup_script(job: Job) -> str:
    """What every host runs as root when it starts: it unpacks the keeper, which readies the host and trains."""
    start = script("Readies this host and trains.", *tpu_vm.setup_parts(job),
                   f"cd {STATE}\nexec " + " ".join(tpu_vm.train_words()))
    files = {"keeper.py": supervisor_text(), "start.sh": start,
             "order.json": job_json([f"{RUN_FOLDER}/start.sh"], env=tpu_vm.environment(job), cwd="/")}
    return script(f"Every host of {job.name}: what it is given, and who keeps it going.",
                  f"mkdir -p {RUN_FOLDER}\nbase64 -d <<'END' | tar -xzf - -C {RUN_FOLDER}\n{pack_files(files)}\nEND",
                  f"exec python3 {RUN_FOLDER}/keeper.py start {RUN_FOLDER}")


def _state(told: dict[str, Any] | None) -> str:
    return str(((told or {}).get("state") or {}).get("state") or "")


def _said(told: dict[str, Any]) -> str:
    state = told.get("state") or {}
    error = (state.get("failedData") or {}).get("error") or {}
    return to_one_line(str(error.get("message") or state.get("stateInitiator") or ""))[:300]


def _values(handle: RunHandle) -> dict[str, str]:
    return {key: str(value) for key, value in handle.where.items() if key.isupper()}


def _folder(handle: RunHandle) -> Path:
    return Path(str(handle.where["folder"]))


def _launched_s(handle: RunHandle) -> float:
    try:
        return float(json.loads((_folder(handle) / HANDED).read_text())["time_s"])
    except (OSError, ValueError, KeyError):
        return 0.0

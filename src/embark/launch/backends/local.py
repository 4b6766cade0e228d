"""This machine: a supervised training run that outlives the terminal, found again by its folder."""

import sys
from dataclasses import replace
from pathlib import Path

from embark.errors import Fault, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.launch import supervisor
from embark.launch.backend import (
    CancelResult,
    DamagedRecord,
    LaunchBackend,
    LaunchRequest,
    LogLine,
    ReadLines,
    Resource,
    RunHandle,
    Status,
    absolute_run_uri,
    file_reader,
    split_rank,
    time_ns,
)
from embark.launch.run_registry import registry_dir
from embark.launch.shell import CommandResult
from embark.launch.supervisor_client import PROGRAM, SupervisorState, job_json, status_of
from embark.spec import RunSpec, to_toml
from embark.store import SPEC, write_atomic

GRACE_S = 120.0


class Local(LaunchBackend):
    """Runs `embark train` here, a rank for each GPU."""

    poll_s = 0.5

    def handle_of(self, spec: RunSpec) -> RunHandle:
        # JAX is one process for all of a machine's devices.
        num_ranks = 1 if spec.place.device in ("cpu", "jax", "tpu") else max(1, num_gpus())
        where = {
            "folder": str(registry_dir() / "local" / spec.name), "num_ranks": num_ranks, "cwd": str(Path.cwd()),
            "grace_s": int(spec.place.grace_s or GRACE_S)
        }
        return RunHandle(name=spec.name, backend="local", where=where, run_uri=absolute_run_uri(spec),
                         title=f"{spec.name} on this machine: {pluralize(num_ranks, 'rank')}")

    def check(self, request: LaunchRequest) -> None:
        name = request.handle.name
        if self.status(request.handle).state == "running":
            raise UserError(f"{name} already runs on this machine",
                            f"embark logs {name} --follow; embark cancel {name}")

    def submit(self, request: LaunchRequest) -> None:
        handle, folder = request.handle, request.handle.folder
        command = self._command(handle)
        if self._shell.is_dry:
            self._shell.change(command)
            return
        write_atomic(folder / SPEC, to_toml(request.spec, only_set=True))
        write_atomic(folder / supervisor.JOB, job_json(
            command, cwd=handle.where["cwd"], restarts=False,
            # Safe path: a file of the user's folder that is named like one of ours must not be imported.
            env={"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "EMBARK_GRACE_S": str(handle.where["grace_s"])}))
        request.record(Resource(f"the processes of {handle.name} on this machine", f"embark cancel {handle.name}"))
        done = self._supervise(handle, "start", "--fresh")
        if not done.is_ok or SupervisorState.parse(done.out).is_lost:
            raise Fault(f"{handle.name} did not start: {to_one_line(done.err)[-500:]}",
                        "embark train runs it in the foreground")

    def status(self, handle: RunHandle) -> Status:
        state = self._state(handle)
        if state.pid == 0:
            return Status("gone", f"{handle.name} was not started on this machine",
                          "embark launch starts it")
        status = status_of({0: state}, {0: f"process {state.pid}"}, handle.run_uri)
        if not state.is_lost:
            return status if state.code is None else replace(status, replicas=())
        return replace(status, state="failed", replicas=(),
                       fix=f"embark launch resumes it from the last checkpoint in {handle.run_uri}",
                       reason="its process is gone without an exit code: killed, or rebooted")

    def log_reader(self, handle: RunHandle) -> ReadLines:
        return file_reader(handle.folder / supervisor.LOG, self._line)

    def cancel(self, handle: RunHandle) -> CancelResult:
        """Send SIGTERM, on which the trainer saves and ends."""
        remains, state = (handle.checkpoints,), self._state(handle)
        if not state.is_alive:
            return CancelResult((), remains)
        grace_s = handle.where["grace_s"]
        self._supervise(handle, "stop")
        pid = state.pid
        self._notify(f"stopping process {pid}; it saves a last checkpoint, within {format_duration(grace_s)}")
        if not self._wait(handle, lambda: not self._state(handle).is_alive, grace_s):
            self._supervise(handle, "kill")
            return CancelResult(
                (f"process {pid}, killed after its grace period, before it saved a last checkpoint",), remains)
        return CancelResult((f"process {pid}",), remains)

    def _state(self, handle: RunHandle) -> SupervisorState:
        """Return the supervisor's state from its files: a command for each look would be slow."""
        try:
            return SupervisorState(**supervisor.status(handle.folder))
        except supervisor.DamagedFile as error:
            raise DamagedRecord(str(error), handle.folder) from error

    def _supervise(self, handle: RunHandle, command: str, *rest: str) -> CommandResult:
        return self._shell.change([sys.executable, "-P", str(PROGRAM), command, str(handle.folder), *rest])

    def _command(self, handle: RunHandle) -> list[str]:
        train = ["-m", "embark", "train", str(handle.folder / SPEC)]
        num_ranks = handle.where["num_ranks"]
        if num_ranks == 1:
            return [sys.executable, *train]
        return [sys.executable, "-m", "embark.torchrun", "--standalone", f"--nproc-per-node={num_ranks}",
                f"--log-dir={handle.folder / 'ranks'}", "--tee=3", *train]

    def _line(self, raw: bytes) -> LogLine:
        stamp, _, text = raw.decode(errors="replace").partition(" ")
        rank, text = split_rank(text)
        return LogLine(time_ns(stamp), f"rank {rank or 0}", text, 0)


def num_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))

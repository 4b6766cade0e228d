"""This machine as a place to run: a process group that outlives the terminal, found again by its folder."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embark.errors import Fault, Interrupted, UserError
from embark.formatting import format_duration
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
from embark.launch.backends.kubernetes.log_follower import time_ns
from embark.launch.backends.kubernetes.reasons import explain_exit
from embark.launch.backends.local.supervisor import ENDED, LOG, ORDER, STARTED, process_mark
from embark.launch.run_registry import registry_dir
from embark.launch.shell import Shell
from embark.spec import RunSpec, to_toml
from embark.store import run_uri, write_atomic

NAME = "local"
GRACE_S = 120.0
POLL_S = 0.5
START_S = 10.0
_RANK = re.compile(r"\[[a-z]+(\d+)\]:(.*)", re.DOTALL)
"""torchrun's prefix under --tee."""


class Local:
    """Runs `embark train` here, a rank for each GPU."""

    def __init__(self, shell: Shell, *, tell: Notify, poll_s: float = POLL_S) -> None:
        self._shell = shell
        self._tell = tell
        self._poll_s = poll_s

    def handle_of(self, spec: RunSpec) -> RunHandle:
        # JAX is one process for all of a machine's devices.
        num_ranks = 1 if spec.place.device in ("cpu", "jax", "tpu") else max(1, num_gpus())
        folder = registry_dir() / "local" / spec.name
        where: dict[str, str | int] = {
            "folder": str(folder), "num_ranks": num_ranks, "cwd": str(Path.cwd()),
            "grace_s": int(spec.place.grace_s or GRACE_S),
        }
        root = spec.store.root
        uri = run_uri(root if "://" in root else str(Path(root).expanduser().absolute()), spec.name)
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        return RunHandle(spec.name, NAME, where, f"{spec.name} on this machine: {ranks}", uri)

    def check(self, order: LaunchRequest) -> None:
        if self.status(order.handle).state == "running":
            raise UserError(f"{order.handle.name} runs on this machine already",
                            fix=f"embark logs {order.handle.name} --follow; embark cancel {order.handle.name}")

    def submit(self, order: LaunchRequest) -> None:
        handle, folder = order.handle, _folder(order.handle)
        words = self._words(handle, folder)
        if self._shell.is_dry:
            self._shell.change(words)
            return
        for name in (ENDED, STARTED, LOG):
            (folder / name).unlink(missing_ok=True)
        write_atomic(folder / "spec.toml", to_toml(order.spec))
        write_atomic(folder / ORDER, json.dumps({
            "words": words, "cwd": handle.where["cwd"],
            # Safe path: a file of the user's folder that is called like one of ours must not be taken for it.
            "env": {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "EMBARK_GRACE_S": str(handle.where["grace_s"])},
        }))
        order.note(Resource(f"the processes of {handle.name} on this machine", f"embark cancel {handle.name}"))
        keeper = [sys.executable, "-P", "-m", "embark.launch.backends.local.supervisor", str(folder)]
        self._shell.detach(keeper, folder=Path(str(handle.where["cwd"])), log=folder / "keeper.log")
        until_s = time.monotonic() + START_S
        while _read(folder / STARTED) is None:
            if time.monotonic() > until_s:
                told = (folder / "keeper.log").read_text(errors="replace")[-500:]
                raise Fault(f"{handle.name} did not start: {told}", fix="embark train runs it in the foreground")
            time.sleep(0.05)

    def status(self, handle: RunHandle) -> Status:
        folder = _folder(handle)
        started, ended = _read(folder / STARTED), _read(folder / ENDED)
        if started is None:
            return Status("gone", f"{handle.name} was not started on this machine", "embark launch starts it")
        since_s = float(started["time_s"])
        part = Replica(f"process {started['pid']}", 0, "running")
        if ended is None:
            if process_mark(int(started["pid"])) == started["mark"]:
                return Status("running", "", "", (part,), since_s)
            # It may have ended between the two looks.
            ended = _read(folder / ENDED)
        if ended is None:
            return Status("failed", "its process is gone and did not say how it ended: killed, or the machine rebooted",
                          f"embark launch goes on from the last checkpoint in {handle.run_uri}", (), since_s)
        took = format_duration(float(ended["time_s"]) - since_s)
        code = int(ended["code"])
        if code == 0:
            return Status("succeeded", f"took {took}", "", (), since_s)
        if ended["was_stopped"]:
            return Status("gone", f"cancelled after {took}", f"its checkpoints are in {handle.run_uri}", (), since_s)
        why = explain_exit(code if code > 0 else 128 - code, "")
        return Status("failed", f"{why.text}, after {took}", why.fix, (), since_s)

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        path = _folder(handle) / LOG
        if not path.exists() and not follow:
            raise UserError(f"{handle.name} has no log yet", fix=f"embark status {handle.name}")
        rest, offset = b"", 0
        while True:
            is_over = not follow or self.status(handle).has_ended
            with path.open("rb") if path.exists() else open(os.devnull, "rb") as file:
                file.seek(offset)
                while piece := file.read(1 << 20):
                    offset += len(piece)
                    *whole, rest = (rest + piece).split(b"\n")
                    yield from map(_line, whole)
            if is_over:
                if rest:
                    yield _line(rest)
                return
            time.sleep(self._poll_s)

    def events(self, handle: RunHandle) -> list[RunEvent]:
        """This machine says nothing of its own; the run's own events are in its directory."""
        return []

    def cancel(self, handle: RunHandle) -> CancelResult:
        """SIGTERM, on which the trainer saves and ends."""
        remains = (Resource(f"checkpoints and events in {handle.run_uri}", "nothing removes them unasked"),)
        started = _read(_folder(handle) / STARTED)
        if started is None or self.status(handle).state != "running":
            return CancelResult((), remains)
        pid, grace_s = int(started["pid"]), float(handle.where["grace_s"])
        if self._shell.is_dry:
            self._shell.change(["kill", "-TERM", str(pid)])
            return CancelResult((f"process {pid}",), remains)
        os.kill(pid, signal.SIGTERM)
        self._tell(f"process {pid} was told to end; it saves a last checkpoint, within {format_duration(grace_s)}")
        until_s = time.monotonic() + grace_s
        try:
            while process_mark(pid) == started["mark"] and time.monotonic() < until_s:
                time.sleep(0.1)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped waiting; {handle.name} was told to end and is ending",
                              fix=f"embark status {handle.name}") from None
        if process_mark(pid) == started["mark"]:
            os.killpg(pid, signal.SIGKILL)
            return CancelResult((f"process {pid}, killed after its grace: what it saved last may be older",), remains)
        return CancelResult((f"process {pid}",), remains)

    def _words(self, handle: RunHandle, folder: Path) -> list[str]:
        train = ["-m", "embark", "train", str(folder / "spec.toml")]
        num_ranks = int(handle.where["num_ranks"])
        if num_ranks == 1:
            return [sys.executable, *train]
        return [sys.executable, "-m", "embark.torchrun", "--standalone", f"--nproc-per-node={num_ranks}",
                f"--log-dir={folder / 'ranks'}", "--tee=3", *train]


def _line(raw: bytes) -> LogLine:
    stamp, _, text = raw.decode(errors="replace").partition(" ")
    match = _RANK.fullmatch(text)
    source, said = (f"rank {match[1]}", match[2]) if match else ("rank 0", text)
    return LogLine(time_ns(stamp), source, said, 0)


def _folder(handle: RunHandle) -> Path:
    return Path(str(handle.where["folder"]))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def num_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))

"""Runs a job's process on its machine: timestamps its output, restarts it by exit code, records how it ended.

It is copied to the machine and run by that machine's own python3, so it uses nothing but the standard library of
Python 3.8. FOLDER holds `job.json`, the log and everything else that is written. Each command prints the status as one
line of JSON:

    supervisor.py start FOLDER [--fresh]    starts it, unless it is running or the job has ended
    supervisor.py status FOLDER
    supervisor.py stop FOLDER               SIGTERM, on which the trainer saves; the job then ends
    supervisor.py restart FOLDER            SIGTERM, then another attempt: rank 0 has a new address
    supervisor.py kill FOLDER               SIGKILL to it and to all that it started
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

JOB, STARTED, STATE, ENDED, LOG = "job.json", "started.json", "state.json", "ended.json", "log"
FIELDS = {STARTED: {"pid": int, "mark": str, "time_s": float},
          STATE: {"phase": str, "num_restarts": int, "last_code": int},
          ENDED: {"code": int, "was_stopped": bool, "time_s": float}}
MAX_NUMBER = 1 << 40  # More than any process id or Unix time.
MAX_LINE_BYTES = 1 << 20
START_S = 20.0
POLL_S = 0.2
CANNOT_START = 127  # A shell's exit code for it.
PREEMPTED = 75
MAX_FAULTS = 10
GOOD_S = 600.0  # An attempt that lasted so long resets the count of faults.
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # From <linux/prctl.h>.
DRAIN_S = 10.0  # Time to read the rest if a descendant of the process holds its output open.


class DamagedFile(ValueError):
    """A file of the folder does not hold what the supervisor writes."""


def main(command: str, folder: Path, *rest: str) -> None:
    if command == "start":
        start(folder, is_fresh="--fresh" in rest)
    elif command != "status" and is_alive(folder):
        send_signal(folder, command)
    os.write(1, (json.dumps(status(folder)) + "\n").encode())


def send_signal(folder: Path, command: str) -> None:
    """Signal the supervisor, which passes it on."""
    supervisor = pid_of(folder / STARTED)
    if command != "kill":
        kill(supervisor, signal.SIGTERM if command == "stop" else signal.SIGUSR1)
        return
    for pid in [supervisor, *descendants(supervisor)]:
        kill(pid, signal.SIGKILL)
    if read(folder / ENDED) is None:  # nobody else records it
        write(folder / ENDED, json.dumps({"code": 137, "was_stopped": True, "time_s": time.time()}))


def kill(pid: int, number: int) -> None:
    try:
        if pid:
            os.kill(pid, number)
    except ProcessLookupError:
        pass


def descendants(pid: int) -> list[int]:
    """Return processes below `pid`. Ranks have sessions of their own, so no signal to a group reaches all of them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [pid] if pid else []
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def status(folder: Path) -> dict[str, Any]:
    """Return the fields of `SupervisorState`. They are read in this order, because the job may end between two
    reads."""
    started, alive = read(folder / STARTED) or {}, is_alive(folder)
    state, ended = read(folder / STATE) or {}, read(folder / ENDED) or {}
    return {"is_alive": alive, "pid": started.get("pid", 0), "started_s": started.get("time_s"),
            "phase": state.get("phase", ""), "num_restarts": state.get("num_restarts", 0),
            "last_code": state.get("last_code", 0), "code": ended.get("code"),
            "was_stopped": ended.get("was_stopped", False), "ended_s": ended.get("time_s", 0.0)}


def start(folder: Path, *, is_fresh: bool) -> None:
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_alive(folder):
            return
        if is_fresh:
            for name in (STARTED, STATE, ENDED, LOG):
                (folder / name).unlink(missing_ok=True)
        if read(folder / ENDED) is not None:
            return
        (folder / STARTED).unlink(missing_ok=True)
        detach(folder, lock.fileno())
        until_s = time.monotonic() + START_S
        while read(folder / STARTED) is None and time.monotonic() < until_s:
            time.sleep(0.02)


def detach(folder: Path, lock: int) -> None:
    """Supervise in a session of its own, which no closing connection or terminal reaches."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(lock)
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    errors = os.open(str(folder / "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, target in ((0, nothing), (1, errors), (2, errors)):
        os.dup2(target, number)
    try:
        Supervisor(folder).run()
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
    finally:
        os._exit(0)


class Supervisor:
    """Runs the job's command until it ends for good."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job: dict[str, Any] = json.loads((folder / JOB).read_text())
        self.process: subprocess.Popen[bytes] | None = None
        self.is_stopping = False
        state = read(folder / STATE) or {}
        self.num_restarts = int(state.get("num_restarts", -1)) + 1
        self.num_faults = int(state.get("num_faults", 0))
        self.log: IO[bytes] = (folder / LOG).open("ab", buffering=0)

    def run(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGUSR1, self.end_attempt)
        pid = os.getpid()
        write(self.folder / STARTED, json.dumps({"pid": pid, "mark": mark_of(pid), "time_s": time.time()}))
        while True:
            self.save_state("running")
            began_s = time.monotonic()
            code = self.attempt()
            if self.is_final(code, time.monotonic() - began_s):
                return self.end(code)
            self.num_restarts += 1
            wait_s = float(self.job["wait_s"])
            self.write_line(b"embark: exit code %d; restarting in %d s" % (code, wait_s))
            self.save_state("waiting", code)
            until_s = time.monotonic() + wait_s
            while time.monotonic() < until_s and not self.is_stopping:
                time.sleep(min(POLL_S, wait_s))
            if self.is_stopping:
                return self.end(code)

    def is_final(self, code: int, lasted_s: float) -> bool:
        """Return whether this exit code ends the job. Preempted and saved is no fault; long work forgives earlier
        ones."""
        if self.is_stopping or code == 0 or not self.job["restarts"] or code in self.job["final_codes"]:
            return True
        self.num_faults = 0 if lasted_s > GOOD_S else self.num_faults
        self.num_faults += int(code != PREEMPTED)
        if self.num_faults > MAX_FAULTS:
            self.write_line(b"embark: %d faults in quick succession: giving up" % self.num_faults)
            return True
        return False

    def stop(self, *_: object) -> None:
        self.is_stopping = True
        self.end_attempt()

    def end_attempt(self, *_: object) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def attempt(self) -> int:
        job = self.job
        try:
            process = subprocess.Popen(
                job["command"], cwd=job["cwd"] or str(self.folder), env={**os.environ, **job["env"]},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=end_with_parent)
        except OSError as error:
            self.write_line(f"embark: cannot be started: {error}".encode())
            return CANNOT_START
        self.process = process
        reader = threading.Thread(target=self.copy_output, args=(process.stdout,), daemon=True)
        reader.start()
        if self.is_stopping:  # the signal came before there was a process to pass it to
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        reader.join(DRAIN_S)
        return code if code >= 0 else 128 - code

    def copy_output(self, pipe: IO[bytes]) -> None:
        for line in iter(lambda: pipe.readline(MAX_LINE_BYTES), b""):
            self.write_line(line.rstrip(b"\r\n"))

    def write_line(self, text: bytes) -> None:
        second, rest = divmod(time.time_ns(), 1_000_000_000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        self.log.write(f"{stamp}.{rest // 1000:06d}Z ".encode() + text + b"\n")

    def save_state(self, phase: str, code: int = 0) -> None:
        write(self.folder / STATE, json.dumps({
            "phase": phase, "num_restarts": self.num_restarts, "num_faults": self.num_faults, "last_code": code}))

    def end(self, code: int) -> None:
        """Record the end, and run the job's `after` unless somebody stopped it."""
        after = [] if self.is_stopping else self.job["after"]
        if after:
            self.write_line(f"embark: {' '.join(after)}".encode())
        write(self.folder / ENDED, json.dumps({"code": code, "was_stopped": self.is_stopping, "time_s": time.time()}))
        if after:
            subprocess.call(after)


def is_alive(folder: Path) -> bool:
    return bool(pid_of(folder / STARTED))


def end_with_parent() -> None:
    """Get SIGTERM, on which the trainer saves, if the supervisor is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def pid_of(path: Path) -> int:
    """Return the process that the file names; 0 if it does not run."""
    process = read(path)
    return process["pid"] if process and process["mark"] and mark_of(process["pid"]) == process["mark"] else 0


def mark_of(pid: int) -> str:
    """Distinguish a process from a later one with the same id, and from one before a reboot; empty: not running."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"


def read(path: Path) -> dict[str, Any] | None:
    """Return what a file holds, None if there is none; raises `DamagedFile` if a field is missing or has another
    type."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    for name, kind in FIELDS[path.name].items():
        value = found.get(name) if isinstance(found, dict) else None
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise DamagedFile(f"{path}: {name} is {json.dumps(value)[:80]}, not of type {kind.__name__}")
        if kind in (int, float) and not -MAX_NUMBER < value < MAX_NUMBER:
            raise DamagedFile(f"{path}: {name} is {str(value)[:80]}, which is out of range")
    return dict(found)


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(str(new), str(path))


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    except DamagedFile as error:
        sys.exit(str(error))

"""Keeps a run's process on a machine that is reached by ssh: lines get their time, what helps is started again.

It travels to the machine by itself and is run by that machine's own python3, so it needs nothing but the standard
library, of Python 3.8 or newer. FOLDER holds `order.json`, and all that is written:

    keeper.py start FOLDER [--fresh]        starts the keeper, if it is not there and the run has not ended
    keeper.py status FOLDER                 one line of JSON
    keeper.py logs FOLDER BORN NEXT [--follow]    from line NEXT of the log that was born then
    keeper.py stop FOLDER | kill FOLDER     SIGTERM, on which the trainer saves; or SIGKILL
    keeper.py again FOLDER                  SIGTERM, and then the next attempt: the others are elsewhere now
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

ORDER, STARTED, STATE, ENDED, BORN, LOG = "order.json", "started.json", "state.json", "ended.json", "born", "log"
MAX_LINE_BYTES = 1 << 20
START_S = 20.0
CANNOT_START = 127
"""A shell's exit code for it."""
LEFT_OPEN_S = 10.0
"""For what a process left behind that still holds its output open."""


def main(words: list[str]) -> int:
    verb, folder, rest = words[0], Path(words[1]), words[2:]
    verbs = {"start": start, "status": status, "logs": logs, "stop": stop, "kill": kill, "again": again}
    return verbs[verb](folder, rest)


def start(folder: Path, rest: list[str]) -> int:
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if "--fresh" in rest and not is_alive(folder):
            for name in (STARTED, STATE, ENDED, BORN, LOG):
                (folder / name).unlink(missing_ok=True)
        if not is_alive(folder) and read(folder / ENDED) is None:
            if not (folder / BORN).exists():
                write(folder / BORN, str(time.time_ns()))
            (folder / STARTED).unlink(missing_ok=True)
            detach(folder, lock.fileno())
            until_s = time.monotonic() + START_S
            while read(folder / STARTED) is None and time.monotonic() < until_s:
                time.sleep(0.02)
    return status(folder, rest)


def status(folder: Path, rest: list[str]) -> int:
    # In this order: it may end between two looks.
    started, alive, state, ended = read(folder / STARTED), is_alive(folder), read(folder / STATE), read(folder / ENDED)
    say(json.dumps({"started": started, "is_alive": alive, "state": state or {}, "ended": ended, "born": born(folder)}))
    return 0


def logs(folder: Path, rest: list[str]) -> int:
    """`born BORN` first, then each line behind its number."""
    known, wanted = rest[0], int(rest[1])
    follow, number, left = "--follow" in rest, 0, b""
    now = born(folder)
    if now != known:
        wanted = 0
    say("born " + (now or "-"))
    while not (folder / LOG).exists():
        if not follow or not is_alive(folder) or hung_up():
            return 0
        time.sleep(0.2)
    with (folder / LOG).open("rb") as file:
        while True:
            is_over = not follow or not is_alive(folder)
            while True:
                piece = file.read(1 << 18)
                if not piece:
                    break
                lines = (left + piece).split(b"\n")
                left = lines.pop()
                new = []
                for line in lines:
                    if number >= wanted:
                        new.append(b"%d %s\n" % (number, line))
                    number += 1
                if not send(b"".join(new)):
                    return 0
            if is_over or hung_up():
                return 0
            time.sleep(0.2)


def stop(folder: Path, rest: list[str]) -> int:
    started = read(folder / STARTED)
    if started and is_alive(folder):
        os.kill(int(started["pid"]), signal.SIGTERM)
    return status(folder, rest)


def again(folder: Path, rest: list[str]) -> int:
    started = read(folder / STARTED)
    if started and is_alive(folder):
        os.kill(int(started["pid"]), signal.SIGUSR1)
    return status(folder, rest)


def kill(folder: Path, rest: list[str]) -> int:
    started = read(folder / STARTED)
    if started and is_alive(folder):
        os.killpg(int(started["pid"]), signal.SIGKILL)
    return status(folder, rest)


def detach(folder: Path, lock: int) -> None:
    """A process of its own session: no connection that ends reaches it."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(lock)
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    told = os.open(str(folder / "keeper.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, kept in ((0, nothing), (1, told), (2, told)):
        os.dup2(kept, number)
    try:
        keep(folder)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
    finally:
        os._exit(0)


def keep(folder: Path) -> None:
    order = json.loads((folder / ORDER).read_text())
    keeping = Keeping(folder, order)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, keeping.stop)
    signal.signal(signal.SIGUSR1, keeping.again)
    pid = os.getpid()
    write(folder / STARTED, json.dumps({"pid": pid, "mark": mark_of(pid), "time_s": time.time()}))
    with (folder / LOG).open("ab", buffering=0) as log:
        keeping.run(log)
    keeping.after()


class Keeping:
    """Runs the order's words until they end for good."""

    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        self.folder = folder
        self.order = order
        self.process: subprocess.Popen[bytes] | None = None
        self.is_stopping = False
        self.ended_s = 0.0
        state = read(folder / STATE) or {}
        self.num_restarts = int(state.get("num_restarts", -1)) + 1
        self.num_faults = int(state.get("num_faults", 0))

    def stop(self, *_: object) -> None:
        self.is_stopping = True
        self.again()

    def again(self, *_: object) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def run(self, log: IO[bytes]) -> None:
        while True:
            self.tell("running")
            began_s = time.monotonic()
            code = self.once(log)
            lasted_s = time.monotonic() - began_s
            if self.is_stopping or code == 0 or code in self.order["final_codes"]:
                self.end(log, code)
                return
            # Preempted and saved is no fault; nor is one after long work a sign that the next attempt is in vain.
            is_fault = code != self.order["preempted_code"]
            self.num_faults = (0 if lasted_s > self.order["good_s"] else self.num_faults) + int(is_fault)
            if self.num_faults > self.order["max_faults"]:
                self.line(log, b"embark: %d faults, one soon after the other: given up" % self.num_faults)
                self.end(log, code)
                return
            self.num_restarts += 1
            wait_s = float(self.order["wait_s"])
            self.line(log, b"embark: ended with %d; starts again in %d s" % (code, wait_s))
            self.tell("waiting", code)
            until_s = time.monotonic() + wait_s
            while time.monotonic() < until_s and not self.is_stopping:
                time.sleep(min(0.2, wait_s))
            if self.is_stopping:
                self.end(log, code)
                return

    def after(self) -> None:
        """What is done a while after the end, by a process that no longer counts as the run's."""
        if self.is_stopping or not self.order["after"] or os.fork():
            return
        os.setsid()
        time.sleep(float(self.order["after_s"]))
        # A new run may have been handed over meanwhile.
        if (read(self.folder / ENDED) or {}).get("time_s") == self.ended_s:
            subprocess.call(self.order["after"])
        os._exit(0)

    def once(self, log: IO[bytes]) -> int:
        try:
            process = subprocess.Popen(
                self.order["words"], cwd=self.order["cwd"] or str(self.folder), env={**os.environ, **self.order["env"]},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            self.line(log, f"embark: cannot be started: {error}".encode())
            return CANNOT_START
        self.process = process
        reader = threading.Thread(target=self.copy, args=(process.stdout, log), daemon=True)
        reader.start()
        if self.is_stopping:  # it came before there was anyone to pass it to
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        reader.join(LEFT_OPEN_S)
        return code if code >= 0 else 128 - code

    def copy(self, pipe: IO[bytes], log: IO[bytes]) -> None:
        while True:
            line = pipe.readline(MAX_LINE_BYTES)
            if not line:
                return
            self.line(log, line.rstrip(b"\r\n"))

    def line(self, log: IO[bytes], text: bytes) -> None:
        second, rest = divmod(time.time_ns(), 1_000_000_000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        log.write(f"{stamp}.{rest // 1000:06d}Z ".encode() + text + b"\n")

    def tell(self, phase: str, code: int = 0) -> None:
        write(self.folder / STATE, json.dumps({
            "phase": phase, "num_restarts": self.num_restarts, "num_faults": self.num_faults, "last_code": code}))

    def end(self, log: IO[bytes], code: int) -> None:
        if self.order["after"] and not self.is_stopping:
            self.line(log, f"embark: {' '.join(self.order['after'])} in {self.order['after_s']:.0f} s".encode())
        self.ended_s = time.time()
        write(self.folder / ENDED, json.dumps({
            "code": code, "was_stopped": self.is_stopping, "time_s": self.ended_s}))


def is_alive(folder: Path) -> bool:
    started = read(folder / STARTED)
    return started is not None and bool(started["mark"]) and mark_of(int(started["pid"])) == started["mark"]


def mark_of(pid: int) -> str:
    """Tells a process from a later one with its number, and from one before the machine was started again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"


def born(folder: Path) -> str:
    try:
        return (folder / BORN).read_text()
    except OSError:
        return ""


def read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(str(new), str(path))


def say(text: str) -> None:
    send(text.encode() + b"\n")


def send(data: bytes) -> bool:
    """False: nobody reads any more."""
    try:
        while data:
            data = data[os.write(1, data):]
    except OSError:
        return False
    return True


def hung_up() -> bool:
    """The connection is gone; without a line to write it would not be noticed."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))

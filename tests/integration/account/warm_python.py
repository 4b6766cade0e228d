"""Pods of a rehearsed account without four seconds of imports each: a process that has imported torch forks them.

The engine starts `python -m MODULE …` as ever; what it finds as `python` hands its words, environment, folder and open
files over to the process of `serve`, which forks, and ends as the fork ends.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

MODULES = ("embark.cli.train", "embark.run.loop", "embark.trainers.torch.trainer", "embark.events.sinks.terminal",
           "embark.torchrun.launcher", "torch.distributed.checkpoint", "torch.distributed.optim",
           "torch.distributed.run", "torch.utils.tensorboard")
FORKED = ("embark", "embark.torchrun", "torch.distributed.run")  # Anything else is a Python of its own.
SOCKET, PYTHON = "warm.sock", "warm_python"
CLIENT = """#!{python} -SEB
import array, json, os, signal, socket, sys
words = sys.argv[1:]
unbuffered = words[:1] == ["-u"]
if words[unbuffered:][:1] != ["-m"] or words[unbuffered + 1] not in {forked!r}:
    os.execv({python!r}, [{python!r}, *words])
link = socket.socket(socket.AF_UNIX)
link.connect({socket!r})
env = dict(os.environ, PYTHON_EXEC=sys.argv[0])
data = json.dumps(dict(words=words[unbuffered + 1:], env=env, folder=os.getcwd())).encode()
files = array.array("i", [0, 1, 2])
link.sendmsg([len(data).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
link.sendall(data)
pid = int.from_bytes(link.recv(4), "big")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda got, frame: os.kill(pid, got))
code = int.from_bytes(link.recv(4), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def main(cloud: str, folder: str) -> None:
    """The account's server, whose pods find the client as `python`."""
    root = Path(folder)
    (root / PYTHON).write_text(CLIENT.format(python=sys.executable, socket=str(root / SOCKET), forked=FORKED))
    (root / PYTHON).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / SOCKET))
        listener.listen()
        if os.fork() == 0:
            serve(listener)
    from embark.rehearse import processes
    from embark.rehearse.account import server

    processes.sys = SimpleNamespace(executable=str(root / PYTHON))  # type: ignore[assignment]
    server.main(cloud, folder)


def serve(listener: socket.socket) -> None:
    """Fork what is asked for until the account's server is gone; a fork whose client is gone is killed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in MODULES:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:
        sys.stderr.write("a process with threads would fork broken pods\n")
        os._exit(1)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    links: dict[int, socket.socket] = {}
    parent = os.getppid()
    while os.getppid() == parent:
        ready, _, _ = select.select([listener, woken, *links.values()], [], [], 1.0)
        if listener in ready:
            link, _ = listener.accept()
            pid = _fork(link)
            links[pid] = link
            link.sendall(pid.to_bytes(4, "big"))
        for pid in [pid for pid, link in links.items() if link in ready]:
            os.kill(pid, signal.SIGKILL)
            links.pop(pid).close()
        if woken in ready:
            os.read(woken, 4096)
        for pid, code in _ended():
            if link := links.pop(pid, None):
                link.sendall(code.to_bytes(4, "big", signed=True))
                link.close()
    for pid in links:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _ended() -> Iterator[tuple[int, int]]:
    """Forks that are over, and their exit codes."""
    with suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            yield end[0], os.waitstatus_to_exitcode(end[1])


def _fork(link: socket.socket) -> int:
    files = array.array("i")
    head, ancillary, _, _ = link.recvmsg(4, socket.CMSG_LEN(3 * files.itemsize))
    files.frombytes(ancillary[0][2])
    data = b""
    while len(data) < int.from_bytes(head, "big"):
        data += link.recv(65536)
    call = json.loads(data)
    pid = os.fork()
    if pid == 0:
        _become(call["words"], call["env"], call["folder"], files)
    for number in files:
        os.close(number)
    return pid


def _become(words: list[str], env: dict[str, str], folder: str, files: array.array[int]) -> None:
    """`python -m` with these words."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for number, target in zip(files, (0, 1, 2), strict=True):
            os.dup2(number, target)
        os.chdir(folder)
        sys.path[0] = folder
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["-m", *words[1:]]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Processes of tests without seconds of imports each: a process that has imported torch and Ray forks them.

What a test gives as `python` hands its words, environment, folder and open files over to the process of `serve`, which
forks, and ends as the fork ends. Programs that a fork starts as `sys.executable` come from there too.
"""

from __future__ import annotations

import array
import faulthandler
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

TORCH = ("embark.cli.train", "embark.run.loop", "embark.trainers.torch.trainer", "embark.events.sinks.terminal",
         "embark.torchrun.launcher", "torch.distributed.checkpoint", "torch.distributed.optim",
         "torch.distributed.run", "torch.utils.tensorboard", "embark.cli.app", "embark.data.synthetic",
         "embark.data.workers", "embark.report.report", "embark.serve.server", "embark.serve.worker_pool",
         "warm_caches", "warm_renders")
RAY_NEEDS = ("google.protobuf.json_format", "jsonschema", "pandas", "pyarrow.fs", "requests", "yaml")
RAY = ("ray.scripts.scripts", "ray.train.collective", "ray.train.v2.api.data_parallel_trainer",
       "ray._private.log_monitor", "ray.autoscaler._private.monitor", "ray.util.client.server.proxier",
       "ray._private.runtime_env.agent.main", "ray.dashboard.agent", "ray.dashboard.head",
       "ray.dashboard.modules.job.job_head")
FORKED = ("embark", "embark.torchrun", "torch.distributed.run", "ray.scripts.scripts", "ray.util.client.server")
"""Modules. Of scripts Ray's own are forked, and those that a test names; the rest, and thereby the drivers of RayJobs,
is a Python of its own."""
RAY_SETTINGS = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_enable_pipe_based_agent_to_parent_health_check": "true"}
"""What Ray's modules read as they are imported: a fork is not its client's parent's child, and Ray's agents look."""
FORK_SERVER = "from multiprocessing.forkserver "
IDLE_THREADS = ("jemalloc_bg", "cuda")
"""Of pyarrow's allocator, which survives a fork, and of the driver that fbgemm's CUDA build starts: unused on a CPU."""
FIRST_FREE_FILE = 512  # Above any that a program inherits.
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REQUEST_S = 60.0  # A client says what it wants as it starts; others wait meanwhile.
END_S = 180.0  # Longer than a request, and far below the limit at which pytest ends a worker without a word.
SOCKET, RAY_SOCKET, PYTHON = "warm.sock", "ray.sock", "warm_python"
RAY_WORKER = "_private/workers/default_worker.py"
"""Forked without Ray, whose library reads a worker's job from the environment as it is loaded, and never again."""
CLIENT = """#!{python} -SEB
import array, json, os, signal, socket, sys
words = sys.argv[1:]
rest = words[sum(word in ("-u", "-B") for word in words[:2]):]
if not (rest[0].startswith({scripts!r}) or rest[0] == "-m" and rest[1] in {forked!r}
        or rest[0] == "-c" and rest[1].startswith({fork_server!r})):
    os.execv({python!r}, [{python!r}, *words])
files = [number for number in map(int, os.listdir("/proc/self/fd")) if number < 3 or os.path.exists(
    "/proc/self/fd/%d" % number) and os.get_inheritable(number)]
link = socket.socket(socket.AF_UNIX)
is_ray = not rest[0].endswith({ray_worker!r}) and (rest[0][0] != "-" or "ray." in rest[1])
link.connect({ray_socket!r} if is_ray else {socket!r})
env = dict(os.environ, PYTHON_EXEC=sys.argv[0])
def receive():
    received = link.recv(4)
    if not received:
        os.write(2, b"the process that forks has ended\\n")
        os._exit(70)
    return received
data = json.dumps(dict(words=words, env=env, folder=os.getcwd(), files=files, python=sys.argv[0])).encode()
link.sendmsg([len(data).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
link.sendall(data)
pid = int.from_bytes(receive(), "big")
for number in files:
    os.close(number)
def hand_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # the fork has ended, and its code is on its way
for number in {handed_on}:
    signal.signal(number, hand_on)
code = int.from_bytes(receive(), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def warm_python(folder: Path, *scripts: str, modules: Sequence[str] = (), forked: Sequence[str] = FORKED
                ) -> Iterator[str]:
    """What to start as `python`. Its forks end with the block, and with this process.

    `modules` are imported before, by default torch's and Ray's; `forked` are those that `-m` runs in a fork."""
    client, ray = folder / PYTHON, None if modules else find_spec("ray")
    if ray and ray.origin:
        scripts += (f"{Path(ray.origin).parent}/",)
    client.write_text(CLIENT.format(
        python=sys.executable, socket=str(folder / SOCKET), ray_socket=str(folder / (RAY_SOCKET if ray else SOCKET)),
        forked=tuple(forked), handed_on=tuple(map(int, HANDED_ON)), scripts=scripts, ray_worker=RAY_WORKER,
        fork_server=FORK_SERVER))
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as ray_listener:
        for one, name in ((listener, SOCKET), (ray_listener, RAY_SOCKET)):
            one.bind(str(folder / name))
            one.listen()
        files = [listener.fileno(), ray_listener.fileno()]
        words = modules or (*TORCH, *(("", *RAY_NEEDS) if ray else ()))
        process = subprocess.Popen([sys.executable, __file__, "serve", *map(str, files), *words], pass_fds=files,
                                   stdin=subprocess.DEVNULL)
    try:
        yield str(client)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.send_signal(signal.SIGABRT)  # Python says where it stands as it ends.
            raise


def processes_with(name: str, value: str) -> list[int]:
    """Those that were started with this in their environment; a fork ends with its client, which is one of them."""
    return [one.pid for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(name) == value]


def account(python: str, cloud: str, folder: str) -> None:
    """The account's server, whose pods find this as `python`; its shells find `embark` there too."""
    from account_faults import let_faults_happen

    from cloudsim import server
    from embark.rehearse import processes

    def open_account(cloud: str, folder: Path) -> Any:
        opened = opened_by(cloud, folder)
        let_faults_happen(opened)
        return opened

    faulthandler.register(signal.SIGUSR1)  # what it waits for, in its log
    opened_by, server.open_account = server.open_account, open_account
    processes.sys = SimpleNamespace(executable=python)  # type: ignore[assignment]
    program = Path(folder, "programs", "embark")
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{python}" -m embark "$@"\n')
    program.chmod(0o755)
    server.main(cloud, folder)


def serve(listener_number: str, ray_listener_number: str, modules: Sequence[str]) -> None:
    """Import and fork; with an empty name among the modules, a second process does so that has imported Ray too."""
    faulthandler.enable()
    os.environ |= {"OMP_NUM_THREADS": "1", **RAY_SETTINGS}
    listener, ray_listener = (socket.socket(fileno=int(number)) for number in (listener_number, ray_listener_number))
    listener.set_inheritable(False)
    ray_listener.set_inheritable(False)
    parent = os.getppid()
    _import([name for name in modules if name])
    process = 0
    if "" in modules:
        starter = os.getpid()
        process = os.fork()
        if process == 0:
            listener.close()
            _import(RAY)
            _fork_on_request(ray_listener, starter)
            os._exit(0)
    ray_listener.close()
    _fork_on_request(listener, parent)
    if process:
        os.kill(process, signal.SIGTERM)
        with suppress(ChildProcessError):
            os.waitpid(process, 0)
    os._exit(0)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len([name for name in threads if not name.startswith(IDLE_THREADS)]) != 1:
        sys.stderr.write(f"a process with threads would fork broken ones: {threads}\n")
        os._exit(1)
    gc.collect()
    gc.freeze()  # else the first collection of each fork copies all of it


def _fork_on_request(listener: socket.socket, parent: int) -> None:
    """Until the parent is gone. A fork whose client is gone is killed."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    is_over: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: is_over.append(True))
    links: dict[int, socket.socket] = {}
    while os.getppid() == parent and not is_over:
        ready, _, _ = select.select([listener, woken, *links.values()], [], [], 1.0)
        if listener in ready:
            link, _ = listener.accept()
            own_files = [listener.fileno(), woken, wake, *(one.fileno() for one in links.values())]
            if pid := _fork(link, own_files):
                links[pid] = link
                with suppress(OSError):
                    link.sendall(pid.to_bytes(4, "big"))
            else:
                link.close()
        for pid in [pid for pid, link in links.items() if link in ready]:
            os.kill(pid, signal.SIGKILL)
            links.pop(pid).close()
        if woken in ready:
            os.read(woken, 4096)
        for pid, code in _ended():
            if link := links.pop(pid, None):
                with suppress(OSError):
                    link.sendall(code.to_bytes(4, "big", signed=True))
                link.close()
    for pid in links:
        os.kill(pid, signal.SIGKILL)


def _ended() -> Iterator[tuple[int, int]]:
    """Forks that are over, and their exit codes."""
    with suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            yield end[0], os.waitstatus_to_exitcode(end[1])


def _fork(link: socket.socket, own_files: Sequence[int]) -> int:
    """Return the process id of the fork; 0 if the client was killed, or stopped, before it had said what to run."""
    files = array.array("i")
    data, size, pid = b"", 1, 0
    link.settimeout(REQUEST_S)
    with suppress(OSError):
        head, ancillary, _, _ = link.recvmsg(4, socket.CMSG_LEN(250 * files.itemsize))
        for _, _, numbers in ancillary:
            files.frombytes(numbers)
        size = int.from_bytes(head, "big") or size
        while len(data) < size and (more := link.recv(65536)):
            data += more
    if len(data) == size:
        # What is handed on to the fork at once waits until the fork no longer has this process's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
        pid = os.fork()
        if pid == 0:
            _become(json.loads(data), files, [*own_files, link.fileno()])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    for number in files:
        os.close(number)
    if "ray" in sys.modules:
        for _ in range(1000):  # the next fork has other random numbers: two nodes would have the same id
            sys.modules["ray"].NodeID.from_random()
    return pid


def _become(call: dict[str, Any], files: array.array[int], own_files: Sequence[int]) -> None:
    """`python` with these words."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        _take_over(files, call["files"], own_files)
        os.chdir(call["folder"])
        os.environ.clear()
        os.environ.update(call["env"] | RAY_SETTINGS)
        tempfile.tempdir = None  # by TMPDIR, which may be another now
        sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                         if path and path not in sys.path]
        sys.executable = call["python"]
        multiprocessing.set_executable(sys.executable)
        words = call["words"]
        while words[0] in ("-u", "-B"):
            sys.stdout.reconfigure(write_through="-u" in words[:2])  # type: ignore[union-attr]
            words = words[1:]
        if words[0] == "-m":
            sys.path[0], sys.argv = call["folder"], words[:1] + words[2:]
            if not hasattr(sys.modules.get(words[1]), "__path__"):
                sys.modules.pop(words[1], None)  # runpy warns of a module that is there already
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.path[0], sys.argv = "", words[:1] + words[2:]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.path[0], sys.argv = str(Path(words[0]).parent), words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_over(files: Sequence[int], targets: Sequence[int], own_files: Sequence[int]) -> None:
    """Files under the numbers that the client had them under, instead of this process's own."""
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, FIRST_FREE_FILE) for number in files]
    for number in (*own_files, *files):
        os.close(number)
    for number, target in zip(moved, targets, strict=True):
        os.dup2(number, target)
        os.close(number)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        account(*sys.argv[1:])

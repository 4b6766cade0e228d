"""A client whose requests do not wait for each other's answers, for a server on the same cores.

One thread sends, one receives by epoll: two wake-ups a request, and no thread of a pool that waits for Python's lock.
"""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUM_CONNECTIONS = 16  # At first; more are opened when all wait for answers.
SEND_BUFFER = 1 << 20  # A request is copied as a whole, also while the server does not read.


@dataclass(slots=True)
class _Connection:
    """One, which has at most one request."""

    socket: socket.socket
    key: Any = None  # None: it waits for no answer.
    answer: bytes = b""
    is_closed: bool = False


class OpenLoop:
    """Sends requests, and calls `on_answer` with the key and the status of each; 0: the server closed it."""

    def __init__(self, port: int, on_answer: Callable[[Any, int], None]) -> None:
        self._port, self._on_answer, self._epoll = port, on_answer, select.epoll()
        self._all: dict[int, _Connection] = {}
        self._free = deque(self._open() for _ in range(NUM_CONNECTIONS))
        self._thread, self._is_closed = threading.Thread(target=self._receive, daemon=True), False
        self._thread.start()

    def send(self, message: bytes, key: Any) -> None:
        """A whole request; by one thread at a time."""
        connection = self._free.popleft() if self._free else self._open()
        while connection.is_closed:  # a server keeps an idle one for some seconds
            connection = self._free.popleft() if self._free else self._open()
        connection.key = key
        connection.socket.sendall(message)

    def close(self) -> None:
        """After all answers have come."""
        while any(one.key is not None for one in self._all.values()):
            time.sleep(0.01)
        self._is_closed = True
        self._thread.join()
        for connection in self._all.values():
            connection.socket.close()
        self._epoll.close()

    def _open(self) -> _Connection:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.connect(("127.0.0.1", self._port))
        self._all[one.fileno()] = found = _Connection(one)
        self._epoll.register(one.fileno(), select.EPOLLIN)
        return found

    def _receive(self) -> None:
        while not self._is_closed:
            for number, _ in self._epoll.poll(0.1):
                connection = self._all[number]
                try:
                    piece = connection.socket.recv(1 << 16)
                except ConnectionResetError:
                    piece = b""
                if not piece:
                    connection.is_closed = True
                    self._epoll.unregister(number)
                    if connection.key is not None:
                        self._on_answer(connection.key, 0)
                    connection.key = None
                    continue
                connection.answer += piece
                if (status := complete_status(connection.answer)) is not None:
                    key, connection.key, connection.answer = connection.key, None, b""
                    self._on_answer(key, status)
                    self._free.append(connection)


def complete_status(answer: bytes) -> int | None:
    """Of an answer over HTTP that has a length; None where it has not all arrived."""
    if (end := answer.find(b"\r\n\r\n")) < 0:
        return None
    length = int(answer[:end].lower().partition(b"content-length:")[2].partition(b"\r")[0])
    return int(answer[9:12]) if len(answer) >= end + 4 + length else None


def poisson_latencies(port: int, messages: Sequence[bytes], qps: float, seconds: float, seed: int = 2) -> list[float]:
    """Seconds from the moment each request is due to its answer, of requests that arrive at random at this rate."""
    found: list[float] = []

    def on_answer(due: float, status: int) -> None:
        found.append(time.perf_counter() - due)
        assert status == 200, status

    client, draw = OpenLoop(port, on_answer), random.Random(seed)
    due, number = time.perf_counter(), 0
    end = due + seconds
    while (due := due + draw.expovariate(qps)) < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        client.send(messages[number % len(messages)], due)
        number += 1
    client.close()
    return found


def sequential_latencies(port: int, messages: Sequence[bytes], num_requests: int, pause_s: float) -> list[float]:
    """Seconds of requests one after the other, with pauses between them."""
    found: list[float] = []
    answered = threading.Event()

    def on_answer(started: float, status: int) -> None:
        found.append(time.perf_counter() - started)
        assert status == 200, status
        answered.set()

    client = OpenLoop(port, on_answer)
    for number in range(num_requests):
        answered.clear()
        client.send(messages[number % len(messages)], time.perf_counter())
        answered.wait()
        time.sleep(pause_s)
    client.close()
    return found

"""One address in front of replicas, and clients that send requests to it.

A client sends a request once more, a second later, if its connection was closed or refused before an answer. Any other
end of a request but a 200 is a failure.
"""

import http.client
import selectors
import socket
import socketserver
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

LOOPBACK = "127.0.0.1"
NUM_CLIENTS = 4
REQUESTS_PER_CONNECTION = 10  # Then a client connects anew, to whichever replica is next.
RETRY_S = 1.0
ANSWER_S = 60.0
MAX_REASONS = 5


class Backend(Protocol):
    """A replica."""

    port: int

    @property
    def is_up(self) -> bool:
        """Whether requests are sent there."""


class Service:
    """Each connection goes to the next replica that is up, as kube-proxy does it."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        turns = count()

        def next_backend() -> Backend | None:
            up = [one for one in backends if one.is_up]
            return up[next(turns) % len(up)] if up else None

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                backend = next_backend()
                if backend is None:
                    return
                with suppress(OSError), socket.create_connection((LOOPBACK, backend.port), 5) as other:
                    other.settimeout(ANSWER_S)
                    _pump(self.request, other)

        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

        self._server = Listener((LOOPBACK, 0), Connection)
        self.port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Clients:
    """Threads that send the same request again and again until they are stopped."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._port, self._path, self._body = port, path, body
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_CLIENTS)]
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self.num_answered = self.num_retried = self.num_failed = 0
        self.reasons: list[str] = []  # Of failures.

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """After the requests that were sent are answered."""
        self._is_over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            connection = self._connection()
            for _ in range(REQUESTS_PER_CONNECTION):
                if self._is_over.is_set():
                    break
                connection = self._request(connection)
            connection.close()

    def _request(self, connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
        """The connection to go on with."""
        for is_second in (False, True):
            try:
                connection.request("POST", self._path, self._body)
                answer = connection.getresponse()
                answer.read()
            except TimeoutError:
                self._count(f"no answer within {ANSWER_S:g} s")
            except (OSError, http.client.HTTPException) as error:
                if not is_second:
                    with self._lock:
                        self.num_retried += 1
                    connection.close()
                    self._is_over.wait(RETRY_S)
                    connection = self._connection()
                    continue
                self._count(f"the connection was closed twice: {error!r}")
            else:
                self._count("" if answer.status == 200 else f"status {answer.status}")
                return connection
            connection.close()
            return self._connection()
        raise AssertionError("the second try ends it")

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(LOOPBACK, self._port, timeout=ANSWER_S)

    def _count(self, failure: str) -> None:
        with self._lock:
            self.num_answered += not failure
            self.num_failed += bool(failure)
            if failure and len(self.reasons) < MAX_REASONS:
                self.reasons.append(failure)


def _pump(one: socket.socket, other: socket.socket) -> None:
    """Bytes both ways until either end closes."""
    with selectors.DefaultSelector() as selector:
        for ends in ((one, other), (other, one)):
            selector.register(ends[0], selectors.EVENT_READ, ends)
        while True:
            for key, _ in selector.select():
                here, there = key.data
                if not (data := here.recv(1 << 16)):
                    return
                there.sendall(data)

"""Clients of several replicas: which ends of requests count as failures."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from limits import HANG_S

from embark.rehearse import server
from embark.rehearse.server import Clients


class Backend:
    """A replica that answers with a status, and may hang up instead."""

    def __init__(self, status: int = 200) -> None:
        backend = self
        self.is_up, self.num_answered, self.must_hang_up, self.is_lost_at_next = True, 0, False, False

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if backend.is_lost_at_next:
                    backend.is_up, backend.must_hang_up = False, True
                if backend.must_hang_up:
                    self.close_connection = True
                    return
                backend.num_answered += 1
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(server, "RETRY_S", 0.01)


def until(is_so) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def run(backends, use) -> Clients:
    clients = Clients(backends, "/score", b"{}")
    clients.start()
    try:
        use(clients)
    finally:
        clients.stop()
        for backend in backends:
            backend.server.shutdown()
            backend.server.server_close()
    return clients


def test_requests_of_a_replica_that_is_lost_are_sent_again_to_the_other():
    lost, other = Backend(), Backend()

    def use(clients):
        until(lambda: min(lost.num_answered, other.num_answered) >= 20)
        lost.is_lost_at_next = True  # with a request in hand: without one nobody would send again
        until(lambda: clients.num_retried)
        num = other.num_answered
        until(lambda: other.num_answered >= num + 20)

    clients = run([lost, other], use)
    assert clients.num_failed == 0
    assert clients.num_retried >= 1
    assert clients.num_answered >= 60


@pytest.mark.parametrize(("backends", "says"), [
    (lambda: [Backend(503)], "status 503"), (list, "the connection was closed twice"),
])
def test_another_status_and_a_second_closed_connection_are_failures(backends, says):
    clients = run(backends(), lambda clients: until(lambda: clients.num_failed))
    assert clients.num_answered == 0
    assert clients.reason.startswith(says)

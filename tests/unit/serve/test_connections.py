"""Connections that the server keeps, and those that it closes."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing, suppress
from http.client import HTTPConnection

from limits import HANG_S
from served_models import ROWS, BlockedScorer, while_serving

from embark.serve import http_server


def test_idle_connections_and_those_beyond_the_limit_are_closed(artifact, monkeypatch):
    monkeypatch.setattr(http_server, "_CHECK_S", 0.05)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)

    def use(client):
        opened = [socket.create_connection(client.address.split(":"), timeout=HANG_S) for _ in range(40)]
        for number, one in enumerate(opened):
            with suppress(OSError):  # Closed already, as those beyond the limit are.
                one.sendall(b"POST /score HTTP/1.1\r\nX-Slow: 1" if number % 2 else b"")
        found = []
        for one in opened:
            with one, suppress(ConnectionResetError):
                found.append(one.recv(1))
        return found, client("POST", "/score", {"rows": ROWS[:1]})[0]

    found, status = while_serving(artifact, use)
    assert set(found) <= {b""}
    assert status == 200


def test_a_connection_is_kept_between_requests_but_not_within_headers(artifact, monkeypatch):
    monkeypatch.setattr(http_server, "_CHECK_S", 0.02)
    checked, check = threading.Semaphore(0), http_server.BoundedProtocol._check

    def counted(*words):
        checked.release()
        check(*words)

    monkeypatch.setattr(http_server.BoundedProtocol, "_check", counted)

    def use(client):
        with closing(HTTPConnection(client.address, timeout=HANG_S)) as kept:
            kept.connect()
            sent = kept.sock
            for _ in range(2):
                kept.request("GET", "/v2/health/live")
                assert kept.getresponse().read()
                for _ in range(8):
                    assert checked.acquire(timeout=HANG_S)
            assert kept.sock is sent  # it would have been opened again
            sent.sendall(b"GET /v2/health/live HTTP/1.1\r\nX-Slow: 1")
            with suppress(ConnectionResetError):
                return sent.recv(1)
        return b""

    assert while_serving(artifact, use) == b""


def test_a_client_that_does_not_read_is_closed(artifact, monkeypatch):
    monkeypatch.setattr(http_server, "_CHECK_S", 0.05)
    scorer = BlockedScorer(artifact)

    def use(client):
        body = json.dumps({"rows": ROWS[:1]}).encode()
        with (socket.create_connection(client.address.split(":"), timeout=HANG_S) as sent,
              suppress(ConnectionResetError)):
            sent.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert sent.recv(1) == b""  # Its request takes for ever.
        scorer.release.set()
        return client("POST", "/score", {"rows": ROWS[:1]})[0]

    assert while_serving(artifact, use, scorer=scorer) == 200

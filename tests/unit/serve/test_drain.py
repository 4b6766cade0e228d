"""A server that is told to end answers every request that reached its machine before."""

from __future__ import annotations

import json
import signal
import socket
import struct

import pytest
from limits import HANG_S
from served_models import ROWS, is_closed, served_by_process

BODY = json.dumps({"rows": ROWS[:3]}).encode()
REQUEST = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
NUM_CLIENTS = 64


def connect(client) -> socket.socket:
    host, _, port = client.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=HANG_S)


def answer(client: socket.socket) -> bytes:
    """Everything until the server closes the connection; the error's name where it is reset."""
    with client, client.makefile("rb") as file:
        try:
            return file.read()
        except ConnectionResetError:
            return b"reset"


def is_answered(found: bytes) -> bool:
    head, _, body = found.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200") and len(json.loads(body)["scores"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_answers_what_64_clients_have_just_sent(artifact, workers, warm_python):
    for _ in range(3):
        with served_by_process(artifact.uri, "--workers", str(workers), python=warm_python) as (process, client):
            opened = [connect(client) for _ in range(NUM_CLIENTS)]
            for one in opened:
                one.sendall(REQUEST)
            process.send_signal(signal.SIGTERM)
            found = [answer(one) for one in opened]
            assert process.wait(HANG_S) == 0
        assert [one for one in found if not is_answered(one)] == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_waits_for_a_slow_client_and_closes_idle_ones_cleanly(artifact, workers, warm_python):
    with served_by_process(artifact.uri, "--workers", str(workers), python=warm_python) as (process, client):
        silent, kept, slow, again = (connect(client) for _ in range(4))
        for one in (kept, again):
            one.sendall(REQUEST)
            found = b""
            while not found.endswith(b"}"):
                found += one.recv(1 << 16)
            assert is_answered(found)
        slow.sendall(REQUEST[:20])
        again.sendall(REQUEST)
        process.send_signal(signal.SIGTERM)
        while not is_closed(client):
            pass
        process.send_signal(signal.SIGTERM)
        assert (answer(silent), answer(kept)) == (b"", b"")
        for byte in REQUEST[20:]:
            slow.sendall(bytes([byte]))
        found = [answer(slow), answer(again)]
        assert process.wait(HANG_S) == 0
    assert all(map(is_answered, found)), found
    assert b"\r\nconnection: close\r\n" in found[0]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header of HTTP/2 that no table holds; a name of one byte is its number in the static table."""
    return (name if len(name) == 1 else bytes([0, len(name)]) + name) + bytes([len(value)]) + value


IS_LIVE = b"".join([
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(4, 0, 0), frame(1, 4, 1, b"".join([
        b"\x83\x86", literal(b"\x04", b"/inference.GRPCInferenceService/ServerLive"), literal(b"\x01", b"x"),
        literal(b"content-type", b"application/grpc"), literal(b"te", b"trailers")])), frame(0, 1, 1, bytes(5))])
LIVE = b"\0\0\0\0\2\x08\1"  # The message {live: true}.


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_answers_calls_of_grpc_that_were_just_sent(artifact, workers, warm_python):
    words = ("--workers", str(workers), "--grpc-port", "0")
    with served_by_process(artifact.uri, *words, python=warm_python) as (process, client):
        host, _, port = client.grpc.rpartition(":")
        opened = [socket.create_connection((host, int(port)), timeout=HANG_S) for _ in range(NUM_CLIENTS)]
        for one in opened:
            one.sendall(IS_LIVE)
        process.send_signal(signal.SIGTERM)
        found = []
        for one in opened:
            with one:
                answer = b""
                while LIVE not in answer:
                    try:
                        piece = one.recv(1 << 16)
                    except ConnectionResetError:
                        piece = b""
                    if not piece:
                        break
                    answer += piece
                found.append(LIVE in answer)
        assert process.wait(HANG_S) == 0
    assert found == [True] * NUM_CLIENTS

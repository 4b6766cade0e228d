"""A proxy before an emulator that fails in the ways networks and stores do, on demand."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from limits import HANG_S

EXPIRED = (
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>"
    b"<Token-0>%s</Token-0></Error>"
)
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
DROPPED = b"<Error><Code>NoSuchUpload</Code><Message>The upload does not exist.</Message></Error>"
FOR_ONE_HOP = ("connection", "transfer-encoding", "content-length", "date", "server")


@dataclass
class Proxy:
    port: int
    fault: Callable[[str, str], str] = lambda method, path: ""
    """By a request's method and path: 503, 429, hang, reset, lost, dropped, expired, denied, cut, short;
    empty for none."""
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def fail(self, fault: str, times: int, method: str = "") -> None:
        """Answer the next `times` requests (of `method`) with `fault`."""
        lock, left = threading.Lock(), times

        def choose(requests: str, path: str) -> str:
            nonlocal left
            with lock:
                if left <= 0 or (method and requests != method):
                    return ""
                left -= 1
                return fault

        self.fault = choose


@contextlib.contextmanager
def proxy_to(target_port: int) -> Iterator[Proxy]:
    proxy = Proxy(0)
    server = _Server(("127.0.0.1", 0), _handler(proxy, target_port))
    server.daemon_threads = True
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has given up is what these tests are about; anything else is told."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler(proxy: Proxy, target_port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            proxy.seen.append((self.command, self.path, dict(self.headers)))
            fault = proxy.fault(self.command, self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if fault == "hang":
                proxy.closing.wait(HANG_S)
                self.close_connection = True
            elif fault == "reset":
                self.reset()
            elif fault in ("503", "429"):
                self.answer(int(fault), b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>")
            elif fault == "expired":
                token = self.headers.get("x-amz-security-token", "")
                self.answer(400, EXPIRED % token.encode())
            elif fault == "denied":
                self.answer(403, DENIED)
            elif fault == "dropped":
                self.answer(404, DROPPED)
            else:
                self.forward(body, fault)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

        def reset(self) -> None:
            # Closing with nothing to linger for sends RST, where an ordinary close would send FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def forward(self, body: bytes, fault: str) -> None:
            behind = http.client.HTTPConnection("127.0.0.1", target_port, timeout=HANG_S)
            behind.request(self.command, self.path, body, dict(self.headers))
            answer = behind.getresponse()
            data = answer.read()
            headers = {k: v for k, v in answer.getheaders() if k.lower() not in FOR_ONE_HOP}
            length = int(answer.headers.get("Content-Length") or 0) if self.command == "HEAD" else len(data)
            behind.close()
            if fault == "lost":
                # It was done, and nobody hears of it.
                self.reset()
            elif fault == "cut":
                self.answer(answer.status, data[: len(data) // 2], headers, len(data))
                self.close_connection = True
            elif fault == "short":
                # As a proxy does that answers from half a file: consistent, so that only the size asked for tells.
                data = data[: len(data) // 2]
                first, _, total = headers.get("content-range", "bytes 0-0/0")[6:].partition("-")
                headers["content-range"] = f"bytes {first}-{int(first) + len(data) - 1}/{total.partition('/')[2]}"
                self.answer(answer.status, data, headers)
            else:
                self.answer(answer.status, data, headers, length)

        def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None, length: int = -1) -> None:
            self.send_response_only(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if length < 0 else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler

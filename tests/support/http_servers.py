"""HTTP servers on loopback, for tests: one way to start, to answer and to end."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpHandler(BaseHTTPRequestHandler):
    """One connection. Subclasses have `do_GET` and so on, and find their server's owner in `owner`."""

    owner: Any
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    """Headers and body in one piece: apart, each answer waits 40 ms for the other side's acknowledgement."""
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, code: int, data: bytes | str, kind: str = "", headers: Mapping[str, str] | None = None) -> None:
        raw = data.encode() if isinstance(data, str) else data
        self.send_response(code)
        for name, value in {**({"Content-Type": kind} if kind else {}), **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def answer_json(self, code: int, values: Any) -> None:
        self.answer(code, json.dumps(values), "application/json")


class HttpServer:
    """Keeps its port while it is down."""

    def __init__(self, handler: type[HttpHandler], owner: Any = None) -> None:
        self.port = 0
        self._handler = type("Handler", (handler,), {"owner": owner if owner is not None else self})
        self._server: _Server | None = None
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self._handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has given up is what some tests are about; anything else is told."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serve(handler: type[HttpHandler], owner: Any = None) -> Iterator[HttpServer]:
    server = HttpServer(handler, owner)
    try:
        yield server
    finally:
        server.down()

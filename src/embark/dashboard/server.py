"""The page's server: it only reads, for browsers of this machine or anyone with the token."""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from embark.errors import UserError
from embark.events.events import to_jsonable
from embark.events.sinks.prometheus import CONTENT_TYPE
from embark.formatting import to_finite
from embark.report.context import diagnose_run
from embark.values import JsonDict, frozen
from .api import detail, log_lines, metrics_text, summary
from .curves import MAX_POINTS, Window, charts_text, curves_text
from .runs import Runs, WatchedRun
from .traffic import replicas_of, traffic_of

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store"
}
"""Headers of every response."""
LEAST_TOKEN = 16
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_IDS = 64
DIAGNOSE_S = 15.0  # A run is diagnosed no more often than that.
IDLE_S = 60.0
EVERYWHERE = ("0.0.0.0", "::", "[::]")

_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

Query = dict[str, list[str]]


def is_local(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(host: str, token: str) -> str:
    """Return the token that a page at `host` needs: beyond this machine one is generated where none is given."""
    if not is_local(host):
        token = token or secrets.token_urlsafe(24)
    if token and not (token.isascii() and token.replace("-", "").replace("_", "").isalnum()):
        raise UserError("--token may have only letters, digits, - and _", "leave it out: one is generated")
    if token and not is_local(host) and len(token) < LEAST_TOKEN:
        raise UserError(f"--token is too short: others can reach {host}",
                        f"at least {LEAST_TOKEN} characters, or leave it out: one is generated")
    return token


@frozen
class Guard:
    """Admits requests.

    Without a token, only names of this machine are answered, so that a page elsewhere cannot point its own name here
    (DNS rebinding).
    """

    token: str = ""
    cookie: str = "embark_watch"

    def matches(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode())

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        if not self.token:
            return True
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.matches(given.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("Cookie", ""))
        except CookieError:
            return False
        return self.cookie in cookies and self.matches(cookies[self.cookie].value)

    def is_own_name(self, host: str) -> bool:
        """Return whether the browser asked for one of our names; with a token that does not matter."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") and host.count(":") != 0 else host
        return bool(self.token) or name.strip("[]").lower() in LOCAL_NAMES


@frozen
class PageServer:
    """The address of a running server."""

    url: str  # The address to open; with its token, where it has one.
    port: int


@contextmanager
def serve_page(
    runs: Runs, *, host: str = "127.0.0.1", ports: Sequence[int] = (0,), token: str = ""
) -> Iterator[PageServer]:
    """Serve until the block ends, at the first of the ports that is free; 0 is any."""
    server = _first_free(host, ports, runs, token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    shown = socket.gethostname() if host in EVERYWHERE else f"[{host.strip('[]')}]" if ":" in host else host
    port = int(server.server_address[1])
    try:
        yield PageServer(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""), port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _first_free(host: str, ports: Sequence[int], runs: Runs, token: str) -> _Server:
    for port in ports:
        try:
            return _Server(host, port, runs, token)
        except (OSError, OverflowError) as error:
            problem = getattr(error, "strerror", None) or str(error)
    raise UserError(f"{host} port {ports[-1]} cannot be served: {problem}", "--port 0 takes any free port")


@cache
def static_files() -> dict[str, tuple[str, bytes]]:
    """Return the page's own files by the path of a request, with their types: no request names a path of the disk."""
    folder = files("embark.dashboard").joinpath("static")
    found = {f"/static/{file.name}": (_TYPES[Path(file.name).suffix], file.read_bytes())
             for file in sorted(folder.iterdir(), key=lambda file: file.name) if Path(file.name).suffix in _TYPES}
    return {**found, "/": found["/static/index.html"]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, runs: Runs, token: str) -> None:
        self.runs = runs
        self.diagnoses = _Diagnoses()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host.strip("[]"), port), _Handler)
        # a cookie is the whole host's, whatever the port: two pages must not share one
        self.guard = Guard(token, f"embark_watch_{self.server_address[1]}")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects."""


class _Diagnoses:
    """The diagnosis of each run, made now and then, by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[int, float, list[Any], str]] = {}

    def of(self, run: WatchedRun) -> JsonDict:
        with self._lock:
            version, when_s, found, problem = self._found.get(run.id, (-1, -math.inf, [], ""))
            if version != run.version and time.monotonic() - when_s > DIAGNOSE_S:
                version, problem = run.version, ""
                try:
                    found = [{"name": one.name, "kind": one.kind, "cause": one.cause, "fix": one.fix,
                              "command": one.command, "evidence": one.evidence.text,
                              "file": Path(one.evidence.source).name, "line": one.evidence.line}
                             for one in diagnose_run(run.files)]
                except Exception as error:  # the page stays up without it, and says why
                    found, problem = [], str(error).partition("\n")[0]
                self._found[run.id] = (version, time.monotonic(), found, problem)
            return {"found": found, "error": problem}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "embark"
    sys_version = ""
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        guard = self.server.guard
        if not guard.is_own_name(self.headers.get("Host", "")):
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "Unknown host name: open localhost.")
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=32)
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST, "Not found.")
        given = query.get("token", [""])[0]
        if guard.token and given and guard.matches(given):
            # the token leaves the address, so that it is in no history and on no screenshot
            cookie = f"{guard.cookie}={guard.token}; Path=/; HttpOnly; SameSite=Lax"
            return self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", {"Location": "/", "Set-Cookie": cookie})
        if not guard.is_authorized(dict(self.headers)):
            return self._refuse(HTTPStatus.UNAUTHORIZED,
                                "This page needs its token: open the address that embark watch printed.",
                                {"WWW-Authenticate": "Bearer"})
        static = static_files().get(parts.path)
        if static is not None:
            return self._send(HTTPStatus.OK, *static)
        if parts.path == "/metrics":
            return self._send(HTTPStatus.OK, CONTENT_TYPE, metrics_text(self.server.runs).encode())
        answer = self._answer(parts.path.split("/")[1:], query)
        if answer is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "Not found.")
        return self._send(HTTPStatus.OK, "application/json", answer.encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, path: list[str], query: Query) -> str | None:
        runs, now_s = self.server.runs, time.time()
        match path:
            case ["api", "runs"]:
                shown = [summary(run, now_s) for run in runs.all()]
                return _json({"now_s": now_s, "error": runs.error, "runs": shown})
            case ["api", "curves"]:
                wanted = query.get("ids", [""])[0].split(",")[:MAX_IDS]
                found = [run for run in map(runs.get, wanted) if run is not None]
                texts = [f'"{run.id}":{curves_text(run, _window(query))}' for run in found]
                return "{" + ",".join(texts) + "}"
            case ["api", "runs", run_id, *rest]:
                run = runs.get(run_id)
                return None if run is None else self._answer_of(run, rest, query, now_s)
        return None

    def _answer_of(self, run: WatchedRun, rest: list[str], query: Query, now_s: float) -> str | None:
        match rest:
            case []:
                return _json(detail(run, now_s))
            case ["charts"]:
                return charts_text(run, _window(query))
            case ["traffic"]:
                return _json(traffic_of(replicas_of(self.server.runs.all(), run)))
            case ["diagnosis"]:
                return _json(self.server.diagnoses.of(run))
            case ["logs"]:
                file = int(to_finite(_number(query, "file")) or 0)
                return _json(log_lines(run, file=file, words=query.get("words", [""])[0][:200]))
        return None

    def _refuse(self, status: HTTPStatus, words: str, more: dict[str, str] | None = None) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{words}\n".encode(), more)

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what the base class refuses, such as other methods, with our headers and without its text."""
        self.close_connection = True
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._refuse(status, status.phrase, {"Allow": "GET, HEAD", "Connection": "close"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _window(query: Query) -> Window:
    low, high = (_number(query, name) for name in ("from", "to"))
    num = to_finite(_number(query, "points"))
    return Window(
        "time" if query.get("by") == ["time"] else "step", -math.inf if low is None else low,
        math.inf if high is None else high, int(min(MAX_POINTS, max(10, 1000 if num is None else num)))
    )


def _number(query: Query, name: str) -> float | None:
    try:
        return to_finite(float(query[name][0]))
    except (KeyError, ValueError):
        return None


def _json(value: Any) -> str:
    return json.dumps(to_jsonable(value), allow_nan=False, separators=(",", ":"))

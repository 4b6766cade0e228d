"""The metadata services of three clouds as real servers on loopback, and servers that are broken."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

from http_servers import HttpHandler, HttpServer
from limits import HANG_S

Answer = tuple[int, dict[str, str], str]


class Service:
    """A metadata service: subclasses say how one answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        service = self

        class Handler(HttpHandler):
            def handle_any(self) -> None:
                service.asked.append(f"{self.command} {self.path}")
                status, headers, body = service.answer(self.command, self.path, dict(self.headers))
                self.answer(status, body, headers=headers)

            do_GET = do_PUT = do_POST = do_CONNECT = handle_any  # noqa: N815

        self._server = HttpServer(Handler)
        self.address = f"127.0.0.1:{self._server.port}"

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        return 404, {}, ""

    def close(self) -> None:
        self._server.down()


class Aws(Service):
    """IMDSv2: a token by PUT with a TTL, 401 without one, 404 while there is nothing to say."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.action = self.rebalance = ""
        self.num_faults = 0
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        given = {name.lower(): value for name, value in headers.items()}
        if path == "/latest/api/token":
            if method != "PUT" or not 1 <= int(given.get("x-aws-ec2-metadata-token-ttl-seconds", 0)) <= 21600:
                return 400, {}, ""
            self.tokens = [f"token-{len(self.asked)}"]
            return 200, {}, self.tokens[-1]
        if given.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, {}, ""
        if self.num_faults:
            self.num_faults -= 1
            return 500, {}, ""
        events = {"/latest/meta-data/spot/instance-action": self.action,
                "/latest/meta-data/events/recommendations/rebalance": self.rebalance}.get(path)
        return (200, {}, events) if events else (404, {}, "<html>404 - Not Found</html>")


class Azure(Service):
    """Scheduled Events, which go to every machine of the scale set."""

    def __init__(self) -> None:
        self.name: str | None = "Pool_7"
        self.events: list[dict[str, object]] = []
        self.first_answer_s = 0.0
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        query = parse_qs(urlsplit(path).query)
        if headers.get("Metadata") != "true" or "api-version" not in query:
            return 400, {}, ""
        if path.startswith("/metadata/instance/compute/name?") and query.get("format") == ["text"] and self.name:
            return 200, {}, self.name
        if urlsplit(path).path != "/metadata/scheduledevents" or query["api-version"] != ["2020-07-01"]:
            return 404, {}, ""
        delay_s, self.first_answer_s = self.first_answer_s, 0.0
        time.sleep(delay_s)
        return 200, {}, json.dumps({"DocumentIncarnation": 1, "Events": self.events})


class Gce(Service):
    """Holds a question with wait_for_change until the value is another than that of last_etag."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.flavor = "Google"
        super().__init__()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, {}, ""
        url = urlsplit(path)
        key, query = url.path.removeprefix("/computeMetadata/v1/instance/"), parse_qs(url.query)
        with self.changed:
            if key not in self.values:
                return 404, {}, ""
            if query.get("wait_for_change") == ["true"]:
                old = query["last_etag"][0]
                self.changed.wait_for(lambda: self._etag(key) != old, timeout=int(query["timeout_sec"][0]))
            return 200, {"Metadata-Flavor": self.flavor, "ETag": self._etag(key)}, self.values[key] + "\n"

    def _etag(self, key: str) -> str:
        return self.values[key].encode().hex()


@contextmanager
def broken(how: str) -> Iterator[str]:
    """A server that takes connections and never answers, or resets them."""
    listener = socket.create_server(("127.0.0.1", 0))
    rows: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            else:
                rows.append(connection)

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    acceptor.join(HANG_S)
    for each in (listener, *rows):
        each.close()

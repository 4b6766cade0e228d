"""A server in this process, and clients of it."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from exported_runs import COLUMNS, draw_rows
from limits import HANG_S

from embark.serve.request_rows import RequestScorer
from embark.serve.served_model import ServedModel
from embark.serve.server import Endpoint, Listening, serve, serve_scorer
from embark.trainers.torch.scoring.cpu_model import ExportedModel

ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in draw_rows(40, 5, new_words=["unseen"])]


class Client:
    """Sends requests from a thread beside the server, which runs in the main one, as signals need it to."""

    def __init__(self, listening: Listening) -> None:
        self.url, self.grpc, self.address = listening.url, listening.grpc, listening.url.removeprefix("http://")

    def __call__(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None):
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection(self.address, timeout=HANG_S)) as connection:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            data, kind = response.read(), response.headers.get("content-type", "")
        found = json.loads(data) if kind == "application/json" else data.decode() if kind.startswith("text") else data
        return response.status, found, response.headers


def while_serving(artifact, use, *, scorer=None, limits=None, endpoint=None, workers=1):
    """What `use` returns, called with a client of a server of one version."""
    if workers > 1:
        return use_server(lambda on_start: serve(artifact.uri, endpoint=endpoint or Endpoint(port=0), limits=limits,
                                                 on_start=on_start, workers=workers), use)
    model = ServedModel(scorer or RequestScorer(artifact, ExportedModel(artifact).score))
    return use_server(lambda on_start: serve_scorer(model, endpoint or Endpoint(port=0), limits, on_start), use)


def use_server(serve, use):
    """What `use` returns, called with a client; SIGTERM ends what `serve` serves, which then must return."""
    found: list[object] = []

    def run(listening) -> None:
        def work() -> None:
            try:
                found.append(use(Client(listening)))
            except BaseException as error:
                found.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=work, daemon=True).start()

    serve(run)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class BlockedScorer(RequestScorer):
    """Answers when it may."""

    def __init__(self, artifact) -> None:
        super().__init__(artifact, ExportedModel(artifact).score)
        self.entered, self.release = threading.Event(), threading.Event()

    def score(self, requests):
        self.entered.set()
        assert self.release.wait(HANG_S)
        return super().score(requests)


def is_closed(client) -> bool:
    """Whether its server accepts no connections any more."""
    try:
        socket.create_connection(client.address.split(":"), timeout=HANG_S).close()
    except OSError:
        return True
    return False


@contextmanager
def served_by_process(*words: str, python: str = sys.executable) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """`embark serve` as a process of its own, and a client; it is killed if it has not ended."""
    process = subprocess.Popen([python, "-m", "embark", "serve", *words, "--port", "0", "--json"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout
        lines = list(itertools.takewhile(lambda line: line != b"}\n", process.stdout))
        assert lines, process.stderr and process.stderr.read().decode()
        about = json.loads(b"".join(lines) + b"}")
        yield process, Client(Listening(**{key: about[key] for key in Listening.__dataclass_fields__}))
    finally:
        process.kill()
        process.communicate()

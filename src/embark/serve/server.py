"""`embark serve`: the server's process, from opening the artifact to the last answer after SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from embark.errors import MissingPackage, UserError
from embark.export.artifact import Artifact, open_artifact

try:
    import uvicorn

    from embark.serve.app import ModelServer, ServeLimits
except ModuleNotFoundError as error:
    raise MissingPackage(f"embark serve needs {error.name}, which is not installed",
                         fix="pip install 'embark-rec[serve]'") from None
from embark.serve.batcher import BatchLimits
from embark.serve.request_rows import RequestScorer

TOKEN = "EMBARK_SERVE_TOKEN"
_MAX_CONNECTIONS = 2_048
_DRAIN_S = 30


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that accepts requests."""

    url: str
    model: str
    version: int
    needs_token: bool


def serve(
    place: str, *, version: int | None = None, model_file: str = "", host: str = "127.0.0.1", port: int = 8000,
    limits: ServeLimits | None = None, on_start: Callable[[Listening], None] = lambda _: None,
) -> None:
    """Serve an exported model until SIGTERM or Ctrl-C; then every accepted request is answered first. With the
    environment variable `EMBARK_SERVE_TOKEN`, requests need this bearer token."""
    from embark.trainers.torch.exported_model import ExportedModel

    artifact = open_artifact(place, version)
    scorer = RequestScorer(artifact, ExportedModel(artifact, model_file).score)
    scorer.score([[dict.fromkeys(scorer.columns)]])  # what libraries load on first use is loaded before it is ready
    serve_scorer(artifact, scorer, (host, port), limits, on_start)


def serve_limits(*, max_wait_ms: float, max_queued_rows: int) -> ServeLimits:
    """With these; the others as they are."""
    if not 0 <= max_wait_ms <= 10_000 or max_queued_rows < 1:
        raise UserError(f"--max-wait-ms {max_wait_ms:g}, --max-queued-rows {max_queued_rows}: out of range",
                        fix="0 to 10,000 ms, and at least one row")
    return ServeLimits(batch=BatchLimits(max_wait_ms=max_wait_ms, max_queued_rows=max_queued_rows))


def serve_scorer(
    artifact: Artifact, scorer: RequestScorer, address: tuple[str, int], limits: ServeLimits | None = None,
    on_start: Callable[[Listening], None] = lambda _: None,
) -> None:
    """The same with any scorer."""
    token = _token()
    model = ModelServer(artifact, scorer, limits or ServeLimits(), token)
    listener = _listener(*address)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(uvicorn.Config(
        model.app(), lifespan="on", access_log=False, log_level="warning", limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_DRAIN_S, server_header=False))
    server.on_start = lambda: on_start(Listening(url, model.name, artifact.version, bool(token)))
    with listener:
        asyncio.run(server.serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """Ends with the process's own exit code: uvicorn would raise the signal again."""

    on_start: Callable[[], None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()


def _token() -> str:
    """Of the environment; empty where it is not set."""
    token = os.environ.get(TOKEN)
    if token is not None and (not token or token != token.strip()):
        raise UserError(f"{TOKEN}: is set, but " + ("has whitespace around it" if token.strip() else "empty"),
                        fix="set it to the token alone, or unset it to serve without one")
    return token or ""


def _listener(host: str, port: int) -> socket.socket:
    if not host.strip():  # Which would be all addresses.
        raise UserError("--host: is empty", fix="127.0.0.1 for this machine alone, 0.0.0.0 for all addresses")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                    backlog=_MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}:{port}: cannot listen there: {getattr(error, 'strerror', None) or error}",
                        fix="choose another --port or --host") from None

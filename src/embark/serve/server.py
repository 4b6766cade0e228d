"""`embark serve`: the server's process, from opening the artifact to the last answer after SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from embark.errors import DataError, MissingPackage, UserError
from embark.export.artifact import current_version, open_artifact, open_versions
from embark.export.scoring_device import ScoringDevice

try:
    import uvicorn

    from embark.serve.app import ModelServer, ServeLimits
    from embark.serve.connections import BoundedProtocol
except ModuleNotFoundError as error:
    raise MissingPackage(f"embark serve needs {error.name}, which is not installed",
                         fix="pip install 'embark-rec[serve]'") from None
from embark.serve.batcher import BatchLimits
from embark.serve.deadlines import DRAIN_S
from embark.serve.request_rows import RequestScorer
from embark.serve.retrieve import open_retriever
from embark.serve.served_model import ServedModel, VersionChange
from embark.serve.version_follower import VersionFollower

if TYPE_CHECKING:
    from embark.serve.grpc_server import GrpcServer

TOKEN = "EMBARK_SERVE_TOKEN"
_MAX_CONNECTIONS = 2_048
_NUM_THREADS = 2  # That score: one computes while the other reads its requests.
_SWITCH_S = 0.0005  # After which a thread that runs Python lets others: those that score, and the one that answers.
_log = logging.getLogger("embark.serve")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: no gRPC.
    tls_cert: str = ""  # A PEM file with the certificate and those between it and the root; empty: no TLS.
    tls_key: str = ""  # A PEM file with its private key; empty: it is in `tls_cert`.

    @property
    def certificate(self) -> tuple[Path, Path] | None:
        """The two files, which fit each other."""
        if not self.tls_cert:
            if self.tls_key:
                raise UserError("--tls-key: has no --tls-cert", fix="name the certificate too")
            return None
        chain, key = Path(self.tls_cert), Path(self.tls_key or self.tls_cert)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
        except (OSError, ValueError) as error:
            raise UserError(f"--tls-cert {chain}, --tls-key {key}: cannot be used: "
                            f"{getattr(error, 'strerror', None) or error}",
                            fix="name PEM files: a certificate and its private key without a password") from None
        return chain, key


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that accepts requests."""

    url: str
    grpc: str | None  # Host and port, where it has gRPC.
    model: str
    version: int
    needs_token: bool
    device: str  # Where and how the model runs, for people to read.


def log_change(change: VersionChange) -> None:
    """What becomes of another current version, as a line of the log."""
    if change.refused:
        _log.warning("version %s is refused, still serving %d: %s", change.version, change.previous, change.refused)
    else:
        _log.info("now serving version %d (was %d)", change.version, change.previous)


def serve(
    place: str, *, version: int | None = None, model_file: str = "", name: str = "", poll_s: float = 10.0,
    device: ScoringDevice | None = None, endpoint: Endpoint | None = None, limits: ServeLimits | None = None,
    on_start: Callable[[Listening], None] = lambda _: None, on_change: Callable[[VersionChange], None] = log_change,
    record: str = "",
) -> None:
    """Serve an exported model until SIGTERM or Ctrl-C; then every accepted request is answered first. Every `poll_s`
    seconds it looks for another current version, and switches to it; 0, or a `version`: never. Without a `device` it
    runs on the GPU where there is one. `record`: a folder for the traffic, as events in a folder of this server, which
    `embark watch` shows. With the environment variable `EMBARK_SERVE_TOKEN`, requests need this bearer token."""
    if not 0 <= poll_s <= threading.TIMEOUT_MAX:
        raise UserError(f"--poll-s {poll_s:g}: out of range", fix="seconds, such as 10; 0: never")
    if "://" in record:
        raise UserError(f"--record {record}: is no folder of this machine", fix="name a folder, or a mounted volume")
    limits = limits or ServeLimits(num_threads=_NUM_THREADS)
    num_sharing = _share_cores(limits.num_threads)
    from embark.trainers.torch.exported_model import shared_cores

    def load(number: int | None, onto: RequestScorer | None = None) -> RequestScorer:
        return load_scorer(place, number, model_file, device, onto)

    gc.freeze()  # The collector looks no more through what was imported, for tens of ms while requests wait.
    scorer, refused = load_current(place, load) if version is None else (load(version), None)
    model = ServedModel(scorer, name)
    if scorer.model and scorer.model.is_quick:
        limits = replace(limits, num_threads=0)
    del scorer  # its memory is released when another version takes over
    model.record_empty_request()
    model.listeners.append(on_change)
    if refused:
        model.current, model.refused = refused.version, refused
        model.report(refused)
    follower = VersionFollower(place, model, load, poll_s)
    with follower.running() if poll_s and version is None else nullcontext(), shared_cores(num_sharing):
        serve_scorer(model, endpoint, limits, on_start, record)


def _share_cores(num_threads: int) -> int:
    """Give each thread that scores its share of the cores, before torch is imported: not all of the libraries that it
    calls heed what it is told later. How many share the threads that torch has then."""
    if "torch" in sys.modules or "OMP_NUM_THREADS" in os.environ:
        return num_threads
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // num_threads))
    return 1


def load_current(
    place: str, load: Callable[[int | None], RequestScorer],
) -> tuple[RequestScorer, VersionChange | None]:
    """The current version; where it is damaged the newest earlier one that is not, and why it is not the current."""
    try:
        return load(None), None
    except DataError as error:
        versions = open_versions(place)
        try:
            wanted: int | None = current_version(versions)
        except DataError:  # `current.json` is what is damaged
            wanted = None
        for number in sorted((one.step for one in versions.committed()), reverse=True):
            if wanted is not None and number >= wanted:
                continue
            try:
                return load(number), VersionChange(wanted, number, error.what, error.fix)
            except DataError as other:
                _log.warning("version %d cannot be served either: %s", number, other.what)
        raise


def load_scorer(
    place: str, version: int | None, model_file: str = "", device: ScoringDevice | None = None,
    onto: RequestScorer | None = None,
) -> RequestScorer:
    """A version that is ready: what libraries load on first use is loaded. `onto` is one that nobody uses any more:
    where this one is a delta of it, its tables are used up for this one."""
    from embark.trainers.torch.open_exported import open_model

    artifact = open_artifact(place, version, onto.artifact if onto else None)
    model = open_model(artifact, model_file, device or ScoringDevice(), onto.model if onto else None)
    scorer = RequestScorer(artifact, model.score, model.device, model.score_numbers)
    scorer.model = model
    scorer.score([scorer.empty_request()])
    scorer.retriever = open_retriever(scorer, model.user_vectors)
    return scorer


def serve_limits(*, max_wait_ms: float, max_queued_rows: int) -> ServeLimits:
    """With these; the others as they are."""
    if not 0 <= max_wait_ms <= 10_000 or max_queued_rows < 1:
        raise UserError(f"--max-wait-ms {max_wait_ms:g}, --max-queued-rows {max_queued_rows}: out of range",
                        fix="0 to 10,000 ms, and at least one row")
    return ServeLimits(batch=BatchLimits(max_wait_ms=max_wait_ms, max_queued_rows=max_queued_rows),
                       num_threads=_NUM_THREADS)


def serve_scorer(
    served: ServedModel, endpoint: Endpoint | None = None, limits: ServeLimits | None = None,
    on_start: Callable[[Listening], None] = lambda _: None, record: str = "",
) -> None:
    """The same with any scorer, and with the versions that others switch it to."""
    endpoint, token = endpoint or Endpoint(), _token()
    model, certificate = ModelServer(served, limits or ServeLimits(), token), endpoint.certificate
    with _listener(endpoint.host, endpoint.port) as listener, _short_switches():
        host, port = listener.getsockname()[:2]
        folder = Path(record).expanduser() / f"{socket.gethostname()}-{port}" if record else None
        with model.traffic.running(folder, f"{host}:{port}"), asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(model, endpoint, certificate, listener, lambda url, grpc: on_start(Listening(
                url=url, grpc=grpc, model=model.name, version=served.artifact.version, needs_token=bool(token),
                device=served.device))))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed; otherwise asyncio's own."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def _serve(model: ModelServer, endpoint: Endpoint, certificate: tuple[Path, Path] | None,
                 listener: socket.socket, on_start: Callable[[str, str | None], None]) -> None:
    config = uvicorn.Config(
        model.app(), lifespan="off", access_log=False, log_level="warning", limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=DRAIN_S, server_header=False, http=BoundedProtocol, ws="none",
        ssl_certfile=certificate and certificate[0], ssl_keyfile=certificate and certificate[1])
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    url, grpc = f"{'https' if certificate else 'http'}://{host}:{port}", None
    if endpoint.grpc_port is not None:
        from embark.serve.grpc_server import GrpcServer

        grpc = GrpcServer(model, (endpoint.host, endpoint.grpc_port), _MAX_CONNECTIONS,
                          certificate and (certificate[0].read_bytes(), certificate[1].read_bytes()))
    server = _Server(config, grpc, lambda: on_start(url, f"{host}:{grpc.port}" if grpc else None))
    async with model.scoring():
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """With gRPC beside it. Ends with the process's own exit code: uvicorn would raise the signal again."""

    def __init__(self, config: uvicorn.Config, grpc: GrpcServer | None, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._grpc, self._on_start = grpc, on_start

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
            if self._grpc:
                await self._grpc.start()
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.gather(super().shutdown(sockets), *([self._grpc.stop(DRAIN_S)] if self._grpc else []))


@contextmanager
def _short_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                        backlog=_MAX_CONNECTIONS)
        # Connections inherit it; otherwise a body of some 100 kB waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}:{port}: cannot listen there: {getattr(error, 'strerror', None) or error}",
                        fix="choose another --port or --host") from None

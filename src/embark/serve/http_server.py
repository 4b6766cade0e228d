"""HTTP and gRPC for the clients of a process, until it is told to stop and every accepted request is answered."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from embark.spec.serve import DRAIN_S
from .app import ModelServer
from .endpoint import GRACE_S, MAX_CONNECTIONS, is_ready, refuse_new_clients

_CHECK_S = 10.0
KEEP_ALIVE_S = 620  # Between requests. Longer than any load balancer keeps its own (Google Cloud's 600 s, AWS's 60 s):
# what the server closes first may cross with a request, which the client sees as 502.
_MAX_BUSY_CHECKS = 6  # Checks that may find the same request in progress before its connection is closed.
_ANSWER_S = DRAIN_S - 1  # Longest wait for answers after all clients are taken, which takes `GRACE_S` as a rule.
MAX_HEADER_BYTES = 1 << 16  # Limit for a request's headers: httptools has none.
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections beyond the limit, and those whose client sends no complete headers, sends too long ones, or
    does not read."""

    _timer: asyncio.TimerHandle
    _num_header_bytes = 0  # Bytes since the last piece of a body or the last request.
    on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(_CHECK_S, self._check, None, 0)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
        if self.on_lost:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data)
        super().data_received(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LONG)
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0
        super().on_message_complete()

    def shutdown(self) -> None:
        """Close the connection, unless a request came or is coming: it is answered first."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        elif not self._num_header_bytes and not is_ready(self.transport.get_extra_info("socket").fileno()):
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is answered without the upgrade, and uvicorn would ask the operator to install a
        package."""

    def _check(self, last_request: Any, num_checks: int) -> None:
        request = self.cycle
        is_waiting = request is None or request.response_complete
        is_kept = is_waiting and request is not None and not self._num_header_bytes
        num_checks = num_checks + 1 if request is last_request and not is_kept else 0
        if num_checks >= (1 if is_waiting else _MAX_BUSY_CHECKS):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_CHECK_S, self._check, request, num_checks)


if TYPE_CHECKING:
    from .grpc_server import GrpcServer

_SWITCH_S = 0.0005  # Seconds after which a thread that runs Python yields to those that score or answer.


def serve_requests(
    model: ModelServer, certificate: tuple[Path, Path] | None, grpc_address: tuple[str, int] | None,
    on_start: Callable[[int | None], None], *, listener: socket.socket | None = None,
    handed: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Connections are accepted by `listener`, or by another process that sends them over
    `handed` and is told of each closed one by a byte; then others listen on the port of gRPC too. `on_start` is called
    with this port."""
    async def run() -> None:
        config = uvicorn.Config(
            model.app(), lifespan="off", access_log=False, log_level="warning", limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=_ANSWER_S, timeout_keep_alive=KEEP_ALIVE_S, server_header=False,
            http=BoundedProtocol, ws="none", ssl_certfile=certificate and certificate[0],
            ssl_keyfile=certificate and certificate[1])
        grpc = None
        if grpc_address is not None:
            from .grpc_server import GrpcServer

            grpc = GrpcServer(model, grpc_address, MAX_CONNECTIONS,
                              certificate and (certificate[0].read_bytes(), certificate[1].read_bytes()),
                              is_shared=handed is not None)
        server = _Server(config, grpc, lambda: on_start(grpc.port if grpc else None), handed)
        async with model.scoring():
            await server.serve(sockets=[listener] if listener else [])

    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class _Server(uvicorn.Server):
    """Runs uvicorn with gRPC beside it, and ends with the process's own exit code: uvicorn would raise the signal
    again."""

    def __init__(self, config: uvicorn.Config, grpc: GrpcServer | None, on_start: Callable[[], None],
                 handed: socket.socket | None) -> None:
        super().__init__(config)
        self._grpc, self._on_start, self._handed = grpc, on_start, handed
        self._accepting: set[asyncio.Task[None]] = set()
        self._has_all_clients = handed is None  # Whether another process hands out no more connections.

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # What accepts connections for this process gets Ctrl-C too, and sends SIGTERM.
        signals = (signal.SIGTERM,) if self._handed else (signal.SIGTERM, signal.SIGINT)
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
            if self._handed:
                self._handed.setblocking(False)
                asyncio.get_running_loop().add_reader(self._handed, self._take)
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take every client that the kernel or another process has accepted, and answer what they have sent."""
        listeners, loop = sockets or [], asyncio.get_running_loop()
        for port in [one.getsockname()[1] for one in listeners] + ([self._grpc.port] if self._grpc else []):
            refuse_new_clients(port)
        self.server_state.default_headers.append((b"connection", b"close"))
        grace_end_s = loop.time() + GRACE_S
        while not self.force_exit and loop.time() < grace_end_s + DRAIN_S and (
                loop.time() < grace_end_s or not self._has_all_clients or any(map(is_ready, listeners))):
            await asyncio.sleep(0.01)
        await asyncio.gather(super().shutdown(sockets), *([self._grpc.stop(_ANSWER_S)] if self._grpc else []))

    def _take(self) -> None:
        assert self._handed is not None
        with suppress(BlockingIOError):
            while True:
                try:
                    _, (*found,), _, _ = socket.recv_fds(self._handed, 1, 1)
                except ConnectionResetError:
                    found = []
                if not found:  # who accepts has ended, or hands out no more
                    asyncio.get_running_loop().remove_reader(self._handed)
                    self._has_all_clients = True
                    return
                task = asyncio.create_task(self._accept(socket.socket(fileno=found[0])))
                self._accepting.add(task)
                task.add_done_callback(self._accepting.discard)

    async def _accept(self, client: socket.socket) -> None:
        protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        protocol.on_lost = self._released  # type: ignore[attr-defined]
        try:
            client.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, client, ssl=self.config.ssl)
        except Exception:  # such as no TLS
            client.close()
            self._released()

    def _released(self) -> None:
        assert self._handed is not None
        with suppress(OSError):
            self._handed.send(b"\0")

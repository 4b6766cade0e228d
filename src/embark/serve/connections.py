"""Connections of HTTP clients, of which none is held for longer than a request takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_CHECK_S = 10.0
KEEP_ALIVE_S = 620  # Between requests. Longer than any load balancer keeps its own (Google Cloud's 600 s, AWS's 60 s):
# what the server closes first may cross with a request, which the client sees as 502.
_MAX_BUSY_CHECKS = 6  # How many of them may find the same request: its body, its scores and the client that reads them.
MAX_HEADER_BYTES = 1 << 16  # For a request's headers: httptools has no limit of its own.
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections beyond the limit, and those whose client sends no complete headers, sends too long ones, or
    does not read."""

    _timer: asyncio.TimerHandle
    _num_header_bytes = 0  # Since the last piece of a body, or the last request.
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

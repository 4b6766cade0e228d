"""Connections of HTTP clients, of which none is held for longer than a request takes."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_CHECK_S = 10.0
_MAX_BUSY_CHECKS = 6  # How many of them may find the same request: its body, its scores and the client that reads them.


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes a connection whose client sends no complete headers or does not read, and those beyond the limit."""

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(_CHECK_S, self._check, None, 0)
        if len(self.connections) > self.limit_concurrency:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(error)

    def _check(self, last_request: Any, num_checks: int) -> None:
        request = self.cycle
        is_waiting = request is None or request.response_complete
        num_checks = num_checks + 1 if request is last_request else 0
        if num_checks >= (1 if is_waiting else _MAX_BUSY_CHECKS):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_CHECK_S, self._check, request, num_checks)

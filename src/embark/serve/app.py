"""The HTTP server of an exported model: the Open Inference Protocol v2 in JSON, and `/score` for raw rows."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from embark.errors import EmbarkError, Fault
from embark.export.artifact import Artifact
from embark.serve.batcher import Batcher, BatchLimits, Overloaded
from embark.serve.infer_protocol import infer_response, metadata, rows_of_infer, rows_of_score
from embark.serve.request_rows import JsonRow, RequestScorer, Scores

Handler = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger("embark.serve")
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """What a client may send, and how requests are put together."""

    max_body_bytes: int = 8 << 20
    max_request_rows: int = 8_192
    body_timeout_s: float = 10.0
    batch: BatchLimits = field(default_factory=BatchLimits)


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, what: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(what)
        self.status, self.what, self.headers = status, what, headers


class ModelServer:
    """The routes of one model."""

    def __init__(self, artifact: Artifact, scorer: RequestScorer, limits: ServeLimits, token: str = "") -> None:
        self._artifact, self._limits, self._token = artifact, limits, token
        self.name = artifact.info.run.rstrip("/").rpartition("/")[2]
        self._batcher: Batcher[list[JsonRow], Scores | EmbarkError] = Batcher(scorer.score, limits.batch)
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("embark_serve_requests", "Requests by route and status.", ("route", "status"),
                                 registry=registry)
        self._rows = Counter("embark_serve_rows", "Rows by whether they have a score.", ("scored",), registry=registry)
        self._seconds = Histogram("embark_serve_request_seconds", "Time from a request's last byte to its answer.",
                                  ("route",), registry=registry, buckets=_BUCKETS_S)
        Gauge("embark_serve_queued_rows", "Rows that wait or are in work.", registry=registry).set_function(
            lambda: self._batcher.num_queued_rows)
        Gauge("embark_serve_version", "Version of the artifact.", registry=registry).set(artifact.version)

    def app(self) -> Starlette:
        """For any ASGI server."""
        model = "/v2/models/{name}"
        routes: list[tuple[str, str, Handler, bool]] = [
            ("GET", "/v2/health/live", self._healthy, False), ("GET", "/v2/health/ready", self._healthy, False),
            ("GET", "/v2", self._server, True), ("GET", model, self._model, True),
            ("GET", f"{model}/ready", self._model_ready, True), ("POST", f"{model}/infer", self._infer, True),
            ("GET", f"{model}/versions/{{version}}", self._model, True),
            ("GET", f"{model}/versions/{{version}}/ready", self._model_ready, True),
            ("POST", f"{model}/versions/{{version}}/infer", self._infer, True),
            ("POST", "/score", self._score, True), ("GET", "/metrics", self._metrics, True),
        ]
        return Starlette(routes=[Route(path, self._answered(path, handler, is_private), methods=[method])
                                 for method, path, handler, is_private in routes], lifespan=self._lifespan,
                         exception_handlers={HTTPException: _http_error})

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        batches = asyncio.create_task(self._batcher.run())
        try:
            yield
        finally:
            batches.cancel()
            with suppress(asyncio.CancelledError):
                await batches

    def _answered(self, route: str, handler: Handler, is_private: bool) -> Handler:
        """Every error is JSON in one line; what went wrong inside is in the log alone."""
        async def answer(request: Request) -> Response:
            try:
                if is_private:
                    self._check_token(request)
                response = await handler(request)
            except Refusal as refusal:
                response = JSONResponse({"error": refusal.what}, refusal.status, refusal.headers)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:
                _log.exception("%s failed", route)
                response = JSONResponse({"error": "internal error"}, 500)
            self._requests.labels(route, response.status_code).inc()
            return response
        return answer

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise Refusal(401, "a bearer token is required", {"WWW-Authenticate": "Bearer"})

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version", str(self._artifact.version))
        if name != self.name:
            raise Refusal(404, f"no model {name!r}; this server has {self.name!r}")
        if version != str(self._artifact.version):
            raise Refusal(404, f"no version {version}; this server has {self._artifact.version}")

    async def _healthy(self, _: Request) -> Response:
        return JSONResponse({"live": True, "ready": True})

    async def _server(self, _: Request) -> Response:
        return JSONResponse({"name": "embark", "version": self._artifact.info.embark, "extensions": []})

    async def _model(self, request: Request) -> Response:
        self._check_model(request)
        return JSONResponse(metadata(self.name, self._artifact.version, self._artifact.info.rows.columns))

    async def _model_ready(self, request: Request) -> Response:
        self._check_model(request)
        return JSONResponse({"name": self.name, "ready": True})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    async def _infer(self, request: Request) -> Response:
        self._check_model(request)
        if "inference-header-content-length" in request.headers:
            raise Refusal(400, "binary tensors are not supported: send the tensors' data as JSON")
        body = await self._body(request)
        found = await self._scores("infer", lambda: rows_of_infer(body, self._artifact.info.rows.columns))
        if found.errors:
            row, why = found.errors[0]
            raise Refusal(400, f"row {row}: {why}")
        return JSONResponse(infer_response(self.name, self._artifact.version, body, found.scores))

    async def _score(self, request: Request) -> Response:
        body = await self._body(request)
        found = await self._scores("score", lambda: rows_of_score(body))
        return JSONResponse({"version": self._artifact.version, "scores": found.scores,
                             "errors": [{"row": row, "why": why} for row, why in found.errors]})

    async def _scores(self, route: str, read: Callable[[], list[JsonRow]]) -> Scores:
        started = time.perf_counter()
        try:
            rows = read()
        except (ValueError, TypeError, KeyError) as error:
            raise Refusal(400, str(error)) from None
        if not 0 < len(rows) <= self._limits.max_request_rows:
            raise Refusal(413 if rows else 400, f"{len(rows):,} rows; a request has 1 to "
                                                f"{self._limits.max_request_rows:,}")
        try:
            found = await self._batcher.submit(rows, len(rows))
        except Overloaded:
            raise Refusal(429, "too many rows are waiting", {"Retry-After": "1"}) from None
        if isinstance(found, EmbarkError):
            raise Refusal(500 if isinstance(found, Fault) else 400, found.what)
        self._rows.labels("false").inc(len(found.errors))
        self._rows.labels("true").inc(len(rows) - len(found.errors))
        self._seconds.labels(route).observe(time.perf_counter() - started)
        return found

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request, unless it is too long or too slow."""
        too_long = Refusal(413, f"the body has more than {self._limits.max_body_bytes:,} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._limits.max_body_bytes:
                        raise too_long
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive in {self._limits.body_timeout_s:g} s",
                          {"Connection": "close"}) from None
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise Refusal(400, "the body is not JSON") from None
        if not isinstance(value, dict):
            raise Refusal(400, "the body is not a JSON object")
        return value


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": f"{request.method} {request.url.path}: {error.detail}"}, error.status_code,
                        error.headers)

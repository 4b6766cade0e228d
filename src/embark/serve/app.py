"""The HTTP server of an exported model: the Open Inference Protocol v2, and `/score` for raw rows."""

import asyncio
import hmac
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sized
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from embark.errors import EmbarkError, Fault
from embark.export.artifact import ArtifactInfo, short_identity
from embark.values import JsonDict, frozen
from .batcher import Batcher, Overloaded
from .infer_protocol import (
    EXTENSIONS,
    InferReader,
    infer_response,
    json_object,
    metadata,
    read_infer,
    read_score,
    score_response,
)
from .request_rows import RequestColumns, Scores
from .retrieve import RetrieveRequest, RetrieveResponse, read_retrieve
from .served_model import ServedModel
from .server_metrics import ServerMetrics
from .traffic import Traffic, read_labels

Handler = Callable[[Request], Awaitable[Response]]
RequestT = TypeVar("RequestT", bound=Sized)
ResponseT = TypeVar("ResponseT")
IDENTITY = "Embark-Identity"  # Header of an answer: the content of the version that gave them.
_log = logging.getLogger("embark.serve")


@frozen
class ServeLimits:
    """Limits on requests, and settings for batching them."""

    max_body_bytes: int = 8 << 20
    max_request_rows: int = 8_192
    max_buffered_bytes: int = 256 << 20  # Bodies of all requests that arrive or wait, together.
    body_timeout_s: float = 10.0
    num_threads: int = 1  # Threads that score, each a batch of its own; 0: the event loop scores.
    max_batch_rows: int = 4_096
    max_queued_rows: int = 65_536  # Rows that may wait or be in work; further requests are refused.


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, what: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(what)
        self.status, self.what, self.headers = status, what[:1_000], headers  # it quotes clients; gRPC takes 16 kB


class ModelServer:
    """The routes of one model."""

    def __init__(self, model: ServedModel, limits: ServeLimits, token: str = "",
                 all_metrics: Callable[[], bytes] | None = None) -> None:
        """`all_metrics` is given if this process is one of several that serve the model: it returns those of all."""
        self.model, self.limits, self._token = model, limits, token
        self.name = model.name
        self._batcher: Batcher[RequestColumns, Scores | EmbarkError] = Batcher(
            model.score, limits.max_batch_rows, limits.max_queued_rows, limits.num_threads)
        self._retrievals: Batcher[RetrieveRequest, RetrieveResponse | EmbarkError] = Batcher(
            model.retrieve, limits.max_batch_rows, limits.max_queued_rows)
        self.reader = InferReader(self.info.rows.columns)
        self._num_buffered_bytes = 0
        self.metrics = ServerMetrics(model, lambda: self._batcher.num_queued_rows)
        self.traffic = Traffic(model)
        self._all_metrics = all_metrics or self.metrics.text

    @property
    def info(self) -> ArtifactInfo:
        """What the active version is. The next request may be answered by another one."""
        return self.model.artifact.info

    def app(self) -> ASGIApp:
        """Return the application for any ASGI server. A full queue refuses a request before any of its body is read."""
        app = self._routes()

        async def admit(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
            if path and (self._retrievals if path == "/retrieve" else self._batcher).is_full:
                self.count(path if path in ("/score", "/retrieve") else "/v2/models/{name}/infer", "429")
                await _response(_TOO_MANY_ROWS)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return admit

    def check_room(self) -> None:
        """Raise if the queue is full."""
        if self._batcher.is_full:
            raise _TOO_MANY_ROWS

    def _routes(self) -> Starlette:
        """Return the routes; `/ping` and `/invocations` are SageMaker's, those of the environment Vertex AI's."""
        model = "/v2/models/{name}"
        gets: dict[str, Handler] = {
            **dict.fromkeys(("/v2/health/live", "/v2/health/ready", "/ping", *_named("AIP_HEALTH_ROUTE")),
                            self._healthy),
            "/v2": self._server, f"{model}/ready": self._model_ready, model: self._model, "/metrics": self._metrics,
            f"{model}/versions/{{version}}": self._model, f"{model}/versions/{{version}}/ready": self._model_ready}
        posts: dict[str, Handler] = {
            **dict.fromkeys(("/score", "/invocations", *_named("AIP_PREDICT_ROUTE")), self._score),
            f"{model}/infer": self._infer, f"{model}/versions/{{version}}/infer": self._infer,
            "/retrieve": self._retrieve, "/feedback": self._feedback}
        # Starlette tries them one by one.
        return Starlette(routes=[Route(path, self._answered(path, handler), methods=[method])
                                 for method, several in (("POST", posts), ("GET", gets))
                                 for path, handler in several.items()],
                         exception_handlers={HTTPException: _http_error})

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Answer requests while the context is entered."""
        tasks = [asyncio.create_task(batcher.run()) for batcher in (self._batcher, self._retrievals)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _answered(self, route: str, handler: Handler) -> Handler:
        """Wrap a handler: every error becomes one line of JSON, and internal faults are only logged."""
        async def answer(request: Request) -> Response:
            try:
                if handler != self._healthy:
                    self.check_token(request.headers.get("authorization", "").encode("latin-1"))
                response = await handler(request)
            except Refusal as refusal:
                response = _response(refusal)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:
                _log.exception("%s failed", route)
                response = JSONResponse({"error": "internal error"}, 500)
            finally:
                self._hold(-getattr(request.state, "num_bytes", 0))
            self.count(route, str(response.status_code))
            return response
        return answer

    def _hold(self, num_bytes: int) -> None:
        self._num_buffered_bytes += num_bytes
        if num_bytes > 0 and self._num_buffered_bytes > self.limits.max_buffered_bytes:
            raise _busy("requests fill the memory that they may")

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Reserve memory while a request of this size waits; raise if other requests leave no room for it."""
        try:
            self._hold(num_bytes)
            yield
        finally:
            self._hold(-num_bytes)

    def count(self, route: str, status: str) -> None:
        """Count an answered request."""
        self.metrics.requests.labels(route, status).inc()
        self.traffic.add_status(route, status)

    def check_token(self, given: bytes) -> None:
        """Raise if a request's header does not have the server's token. The scheme may be in any case."""
        scheme, _, token = given.partition(b" ")
        is_right = hmac.compare_digest(token.lstrip(b" "), self._token.encode()) and scheme.lower() == b"bearer"
        if self._token and not is_right:
            raise Refusal(401, "a bearer token is required", {"WWW-Authenticate": "Bearer"})

    def check_model(self, name: str, version: str = "", *, answered_by: int | None = None) -> None:
        """Raise if this server does not have the model or version, or, after a request, if another version answered
        it."""
        has = str(self.model.version if answered_by is None else answered_by)
        if name != self.name:
            raise Refusal(404, f"no model {name!r}; this server has {self.name!r}")
        if version not in ("", has):
            raise Refusal(404, f"no version {version}; this server has {has}")

    async def _healthy(self, _: Request) -> Response:
        refused = self.model.refused
        return JSONResponse({"live": True, "ready": True, "version": self.model.version,
                             **({"refused_version": refused.version or 0} if refused else {})})

    async def _server(self, _: Request) -> Response:
        return JSONResponse(self.about_server())

    def about_server(self) -> JsonDict:
        """Return the metadata of the server."""
        return {"name": "embark", "version": self.info.embark, "extensions": EXTENSIONS}

    async def _model(self, request: Request) -> Response:
        self.check_model(**request.path_params)
        refused = self.model.refused
        about: JsonDict = {"run": self.info.run, "step": self.info.step,
                                 "identity": short_identity(self.model.identity)}
        if refused:
            about |= {"refused_version": refused.version or 0, "refused_because": refused.refused}
        return JSONResponse({**self.about_model(), "parameters": about})

    def about_model(self) -> JsonDict:
        """Return the metadata of the model."""
        return metadata(self.name, self.model.version, self.info.rows.columns, self.info.model)

    async def _model_ready(self, request: Request) -> Response:
        self.check_model(**request.path_params)
        return JSONResponse({"name": self.name, "ready": True})

    async def _metrics(self, _: Request) -> Response:
        return Response(await asyncio.to_thread(self._all_metrics), media_type="text/plain; version=0.0.4")

    async def _infer(self, request: Request) -> Response:
        self.check_model(**request.path_params)
        body = memoryview(await self._body(request))
        length = request.headers.get("inference-header-content-length")
        if length is not None and not (re.fullmatch("[0-9]{1,18}", length) and int(length) <= len(body)):
            raise Refusal(400, f"Inference-Header-Content-Length: is not a number of bytes up to {len(body):,}")
        end = len(body) if length is None else int(length)
        with refused_if_malformed():
            header, raw = bytes(body[:end]), body[end:]
            asked = self.reader.read(header, end, raw, lambda: read_infer(
                json_object(header), raw, self.info.rows.columns, self.info.model))
        found = await self.scores("infer", asked.columns)
        self.check_model(**request.path_params, answered_by=found.version)
        answer, after = infer_response(self.name, found.version, asked, all_scores(found))
        by = {IDENTITY: short_identity(found.identity)}
        if not asked.raw_outputs:
            return JSONResponse(answer, headers=by)
        text = json.dumps(answer).encode()
        return Response(text + after, headers={"Inference-Header-Content-Length": str(len(text)), **by},
                        media_type="application/octet-stream")

    async def _score(self, request: Request) -> Response:
        text = await self._body(request)
        with refused_if_malformed():
            body = json_object(text)
            columns = read_score(body)
        found = await self.scores("score", columns)
        return JSONResponse(score_response(body, found, self.info.model),
                            headers={IDENTITY: short_identity(found.identity)})

    async def _feedback(self, request: Request) -> Response:
        text = await self._body(request)
        with refused_if_malformed():
            version, scores, labels = read_labels(json_object(text))
        self.traffic.add_labels(version, scores, labels)
        return JSONResponse({"rows": len(labels)})

    async def _retrieve(self, request: Request) -> Response:
        if not self.model.has_items:
            raise Refusal(404, "this model has no item index; versions of model.kind = \"two_tower\" have one, and of "
                               "\"sasrec\" and \"hstu\" that predict the next item")
        body = await self._body(request)
        with refused_if_malformed():
            asked = read_retrieve(json_object(body))
        found = await self._answer("retrieve", self._retrievals, asked)
        return JSONResponse({"version": found.version, "results": found.results,
                             "errors": [{"row": row, "why": why} for row, why in found.errors]},
                            headers={IDENTITY: short_identity(found.identity)})

    async def scores(self, route: str, rows: RequestColumns) -> Scores:
        """Score rows with the next batch."""
        started = time.perf_counter()
        found = await self._answer(route, self._batcher, rows)
        self.traffic.add_answer(found, time.perf_counter() - started)
        self.metrics.rows.labels("false", found.version).inc(len(found.errors))
        self.metrics.rows.labels("true", found.version).inc(len(rows) - len(found.errors))
        return found

    async def _answer(
        self, route: str, batcher: Batcher[RequestT, ResponseT | EmbarkError], rows: RequestT,
    ) -> ResponseT:
        """Submit rows to a batcher; raise if this request, or all that wait, have too many."""
        started = time.perf_counter()
        if not 0 < len(rows) <= self.limits.max_request_rows:
            raise Refusal(413 if len(rows) else 400, f"{len(rows):,} rows; a request has 1 to "
                                                f"{self.limits.max_request_rows:,}")
        try:
            with self.metrics.in_flight.track_inprogress():
                found = await batcher.submit(rows, len(rows))
        except Overloaded:
            raise _TOO_MANY_ROWS from None
        if isinstance(found, EmbarkError):
            raise Refusal(500 if isinstance(found, Fault) else 400, found.what)
        self.metrics.seconds.labels(route).observe(time.perf_counter() - started)
        return found

    async def _body(self, request: Request) -> bytearray:
        """Read the body of a request; raise if it is too long or too slow, or if other bodies fill the memory."""
        too_long = Refusal(413, f"the body has more than {self.limits.max_body_bytes:,} bytes")
        length = request.headers.get("content-length", "0")
        if re.fullmatch("[0-9]{1,18}", length) and int(length) > self.limits.max_body_bytes:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                async for piece in request.stream():
                    body += piece
                    request.state.num_bytes = len(body)
                    self._hold(len(piece))
                    if len(body) > self.limits.max_body_bytes:
                        raise too_long
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive in {self.limits.body_timeout_s:g} s",
                          {"Connection": "close"}) from None
        return body


def _named(variable: str) -> list[str]:
    """Return the route that an environment variable names."""
    return [path] if (path := os.environ.get(variable, "")).startswith("/") else []


def _busy(what: str) -> Refusal:
    return Refusal(429, what, {"Retry-After": "1"})


_TOO_MANY_ROWS = _busy("too many rows are waiting")


def _response(refusal: Refusal) -> Response:
    return JSONResponse({"error": refusal.what}, refusal.status, refusal.headers)


def all_scores(found: Scores) -> NDArray[np.float32]:
    """Return the scores of a request by tensors. Tensors have no room for a reason, so one row without a score refuses
    the request."""
    if found.errors:
        row, why = found.errors[0]
        raise Refusal(400, f"row {row}: {why}")
    return found.values


@contextmanager
def refused_if_malformed() -> Iterator[None]:
    """Turn what cannot be read of a request into its answer."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refusal(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refusal(400, str(error)) from None


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer what Starlette itself refuses: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": f"{request.method} {request.url.path}: {error.detail}"}, error.status_code,
                        error.headers)

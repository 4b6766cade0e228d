"""HTTP to a platform's API, with retries while it is away. On a dry run every request is printed, and none is sent."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import format_duration, to_one_line
from embark.store.errors import RetriesExhausted, RetryPolicy, call_with_retries
from embark.values import frozen
from .shell import Notify, Shell

MAX_BYTES = 256 << 20
API_RETRY = RetryPolicy(max_retries=1000, first_wait_s=1.0, longest_wait_s=15.0, request_s=20.0, give_up_s=180.0)
NO_RETRY = replace(API_RETRY, max_retries=0)
"""The policy for a list of all runs: one platform that is away does not hold up the others."""
T = TypeVar("T")


class Unavailable(Exception):
    """The API does not answer now; its text says why."""


def retry_api(call: Callable[[], T], retry: RetryPolicy, notify: Notify, *, name: str, fix: str) -> T:
    """Call again while it raises `Unavailable`, and notify."""
    def is_unavailable(error: Exception) -> bool:
        if isinstance(error, Unavailable) and retry.max_retries:
            notify(f"{name} does not answer ({error}); retrying for {format_duration(retry.give_up_s)}")
        return isinstance(error, Unavailable)

    try:
        return call_with_retries(call, retry, is_unavailable)
    except RetriesExhausted as error:
        raise Fault(f"{name} does not answer: {error.last}", fix) from None


@frozen
class Response:
    """A response; on a dry run a 200 without a body."""

    code: int
    body: bytes = b""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.code < 300

    @property
    def is_missing(self) -> bool:
        return self.code == 404

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Fault(f"not JSON: {to_one_line(self.text)[:200]}", "check the address") from error


@frozen
class HttpClient:
    """Requests to one service, with its credentials, retries and explanations."""

    shell: Shell
    notify: Notify
    name: str  # `the Ray cluster http://10.0.0.7:8265`.
    away_fix: str
    login_fix: str
    retry: RetryPolicy = API_RETRY
    headers: Callable[[], Mapping[str, str]] = dict  # Called for each request: credentials are never stored.
    unavailable_codes: tuple[int, ...] = (429, 502, 503, 504)
    login_codes: tuple[int, ...] = (401, 403)

    def request(self, method: str, url: str, body: bytes = b"", *, body_name: str = "",
                content_type: str = "application/json", is_done: Callable[[], bool] | None = None, what: str = ""
                ) -> Response:
        """Send a request, which is repeated unless `is_done` says that it took effect though its response was lost.

        `body_name` describes its body to a person. `what` it asks for: a response that refuses it is raised.
        """
        if self.shell.is_dry:
            send = self.shell.ask if method == "GET" else partial(self.shell.change, stdin_name=body_name)
            send([method, url], stdin="x" if body else "")
            return Response(200)
        num_attempts = 0

        def attempt() -> Response:
            nonlocal num_attempts
            num_attempts += 1
            if num_attempts > 1 and is_done is not None and is_done():
                return Response(200)
            return self._send(method, url, body, {"Content-Type": content_type} if body else {})

        response = retry_api(attempt, self.retry, self.notify, name=self.name, fix=self.away_fix)
        if response.code in self.login_codes:
            raise UserError(f"{self.name} refuses your credentials: HTTP {response.code}: "
                            f"{to_one_line(response.text)[:300]}", self.login_fix)
        if what and not response.is_ok:
            raise self.error(response, what)
        return response

    def error(self, response: Response, what: str) -> EmbarkError:
        """Return the error for a response that no caller expects."""
        lines = response.text.strip().splitlines()
        said = to_one_line(lines[-1])[:600] if lines else f"HTTP {response.code}"
        return (Fault if response.code >= 500 else UserError)(f"{self.name} did not {what}: {said}")

    def _send(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Response:
        request = urllib.request.Request(url, data=None if method == "GET" else body, method=method,
                                         headers={**self.headers(), **headers})
        try:
            with urllib.request.urlopen(request, timeout=self.retry.request_s) as reply:
                return Response(reply.status, reply.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                response = Response(error.code, error.read(1 << 20))
        except (OSError, urllib.error.URLError) as error:
            raise Unavailable(to_one_line(str(getattr(error, "reason", error)))) from error
        if response.code in self.unavailable_codes or (response.code == 500 and b"try again later" in response.body):
            raise Unavailable(f"HTTP {response.code}: {to_one_line(response.text)[:200]}")
        return response

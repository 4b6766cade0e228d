"""HTTP to a place's own API: patient while it is away. On a dry run every request is said, and none is sent."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import format_duration, to_one_line
from embark.launch.backend import Notify
from embark.launch.backends.kubernetes.kubectl import Patience
from embark.launch.shell import Shell

MAX_BYTES = 256 << 20
AWAY = (429, 502, 503, 504)
NOT_ME = (401, 403)


@dataclass(frozen=True, slots=True)
class Response:
    """What the place said. On a dry run: 200, and nothing."""

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
            raise Fault(f"no JSON came back: {to_one_line(self.text)[:200]}", fix="is it the right address?") from error


@dataclass(frozen=True, slots=True)
class Service:
    """Who is asked, as a person is told of it."""

    name: str
    """`the Ray cluster http://10.0.0.7:8265`."""
    away_fix: str
    login_fix: str


class HttpClient:
    """Of one service."""

    def __init__(self, shell: Shell, service: Service, *, tell: Notify, patience: Patience | None = None,
                 headers: Callable[[], Mapping[str, str]] = dict) -> None:
        self._shell = shell
        self._service = service
        self._tell = tell
        self._patience = patience or Patience()
        self._headers = headers

    def ask(self, url: str) -> Response:
        """GET."""
        if self._shell.is_dry:
            self._shell.ask(["GET", url])
            return Response(200)
        return self._patiently("GET", url, None, {})

    def change(self, method: str, url: str, body: bytes = b"", *, body_name: str = "",
               kind: str = "application/json") -> Response:
        """A request that can be repeated. `body_name` says to a person what it carries."""
        if self._shell.is_dry:
            self._shell.change([method, url], stdin="x" if body else "", stdin_name=body_name)
            return Response(200)
        return self._patiently(method, url, body, {"Content-Type": kind} if body else {})

    def refused(self, answer: Response, what: str) -> EmbarkError:
        """Of an answer that nobody had reckoned with."""
        said = to_one_line(answer.text.strip().splitlines()[-1] if answer.text.strip() else "")[:600]
        error = Fault if answer.code >= 500 else UserError
        return error(f"{self._service.name} did not {what}: {said or f'HTTP {answer.code}'}")

    def _patiently(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        until_s = time.monotonic() + self._patience.give_up_s
        wait_s = self._patience.first_wait_s
        while True:
            try:
                answer = self._send(method, url, body, headers)
                why = f"HTTP {answer.code}: {to_one_line(answer.text)[:200]}" if _is_away(answer) else ""
            except (OSError, urllib.error.URLError, TimeoutError) as error:
                answer, why = Response(0), to_one_line(str(getattr(error, "reason", error)))
            if not why:
                if answer.code in NOT_ME:
                    raise UserError(f"{self._service.name} does not let you in: HTTP {answer.code}",
                                    fix=self._service.login_fix)
                return answer
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise Fault(f"{self._service.name} does not answer: {why}", fix=self._service.away_fix)
            self._tell(f"{self._service.name} does not answer ({why}); trying again in {format_duration(wait_s)}, for "
                       f"{format_duration(left_s)} more")
            time.sleep(min(wait_s, left_s))
            wait_s = min(wait_s * 2, self._patience.longest_wait_s)

    def _send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        request = urllib.request.Request(url, data=body, method=method, headers={**self._headers(), **headers})
        try:
            with urllib.request.urlopen(request, timeout=self._patience.request_s) as reply:
                return Response(reply.status, reply.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                return Response(error.code, error.read(1 << 20))


def _is_away(answer: Response) -> bool:
    return answer.code in AWAY or (answer.code == 500 and b"try again later" in answer.body)

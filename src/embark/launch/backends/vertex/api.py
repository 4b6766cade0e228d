"""Vertex AI's jobs through Google's own client, patient while the API is away; and Cloud Logging over HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from embark.errors import EmbarkError, Fault, MissingPackage, UserError
from embark.formatting import format_duration, to_one_line
from embark.launch.backend import Notify
from embark.launch.backends.kubernetes.kubectl import Patience
from embark.launch.backends.vertex.status import why
from embark.launch.http import HttpClient, Service
from embark.launch.shell import Shell

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
ENDPOINT, LOGGING_ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", "CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING"
"""As gcloud reads them, for a private way into Google's network."""
LOGIN = "gcloud auth application-default login"
PAGE = 1000

T = TypeVar("T")


class VertexApi:
    """Of one project and region. On a dry run every request is said, and none is sent."""

    def __init__(self, shell: Shell, *, project: str, region: str, tell: Notify,
                 patience: Patience | None = None) -> None:
        self.project, self.region = project, region
        self.parent = f"projects/{project}/locations/{region}"
        self._shell = shell
        self._tell = tell
        self._patience = patience or Patience()
        self._clients: dict[str, Any] = {}
        self._held: list[Credentials] = []

    @property
    def url(self) -> str:
        given = os.environ.get(ENDPOINT, "").rstrip("/")
        return given or f"https://{self.region}-aiplatform.googleapis.com"

    def find(self, condition: str) -> list[dict[str, Any]]:
        """Jobs as the REST API writes them, newest first. `condition`: of the list filter."""
        if self._shell.is_dry:
            self._shell.ask(["GET", f"{self.url}/v1/{self.parent}/customJobs?filter={condition}"])
            return []
        request = {"parent": self.parent, "filter": condition}
        found = self._patiently(lambda: list(self._client().list_custom_jobs(
            request=request, timeout=self._patience.request_s, retry=None)))
        read = [_plain(job) for job in found]
        return sorted(read, key=lambda job: str(job.get("createTime", "")), reverse=True)

    def create(self, job: Mapping[str, Any], *, label: str) -> None:
        """`label`: a condition that finds it again: a request whose answer was lost is not repeated blindly."""
        if self._shell.is_dry:
            self._shell.change(["POST", f"{self.url}/v1/{self.parent}/customJobs"], stdin=json.dumps(job),
                               stdin_name="vertex_job.yaml")
            return
        from google.cloud.aiplatform_v1.types import CustomJob

        message = CustomJob.from_json(json.dumps(job))
        tried: list[bool] = []

        def attempt() -> None:
            limit_s = self._patience.request_s
            if tried and self._client().list_custom_jobs(
                    request={"parent": self.parent, "filter": label}, timeout=limit_s, retry=None).custom_jobs:
                return
            tried.append(True)
            self._client().create_custom_job(parent=self.parent, custom_job=message, timeout=limit_s, retry=None)

        self._patiently(attempt)

    def cancel(self, name: str) -> None:
        self._change("POST", f"{name}:cancel", lambda: self._client().cancel_custom_job(
            name=name, timeout=self._patience.request_s, retry=None))

    def delete(self, name: str) -> None:
        self._change("DELETE", name, lambda: self._client().delete_custom_job(
            name=name, timeout=self._patience.request_s, retry=None))

    def entries(self, condition: str) -> Iterator[dict[str, Any]]:
        """Of Cloud Logging, by time."""
        given = os.environ.get(LOGGING_ENDPOINT, "").rstrip("/") or "https://logging.googleapis.com"
        url, token = f"{given}/v2/entries:list", ""
        while True:
            wanted = {"resourceNames": [f"projects/{self.project}"], "filter": condition, "orderBy": "timestamp asc",
                      "pageSize": PAGE, **({"pageToken": token} if token else {})}
            web = self._web(given)
            answer = web.change("POST", url, json.dumps(wanted).encode(), body_name="what is looked for")
            if not answer.is_ok:
                raise web.refused(answer, "give the log")
            told = answer.json() or {}
            yield from told.get("entries") or ()
            token = str(told.get("nextPageToken") or "")
            if not token:
                return

    def _change(self, method: str, path: str, call: Callable[[], object]) -> None:
        if self._shell.is_dry:
            self._shell.change([method, f"{self.url}/v1/{path}"])
            return
        self._patiently(call)

    def _web(self, given: str) -> HttpClient:
        service = Service("Cloud Logging", "is the network up?", LOGIN + "; roles/logging.viewer lets you read logs")
        return HttpClient(self._shell, service, tell=self._tell, patience=self._patience,
                   headers=lambda: {} if given.startswith("http://") else self._token())

    def _token(self) -> dict[str, str]:
        from google.auth.transport.requests import Request

        credentials = self._credentials()
        if not credentials.valid:
            self._patiently(lambda: credentials.refresh(Request()))  # type: ignore[no-untyped-call]
        return {"Authorization": f"Bearer {credentials.token}"}

    def _client(self) -> Any:
        if "jobs" not in self._clients:
            try:
                from google.api_core.client_options import ClientOptions
                from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
            except ImportError as error:
                raise MissingPackage("Google's client for Vertex AI is not installed",
                                     fix="pip install 'embark-rec[vertex]'") from error
            options = ClientOptions(api_endpoint=self.url)
            self._clients["jobs"] = JobServiceClient(credentials=self._credentials(), transport="rest",
                                                     client_options=options)
        return self._clients["jobs"]

    def _credentials(self) -> Credentials:
        if not self._held:
            import google.auth
            from google.auth.credentials import AnonymousCredentials

            if self.url.startswith("http://"):  # a token is not sent where anyone can read it
                self._held.append(AnonymousCredentials())  # type: ignore[no-untyped-call]
            else:
                try:
                    self._held.append(google.auth.default(scopes=SCOPES)[0])
                except google.auth.exceptions.DefaultCredentialsError as error:
                    raise UserError("nobody is logged in to Google Cloud here", fix=LOGIN) from error
        return self._held[0]

    def _patiently(self, call: Callable[[], T]) -> T:
        """Again while the API is away, and says so."""
        until_s = time.monotonic() + self._patience.give_up_s
        wait_s = self._patience.first_wait_s
        while True:
            try:
                return call()
            except Exception as error:
                left_s = until_s - time.monotonic()
                if not _is_away(error) or left_s <= 0:
                    raise self._explained(error) from error
                said = to_one_line(str(error))[:200]
            self._tell(f"Vertex AI does not answer ({said}); trying again in {format_duration(wait_s)}, for "
                       f"{format_duration(left_s)} more")
            time.sleep(min(wait_s, left_s))
            wait_s = min(wait_s * 2, self._patience.longest_wait_s)

    def _explained(self, error: Exception) -> EmbarkError:
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError

        if isinstance(error, EmbarkError):
            return error
        said = to_one_line(str(getattr(error, "message", "") or error))[:600]
        if _is_away(error):
            return Fault(f"Vertex AI does not answer: {said}", fix=f"is the network up? {self.url}")
        if isinstance(error, GoogleAuthError | exceptions.Unauthorized):
            return UserError(f"Google Cloud does not know who you are any more: {said}", fix=LOGIN)
        if isinstance(error, exceptions.GoogleAPICallError):
            found = why(said, region=self.region, project=self.project)
            return UserError(f"Vertex AI did not take it: {found.text}", fix=found.fix)
        return Fault(f"Vertex AI could not be asked: {type(error).__name__}: {said}")


def _is_away(error: Exception) -> bool:
    from google.api_core import exceptions
    from google.auth.exceptions import TransportError
    from requests.exceptions import ConnectionError as NoConnection
    from requests.exceptions import Timeout

    kinds = (exceptions.ServerError, exceptions.RetryError, TransportError, NoConnection, Timeout, ConnectionError)
    return isinstance(error, kinds) and not isinstance(error, exceptions.MethodNotImplemented)


def _plain(job: Any) -> dict[str, Any]:
    """A CustomJob as the REST API writes it."""
    kind = type(job)
    read: dict[str, Any] = json.loads(kind.to_json(job, use_integers_for_enums=False))
    return read

"""Vertex AI's custom jobs and Cloud Logging's entries, over REST with Google's credentials."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from embark.errors import MissingPackage, UserError
from embark.launch.api_retry import API_RETRY
from embark.launch.backend import Notify
from embark.launch.backends.vertex.status import explain_message
from embark.launch.http import HttpClient, Response
from embark.launch.shell import Shell
from embark.store.retry_policy import RetryPolicy

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
"""With AIPLATFORM or LOGGING, as gcloud reads them: for private access to Google's network."""
LOGIN = "gcloud auth application-default login"
PAGE = 1000


class VertexApi:
    """Of one project and region. On a dry run every request is printed, and none is sent."""

    def __init__(self, shell: Shell, *, project: str, region: str, notify: Notify,
                 retry: RetryPolicy = API_RETRY) -> None:
        self.project, self.region = project, region
        self._url = _endpoint("AIPLATFORM", f"https://{region}-aiplatform.googleapis.com")
        self._jobs_url = f"{self._url}/v1/projects/{project}/locations/{region}/customJobs"
        self._logging_url = _endpoint("LOGGING", "https://logging.googleapis.com")
        self._credentials: Credentials | None = None

        def client(name: str, url: str, login_fix: str) -> HttpClient:
            return HttpClient(
                shell=shell, notify=notify, retry=retry, name=name, away_fix=f"check the network: {url}",
                login_fix=login_fix, headers=lambda: self._headers(url),
                # 429 is a quota, and 403 a permission: both are explained, and not retried.
                unavailable_codes=(500, 502, 503, 504), login_codes=(401,))

        self._jobs = client("Vertex AI", self._url, LOGIN)
        self._logging = client("Cloud Logging", self._logging_url, f"{LOGIN}; reading logs needs roles/logging.viewer")

    def find(self, condition: str) -> list[dict[str, Any]]:
        """Jobs, newest first. `condition`: of the list filter."""
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            query = {"filter": condition, "pageSize": 100, **({"pageToken": token} if token else {})}
            page = self._checked(self._jobs.get(f"{self._jobs_url}?{urlencode(query)}")).json() or {}
            found += page.get("customJobs") or ()
            token = str(page.get("nextPageToken") or "")
            if not token:
                return sorted(found, key=lambda job: str(job.get("createTime", "")), reverse=True)

    def create(self, job: Mapping[str, Any], *, label: str) -> None:
        """`label`: a condition that finds it again: a request whose response was lost is not repeated blindly."""
        self._checked(self._jobs.change("POST", self._jobs_url, json.dumps(job).encode(), body_name="vertex_job.yaml",
                                        is_done=lambda: bool(self.find(label))))

    def cancel(self, name: str) -> None:
        self._checked(self._jobs.change("POST", f"{self._url}/v1/{name}:cancel"))

    def delete(self, name: str) -> None:
        self._checked(self._jobs.change("DELETE", f"{self._url}/v1/{name}"))

    def entries(self, condition: str) -> Iterator[dict[str, Any]]:
        """Of Cloud Logging, by time."""
        token = ""
        while True:
            wanted = {"resourceNames": [f"projects/{self.project}"], "filter": condition, "orderBy": "timestamp asc",
                      "pageSize": PAGE, **({"pageToken": token} if token else {})}
            response = self._logging.change("POST", f"{self._logging_url}/v2/entries:list", json.dumps(wanted).encode(),
                                            body_name="the log filter")
            if not response.is_ok:
                raise self._logging.error(response, "return the log")
            page = response.json() or {}
            yield from page.get("entries") or ()
            token = str(page.get("nextPageToken") or "")
            if not token:
                return

    def _checked(self, response: Response) -> Response:
        if response.is_ok:
            return response
        try:
            said = str(response.json()["error"]["message"])
        except (KeyError, TypeError):
            raise self._jobs.error(response, "accept it") from None
        reason = explain_message(said, region=self.region, project=self.project)
        raise UserError(f"Vertex AI refused it: {reason.text}", fix=reason.fix)

    def _headers(self, url: str) -> dict[str, str]:
        if url.startswith("http://"):  # a token is not sent unencrypted
            return {}
        try:
            import google.auth
            from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
            from google.auth.transport.requests import Request
        except ImportError as error:
            raise MissingPackage("Google's credentials library is not installed",
                                 fix="pip install 'embark-rec[vertex]'") from error
        try:
            if self._credentials is None:
                self._credentials = google.auth.default(scopes=SCOPES)[0]
            if not self._credentials.valid:
                self._credentials.refresh(Request())  # type: ignore[no-untyped-call]
        except DefaultCredentialsError as error:
            raise UserError("nobody is logged in to Google Cloud here", fix=LOGIN) from error
        except GoogleAuthError as error:
            raise UserError(f"Google Cloud refuses your credentials: {error}", fix=LOGIN) from error
        return {"Authorization": f"Bearer {self._credentials.token}"}


def _endpoint(service: str, default: str) -> str:
    return os.environ.get(ENDPOINT + service, "").rstrip("/") or default

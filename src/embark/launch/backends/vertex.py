"""Vertex AI: the run as the CustomJob that `embark render` writes, found again by its label."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from embark.catalog import load_catalog
from embark.errors import EmbarkError, MissingPackage, UserError
from embark.formatting import pluralize, to_one_line
from embark.launch.backend import (
    CancelResult,
    LaunchBackend,
    LaunchRequest,
    LogLine,
    Reason,
    Replica,
    Resource,
    RunEvent,
    RunHandle,
    State,
    Status,
    time_ns,
    time_s,
)
from embark.launch.explanations import explain, explain_exit
from embark.launch.http import API_RETRY, HttpClient, Response
from embark.launch.shell import Notify, Shell
from embark.render.job import make_job
from embark.render.location import location_of
from embark.render.targets.vertex import custom_job_spec
from embark.render.yaml_text import plain
from embark.spec import RunSpec
from embark.store.errors import RetryPolicy

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

LABEL = "embark_run"
END_MARGIN_S = 120.0
SERVICE = "service"  # What Vertex AI calls itself among the tasks of a job.
STATES: dict[str, State] = {
    "QUEUED": "pending", "PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "succeeded",
    "PARTIALLY_SUCCEEDED": "succeeded", "FAILED": "failed", "EXPIRED": "failed", "CANCELLING": "pending",
    "CANCELLED": "gone", "PAUSED": "pending", "UPDATING": "running",
}
"""Of `JOB_STATE_…`."""
ACTIVE = ("QUEUED", "PENDING", "RUNNING", "CANCELLING", "PAUSED", "UPDATING")
_TASK = re.compile(r"workerpool(\d+)-(\d+)")
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
        def page(query: dict[str, Any]) -> Response:
            return self._checked(self._jobs.get(f"{self._jobs_url}?{urlencode(query)}"))

        found = _pages(page, "customJobs", {"filter": condition, "pageSize": 100})
        return sorted(found, key=lambda job: str(job.get("createTime", "")), reverse=True)

    def create(self, job: Mapping[str, Any], *, label: str) -> None:
        """`label`: a condition that finds it again: a request whose response was lost is not repeated blindly."""
        self._checked(self._jobs.change("POST", self._jobs_url, json.dumps(job).encode(), body_name="vertex_job.yaml",
                                        is_done=lambda: bool(self.find(label))))

    def change(self, method: str, path: str) -> None:
        self._checked(self._jobs.change(method, f"{self._url}/v1/{path}"))

    def entries(self, condition: str) -> Iterator[dict[str, Any]]:
        """Of Cloud Logging, by time."""
        def page(query: dict[str, Any]) -> Response:
            response = self._logging.change("POST", f"{self._logging_url}/v2/entries:list", json.dumps(query).encode(),
                                            body_name="the log filter")
            if not response.is_ok:
                raise self._logging.error(response, "return the log")
            return response

        return _pages(page, "entries", {"resourceNames": [f"projects/{self.project}"], "filter": condition,
                                        "orderBy": "timestamp asc", "pageSize": PAGE})

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


def _pages(page: Callable[[dict[str, Any]], Response], key: str, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        answer = page(query).json() or {}
        yield from answer.get(key) or ()
        if not answer.get("nextPageToken"):
            return
        query = {**query, "pageToken": str(answer["nextPageToken"])}


class Vertex(LaunchBackend):
    """The project and the region that a run is in."""

    late_s = 15.0  # Lines reach Cloud Logging after the job has ended.

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._apis: dict[tuple[str, str], VertexApi] = {}

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        project, region = spec.place.account, location_of(job).region
        where: dict[str, str | int] = {
            "context": f"projects/{project}/locations/{region}", "project": project, "region": region,
            "id": f"{job.name}-{int(time.time())}", "display_name": job.name, "num_nodes": job.num_nodes,
        }
        return RunHandle.of(job, "vertex", where)

    def check(self, request: LaunchRequest) -> None:
        if not request.spec.place.image:
            raise UserError("place.image is not set: Vertex AI has no image to pull",
                            fix="embark image SPEC --tag REGION-docker.pkg.dev/PROJECT/REPOSITORY/embark:1 --push "
                                "builds, pushes and sets it")
        found = self._api(request.handle).find(f'display_name="{request.handle.where["display_name"]}"')
        same = [job for job in found if state_of(job) in ACTIVE and LABEL in (job.get("labels") or {})]
        if same:
            raise UserError(f"{same[0]['name']} is already this run, and has not ended",
                            fix=f"embark status {request.handle.name}; embark cancel {request.handle.name} ends it; or "
                                "another --set name=…")

    def submit(self, request: LaunchRequest) -> None:
        handle = request.handle
        spec = plain(custom_job_spec(make_job(request.spec, load_catalog())))
        body = {"displayName": handle.where["display_name"], "labels": {LABEL: handle.where["id"]}, "jobSpec": spec}
        request.record(Resource(f"a CustomJob {handle.where['display_name']} in {handle.where['context']}",
                         f"embark cancel {handle.name}"))
        self._api(handle).create(body, label=self._label(handle))

    def status(self, handle: RunHandle) -> Status:
        job = self._job(handle)
        if job is None:
            return Status(state="gone", reason=f"Vertex AI has no job with the label {self._label(handle)} in "
                          f"{handle.where['context']}: it was deleted",
                          fix=f"its checkpoints and events are in {handle.run_uri}")
        events: list[RunEvent] = []
        try:
            events = self.events(handle)
        except EmbarkError as error:  # reading jobs does not imply reading logs
            self._notify(f"cannot read Vertex AI's own log of it: {error.what}")
        return status_of(job, events, num_nodes=int(handle.where["num_nodes"]), region=str(handle.where["region"]),
                         project=str(handle.where["project"]), run_uri=handle.run_uri)

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        """Of all replicas, as Cloud Logging has them."""
        seen: dict[str, None] = {}
        since, end_s = "", 0.0
        while True:
            job = self._job(handle)
            if job is None:
                raise UserError(f"Vertex AI no longer has {handle.name}, so it has no log of it",
                                fix="gcloud logging read 'resource.type=\"ml_job\"' finds old lines")
            is_ended = state_of(job) not in ACTIVE
            end_s = end_s or (time.monotonic() + self.late_s if is_ended else 0.0)
            newer = f' AND timestamp>="{since}"' if since else ""
            for entry in self._api(handle).entries(
                    f'{_of_job(job)} AND NOT resource.labels.task_name="{SERVICE}"{newer}'):
                mark = str(entry.get("insertId") or entry)
                if mark not in seen:
                    seen[mark] = None
                    since = str(entry.get("timestamp", since))
                    yield entry_line(entry)
                if len(seen) > 100_000:
                    del seen[next(iter(seen))]
            if not follow or (end_s and time.monotonic() >= end_s):
                return
            time.sleep(self.poll_s)

    def events(self, handle: RunHandle) -> list[RunEvent]:
        job = self._job(handle)
        if job is None:
            return []
        found = [entry_event(entry) for entry in self._api(handle).entries(
            f'{_of_job(job)} AND resource.labels.task_name="{SERVICE}"')]
        return [event for event in found if event is not None]

    def cancel(self, handle: RunHandle) -> CancelResult:
        """Vertex AI ends the replicas; then the job's record is deleted too."""
        remains = (handle.checkpoints,)
        api, job = self._api(handle), self._job(handle)
        if self._shell.is_dry:
            job = {"name": f"{handle.where['context']}/customJobs/ID", "state": "JOB_STATE_RUNNING"}
        if job is None:
            return CancelResult((), remains)
        name = str(job["name"])
        if state_of(job) in ACTIVE:
            api.change("POST", f"{name}:cancel")
            self._notify("stopping the replicas; a new launch resumes from its last complete checkpoint")
            limit_s = int(handle.where["grace_s"]) + END_MARGIN_S
            if not self._wait(handle, lambda: state_of(self._job(handle) or {}) not in ACTIVE, limit_s):
                return CancelResult((), remains, is_complete=False)
        api.change("DELETE", name)
        return CancelResult((f"CustomJob {name.rpartition('/')[2]}",), remains)

    def _job(self, handle: RunHandle) -> dict[str, Any] | None:
        return next(iter(self._api(handle).find(self._label(handle))), None)

    def _label(self, handle: RunHandle) -> str:
        return f"labels.{LABEL}={handle.where['id']}"

    def _api(self, handle: RunHandle) -> VertexApi:
        key = (str(handle.where["project"]), str(handle.where["region"]))
        if key not in self._apis:
            self._apis[key] = VertexApi(self._shell, project=key[0], region=key[1], notify=self._notify,
                                        retry=self._retry)
        return self._apis[key]


def _of_job(job: dict[str, Any]) -> str:
    """For Cloud Logging."""
    number = str(job["name"]).rpartition("/")[2]
    return f'resource.type="ml_job" AND resource.labels.job_id="{number}"'


def explain_message(message: str, *, region: str, project: str) -> Reason:
    """Of Google's message: the cause, followed by the message."""
    said = to_one_line(message)
    exited = re.search(r"exit(?:ed with a non-zero)? (?:status|code)(?: of)?:? ?(\d+)", said)
    if exited and exited[1] != "1":
        known = explain_exit(int(exited[1]))
        return Reason(f"{known.text} ({said})", known.fix)
    found = explain("vertex", said, region=region, project=project)
    return Reason(f"{found[0].text} ({said})", found[0].fix) if found else Reason(said)


def status_of(job: Mapping[str, Any], events: Sequence[RunEvent], *, num_nodes: int, region: str, project: str,
              run_uri: str) -> Status:
    """`job` is a CustomJob as the REST API writes it."""
    word = state_of(job)
    state = STATES.get(word, "pending")
    error = str((job.get("error") or {}).get("message", ""))
    taken = [event for event in events if re.search(r"[Pp]reempt|restart", event.text)]
    num_restarts = sum(bool(re.search(r"restart", event.text)) for event in taken)
    since_s = time_s(str(job.get("startTime") or job.get("createTime") or ""))
    num_up = num_nodes if state == "running" else 0
    replicas = tuple(Replica(f"replica {index}", index, "running") for index in range(num_up))

    def make(as_state: State, reason: Reason) -> Status:
        return Status(state=as_state, reason=reason.text, fix=reason.fix, replicas=replicas, since_s=since_s,
                      num_restarts=num_restarts)

    if word == "CANCELLING":
        return make("pending", Reason("being cancelled; its replicas are ending"))
    if state == "gone":
        return make("gone", Reason("cancelled", f"its checkpoints are in {run_uri}"))
    if state == "failed":
        found = explain_message(error or word, region=region, project=project)
        return make("failed", Reason(found.text, found.fix or "embark logs says why"))
    if state == "pending":
        return make("pending", _why_pending(word, error, events, region=region, project=project))
    if state == "running" and num_restarts:
        return make("running", Reason(f"restarted {pluralize(num_restarts, 'time')}: {taken[-1].text}"))
    return make(state, Reason(""))


def state_of(job: Mapping[str, Any]) -> str:
    return str(job.get("state", "")).removeprefix("JOB_STATE_")


def entry_line(entry: Mapping[str, Any]) -> LogLine:
    """Of Cloud Logging."""
    task = _task(entry)
    match = _TASK.fullmatch(task)
    index = None if match is None else (0 if match[1] == "0" else 1) + int(match[2])
    at_ns = time_ns(str(entry.get("timestamp", "")))
    return LogLine.of(at_ns, task or "vertex", _message(entry), index)


def entry_event(entry: Mapping[str, Any]) -> RunEvent | None:
    """What Vertex AI itself said; None of a line of the ranks."""
    if _task(entry) != SERVICE:
        return None
    severity = str(entry.get("severity", "DEFAULT"))
    return RunEvent(time_s(str(entry.get("timestamp", ""))) or 0.0, SERVICE, severity.capitalize(),
                    to_one_line(_message(entry)), severity in ("WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY"))


def _why_pending(word: str, error: str, events: Sequence[RunEvent], *, region: str, project: str) -> Reason:
    last = error or next((event.text for event in reversed(events)), "")
    found = explain_message(last, region=region, project=project) if last else Reason("")
    if found.fix:
        return found
    begins = {"QUEUED": "Vertex AI has not started it", "PAUSED": "paused"}.get(
        word, f"Vertex AI is provisioning machines in {region}")
    return Reason(f"{begins} ({found.text})" if found.text else begins)


def _task(entry: Mapping[str, Any]) -> str:
    labels = (entry.get("resource") or {}).get("labels") or {}
    return str(labels.get("task_name", ""))


def _message(entry: Mapping[str, Any]) -> str:
    payload = entry.get("jsonPayload") or {}
    return str(payload.get("message") or entry.get("textPayload") or "").rstrip("\n")


def _endpoint(service: str, default: str) -> str:
    return os.environ.get(ENDPOINT + service, "").rstrip("/") or default

"""Vertex AI: the run as the CustomJob that `embark render` writes, found again by its label."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
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
    ReadLines,
    Reason,
    Replica,
    Resource,
    RunEvent,
    RunHandle,
    State,
    Status,
    explain,
    explain_exit,
    time_ns,
    time_s,
)
from embark.launch.http import HttpClient
from embark.render.job import make_job
from embark.render.targets.vertex import custom_job_spec
from embark.spec import RunSpec
from embark.values import JsonDict, JsonMap

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

LABEL = "embark_run"
END_MARGIN_S = 120.0
SERVICE = "service"  # Vertex AI's name for itself among the tasks of a job.
STATES: dict[str, State] = {
    "QUEUED": "pending", "PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "succeeded",
    "PARTIALLY_SUCCEEDED": "succeeded", "FAILED": "failed", "EXPIRED": "failed", "CANCELLING": "pending",
    "CANCELLED": "gone", "PAUSED": "pending", "UPDATING": "running"
}
"""The state of a run by `JOB_STATE_…`."""
ACTIVE = ("QUEUED", "PENDING", "RUNNING", "CANCELLING", "PAUSED", "UPDATING")
_TASK = re.compile(r"workerpool(\d+)-(\d+)")
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
"""Begins the variables of endpoints for private access to Google's network, which gcloud reads too."""
LOGIN = "gcloud auth application-default login"
PAGE = 1000


def _pages(page: Callable[[JsonDict], Any], key: str, query: JsonDict) -> Iterator[JsonDict]:
    while True:
        answer = page(query) or {}
        yield from answer.get(key) or ()
        if not answer.get("nextPageToken"):
            return
        query = {**query, "pageToken": str(answer["nextPageToken"])}


class Vertex(LaunchBackend):
    """Runs as CustomJobs of a project and region."""

    poll_s = 10.0  # Cloud Logging takes 60 reads a minute from a project, and each look makes two.
    late_s = 15.0  # Lines reach Cloud Logging after the job has ended.
    _credentials: "Credentials | None" = None

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        project, region = spec.place.account, job.location.region
        where = {
            "context": f"projects/{project}/locations/{region}", "project": project, "region": region,
            "id": f"{job.name}-{int(time.time())}", "display_name": job.name, "num_nodes": job.num_nodes
        }
        return RunHandle.of(job, "vertex", where)

    def check(self, request: LaunchRequest) -> None:
        if not request.spec.place.image and not self._shell.is_dry:
            raise UserError("place.image is not set: Vertex AI has no image to pull",
                            "embark image SPEC --tag REGION-docker.pkg.dev/PROJECT/REPOSITORY/embark:1 --push "
                                "builds, pushes and sets it")
        found = self._find(request.handle, f'display_name="{request.handle.where["display_name"]}"')
        same = [job for job in found if state_of(job) in ACTIVE and LABEL in (job.get("labels") or {})]
        if same:
            raise self._exists(str(same[0]["name"]), request.handle)

    def submit(self, request: LaunchRequest) -> None:
        handle = request.handle
        spec = custom_job_spec(make_job(request.spec, load_catalog()))
        body = {"displayName": handle.where["display_name"], "labels": {LABEL: handle.where["id"]}, "jobSpec": spec}
        request.record(Resource(f"a CustomJob {handle.where['display_name']} in {handle.where['context']}",
                         f"embark cancel {handle.name}"))
        # A request whose response was lost is not repeated if its job is found again.
        self._call(handle, "POST", f"{handle.where['context']}/customJobs", json.dumps(body).encode(),
                   is_done=lambda: self._job(handle) is not None)

    def status(self, handle: RunHandle) -> Status:
        job = self._job(handle)
        if job is None:
            return Status("gone", f"Vertex AI has no job with the label {self._label(handle)} in "
                          f"{handle.where['context']}: it was deleted",
                          f"its checkpoints and events are in {handle.run_uri}")
        events: list[RunEvent] = []
        try:
            events = self.events(handle)
        except EmbarkError as error:  # reading jobs does not imply reading logs
            self._notify(f"cannot read Vertex AI's own log of it: {error.what}")
        return status_of(job, events, num_nodes=handle.where["num_nodes"], region=handle.where["region"],
                         project=handle.where["project"], run_uri=handle.run_uri)

    def log_reader(self, handle: RunHandle) -> ReadLines:
        """Read the lines of all replicas, as Cloud Logging has them."""
        seen, since = set[str](), ""

        def read() -> Iterator[LogLine]:
            nonlocal since
            newer = f' AND timestamp>="{since}"' if since else ""
            for entry in self._entries(handle, f'NOT resource.labels.task_name="{SERVICE}"{newer}'):
                if (mark := str(entry.get("insertId") or entry)) not in seen:
                    seen.add(mark)
                    since = str(entry.get("timestamp", since))
                    yield entry_line(entry)

        return read

    def events(self, handle: RunHandle) -> list[RunEvent]:
        return [entry_event(entry) for entry in self._entries(handle, f'resource.labels.task_name="{SERVICE}"')]

    def cancel(self, handle: RunHandle) -> CancelResult:
        """Vertex AI ends the replicas; then the job's record is deleted too."""
        remains = (handle.checkpoints,)
        job = self._job(handle)
        if self._shell.is_dry:
            job = {"name": f"{handle.where['context']}/customJobs/ID", "state": "JOB_STATE_RUNNING"}
        if job is None:
            return CancelResult((), remains)
        name = str(job["name"])
        if state_of(job) in ACTIVE:
            self._call(handle, "POST", f"{name}:cancel")
            self._notify("stopping the replicas; a new launch resumes from its last complete checkpoint")
            limit_s = handle.where["grace_s"] + END_MARGIN_S
            if not self._wait(handle, lambda: state_of(self._job(handle) or {}) not in ACTIVE, limit_s):
                return CancelResult((), remains, is_complete=False)
        self._call(handle, "DELETE", name)
        return CancelResult((f"CustomJob {name.rpartition('/')[2]}",), remains)

    def _job(self, handle: RunHandle) -> JsonDict | None:
        return next(iter(self._find(handle, self._label(handle))), None)

    def _label(self, handle: RunHandle) -> str:
        return f"labels.{LABEL}={handle.where['id']}"

    def _find(self, handle: RunHandle, condition: str) -> list[JsonDict]:
        """Return jobs that meet the condition of a list filter, newest first."""
        path = f"{handle.where['context']}/customJobs"
        found = _pages(lambda query: self._call(handle, "GET", f"{path}?{urlencode(query)}"), "customJobs",
                       {"filter": condition, "pageSize": 100})
        return sorted(found, key=lambda job: str(job.get("createTime", "")), reverse=True)

    def _call(self, handle: RunHandle, method: str, path: str, body: bytes = b"",
              is_done: Callable[[], bool] | None = None) -> Any:
        """Return the JSON of a response of Vertex AI; raises what it refused."""
        region, project = handle.where["region"], handle.where["project"]
        url = _endpoint("AIPLATFORM", f"https://{region}-aiplatform.googleapis.com")
        client = self._client("Vertex AI", url, LOGIN)
        response = client.request(method, f"{url}/v1/{path}", body, body_name="vertex_job.yaml", is_done=is_done)
        if response.is_ok:
            return response.json()
        try:
            said = str(response.json()["error"]["message"])
        except (KeyError, TypeError):
            raise client.error(response, "accept it") from None
        reason = explain_message(said, region=region, project=project)
        raise UserError(f"Vertex AI refused it: {reason.text}", reason.fix)

    def _entries(self, handle: RunHandle, condition: str) -> Iterator[JsonDict]:
        """Return the job's entries in Cloud Logging, by time."""
        job = self._job(handle)
        if job is None:
            return iter(())
        number = str(job["name"]).rpartition("/")[2]
        condition = f'resource.type="ml_job" AND resource.labels.job_id="{number}" AND {condition}'
        url = _endpoint("LOGGING", "https://logging.googleapis.com")
        client = self._client("Cloud Logging", url, f"{LOGIN}; reading logs needs roles/logging.viewer")

        def page(query: JsonDict) -> Any:
            return client.request("POST", f"{url}/v2/entries:list", json.dumps(query).encode(),
                                  body_name="the log filter", what="return the log").json()

        return _pages(page, "entries", {"resourceNames": [f"projects/{handle.where['project']}"], "filter": condition,
                                        "orderBy": "timestamp asc", "pageSize": PAGE})

    def _client(self, name: str, url: str, login_fix: str) -> HttpClient:
        return HttpClient(
            shell=self._shell, notify=self._notify, retry=self._retry, name=name, login_fix=login_fix,
            away_fix=f"check the network: {url}", headers=lambda: self._headers(url),
            # 429 is a quota, and 403 a permission: both are explained, and not retried.
            unavailable_codes=(500, 502, 503, 504), login_codes=(401,))

    def _headers(self, url: str) -> dict[str, str]:
        if url.startswith("http://"):  # a token is not sent unencrypted
            return {}
        try:
            import google.auth
            from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
            from google.auth.transport.requests import Request
        except ImportError as error:
            raise MissingPackage("Google's credentials library is not installed",
                                 "pip install 'embark-rec[vertex]'") from error
        try:
            if self._credentials is None:
                self._credentials = google.auth.default(scopes=SCOPES)[0]
            if not self._credentials.valid:
                self._credentials.refresh(Request())  # type: ignore[no-untyped-call]
        except DefaultCredentialsError as error:
            raise UserError("nobody is logged in to Google Cloud here", LOGIN) from error
        except GoogleAuthError as error:
            raise UserError(f"Google Cloud refuses your credentials: {error}", LOGIN) from error
        return {"Authorization": f"Bearer {self._credentials.token}"}


def explain_message(message: str, *, region: str, project: str) -> Reason:
    """Return the cause that Google's message names, followed by the message."""
    said = to_one_line(message)
    exited = re.search(r"exit(?:ed with a non-zero)? (?:status|code)(?: of)?:? ?(\d+)", said)
    if exited and exited[1] != "1":
        known = explain_exit(int(exited[1]))
        return Reason(f"{known.text} ({said})", known.fix)
    found = explain("vertex", said, region=region, project=project)
    return Reason(f"{found[0].text} ({said})", found[0].fix) if found else Reason(said)


def status_of(job: JsonMap, events: Sequence[RunEvent], *, num_nodes: int, region: str, project: str,
              run_uri: str) -> Status:
    """`job` is a CustomJob as the REST API writes it."""
    word = state_of(job)
    state = STATES.get(word, "pending")
    error = str((job.get("error") or {}).get("message", ""))
    taken = [event for event in events if re.search(r"[Pp]reempt|restart", event.text)]
    num_restarts = sum(bool(re.search(r"restart", event.text)) for event in taken)
    since_s = time_s(str(job.get("startTime") or job.get("createTime") or ""))
    num_up = num_nodes if state == "running" else 0
    status = Status(
        state, replicas=tuple(Replica(f"replica {index}", index, "running") for index in range(num_up)),
        since_s=since_s, num_restarts=num_restarts)
    if word == "CANCELLING":
        return status.become("pending", "being cancelled; its replicas are ending")
    if state == "gone":
        return status.become("gone", "cancelled", f"its checkpoints are in {run_uri}")
    if state == "failed":
        found = explain_message(error or word, region=region, project=project)
        return status.become("failed", found.text, found.fix or "embark logs says why")
    if state == "pending":
        return status.become("pending", *_why_pending(word, error, events, region=region, project=project))
    if state == "running" and num_restarts:
        return status.become("running", f"restarted {pluralize(num_restarts, 'time')}: {taken[-1].text}")
    return status


def state_of(job: JsonMap) -> str:
    return str(job.get("state", "")).removeprefix("JOB_STATE_")


def entry_line(entry: JsonMap) -> LogLine:
    """Return an entry of Cloud Logging as a line of a replica."""
    task = _task(entry)
    match = _TASK.fullmatch(task)
    index = None if match is None else (0 if match[1] == "0" else 1) + int(match[2])
    return LogLine.of(time_ns(str(entry.get("timestamp", ""))), task or "vertex", _message(entry), index)


def entry_event(entry: JsonMap) -> RunEvent:
    """Return an entry of Cloud Logging as a message of Vertex AI itself."""
    severity = str(entry.get("severity", "DEFAULT"))
    return RunEvent(time_s(str(entry.get("timestamp", ""))) or 0.0, SERVICE, severity.capitalize(),
                    _message(entry), severity in ("WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY"))


def _why_pending(word: str, error: str, events: Sequence[RunEvent], *, region: str, project: str) -> Reason:
    last = error or next((event.text for event in reversed(events)), "")
    found = explain_message(last, region=region, project=project) if last else Reason("")
    if found.fix:
        return found
    begins = {"QUEUED": "Vertex AI has not started it", "PAUSED": "paused"}.get(
        word, f"Vertex AI is provisioning machines in {region}")
    return Reason(f"{begins} ({found.text})" if found.text else begins)


def _task(entry: JsonMap) -> str:
    labels = (entry.get("resource") or {}).get("labels") or {}
    return str(labels.get("task_name", ""))


def _message(entry: JsonMap) -> str:
    payload = entry.get("jsonPayload") or {}
    return str(payload.get("message") or entry.get("textPayload") or "").rstrip("\n")


def _endpoint(service: str, default: str) -> str:
    return os.getenv(ENDPOINT + service, "").rstrip("/") or default

"""Vertex AI: the run as the CustomJob that `embark render` writes, found again by its label."""

import time
from collections.abc import Iterator
from typing import Any

from embark.catalog import load_catalog
from embark.errors import EmbarkError, UserError
from embark.launch.backend import (
    CancelResult,
    LaunchRequest,
    LogLine,
    Resource,
    RunEvent,
    RunHandle,
    Status,
    checkpoints_of,
)
from embark.launch.backends.base import BaseBackend
from embark.launch.backends.vertex.api import VertexApi
from embark.launch.backends.vertex.status import ACTIVE, SERVICE, entry_event, entry_line, state_of, status_of
from embark.launch.run_registry import now_s
from embark.render.job import make_job
from embark.render.location import location_of
from embark.render.settings import grace_s
from embark.render.targets.vertex import custom_job_spec
from embark.render.yaml_text import plain
from embark.spec import RunSpec
from embark.store import run_uri

LABEL = "embark_run"
END_MARGIN_S = 120.0


class Vertex(BaseBackend):
    """The project and the region that a run is in."""

    late_s = 15.0
    """Lines reach Cloud Logging after the job has ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._apis: dict[tuple[str, str], VertexApi] = {}

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        project, region = spec.place.account, location_of(job).region
        where: dict[str, str | int] = {
            "context": f"projects/{project}/locations/{region}", "project": project, "region": region,
            "id": f"{job.name}-{int(now_s())}", "display_name": job.name, "num_nodes": job.num_nodes,
            "grace_s": grace_s(job),
        }
        return RunHandle(name=spec.name, backend="vertex", where=where, title=job.title,
                         run_uri=run_uri(spec.store.root, spec.name), usd_per_hour=job.usd_per_hour)

    def check(self, request: LaunchRequest) -> None:
        if not request.spec.place.image:
            raise UserError("place.image is not set: Vertex AI has no image to pull",
                            fix="build the Dockerfile that embark render writes, push it to Artifact Registry, and "
                                "--set place.image=REGION-docker.pkg.dev/PROJECT/REPOSITORY/embark@sha256:…")
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
        remains = (checkpoints_of(handle),)
        api, job = self._api(handle), self._job(handle)
        if self._shell.is_dry:
            job = {"name": f"{handle.where['context']}/customJobs/ID", "state": "JOB_STATE_RUNNING"}
        if job is None:
            return CancelResult((), remains)
        name = str(job["name"])
        if state_of(job) in ACTIVE:
            api.cancel(name)
            self._notify("the replicas were told to end; the run resumes from its last complete checkpoint")
            if not self._wait(handle, lambda: self._has_ended(handle), int(handle.where["grace_s"]) + END_MARGIN_S):
                return CancelResult((), remains, is_complete=False)
        api.delete(name)
        return CancelResult((f"CustomJob {name.rpartition('/')[2]}",), remains)

    def _has_ended(self, handle: RunHandle) -> bool:
        job = self._job(handle)
        return job is None or state_of(job) not in ACTIVE

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


"""Vertex AI's REST API for custom jobs, and Cloud Logging's for entries, over HTTP: what a launch asks of them.

What Google's scheduler would do with a job, a test does: `move`, `log`.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from http_servers import HttpHandler, HttpServer

STATES = ("UNSPECIFIED", "QUEUED", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLING", "CANCELLED")


class VertexRest(HttpServer):
    """One server, which keeps its port while it is away."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.entries: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.refusal: tuple[int, str, str] | None = None
        """HTTP code, status and message for each job that is to be made."""
        self.login_error = False
        self.num_lost_answers = 0
        """So many jobs are made and the answer is an error."""
        self.cancel_s = 0.1
        super().__init__(_Handler)

    def create(self, parent: str, given: dict[str, Any]) -> dict[str, Any]:
        name = f"{parent}/customJobs/{1000 + len(self.jobs)}"
        self.jobs[name] = {**given, "name": name, "state": "JOB_STATE_QUEUED", "createTime": _now()}
        return self.jobs[name]

    def move(self, state: str, error: str = "") -> None:
        """The newest job."""
        job = list(self.jobs.values())[-1]
        job["state"] = f"JOB_STATE_{state}"
        if state == "RUNNING":
            job["startTime"] = _now()
        if error:
            job["error"] = {"code": 8, "message": error}

    def log(self, task: str, text: str, *, severity: str = "INFO") -> None:
        number = list(self.jobs)[-1].rpartition("/")[2]
        self.entries.append({
            "insertId": f"e{len(self.entries)}", "timestamp": _now(), "severity": severity,
            "resource": {"type": "ml_job", "labels": {"job_id": number, "task_name": task, "project_id": "p"}},
            "jsonPayload": {"message": text}})


class _Handler(HttpHandler):
    owner: VertexRest

    def handle_any(self) -> None:
        split = urlsplit(self.path)
        body = self.body()
        path = unquote(split.path)
        self.owner.requests.append(f"{self.command} {path}")
        if self.owner.login_error:
            return self._refuse(401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
        if path == "/v2/entries:list":
            return self.answer_json(200, self._entries(json.loads(body)))
        if path.endswith(":cancel"):
            return self._cancel(path[4:].removesuffix(":cancel"))
        if path.endswith("/customJobs"):
            if self.command == "POST":
                return self._create(path[4:].removesuffix("/customJobs"), json.loads(body))
            condition = parse_qs(split.query).get("filter", [""])[0]
            found = [job for job in self.owner.jobs.values() if _fits(job, condition)]
            return self.answer_json(200, {"customJobs": found})
        name = path[4:]
        if name not in self.owner.jobs:
            return self._refuse(404, "NOT_FOUND", f"The CustomJob does not exist: {name}")
        if self.command == "DELETE":
            del self.owner.jobs[name]
            return self.answer_json(200, {"name": f"{name}/operations/1", "done": True})
        return self.answer_json(200, self.owner.jobs[name])

    do_GET = do_POST = do_DELETE = handle_any  # noqa: N815

    def _create(self, parent: str, given: dict[str, Any]) -> None:
        if self.owner.refusal:
            return self._refuse(*self.owner.refusal)
        made = self.owner.create(parent, given)
        if self.owner.num_lost_answers:
            self.owner.num_lost_answers -= 1
            return self._refuse(503, "UNAVAILABLE", "The service is currently unavailable.")
        return self.answer_json(200, made)

    def _cancel(self, name: str) -> None:
        self.owner.jobs[name]["state"] = "JOB_STATE_CANCELLING"

        def end() -> None:
            time.sleep(self.owner.cancel_s)
            self.owner.jobs[name]["state"] = "JOB_STATE_CANCELLED"

        threading.Thread(target=end, daemon=True).start()
        self.answer_json(200, {})

    def _entries(self, requests: dict[str, Any]) -> dict[str, Any]:
        """Two a page, so that pages are turned."""
        condition = requests["filter"]
        found = []
        for entry in self.owner.entries:
            labels = entry["resource"]["labels"]
            job = re.search(r'job_id="(\d+)"', condition)
            is_service = labels["task_name"] == "service"
            wants_service = "NOT resource.labels.task_name" not in condition
            since = re.search(r'timestamp>="([^"]+)"', condition)
            if job and labels["job_id"] == job[1] and is_service == wants_service and (
                    not since or entry["timestamp"] >= since[1]):
                found.append(entry)
        begin = int(requests.get("pageToken") or 0)
        more = {"nextPageToken": str(begin + 2)} if len(found) > begin + 2 else {}
        return {"entries": found[begin:begin + 2], **more}

    def _refuse(self, code: int, status: str, message: str) -> None:
        self.answer_json(code, {"error": {"code": code, "status": status, "message": message}})


@contextlib.contextmanager
def vertex_rest() -> Iterator[VertexRest]:
    api = VertexRest()
    try:
        yield api
    finally:
        api.down()


def _fits(job: dict[str, Any], condition: str) -> bool:
    label = re.fullmatch(r"labels\.(\w+)=([\w-]+)", condition)
    if label:
        return bool(job.get("labels", {}).get(label[1]) == label[2])
    named = re.fullmatch(r'display_name="([^"]+)"', condition)
    assert named, f"a filter that the service does not know: {condition}"
    return bool(job.get("displayName") == named[1])


def _now() -> str:
    now_ns = time.time_ns()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 10**9)) + f".{now_ns % 10**9:09d}Z"

"""A Ray head's Jobs and state API over HTTP, small. What Ray would do with a job, a test does."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from http_servers import HttpHandler, HttpServer


class RayHead(HttpServer):
    """One server, which keeps its port while it is away."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.actors: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}
        self.packages: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        """Those that are let in; empty: all are."""
        super().__init__(_Handler)

    def node(self, **resources: float) -> None:
        self.nodes.append({"node_id": f"n{len(self.nodes)}", "node_ip": f"10.0.0.{len(self.nodes)}", "state": "ALIVE",
                           "resources_total": resources, "end_time_ms": 0})

    def move(self, status: str, **more: Any) -> None:
        """The newest job."""
        job = list(self.jobs.values())[-1]
        job.update(status=status, **{"job_id": "02000000", **more})

    def files(self) -> dict[str, str]:
        """Of the newest job's package."""
        uri = list(self.jobs.values())[-1]["runtime_env"]["working_dir"]
        with zipfile.ZipFile(io.BytesIO(self.packages[uri.removeprefix("gcs://")])) as archive:
            return {name: archive.read(name).decode() for name in archive.namelist()}


class _Handler(HttpHandler):
    owner: RayHead

    def handle_any(self) -> None:
        split, head = urlsplit(self.path), self.owner
        body = self.body()
        head.requests.append(f"{self.command} {split.path}")
        if head.tokens and self.headers.get("Authorization") not in head.tokens:
            return self.answer(401, b"no")
        parts = split.path.strip("/").split("/")
        if parts[:2] == ["api", "v0"]:
            found = {"nodes": head.nodes, "actors": head.actors, "placement_groups": head.groups}[parts[2]]
            query = parse_qs(split.query)
            for key, value in zip(query.get("filter_keys", ()), query.get("filter_values", ()), strict=True):
                found = [one for one in found if one.get(key) == value]
            return self.answer_json(200, {"result": True, "data": {"result": {"result": found}}})
        if parts[:3] == ["api", "packages", "gcs"]:
            head.packages[parts[3]] = body
            return self.answer(200, b"")
        return self._jobs(parts[2:], body)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815

    def _jobs(self, rest: list[str], body: bytes) -> None:
        jobs = self.owner.jobs
        if not rest and self.command == "GET":
            return self.answer_json(200, list(jobs.values()))
        if not rest:
            given = json.loads(body)
            if given["submission_id"] in jobs:
                return self.answer(500, b"ValueError: Job with submission_id already exists.")
            jobs[given["submission_id"]] = {**given, "status": "PENDING", "start_time": 1_790_000_000_000}
            return self.answer_json(200, {"submission_id": given["submission_id"]})
        if rest[0] not in jobs:
            return self.answer(404, b"Job does not exist")
        if rest[1:] == ["logs"]:
            return self.answer_json(200, {"logs": self.owner.logs.get(rest[0], "")})
        if rest[1:] == ["stop"]:
            jobs[rest[0]].update(status="STOPPED", end_time=1_790_000_060_000)
            return self.answer_json(200, {"stopped": True})
        if self.command == "DELETE":
            del jobs[rest[0]]
            return self.answer_json(200, {"deleted": True})
        return self.answer_json(200, jobs[rest[0]])


@contextlib.contextmanager
def ray_head() -> Iterator[RayHead]:
    head = RayHead()
    try:
        yield head
    finally:
        head.down()

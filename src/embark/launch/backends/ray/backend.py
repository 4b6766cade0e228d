"""An existing Ray cluster: the rendered Ray Train script, submitted to its Jobs API."""

import hashlib
import io
import json
import os
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Mistake, SpecError, UserError
from embark.formatting import format_duration, pluralize
from embark.launch.backend import (
    CancelResult,
    LaunchBackend,
    LaunchRequest,
    LogLine,
    Resource,
    RunEvent,
    RunHandle,
    Status,
)
from embark.launch.backends.ray.status import can_hold, events_of, line_of, resources_text, status_of
from embark.launch.http import HttpClient
from embark.render.job import dns_label, make_job
from embark.render.settings import grace_s
from embark.render.targets.kubernetes import RAY_SCRIPT, ray_script
from embark.spec import RunSpec, to_toml
from embark.spec.train import batch_mistakes
from embark.store import run_uri
from embark.store.run_dir import SPEC

DASHBOARD = "http://127.0.0.1:8265"
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Variables that Ray's own commands read.
GRACE_S = 120  # For a last checkpoint, where the spec says nothing else: the machines stay.
END_MARGIN_S = 30.0
BYTES_PER_POLL_S = 1 << 20  # Ray returns the complete log each time: a long one is read less often.
ACTIVE = ("PENDING", "RUNNING")
RUN = "embark_run"  # The key of a job's metadata that has the run's name.


def address() -> str:
    """Of the cluster that Ray's own commands would go to; empty where there is none."""
    for variable in ADDRESSES:
        value = os.environ.get(variable, "").rstrip("/")
        if value.startswith(("http://", "https://")):
            return value
        if value in ("auto", "local"):
            return DASHBOARD
        if value:
            raise UserError(f"{variable}={value} is not where a Ray cluster takes jobs",
                            fix=f"export {variable}=http://HEAD:8265, the address of its dashboard")
    started = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    return DASHBOARD if started.exists() else ""


class Ray(LaunchBackend):
    """The cluster at `address()` when a run is launched; afterwards the one that the run is in."""

    poll_s = 2.0

    def handle_of(self, spec: RunSpec) -> RunHandle:
        where = address()
        if not where:
            raise UserError("no Ray cluster is set",
                            fix="export RAY_ADDRESS=http://HEAD:8265; ray start --head starts one here; or name a "
                                "place.machine, and it goes to Kubernetes as a RayJob")
        share, title, price = self._share(spec, where)
        identity = f"embark-{dns_label(spec.name)}-{int(time.time())}"
        found: dict[str, str | int] = {"context": where, "id": identity, **share}
        return RunHandle(name=spec.name, backend="ray", where=found, title=title,
                         run_uri=run_uri(spec.store.root, spec.name), usd_per_hour=price)

    def check(self, request: LaunchRequest) -> None:
        handle = request.handle
        jobs = self._read(handle, "api/jobs/") or []
        same = [job for job in jobs if (job.get("metadata") or {}).get(RUN) == handle.name
                and job.get("status") in ACTIVE]
        if same:
            raise UserError(f"{handle.name} is already on the Ray cluster {handle.where['context']}: "
                            f"{same[0].get('submission_id')}",
                            fix=f"embark status {handle.name}; embark cancel {handle.name} ends it; or another "
                                "--set name=…")
        if self._shell.is_dry:
            return
        where, num_machines = handle.where, int(handle.where["num_machines"])
        gpus = {"GPU": float(where["num_processes"])} if where["use_gpu"] else {}
        wanted = {"CPU": float(where["num_cpus"]), **gpus}
        num_there = can_hold(self._nodes(handle), wanted)
        if num_there < num_machines:
            self._notify(f"the cluster has {pluralize(num_there, 'machine')} with {resources_text(wanted)}, and the "
                         f"run needs {num_machines}: it waits for them")

    def submit(self, request: LaunchRequest) -> None:
        handle, client = request.handle, self._client(request.handle)
        where, identity = handle.where["context"], str(handle.where["id"])
        package = _package(request.spec, handle)
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"
        job = {
            "entrypoint": f"python {RAY_SCRIPT}", "submission_id": identity, "metadata": {RUN: handle.name},
            "runtime_env": {"working_dir": f"gcs://{name}", "env_vars": {
                # So long after the notice Ray kills the job.
                "RAY_JOB_STOP_WAIT_TIME_S": str(handle.where["grace_s"]),
                "EMBARK_GRACE_S": str(max(1, int(handle.where["grace_s"]) - 10)),
            }},
        }
        request.record(Resource(f"the job {identity} of the Ray cluster {where}", f"embark cancel {handle.name}"))
        sent = client.change("PUT", f"{where}/api/packages/gcs/{name}", package, body_name=f"{RAY_SCRIPT} and {SPEC}",
                          content_type="application/octet-stream")
        if not sent.is_ok:
            raise client.error(sent, "accept the run's files")
        response = client.change("POST", f"{where}/api/jobs/", json.dumps(job).encode(), body_name="the job")
        # A request that is repeated because its response was lost finds itself there already.
        if not response.is_ok and not self._job(handle):
            raise client.error(response, "accept the job")

    def status(self, handle: RunHandle) -> Status:
        job = self._job(handle)
        if job is None:
            return Status(state="gone", reason=f"the Ray cluster {handle.where['context']} has no "
                          f"{handle.where['id']}: it was deleted, or the cluster was restarted",
                          fix=f"its checkpoints and events are in {handle.run_uri}")
        actors, groups = self._of_job(handle, job, "actors"), self._of_job(handle, job, "placement_groups")
        return status_of(job, actors, groups, self._nodes(handle), num_machines=int(handle.where["num_machines"]),
                         name=handle.name, run_uri=handle.run_uri)

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        num_seen, stamped = 0, dict[str, None]()
        while True:
            is_over = not follow or self.status(handle).has_ended
            client = self._client(handle)
            response = client.get(f"{self._url(handle)}/logs")
            if response.is_missing:
                raise UserError(f"the Ray cluster has no log of {handle.name}", fix=f"embark status {handle.name}")
            if not response.is_ok:
                raise client.error(response, "return its log")
            text = str((response.json() or {}).get("logs", ""))
            # The last line may not be complete yet.
            complete = text if is_over else text[:text.rfind("\n") + 1]
            for raw in complete[num_seen:].splitlines():
                line = line_of(raw)
                # Two of Ray's nodes on one machine both pass on what is written there.
                if line.time_ns and raw in stamped:
                    continue
                stamped[raw] = None
                if len(stamped) > 10_000:
                    del stamped[next(iter(stamped))]
                yield line
            num_seen = len(complete)
            if is_over:
                return
            time.sleep(max(self.poll_s, len(response.body) / BYTES_PER_POLL_S))

    def events(self, handle: RunHandle) -> list[RunEvent]:
        job = self._job(handle)
        return [] if job is None else events_of(job, self._of_job(handle, job, "actors"), self._nodes(handle))

    def cancel(self, handle: RunHandle) -> CancelResult:
        """The script passes SIGTERM on to the ranks, which save and end; Ray waits for it as long as their grace is."""
        client, identity = self._client(handle), str(handle.where["id"])
        remains = (handle.checkpoints,
                   Resource(f"the Ray cluster {handle.where['context']}", "not created by embark launch"))
        record = Resource(f"the record and the log of Ray job {identity}", f"embark cancel {handle.name} again")
        job = self._job(handle)
        if job is None and not self._shell.is_dry:
            return CancelResult((), remains)
        if self._shell.is_dry or (job is not None and job.get("status") in ACTIVE):
            response = client.change("POST", f"{self._url(handle)}/stop")
            if not response.is_ok:
                raise client.error(response, "stop it")
            grace_s = int(handle.where["grace_s"])
            self._notify(f"stopping the ranks; they save a last checkpoint, within {format_duration(grace_s)}")
            is_complete = self._wait(handle, lambda: (self._job(handle) or {}).get("status") not in ACTIVE,
                                     grace_s + END_MARGIN_S)
            # Not deleted at once: Ray still writes how it ended, and would create it anew.
            return CancelResult((f"Ray job {identity}",) if is_complete else (), (record, *remains), is_complete)
        response = client.change("DELETE", self._url(handle))
        if not response.is_ok and not response.is_missing:
            raise client.error(response, "delete its record")
        return CancelResult((f"the record of Ray job {identity}",), remains)

    def _share(self, spec: RunSpec, where: str) -> tuple[dict[str, str | int], str, float | None]:
        """What each machine gives, the run's title, and its price where its machine is named."""
        place = spec.place
        if place.machine or place.cloud:
            job = make_job(spec, load_catalog())
            share: dict[str, str | int] = {
                "num_machines": job.num_nodes, "num_processes": job.num_processes,
                "num_cpus": job.num_cpus or job.num_processes, "use_gpu": 1, "grace_s": grace_s(job)}
            return share, job.title, job.usd_per_hour
        num_gpus, num_cpus = 0, 1
        if not self._shell.is_dry:
            found = self._client_at(where).get(f"{where}/api/v0/nodes?{_query()}").json()
            nodes = [node.get("resources_total", {}) for node in _rows(found) if node.get("state") == "ALIVE"]
            num_gpus = 0 if place.device == "cpu" else _nth(nodes, "GPU", place.max_nodes)
            num_cpus = max(1, _nth(nodes, "CPU", place.max_nodes))
        num_processes = max(1, num_gpus)
        if mistakes := list(_mistakes(spec, num_gpus, num_processes, is_known=not self._shell.is_dry)):
            raise SpecError(mistakes)
        share = {"num_machines": place.max_nodes, "num_processes": num_processes, "num_cpus": num_cpus,
                 "use_gpu": int(num_gpus > 0), "grace_s": int(place.grace_s or GRACE_S)}
        is_unknown = self._shell.is_dry and place.device != "cpu"
        ranks = "a rank for each GPU" if is_unknown else pluralize(place.max_nodes * num_processes, "rank")
        return share, f"{spec.name} on {pluralize(place.max_nodes, 'machine')} of a Ray cluster: {ranks}", None

    def _job(self, handle: RunHandle) -> Mapping[str, Any] | None:
        """None where it does not exist. If a record is deleted before Ray's monitor, which looks once a second, has
        seen the job's end, the monitor writes another: failed, and without the job's metadata."""
        found = self._read(handle, f"api/jobs/{quote(str(handle.where['id']))}")
        is_ours = isinstance(found, dict) and (found.get("metadata") or {}).get(RUN) == handle.name
        return found if is_ours else None

    def _of_job(self, handle: RunHandle, job: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
        """Those of its driver; none before that has begun. Older clusters do not report them."""
        number = job.get("job_id")
        if not number:
            return []
        key = "creator_job_id" if kind == "placement_groups" else "job_id"
        with suppress(EmbarkError):
            return _rows(self._read(handle, f"api/v0/{kind}?{_query({key: str(number)})}"))
        return []

    def _nodes(self, handle: RunHandle) -> list[Mapping[str, Any]]:
        with suppress(EmbarkError):
            return _rows(self._read(handle, f"api/v0/nodes?{_query()}"))
        return []

    def _read(self, handle: RunHandle, path: str) -> Any:
        """None where it does not exist."""
        client = self._client(handle)
        response = client.get(f"{handle.where['context']}/{path}")
        if response.is_missing:
            return None
        if not response.is_ok:
            raise client.error(response, "return its state")
        return response.json()

    def _url(self, handle: RunHandle) -> str:
        return f"{handle.where['context']}/api/jobs/{quote(str(handle.where['id']))}"

    def _client(self, handle: RunHandle) -> HttpClient:
        return self._client_at(str(handle.where["context"]))

    def _client_at(self, address: str) -> HttpClient:
        return HttpClient(
            shell=self._shell, notify=self._notify, retry=self._retry, headers=_headers,
            name=f"the Ray cluster {address}",
            away_fix=f"check that it is up and its dashboard's port open: curl {address}/api/version",
            login_fix="export RAY_AUTH_TOKEN, or RAY_JOB_HEADERS='{\"Authorization\": \"Bearer …\"}'")


def _package(spec: RunSpec, handle: RunHandle) -> bytes:
    """The script and the spec, as Ray takes a working directory; the same bytes for the same run."""
    where = handle.where
    script = ray_script(
        name=str(where["id"]), spec_path=SPEC, num_machines=int(where["num_machines"]),
        num_processes=int(where["num_processes"]), num_cpus=int(where["num_cpus"]), use_gpu=bool(where["use_gpu"]))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in ((RAY_SCRIPT, script), (SPEC, to_toml(spec, only_set=True))):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
    return packed.getvalue()


def _mistakes(spec: RunSpec, num_gpus: int, num_processes: int, *, is_known: bool) -> Iterator[Mistake]:
    """Of a run on machines that no catalog describes."""
    place, store, data = spec.place, spec.store, spec.data
    if is_known and place.device == "cuda" and not num_gpus:
        yield Mistake("", "place.device", "cuda", "the Ray cluster has not so many machines with GPUs",
                      'add them, or set place.device = "cpu"')
    if "://" not in store.root and not store.root.startswith("/"):
        yield Mistake("", "store.root", store.root, "is a folder beside the run, which Ray removes with it",
                      "set it to s3://BUCKET/runs, or to a folder that every machine of the cluster sees, from /")
    if data.kind != "synthetic" and data.path and "://" not in data.path and not data.path.startswith("/"):
        yield Mistake("", "data.path", data.path, "is beside this command, and not beside the run",
                      "name it from /, as the cluster's machines see it")
    yield from batch_mistakes(spec.train.batch_size, place.max_nodes * num_processes)


def _nth(nodes: list[Mapping[str, float]], name: str, count: int) -> int:
    """What each of the `count` best machines has; where there are fewer, what each of those has that have any."""
    best = sorted((int(node.get(name, 0)) for node in nodes), reverse=True)[:count]
    return min((value for value in best if value), default=0)


def _headers() -> dict[str, str]:
    """Read for each request, and never stored: they are credentials."""
    found: dict[str, str] = {}
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        found["Authorization"] = f"Bearer {token}"
    if given := os.environ.get("RAY_JOB_HEADERS", ""):
        try:
            found |= {str(key): str(value) for key, value in json.loads(given).items()}
        except (ValueError, AttributeError) as error:
            raise UserError("RAY_JOB_HEADERS is no JSON object",
                            fix="such as '{\"Authorization\": \"Bearer …\"}'") from error
    return found


def _query(filters: Mapping[str, str] | None = None) -> str:
    """Of Ray's state API."""
    words = [("detail", "true"), ("limit", "10000")]
    for key, value in (filters or {}).items():
        words += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
    return urlencode(words)


def _rows(found: Any) -> list[Mapping[str, Any]]:
    """Of the state API's response."""
    inner = ((found or {}).get("data") or {}).get("result") or {}
    return list(inner.get("result") or ())

"""An existing Ray cluster: the rendered Ray Train script, submitted to its Jobs API."""

import hashlib
import io
import json
import os
import re
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from embark.catalog import load_catalog
from embark.errors import Mistake, Mistakes, SpecError, UserError
from embark.formatting import format_duration, pluralize
from embark.kubernetes.names import dns_label
from embark.launch.backend import (
    CancelResult,
    LaunchBackend,
    LaunchRequest,
    LogLine,
    ReadLines,
    Reason,
    Replica,
    Resource,
    RunHandle,
    Status,
    explain_exit,
    ray_address,
    time_ns,
)
from embark.launch.http import HttpClient
from embark.render.job import make_job
from embark.render.settings import grace_s
from embark.render.targets.kubernetes import RAY_SCRIPT, ray_script
from embark.spec import RunSpec, batch_mistakes, to_toml
from embark.store import SPEC, run_uri
from embark.values import JsonDict, JsonMap

WORKER = "RayTrainWorker"  # Ray Train's name for its actor on each machine.
WANTED = ("RAY_KILL", "REF_DELETED", "OUT_OF_SCOPE")  # Ends that Ray Train itself brings about.
_SAID_BY = re.compile(r"\((?P<who>[^()]*?) pid=(?P<pid>\d+)(?:, ip=(?P<ip>[^)\s]+))?\) ?(?P<text>.*)", re.DOTALL)
_FROM = re.compile(r"\[(rank|machine) (\d+)\]:(.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def status_of(
    job: JsonMap, actors: Sequence[JsonMap], nodes: Sequence[JsonMap], handle: RunHandle
) -> Status:
    """Return the status of a job that the cluster knows."""
    workers = [actor for actor in actors if actor.get("class_name") == WORKER]
    # Those that died by themselves, not because the run had ended or a neighbour died.
    lost = [actor for actor in workers
            if actor.get("state") == "DEAD" and _context(actor).get("reason") not in WANTED]
    num_restarts = max(len({actor.get("placement_group_id") for actor in workers}) - 1, 0)
    now = [actor for actor in workers if actor.get("state") != "DEAD"]
    since_s = float(job["start_time"]) / 1000 if job.get("start_time") else None
    status = Status(
        "pending", replicas=tuple(_replica(actor, nodes) for actor in sorted(now, key=lambda a: str(a.get("node_id")))),
        since_s=since_s, num_restarts=num_restarts)
    state = str(job.get("status", ""))
    took = format_duration(job["end_time"] / 1000 - since_s) if job.get("end_time") and since_s else "a while"
    restarted = _restarted(num_restarts, lost)
    if state == "SUCCEEDED":
        return status.become("succeeded", f"took {took}" + (f"; {restarted}" if lost else ""))
    if state == "STOPPED":
        return status.become("gone", f"stopped after {took}", f"its checkpoints are in {handle.run_uri}")
    if state == "FAILED":
        return status.become("failed", *_why_failed(job, handle.name))
    if state == "PENDING":
        return status.become("pending", str(job.get("message") or "Ray is starting it"))
    num_up, num_machines = sum(actor.get("state") == "ALIVE" for actor in now), handle.where["num_machines"]
    if num_up >= num_machines:
        return status.become("running", restarted)
    text, fix = f"{num_up} of {pluralize(num_machines, 'worker')} started", ""
    if (num_there := can_hold(nodes, handle)) < num_machines:
        each = ", ".join(f"{name}: {value}" for name, value in wanted(handle).items())
        text = f"waits for {num_machines} x {{{each}}}: the cluster has {num_there}"
        fix = "add machines to the cluster, or set place.nodes to fewer"
    if restarted:
        return status.become("restarting", f"{restarted}; {text}", fix)
    return status.become("pending", text, fix)


def line_of(text: str) -> LogLine:
    """Parse a line of the job's log: Ray writes who printed it before each rank's own time and text."""
    text = _COLOUR.sub("", text)
    match = _SAID_BY.fullmatch(text)
    if match is None:
        return LogLine(0, "ray", text)
    stamp, _, rest = match["text"].partition(" ")
    at_ns = time_ns(stamp)
    said = _FROM.fullmatch(rest) if at_ns else None
    if said is None:
        return LogLine(0, match["who"], match["text"])
    return LogLine(at_ns, f"{said[1]} {said[2]}", said[3], int(said[2]) if said[1] == "machine" else None)


def wanted(handle: RunHandle) -> dict[str, int]:
    """Return the resources that each machine contributes, by Ray's names."""
    gpus = {"GPU": handle.where["num_processes"]} if handle.where["use_gpu"] else {}
    return {"CPU": handle.where["num_cpus"], **gpus}


def can_hold(nodes: Sequence[JsonMap], handle: RunHandle) -> int:
    """Return the number of machines that are large enough, busy or not."""
    return sum(node.get("state") == "ALIVE" and all(
        float(node.get("resources_total", {}).get(name, 0.0)) >= value for name, value in wanted(handle).items())
        for node in nodes)


def _why_failed(job: JsonMap, name: str) -> Reason:
    message = str(job.get("message") or "")
    code = job.get("driver_exit_code")
    lines = [line_of(line).text.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |\w*(Error|Exception)\b.*:", line)]
    last = (errors or lines)[-1:]
    said = f": {last[0].removeprefix('error: ')}" if last else ""
    if code is None:
        return Reason(f"Ray could not run it{said}", f"embark logs {name}")
    why = explain_exit(int(code))
    return Reason(f"{why.text}{said}"[:600], why.fix or f"embark logs {name}")


def _restarted(num_restarts: int, lost: Sequence[JsonMap]) -> str:
    if not lost:
        return f"restarted {pluralize(num_restarts, 'time')}" if num_restarts else ""
    reasons = {str(_context(actor).get("error_message", "unknown")).partition(". ")[0][:200]: None for actor in lost}
    return f"{pluralize(len(lost), 'worker')} lost so far ({'; '.join(reasons)})"


def _context(actor: JsonMap) -> JsonMap:
    cause = actor.get("death_cause") or {}
    return next((value for value in cause.values() if isinstance(value, Mapping)), {})


def _replica(actor: JsonMap, nodes: Sequence[JsonMap]) -> Replica:
    node = next((node for node in nodes if node.get("node_id") == actor.get("node_id")), None)
    where = f" on {node['node_ip']}" if node else ""
    state = "running" if actor.get("state") == "ALIVE" else "waiting"
    return Replica(f"worker {actor.get('pid')}{where}", None, state)


GRACE_S = 120  # Time for a last checkpoint, unless the spec sets it: the machines stay.
END_MARGIN_S = 30.0
BYTES_PER_POLL_S = 1 << 20  # Ray returns the complete log each time: a long one is read less often.
ACTIVE = ("PENDING", "RUNNING")
RUN = "embark_run"  # The key of a job's metadata that has the run's name.


class Ray(LaunchBackend):
    """A run on the cluster at `ray_address()` when it is launched; afterwards on the cluster that it is in."""

    def handle_of(self, spec: RunSpec) -> RunHandle:
        where = ray_address()
        if not where:
            raise UserError("no Ray cluster is set",
                            "export RAY_ADDRESS=http://HEAD:8265; ray start --head starts one here; or name a "
                                "place.machine, and it goes to Kubernetes as a RayJob")
        share, title, price = self._share(spec, where)
        identity = f"embark-{dns_label(spec.name)}-{int(time.time())}"
        found = {"context": where, "id": identity, **share}
        return RunHandle(name=spec.name, backend="ray", where=found, title=title,
                         run_uri=run_uri(spec.store.root, spec.name), usd_per_hour=price)

    def check(self, request: LaunchRequest) -> None:
        handle = request.handle
        jobs = self._read(handle.where["context"], "api/jobs/") or []
        same = [job for job in jobs if (job.get("metadata") or {}).get(RUN) == handle.name
                and job.get("status") in ACTIVE]
        if same:
            raise self._exists(f"{same[0].get('submission_id')} of {handle.where['context']}", handle)

    def submit(self, request: LaunchRequest) -> None:
        handle, client = request.handle, self._client(request.handle.where["context"])
        where, identity = handle.where["context"], handle.where["id"]
        package = _package(request.spec, handle)
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"
        job = {
            "entrypoint": f"python {RAY_SCRIPT}", "submission_id": identity, "metadata": {RUN: handle.name},
            "runtime_env": {"working_dir": f"gcs://{name}", "env_vars": {
                # So long after the notice Ray kills the job.
                "RAY_JOB_STOP_WAIT_TIME_S": str(handle.where["grace_s"]),
                "EMBARK_GRACE_S": str(max(1, handle.where["grace_s"] - 10))
            }}
        }
        request.record(Resource(f"the job {identity} of the Ray cluster {where}", f"embark cancel {handle.name}"))
        client.request("PUT", f"{where}/api/packages/gcs/{name}", package, body_name=f"{RAY_SCRIPT} and {SPEC}",
                       content_type="application/octet-stream", what="accept the run's files")
        response = client.request("POST", f"{where}/api/jobs/", json.dumps(job).encode(), body_name="the job")
        # A request that is repeated because its response was lost finds itself there already.
        if not response.is_ok and not self._job(handle):
            raise client.error(response, "accept the job")

    def status(self, handle: RunHandle) -> Status:
        job = self._job(handle)
        if job is None:
            return Status("gone", f"the Ray cluster {handle.where['context']} has no "
                          f"{handle.where['id']}: it was deleted, or the cluster was restarted",
                          f"its checkpoints and events are in {handle.run_uri}")
        filters = ("filter_keys", "job_id"), ("filter_predicates", "="), ("filter_values", str(job.get("job_id")))
        # A job without a number has not begun.
        actors = self._rows(handle.where["context"], "actors", *filters) if job.get("job_id") else []
        return status_of(job, actors, self._rows(handle.where["context"], "nodes"), handle)

    def log_reader(self, handle: RunHandle) -> ReadLines:
        num_seen, stamped = 0, set[str]()

        def read() -> Iterator[LogLine]:
            nonlocal num_seen
            time.sleep(num_seen / BYTES_PER_POLL_S)
            text = str((self._read(handle.where["context"], f"{_path(handle)}/logs") or {}).get("logs", ""))
            complete = text[:text.rfind("\n") + 1]
            for raw in complete[num_seen:].splitlines():
                line = line_of(raw)
                # Two of Ray's nodes on one machine both pass on what is written there.
                if not line.time_ns or raw not in stamped:
                    yield line
                stamped.add(raw)
            num_seen = len(complete)

        return read

    def cancel(self, handle: RunHandle) -> CancelResult:
        """The script passes SIGTERM on to the ranks, which save and end; Ray waits for it during their grace period."""
        where, identity, grace_s = handle.where["context"], handle.where["id"], handle.where["grace_s"]
        remains = (Resource(f"the record and the log of Ray job {identity}", f"ray job delete {identity}"),
                   handle.checkpoints, Resource(f"the Ray cluster {where}", "not created by embark launch"))
        if not self._shell.is_dry and (self._job(handle) or {}).get("status") not in ACTIVE:
            return CancelResult((), remains)
        self._client(where).request("POST", f"{where}/{_path(handle)}/stop", what="stop it")
        self._notify(f"stopping the ranks; they save a last checkpoint, within {format_duration(grace_s)}")
        is_complete = self._wait(handle, lambda: (self._job(handle) or {}).get("status") not in ACTIVE,
                                 grace_s + END_MARGIN_S)
        return CancelResult((f"Ray job {identity}",) if is_complete else (), remains, is_complete)

    def _share(self, spec: RunSpec, where: str) -> tuple[JsonDict, str, float | None]:
        """Return what each machine contributes, the run's title, and its price if its machine is named."""
        place = spec.place
        if place.machine or place.cloud:
            job = make_job(spec, load_catalog())
            share = {
                "num_machines": job.num_nodes, "num_processes": job.num_processes,
                "num_cpus": job.num_cpus or job.num_processes, "use_gpu": 1, "grace_s": grace_s(job)}
            return share, job.title, job.usd_per_hour
        num_gpus, num_cpus = 0, 1
        if not self._shell.is_dry:
            found = self._rows(where, "nodes")
            nodes = [node.get("resources_total", {}) for node in found if node.get("state") == "ALIVE"]
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

    def _job(self, handle: RunHandle) -> JsonMap | None:
        """Return the run's job; None if it does not exist."""
        found = self._read(handle.where["context"], _path(handle))
        return found if isinstance(found, dict) else None

    def _rows(self, address: str, kind: str, *filters: tuple[str, str]) -> list[JsonMap]:
        """Return actors or nodes from Ray's state API; nothing if an older cluster does not have it."""
        query = urlencode([("detail", "true"), ("limit", "10000"), *filters])
        inner = ((self._read(address, f"api/v0/{kind}?{query}") or {}).get("data") or {}).get("result") or {}
        return list(inner.get("result") or ())

    def _read(self, address: str, path: str) -> Any:
        """Return the JSON at a path of the API; None if it does not exist."""
        client = self._client(address)
        response = client.request("GET", f"{address}/{path}")
        if response.is_missing:
            return None
        if not response.is_ok:
            raise client.error(response, "return its state")
        return response.json()

    def _client(self, address: str) -> HttpClient:
        return HttpClient(
            shell=self._shell, notify=self._notify, retry=self._retry, headers=_headers,
            name=f"the Ray cluster {address}",
            away_fix=f"check that it is up and its dashboard's port open: curl {address}/api/version",
            login_fix="export RAY_AUTH_TOKEN, or RAY_JOB_HEADERS='{\"Authorization\": \"Bearer …\"}'")


def _path(handle: RunHandle) -> str:
    return f"api/jobs/{quote(handle.where['id'])}"


def _package(spec: RunSpec, handle: RunHandle) -> bytes:
    """Return the script and the spec as Ray takes a working directory; the same run always gives the same bytes."""
    where = handle.where
    script = ray_script(
        name=where["id"], spec_path=SPEC, num_machines=where["num_machines"],
        num_processes=where["num_processes"], num_cpus=where["num_cpus"], use_gpu=where["use_gpu"])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in ((RAY_SCRIPT, script), (SPEC, to_toml(spec, only_set=True))):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
    return packed.getvalue()


def _mistakes(spec: RunSpec, num_gpus: int, num_processes: int, *, is_known: bool) -> Mistakes:
    """Yield the mistakes of a spec for machines that no catalog describes."""
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
    """Return the smallest amount of a resource among the `count` machines that have the most of it; machines without
    any do not count."""
    best = sorted((int(node.get(name, 0)) for node in nodes), reverse=True)[:count]
    return min((value for value in best if value), default=0)


def _headers() -> dict[str, str]:
    """Return credentials from the environment. They are read for each request, and never stored."""
    found: dict[str, str] = {}
    if token := os.getenv("RAY_AUTH_TOKEN", ""):
        found["Authorization"] = f"Bearer {token}"
    if given := os.getenv("RAY_JOB_HEADERS", ""):
        try:
            found |= {str(key): str(value) for key, value in json.loads(given).items()}
        except (ValueError, AttributeError) as error:
            raise UserError("RAY_JOB_HEADERS is no JSON object",
                            "such as '{\"Authorization\": \"Bearer …\"}'") from error
    return found

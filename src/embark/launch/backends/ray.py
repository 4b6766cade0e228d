"""An existing Ray cluster: the rendered Ray Train script, submitted to its Jobs API."""

import hashlib
import io
import json
import os
import re
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Mistake, SpecError, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.kubernetes.names import dns_label
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
    explain_exit,
    ray_address,
    time_ns,
)
from embark.launch.http import HttpClient
from embark.render.job import make_job
from embark.render.settings import grace_s
from embark.render.targets.kubernetes import RAY_SCRIPT, ray_script
from embark.spec import RunSpec, to_toml
from embark.spec.train import batch_mistakes
from embark.store import run_uri
from embark.store.run_dir import SPEC

WORKER = "RayTrainWorker"  # Ray Train's name for its actor on each machine.
WANTED = ("RAY_KILL", "REF_DELETED", "OUT_OF_SCOPE")  # Ends that Ray Train itself brings about.
_SAID_BY = re.compile(r"\((?P<who>[^()]*?) pid=(?P<pid>\d+)(?:, ip=(?P<ip>[^)\s]+))?\) ?(?P<text>.*)", re.DOTALL)
_FROM = re.compile(r"\[(rank|machine) (\d+)\]:(.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def status_of(
    job: Mapping[str, Any], actors: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]],
    nodes: Sequence[Mapping[str, Any]], *, num_machines: int, name: str, run_uri: str,
) -> Status:
    """Return the status of a job that the cluster knows. `groups` are Ray's placement groups, which the workers wait
    for."""
    workers = [actor for actor in actors if actor.get("class_name") == WORKER]
    lost = [actor for actor in workers if _died(actor)]
    num_restarts = max(len({actor.get("placement_group_id") for actor in workers}) - 1, 0)
    now = [actor for actor in workers if actor.get("state") != "DEAD"]
    replicas = tuple(_replica(actor, nodes) for actor in sorted(now, key=lambda a: str(a.get("node_id"))))
    since_s = float(job["start_time"]) / 1000 if job.get("start_time") else None

    def make(state: State, reason: Reason) -> Status:
        return Status(state=state, reason=to_one_line(reason.text), fix=to_one_line(reason.fix), replicas=replicas,
                      since_s=since_s, num_restarts=num_restarts)

    state = str(job.get("status", ""))
    lasted_s = (job["end_time"] - job["start_time"]) / 1000 if job.get("end_time") and since_s else None
    took = "a while" if lasted_s is None else format_duration(lasted_s)
    if state == "SUCCEEDED":
        return make("succeeded", Reason(f"took {took}" + (f"; {_restarted(num_restarts, lost)}" if lost else "")))
    if state == "STOPPED":
        return make("gone", Reason(f"stopped after {took}", f"its checkpoints are in {run_uri}"))
    if state == "FAILED":
        return make("failed", _why_failed(job, name))
    if state == "PENDING":
        return make("pending", Reason(str(job.get("message") or "Ray is starting it")))
    waiting = [group for group in groups if group.get("state") in ("PENDING", "RESCHEDULING", "PREPARED")]
    if waiting:
        reason = _why_waiting(waiting[-1], nodes)
        if num_restarts or lost:
            reason = Reason(f"{_restarted(num_restarts, lost)}; it {reason.text}", reason.fix)
        return make("restarting" if num_restarts or lost else "pending", reason)
    num_up = sum(actor.get("state") == "ALIVE" for actor in now)
    if num_up < num_machines:
        text = f"{num_up} of {pluralize(num_machines, 'worker')} started"
        if lost:
            return make("restarting", Reason(f"{_restarted(num_restarts, lost)}; {text}"))
        return make("pending", Reason(text))
    return make("running", Reason(_restarted(num_restarts, lost) if num_restarts else ""))


def events_of(
    job: Mapping[str, Any], actors: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]],
) -> list[RunEvent]:
    """Return events that Ray reports, by time; Ray does not report when a worker died."""
    found = [
        RunEvent(0.0, _who(actor), str(_context(actor).get("reason", "Died")),
                 _context(actor).get("error_message", ""), True)
        for actor in actors if actor.get("class_name") == WORKER and _died(actor)]
    began_ms = int(job.get("start_time") or 0)
    found += [
        RunEvent(int(node.get("end_time_ms") or 0) / 1000, f"machine {node.get('node_ip')}", "NodeDied",
                 node.get("state_message") or "it left the cluster", True)
        for node in nodes if node.get("state") == "DEAD" and int(node.get("end_time_ms") or 0) >= began_ms]
    if began_ms:
        found.append(RunEvent(began_ms / 1000, str(job.get("submission_id")), "Submitted",
                              job.get("entrypoint", ""), False))
    if job.get("end_time"):
        said = str(job.get("message") or "").partition("\n")[0]
        found.append(RunEvent(int(job["end_time"]) / 1000, str(job.get("submission_id")), str(job.get("status")), said,
                              job.get("status") == "FAILED"))
    return sorted(found, key=lambda event: event.time_s)


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


def resources_text(resources: Mapping[str, float]) -> str:
    """`{CPU: 2, GPU: 8}`, as Ray writes it, without internal resources."""
    shown = {name: value for name, value in resources.items() if name in ("CPU", "GPU", "TPU")}
    return "{" + ", ".join(f"{name}: {value:g}" for name, value in sorted((shown or resources).items())) + "}"


def can_hold(nodes: Sequence[Mapping[str, Any]], resources: Mapping[str, float]) -> int:
    """Return the number of machines that are large enough, busy or not."""
    return sum(node.get("state") == "ALIVE" and all(
        float(node.get("resources_total", {}).get(name, 0.0)) >= value for name, value in resources.items())
        for node in nodes)


def _why_waiting(group: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> Reason:
    bundles = [bundle.get("unit_resources", {}) for bundle in group.get("bundles") or ()]
    if not bundles:
        return Reason("waits for machines")
    largest = max(bundles, key=lambda resources: sum(resources.values()))
    num_there = can_hold(nodes, largest)
    begins = f"waits for {len(bundles)} x {resources_text(largest)}: the cluster has {num_there}"
    if num_there >= len(bundles):
        return Reason(f"{begins}, and other jobs use them", "wait for them, or ray job list and stop one")
    return Reason(begins, "add machines to the cluster, or set place.nodes to fewer")


def _why_failed(job: Mapping[str, Any], name: str) -> Reason:
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


def _restarted(num_restarts: int, lost: Sequence[Mapping[str, Any]]) -> str:
    if not lost:
        return f"restarted {pluralize(num_restarts, 'time')}"
    reasons = Counter(str(_context(actor).get("error_message", "")).partition(". ")[0] for actor in lost)
    why = "; ".join(to_one_line(reason)[:200] for reason in reasons if reason)
    return f"{pluralize(len(lost), 'worker')} lost so far" + (f" ({why})" if why else "")


def _died(actor: Mapping[str, Any]) -> bool:
    """Return whether a worker died by itself, not because the run had ended or its neighbour died."""
    return actor.get("state") == "DEAD" and _context(actor).get("reason") not in WANTED


def _context(actor: Mapping[str, Any]) -> Mapping[str, Any]:
    cause = actor.get("death_cause") or {}
    return next((value for value in cause.values() if isinstance(value, Mapping)), {})


def _replica(actor: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> Replica:
    state = {"ALIVE": "running"}.get(str(actor.get("state")), "waiting")
    node = next((node for node in nodes if node.get("node_id") == actor.get("node_id")), None)
    where = f" on {node['node_ip']}" if node else ""
    return Replica(f"{_who(actor)}{where}", None, state)


def _who(actor: Mapping[str, Any]) -> str:
    return f"worker {actor.get('pid')}"


GRACE_S = 120  # Time for a last checkpoint, unless the spec sets it: the machines stay.
END_MARGIN_S = 30.0
BYTES_PER_POLL_S = 1 << 20  # Ray returns the complete log each time: a long one is read less often.
ACTIVE = ("PENDING", "RUNNING")
RUN = "embark_run"  # The key of a job's metadata that has the run's name.


class Ray(LaunchBackend):
    """A run on the cluster at `ray_address()` when it is launched; afterwards on the cluster that it is in."""

    poll_s = 2.0

    def handle_of(self, spec: RunSpec) -> RunHandle:
        where = ray_address()
        if not where:
            raise UserError("no Ray cluster is set",
                            fix="export RAY_ADDRESS=http://HEAD:8265; ray start --head starts one here; or name a "
                                "place.machine, and it goes to Kubernetes as a RayJob")
        share, title, price = self._share(spec, where)
        identity = f"embark-{dns_label(spec.name)}-{int(time.time())}"
        found = {"context": where, "id": identity, **share}
        return RunHandle(name=spec.name, backend="ray", where=found, title=title,
                         run_uri=run_uri(spec.store.root, spec.name), usd_per_hour=price)

    def check(self, request: LaunchRequest) -> None:
        handle = request.handle
        jobs = self._read(handle, "api/jobs/") or []
        same = [job for job in jobs if (job.get("metadata") or {}).get(RUN) == handle.name
                and job.get("status") in ACTIVE]
        if same:
            raise self._exists(f"{same[0].get('submission_id')} of {handle.where['context']}", handle)
        if self._shell.is_dry:
            return
        where, num_machines = handle.where, handle.where["num_machines"]
        gpus = {"GPU": where["num_processes"]} if where["use_gpu"] else {}
        wanted = {"CPU": where["num_cpus"], **gpus}
        num_there = can_hold(self._nodes(handle), wanted)
        if num_there < num_machines:
            self._notify(f"the cluster has {pluralize(num_there, 'machine')} with {resources_text(wanted)}, and the "
                         f"run needs {num_machines}: it waits for them")

    def submit(self, request: LaunchRequest) -> None:
        handle, client = request.handle, self._client(request.handle)
        where, identity = handle.where["context"], handle.where["id"]
        package = _package(request.spec, handle)
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"
        job = {
            "entrypoint": f"python {RAY_SCRIPT}", "submission_id": identity, "metadata": {RUN: handle.name},
            "runtime_env": {"working_dir": f"gcs://{name}", "env_vars": {
                # So long after the notice Ray kills the job.
                "RAY_JOB_STOP_WAIT_TIME_S": str(handle.where["grace_s"]),
                "EMBARK_GRACE_S": str(max(1, handle.where["grace_s"] - 10)),
            }},
        }
        request.record(Resource(f"the job {identity} of the Ray cluster {where}", f"embark cancel {handle.name}"))
        sent = client.request("PUT", f"{where}/api/packages/gcs/{name}", package, body_name=f"{RAY_SCRIPT} and {SPEC}",
                          content_type="application/octet-stream")
        if not sent.is_ok:
            raise client.error(sent, "accept the run's files")
        response = client.request("POST", f"{where}/api/jobs/", json.dumps(job).encode(), body_name="the job")
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
        return status_of(job, actors, groups, self._nodes(handle), num_machines=handle.where["num_machines"],
                         name=handle.name, run_uri=handle.run_uri)

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        num_seen, stamped = 0, dict[str, None]()
        while True:
            is_over = not follow or self.status(handle).has_ended
            client = self._client(handle)
            response = client.request("GET", f"{self._url(handle)}/logs")
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
        """The script passes SIGTERM on to the ranks, which save and end; Ray waits for it during their grace period."""
        client, identity = self._client(handle), handle.where["id"]
        remains = (handle.checkpoints,
                   Resource(f"the Ray cluster {handle.where['context']}", "not created by embark launch"))
        record = Resource(f"the record and the log of Ray job {identity}", f"embark cancel {handle.name} again")
        job = self._job(handle)
        if job is None and not self._shell.is_dry:
            return CancelResult((), remains)
        if self._shell.is_dry or (job is not None and job.get("status") in ACTIVE):
            response = client.request("POST", f"{self._url(handle)}/stop")
            if not response.is_ok:
                raise client.error(response, "stop it")
            grace_s = handle.where["grace_s"]
            self._notify(f"stopping the ranks; they save a last checkpoint, within {format_duration(grace_s)}")
            is_complete = self._wait(handle, lambda: (self._job(handle) or {}).get("status") not in ACTIVE,
                                     grace_s + END_MARGIN_S)
            # Not deleted at once: Ray still writes how it ended, and would create it anew.
            return CancelResult((f"Ray job {identity}",) if is_complete else (), (record, *remains), is_complete)
        response = client.request("DELETE", self._url(handle))
        if not response.is_ok and not response.is_missing:
            raise client.error(response, "delete its record")
        return CancelResult((f"the record of Ray job {identity}",), remains)

    def _share(self, spec: RunSpec, where: str) -> tuple[dict[str, Any], str, float | None]:
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
            found = self._client_at(where).request("GET", f"{where}/api/v0/nodes?{_query()}").json()
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
        """Return the run's job; None if it does not exist.

        If a record is deleted before Ray's monitor, which looks once a second, has seen the job's end, the monitor
        writes another: failed, and without the job's metadata.
        """
        found = self._read(handle, f"api/jobs/{quote(handle.where['id'])}")
        is_ours = isinstance(found, dict) and (found.get("metadata") or {}).get(RUN) == handle.name
        return found if is_ours else None

    def _of_job(self, handle: RunHandle, job: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
        """Return actors or placement groups of the job's driver, once it has begun. Older clusters do not report
        them."""
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
        """Return the JSON at a path of the API; None if it does not exist."""
        client = self._client(handle)
        response = client.request("GET", f"{handle.where['context']}/{path}")
        if response.is_missing:
            return None
        if not response.is_ok:
            raise client.error(response, "return its state")
        return response.json()

    def _url(self, handle: RunHandle) -> str:
        return f"{handle.where['context']}/api/jobs/{quote(handle.where['id'])}"

    def _client(self, handle: RunHandle) -> HttpClient:
        return self._client_at(handle.where["context"])

    def _client_at(self, address: str) -> HttpClient:
        return HttpClient(
            shell=self._shell, notify=self._notify, retry=self._retry, headers=_headers,
            name=f"the Ray cluster {address}",
            away_fix=f"check that it is up and its dashboard's port open: curl {address}/api/version",
            login_fix="export RAY_AUTH_TOKEN, or RAY_JOB_HEADERS='{\"Authorization\": \"Bearer …\"}'")


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


def _mistakes(spec: RunSpec, num_gpus: int, num_processes: int, *, is_known: bool) -> Iterator[Mistake]:
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
    """Return the query string of a request to Ray's state API."""
    words = [("detail", "true"), ("limit", "10000")]
    for key, value in (filters or {}).items():
        words += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
    return urlencode(words)


def _rows(found: Any) -> list[Mapping[str, Any]]:
    """Return the rows of a response of Ray's state API."""
    inner = ((found or {}).get("data") or {}).get("result") or {}
    return list(inner.get("result") or ())

"""The status of a run on a Ray cluster, from its job, its workers and what they wait for. Pure functions."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from embark.formatting import format_duration, pluralize, to_one_line
from embark.launch.backend import LogLine, Reason, Replica, RunEvent, State, Status, time_ns
from embark.launch.explanations import explain_exit

WORKER = "RayTrainWorker"  # What Ray Train calls the actor that it puts on each machine.
WANTED = ("RAY_KILL", "REF_DELETED", "OUT_OF_SCOPE")  # Ends that Ray Train itself brings about.
_SAID_BY = re.compile(r"\((?P<who>[^()]*?) pid=(?P<pid>\d+)(?:, ip=(?P<ip>[^)\s]+))?\) ?(?P<text>.*)", re.DOTALL)
_FROM = re.compile(r"\[(rank|machine) (\d+)\]:(.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def status_of(
    job: Mapping[str, Any], actors: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]],
    nodes: Sequence[Mapping[str, Any]], *, num_machines: int, name: str, run_uri: str,
) -> Status:
    """Of a job that the cluster knows. `groups` are Ray's placement groups: what the workers wait for together."""
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
        return make("pending", Reason(to_one_line(str(job.get("message") or "Ray is starting it"))))
    waiting = [group for group in groups if group.get("state") in ("PENDING", "RESCHEDULING", "PREPARED")]
    if waiting:
        reason = _why_waiting(waiting[-1], nodes)
        if num_restarts or lost:
            reason = Reason(f"{_restarted(num_restarts, lost)}; it {reason.text}", reason.fix)
        return make("restarting" if num_restarts or lost else "pending", reason)
    num_up = sum(actor.get("state") == "ALIVE" for actor in now)
    if num_up < num_machines:
        begins = Reason(f"{num_up} of {pluralize(num_machines, 'worker')} started")
        return make("restarting", Reason(f"{_restarted(num_restarts, lost)}; {begins.text}")) if lost else make(
            "pending", begins)
    return make("running", Reason(_restarted(num_restarts, lost) if num_restarts else ""))


def events_of(
    job: Mapping[str, Any], actors: Sequence[Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]],
) -> list[RunEvent]:
    """What Ray says of it, by time; Ray does not say when a worker died."""
    found = [
        RunEvent(0.0, _who(actor), str(_context(actor).get("reason", "Died")),
                 to_one_line(str(_context(actor).get("error_message", ""))), True)
        for actor in actors if actor.get("class_name") == WORKER and _died(actor)]
    began_ms = int(job.get("start_time") or 0)
    found += [
        RunEvent(int(node.get("end_time_ms") or 0) / 1000, f"machine {node.get('node_ip')}", "NodeDied",
                 to_one_line(str(node.get("state_message") or "it left the cluster")), True)
        for node in nodes if node.get("state") == "DEAD" and int(node.get("end_time_ms") or 0) >= began_ms]
    if began_ms:
        found.append(RunEvent(began_ms / 1000, str(job.get("submission_id")), "Submitted",
                              to_one_line(str(job.get("entrypoint", ""))), False))
    if job.get("end_time"):
        said = to_one_line(str(job.get("message") or "").partition("\n")[0])
        found.append(RunEvent(int(job["end_time"]) / 1000, str(job.get("submission_id")), str(job.get("status")), said,
                              job.get("status") == "FAILED"))
    return sorted(found, key=lambda event: event.time_s)


def line_of(text: str) -> LogLine:
    """Of the job's log, where Ray has put who said it before what every rank said with its time."""
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
    """`{CPU: 2, GPU: 8}`, as Ray writes it, without internal ones."""
    shown = {name: value for name, value in resources.items() if name in ("CPU", "GPU", "TPU")}
    return "{" + ", ".join(f"{name}: {value:g}" for name, value in sorted((shown or resources).items())) + "}"


def can_hold(nodes: Sequence[Mapping[str, Any]], resources: Mapping[str, float]) -> int:
    """How many machines are large enough, busy or not."""
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
    """Of itself, and not because the run had ended or its neighbour died."""
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

"""The status of a run on Kubernetes, from its object, its pods, their logs and events. Pure functions."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from embark.errors import ExitCode
from embark.formatting import pluralize, to_one_line
from embark.kubernetes.names import JOB_NAME, JOBSET_NAME
from embark.kubernetes.objects import condition_of
from embark.launch.backend import (
    LogLine,
    Reason,
    Replica,
    RunEvent,
    State,
    Status,
    explain,
    explain_exit,
    explain_unschedulable,
    time_s,
)
from embark.launch.backends.ray import line_of
from embark.render.targets.kubernetes import CONTAINERS, MANIFESTS
from embark.values import JsonDict, JsonMap, frozen
from .pods import PodStatus, newest

FAILED = ("Failed", "FailureTarget")
MAX_MESSAGE = 400  # Ray's message has the end of its log in it.
_NAMED_POD = re.compile(r"\b[Pp]od [^/\s]+/(?P<name>\S+) (?:failed with|has condition)")
_EXIT_CODE = re.compile(r"\bexit code (?P<code>\d+)")
"""The Job controller (pkg/controller/job/pod_failure_policy.go, Kubernetes 1.26 to 1.36) writes "Container %s for pod
%s/%s failed with exit code %v matching %v rule at index %d", or "Pod %s/%s has condition %v matching …"; Ray writes
"Job entrypoint command failed with exit code %d, last available logs …"."""
_FIRST_FAILED_JOB = re.compile(r"\(first failed job: (?P<name>\S+?)\)")
"""How a JobSet (pkg/controllers/failure_policy.go, 0.5 to 0.12) ends its message; Trainer 2 copies that message."""
SUCCEEDED = ("Complete", "SuccessCriteriaMet", "Completed", "Succeeded")
SUBMITTER = "ray-job-submitter"  # KubeRay's container that submits the script to the Ray cluster and follows its log.


def status_of(
    job: JsonMap, pods: Sequence[PodStatus], events: Sequence[RunEvent], *, num_nodes: int, queue: str = "",
    jobs: Sequence[JsonMap] = (), min_nodes: int | None = None
) -> Status:
    """Return the status of an object. `jobs` are those that it made itself; with `min_nodes` pods an elastic run
    trains."""
    status = job.get("status", {})
    latest = newest(pods)
    replicas = tuple(Replica(p.name, p.index, _replica_state(p), p.preempted or p.why.text, p.since_s) for p in latest)
    since_s = time_s(job["metadata"].get("creationTimestamp", ""))
    lost = [p for p in pods if p.preempted]
    num_restarts = max(int(status.get("restarts", 0)), len({p.name for p in pods}) - len(latest),
                       *(p.num_container_starts for p in pods), 0)

    def make(state: State, reason: Reason) -> Status:
        return Status(state, to_one_line(reason.text), to_one_line(reason.fix), replicas, since_s, num_restarts)

    ended = failed_condition(status)
    if ended is not None:
        return make("failed", why_failed(ended, pods, latest, jobs))
    if any(condition_of(status, name) for name in SUCCEEDED):
        return make("succeeded", Reason(_restarted(num_restarts, lost)))
    if "deletionTimestamp" in job["metadata"]:
        return make("pending", Reason(f"being deleted; {pluralize(len(latest), 'pod')} still saving"))
    if job.get("spec", {}).get("suspend") or condition_of(status, "Suspended"):
        return make("pending", _why_suspended(queue, events))
    is_up = [p for p in latest if p.phase == "Running" and p.has_started and not p.is_leaving and not p.preempted]
    if len(is_up) >= num_nodes or (latest and all(p in is_up or p.phase == "Succeeded" for p in latest)
                                   and len(latest) >= num_nodes):
        return make("running", Reason(_restarted(num_restarts, lost)))
    if min_nodes is not None and len(is_up) >= min_nodes:
        return make("running", Reason(f"trains on {len(is_up)} of {pluralize(num_nodes, 'machine')}"))
    out = [p for p in latest if p.preempted or p.is_leaving or p.phase == "Failed"]
    before = [p for p in pods if p.preempted or p.phase == "Failed"]
    if out or before:
        return make("restarting", _why_restarting(out or before, latest, events))
    waits = _why_pending(latest, events, num_nodes)
    if num_restarts:  # as a JobSet does it, that makes all its pods anew
        return make("restarting", Reason(f"restart {num_restarts}; {waits.text}", waits.fix))
    return make("pending", waits)


def failed_condition(status: JsonMap) -> JsonDict | None:
    return next((c for name in FAILED if (c := condition_of(status, name))), None)


def why_failed(
    condition: JsonMap, pods: Sequence[PodStatus], latest: Sequence[PodStatus],
    jobs: Sequence[JsonMap]
) -> Reason:
    """Why it failed. `jobs` are those that the object made, as a JobSet does; their conditions say more than its
    own."""
    message = str(condition.get("message") or "")
    behind = _condition_of_first_failed(message, jobs)
    said = "; ".join(_condition_text(one) for one in (condition, behind) if one)
    known = [reason for one in (condition, behind) if one for reason in explain("failed", _condition_text(one))]
    if known:  # a limit of the job, which ended all pods: none of them decided
        return Reason(f"{known[0].text} ({said})", known[0].fix)
    decisive = _condition_text(behind or condition)
    named, code = _NAMED_POD.search(decisive), _EXIT_CODE.search(decisive)
    pod = next((p for p in pods if named and p.name == named["name"]), None)
    if named is None and code is None:
        pod = _most_telling(latest)
    if code is not None:
        reason = explain_exit(int(code["code"]), pod.exit_reason if pod else "")
    elif pod is not None:
        reason = Reason(pod.preempted or pod.why.text, pod.why.fix)
        if pod.exit_code and not pod.preempted:
            reason = explain_exit(pod.exit_code, pod.exit_reason)
    else:
        return Reason(said, "embark logs says why")
    who = pod.title if pod else named["name"] if named else ""
    return Reason(f"{who}: {reason.text} ({said})" if who else f"{reason.text} ({said})", reason.fix)


def _condition_of_first_failed(message: str, jobs: Sequence[JsonMap]) -> JsonDict | None:
    named = _FIRST_FAILED_JOB.search(message)
    failed = {str(job["metadata"]["name"]): c for job in jobs if (c := failed_condition(job.get("status", {})))}
    if named is not None:
        return failed.get(named["name"])
    return min(failed.values(), key=lambda c: str(c.get("lastTransitionTime", "")), default=None)


def _most_telling(pods: Sequence[PodStatus]) -> PodStatus | None:
    """Return the pod that explains the most if the controller names none, as with a used-up backoff limit: one whose
    code says what is wrong comes before one that was stopped because another had ended."""
    ranks = {int(ExitCode.BAD_INPUT): 0, int(ExitCode.PREEMPTED): 2, None: 3}
    ended = [p for p in pods if not p.preempted and ((p.phase == "Failed" and p.why.text) or p.exit_code)]
    return min(ended, key=lambda p: ranks.get(p.exit_code, 1), default=None)


def _condition_text(condition: JsonMap) -> str:
    said = ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
    line = to_one_line(said)
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"


def event_of(found: JsonMap) -> RunEvent:
    at = found.get("lastTimestamp") or found.get("eventTime") or found.get("metadata", {}).get("creationTimestamp", "")
    about = found.get("involvedObject", {})
    return RunEvent(time_s(at) or 0.0, str(about.get("name", "")), str(found.get("reason", "")),
                    to_one_line(found.get("message", "")), found.get("type") == "Warning")


def _replica_state(pod: PodStatus) -> str:
    if pod.preempted:
        return "preempted"
    if pod.is_leaving:
        return "ending"
    return {"Pending": "waiting"}.get(pod.phase, pod.phase.lower())


def _why_suspended(queue: str, events: Sequence[RunEvent]) -> Reason:
    said = [e.text for e in events if e.is_warning or e.reason in ("Pending", "Suspended", "QuotaReserved")]
    behind = f" ({said[-1]})" if said else ""
    if queue:
        return Reason(f"the queue {queue} has not admitted it yet{behind}",
                      f"kubectl get workloads; kubectl describe localqueue {queue}")
    return Reason(f"suspended, but not by a queue{behind}", "kubectl patch … -p '{\"spec\":{\"suspend\":false}}'")


def _why_restarting(lost: Sequence[PodStatus], latest: Sequence[PodStatus], events: Sequence[RunEvent]) -> Reason:
    taken = "; ".join(dict.fromkeys(_went(p) for p in lost))
    waiting = [p for p in latest if p.phase == "Pending" and not p.preempted]
    if not waiting:
        return Reason(f"{taken}; its controller replaces it")
    first = waiting[0]
    why = first.waits_for(events)
    return Reason(f"{taken}; its replacement {first.name} waits: {why.text}", why.fix)


def _why_pending(pods: Sequence[PodStatus], events: Sequence[RunEvent], num_nodes: int) -> Reason:
    warnings = [e for e in events if e.is_warning]
    if not pods:
        refused = next((e for e in reversed(warnings) if e.reason == "FailedCreate"), None)
        return explain_unschedulable(refused.text) if refused else Reason("no pod created yet")
    waiting = [p for p in pods if p.phase == "Pending"]
    num_up = sum(p.phase == "Running" for p in pods)
    begins = f"{num_up} of {num_nodes} pods run; " if num_up else ""
    if not waiting:
        return Reason(f"{begins}{num_nodes - len(pods)} not created yet")
    first = next((p for p in waiting if p.why.fix), waiting[0])
    why = first.waits_for(events)
    return Reason(f"{begins}{first.name} waits: {why.text}", why.fix)


def _restarted(num_restarts: int, lost: Sequence[PodStatus]) -> str:
    if lost:
        reasons = "; ".join(dict.fromkeys(f"{p.title}: {p.preempted}" for p in lost))
        return f"{pluralize(len(lost), 'pod')} preempted and replaced so far ({reasons})"
    return f"restarted {pluralize(num_restarts, 'time')}" if num_restarts else ""


def _went(pod: PodStatus) -> str:
    if pod.preempted:
        return f"{pod.title} was preempted: {pod.preempted}"
    return f"{pod.title} ended: {pod.why.text}" if pod.phase == "Failed" else f"{pod.title} is ending"


@frozen
class RunKind:
    """The rules for reading the status of one kind of object."""

    name: str  # The name of the kind in kubectl.
    container: str  # The container with the ranks; the pod's first if it is empty.
    log_label: str = ""  # The label of other pods that have the log; its value is the object's name.
    log_container: str = ""
    job_label: str = ""  # The label of the Jobs that it makes; its value is the object's name.
    line: Callable[[LogLine], LogLine] = lambda line: line
    """Splits a line of a log that several machines share, so that its source is known."""
    read: Callable[[JsonMap], JsonMap] = lambda found: found
    """The object with its end in `status.conditions`, as a Job has it."""


def _ray_line(line: LogLine) -> LogLine:
    """Return a line of a machine out of the job's log, which KubeRay's submitter prints for all machines."""
    parsed = line_of(line.text)
    return replace(parsed, time_ns=parsed.time_ns or line.time_ns)


def _ray_job(found: JsonMap) -> JsonMap:
    """Return a RayJob with its end as a condition; KubeRay counts its attempts, and has its own words for the end."""
    status = found.get("status") or {}
    ended = {"Complete": "Complete", "Failed": "Failed", "ValidationFailed": "Failed", "Suspended": "Suspended"}.get(
        str(status.get("jobDeploymentStatus", "")))
    if ended == "Complete" and status.get("jobStatus") in ("FAILED", "STOPPED"):
        ended = "Failed"
    condition = {"type": ended, "status": "True", "reason": str(status.get("reason") or ""),
                 "message": str(status.get("message") or "")}
    return {**found, "status": {"conditions": [condition] if ended else [], "restarts": int(status.get("failed") or 0)}}


KINDS = {
    **{target: RunKind(MANIFESTS[target][1], CONTAINERS[target]) for target in MANIFESTS},
    **{target: RunKind(MANIFESTS[target][1], CONTAINERS[target], job_label=JOBSET_NAME)
       for target in ("jobset", "trainjob")},
    "ray": RunKind(MANIFESTS["ray"][1], CONTAINERS["ray"], log_label=JOB_NAME,
                   log_container=SUBMITTER, line=_ray_line, read=_ray_job)
}
"""Kinds of objects by `place.target`."""

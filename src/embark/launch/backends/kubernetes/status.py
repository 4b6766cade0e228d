"""The status of a run on Kubernetes, from its object, its pods, their logs and events. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embark.formatting import pluralize, to_one_line
from embark.launch.backend import LogLine, Reason, Replica, RunEvent, State, Status, time_ns, time_s
from embark.launch.backends.ray.status import line_of
from embark.launch.explanations import explain_exit, explain_preemption, explain_unschedulable, explain_waiting
from embark.render.targets.kubernetes import CONTAINERS, MANIFESTS

SUCCEEDED = ("Complete", "SuccessCriteriaMet", "Completed", "Succeeded")
FAILED = ("Failed", "FailureTarget")
INDEX_LABELS = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index",
                "torchx.pytorch.org/replica-id")
INSTANCE = "app.kubernetes.io/instance"  # The label of every pod of a run: it has the object's name.
SUBMITTER = "ray-job-submitter"  # KubeRay's container that submits the script to the Ray cluster and follows its log.
_VOLCANO_ENDS = {"Completed": "Complete", "Failed": "Failed", "Aborted": "Failed", "Terminated": "Failed"}


@dataclass(frozen=True, slots=True)
class Pod:
    """What matters of one."""

    name: str
    uid: str
    index: int | None
    created: str
    phase: str
    is_leaving: bool
    preempted: str  # Why it was preempted; empty where it was not.
    why: Reason
    has_started: bool  # Its container has a log.
    num_container_starts: int
    since_s: float | None = None  # Unix time at which a node accepted it.

    @classmethod
    def of(cls, found: Mapping[str, Any], container: str) -> Pod:
        """`container`: the one that matters; empty: the first."""
        metadata, status = found["metadata"], found.get("status", {})
        labels = metadata.get("labels", {})
        state: dict[str, Any] = next(
            (s for s in status.get("containerStatuses", ()) if s.get("name") == container or not container), {})
        now, disruption = state.get("state", {}), _condition(status, "DisruptionTarget")
        preempted = disruption and explain_preemption(disruption.get("reason", ""), disruption.get("message", ""))
        return cls(
            name=metadata["name"], uid=metadata.get("uid", ""),
            index=next((int(labels[name]) for name in INDEX_LABELS if str(labels.get(name, "")).isdigit()), None),
            created=metadata.get("creationTimestamp", ""), phase=status.get("phase", "Pending"),
            is_leaving="deletionTimestamp" in metadata, why=_why(status, now), since_s=time_s(status.get("startTime")),
            has_started="running" in now or "terminated" in now, num_container_starts=state.get("restartCount", 0),
            preempted=preempted or "")


def status_of(
    job: Mapping[str, Any], pods: Sequence[Pod], events: Sequence[RunEvent], *, num_nodes: int, queue: str = "",
) -> Status:
    """Of an object that is there."""
    status = job.get("status", {})
    latest = newest(pods)
    replicas = tuple(Replica(p.name, p.index, _replica_state(p), p.preempted or p.why.text, p.since_s) for p in latest)
    since_s = time_s(job["metadata"].get("creationTimestamp", ""))
    lost = [p for p in pods if p.preempted]
    num_restarts = max(int(status.get("restarts", 0)), len({p.name for p in pods}) - len(latest),
                       *(p.num_container_starts for p in pods), 0)

    def make(state: State, reason: Reason) -> Status:
        return Status(state=state, reason=to_one_line(reason.text), fix=to_one_line(reason.fix), replicas=replicas,
                      since_s=since_s, num_restarts=num_restarts)

    ended = next((c for name in FAILED if (c := _condition(status, name))), None)
    if ended is not None:
        return make("failed", _why_failed(ended, latest))
    if any(_condition(status, name) for name in SUCCEEDED):
        return make("succeeded", Reason(_restarted(num_restarts, lost)))
    if "deletionTimestamp" in job["metadata"]:
        return make("pending", Reason(f"being deleted; {pluralize(len(latest), 'pod')} still saving"))
    if job.get("spec", {}).get("suspend") or _condition(status, "Suspended"):
        return make("pending", _why_suspended(queue, events))
    is_up = [p for p in latest if p.phase == "Running" and p.has_started and not p.is_leaving and not p.preempted]
    if len(is_up) >= num_nodes or (latest and all(p in is_up or p.phase == "Succeeded" for p in latest)
                                   and len(latest) >= num_nodes):
        return make("running", Reason(_restarted(num_restarts, lost)))
    out = [p for p in latest if p.preempted or p.is_leaving or p.phase == "Failed"]
    before = [p for p in pods if p.preempted or p.phase == "Failed"]
    if out or before:
        return make("restarting", _why_restarting(out or before, latest))
    waits = _why_pending(latest, events, num_nodes)
    if num_restarts:  # as a JobSet does it, that makes all its pods anew
        return make("restarting", Reason(f"restart {num_restarts}; {waits.text}", waits.fix))
    return make("pending", waits)


def newest(pods: Sequence[Pod]) -> list[Pod]:
    """Of each index the pod that came last."""
    found: dict[object, Pod] = {}
    for pod in sorted(pods, key=lambda p: (p.created, not p.is_leaving, p.name)):
        found[pod.name if pod.index is None else pod.index] = pod
    return sorted(found.values(), key=lambda p: (p.index is None, p.index or 0, p.name))


def event_of(found: Mapping[str, Any]) -> RunEvent:
    at = found.get("lastTimestamp") or found.get("eventTime") or found.get("metadata", {}).get("creationTimestamp", "")
    about = found.get("involvedObject", {})
    return RunEvent(time_s(at) or 0.0, str(about.get("name", "")), str(found.get("reason", "")),
                    to_one_line(found.get("message", "")), found.get("type") == "Warning")


def _condition(status: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The one of that type, where it holds."""
    conditions = status.get("conditions") or ()
    return next((c for c in conditions if c.get("type") == name and c.get("status") == "True"), None)


def _replica_state(pod: Pod) -> str:
    if pod.preempted:
        return "preempted"
    if pod.is_leaving:
        return "ending"
    return {"Pending": "waiting"}.get(pod.phase, pod.phase.lower())


def _why(status: Mapping[str, Any], state: Mapping[str, Any]) -> Reason:
    ended = state.get("terminated")
    if ended:
        code = int(ended.get("exitCode", 0))
        return explain_exit(code, str(ended.get("reason", ""))) if code else Reason("")
    waiting = state.get("waiting")
    if waiting:
        return explain_waiting(str(waiting.get("reason", "")), str(waiting.get("message", "")))
    unscheduled = next((c for c in status.get("conditions") or ()
                        if c.get("type") == "PodScheduled" and c.get("status") == "False"), None)
    if unscheduled:
        if unscheduled.get("reason") == "SchedulingGated":
            return Reason("waiting for its queue to admit it")
        return explain_unschedulable(str(unscheduled.get("message", "")))
    if status.get("phase") == "Failed":
        return Reason(": ".join(str(status[key]) for key in ("reason", "message") if status.get(key)))
    return Reason("")


def _why_failed(condition: Mapping[str, Any], pods: Sequence[Pod]) -> Reason:
    said = ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
    of_pod = next((p.why for p in pods if p.phase == "Failed" and p.why.text and not p.preempted), None)
    if of_pod is None:
        return Reason(said, "embark logs says why")
    return Reason(f"{of_pod.text} ({said})", of_pod.fix)


def _why_suspended(queue: str, events: Sequence[RunEvent]) -> Reason:
    said = [e.text for e in events if e.is_warning or e.reason in ("Pending", "Suspended", "QuotaReserved")]
    behind = f" ({said[-1]})" if said else ""
    if queue:
        return Reason(f"the queue {queue} has not admitted it yet{behind}",
                      f"kubectl get workloads; kubectl describe localqueue {queue}")
    return Reason(f"suspended, but not by a queue{behind}", "kubectl patch … -p '{\"spec\":{\"suspend\":false}}'")


def _why_restarting(lost: Sequence[Pod], latest: Sequence[Pod]) -> Reason:
    taken = "; ".join(dict.fromkeys(_went(p) for p in lost))
    waiting = [p for p in latest if p.phase == "Pending" and not p.preempted]
    if not waiting:
        return Reason(f"{taken}; its controller replaces it")
    first = waiting[0]
    why = first.why.text or "not scheduled yet"
    return Reason(f"{taken}; its replacement {first.name} waits: {why}", first.why.fix)


def _why_pending(pods: Sequence[Pod], events: Sequence[RunEvent], num_nodes: int) -> Reason:
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
    mounting = [e for e in warnings if e.source == first.name and e.reason in ("FailedMount", "FailedAttachVolume")]
    why = Reason(mounting[-1].text, "kubectl describe pvc") if mounting else first.why
    return Reason(f"{begins}{first.name} waits: {why.text or 'not scheduled yet'}", why.fix)


def _restarted(num_restarts: int, lost: Sequence[Pod]) -> str:
    if lost:
        reasons = "; ".join(dict.fromkeys(f"{_who(p)}: {p.preempted}" for p in lost))
        return f"{pluralize(len(lost), 'pod')} preempted and replaced so far ({reasons})"
    return f"restarted {pluralize(num_restarts, 'time')}" if num_restarts else ""


def _went(pod: Pod) -> str:
    if pod.preempted:
        return f"{_who(pod)} was preempted: {pod.preempted}"
    return f"{_who(pod)} ended: {pod.why.text}" if pod.phase == "Failed" else f"{_who(pod)} is ending"


def _who(pod: Pod) -> str:
    return pod.name if pod.index is None else f"machine {pod.index} ({pod.name})"


@dataclass(frozen=True, slots=True)
class RunKind:
    """How one kind of object is read."""

    name: str  # What kubectl calls it.
    container: str  # Where the ranks are; empty: the pod's first.
    log_label: str = ""  # Of the pods that have the log, where those are others: it has the object's name.
    log_container: str = ""
    line: Callable[[LogLine], LogLine] = lambda line: line
    """Splits a line of a log that several machines share, so that its source is known."""
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda found: found
    """The object with its end in `status.conditions`, as a Job has it."""


def _ray_line(line: LogLine) -> LogLine:
    """KubeRay's submitter prints the job's log, which has the lines of all machines."""
    parsed = line_of(line.text)
    return replace(parsed, time_ns=parsed.time_ns or line.time_ns)


def _ray_job(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """KubeRay counts its attempts, and has its own words for the end."""
    status = found.get("status") or {}
    ended = {"Complete": "Complete", "Failed": "Failed", "ValidationFailed": "Failed", "Suspended": "Suspended"}.get(
        str(status.get("jobDeploymentStatus", "")))
    if ended == "Complete" and status.get("jobStatus") in ("FAILED", "STOPPED"):
        ended = "Failed"
    return _with_conditions(found, ended, str(status.get("reason") or ""), str(status.get("message") or ""),
                 restarts=int(status.get("failed") or 0))


def _volcano_job(found: Mapping[str, Any]) -> Mapping[str, Any]:
    status = found.get("status") or {}
    state = status.get("state") or {}
    phase = str(state.get("phase", ""))
    return _with_conditions(found, _VOLCANO_ENDS.get(phase), str(state.get("reason") or phase),
                            str(state.get("message") or ""), restarts=int(status.get("retryCount") or 0))


def _with_conditions(found: Mapping[str, Any], condition: str | None, reason: str, message: str, *,
                     restarts: int) -> Mapping[str, Any]:
    conditions = [{"type": condition, "status": "True", "reason": reason, "message": message}] if condition else []
    return {**found, "status": {"conditions": conditions, "restarts": restarts}}


KINDS = {
    **{target: RunKind(MANIFESTS[target][1], CONTAINERS[target]) for target in MANIFESTS},
    "ray": RunKind(MANIFESTS["ray"][1], CONTAINERS["ray"], log_label="batch.kubernetes.io/job-name",
                   log_container=SUBMITTER, line=_ray_line, read=_ray_job),
    "torchx": RunKind("job.batch.volcano.sh", "", read=_volcano_job),
}
"""By `place.target`."""


@dataclass(slots=True)
class PodLogPosition:
    """How far a pod's log was read: its last line's time, and how many lines had that time."""

    last_ns: int = 0
    num_at_last: int = 0
    to_skip: int = 0  # Lines of `last_ns` that opening it again repeats.

    def begin(self) -> str:
        """For `--since-time`, which has full seconds only, so that some lines are repeated."""
        self.to_skip = self.num_at_last
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.last_ns // 1_000_000_000)) if self.last_ns else ""

    def parse(self, pod: Pod, text: str) -> LogLine | None:
        """None: read before."""
        stamp, _, rest = text.partition(" ")
        at_ns = time_ns(stamp)
        if not self._is_new(at_ns):
            return None
        return LogLine.of(at_ns, pod.name, rest if at_ns else text, pod.index)

    def _is_new(self, at_ns: int) -> bool:
        if not at_ns or at_ns > self.last_ns:
            self.last_ns, self.num_at_last, self.to_skip = at_ns or self.last_ns, 1, 0
            return True
        if at_ns < self.last_ns:
            return False
        if self.to_skip:
            self.to_skip -= 1
            return False
        self.num_at_last += 1
        return True

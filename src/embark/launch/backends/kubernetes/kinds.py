"""The kinds of object that a run is on Kubernetes: how its pods are found, and what each says of its end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from embark.launch.backend import LogLine
from embark.launch.backends.ray.status import line_of
from embark.render.launch_script import MANIFESTS
from embark.render.pod import CONTAINER
from embark.render.targets.kubeflow import MUST_NAME, NODE

INSTANCE = "app.kubernetes.io/instance"
"""The label of every pod of a run: it has the object's name."""
SUBMITTER = "ray-job-submitter"
"""KubeRay's container that submits the script to the Ray cluster and follows its log."""
_VOLCANO_ENDS = {"Completed": "Complete", "Failed": "Failed", "Aborted": "Failed", "Terminated": "Failed"}


@dataclass(frozen=True, slots=True)
class RunKind:
    """How one kind of object is read."""

    name: str
    """What kubectl calls it."""
    container: str
    """Where the ranks are; empty: the pod's first."""
    log_label: str = ""
    """Of the pods that have the log, where those are others: it has the object's name."""
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
    "job": RunKind(MANIFESTS["job"][1], CONTAINER),
    "jobset": RunKind(MANIFESTS["jobset"][1], CONTAINER),
    "trainjob": RunKind(MANIFESTS["trainjob"][1], NODE),
    "pytorchjob": RunKind(MANIFESTS["pytorchjob"][1], MUST_NAME),
    "ray": RunKind(MANIFESTS["ray"][1], "ray-worker", log_label="batch.kubernetes.io/job-name",
                   log_container=SUBMITTER, line=_ray_line, read=_ray_job),
    "torchx": RunKind("job.batch.volcano.sh", "", read=_volcano_job),
}
"""By `place.target`."""

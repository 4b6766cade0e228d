"""How a run stands on Vertex AI, and what its messages mean, in one sentence with a fix. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embark.formatting import pluralize, to_one_line
from embark.launch.backend import LogLine, Replica, RunEvent, State, Status, split_rank_prefix
from embark.launch.backends.kubernetes.log_follower import time_ns
from embark.launch.backends.kubernetes.reasons import Reason, explain_exit
from embark.launch.backends.kubernetes.status import time_s

SERVICE = "service"
"""What Vertex AI calls itself among the tasks of a job."""
STATES: dict[str, State] = {
    "QUEUED": "pending", "PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "succeeded",
    "PARTIALLY_SUCCEEDED": "succeeded", "FAILED": "failed", "EXPIRED": "failed", "CANCELLING": "pending",
    "CANCELLED": "gone", "PAUSED": "pending", "UPDATING": "running",
}
"""Of `JOB_STATE_…`."""
ACTIVE = ("QUEUED", "PENDING", "RUNNING", "CANCELLING", "PAUSED", "UPDATING")
_QUOTAS = "https://console.cloud.google.com/iam-admin/quotas?project={project}"
_TASK = re.compile(r"workerpool(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class _Row:
    pattern: str
    text: str
    fix: str


_ROWS = (
    _Row(r"(?:quota metrics? exceed\w* quota limits?:|Quota exceeded for quota metric|exceeds? quota)"
         r"\D{0,40}?((?:aiplatform\.googleapis\.com/)?[\w.]*custom_model_training\w*)",
         "the project's quota {1} in {region} is used up",
         "ask for more at " + _QUOTAS + ", or take another place.region or fewer place.nodes"),
    _Row(r"quota|RESOURCE_EXHAUSTED", "a quota of the project in {region} is used up",
         "ask for more at " + _QUOTAS + ", or take another place.region or fewer place.nodes"),
    _Row(r"[Rr]esources are insufficient|insufficient (capacity|resources)|ZONE_RESOURCE_POOL_EXHAUSTED|[Ss]tockout|"
         r"does not have enough resources",
         "Google has no such machines free in {region} now",
         "another place.region; place.spot = false finds machines more often; or launch it again later"),
    _Row(r"[Pp]reempt|was evicted|[Ss]pot VM", "a spot machine was taken back; Vertex AI starts all machines again",
         "nothing to do: it goes on from its last checkpoint; place.spot = false costs more and is not taken back"),
    _Row(r"(?:pull|access|find).{0,60}image|image.{0,60}(?:not found|denied|pull)", "the image cannot be pulled",
         "is place.image pushed to Artifact Registry, and may the Vertex AI service agent read it?"),
    _Row(r"[Pp]ermission|PERMISSION_DENIED|does not have .* access|iam\.serviceAccounts\.actAs",
         "an account lacks a right", "roles/aiplatform.user for who launches it; roles/iam.serviceAccountUser on "
                                     "place.identity; storage rights for place.identity"),
    _Row(r"[Tt]imeout|EXPIRED|maximum runtime", "it ran into its time limit",
         "raise place.max_hours; it goes on from its last checkpoint"),
)


def why(message: str, *, region: str, project: str) -> Reason:
    """Of Google's own words: the cause, with them behind it."""
    said = to_one_line(message)
    exited = re.search(r"exit(?:ed with a non-zero)? (?:status|code)(?: of)?:? ?(\d+)", said)
    if exited and exited[1] != "1":
        known = explain_exit(int(exited[1]), "")
        return Reason(f"{known.text} ({said})", known.fix)
    for row in _ROWS:
        match = re.search(row.pattern, said)
        if match:
            text = row.text.replace("{1}", match[1] if match.re.groups and match[1] else "").format(
                region=region, project=project)
            return Reason(f"{text} ({said})", row.fix.format(project=project))
    return Reason(said)


def status_of(job: Mapping[str, Any], events: Sequence[RunEvent], *, num_nodes: int, region: str, project: str,
              run_uri: str) -> Status:
    """`job` is a CustomJob as the REST API writes it."""
    word = state_of(job)
    state = STATES.get(word, "pending")
    error = str((job.get("error") or {}).get("message", ""))
    taken = [event for event in events if re.search(r"[Pp]reempt|restart", event.text)]
    num_restarts = sum(bool(re.search(r"restart", event.text)) for event in taken)
    since_s = time_s(str(job.get("startTime") or job.get("createTime") or ""))
    num_up = num_nodes if state == "running" else 0
    parts = tuple(Replica(f"replica {index}", index, "running") for index in range(num_up))

    def told(as_state: State, reason: Reason) -> Status:
        return Status(as_state, reason.text, reason.fix, parts, since_s, num_restarts)

    if word == "CANCELLING":
        return told("pending", Reason("being cancelled; its replicas end"))
    if state == "gone":
        return told("gone", Reason("cancelled", f"its checkpoints are in {run_uri}"))
    if state == "failed":
        found = why(error or word, region=region, project=project)
        return told("failed", Reason(found.text, found.fix or "embark logs says why"))
    if state == "pending":
        return told("pending", _why_pending(word, error, events, region=region, project=project))
    if state == "running" and num_restarts:
        return told("running", Reason(f"restarted {pluralize(num_restarts, 'time')}: {taken[-1].text}"))
    return told(state, Reason(""))


def state_of(job: Mapping[str, Any]) -> str:
    return str(job.get("state", "")).removeprefix("JOB_STATE_")


def entry_line(entry: Mapping[str, Any]) -> LogLine:
    """Of Cloud Logging."""
    task = _task(entry)
    match = _TASK.fullmatch(task)
    index = None if match is None else (0 if match[1] == "0" else 1) + int(match[2])
    return split_rank_prefix(LogLine(time_ns(str(entry.get("timestamp", ""))), task or "vertex", _message(entry), index))


def entry_event(entry: Mapping[str, Any]) -> RunEvent | None:
    """What Vertex AI itself said; None of a line of the ranks."""
    if _task(entry) != SERVICE:
        return None
    severity = str(entry.get("severity", "DEFAULT"))
    return RunEvent(time_s(str(entry.get("timestamp", ""))) or 0.0, SERVICE, severity.capitalize(),
                    to_one_line(_message(entry)), severity in ("WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY"))


def _why_pending(word: str, error: str, events: Sequence[RunEvent], *, region: str, project: str) -> Reason:
    last = error or next((event.text for event in reversed(events)), "")
    found = why(last, region=region, project=project) if last else Reason("")
    if found.fix:
        return found
    if word == "QUEUED":
        begins = "Vertex AI has not begun with it"
    elif word == "PAUSED":
        begins = "paused"
    else:
        begins = f"Vertex AI gets its machines in {region}"
    return Reason(f"{begins} ({found.text})" if found.text else begins)


def _task(entry: Mapping[str, Any]) -> str:
    labels = (entry.get("resource") or {}).get("labels") or {}
    return str(labels.get("task_name", ""))


def _message(entry: Mapping[str, Any]) -> str:
    payload = entry.get("jsonPayload") or {}
    return str(payload.get("message") or entry.get("textPayload") or "").rstrip("\n")

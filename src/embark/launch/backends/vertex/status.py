"""How a run stands on Vertex AI, and what its messages mean, in one sentence with a fix. Pure functions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from embark.formatting import pluralize, to_one_line
from embark.launch.backend import LogLine, Reason, Replica, RunEvent, State, Status, split_rank_prefix, time_ns, time_s
from embark.launch.explanations import explain, explain_exit

SERVICE = "service"
"""What Vertex AI calls itself among the tasks of a job."""
STATES: dict[str, State] = {
    "QUEUED": "pending", "PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "succeeded",
    "PARTIALLY_SUCCEEDED": "succeeded", "FAILED": "failed", "EXPIRED": "failed", "CANCELLING": "pending",
    "CANCELLED": "gone", "PAUSED": "pending", "UPDATING": "running",
}
"""Of `JOB_STATE_…`."""
ACTIVE = ("QUEUED", "PENDING", "RUNNING", "CANCELLING", "PAUSED", "UPDATING")
_TASK = re.compile(r"workerpool(\d+)-(\d+)")


def explain_message(message: str, *, region: str, project: str) -> Reason:
    """Of Google's message: the cause, followed by the message."""
    said = to_one_line(message)
    exited = re.search(r"exit(?:ed with a non-zero)? (?:status|code)(?: of)?:? ?(\d+)", said)
    if exited and exited[1] != "1":
        known = explain_exit(int(exited[1]))
        return Reason(f"{known.text} ({said})", known.fix)
    found = explain("vertex", said, region=region, project=project)
    return Reason(f"{found[0].text} ({said})", found[0].fix) if found else Reason(said)


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
    replicas = tuple(Replica(f"replica {index}", index, "running") for index in range(num_up))

    def make(as_state: State, reason: Reason) -> Status:
        return Status(state=as_state, reason=reason.text, fix=reason.fix, replicas=replicas, since_s=since_s,
                      num_restarts=num_restarts)

    if word == "CANCELLING":
        return make("pending", Reason("being cancelled; its replicas are ending"))
    if state == "gone":
        return make("gone", Reason("cancelled", f"its checkpoints are in {run_uri}"))
    if state == "failed":
        found = explain_message(error or word, region=region, project=project)
        return make("failed", Reason(found.text, found.fix or "embark logs says why"))
    if state == "pending":
        return make("pending", _why_pending(word, error, events, region=region, project=project))
    if state == "running" and num_restarts:
        return make("running", Reason(f"restarted {pluralize(num_restarts, 'time')}: {taken[-1].text}"))
    return make(state, Reason(""))


def state_of(job: Mapping[str, Any]) -> str:
    return str(job.get("state", "")).removeprefix("JOB_STATE_")


def entry_line(entry: Mapping[str, Any]) -> LogLine:
    """Of Cloud Logging."""
    task = _task(entry)
    match = _TASK.fullmatch(task)
    index = None if match is None else (0 if match[1] == "0" else 1) + int(match[2])
    at_ns = time_ns(str(entry.get("timestamp", "")))
    return split_rank_prefix(LogLine(at_ns, task or "vertex", _message(entry), index))


def entry_event(entry: Mapping[str, Any]) -> RunEvent | None:
    """What Vertex AI itself said; None of a line of the ranks."""
    if _task(entry) != SERVICE:
        return None
    severity = str(entry.get("severity", "DEFAULT"))
    return RunEvent(time_s(str(entry.get("timestamp", ""))) or 0.0, SERVICE, severity.capitalize(),
                    to_one_line(_message(entry)), severity in ("WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY"))


def _why_pending(word: str, error: str, events: Sequence[RunEvent], *, region: str, project: str) -> Reason:
    last = error or next((event.text for event in reversed(events)), "")
    found = explain_message(last, region=region, project=project) if last else Reason("")
    if found.fix:
        return found
    if word == "QUEUED":
        begins = "Vertex AI has not started it"
    elif word == "PAUSED":
        begins = "paused"
    else:
        begins = f"Vertex AI is provisioning machines in {region}"
    return Reason(f"{begins} ({found.text})" if found.text else begins)


def _task(entry: Mapping[str, Any]) -> str:
    labels = (entry.get("resource") or {}).get("labels") or {}
    return str(labels.get("task_name", ""))


def _message(entry: Mapping[str, Any]) -> str:
    payload = entry.get("jsonPayload") or {}
    return str(payload.get("message") or entry.get("textPayload") or "").rstrip("\n")

"""Why a run on Kubernetes failed: what its controller's own condition says, then what the pod that decided says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from embark.errors import ExitCode
from embark.formatting import to_one_line
from embark.launch.backend import Reason, explain, explain_exit
from embark.launch.backends.kubernetes.pods import Pod, condition_of

FAILED = ("Failed", "FailureTarget")
MAX_MESSAGE = 400  # Ray's message has the end of its log in it.
_NAMED_POD = re.compile(r"\b[Pp]od [^/\s]+/(?P<name>\S+) (?:failed with|has condition)")
_EXIT_CODE = re.compile(r"\bexit code (?P<code>\d+)")
"""The Job controller (pkg/controller/job/pod_failure_policy.go, Kubernetes 1.26 to 1.36) writes "Container %s for pod
%s/%s failed with exit code %v matching %v rule at index %d", or "Pod %s/%s has condition %v matching …"; Ray writes
"Job entrypoint command failed with exit code %d, last available logs …"."""
_FIRST_FAILED_JOB = re.compile(r"\(first failed job: (?P<name>\S+?)\)")
"""How a JobSet (pkg/controllers/failure_policy.go, 0.5 to 0.12) ends its message; Trainer 2 copies that message."""


def failed_condition(status: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((c for name in FAILED if (c := condition_of(status, name))), None)


def why_failed(
    condition: Mapping[str, Any], pods: Sequence[Pod], latest: Sequence[Pod], jobs: Sequence[Mapping[str, Any]] = (),
) -> Reason:
    """`jobs`: those that the object itself made, as a JobSet does: their conditions say more than its own."""
    message = str(condition.get("message") or "")
    behind = _condition_of_first_failed(message, jobs)
    said = "; ".join(_text(one) for one in (condition, behind) if one)
    known = [reason for one in (condition, behind) if one for reason in explain("failed", _text(one))]
    if known:  # a limit of the job, which ended all pods: none of them decided
        return Reason(f"{known[0].text} ({said})", known[0].fix)
    decisive = _text(behind or condition)
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


def _condition_of_first_failed(message: str, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    named = _FIRST_FAILED_JOB.search(message)
    failed = {str(job["metadata"]["name"]): c for job in jobs if (c := failed_condition(job.get("status", {})))}
    if named is not None:
        return failed.get(named["name"])
    return min(failed.values(), key=lambda c: str(c.get("lastTransitionTime", "")), default=None)


def _most_telling(pods: Sequence[Pod]) -> Pod | None:
    """Where the controller names none, as with a backoff limit that is used up: a pod whose code says what is wrong
    before one that was stopped because another had ended."""
    ranks = {int(ExitCode.BAD_INPUT): 0, int(ExitCode.PREEMPTED): 2, None: 3}
    ended = [p for p in pods if not p.preempted and ((p.phase == "Failed" and p.why.text) or p.exit_code)]
    return min(ended, key=lambda p: ranks.get(p.exit_code, 1), default=None)


def _text(condition: Mapping[str, Any]) -> str:
    said = ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
    line = to_one_line(said)
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"

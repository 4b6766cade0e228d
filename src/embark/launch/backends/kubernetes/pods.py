"""The pods of a run as the cluster describes them: what each waits for or ended with, and how far its log was read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from embark.kubernetes.names import INDEX_LABELS
from embark.kubernetes.objects import condition_of
from embark.launch.backend import (
    LogLine,
    Reason,
    RunEvent,
    explain_exit,
    explain_preemption,
    explain_unschedulable,
    explain_waiting,
    time_ns,
    time_s,
)
from embark.values import JsonDict, JsonMap, frozen

_NODE_FIXES = {"FailedMount": "kubectl describe pvc", "FailedAttachVolume": "kubectl describe pvc",
               "FailedCreatePodSandBox": "kubectl describe node"}
"""Why a container is not created on its node, by the reason of the kubelet's event, with where to look."""


@frozen
class PodStatus:
    """One pod as the cluster describes it, explained."""

    name: str
    index: int | None
    created: str
    phase: str
    is_leaving: bool
    preempted: str  # Why it was preempted; empty if it was not.
    why: Reason
    has_started: bool  # Its container has a log.
    num_container_starts: int
    since_s: float | None = None  # Unix time at which a node accepted it.
    node: str = ""  # The node it is assigned to.
    exit_code: int | None = None  # Exit code of the last end of its container.
    exit_reason: str = ""  # The kubelet's word for that end, such as OOMKilled.

    @classmethod
    def of(cls, found: JsonMap, container: str) -> PodStatus:
        """Read a Pod object; `container` is the one whose state counts, and the first if it is empty."""
        metadata, status = found["metadata"], found.get("status", {})
        labels = metadata.get("labels", {})
        state: JsonDict = next(
            (s for s in status.get("containerStatuses", ()) if s.get("name") == container or not container), {})
        now, disruption = state.get("state", {}), condition_of(status, "DisruptionTarget")
        preempted = disruption and explain_preemption(disruption.get("reason", ""), disruption.get("message", ""))
        ended = now.get("terminated") or ("waiting" in now and (state.get("lastState") or {}).get("terminated")) or {}
        return cls(
            name=metadata["name"],
            index=next((int(labels[name]) for name in INDEX_LABELS if str(labels.get(name, "")).isdigit()), None),
            created=metadata.get("creationTimestamp", ""), phase=status.get("phase", "Pending"),
            is_leaving="deletionTimestamp" in metadata, why=_why(status, now), since_s=time_s(status.get("startTime")),
            has_started="running" in now or "terminated" in now, num_container_starts=state.get("restartCount", 0),
            preempted=preempted or "", node=str(found.get("spec", {}).get("nodeName") or ""),
            exit_code=int(ended["exitCode"]) if "exitCode" in ended else None, exit_reason=str(ended.get("reason", "")))

    @property
    def title(self) -> str:
        return self.name if self.index is None else f"machine {self.index} ({self.name})"

    def waits_for(self, events: Sequence[RunEvent]) -> Reason:
        """Why a pod has not started. One that has its node waits for the node, not for the scheduler."""
        if not self.node:
            return Reason(self.why.text or "not scheduled yet", self.why.fix)
        of_node = [e for e in events if e.is_warning and e.source == self.name and e.reason in _NODE_FIXES]
        if of_node and not self.why.fix:
            return Reason(f"{of_node[-1].text}, on node {self.node}", _NODE_FIXES[of_node[-1].reason])
        return Reason(f"{self.why.text or 'its container is not created yet'}, on node {self.node}", self.why.fix)


def newest(pods: Sequence[PodStatus]) -> list[PodStatus]:
    """Return the pod of each index that came last."""
    found: dict[object, PodStatus] = {}
    for pod in sorted(pods, key=lambda p: (p.created, not p.is_leaving, p.name)):
        found[pod.name if pod.index is None else pod.index] = pod
    return sorted(found.values(), key=lambda p: (p.index is None, p.index or 0, p.name))


def _why(status: JsonMap, state: JsonMap) -> Reason:
    ended = state.get("terminated")
    if ended:
        code = int(ended.get("exitCode", 0))
        return explain_exit(code, str(ended.get("reason", ""))) if code else Reason("")
    waiting = _stuck_init_container(status) or state.get("waiting")
    if waiting:
        return explain_waiting(str(waiting.get("reason", "")), str(waiting.get("message", "")))
    unscheduled = condition_of(status, "PodScheduled", "False")
    if unscheduled:
        if unscheduled.get("reason") == "SchedulingGated":
            return Reason("waiting for its queue to admit it")
        return explain_unschedulable(str(unscheduled.get("message", "")))
    if status.get("phase") == "Failed":
        return Reason(": ".join(str(status[key]) for key in ("reason", "message") if status.get(key)))
    return Reason("")


def _stuck_init_container(status: JsonMap) -> JsonDict | None:
    """Return the waiting state of an init container that cannot start; None if it only waits for its turn."""
    waiting = [s.get("state", {}).get("waiting") for s in status.get("initContainerStatuses") or ()]
    return next((w for w in waiting if w and w.get("reason") not in ("PodInitializing", "ContainerCreating")), None)


@dataclass(slots=True)
class PodLogPosition:
    """The position up to which a pod's log was read: the time of its last line, and the number of lines with that
    time."""

    last_ns: int = 0
    num_at_last: int = 0
    to_skip: int = 0  # Lines with the time `last_ns` that a reopened log repeats.

    def begin(self) -> str:
        """Return the value of `--since-time`, which has full seconds only, so that some lines are repeated."""
        self.to_skip = self.num_at_last
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.last_ns // 1_000_000_000)) if self.last_ns else ""

    def parse(self, pod: PodStatus, text: str) -> LogLine | None:
        """Return a line of the log, or None if it was read before."""
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

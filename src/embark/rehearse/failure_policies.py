"""What each controller makes of a pod's end: done, replaced, all started again, or failed. Pure, but for counting.

They read the manifest's own policy: of a Job the pod failure policy and the back-off limit, of a JobSet its failure
policy besides, of a PyTorchJob the replicas' restart policy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from embark.rehearse.objects import Thing, at, rows
from embark.rehearse.pods import Pod

Action = Literal["done", "replace", "restart all", "succeed", "fail"]
BACKOFF_LIMIT = 6
"""Kubernetes' own, where a Job does not say."""
RETRYABLE_FROM = 128
"""Exit codes that the training operator's `ExitCode` policy tries again."""


@dataclass(frozen=True, slots=True)
class End:
    """How a pod's container ended."""

    pod: Pod
    code: int
    """Of a signal: 128 and its number."""
    is_disrupted: bool = False
    """Its machine was taken away: the pod has the condition DisruptionTarget."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a controller does about it, in its words."""

    action: Action
    text: str
    reason: str = ""
    """The Job's failure reason: `PodFailurePolicy`, `BackoffLimitExceeded`."""


class Judge(Protocol):
    """Told each end in turn."""

    def judge(self, end: End) -> Decision: ...


@dataclass(slots=True)
class JobJudge:
    """A Job: pods with an index each must succeed once."""

    name: str
    completions: int
    backoff_limit: int
    rules: tuple[Thing, ...]
    restart_policy: str
    num_failed: int = 0
    succeeded: set[int] = field(default_factory=set)

    @staticmethod
    def of(name: str, spec: Thing, restart_policy: str, completions: int) -> JobJudge:
        limit = spec.get("backoffLimit")
        return JobJudge(name, completions, BACKOFF_LIMIT if limit is None else int(limit),
                        tuple(rows(spec, "podFailurePolicy.rules")), restart_policy)

    def judge(self, end: End) -> Decision:
        if end.code == 0:
            self.succeeded.add(end.pod.index)
            if len(self.succeeded) >= self.completions:
                return Decision("succeed", f"Job {self.name} is complete")
            return Decision("done", f"{end.pod.name} is complete")
        number, rule = next(((n, one) for n, one in enumerate(self.rules) if _matches(one, end)), (0, None))
        action = str(rule.get("action")) if rule is not None else "Count"
        why = _why(end)
        if action == "FailJob":
            text = (f"Container {end.pod.container} for pod {end.pod.namespace}/{end.pod.name} failed with exit code "
                    f"{end.code} matching FailJob rule at index {number}")
            if "onPodConditions" in (rule or {}):
                text = (f"Pod {end.pod.namespace}/{end.pod.name} has condition DisruptionTarget matching FailJob rule "
                        f"at index {number}")
            return Decision("fail", text, "PodFailurePolicy")
        if action == "Ignore":
            return Decision("replace", f"{end.pod.name} {why}: not counted, by rule {number} of podFailurePolicy")
        self.num_failed += 1
        if self.num_failed > self.backoff_limit:
            return Decision("fail", f"Job {self.name} has reached its backoffLimit of {self.backoff_limit}: "
                                    f"{end.pod.name} {why}", "BackoffLimitExceeded")
        return Decision("replace", f"{end.pod.name} {why}: failure {self.num_failed} of the {self.backoff_limit} that "
                                   "backoffLimit allows")


@dataclass(slots=True)
class JobSetJudge:
    """A JobSet, whose child Jobs fail by their own policy and are then all started again, or not."""

    name: str
    children: Mapping[str, JobJudge]
    """By the group of their pods."""
    replicated: Mapping[str, str]
    """Group to the replicated job's name."""
    max_restarts: int
    rules: tuple[Thing, ...]
    num_restarts: int = 0
    done: set[str] = field(default_factory=set)

    def judge(self, end: End) -> Decision:
        decision = self.children[end.pod.group].judge(end)
        if decision.action == "succeed":
            self.done.add(end.pod.group)
            if len(self.done) == len(self.children):
                return Decision("succeed", f"JobSet {self.name} is complete")
            return Decision("done", decision.text)
        if decision.action != "fail":
            return decision
        rule = next((one for one in self.rules if self._matches(one, decision, end.pod.group)), None)
        action = str(rule.get("action")) if rule is not None else "RestartJobSet"
        named = f", by its rule {rule.get('name', '')!r}" if rule is not None else ""
        if action == "FailJobSet":
            return Decision("fail", f"JobSet {self.name} fails{named}: {decision.text}", decision.reason)
        if action == "RestartJobSet":
            if self.num_restarts >= self.max_restarts:
                return Decision("fail", f"JobSet {self.name} has used its {self.max_restarts} restarts: "
                                        f"{decision.text}", decision.reason)
            self.num_restarts += 1
        self._begin_again()
        return Decision("restart all", f"JobSet {self.name} starts all pods again{named}: {decision.text}")

    def _matches(self, rule: Thing, decision: Decision, group: str) -> bool:
        reasons = rule.get("onJobFailureReasons") or ()
        patterns = rule.get("onJobFailureMessagePatterns") or ()
        targets = rule.get("targetReplicatedJobs") or ()
        return ((not reasons or decision.reason in reasons)
                and (not patterns or any(re.search(str(one), decision.text) for one in patterns))
                and (not targets or self.replicated[group] in targets))

    def _begin_again(self) -> None:
        self.done.clear()
        for child in self.children.values():
            child.num_failed = 0
            child.succeeded.clear()


@dataclass(slots=True)
class ReplicasJudge:
    """A PyTorchJob of the training operator 1.9: it deletes a failed pod and makes it anew."""

    name: str
    policies: Mapping[str, str]
    """Restart policy by replica type."""
    counts: Mapping[str, int]
    backoff_limit: int | None
    num_restarts: int = 0
    succeeded: set[str] = field(default_factory=set)

    def judge(self, end: End) -> Decision:
        deciding = "Master" if "Master" in self.policies else "Worker"
        if end.code == 0:
            self.succeeded.add(end.pod.name)
            num_done = sum(name.startswith(f"{self.name}-{deciding.lower()}-") for name in self.succeeded)
            if num_done >= self.counts.get(deciding, 1):
                return Decision("succeed", f"PyTorchJob {self.name} is complete")
            return Decision("done", f"{end.pod.name} is complete")
        policy, why = self.policies[end.pod.group], _why(end)
        if policy == "Never" or (policy == "ExitCode" and end.code < RETRYABLE_FROM):
            return Decision("fail", f"PyTorchJob {self.name} is failed: {end.pod.name} {why}, and its restartPolicy is "
                                    f"{policy}", "PyTorchJobFailed")
        self.num_restarts += 1
        if self.backoff_limit is not None and self.num_restarts > self.backoff_limit:
            return Decision("fail", f"PyTorchJob {self.name} has reached its backoffLimit of {self.backoff_limit}: "
                                    f"{end.pod.name} {why}", "BackoffLimitExceeded")
        allowed = f" of the {self.backoff_limit} that backoffLimit allows" if self.backoff_limit is not None else ""
        return Decision("replace", f"{end.pod.name} {why}: restart {self.num_restarts}{allowed}")


@dataclass(slots=True)
class PodJudge:
    """A bare Pod: its container is started again as restartPolicy says; nobody replaces the pod itself."""

    name: str
    restart_policy: str
    num_restarts: int = 0

    def judge(self, end: End) -> Decision:
        why = _why(end)
        if end.is_disrupted:
            return Decision("fail", f"{end.pod.name} {why}, and no controller makes a bare Pod again", "Evicted")
        if end.code == 0 and self.restart_policy != "Always":
            return Decision("succeed", f"Pod {self.name} is complete")
        if self.restart_policy == "Never":
            return Decision("fail", f"{end.pod.name} {why}", "Error")
        self.num_restarts += 1
        if self.num_restarts > BACKOFF_LIMIT:
            return Decision("fail", f"{end.pod.name} {why} each time it is started: CrashLoopBackOff, with no end to "
                                    "it", "CrashLoopBackOff")
        return Decision("replace", f"{end.pod.name} {why}: its container is started again, by restartPolicy "
                                   f"{self.restart_policy}")


def _matches(rule: Thing, end: End) -> bool:
    if codes := rule.get("onExitCodes"):
        if codes.get("containerName") not in (None, end.pod.container) or end.code == 0:
            return False
        values: Sequence[object] = codes.get("values") or ()
        return (end.code in values) == bool(codes.get("operator") == "In")
    for condition in rows(rule, "onPodConditions"):
        if condition.get("type") == "DisruptionTarget" and str(condition.get("status", "True")) == "True":
            return end.is_disrupted
    return False


def _why(end: End) -> str:
    return "was preempted" if end.is_disrupted else f"ended with exit code {end.code}"


def job_set_rules(spec: Thing) -> tuple[int, tuple[Thing, ...]]:
    """maxRestarts and the rules of a JobSet's failure policy."""
    policy = at(spec, "failurePolicy") or {}
    return int(policy.get("maxRestarts") or 0), tuple(rows(policy, "rules"))

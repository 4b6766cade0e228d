"""What each controller does when a pod ends: done, replace it, restart all, or fail. Pure, except for counters.

They read the manifest's own policy: a Job's podFailurePolicy and backoffLimit, a JobSet's failurePolicy as well, the
restart policy of a PyTorchJob's replicas.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from embark.values import frozen
from .objects import K8sObject, rows
from .pods import Pod

Action = Literal["done", "replace", "restart all", "succeed", "fail"]
BACKOFF_LIMIT = 6  # Kubernetes' default.
RETRYABLE_FROM = 128  # Exit codes that the training operator's `ExitCode` policy tries again.


@frozen
class PodEnd:
    """The end of a pod's container."""

    pod: Pod = field(repr=False)
    code: int  # 128 and the number of a signal, if one ended it.
    is_preempted: bool = False  # The pod has the condition DisruptionTarget: its machine was taken away.
    is_deleted: bool = False  # The controller deleted it, to restart all pods.
    at_s: float = 0.0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.pod.name)


@frozen
class Decision:
    """The reaction of a controller to the end of a pod, in its own words."""

    action: Action
    text: str
    reason: str = ""  # The Job's failure reason: `PodFailurePolicy`, `BackoffLimitExceeded`.


class FailurePolicy(Protocol):
    """Decides on the end of each pod in turn."""

    def decide(self, end: PodEnd) -> Decision: ...


class JobPolicy:
    """The policy of a Job, each of whose indexes must succeed once."""

    def __init__(self, name: str, spec: K8sObject) -> None:
        limit = spec.get("backoffLimit")
        self.name = name
        self.completions = int(spec.get("completions") or spec.get("parallelism") or 1)
        self.backoff_limit = BACKOFF_LIMIT if limit is None else int(limit)
        self.rules = rows(spec, "podFailurePolicy.rules")
        self.success_rules = rows(spec, "successPolicy.rules")
        self.num_failed = 0
        self.succeeded: set[int] = set()

    def decide(self, end: PodEnd) -> Decision:
        if end.code == 0:
            self.succeeded.add(end.pod.index)
            if len(self.succeeded) >= self.completions:
                return Decision("succeed", f"Job {self.name} is complete")
            if any(self._is_enough(rule) for rule in self.success_rules):
                return Decision("succeed", f"Job {self.name} is complete, by its successPolicy")
            return Decision("done", f"{end.pod.name} is complete")
        number, rule = next(((n, one) for n, one in enumerate(self.rules) if _matches(one, end)), (0, None))
        action = str(rule.get("action")) if rule is not None else "Count"
        why = _why(end)
        if action == "FailJob":
            pod = f"{end.pod.namespace}/{end.pod.name}"
            text = f"Pod {pod} has condition DisruptionTarget" if "onPodConditions" in (rule or {}) else \
                f"Container {end.pod.container} for pod {pod} failed with exit code {end.code}"
            return Decision("fail", f"{text} matching FailJob rule at index {number}", "PodFailurePolicy")
        if action == "Ignore":
            return Decision("replace", f"{end.pod.name} {why}: not counted, by rule {number} of podFailurePolicy")
        self.num_failed += 1
        if self.num_failed > self.backoff_limit:
            return Decision("fail", f"Job {self.name} has reached its backoffLimit of {self.backoff_limit}: "
                                    f"{end.pod.name} {why}", "BackoffLimitExceeded")
        return Decision("replace", f"{end.pod.name} {why}: failure {self.num_failed} of the {self.backoff_limit} that "
                                   "backoffLimit allows")

    def _is_enough(self, rule: K8sObject) -> bool:
        """Return whether as many indexes have succeeded as a rule of the successPolicy wants."""
        among = set(range(self.completions))
        if "succeededIndexes" in rule:
            ends = [part.partition("-") for part in str(rule["succeededIndexes"]).split(",")]
            among = {index for low, _, high in ends for index in range(int(low), int(high or low) + 1)}
        return len(self.succeeded & among) >= int(rule.get("succeededCount") or len(among))


@dataclass(slots=True)
class JobSetPolicy:
    """The policy of a JobSet, whose child Jobs fail by their own policy and are then all started again, or not."""

    name: str
    children: Mapping[str, JobPolicy]  # The policy of each group of pods.
    replicated: Mapping[str, str]  # The replicated job's name of each group.
    max_restarts: int
    rules: tuple[K8sObject, ...]
    num_restarts: int = 0
    done: set[str] = field(default_factory=set)

    def decide(self, end: PodEnd) -> Decision:
        decision = self.children[end.pod.group].decide(end)
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
        self.done.clear()
        for child in self.children.values():
            child.num_failed = 0
            child.succeeded.clear()
        return Decision("restart all", f"JobSet {self.name} restarts all pods{named}: {decision.text}")

    def _matches(self, rule: K8sObject, decision: Decision, group: str) -> bool:
        reasons = rule.get("onJobFailureReasons") or ()
        patterns = rule.get("onJobFailureMessagePatterns") or ()
        targets = rule.get("targetReplicatedJobs") or ()
        return ((not reasons or decision.reason in reasons)
                and (not patterns or any(re.search(str(one), decision.text) for one in patterns))
                and (not targets or self.replicated[group] in targets))

@dataclass(slots=True)
class ReplicaPolicy:
    """The policy of a PyTorchJob of the training operator 1.9, which deletes a failed pod and makes it anew."""

    name: str
    policies: Mapping[str, str]  # Restart policy by replica type.
    counts: Mapping[str, int]
    backoff_limit: int | None
    is_elastic: bool = False  # It has an elasticPolicy: the first worker that is done ends it (kubeflow/trainer#1752).
    num_restarts: int = 0
    succeeded: set[str] = field(default_factory=set)

    def decide(self, end: PodEnd) -> Decision:
        deciding = "Master" if "Master" in self.policies else "Worker"
        if end.code == 0:
            self.succeeded.add(end.pod.name)
            num_done = sum(name.startswith(f"{self.name}-{deciding.lower()}-") for name in self.succeeded)
            if num_done >= self.counts.get(deciding, 1) or (self.is_elastic and num_done):
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


def _matches(rule: K8sObject, end: PodEnd) -> bool:
    if codes := rule.get("onExitCodes"):
        if codes.get("containerName") not in (None, end.pod.container) or end.code == 0:
            return False
        values: Sequence[object] = codes.get("values") or ()
        return (end.code in values) == bool(codes.get("operator") == "In")
    for condition in rows(rule, "onPodConditions"):
        if condition.get("type") == "DisruptionTarget" and str(condition.get("status", "True")) == "True":
            return end.is_preempted
    return False


def _why(end: PodEnd) -> str:
    return "was preempted" if end.is_preempted else f"ended with exit code {end.code}"

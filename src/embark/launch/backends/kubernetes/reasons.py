"""What Kubernetes says of a pod that does not start, in words a person can act on."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence and, where there is one, the fix."""

    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    pattern: str
    text: str
    fix: str


_ROWS = (
    _Row(r"exceeded quota", "the namespace's quota is used up",
         "kubectl describe resourcequota; raise it, or wait for other runs"),
    _Row(r"serviceaccount .* not found", "the service account is not there", "embark launch makes it: launch again"),
    _Row(r'persistentvolumeclaim "([^"]+)" not found', "the volume's claim {1} is not there",
         "run storage.sh of the rendered folder"),
    _Row(r"unbound immediate PersistentVolumeClaims|unbound PersistentVolumeClaims",
         "the volume's claim is not bound to a volume", "run storage.sh of the rendered folder; kubectl get pvc"),
    _Row(r"configmap \"([^\"]+)\" not found", "the ConfigMap {1} is not there", "launch again: it holds the spec"),
    _Row(r"Insufficient (vpc\.amazonaws\.com/efa)", "no node has enough EFA devices free ({1})",
         "is the EFA device plugin there? helm upgrade --install efa eks/aws-efa-k8s-device-plugin -n kube-system"),
    _Row(r"Insufficient (rdma/\S+?)[,. ]", "no node has enough InfiniBand devices free ({1})",
         "is NVIDIA's network operator there, with its NicClusterPolicy?"),
    _Row(r"Insufficient (hugepages-\S+?)[,. ]", "no node has enough huge pages free ({1})",
         "the node pool must set them up as it boots"),
    _Row(r"Insufficient (nvidia\.com/gpu)", "no node has enough GPUs free ({1})",
         "wait for the pool to grow or for other runs; kubectl get nodes; is there quota for one more machine?"),
    _Row(r"Insufficient (memory|cpu|ephemeral-storage)", "no node has enough {1} free",
         "a larger machine, or fewer other pods on its nodes"),
    _Row(r"didn't match Pod's node affinity/selector|didn't match pod anti-affinity",
         "no node of the right machine type is free",
         "wait for the node pool to grow; is it made, and of this machine?"),
    _Row(r"had untolerated taint(?:\(s\))?(?: \{([^}]*)\})?", "the nodes that fit have a taint the pods do not bear",
         "kubectl describe node; remove the taint, or use the node pool that embark render describes"),
    _Row(r"no nodes available|0/0 nodes", "the cluster has no nodes", "make the node pool, or let it grow from 0"),
)
_WAITING = {
    "ErrImagePull": Reason("the image cannot be pulled", "is place.image pushed, and may the nodes read the registry?"),
    "ImagePullBackOff": Reason("the image cannot be pulled",
                               "is place.image pushed, and may the nodes read the registry?"),
    "InvalidImageName": Reason("the image's name is wrong", "set place.image"),
    "CreateContainerConfigError": Reason("the container's settings cannot be read", "kubectl describe pod"),
    "CreateContainerError": Reason("the container cannot be made", "kubectl describe pod"),
    "RunContainerError": Reason("the container cannot be started", "kubectl describe pod"),
    "CrashLoopBackOff": Reason("the container ends each time it is started", "embark logs shows why"),
    "ContainerCreating": Reason("the image is pulled and volumes are mounted"),
    "PodInitializing": Reason("the fabric's daemon starts first"),
}
_PREEMPTED = {
    "PreemptionByScheduler": "a pod of higher priority took its place",
    "DeletionByTaintManager": "its node was tainted, as one is that is taken away",
    "EvictionByEvictionAPI": "its node is being drained",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node shut down or ran out of something",
}
_EXITS = {
    64: Reason("the spec or the data is wrong (exit code 64), or its budget is spent",
               "embark logs says what; it is not tried again"),
    70: Reason("a fault that a retry may cure (exit code 70)", "embark logs says what"),
    75: Reason("preempted and saved (exit code 75)"),
    137: Reason("killed (exit code 137): out of memory, or out of its grace", "embark logs, embark diagnose"),
}


def explain_unschedulable(message: str) -> Reason:
    """Of the scheduler's sentence: every cause that is in it, the scheduler's own words behind them."""
    found = [(row, match) for row in _ROWS if (match := re.search(row.pattern, message))]
    if not found:
        return Reason(message or "the scheduler has not looked at it yet")
    texts = [re.sub(r"\{(\d)\}", lambda m, got=match: got.group(int(m.group(1))) or "", row.text)  # type: ignore[misc]
             for row, match in found]
    return Reason(f"{'; '.join(dict.fromkeys(texts))} ({message})", found[0][0].fix)


def explain_waiting(reason: str, message: str) -> Reason:
    """Of a container that does not run."""
    known = _WAITING.get(reason)
    if known is None:
        return Reason(": ".join(word for word in (reason, message) if word))
    explained = explain_unschedulable(message) if message else Reason("")
    if explained.fix:
        return explained
    return Reason(f"{known.text} ({message})" if message else known.text, known.fix)


def explain_preemption(reason: str, message: str) -> str:
    return _PREEMPTED.get(reason, message or reason)


def explain_exit(code: int, reason: str) -> Reason:
    if reason == "OOMKilled":
        return Reason("killed: its memory limit was not enough", "a larger machine, or a smaller batch; embark plan")
    return _EXITS.get(code, Reason(f"ended with exit code {code}", "embark logs says why"))

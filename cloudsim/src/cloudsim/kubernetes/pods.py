"""Pods of a cluster: made from a controller's template, put on a node, and started there."""

from collections.abc import Mapping, Sequence
from typing import Any

from cloudsim.kubernetes.admission import pod_refusal
from cloudsim.kubernetes.cluster import Cluster, Object, ObjectKey
from cloudsim.kubernetes.kubelet import start_trouble
from cloudsim.kubernetes.scheduler import choose_node, pool_that_fits, requests
from embark.kubernetes.objects import at, rows
from embark.kubernetes.pods import Pod


def create_pods(cluster: Cluster, key: ObjectKey, job: Object, pods: Sequence[Pod]) -> bool:
    """Create the pods of a controller's object, unless something that they name is missing."""
    for pod in pods:
        if refused := pod_refusal(cluster, key[1], pod.spec):
            cluster.emit(job, "FailedCreate", f'Error creating: pods "{key[2]}-" is forbidden: {refused}')
            return False
    for pod in pods:
        spec = dict(pod.spec)
        if cluster.tolerates_extended_resources:
            devices = [name for name in requests({"spec": spec}) if "/" in name]
            spec["tolerations"] = [*(spec.get("tolerations") or []), *(
                {"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in devices)]
        owner = {"kind": job["kind"], "name": key[2], "key": list(key)}
        cluster.add("Pod", pod.name, key[1], spec=spec, status={"phase": "Pending", "conditions": []},
                    metadata={"labels": dict(pod.labels), "ownerReferences": [owner]})
    return bool(pods)


def start_pod(cluster: Cluster, pod: Pod, stored: Object) -> None:
    """Assign a node to a pod and start its container."""
    if not at(stored, "spec.nodeName"):
        node, message = choose_node(cluster, stored)
        if node is None:
            cluster.emit(stored, "FailedScheduling", message)
            stored["status"]["conditions"] = [condition("PodScheduled", "Unschedulable", message, status="False")]
            pool, why_not = pool_that_fits(cluster, stored)
            if why_not:
                cluster.emit(stored, "NotTriggerScaleUp", why_not, warning=False)
            # One machine for each waiting pod, all at once; more only if those that have started do not suffice.
            own = cluster.nodes_of(pool.name) if pool else []
            is_starting = any(one.ready_at > cluster.clock.now for one in own)
            if pool is not None and not (is_starting and stored["status"].get("hasScaledUp")):
                wanted = len(own) + 1
                error = cluster.cloud.on_pool_change(pool, wanted)
                if error:
                    cluster.emit(stored, "NotTriggerScaleUp", error)
                else:
                    cluster.resize_pool(pool.name, wanted)
                    stored["status"]["hasScaledUp"] = True
                    cluster.emit(stored, "TriggeredScaleUp", f"pod triggered scale-up: {pool.name}", warning=False)
            return
        stored["spec"]["nodeName"] = node.name
        stored["status"]["conditions"] = [condition("PodScheduled", "", "")]
    if at(stored, "status.phase") != "Pending":
        return
    reason, message = start_trouble(cluster, stored)
    if reason:
        cluster.emit(stored, "FailedMount" if reason == "ContainerCreating" else "Failed", message)
        stored["status"]["containerStatuses"] = [{"name": pod.container, "ready": False, "state": {
            "waiting": {"reason": reason, "message": message}}}]
        return
    stored["status"]["conditions"].append(condition("Ready", "", ""))
    stored["status"] |= {"phase": "Running", "containerStatuses": [
        {"name": pod.container, "ready": True, "state": {"running": {}}}]}


def pods_owned_by(cluster: Cluster, key: ObjectKey) -> list[Object]:
    return [one for one in cluster.of_kind("Pod", key[1])
            if any(tuple(owner["key"]) == key for owner in rows(one, "metadata.ownerReferences"))]


def condition(kind: str, reason: str, message: str, *, status: str = "True") -> Mapping[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}

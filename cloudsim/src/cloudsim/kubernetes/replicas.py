"""Deployments, StatefulSets and their autoscalers: pods are replaced one after the other, as the strategy allows."""

import hashlib
import json
import math
from typing import Any

from cloudsim.kubernetes.cluster import Cluster, JobRun, Object, ObjectKey
from cloudsim.kubernetes.kubelet import missing_file, path_trouble
from cloudsim.kubernetes.pods import condition, create_pods, pods_owned_by, start_pod
from cloudsim.kubernetes.programs import spec_trouble, store_environment
from cloudsim.kubernetes.scheduler import requests
from cloudsim.kubernetes.volumes import bind_claims
from embark.kubernetes.objects import Objects, at, name_of, namespace_of, rows
from embark.kubernetes.pods import PodIdentity, make_pod
from embark.rehearse.server import probe_error, served_artifact

REVISION = "pod-template-hash"
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
CUSTOM_METRICS = ("prometheus-adapter", "keda")  # Releases that answer for metrics other than processors and memory.
DEADLINE_S = 600.0


def reconcile_replicas(cluster: Cluster, key: ObjectKey, thing: Object) -> None:
    """Create and delete pods until the strategy allows no more, and note whether that is progress."""
    run = cluster.runs.setdefault(key, JobRun())
    wanted = at(thing, "spec.replicas")
    wanted = 1 if wanted is None else int(wanted)
    revision = hashlib.sha256(json.dumps(at(thing, "spec.template"), sort_keys=True).encode()).hexdigest()[:8]
    while _step(cluster, key, thing, wanted, revision):
        pass
    pods = pods_owned_by(cluster, key)
    ready = [one for one in pods if _is_ready(one)]
    new = [one for one in ready if one["metadata"]["labels"][REVISION] == revision]
    is_done = len(new) == wanted == len(pods)
    state = f"{revision} {wanted} {len(new)} {len(pods)}"
    if run.logs.get("") != state or is_done:
        run.logs[""], run.ends_at = state, cluster.clock.now
    waited_s = cluster.clock.now - run.ends_at
    is_late = key[0] == "Deployment" and waited_s > float(at(thing, "spec.progressDeadlineSeconds") or DEADLINE_S)
    thing["status"] = {
        "replicas": len(pods), "readyReplicas": len(ready), "updatedReplicas": len(new), "conditions": [
            condition("Available", "", "", status=str(len(ready) >= wanted - _limits(thing, wanted)[1])),
            condition("Progressing", "ProgressDeadlineExceeded", "has timed out progressing.", status="False")
            if is_late else condition("Progressing", "NewReplicaSetAvailable" if is_done else "ReplicaSetUpdated", "")]}


def _step(cluster: Cluster, key: ObjectKey, thing: Object, wanted: int, revision: str) -> bool:
    """Start the pods that there are and create or delete one; return whether one was."""
    pods = pods_owned_by(cluster, key)
    for one in pods:
        _start(cluster, key, thing, one)
    new = [one for one in pods if one["metadata"]["labels"][REVISION] == revision]
    old = [one for one in pods if one not in new]
    num_ready = sum(map(_is_ready, pods))
    surge, missing = _limits(thing, wanted)
    is_ordered = key[0] == "StatefulSet"
    if len(new) > wanted or (old and (at(thing, "spec.strategy.type") == "Recreate" or is_ordered)):
        victims = old or new
    elif len(new) < wanted and len(pods) < wanted + surge and not (is_ordered and num_ready < len(pods)):
        return _add(cluster, key, thing, revision)
    else:
        victims = [one for one in old if not _is_ready(one) or num_ready > wanted - missing]
    if victims:
        victim = min(victims, key=_is_ready)
        cluster.objects.pop(("Pod", key[1], name_of(victim)))
    return bool(victims)


def _add(cluster: Cluster, key: ObjectKey, thing: Object, revision: str) -> bool:
    taken = {name_of(one) for one in pods_owned_by(cluster, key)}
    stem = key[2] if key[0] == "StatefulSet" else f"{key[2]}-{revision}"
    index = next(number for number in range(len(taken) + 1) if f"{stem}-{number}" not in taken)
    template = dict(at(thing, "spec.template") or {})
    for claim in rows(thing, "spec.volumeClaimTemplates"):
        name = f"{name_of(claim)}-{key[2]}-{index}"
        if cluster.find("PersistentVolumeClaim", name, key[1]) is None:
            cluster.add("PersistentVolumeClaim", name, key[1], spec=dict(claim["spec"]))
        volume = {"name": name_of(claim), "persistentVolumeClaim": {"claimName": name}}
        template["spec"] = {**template["spec"], "volumes": [*rows(template, "spec.volumes"), volume]}
    pod = make_pod(template, PodIdentity(name=f"{stem}-{index}", namespace=key[1], index=index, group=key[2],
                                         labels={REVISION: revision}), Objects(tuple(cluster.objects.values())))
    cluster.runs[key].pods = (*(one for one in cluster.runs[key].pods if one.name in taken), pod)
    is_made = create_pods(cluster, key, thing, [pod])
    bind_claims(cluster)
    return is_made


def _start(cluster: Cluster, key: ObjectKey, thing: Object, stored: Object) -> None:
    """Start a pod; in an account with an object store its server is a process of this machine, and ready when that is.
    """
    run = cluster.runs[key]
    pod = next(one for one in run.pods if one.name == name_of(stored))
    start_pod(cluster, pod, stored)
    artifact = served_artifact(thing)
    if at(stored, "status.phase") != "Running":
        return
    trouble = missing_file(pod) or spec_trouble(cluster, pod, stored) or probe_error(pod)
    if artifact and not trouble:
        trouble = path_trouble(cluster, stored, artifact, write=False)
    run.logs[pod.name] = f"error: {trouble}\n" if trouble else f"started: {' '.join(pod.words)}\n"
    if artifact and not trouble and (env := store_environment(cluster)):
        trouble = cluster.servers.start(pod, artifact, cluster.folder / "servers", env)
        run.logs[pod.name] = cluster.servers.log(pod)
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": trouble}}
    stored["status"]["containerStatuses"] = [{"name": pod.container, "ready": not trouble, "state": waits if trouble
                                              else {"running": {}}, "restartCount": 3 if trouble else 0}]


def _is_ready(pod: Object) -> bool:
    statuses = rows(pod, "status.containerStatuses")
    return at(pod, "status.phase") == "Running" and all(one.get("ready") for one in statuses)


def _limits(thing: Object, wanted: int) -> tuple[int, int]:
    """Return how many pods there may be beyond those that are wanted, and how many of those may be unavailable."""
    if thing["kind"] == "StatefulSet":
        return 0, 1
    rolling = at(thing, "spec.strategy.rollingUpdate") or {}

    def number(name: str, rounded: Any) -> int:
        text = str(rolling.get(name, "25%"))
        return int(rounded(wanted * float(text[:-1]) / 100)) if text.endswith("%") else int(text)

    surge, missing = number("maxSurge", math.ceil), number("maxUnavailable", math.floor)
    return surge, max(missing, 0 if surge else 1)


def _metric_error(cluster: Cluster, metric: Any, target: Object) -> str:
    """Return why the autoscaler does not know a metric of its target, or an empty text."""
    if metric.get("type") != "Resource":
        what = at(metric, f"{str(metric.get('type')).lower()}.metric.name")
        return "" if set(CUSTOM_METRICS) & set(cluster.releases) else (
            f"unable to get metric {what}: custom metrics API: no known available metric versions found")
    name, is_share = str(at(metric, "resource.name")), at(metric, "resource.target.type") == "Utilization"
    if not cluster.has_metrics_server:
        return (f"unable to get metric {name}: resource metrics API: the server could not find the requested resource: "
                "the cluster has no metrics-server")
    if name not in ("cpu", "memory"):
        return f"unable to get metric {name}: the resource metrics API has cpu and memory"
    containers = rows(target, "spec.template.spec.containers") if is_share else []
    return next((f"failed to get {name} utilization: missing request for {name} in container {one.get('name')}"
                 for one in containers if name not in requests({"spec": {"containers": [one]}})), "")


def scale(cluster: Cluster) -> None:
    """Set the number of replicas for the load of each server, as far as its metrics are known."""
    for scaler in [one for kind in SCALERS for one in cluster.of_kind(kind) if cluster.has_autoscaler]:
        wanted = at(scaler, "spec.scaleTargetRef") or {}
        key = str(wanted.get("kind") or "Deployment"), str(wanted.get("name")), namespace_of(scaler)
        target = cluster.find(*key)
        if target is None:
            why = f"the {key[0]} {key[1]} does not exist"
            scaler["status"] = {"conditions": [condition("AbleToScale", "FailedGetScale", why, status="False")]}
            continue
        spec, now = scaler["spec"], int(at(target, "spec.replicas") or 1)
        least = int(spec.get("minReplicas") or spec.get("minReplicaCount") or 1)
        most = int(spec.get("maxReplicas") or spec.get("maxReplicaCount") or 100)
        metrics = rows(spec, "metrics")
        unknown = [error for one in metrics if (error := _metric_error(cluster, one, target))]
        desired = math.ceil(cluster.load.get((key[2], key[1]), 0.0))
        status = condition("ScalingActive", "ValidMetricFound", "")
        if unknown and (len(unknown) == len(metrics) or desired < now):
            why = f"invalid metrics ({len(unknown)} invalid out of {len(metrics)}): {unknown[0]}"
            cluster.emit(scaler, "FailedComputeMetricsReplicas", why)
            status, desired = condition("ScalingActive", "InvalidMetrics", why, status="False"), now
        desired = min(max(desired, least), most)
        target["spec"]["replicas"] = desired
        scaler["status"] = {"currentReplicas": now, "desiredReplicas": desired, "conditions": [status]}

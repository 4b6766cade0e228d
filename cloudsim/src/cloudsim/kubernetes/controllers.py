"""Controllers: they bind claims, admit jobs from queues, start pods and record how they end, all by the clock."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cloudsim.kubernetes.admission import pod_refusal
from cloudsim.kubernetes.cluster import Cluster, JobRun, Object, ObjectKey, Outcome
from cloudsim.kubernetes.kubelet import path_trouble, start_trouble
from cloudsim.kubernetes.programs import run_program
from cloudsim.kubernetes.scheduler import choose_node, pool_that_fits, requests
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, quantity, rows
from embark.kubernetes.pods import Pod, PodIdentity, make_pod
from embark.rehearse.server import served_artifact, server_pods
from embark.rehearse.workload import CLUSTER, make_workload, ray_pods

PODS_KINDS = ("Job", "JobSet", "TrainJob", "PyTorchJob", "RayJob", "RayCluster", "VolcanoJob")
START_S = 20.0  # Time from a node that has the image to a running container.
RUN_S = 60.0  # Run time of any program: long enough for a script to wait for it.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ENDS = {  # The conditions that a controller sets on success and on failure.
    "Job": ("Complete", "Failed"), "JobSet": ("Completed", "Failed"), "TrainJob": ("Complete", "Failed"),
    "PyTorchJob": ("Succeeded", "Failed"),
}


def reconcile(cluster: Cluster) -> None:
    _bind_claims(cluster)
    for queue in cluster.of_kind("LocalQueue"):
        owner = cluster.find("ClusterQueue", str(at(queue, "spec.clusterQueue")))
        queue["status"] = {"conditions": [_condition("Active", "Ready" if owner else "ClusterQueueDoesNotExist", "",
                                                     status="True" if owner else "False")]}
    _collect_garbage(cluster)
    for key, job in list(cluster.objects.items()):
        if key[0] in PODS_KINDS and not _is_over(job) and job.get("spec", {}).get("suspend") is not True:
            _reconcile_job(cluster, key, job)
        elif key[0] == "Deployment" and served_artifact(job):
            _reconcile_server(cluster, key, job)


def pods_of(cluster: Cluster, job: K8sObject, kind: str) -> tuple[Pod, ...]:
    """Return the pods that the controller of a job creates."""
    objects = Objects(tuple(cluster.objects.values()))
    if kind == "RayCluster":
        return ray_pods(job, objects)
    if kind == "Deployment":
        return server_pods(job, objects)
    return make_workload(job, objects)[0].pods


def _reconcile_job(cluster: Cluster, key: ObjectKey, job: Object) -> None:
    run = cluster.runs.setdefault(key, JobRun())
    if not run.pods:
        waits = _queue_trouble(cluster, key, job)
        if waits:
            job["status"] = {"conditions": [_condition("Suspended", "JobSuspended", waits)]}
            if key[0] == "RayJob":
                job["status"] = {"jobDeploymentStatus": "Suspended"}
            cluster.emit(job, "Pending", waits, warning=False)
            return
        job.pop("status", None)
        if not _create_pods(cluster, key, job, run):
            return
    stored = [cluster.objects[("Pod", key[1], pod.name)] for pod in run.pods
              if ("Pod", key[1], pod.name) in cluster.objects]
    if run.outcome is not None:
        if cluster.clock.now >= run.ends_at:
            _end(key, job, stored, run.outcome)
        return
    for pod, one in zip(run.pods, stored, strict=True):
        _schedule(cluster, pod, one)
    if all(at(one, "status.phase") == "Running" for one in stored):
        if key[0] == "RayCluster":  # A RayCluster waits for drivers until it is deleted.
            job["status"] = {"state": "ready"}
            return
        run.outcome = run_program(cluster, key[0], job, run.pods, stored)
        run.logs |= run.outcome.logs
        run.ends_at = cluster.clock.now + RUN_S
        job["status"] = {"active": len(stored), "conditions": []} if key[0] != "RayJob" else \
            {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}


def _reconcile_server(cluster: Cluster, key: ObjectKey, deployment: Object) -> None:
    """Mark replicas as ready once they run and may read the artifact; the server itself is not started."""
    run = cluster.runs.setdefault(key, JobRun())
    template = json.dumps(at(deployment, "spec.template"), sort_keys=True)
    if run.pods and run.logs.get("") != template:  # A changed template replaces the pods.
        for pod in run.pods:
            cluster.objects.pop(("Pod", key[1], pod.name), None)
        run.pods = ()
    if not run.pods and not _create_pods(cluster, key, deployment, run):
        return
    run.logs[""] = template
    num_ready = 0
    for pod in run.pods:
        stored = cluster.objects[("Pod", key[1], pod.name)]
        _schedule(cluster, pod, stored)
        if at(stored, "status.phase") != "Running":
            continue
        pool = next(cluster.pools[node.pool] for node in cluster.nodes if node.name == stored["spec"]["nodeName"])
        trouble = path_trouble(cluster, stored, served_artifact(deployment), pool, write=False)
        run.logs[pod.name] = f"error: {trouble}\n" if trouble else f"serving {served_artifact(deployment)}\n"
        if trouble:
            waits = {"waiting": {"reason": "CrashLoopBackOff", "message": trouble}}
            stored["status"]["containerStatuses"] = [{"name": pod.container, "ready": False, "restartCount": 3,
                                                      "state": waits}]
        num_ready += not trouble
    deployment["status"] = {"replicas": len(run.pods), "readyReplicas": num_ready}


def _create_pods(cluster: Cluster, key: ObjectKey, job: Object, run: JobRun) -> bool:
    pods = pods_of(cluster, job, key[0])
    for pod in pods:
        if refused := pod_refusal(cluster, key[1], pod.spec):
            cluster.emit(job, "FailedCreate", f'Error creating: pods "{key[2]}-" is forbidden: {refused}')
            return False
    run.pods = pods
    for pod in pods:
        spec = dict(pod.spec)
        if cluster.tolerates_extended_resources:
            devices = [name for name in requests({"spec": spec}) if "/" in name]
            spec["tolerations"] = [*(spec.get("tolerations") or []), *({"key": name, "operator": "Exists"}
                                                                      for name in devices)]
        cluster.put({
            "apiVersion": "v1", "kind": "Pod", "spec": spec, "status": {"phase": "Pending", "conditions": []},
            "metadata": {"name": pod.name, "namespace": key[1], "labels": dict(pod.labels),
                         "ownerReferences": [{"kind": job["kind"], "name": key[2], "key": list(key)}]}})
    return bool(pods)


def _schedule(cluster: Cluster, pod: Pod, stored: Object) -> None:
    """Assign a node to a pod and start its container."""
    if not at(stored, "spec.nodeName"):
        node, message = choose_node(cluster, stored)
        if node is None:
            cluster.emit(stored, "FailedScheduling", message)
            stored["status"]["conditions"] = [_condition("PodScheduled", "Unschedulable", message, status="False")]
            pool, why_not = pool_that_fits(cluster, stored)
            if why_not:
                cluster.emit(stored, "NotTriggerScaleUp", why_not, warning=False)
            # One machine for each waiting pod, all at once; more only if those that have started do not suffice.
            is_starting = any(pool is not None and one.pool == pool.name and one.ready_at > cluster.clock.now
                              for one in cluster.nodes)
            if pool is not None and not (is_starting and stored["status"].get("hasScaledUp")):
                wanted = sum(one.pool == pool.name for one in cluster.nodes) + 1
                error = cluster.cloud.on_pool_change(pool, wanted)
                if error:
                    cluster.emit(stored, "NotTriggerScaleUp", error)
                else:
                    cluster.resize_pool(pool.name, wanted)
                    stored["status"]["hasScaledUp"] = True
                    cluster.emit(stored, "TriggeredScaleUp", f"pod triggered scale-up: {pool.name}", warning=False)
            return
        stored["spec"]["nodeName"] = node.name
        stored["status"]["conditions"] = [_condition("PodScheduled", "", "")]
    node_pool = next((cluster.pools[node.pool] for node in cluster.nodes if node.name == stored["spec"]["nodeName"]),
                     None)
    if node_pool is None or at(stored, "status.phase") != "Pending":
        return
    objects = Objects(tuple(cluster.objects.values()))
    fresh = make_pod({"spec": pod.spec, "metadata": {"labels": dict(pod.labels)}},
                     PodIdentity(name=pod.name, namespace=pod.namespace), objects)
    trouble = start_trouble(cluster, stored, replace(pod, missing=fresh.missing), node_pool)
    if trouble is not None:
        cluster.emit(stored, trouble.event, trouble.message)
        stored["status"]["containerStatuses"] = [{"name": pod.container, "ready": False, "state": {
            "waiting": {"reason": trouble.reason, "message": trouble.message}}}]
        return
    stored["status"]["conditions"].append(_condition("Ready", "", ""))
    stored["status"] |= {"phase": "Running", "containerStatuses": [
        {"name": pod.container, "ready": True, "state": {"running": {}}}]}


def _end(key: ObjectKey, job: Object, pods: list[Object], outcome: Outcome) -> None:
    for pod in pods:
        if CLUSTER in pod["metadata"]["labels"]:
            continue  # A Ray cluster outlives its driver.
        code = outcome.codes.get(pod["metadata"]["name"], 0 if outcome.is_ok else 1)
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": code}}
    if key[0] == "RayJob":
        job["status"] = {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"} if outcome.is_ok else \
            {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": outcome.sentence}
    elif key[0] == "VolcanoJob":
        job["status"] = {"state": {"phase": "Completed" if outcome.is_ok else "Failed", "message": outcome.sentence}}
    elif key[0] in ENDS:
        good, bad = ENDS[key[0]]
        condition = _condition(good, good, "") if outcome.is_ok else _condition(bad, outcome.reason, outcome.sentence)
        job["status"] = {"conditions": [condition],
                         "succeeded" if outcome.is_ok else "failed": len(pods)}


def _is_over(job: K8sObject) -> bool:
    if at(job, "status.jobDeploymentStatus") in ("Complete", "Failed") or at(job, "status.state.phase") in (
            "Completed", "Failed"):
        return True
    ends = {word for pair in ENDS.values() for word in pair}
    return any(one.get("type") in ends and one.get("status") == "True" for one in rows(job, "status.conditions"))


def _bind_claims(cluster: Cluster) -> None:
    for claim in cluster.of_kind("PersistentVolumeClaim"):
        if at(claim, "status.phase") == "Bound":
            continue
        claim["status"] = {"phase": "Pending"}
        name = at(claim, "spec.volumeName")
        volume = cluster.find("PersistentVolume", str(name)) if name else None
        if volume is None:
            cluster.emit(claim, "FailedBinding", f'volume "{name}" not found' if name else
                        "no persistent volumes available for this claim and no storage class is set")
            continue
        owner = at(volume, "spec.claimRef") or {"name": name_of(claim), "namespace": namespace_of(claim)}
        wanted = quantity(str(at(claim, "spec.resources.requests.storage") or "0")) or 0.0
        offered = quantity(str(at(volume, "spec.capacity.storage") or "0")) or 0.0
        if (owner.get("name"), owner.get("namespace")) != (name_of(claim), namespace_of(claim)):
            cluster.emit(claim, "FailedBinding", f'volume "{name}" already bound to a different claim.')
        elif wanted > offered or not set(at(claim, "spec.accessModes") or ()) <= set(at(volume, "spec.accessModes")
                                                                                    or ()):
            cluster.emit(claim, "VolumeMismatch", f'Cannot bind to requested volume "{name}": requested PV is too '
                         "small or has other access modes")
        elif (at(claim, "spec.storageClassName") or "") != (at(volume, "spec.storageClassName") or ""):
            cluster.emit(claim, "VolumeMismatch", f'Cannot bind to requested volume "{name}": storageClassName does '
                         "not match")
        else:
            claim["status"] = {"phase": "Bound"}


def _collect_garbage(cluster: Cluster) -> None:
    """Delete the pods of jobs and nodes that no longer exist."""
    names = {node.name for node in cluster.nodes}
    for key, pod in list(cluster.objects.items()):
        if key[0] != "Pod":
            continue
        owner = tuple(rows(pod, "metadata.ownerReferences")[0]["key"]) if at(pod, "metadata.ownerReferences") else None
        is_running = at(pod, "status.phase") in ("Pending", "Running")
        if owner is not None and owner not in cluster.objects:
            cluster.objects.pop(key)
            cluster.runs.pop(owner, None)
        elif owner is not None and CLUSTER in pod["metadata"]["labels"] and _is_shut_down(cluster, owner):
            cluster.objects.pop(key)
        elif is_running and at(pod, "spec.nodeName") and at(pod, "spec.nodeName") not in names:
            pod["spec"].pop("nodeName")
            pod["status"] = {"phase": "Pending", "conditions": []}


def _is_shut_down(cluster: Cluster, owner: ObjectKey) -> bool:
    """Return whether KubeRay has deleted the cluster of a RayJob that is over."""
    spec, run = cluster.objects[owner].get("spec") or {}, cluster.runs.get(owner)
    kept_s = float(spec.get("ttlSecondsAfterFinished") or 0)
    return (run is not None and _is_over(cluster.objects[owner]) and spec.get("shutdownAfterJobFinishes") is True
            and cluster.clock.now >= run.ends_at + kept_s)


def _queue_trouble(cluster: Cluster, key: ObjectKey, job: K8sObject) -> str:
    """Return why Kueue holds a job back, or an empty text."""
    name = (at(job, "metadata.labels") or {}).get(QUEUE_LABEL)
    if not name or "kueue" not in cluster.releases:
        return ""
    queue = cluster.find("LocalQueue", str(name), key[1])
    if queue is None:
        return f"LocalQueue {name} doesn't exist"
    owner = cluster.find("ClusterQueue", str(at(queue, "spec.clusterQueue")))
    if owner is None:
        return f"ClusterQueue {at(queue, 'spec.clusterQueue')} doesn't exist"
    quota: dict[str, float] = {}
    for group in rows(owner, "spec.resourceGroups"):
        for flavor in rows(group, "flavors"):
            if cluster.find("ResourceFlavor", str(flavor.get("name"))) is None:
                return f"ClusterQueue {name_of(owner)} is inactive: resource flavor {flavor.get('name')} not found"
            for row in rows(flavor, "resources"):
                amount = quantity(str(row.get("nominalQuota"))) or 0.0
                quota[str(row.get("name"))] = quota.get(str(row.get("name")), 0.0) + amount
    total: dict[str, float] = {}
    active = [one for other, run in cluster.runs.items() if other != key and other in cluster.objects
              and not _is_over(cluster.objects[other]) and QUEUE_LABEL in (
                  at(cluster.objects[other], "metadata.labels") or {}) for one in run.pods]
    for pod in [*pods_of(cluster, job, key[0]), *active]:
        for resource, amount in requests({"spec": pod.spec}).items():
            total[resource] = total.get(resource, 0.0) + amount
    for resource, amount in total.items():
        if resource not in quota:
            return f"couldn't assign flavors to pod set main: resource {resource} unavailable in ClusterQueue"
        if amount > quota[resource]:
            return (f"couldn't assign flavors to pod set main: insufficient quota for {resource}, "
                    f"request {amount:g} > maximum capacity {quota[resource]:g}")
    return ""


def _condition(kind: str, reason: str, message: str, *, status: str = "True") -> Mapping[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}

"""Controllers: they admit jobs from queues, start their pods and record how they end, all by the clock."""

from collections import defaultdict

from cloudsim.kubernetes.cluster import Cluster, JobRun, Object, ObjectKey, Outcome, labels_of
from cloudsim.kubernetes.pods import condition, create_pods, start_pod
from cloudsim.kubernetes.programs import run_program
from cloudsim.kubernetes.replicas import reconcile_replicas, scale
from cloudsim.kubernetes.scheduler import requests
from cloudsim.kubernetes.volumes import bind_claims
from cloudsim.state import load_facts
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, quantity, rows
from embark.kubernetes.pods import Pod
from embark.rehearse.manifest import selects
from embark.rehearse.workload import CLUSTER, make_workload, ray_pods

START_S = 20.0  # Time from a node that has the image to a running container.
RUN_S = 60.0  # Run time of any program: long enough for a script to wait for it.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ENDS = load_facts("kubernetes/kinds.toml")["ends"]
PODS_KINDS = (*ENDS, "RayJob", "RayCluster", "VolcanoJob")


def reconcile(cluster: Cluster) -> None:
    for queue in cluster.of_kind("LocalQueue"):
        owner = cluster.find("ClusterQueue", str(at(queue, "spec.clusterQueue")))
        queue["status"] = {"conditions": [condition("Active", "Ready" if owner else "ClusterQueueDoesNotExist", "",
                                                    status="True" if owner else "False")]}
    _collect_garbage(cluster)
    bind_claims(cluster)
    scale(cluster)
    for key, job in list(cluster.objects.items()):
        if key[0] in PODS_KINDS and not _is_over(job) and job.get("spec", {}).get("suspend") is not True:
            _reconcile_job(cluster, key, job)
        elif key[0] in ("Deployment", "StatefulSet") and rows(job, "spec.template.spec.containers"):
            reconcile_replicas(cluster, key, job)
    cluster.servers.keep({key[1:] for key, pod in cluster.objects.items()
                          if key[0] == "Pod" and at(pod, "status.phase") == "Running"})
    bind_claims(cluster)


def pods_of(cluster: Cluster, job: K8sObject, kind: str) -> tuple[Pod, ...]:
    """Return the pods that the controller of a job creates."""
    objects = Objects(tuple(cluster.objects.values()))
    if kind == "RayCluster":
        return ray_pods(job, objects)
    return make_workload(job, objects)[0].pods


def _reconcile_job(cluster: Cluster, key: ObjectKey, job: Object) -> None:
    run = cluster.runs.setdefault(key, JobRun())
    if not run.pods:
        waits = _queue_trouble(cluster, key, job)
        _put_workload(cluster, key, job, waits)
        if waits:
            job["status"] = {"conditions": [condition("Suspended", "JobSuspended", waits)]}
            if key[0] == "RayJob":
                job["status"] = {"jobDeploymentStatus": "Suspended"}
            cluster.emit(job, "Pending", waits, warning=False)
            return
        job.pop("status", None)
        pods = pods_of(cluster, job, key[0])
        if not create_pods(cluster, key, job, pods):
            return
        run.pods = pods
    stored = [cluster.objects[("Pod", key[1], pod.name)] for pod in run.pods
              if ("Pod", key[1], pod.name) in cluster.objects]
    if run.outcome is not None:
        if cluster.clock.now >= run.ends_at:
            _end(key, job, stored, run.outcome)
        return
    for pod, one in zip(run.pods, stored, strict=True):
        start_pod(cluster, pod, one)
    if all(at(one, "status.phase") == "Running" for one in stored):
        if key[0] == "RayCluster":  # A RayCluster waits for drivers until it is deleted.
            job["status"] = {"state": "ready"}
            return
        run.outcome = run_program(cluster, key[0], job, run.pods, stored)
        run.logs |= run.outcome.logs
        run.ends_at = cluster.clock.now + RUN_S
        job["status"] = {"active": len(stored), "conditions": []} if key[0] != "RayJob" else \
            {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}


def _end(key: ObjectKey, job: Object, pods: list[Object], outcome: Outcome) -> None:
    for pod in pods:
        if CLUSTER in pod["metadata"]["labels"]:
            continue  # A Ray cluster outlives its driver.
        code = outcome.codes.get(name_of(pod), 0 if outcome.is_ok else 1)
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": code}}
    if key[0] == "RayJob":
        job["status"] = {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"} if outcome.is_ok else \
            {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": outcome.sentence}
    elif key[0] == "VolcanoJob":
        job["status"] = {"state": {"phase": "Completed" if outcome.is_ok else "Failed", "message": outcome.sentence}}
    elif key[0] in ENDS:
        good, bad = ENDS[key[0]]
        ended = condition(good, good, "") if outcome.is_ok else condition(bad, outcome.reason, outcome.sentence)
        job["status"] = {"conditions": [ended],
                         "succeeded" if outcome.is_ok else "failed": len(pods)}


def _is_over(job: K8sObject) -> bool:
    if at(job, "status.jobDeploymentStatus") in ("Complete", "Failed") or at(job, "status.state.phase") in (
            "Completed", "Failed"):
        return True
    ends = {word for pair in ENDS.values() for word in pair}
    return any(one.get("type") in ends and one.get("status") == "True" for one in rows(job, "status.conditions"))


def _collect_garbage(cluster: Cluster) -> None:
    """Delete the pods of jobs and nodes that no longer exist."""
    names = {node.name for node in cluster.nodes}
    for key, pod in list(cluster.objects.items()):
        if key[0] not in ("Pod", "Workload"):
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
            if owner in cluster.runs:  # The others wait for its replacement.
                cluster.runs[owner].outcome = None


def _is_shut_down(cluster: Cluster, owner: ObjectKey) -> bool:
    """Return whether KubeRay has deleted the cluster of a RayJob that is over."""
    spec, run = cluster.objects[owner].get("spec") or {}, cluster.runs.get(owner)
    kept_s = float(spec.get("ttlSecondsAfterFinished") or 0)
    return (run is not None and _is_over(cluster.objects[owner]) and spec.get("shutdownAfterJobFinishes") is True
            and cluster.clock.now >= run.ends_at + kept_s)


def _put_workload(cluster: Cluster, key: ObjectKey, job: Object, waits: str) -> None:
    """Write the object in which Kueue says whether it has admitted a job, and why not."""
    if "kueue" not in cluster.releases or QUEUE_LABEL not in labels_of(job):
        return
    conditions = [condition("QuotaReserved", "Pending", waits, status="False")] if waits else \
        [condition("QuotaReserved", "QuotaReserved", ""), condition("Admitted", "Admitted", "")]
    owner = {"kind": job["kind"], "name": key[2], "key": list(key)}
    cluster.add("Workload", f"{key[0].lower()}-{key[2]}", key[1], status={"conditions": conditions},
                metadata={"labels": {}, "ownerReferences": [owner]})


def _queue_trouble(cluster: Cluster, key: ObjectKey, job: K8sObject) -> str:
    """Return why Kueue holds a job back, or an empty text."""
    name = labels_of(job).get(QUEUE_LABEL)
    if not name or "kueue" not in cluster.releases:
        return ""
    queue = cluster.find("LocalQueue", name, key[1])
    if queue is None:
        return f"LocalQueue {name} doesn't exist"
    owner = cluster.find("ClusterQueue", str(at(queue, "spec.clusterQueue")))
    if owner is None:
        return f"ClusterQueue {at(queue, 'spec.clusterQueue')} doesn't exist"
    for one in (queue, owner):
        if at(one, "spec.stopPolicy") not in (None, "None"):
            return f"{one['kind']} {name_of(one)} is stopped: its stopPolicy is {one['spec']['stopPolicy']}"
    space, selector = cluster.find("Namespace", key[1]), at(owner, "spec.namespaceSelector")
    if not selects(selector, {"kubernetes.io/metadata.name": key[1], **labels_of(space)}):
        return f"Workload namespace doesn't match ClusterQueue selector: {key[1]} is not selected by {selector}"
    pods, quota, total = pods_of(cluster, job, key[0]), defaultdict[str, float](float), defaultdict[str, float](float)
    for flavor in [one for group in rows(owner, "spec.resourceGroups") for one in rows(group, "flavors")]:
        found = cluster.find("ResourceFlavor", str(flavor.get("name")))
        if found is None:
            return f"ClusterQueue {name_of(owner)} is inactive: resource flavor {flavor.get('name')} not found"
        for label, value in (at(found, "spec.nodeLabels") or {}).items():
            if any((pod.spec.get("nodeSelector") or {}).get(label, value) != value for pod in pods):
                return (f"couldn't assign flavors to pod set main: flavor {name_of(found)} doesn't match node "
                        f"affinity: its nodeLabels have {label}: {value}, and the pods select another one")
        for row in rows(flavor, "resources"):
            quota[row["name"]] += quantity(str(row.get("nominalQuota"))) or 0.0
    active = [one for other, run in cluster.runs.items() if other in cluster.objects
              and not _is_over(cluster.objects[other]) and QUEUE_LABEL in labels_of(cluster.objects[other])
              for one in run.pods]
    for pod in [*pods, *active]:
        for resource, amount in requests({"spec": pod.spec}).items():
            total[resource] += amount
    for resource, amount in total.items():
        if resource not in quota:
            return f"couldn't assign flavors to pod set main: resource {resource} unavailable in ClusterQueue"
        if amount > quota[resource]:
            return (f"couldn't assign flavors to pod set main: insufficient quota for {resource}, "
                    f"request {amount:g} > maximum capacity {quota[resource]:g}")
    return ""

"""Kueue's objects: a queue that lets a run start when all its machines are there, and no sooner."""

from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.pod import node_selector, resources, tolerations
from embark.render.targets.kubernetes import namespace
from embark.render.yaml_text import note, plain, yaml_text

API = "kueue.x-k8s.io/v1beta2"
BESIDE = {"cpu": 1, "memory": 4}
"""Per node, for a fabric's daemon beside the trainer: processors, GiB."""
RAY_HEAD = {"cpu": 2, "memory": 8}


def render_kueue(job: Job) -> list[File]:
    """None where the spec names no queue."""
    if not job.spec.place.queue:
        return []
    about = (f"The queue {job.spec.place.queue} for {job.num_nodes} x {job.machine.name}. The cluster needs Kueue, "
             "0.19 or newer. Apply it once, before the first run.")
    return [File("kueue.yaml", yaml_text(queue_objects(job), about=about))]


def queue_objects(job: Job) -> list[dict[str, Any]]:
    queue = job.spec.place.queue
    flavor = f"{_label(job.machine.name)}{'-spot' if job.is_spot else ''}"
    quota = _quota(job)
    return [
        namespace(job),
        {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": flavor},
         "spec": {"nodeLabels": node_selector(job), "tolerations": [plain(t) for t in tolerations(job)]}},
        {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": queue},
         "spec": {
             "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": job.namespace}},
             "resourceGroups": [{
                 "coveredResources": list(quota),
                 "flavors": [{"name": flavor, "resources": [
                     {"name": name, "nominalQuota": amount} for name, amount in quota.items()
                 ]}],
             }],
         }},
        {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": queue, "namespace": job.namespace},
         "spec": {"clusterQueue": queue}},
    ]


def _quota(job: Job) -> dict[str, Any]:
    """As much as the run's machines give: every resource that a pod names must be covered, or it waits for ever."""
    asked = plain(resources(job))
    each = {**asked["limits"], **asked["requests"]}
    quota: dict[str, Any] = {}
    for name, amount in each.items():
        number, unit = _split(str(amount))
        total = (number + BESIDE.get(name, 0)) * job.num_pods
        total += RAY_HEAD.get(name, 0) if job.spec.place.target == "ray" else 0
        quota[name] = f"{total}{unit}" if unit else total
    first = next(iter(quota))
    return {**quota, first: note(quota[first], f"{job.num_nodes} machines; raise all of them for more")}


def _split(amount: str) -> tuple[int, str]:
    digits = amount.rstrip("GMKTi")
    return int(digits), amount[len(digits):]


def _label(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")

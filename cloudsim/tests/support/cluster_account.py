"""An account with one cluster that has two kinds of machines, and objects that fit them."""

from __future__ import annotations

from pathlib import Path

import yaml

from cloudsim.account import Account, Call
from cloudsim.kubernetes.cloud import NodePool, VolumeFacts
from cloudsim.kubernetes.cluster import Cluster
from cloudsim.programs import add_common_programs

GPU = NodePool("gpu", "p4d.24xlarge", "us-west-2b", 2, {
    "cpu": "95690m", "memory": "1120Gi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4",
    "hugepages-2Mi": "5120Mi"}, taints=({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},))
SYSTEM = NodePool("system", "m7i.large", "us-west-2b", 2, {"cpu": "1930m", "memory": "6900Mi"})


class Cloud:
    """A cloud in which every image and bucket exists, and a volume that root owns."""

    def __init__(self, folder: Path) -> None:
        self.volume_facts = VolumeFacts(folder, mode=0o755)
        self.refused_images: tuple[str, ...] = ()
        self.disks: list[str] = []

    def pull_error(self, image, pool, namespace):
        return "no basic auth credentials" if image in self.refused_images else ""

    def access_error(self, uri, *, write, namespace, service_account, pod):
        return ""

    def volume(self, volume, pool):
        return self.volume_facts

    def make_disk(self, name, driver, gib):
        self.disks.append(name)
        return ""

    def drop_disk(self, name):
        self.disks.remove(name)

    def on_pool_change(self, pool, num_nodes):
        return ""


def make_account(folder: Path) -> Account:
    made = Account("aws", folder)
    add_common_programs(made)
    cluster = Cluster("embark", Cloud(folder), made.clock, folder)
    cluster.add_pool(SYSTEM)
    cluster.add_pool(GPU)
    made.clusters["embark"] = cluster
    made.context = "embark"
    made.clock.advance(120)
    return made


def run(account: Account, *words: str, folder: Path | None = None, stdin: str = ""):
    return account.run(Call(words[0], words[1:], folder or account.folder, stdin=stdin))


def apply(account: Account, *objects: dict) -> str:
    done = run(account, "kubectl", "apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    return done.out + done.err


def job(**spec: object) -> dict:
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "app:1", "command": ["true"]}], **spec}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one", "namespace": "default"},
            "spec": {"template": {"spec": pod}}}


def events(account: Account) -> str:
    return run(account, "kubectl", "get", "events").out


def server(image: str = "app:1", memory: str = "4Gi", **spec: object) -> dict:
    container = {"name": "main", "image": image, "resources": {"requests": {"cpu": "50m", "memory": memory}}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "default"},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, **spec,
                     "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}}}}


def scaler(*metrics: dict) -> dict:
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "web", "namespace": "default"},
            "spec": {"minReplicas": 1, "maxReplicas": 4, "metrics": list(metrics),
                     "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}}}


CPU = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}}

"""A cluster that a platform team made, which fulfils the contract of a run, answered by the account's kubectl."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cloudsim.account import Account, Call
from cloudsim.kubernetes.admission import install
from cloudsim.kubernetes.cloud import NodePool, VolumeFacts
from cloudsim.kubernetes.cluster import Cluster
from cloudsim.kubernetes.kinds import releases
from cloudsim.programs import add_common_programs
from embark.catalog import load_catalog
from embark.launch.shell import CommandResult, Shell

GPUS = NodePool("h100", "gpu-8x-h100", "zone-1", 2, {
    "cpu": "126", "memory": "1900Gi", "ephemeral-storage": "500Gi", "nvidia.com/gpu": "8", "rdma/ib": "8"},
    labels={"gpu.nvidia.com/class": "H100"}, taints=(
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"key": "team", "value": "ads", "effect": "NoSchedule"}))
OTHERS = NodePool("cpu", "cpu-16", "zone-1", 2, {"cpu": "15", "memory": "60Gi", "ephemeral-storage": "200Gi"})
IDENTITY = "arn:aws:iam::123456789012:role/ads"
ACCOUNT = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {
    "name": "trainer", "namespace": "ads", "annotations": {"eks.amazonaws.com/role-arn": IDENTITY}}}
READER = "arn:aws:iam::123456789012:role/servers"
SERVERS = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {
    "name": "embark-serve", "namespace": "ads", "annotations": {"eks.amazonaws.com/role-arn": READER}}}
TOKENS = [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": "ads"},
           "data": {"token": "c2VjcmV0", "options.toml": "dG9rZW4gPSAic2VjcmV0Ig=="}}
          for name in ("ads-serve-token", "ads-nats")]
LOGINS = base64.b64encode(json.dumps({"auths": {"ghcr.io": {"auth": "c2VjcmV0"}}}).encode()).decode()
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "ghcr", "namespace": "ads"},
          "type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": LOGINS}}
VOLUME = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "ads-shared"}, "spec": {
    "capacity": {"storage": "10Ti"}, "accessModes": ["ReadWriteMany"], "nfs": {"server": "10.0.0.2", "path": "/ads"}}}
CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared", "namespace": "ads"},
         "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": "ads-shared",
                  "resources": {"requests": {"storage": "10Ti"}}}}
STORAGE_CLASS = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {
    "name": "fast", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}, "provisioner": "fast.csi"}
KUEUE = f"https://github.com/kubernetes-sigs/kueue/releases/download/{load_catalog().versions['kueue']}/manifests.yaml"
QUOTA = {"cpu": 400, "memory": "4000Gi", "nvidia.com/gpu": 16, "rdma/ib": 16}
QUEUE: list[dict[str, Any]] = [
    {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "h100"}, "spec": {}},
    {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": {
        "namespaceSelector": {}, "resourceGroups": [{"coveredResources": list(QUOTA), "flavors": [
            {"name": "h100", "resources": [{"name": name, "nominalQuota": num} for name, num in QUOTA.items()]}]}]}},
    {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "ads", "namespace": "ads"},
     "spec": {"clusterQueue": "all"}}]


class Cloud:
    """A cloud in which every image and bucket exists."""

    def __init__(self, folder: Path) -> None:
        self.volume_facts = VolumeFacts(folder, mode=0o777)

    def pull_error(self, image: str, pool: NodePool, namespace: str) -> str:
        return ""

    def access_error(self, uri: str, **_: Any) -> str:
        return ""

    def volume(self, volume: Any, pool: NodePool) -> VolumeFacts:
        return self.volume_facts

    def on_pool_change(self, pool: NodePool, num_nodes: int) -> str:
        return "nobody but the cluster's owner makes machines"


class AccountShell(Shell):
    """Hands every command to the account's programs, and remembers those that change something."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.changes: list[list[str]] = []

    def ask(self, words: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> CommandResult:
        return self.account.run(Call(words[0], tuple(words[1:]), self.account.folder, stdin=stdin))

    def change(self, words: Sequence[str], *, stdin: str = "", stdin_name: str = "", timeout_s: float = 60.0
               ) -> CommandResult:
        self.changes.append(list(words))
        return self.ask(words, stdin=stdin)


def existing_cluster(folder: Path) -> AccountShell:
    """Return a shell whose kubectl is set to a cluster with all that the guide's run needs."""
    account = Account("aws", folder)
    add_common_programs(account)
    cluster = Cluster("ours", Cloud(folder), account.clock, folder)
    for pool in (OTHERS, GPUS):
        cluster.add_pool(pool)
    account.clusters["ours"] = cluster
    account.context = "ours"
    account.clock.advance(120)
    shell = AccountShell(account)
    give(shell, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ads"}}, ACCOUNT, SERVERS, SECRET,
         *TOKENS, VOLUME, CLAIM, STORAGE_CLASS)
    ok(shell.ask(["kubectl", "apply", "--server-side", "-f", KUEUE]))
    ok(shell.ask(["kubectl", "wait", "deployment", "--all", "--namespace", "kueue-system",
                  "--for=condition=Available", "--timeout=300s"]))
    give(shell, *QUEUE)
    monitor = next(one for one in releases() if any(kind.kind == "PodMonitor" for kind in one.kinds))
    install(cluster, monitor, "monitoring")
    return shell


def give(shell: AccountShell, *objects: dict[str, Any]) -> None:
    ok(shell.ask(["kubectl", "apply", "-f", "-"], stdin=yaml.safe_dump_all(objects)))


def ok(done: CommandResult) -> None:
    assert done.is_ok, done.err

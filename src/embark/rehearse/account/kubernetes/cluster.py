"""A cluster's objects and nodes, and the one place where time passes for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embark.rehearse.account.kubernetes.cloud import ClusterCloud, NodePool
from embark.rehearse.account.state import Clock

Object = dict[str, Any]
ObjectKey = tuple[str, str, str]  # Kind, namespace (empty for those of the cluster), name.
NODE_S = 90.0  # From a machine's request to a node that is ready.


@dataclass(slots=True)
class Node:
    """A machine that joined."""

    name: str
    pool: str
    ready_at: float


@dataclass(slots=True)
class Cluster:
    """Built by a cloud's program; kubectl and helm change what is in it."""

    name: str
    cloud: ClusterCloud
    clock: Clock
    folder: Path  # For volumes and pods' files.
    version: str = "1.34"
    pools: dict[str, NodePool] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    objects: dict[ObjectKey, Object] = field(default_factory=dict)
    ready_at: dict[ObjectKey, float] = field(default_factory=dict)  # Of Deployments and DaemonSets.

    def add_pool(self, pool: NodePool) -> None:
        self.pools[pool.name] = pool
        self._resize(pool.name, pool.num_nodes)

    def resize_pool(self, name: str, num_nodes: int) -> None:
        self._resize(name, num_nodes)

    def remove_pool(self, name: str) -> None:
        self._resize(name, 0)
        self.pools.pop(name)

    def add_daemon_set(self, name: str, *, namespace: str = "kube-system", takes_s: float = 30.0,
                       labels: Mapping[str, str] | None = None) -> None:
        """One that the cloud itself brings."""
        key = ("DaemonSet", namespace, name)
        self.objects[key] = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {
            "name": name, "namespace": namespace, "labels": dict(labels or {})}}
        self.ready_at[key] = self.clock.now + takes_s

    def find(self, kind: str, name: str, namespace: str = "") -> Object | None:
        return self.objects.get((kind, namespace, name))

    def reconcile(self) -> None:
        """Controllers, scheduler and kubelets catch up with the clock."""

    def _resize(self, name: str, num_nodes: int) -> None:
        own = [node for node in self.nodes if node.pool == name]
        for node in own[num_nodes:]:
            self.nodes.remove(node)
        for number in range(len(own), num_nodes):
            self.nodes.append(Node(f"{name}-{number}", name, self.clock.now + NODE_S))

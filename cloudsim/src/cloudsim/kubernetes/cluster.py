"""The objects, nodes and events of a cluster, which change as its clock advances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudsim.kubernetes.cloud import ClusterCloud, NodePool
from cloudsim.kubernetes.kinds import ObjectKind, Release, builtin_kinds
from cloudsim.state import Clock, Refusal
from embark.kubernetes.objects import at, name_of, namespace_of, quantity
from embark.kubernetes.pods import Pod
from embark.rehearse.running_servers import Servers
from embark.values import JsonDict, JsonMap, frozen

Object = JsonDict
ObjectKey = tuple[str, str, str]  # Kind, namespace (empty for kinds without one) and name.
NODE_S = 90.0  # Time from the request for a machine to a node that is ready.
ANY_TAINT = ({"operator": "Exists"},)
NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


def labels_of(thing: JsonMap | None) -> dict[str, str]:
    return at(thing, "metadata.labels") or {}


def annotations_of(thing: JsonMap) -> dict[str, str]:
    return at(thing, "metadata.annotations") or {}


@dataclass(slots=True)
class Node:
    """A machine that has joined or is about to join."""

    name: str
    pool: str
    ready_at: float


@frozen
class Event:
    """An event that `kubectl get events` and `describe` show."""

    at: float
    type: str
    reason: str
    kind: str
    name: str
    namespace: str
    message: str


@frozen
class Outcome:
    """The result of a job's programs."""

    is_ok: bool
    sentence: str
    reason: str = "BackoffLimitExceeded"
    logs: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class JobRun:
    """The pods of a job and how far they have come."""

    pods: tuple[Pod, ...] = ()
    outcome: Outcome | None = None
    ends_at: float = 0.0
    logs: dict[str, str] = field(default_factory=dict)  # Maps a pod to its log.


@dataclass(slots=True)
class Cluster:
    """A cluster that a cloud's program creates and that kubectl and helm change."""

    name: str
    cloud: ClusterCloud
    clock: Clock
    folder: Path  # Volumes and files of pods are below it.
    version: str = "1.34"
    pools: dict[str, NodePool] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    objects: dict[ObjectKey, Object] = field(default_factory=dict)
    ready_at: dict[ObjectKey, float] = field(default_factory=dict)  # When Deployments and DaemonSets are available.
    releases: dict[str, Release] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    tolerates_extended_resources: bool = False
    """The admission plugin ExtendedResourceToleration: a pod that asks for a device tolerates the taint of its name."""
    runs: dict[ObjectKey, JobRun] = field(default_factory=dict)
    full_paths: set[str] = field(default_factory=set)  # Mounts of pods on which no space is left.
    has_metrics_server: bool = True  # It measures the processors and the memory of pods for autoscalers.
    has_autoscaler: bool = True  # The controller of HorizontalPodAutoscalers runs.
    load: dict[tuple[str, str], float] = field(default_factory=dict)
    """Maps namespace and name of a Deployment to the number of replicas that its load needs."""
    num_processes: int = 1  # Processes of each pod in the rehearsal that trains.
    num_steps: int = 4
    servers: Servers = field(default_factory=Servers)
    denied: set[str] = field(default_factory=set)  # Rights that the user lacks, such as `create jobs.batch`.
    num_made: dict[str, int] = field(default_factory=dict)  # Nodes that a pool ever had; names are not reused.

    def __post_init__(self) -> None:
        for name in NAMESPACES:
            self.add("Namespace", name)

    # nodes

    def add_pool(self, pool: NodePool) -> None:
        self.pools[pool.name] = pool
        self.resize_pool(pool.name, pool.num_nodes)

    def resize_pool(self, name: str, num_nodes: int) -> None:
        own = self.nodes_of(name)
        for node in own[num_nodes:]:
            self.nodes.remove(node)
        for _ in range(len(own), num_nodes):
            number = self.num_made.get(name, 0)
            self.num_made[name] = number + 1
            ready_at = float("inf") if self.pools[name].join_error else self.clock.now + NODE_S
            self.nodes.append(Node(f"{name}-{number}", name, ready_at))

    def nodes_of(self, pool: str) -> list[Node]:
        return [node for node in self.nodes if node.pool == pool]

    def remove_pool(self, name: str) -> None:
        self.resize_pool(name, 0)
        self.pools.pop(name)

    def ready_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.ready_at <= self.clock.now]

    def allocatable(self, node: Node) -> dict[str, float]:
        """Return what a node offers, without devices whose plugin does not run."""
        pool = self.pools[node.pool]
        plugins = pool.devices_after
        return {name: quantity(str(amount)) or 0.0 for name, amount in pool.allocatable.items()
                if name not in plugins or self.advertises(plugins[name], name, pool)}

    def pool_of(self, pod: Object) -> NodePool:
        """Return the pool of the node that a pod runs on."""
        return next(self.pools[node.pool] for node in self.nodes if node.name == pod["spec"]["nodeName"])

    def labels(self, node: Node) -> dict[str, str]:
        pool = self.pools[node.pool]
        return {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": pool.machine_type, "topology.kubernetes.io/zone": pool.zone,
                **pool.labels}

    # objects

    def kinds(self) -> list[ObjectKind]:
        return [*builtin_kinds(), *(kind for release in self.releases.values() for kind in release.kinds)]

    def kind_of(self, thing: JsonMap, origin: str = "manifest") -> ObjectKind:
        version, kind = str(thing.get("apiVersion") or ""), str(thing.get("kind") or "")
        group, _, number = version.rpartition("/")
        for known in self.kinds():
            if known.kind == kind and known.group == group and number in known.versions:
                return known
        raise Refusal(
            f'error: resource mapping not found for name: "{name_of(thing)}" namespace: '
            f'"{at(thing, "metadata.namespace") or ""}" from "{origin}": no matches for kind "{kind}" in version '
            f'"{version}"\nensure CRDs are installed first')

    def put(self, thing: Object) -> ObjectKey:
        """Store an object without any check."""
        kind = self.kind_of(thing)
        space = namespace_of(thing) if kind.is_namespaced else ""
        if kind.is_namespaced:
            thing["metadata"]["namespace"] = space
        key = (kind.key, space, name_of(thing))
        self.objects[key] = thing
        return key

    def add(self, kind: str, name: str, space: str = "", **fields: Any) -> None:
        """Store an object that a controller or the cloud makes, without any check."""
        known = next(one for one in self.kinds() if one.key == kind)
        meta = {"name": name, "namespace": space, **fields.pop("metadata", {})}
        self.put({"apiVersion": f"{known.group}/{known.versions[-1]}".lstrip("/"), "kind": known.kind, **fields,
                  "metadata": meta})

    def find(self, kind: str, name: str, namespace: str = "") -> Object | None:
        return self.objects.get((kind, namespace, name))

    def of_kind(self, kind: str, namespace: str | None = None) -> list[Object]:
        return [one for (own, space, _), one in self.objects.items()
                if own == kind and namespace in (None, space)]

    def add_daemon_set(self, name: str, *, namespace: str = "kube-system", takes_s: float = 30.0,
                       labels: Mapping[str, str] | None = None, tolerates: bool = True) -> None:
        """Add a DaemonSet that the cloud itself installs; with `tolerates` it runs on tainted nodes too."""
        self.add_controller("DaemonSet", name, namespace, takes_s, labels, tolerations=ANY_TAINT if tolerates else ())

    def add_controller(self, kind: str, name: str, namespace: str, takes_s: float,
                       labels: Mapping[str, str] | None = None, *, tolerations: Sequence[JsonMap] = ANY_TAINT,
                       devices: list[str] | None = None, needs: str = "") -> None:
        """Add a Deployment or DaemonSet that is available after a while; `devices` are all that a device plugin
        offers, `needs` is a DaemonSet without which it finds none."""
        spec = {"template": {"spec": {"tolerations": [dict(one) for one in tolerations]}}}
        key = self.put({"apiVersion": "apps/v1", "kind": kind, "spec": spec,
                        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels or {})}})
        self.objects[key]["metadata"] |= {"needs": needs, **({} if devices is None else {"devices": devices})}
        self.ready_at[key] = self.clock.now + takes_s

    def add_csi_driver(self, name: str) -> None:
        self.add("CSIDriver", name)

    def advertises(self, plugin: str, device: str, pool: NodePool) -> bool:
        """Return whether a device plugin has a pod on the pool's nodes and its configuration names the device."""
        from cloudsim.kubernetes.scheduler import find_taint

        running = [one for one in self.of_kind("DaemonSet") if not find_taint(pool, one["spec"]["template"])]
        names = {name_of(one) for one in running}
        return self.is_available("DaemonSet", plugin) and any(
            name_of(one) == plugin and device in one["metadata"].get("devices", [device])
            and one["metadata"].get("needs") in (None, "", *names) for one in running)

    def is_available(self, kind: str, name: str) -> bool:
        """Return whether a Deployment or DaemonSet of this name is available in any namespace."""
        return any(own == kind and called == name and self.ready_at.get((own, space, called), 0.0) <= self.clock.now
                   for own, space, called in self.objects)

    def emit(self, thing: JsonMap, reason: str, message: str, *, warning: bool = True) -> None:
        """Record an event, unless it repeats the last one of its reason for this object."""
        about = (reason, str(thing.get("kind")), name_of(thing), namespace_of(thing))
        same = [one.message for one in self.events if (one.reason, one.kind, one.name, one.namespace) == about]
        if same[-1:] != [message]:
            self.events.append(Event(self.clock.now, "Warning" if warning else "Normal", *about, message))

    def reconcile(self) -> None:
        """Let controllers, scheduler and kubelets catch up with the clock."""
        from cloudsim.kubernetes.controllers import reconcile

        reconcile(self)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.reconcile()

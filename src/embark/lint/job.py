"""One model of a distributed training job, whatever object describes it; the rules ask this and not the YAML."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from embark.catalog.machine import Catalog, Machine
from embark.lint.pods import Container, Launch, Pod
from embark.lint.read import Document
from embark.lint.source import NOTHING, Node, Place

INSTANCE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type",
                   "cloud.google.com/machine-type")
GKE_LABEL = "cloud.google.com/gke-accelerator"
SPOT_LABELS = {
    "aws": (("eks.amazonaws.com/capacityType", "SPOT"), ("karpenter.sh/capacity-type", "spot")),
    "azure": (("kubernetes.azure.com/scalesetpriority", "spot"),),
    "gcp": (("cloud.google.com/gke-spot", "true"),),
}
_CLOUD_PREFIXES = {"eks.amazonaws.com/": "aws", "k8s.amazonaws.com/": "aws", "cloud.google.com/": "gcp",
                   "kubernetes.azure.com/": "azure"}


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Pods that train one model together."""

    document: Document
    spec: Node
    """The Job's spec, or that of the object that makes Jobs."""
    pod: Pod
    container: Container
    launch: Launch | None
    num_pods: int | None
    """None where it is not a number."""
    num_pods_node: Node
    """Where that number stands."""
    machines: tuple[Machine, ...]
    """Those it may run on, as its node selector says; none where it says nothing."""
    cloud: str
    """Empty where nothing tells."""

    @property
    def kind(self) -> str:
        return self.document.kind

    @property
    def is_plain_job(self) -> bool:
        """A Kubernetes Job, alone or in a JobSet: nobody injects a rendezvous."""
        return self.kind in ("Job", "CronJob", "JobSet")

    @property
    def is_indexed(self) -> bool:
        mode = self.spec["completionMode"]
        return mode.text == "Indexed" or (not mode and self.kind == "JobSet")  # JobSet fills it in

    @property
    def num_nodes(self) -> int:
        """How many pods the command expects, or there are."""
        said = self.launch.nnodes if self.launch is not None else None
        return max(said[1] if said else 1, self.num_pods or 1)

    @property
    def is_distributed(self) -> bool:
        return self.num_nodes > 1

    @property
    def gpus(self) -> int:
        return self.container.num_gpus

    @property
    def num_processes(self) -> int | None:
        """Per pod, where it is said."""
        if self.kind == "PyTorchJob":
            said = self.document.root.at("spec.nprocPerNode").integer
            return said if said is not None else self.launch.nproc if self.launch else None
        if self.kind == "TrainJob":
            return self.document.root.at("spec.trainer.numProcPerNode").integer
        return self.launch.nproc if self.launch is not None else None

    @property
    def machine(self) -> Machine | None:
        """The one it runs on, where only one is possible."""
        filled = [one for one in self.machines if one.gpus_per_host == self.gpus]
        return self.machines[0] if len(self.machines) == 1 else filled[0] if len(filled) == 1 else None

    @property
    def fills_node(self) -> bool:
        """No other of its pods fits beside one: it takes all accelerators of every machine it may run on."""
        return bool(self.machines) and all(one.gpus_per_host <= self.gpus for one in self.machines)

    @property
    def is_spot(self) -> bool:
        return any(self.pod.selector.get(name) == value for pairs in SPOT_LABELS.values() for name, value in pairs)

    @property
    def place(self) -> Place:
        return self.container.place


def jobs_of(pods: Sequence[Pod], catalog: Catalog) -> Iterator[TrainingJob]:
    """Those pods that train, each as the job it belongs to. Kubeflow's replicas are one job."""
    seen: set[int] = set()
    by_root: dict[int, list[Pod]] = {}
    for pod in pods:
        by_root.setdefault(id(pod.document.root), []).append(pod)
    for pod in pods:
        if not pod.is_training or pod.document.kind in ("RayCluster", "RayJob", "RayService", "Pod"):
            continue
        if pod.document.kind == "PyTorchJob":
            if id(pod.document.root) in seen:
                continue
            seen.add(id(pod.document.root))
            pod = max(by_root[id(pod.document.root)], key=lambda one: one.role == "Worker")
        container = pod.main
        if container is None:
            continue
        num_pods, node = _num_pods(pod, by_root[id(pod.document.root)])
        machines = machines_of(pod, catalog)
        yield TrainingJob(pod.document, pod.holder, pod, container, container.launch, num_pods, node, machines,
                          cloud_of(pod, machines))


def machines_of(pod: Pod, catalog: Catalog) -> tuple[Machine, ...]:
    """The catalog's machines that the pod's node selector allows."""
    selector = pod.selector
    for label in INSTANCE_LABELS:
        wanted = selector.get(label, "").lower()
        if wanted:
            return tuple(one for one in catalog.machines.values() if wanted in _names(one))
    label = selector.get(GKE_LABEL, "")
    return tuple(one for one in catalog.machines.values()
                 if label and one.gke_accelerator == label and one.gpus_per_host >= pod.num_gpus)


def cloud_of(pod: Pod, machines: Sequence[Machine]) -> str:
    """By machine, node labels, the fabric it asks for, or the settings it makes."""
    if machines:
        return machines[0].cloud
    for name in (*pod.selector, *pod.annotations):
        for prefix, cloud in _CLOUD_PREFIXES.items():
            if name.startswith(prefix):
                return cloud
    if any(name.startswith(("networking.gke.io/", "devices.gke.io/")) for name in pod.annotations):
        return "gcp"
    for container in pod.containers:
        if container.amount("vpc.amazonaws.com/efa") or any(name.startswith("FI_") for name in container.environment):
            return "aws"
        if container.amount("rdma/ib") or container.amount("rdma/shared_ib"):
            return "azure"
    if any(pod.tolerates(name) for name, _ in SPOT_LABELS["azure"] if pod.spec["tolerations"]):
        return "" if any(not one["key"] for one in pod.spec["tolerations"]) else "azure"
    return ""


def _names(machine: Machine) -> set[str]:
    return {name.lower() for name in (machine.name, machine.machine_type, *machine.also) if name}


def _num_pods(pod: Pod, siblings: Sequence[Pod]) -> tuple[int | None, Node]:
    kind, holder = pod.document.kind, pod.holder
    if kind in ("Job", "CronJob"):
        node = holder["parallelism"]
        return (node.integer if node else 1), node
    if kind == "JobSet":
        node = holder["parallelism"]
        replicated = [job for job in pod.document.root.at("spec.replicatedJobs") if job.at("template.spec") is holder]
        replicas = replicated[0]["replicas"].integer if replicated and replicated[0]["replicas"] else 1
        each = node.integer if node else 1
        return (None if each is None or replicas is None else each * replicas), node
    if kind == "TrainJob":
        node = pod.document.root.at("spec.trainer.numNodes")
        return node.integer, node
    if kind == "PyTorchJob":
        counts = [one.holder["replicas"].integer if one.holder["replicas"] else 1 for one in siblings]
        return (None if None in counts else sum(count or 0 for count in counts)), holder["replicas"]
    return None, NOTHING

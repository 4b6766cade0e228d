"""What rules look at: the training jobs among the manifests, whatever object describes them, and the settings of
scripts, images and pods."""

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from embark.catalog.machine import Catalog, Machine
from embark.kubernetes.names import GKE_ACCELERATOR, INSTANCE_TYPE, SPOT_LABELS
from embark.kubernetes.yaml_nodes import NOTHING, Node, Span
from embark.values import frozen
from .pods import Container, Launch, PodTemplate, pods_of
from .read import Document, Files
from .shell import Command

INSTANCE_LABELS = (INSTANCE_TYPE, "beta.kubernetes.io/instance-type",
                   "cloud.google.com/machine-type")
_CLOUD_PREFIXES = {"eks.amazonaws.com/": "aws", "k8s.amazonaws.com/": "aws", "cloud.google.com/": "gcp",
                   "kubernetes.azure.com/": "azure"}


@frozen
class TrainingJob:
    """Pods that train one model together."""

    document: Document
    spec: Node  # A Job's spec, or that of the object that makes Jobs.
    pod: PodTemplate
    container: Container
    launch: Launch | None
    num_pods: int | None  # None if the manifest does not give a number.
    num_pods_node: Node  # The YAML of that number.
    machines: tuple[Machine, ...]  # Machines that its node selector allows; none if it says nothing.
    cloud: str  # Empty if nothing tells.

    @property
    def kind(self) -> str:
        return self.document.kind

    @property
    def is_plain_job(self) -> bool:
        """Whether it is a Kubernetes Job, alone or in a JobSet, into which nobody injects a rendezvous."""
        return self.kind in ("Job", "CronJob", "JobSet")

    @property
    def is_indexed(self) -> bool:
        mode = self.spec["completionMode"]
        return mode.text == "Indexed" or (not mode and self.kind == "JobSet")  # JobSet fills it in

    @property
    def num_nodes(self) -> int:
        """How many pods the command expects, or the object makes if those are more."""
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
        """Processes in each pod; None if nothing says."""
        if self.kind == "PyTorchJob":
            said = self.document.at("spec.nprocPerNode").integer
            return said if said is not None else self.launch.nproc if self.launch else None
        if self.kind == "TrainJob":
            return self.document.at("spec.trainer.numProcPerNode").integer
        return self.launch.nproc if self.launch is not None else None

    @property
    def machine(self) -> Machine | None:
        """The machine it runs on, if only one is possible."""
        filled = [one for one in self.machines if one.gpus_per_host == self.gpus]
        return self.machines[0] if len(self.machines) == 1 else filled[0] if len(filled) == 1 else None

    @property
    def is_spot(self) -> bool:
        return any(self.pod.selector.get(name) == value for pairs in SPOT_LABELS.values() for name, value in pairs)

    @property
    def location(self) -> Span:
        return self.container.location


def jobs_of(pods: Sequence[PodTemplate], catalog: Catalog) -> Iterator[TrainingJob]:
    """Yield pods that train, each as the job it belongs to; Kubeflow's replicas are one job."""
    by_root: dict[int, list[PodTemplate]] = {}
    for pod in pods:
        by_root.setdefault(id(pod.document.root), []).append(pod)
    for pod in pods:
        siblings = by_root[id(pod.document.root)]
        if pod.kind == "PyTorchJob":
            if pod is not siblings[0]:
                continue
            pod = max(siblings, key=lambda one: one.role == "Worker")
        container = pod.main
        if not container or not pod.is_training or pod.kind in ("RayCluster", "RayJob", "RayService", "Pod"):
            continue
        num_pods, node = _num_pods(pod, siblings)
        machines = machines_of(pod, catalog)
        yield TrainingJob(pod.document, pod.holder, pod, container, container.launch, num_pods, node, machines,
                          cloud_of(pod, machines))


def machines_of(pod: PodTemplate, catalog: Catalog) -> tuple[Machine, ...]:
    """Return the catalog's machines that the pod's node selector allows."""
    selector = pod.selector
    for label in INSTANCE_LABELS:
        wanted = selector.get(label, "").lower()
        if wanted:
            return tuple(one for one in catalog.machines.values() if wanted in _names(one))
    label = selector.get(GKE_ACCELERATOR, "")
    return tuple(one for one in catalog.machines.values()
                 if label and one.gke_accelerator == label and one.gpus_per_host >= pod.num_gpus)


def cloud_of(pod: PodTemplate, machines: Sequence[Machine]) -> str:
    """Return the cloud that machine, node labels, fabric or settings tell; empty if nothing does."""
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


def _num_pods(pod: PodTemplate, siblings: Sequence[PodTemplate]) -> tuple[int | None, Node]:
    """Return the number of pods, None if it is not a number, and its YAML."""
    node, factors = pod.holder["parallelism"], [pod.holder["parallelism"]]
    if pod.kind == "TrainJob":
        node = pod.document.at("spec.trainer.numNodes")
        return node.integer, node
    if pod.kind == "PyTorchJob":
        counts = [_count(one.holder["replicas"]) for one in siblings]
        return (None if None in counts else sum(count or 0 for count in counts)), pod.holder["replicas"]
    if pod.kind == "JobSet":
        factors += [job["replicas"] for job in pod.document.at("spec.replicatedJobs")
                    if job.at("template.spec") is pod.holder]
    elif pod.kind not in ("Job", "CronJob"):
        return None, NOTHING
    counts = list(map(_count, factors))
    return (None if None in counts else math.prod(count or 0 for count in counts)), node


def _count(node: Node) -> int | None:
    return node.integer if node else 1


@dataclass(frozen=True)
class Manifests:
    """All files together, since an object of one file may refer to one of another."""

    files: Files
    catalog: Catalog
    today: datetime.date

    @property
    def documents(self) -> list[Document]:
        return self.files.documents

    @cached_property
    def pods(self) -> list[PodTemplate]:
        return [pod for document in self.documents for pod in pods_of(document)]

    @cached_property
    def jobs(self) -> list[TrainingJob]:
        return list(jobs_of(self.pods, self.catalog))

    @cached_property
    def commands(self) -> list[Command]:
        return [command for script in self.files.scripts for command in script]

    @cached_property
    def all_words(self) -> frozenset[str]:
        """Every word of every command, to find out whether something is installed anywhere."""
        return frozenset(word for command in self.commands for word in command.argv)

    def of_kind(self, *kinds: str) -> list[Document]:
        return [document for kind in kinds for document in self._by_kind.get(kind, ())]

    def named(self, kind: str, name: str, namespace: str) -> Document | None:
        return next((one for one in self.of_kind(kind) if (one.name, one.namespace) == (name, namespace)), None)

    def machine(self, name: str) -> Machine | None:
        """Find a machine by any of its names, but not by a machine type that cards are attached to."""
        return self._machines.get(name.lower())

    @cached_property
    def _by_kind(self) -> dict[str, list[Document]]:
        found: dict[str, list[Document]] = {}
        for document in self.documents:
            found.setdefault(document.kind, []).append(document)
        return found

    @cached_property
    def _machines(self) -> dict[str, Machine]:
        return {name.lower(): one for one in self.catalog.machines.values() for name in (one.name, *one.also)}


@frozen
class Setting:
    """`NAME=value`, and where it is set."""

    name: str
    value: str
    location: Span
    job: TrainingJob | None = None
    pod: PodTemplate | None = None
    is_with_efa: bool = False  # Settings of EFA stand in the same container, script or image.

    @property
    def is_on_efa(self) -> bool:
        return self.job.cloud == "aws" if self.job is not None else self.is_with_efa

    @property
    def is_on_verbs(self) -> bool:
        return any(one.fabric.transport == "verbs" for one in self.job.machines) if self.job is not None else False

    @property
    def is_not_on_verbs(self) -> bool:
        return not self.is_on_verbs

    @property
    def is_anywhere(self) -> bool:
        """Whether nothing says which fabric it is meant for."""
        if self.job is not None:
            return not self.job.machines and self.job.cloud == ""
        return self.pod is None and not self.is_with_efa


def settings(manifests: Manifests) -> Iterator[Setting]:
    """Yield settings of containers that train, of scripts and of Dockerfiles."""
    jobs = {id(job.pod): job for job in manifests.jobs}
    for pod in manifests.pods:
        for container in pod.containers if pod.is_training else ():
            with_efa = _has_efa(container.environment)
            for name, (entry, node) in container.environment.items():
                if node:
                    yield Setting(name, node.text, entry.location, jobs.get(id(pod)), pod, with_efa)
    scripts = [[one for command in script for one in command.assignments] for script in manifests.files.scripts]
    images = [dockerfile.environment for dockerfile in manifests.files.dockerfiles]
    for assignments in (*scripts, *images):
        with_efa = _has_efa(name for name, _, _ in assignments)
        for name, value, location in assignments:
            yield Setting(name, value, location, is_with_efa=with_efa)


def _has_efa(names: Iterable[str]) -> bool:
    return any(name.startswith("FI_") for name in names)

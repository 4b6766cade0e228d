"""A pod as it would be on its node (names, command, variables, files, limits), and the DNS names that lead to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from embark.catalog.pricing import GRACES
from embark.lint.pods import quantity
from embark.rehearse.manifest import (
    K8sObject,
    Objects,
    PodIdentity,
    at,
    data_of,
    expand,
    name_of,
    namespace_of,
    rows,
    variables,
)

GRACE_S = GRACES["kubernetes"][0]  # Kubernetes' default.
MountKind = Literal["files", "scratch", "memory", "shared", "host"]


@dataclass(frozen=True, slots=True)
class Mount:
    """Something seen at a path of a container."""

    path: str
    kind: MountKind
    """`files`: of a ConfigMap or a Secret. `scratch`: the pod's own. `shared`: a volume that all pods see.
    `host`: of the node."""
    name: str  # Of the volume; what is shared has one name in all pods.
    files: Mapping[str, str] = field(default_factory=dict)
    sub_path: str = ""
    is_read_only: bool = False
    size_bytes: int | None = None
    what: str = ""  # For a person: `claim dlrm-data`.


@dataclass(frozen=True, slots=True)
class Security:
    """Who the container is, and what it may do."""

    user: int | None = None
    group: int | None = None
    drops: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    may_gain: bool = True
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod that a controller makes, with the container that trains."""

    name: str
    index: int  # Which of the job's pods: what a fault is aimed by.
    group: str  # Of pods that are judged together: the child Job of a JobSet, the replicas of a PyTorchJob.
    hostname: str
    subdomain: str
    namespace: str
    labels: Mapping[str, str]
    container: str
    image: str
    command: tuple[str, ...]  # Empty: the image's own.
    args: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str = ""
    mounts: tuple[Mount, ...] = ()
    security: Security = field(default_factory=Security)
    memory_bytes: int | None = None
    cpus: float | None = None
    grace_s: float = GRACE_S
    restart_policy: str = "Never"
    has_readiness_probe: bool = False
    sidecars: tuple[str, ...] = ()  # Containers beside it, which are not started.
    devices: tuple[str, ...] = ()  # `nvidia.com/gpu: 8`: what only a node of the cluster has.
    missing: tuple[str, ...] = ()  # What it needs to start and no file has.
    secrets: tuple[str, ...] = ()
    trains: bool = True  # False of one that only starts others: a Ray cluster's head.
    spec: K8sObject = field(default_factory=dict, repr=False)  # Its template's, as the manifest has it.

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.command, *self.args)

    @property
    def names(self) -> tuple[str, ...]:
        """What a headless Service of its subdomain makes resolvable."""
        if not (self.hostname and self.subdomain):
            return ()
        return _qualified(f"{self.hostname}.{self.subdomain}", self.namespace)


def make_pod(template: K8sObject, identity: PodIdentity, objects: Objects, *, container_name: str = "") -> Pod:
    """`container_name`: the one that trains, where the controller knows it by its name."""
    spec: K8sObject = template.get("spec") or {}
    identity = replace(identity, labels={**_words(at(template, "metadata.labels")), **identity.labels},
                       annotations={**_words(at(template, "metadata.annotations")), **identity.annotations})
    container = main_container(spec, container_name)
    found = variables(container, objects, identity)
    command = [str(word) for word in container.get("command") or ()]
    args = [str(word) for word in container.get("args") or ()]
    mounts, missing = _mounts(spec, container, objects, identity.namespace)
    limits = at(container, "resources.limits") or {}
    beside = [str(one.get("name")) for one in [*rows(spec, "initContainers"), *rows(spec, "containers")]
              if one is not container]
    return Pod(
        name=identity.name, index=identity.index, group=identity.group, namespace=identity.namespace,
        labels=identity.labels, hostname=str(spec.get("hostname") or identity.name),
        subdomain=str(spec.get("subdomain") or identity.subdomain),
        container=str(container.get("name", "")), image=str(container.get("image", "")),
        command=tuple(expand(word, found.values) for word in command),
        args=tuple(expand(word, found.values) for word in args),
        env=dict(found.values), workdir=str(container.get("workingDir") or ""), mounts=tuple(mounts),
        security=_security(spec, container),
        memory_bytes=_bytes(limits.get("memory")), cpus=quantity(str(limits.get("cpu", ""))),
        grace_s=float(spec.get("terminationGracePeriodSeconds", GRACE_S)),
        restart_policy=identity.restart_policy or str(spec.get("restartPolicy") or "Always"),
        has_readiness_probe="readinessProbe" in container, sidecars=tuple(beside),
        devices=tuple(f"{name}: {amount}" for name, amount in limits.items()
                      if "/" in str(name) or str(name).startswith("hugepages")),
        missing=(*found.missing, *missing), secrets=found.unset_secrets, spec=spec,
    )


def main_container(spec: K8sObject, name: str = "") -> K8sObject:
    """The one of that name, else the one with accelerators, else the first."""
    containers = rows(spec, "containers")
    for container in containers:
        limits = at(container, "resources.limits") or {}
        if container.get("name") == name or (not name and any("/gpu" in str(key) for key in limits)):
            return container
    return containers[0] if containers else {}


def _bytes(value: Any) -> int | None:
    number = quantity(str(value).strip())
    return None if number is None else int(number)


def _mounts(spec: K8sObject, container: K8sObject, objects: Objects, namespace: str) -> tuple[list[Mount], list[str]]:
    volumes = {str(one.get("name")): one for one in rows(spec, "volumes")}
    found: list[Mount] = []
    missing: list[str] = []
    for row in rows(container, "volumeMounts"):
        volume = volumes.get(str(row.get("name")))
        if volume is None:
            missing.append(f"volume {row.get('name')}")
            continue
        found.append(_mount(volume, row, objects, namespace, missing))
    return found, missing


def _mount(volume: K8sObject, row: K8sObject, objects: Objects, namespace: str, missing: list[str]) -> Mount:
    path, name, sub_path = str(row.get("mountPath", "")), str(volume.get("name")), str(row.get("subPath") or "")
    read_only = bool(row.get("readOnly"))
    for key, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
        source = volume.get(key)
        if source is None:
            continue
        called = str(source.get("name") or source.get("secretName") or "")
        contents = data_of(objects, kind, called, namespace)
        if contents is None and kind == "ConfigMap" and not source.get("optional"):
            missing.append(f"ConfigMap {called}")
        files = contents or {}
        if items := rows(source, "items"):
            files = {str(item["path"]): files.get(str(item["key"]), "") for item in items}
        return Mount(path, "files", name, files, sub_path, True, what=f"{kind} {called}")
    if "emptyDir" in volume:
        empty = volume["emptyDir"] or {}
        kind_: MountKind = "memory" if empty.get("medium") == "Memory" else "scratch"
        return Mount(path, kind_, name, {}, sub_path, read_only, _bytes(empty.get("sizeLimit")))
    if "hostPath" in volume:
        return Mount(path, "host", name, {}, sub_path, read_only, what=f"the node's {at(volume, 'hostPath.path')}")
    if claim := at(volume, "persistentVolumeClaim.claimName"):
        return Mount(path, "shared", f"claim-{claim}", {}, sub_path, read_only, what=f"claim {claim}")
    source_kind = next((key for key in volume if key != "name"), "volume")
    return Mount(path, "shared", f"volume-{name}", {}, sub_path, read_only, what=f"{source_kind} volume {name}")


def _security(spec: K8sObject, container: K8sObject) -> Security:
    pod, own = at(spec, "securityContext") or {}, at(container, "securityContext") or {}
    both = {**pod, **own}
    return Security(
        user=both.get("runAsUser"), group=both.get("runAsGroup"),
        drops=_listed(at(own, "capabilities.drop")), adds=_listed(at(own, "capabilities.add")),
        may_gain=bool(own.get("allowPrivilegeEscalation", True)),
        is_read_only=bool(own.get("readOnlyRootFilesystem", False)),
    )


def _listed(value: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _words(value: Any) -> dict[str, str]:
    return {str(key): str(contents) for key, contents in value.items()} if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Service:
    """A Service, of a file or made by a controller."""

    name: str
    namespace: str
    selector: Mapping[str, str]
    is_headless: bool
    publishes_not_ready: bool

    def selects(self, pod: Pod) -> bool:
        return bool(self.selector) and pod.namespace == self.namespace and self.selector.items() <= pod.labels.items()


@dataclass(frozen=True, slots=True)
class Names:
    """What the pods can look up."""

    by_pod: Mapping[str, tuple[str, ...]]  # Pod to the names that lead to it.

    def pods_of(self, host: str) -> list[str]:
        return [pod for pod, names in self.by_pod.items() if host in names]

    def resolves(self, host: str) -> bool:
        return bool(self.pods_of(host))


def read_services(objects: Objects) -> list[Service]:
    return [Service(name_of(one), namespace_of(one),
                    {str(key): str(value) for key, value in (at(one, "spec.selector") or {}).items()},
                    str(at(one, "spec.clusterIP")) == "None", bool(at(one, "spec.publishNotReadyAddresses")))
            for one in objects.of_kind("Service")]


def dns_names(pods: Sequence[Pod], services: Sequence[Service]) -> Names:
    """A pod's own name needs a headless Service called like its subdomain; a Service's name leads to all it selects."""
    found: dict[str, list[str]] = {pod.name: [] for pod in pods}
    for service in services:
        for pod in pods:
            # Without a probe a pod is ready as soon as it runs.
            is_published = service.publishes_not_ready or not pod.has_readiness_probe
            if not service.selects(pod) or not is_published:
                continue
            found[pod.name] += _qualified(service.name, service.namespace)
            if service.is_headless and service.name == pod.subdomain:
                found[pod.name] += pod.names
    return Names({pod: tuple(dict.fromkeys(names)) for pod, names in found.items()})


def _qualified(name: str, namespace: str) -> tuple[str, ...]:
    return (name, f"{name}.{namespace}", f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local")

"""A pod as it would be on its node: the container that trains, its command, variables, files and limits, and the DNS
names that lead to the pod."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

from embark.catalog.pricing import GRACES
from embark.values import frozen
from .objects import K8sObject, Objects, at, name_of, namespace_of, quantity, rows, texts

DEFAULT_GRACE_S = int(GRACES["kubernetes"][0])
NVIDIA_GPU, AMD_GPU, TPU = "nvidia.com/gpu", "amd.com/gpu", "google.com/tpu"
GPU_RESOURCES = (NVIDIA_GPU, AMD_GPU)
POD_IP = "@pod-ip@"  # Stands for an address that is known only once the pod is started.
MountKind = Literal["files", "scratch", "shared", "host"]
Names = Mapping[str, Sequence[str]]  # The pods that each DNS name leads to.
_ACCELERATOR = re.compile(r"[^/]+/(gpu|tpu|mig-)")  # Also `nvidia.com/gpu.shared` and slices such as `mig-1g.5gb`.
_TORCHRUN = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch))\b")
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")


def main_container(spec: K8sObject, name: str = "") -> K8sObject:
    """Return the container that trains: the one of that name if its controller has one, else the first with
    accelerators, else the first that starts torchrun, else the first."""
    containers = rows(spec, "containers")
    ranked = [*(one for one in containers if name and one.get("name") == name), *filter(is_accelerated, containers),
              *filter(starts_torchrun, containers), *containers]
    return ranked[0] if ranked else {}


def is_accelerated(container: K8sObject) -> bool:
    """Return whether it asks for a GPU or a TPU, by a limit or a request."""
    amounts = texts(at(container, "resources.requests")) | texts(at(container, "resources.limits"))
    return any(_ACCELERATOR.match(name) and quantity(amount) for name, amount in amounts.items())


def starts_torchrun(container: K8sObject) -> bool:
    return any(_TORCHRUN.search(word) for word in command_words(container, "command", "args"))


def embark_words(argv: Sequence[str]) -> list[str]:
    """Return the words behind `embark` in a command; none if it runs another program."""
    programs = [word.rpartition("/")[2] for word in argv]
    return list(argv[programs.index("embark") + 1:]) if "embark" in programs else []


def pod_specs(thing: Any) -> Iterator[K8sObject]:
    """Yield every pod's spec in an object, whatever the object's kind."""
    if isinstance(thing, Mapping):
        if rows(thing, "containers"):
            yield thing
        thing = list(thing.values())
    for inner in thing if isinstance(thing, list) else ():
        yield from pod_specs(inner)


def requested(spec: K8sObject) -> dict[str, float]:
    """Return what the containers of a pod request together, with those that run beside them; a limit alone is a
    request."""
    beside = [one for one in rows(spec, "initContainers") if one.get("restartPolicy") == "Always"]
    total: Counter[str] = Counter()
    for container in (*rows(spec, "containers"), *beside):
        amounts = texts(at(container, "resources.limits")) | texts(at(container, "resources.requests"))
        total.update({name: quantity(amount) or 0.0 for name, amount in amounts.items()})
    return dict(total)


def blocking_taints(node: K8sObject, tolerations: list[K8sObject]) -> Iterator[str]:
    """Yield the taints of a node that keep a pod away, as kubectl writes them."""
    for taint in rows(node, "spec.taints"):
        key, value, effect = (str(taint.get(name) or "") for name in ("key", "value", "effect"))
        is_tolerated = any(
            str(one.get("key") or key) == key and str(one.get("effect") or effect) == effect
            and (one.get("operator") == "Exists" or str(one.get("value") or "") == value) for one in tolerations)
        if effect != "PreferNoSchedule" and not is_tolerated:
            yield f"{key}={value}:{effect}" if value else f"{key}:{effect}"


def room_for(spec: K8sObject, nodes: Sequence[K8sObject], pods: Sequence[K8sObject]) -> int:
    """Return how many more pods of a spec the nodes have room for, beside what `pods` request."""
    selector, wanted, room = texts(spec.get("nodeSelector")), requested(spec), 0
    for node in nodes:
        is_closed = at(node, "spec.unschedulable") or any(blocking_taints(node, rows(spec, "tolerations")))
        if is_closed or not selector.items() <= texts(at(node, "metadata.labels")).items():
            continue
        there = [requested(one["spec"]) for one in pods if at(one, "spec.nodeName") == name_of(node)
                 and at(one, "status.phase") not in ("Succeeded", "Failed")]
        has = texts(at(node, "status.allocatable"))
        free = {name: (quantity(has.get(name, "0")) or 0.0) - sum(one.get(name, 0.0) for one in there)
                for name in wanted}
        room += max(0, int(min((free[name] // amount for name, amount in wanted.items() if amount), default=1)))
    return room


def trains(spec: K8sObject) -> bool:
    """Return whether the main container of a pod has accelerators or starts torchrun."""
    container = main_container(spec)
    return is_accelerated(container) or starts_torchrun(container)


@frozen
class Mount:
    """Something seen at a path of a container."""

    path: str
    kind: MountKind
    """`files`: a ConfigMap or a Secret. `scratch`: the pod's own disk. `shared`: a volume that all pods see.
    `host`: a folder of the node."""
    name: str  # Name of the volume; a shared volume has the same name in all pods.
    files: Mapping[str, str] = field(default_factory=dict)
    sub_path: str = ""
    what: str = ""  # Description for a person, such as `claim dlrm-data`.


@frozen
class PodIdentity:
    """The values that a controller gives one pod in addition to its template."""

    name: str
    namespace: str
    index: int = 0
    group: str = ""
    subdomain: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = ""


@frozen
class Pod:
    """One pod that a controller makes, with the container that trains."""

    name: str
    index: int  # Index among the job's pods, by which faults are aimed.
    group: str  # Pods that are judged together: the child Job of a JobSet, the replicas of a PyTorchJob.
    hostname: str
    subdomain: str
    namespace: str
    labels: Mapping[str, str]
    container: str
    image: str
    command: tuple[str, ...]  # Empty if the image's own is run.
    args: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str = ""
    mounts: tuple[Mount, ...] = ()
    grace_s: float = DEFAULT_GRACE_S
    restart_policy: str = "Never"
    has_readiness_probe: bool = False
    sidecars: tuple[str, ...] = ()  # The other containers, which are not started.
    devices: tuple[str, ...] = ()  # `nvidia.com/gpu: 8`: what only a node of the cluster has.
    missing: tuple[str, ...] = ()  # Objects that it needs to start and that no file contains.
    secrets: tuple[str, ...] = ()
    trains: bool = True  # False for a pod that only starts others, such as a Ray cluster's head.
    spec: K8sObject = field(default_factory=dict, repr=False)  # The spec of its template.

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.command, *self.args)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which a headless Service of its subdomain makes it resolvable."""
        if not (self.hostname and self.subdomain):
            return ()
        return _qualified(f"{self.hostname}.{self.subdomain}", self.namespace)


def make_pod(template: K8sObject, identity: PodIdentity, objects: Objects, *, container_name: str = "") -> Pod:
    """Make a pod of its template. `container_name` is the container that trains, if the controller knows it by name."""
    spec: K8sObject = template.get("spec") or {}
    identity = replace(identity, labels={**texts(at(template, "metadata.labels")), **identity.labels},
                       annotations={**texts(at(template, "metadata.annotations")), **identity.annotations})
    container = main_container(spec, container_name)
    env = variables(container, objects, identity)
    mounts, missing = _mounts(spec, container, objects, identity.namespace)
    limits = texts(at(container, "resources.limits"))
    sidecars = [str(one.get("name")) for one in [*rows(spec, "initContainers"), *rows(spec, "containers")]
                if one is not container]
    return Pod(
        name=identity.name, index=identity.index, group=identity.group, namespace=identity.namespace,
        labels=identity.labels, hostname=str(spec.get("hostname") or identity.name),
        subdomain=str(spec.get("subdomain") or identity.subdomain),
        container=str(container.get("name", "")), image=str(container.get("image", "")),
        command=tuple(expand(word, env.values) for word in command_words(container, "command")),
        args=tuple(expand(word, env.values) for word in command_words(container, "args")),
        env=env.values, workdir=str(container.get("workingDir") or ""), mounts=tuple(mounts),
        grace_s=float(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)),
        restart_policy=identity.restart_policy or str(spec.get("restartPolicy") or "Always"),
        has_readiness_probe="readinessProbe" in container, sidecars=tuple(sidecars),
        devices=tuple(f"{name}: {amount}" for name, amount in limits.items()
                      if "/" in name or name.startswith("hugepages")),
        missing=(*env.missing, *missing), secrets=env.unset_secrets, spec=spec
    )


def command_words(thing: K8sObject, *keys: str) -> tuple[str, ...]:
    """Return the words of these fields of a container."""
    return tuple(str(word) for key in keys for word in thing.get(key) or ())


def _mounts(spec: K8sObject, container: K8sObject, objects: Objects, namespace: str) -> tuple[list[Mount], list[str]]:
    volumes = {str(one.get("name")): one for one in rows(spec, "volumes")}
    mounts: list[Mount] = []
    missing: list[str] = []
    for row in rows(container, "volumeMounts"):
        volume = volumes.get(str(row.get("name")))
        if volume is None:
            missing.append(f"volume {row.get('name')}")
            continue
        mounts.append(_mount(volume, row, objects, namespace, missing))
    return mounts, missing


def _mount(volume: K8sObject, row: K8sObject, objects: Objects, namespace: str, missing: list[str]) -> Mount:
    path, name, sub_path = str(row.get("mountPath", "")), str(volume.get("name")), str(row.get("subPath") or "")
    for key, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
        source = volume.get(key)
        if source is None:
            continue
        called = str(source.get("name") or source.get("secretName") or "")
        contents = objects.data_of(kind, called, namespace)
        if contents is None and kind == "ConfigMap" and not source.get("optional"):
            missing.append(f"ConfigMap {called}")
        files = contents or {}
        if items := rows(source, "items"):
            files = {str(item["path"]): files.get(str(item["key"]), "") for item in items}
        return Mount(path, "files", name, files, sub_path, f"{kind} {called}")
    if "emptyDir" in volume:
        return Mount(path, "scratch", name, {}, sub_path)
    if "hostPath" in volume:
        return Mount(path, "host", name, {}, sub_path, f"the node's {at(volume, 'hostPath.path')}")
    if claim := at(volume, "persistentVolumeClaim.claimName"):
        return Mount(path, "shared", f"claim-{claim}", {}, sub_path, f"claim {claim}")
    source_kind = next((key for key in volume if key != "name"), "volume")
    return Mount(path, "shared", f"volume-{name}", {}, sub_path, f"{source_kind} volume {name}")


@frozen
class Variables:
    """The environment of one container."""

    values: Mapping[str, str]
    missing: tuple[str, ...]  # Without these the kubelet does not start the container.
    unset_secrets: tuple[str, ...]  # Secrets that no file holds, as it should be; their variables are not set.


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` becomes its value, or stays if there is none; `$$` becomes a dollar."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else values.get(match[1], match[0]), text)


def variables(container: K8sObject, objects: Objects, pod: PodIdentity) -> Variables:
    """Return variables of envFrom, then env in its order, then those of the controller; each may refer to those before
    it."""
    values: dict[str, str] = {}
    missing: list[str] = []
    unset_secrets: list[str] = []
    for row in rows(container, "envFrom"):
        kind = "ConfigMap" if "configMapRef" in row else "Secret"
        reference = row.get("configMapRef") or row.get("secretRef") or {}
        contents = objects.data_of(kind, str(reference.get("name", "")), pod.namespace)
        if contents is not None:
            values |= {f"{row.get('prefix', '')}{name}": value for name, value in contents.items()}
        elif kind == "Secret":
            unset_secrets.append(f"secret {reference.get('name')}")
        elif not reference.get("optional"):
            missing.append(f"ConfigMap {reference.get('name')}")
    for row in rows(container, "env"):
        name = str(row.get("name", ""))
        value = _referred(row["valueFrom"], container, objects, pod, missing, unset_secrets) if "valueFrom" in row \
            else expand(texts(row).get("value", ""), values)
        if value is not None:
            values[name] = value
    return Variables({**values, **pod.env}, tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(unset_secrets)))


def _referred(
    source: K8sObject, container: K8sObject, objects: Objects, pod: PodIdentity, missing: list[str], secrets: list[str]
) -> str | None:
    """Return the value; what no file has is added to `missing` or, of a Secret, to `secrets`."""
    if path := at(source, "fieldRef.fieldPath"):
        return _field(str(path), pod)
    for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := source.get(key):
            contents = objects.data_of(kind, str(reference.get("name")), pod.namespace)
            value = (contents or {}).get(str(reference.get("key")))
            if value is None and not reference.get("optional"):
                (secrets if kind == "Secret" else missing).append(
                    f"{kind} {reference.get('name')}, key {reference.get('key')}")
            return value
    if resource := at(source, "resourceFieldRef.resource"):
        section, _, word = str(resource).partition(".")
        return texts(at(container, f"resources.{section}")).get(word, "0")
    return None


def _field(path: str, pod: PodIdentity) -> str:
    if match := _KEYED.fullmatch(path):
        contents = pod.labels if match[1] == "labels" else pod.annotations
        return contents.get(match[2], "")
    return {"metadata.name": pod.name, "metadata.namespace": pod.namespace, "spec.nodeName": "this-machine",
            "status.podIP": POD_IP, "status.hostIP": POD_IP}.get(path, "")


@frozen
class Service:
    """A Service, of a file or made by a controller."""

    name: str
    namespace: str
    selector: Mapping[str, str]
    is_headless: bool
    publishes_not_ready: bool

    def selects(self, pod: Pod) -> bool:
        return bool(self.selector) and pod.namespace == self.namespace and self.selector.items() <= pod.labels.items()


def read_services(objects: Objects) -> list[Service]:
    return [Service(name_of(one), namespace_of(one), texts(at(one, "spec.selector")),
                    str(at(one, "spec.clusterIP")) == "None", bool(at(one, "spec.publishNotReadyAddresses")))
            for one in objects.of_kind("Service")]


def dns_names(pods: Sequence[Pod], services: Sequence[Service]) -> Names:
    """Return names that pods can look up. A pod's name needs a headless Service called like its subdomain; a Service's
    name leads to all pods that it selects."""
    found: dict[str, list[str]] = {}
    for service in services:
        for pod in pods:
            # Without a probe a pod is ready as soon as it runs.
            if service.selects(pod) and (service.publishes_not_ready or not pod.has_readiness_probe):
                names = _qualified(service.name, service.namespace)
                if service.is_headless and service.name == pod.subdomain:
                    names += pod.names
                for name in names:
                    found.setdefault(name, []).append(pod.name)
    return found


def _qualified(name: str, namespace: str) -> tuple[str, ...]:
    return (name, f"{name}.{namespace}", f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local")

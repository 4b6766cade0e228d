"""A pod as it would stand on its node: its names, its command, its variables, its files, its limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from embark.rehearse.objects import Objects, Thing, at, rows
from embark.rehearse.variables import About, expand, held_data, undefined, variables

GRACE_S = 30.0
"""Kubernetes' own, where a pod does not say."""
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MountKind = Literal["files", "scratch", "memory", "shared", "host"]


@dataclass(frozen=True, slots=True)
class Mount:
    """Something seen at a path of a container."""

    path: str
    kind: MountKind
    """`files`: of a ConfigMap or a Secret. `scratch`: the pod's own. `shared`: a volume that all pods see.
    `host`: of the node."""
    name: str
    """Of the volume; what is shared has one name in all pods."""
    files: Mapping[str, str] = field(default_factory=dict)
    sub_path: str = ""
    is_read_only: bool = False
    size_bytes: int | None = None
    what: str = ""
    """For a person: `claim dlrm-data`."""


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
    index: int
    """Which of the job's pods: what a fault is aimed by."""
    group: str
    """Of pods that are judged together: the child Job of a JobSet, the replicas of a PyTorchJob."""
    hostname: str
    subdomain: str
    namespace: str
    labels: Mapping[str, str]
    container: str
    image: str
    command: tuple[str, ...]
    """Empty: the image's own."""
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
    sidecars: tuple[str, ...] = ()
    """Containers beside it, which are not started."""
    devices: tuple[str, ...] = ()
    """`nvidia.com/gpu: 8`: what only a node of the cluster has."""
    undefined: tuple[str, ...] = ()
    """Variables that its words refer to and nobody defines."""
    missing: tuple[str, ...] = ()
    """What it needs to start and no file has."""
    secrets: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.command, *self.args)

    @property
    def names(self) -> tuple[str, ...]:
        """What a headless Service of its subdomain makes resolvable."""
        if not (self.hostname and self.subdomain):
            return ()
        short = f"{self.hostname}.{self.subdomain}"
        return (short, f"{short}.{self.namespace}", f"{short}.{self.namespace}.svc",
                f"{short}.{self.namespace}.svc.cluster.local")


@dataclass(frozen=True, slots=True)
class Making:
    """What a controller adds to a template for one pod."""

    name: str
    index: int
    group: str
    namespace: str
    hostname: str
    subdomain: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = ""


def make_pod(template: Thing, making: Making, objects: Objects, *, container_name: str = "") -> Pod:
    """`container_name`: the one that trains, where the controller knows it by its name."""
    spec: Thing = template.get("spec") or {}
    labels = {**_words(at(template, "metadata.labels")), **making.labels}
    annotations = {**_words(at(template, "metadata.annotations")), **making.annotations}
    container = main_container(spec, container_name)
    about = About(making.name, making.namespace, labels, annotations)
    found = variables(container, making.env, objects, about)
    command = [str(word) for word in container.get("command") or ()]
    args = [str(word) for word in container.get("args") or ()]
    values = [str(row["value"]) for row in rows(container, "env") if row.get("value") is not None]
    mounts, missing = _mounts(spec, container, objects, making.namespace)
    limits = at(container, "resources.limits") or {}
    beside = [str(one.get("name")) for one in [*rows(spec, "initContainers"), *rows(spec, "containers")]
              if one is not container]
    return Pod(
        name=making.name, index=making.index, group=making.group, namespace=making.namespace, labels=labels,
        hostname=str(spec.get("hostname") or making.hostname), subdomain=str(spec.get("subdomain") or making.subdomain),
        container=str(container.get("name", "")), image=str(container.get("image", "")),
        command=tuple(expand(word, found.values) for word in command),
        args=tuple(expand(word, found.values) for word in args),
        env=dict(found.values), workdir=str(container.get("workingDir") or ""), mounts=tuple(mounts),
        security=_security(spec, container),
        memory_bytes=quantity(limits.get("memory")), cpus=_cpus(limits.get("cpu")),
        grace_s=float(spec.get("terminationGracePeriodSeconds", GRACE_S)),
        restart_policy=making.restart_policy or str(spec.get("restartPolicy") or "Always"),
        has_readiness_probe="readinessProbe" in container, sidecars=tuple(beside),
        devices=tuple(f"{name}: {amount}" for name, amount in limits.items()
                      if "/" in str(name) or str(name).startswith("hugepages")),
        undefined=tuple(undefined([*command, *args, *values], found.values)),
        missing=(*found.missing, *missing), secrets=found.not_here,
    )


def main_container(spec: Thing, name: str = "") -> Thing:
    """The one of that name, else the one with accelerators, else the first."""
    containers = rows(spec, "containers")
    for container in containers:
        limits = at(container, "resources.limits") or {}
        if container.get("name") == name or (not name and any("/gpu" in str(key) for key in limits)):
            return container
    return containers[0] if containers else {}


def quantity(value: Any) -> int | None:
    """Kubernetes' `64Gi` in bytes; None where it is none."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(value).strip()) if value is not None else None
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]])


def _mounts(spec: Thing, container: Thing, objects: Objects, namespace: str) -> tuple[list[Mount], list[str]]:
    volumes = {str(one.get("name")): one for one in rows(spec, "volumes")}
    found: list[Mount] = []
    missing: list[str] = []
    for row in rows(container, "volumeMounts"):
        volume = volumes.get(str(row.get("name")))
        if volume is None:
            missing.append(f"volume {row.get('name')}")
            continue
        mount, lack = _mount(volume, row, objects, namespace)
        missing += [lack] if lack else []
        found.append(mount)
    return found, missing


def _mount(volume: Thing, row: Thing, objects: Objects, namespace: str) -> tuple[Mount, str]:
    path, name, sub_path = str(row.get("mountPath", "")), str(volume.get("name")), str(row.get("subPath") or "")
    read_only = bool(row.get("readOnly"))
    for key, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
        source = volume.get(key)
        if source is None:
            continue
        called = str(source.get("name") or source.get("secretName") or "")
        held = held_data(objects, kind, called, namespace)
        lack = "" if held is not None or source.get("optional") or kind == "Secret" else f"ConfigMap {called}"
        files = held or {}
        if items := rows(source, "items"):
            files = {str(item["path"]): files.get(str(item["key"]), "") for item in items}
        return Mount(path, "files", name, files, sub_path, True, what=f"{kind} {called}"), lack
    if "emptyDir" in volume:
        empty = volume["emptyDir"] or {}
        kind_: MountKind = "memory" if empty.get("medium") == "Memory" else "scratch"
        return Mount(path, kind_, name, {}, sub_path, read_only, quantity(empty.get("sizeLimit"))), ""
    if "hostPath" in volume:
        return Mount(path, "host", name, {}, sub_path, read_only, what=f"the node's {at(volume, 'hostPath.path')}"), ""
    if claim := at(volume, "persistentVolumeClaim.claimName"):
        return Mount(path, "shared", f"claim-{claim}", {}, sub_path, read_only, what=f"claim {claim}"), ""
    source_kind = next((key for key in volume if key != "name"), "volume")
    return Mount(path, "shared", f"volume-{name}", {}, sub_path, read_only, what=f"{source_kind} volume {name}"), ""


def _security(spec: Thing, container: Thing) -> Security:
    pod, own = at(spec, "securityContext") or {}, at(container, "securityContext") or {}
    both = {**pod, **own}
    return Security(
        user=both.get("runAsUser"), group=both.get("runAsGroup"),
        drops=_listed(at(own, "capabilities.drop")), adds=_listed(at(own, "capabilities.add")),
        may_gain=bool(own.get("allowPrivilegeEscalation", True)),
        is_read_only=bool(own.get("readOnlyRootFilesystem", False)),
    )


def _cpus(value: Any) -> float | None:
    text = "" if value is None else str(value)
    try:
        return float(text[:-1]) / 1000 if text.endswith("m") else float(text) if text else None
    except ValueError:
        return None


def _listed(value: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _words(value: Any) -> dict[str, str]:
    return {str(key): str(held) for key, held in value.items()} if isinstance(value, Mapping) else {}

"""Why a pod on a node does not start (images, files, volumes), and what a program in it may read and write."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudsim.kubernetes.cloud import NodePool, VolumeFacts
from cloudsim.kubernetes.cluster import Cluster, Object
from cloudsim.kubernetes.volumes import PROVISIONED
from embark.kubernetes.objects import at, rows

OBJECT_STORES = ("s3://", "gs://", "az://", "abfs://")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod cannot start, in the words of its status and its events."""

    reason: str  # `ContainerCreating`, `ImagePullBackOff` or `CreateContainerConfigError`.
    event: str
    message: str


def start_trouble(cluster: Cluster, stored: Object, pool: NodePool) -> Trouble | None:
    for kind, name in _mounted_objects(stored):
        if cluster.find(kind, name, stored["metadata"]["namespace"]) is None:
            return Trouble("ContainerCreating", "FailedMount",
                           f'MountVolume.SetUp failed for volume: {kind.lower()} "{name}" not found')
    for name in _claims(stored):
        found = mount_claim(cluster, stored, name, pool)
        if isinstance(found, str):
            return Trouble("ContainerCreating", "FailedMount", found)
    for container in [*rows(stored, "spec.initContainers"), *rows(stored, "spec.containers")]:
        image = str(container.get("image", ""))
        error = cluster.cloud.pull_error(image, pool, stored["metadata"]["namespace"])
        if error:
            return Trouble("ImagePullBackOff", "Failed", f'Failed to pull image "{image}": {error}')
        if error := _config_error(cluster, stored, container):
            return Trouble("CreateContainerConfigError", "Failed", f"Error: {error}")
    return None


def _config_error(cluster: Cluster, stored: Object, container: Mapping[str, Any]) -> str:
    """Return why the kubelet cannot make a container's variables or may not start its user, or an empty text."""
    space = stored["metadata"]["namespace"]
    for row in rows(container, "envFrom"):
        for field, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
            name = at(row, f"{field}.name")
            if name and not at(row, f"{field}.optional") and cluster.find(kind, str(name), space) is None:
                return f'{kind.lower()} "{name}" not found'
    for row in rows(container, "env"):
        for field, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
            wanted = at(row, f"valueFrom.{field}") or {}
            found = cluster.find(kind, str(wanted.get("name")), space) if wanted else None
            if wanted and not wanted.get("optional"):
                if found is None:
                    return f'{kind.lower()} "{wanted.get("name")}" not found'
                if wanted.get("key") not in {**(found.get("data") or {}), **(found.get("stringData") or {})}:
                    return f'couldn\'t find key {wanted.get("key")} in {kind} {space}/{wanted.get("name")}'
    security = {**(at(stored, "spec.securityContext") or {}), **(container.get("securityContext") or {})}
    if security.get("runAsNonRoot") and security.get("runAsUser") == 0:
        return f"container's runAsUser breaks non-root policy (container: {container.get('name')})"
    return ""


def _mounted_objects(stored: Object) -> list[tuple[str, str]]:
    """Return the ConfigMaps and Secrets that a pod cannot start without."""
    found = []
    for volume in rows(stored, "spec.volumes"):
        for field, kind, key in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
            source = volume.get(field)
            if source and not source.get("optional"):
                found.append((kind, str(source.get(key))))
    return found


def mount_claim(cluster: Cluster, stored: Object, claim_name: str, pool: NodePool) -> VolumeFacts | str:
    """Return the file system of a claim on a node of this pool, or the kubelet's error."""
    claim = cluster.find("PersistentVolumeClaim", claim_name, stored["metadata"]["namespace"]) or {}
    volume = cluster.find("PersistentVolume", str(at(claim, "spec.volumeName") or ""))
    if volume is None:
        return f'MountVolume.SetUp failed: persistentvolume of claim "{claim_name}" not found'
    driver = at(volume, "spec.csi.driver")
    if driver and cluster.find("CSIDriver", str(driver)) is None:
        return (f"MountVolume.MountDevice failed for volume \"{volume['metadata']['name']}\": kubernetes.io/csi: "
                f"attacher.MountDevice failed to create newCsiDriverClient: driver name {driver} not found in the "
                "list of registered CSI drivers")
    if PROVISIONED in (at(volume, "metadata.annotations") or {}):
        return VolumeFacts(cluster.folder / "disks" / volume["metadata"]["name"], takes_fs_group=True)
    return cluster.cloud.volume(volume, pool)


def may_write(facts: VolumeFacts, spec: Mapping[str, Any]) -> bool:
    """Return whether the pod's user can create a file in the root of the volume."""
    user = at(spec, "securityContext.runAsUser")
    group = at(spec, "securityContext.runAsGroup") or 0
    fs_group = at(spec, "securityContext.fsGroup")
    if user in (None, 0):
        return True
    if facts.takes_fs_group and fs_group is not None:
        return True
    groups = {int(group), *([int(fs_group)] if fs_group is not None else [])}
    bits = (facts.mode >> 6) if user == facts.uid else (facts.mode >> 3) if facts.gid in groups else facts.mode
    return bits & 0o3 == 0o3


def path_trouble(cluster: Cluster, stored: Object, path: str, pool: NodePool, *, write: bool) -> str:
    """Return why a program of the pod cannot read or write a path or an address, or an empty text."""
    spec, space = stored.get("spec") or {}, stored["metadata"]["namespace"]
    if path.startswith(OBJECT_STORES):
        name = str(spec.get("serviceAccountName") or "default")
        account = cluster.find("ServiceAccount", name, space) or {"metadata": {"name": name, "namespace": space}}
        return cluster.cloud.access_error(path, write=write, namespace=space, service_account=account, pod=stored)
    found = volume_of_path(cluster, stored, path, pool)
    if found is None:
        return "" if write or _is_on_other_volume(spec, path) else (
            f"there is no manifest.json in {path}: no volume of the pod is mounted there")
    facts, below = found
    target = facts.folder / below
    if (write or facts.fetches) and any(Path(path).is_relative_to(root) for root in cluster.full_paths):
        return f"OSError: [Errno 28] No space left on device: '{path}'"
    if write:
        return "" if may_write(facts, spec) else f"PermissionError: [Errno 13] Permission denied: '{path}'"
    return "" if target.exists() else f"{path}: no such file or directory"


def volume_of_path(cluster: Cluster, stored: Object, path: str, pool: NodePool) -> tuple[VolumeFacts, str] | None:
    """Return the file system that a path of the pod is on, and the path inside it."""
    spec = stored.get("spec") or {}
    claims = {str(one.get("name")): str(at(one, "persistentVolumeClaim.claimName"))
              for one in rows(spec, "volumes") if at(one, "persistentVolumeClaim.claimName")}
    for container in rows(spec, "containers"):
        for mount in rows(container, "volumeMounts"):
            root, name = str(mount.get("mountPath")), str(mount.get("name"))
            if name in claims and Path(path).is_relative_to(root):
                facts = mount_claim(cluster, stored, claims[name], pool)
                if isinstance(facts, VolumeFacts):
                    below = Path(str(mount.get("subPath") or "")) / Path(path).relative_to(root)
                    return facts, str(below)
    return None


def _is_on_other_volume(spec: Mapping[str, Any], path: str) -> bool:
    """Return whether a path is on a volume that has content without a claim."""
    filled = {str(one.get("name")) for one in rows(spec, "volumes") if {"csi", "hostPath", "nfs"} & set(one)}
    return any(str(mount.get("name")) in filled and Path(path).is_relative_to(str(mount.get("mountPath")))
               for container in rows(spec, "containers") for mount in rows(container, "volumeMounts"))


def _claims(stored: Object) -> list[str]:
    names = [at(one, "persistentVolumeClaim.claimName") for one in rows(stored, "spec.volumes")]
    return [str(name) for name in names if name]

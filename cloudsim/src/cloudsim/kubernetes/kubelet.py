"""Why a pod on a node does not start (images, files, volumes), and what a program in it may read and write."""

from collections.abc import Sequence
from pathlib import Path

from cloudsim.kubernetes.cloud import VolumeFacts
from cloudsim.kubernetes.cluster import Cluster, Object, annotations_of, labels_of
from cloudsim.kubernetes.volumes import PROVISIONED
from embark.kubernetes.objects import at, name_of, namespace_of, rows
from embark.kubernetes.pods import Pod, main_container
from embark.rehearse.server import find_port, policy_error
from embark.values import JsonMap

SOURCES = {"configMap": "ConfigMap", "secret": "Secret"}
NO_FILE = "references non-existent {word} key: {key} ({kind} {called})"
NO_KEY = "couldn't find key {key} in {kind} {called}"
OBJECT_STORES = ("s3://", "gs://", "az://", "abfs://")


def start_trouble(cluster: Cluster, stored: Object) -> tuple[str, str]:
    """Return the reason and the message of a pod that cannot start, in the kubelet's words; two empty texts if it can.
    """
    space = namespace_of(stored)
    for volume in rows(stored, "spec.volumes"):
        for field, kind in SOURCES.items():
            source = volume.get(field) or {}
            keys = [str(one.get("key")) for one in rows(source, "items")]
            if source and (error := _lack(cluster, kind, space, source, keys, NO_FILE)):
                return "ContainerCreating", f'MountVolume.SetUp failed for volume "{volume.get("name")}" : {error}'
        claim = at(volume, "persistentVolumeClaim.claimName")
        found = mount_claim(cluster, stored, str(claim)) if claim else None
        if isinstance(found, str):
            return "ContainerCreating", found
    for container in [*rows(stored, "spec.initContainers"), *rows(stored, "spec.containers")]:
        image = str(container.get("image", ""))
        if error := cluster.cloud.pull_error(image, cluster.pool_of(stored), space):
            return "ImagePullBackOff", f'Failed to pull image "{image}": {error}'
        if error := _config_error(cluster, stored, container):
            return "CreateContainerConfigError", f"Error: {error}"
    return "", ""


def _config_error(cluster: Cluster, stored: Object, container: JsonMap) -> str:
    """Return why the kubelet cannot make a container's variables or may not start its user, or an empty text."""
    for field, kind in SOURCES.items():
        sources = [*(at(row, f"{field}Ref") for row in rows(container, "envFrom")),
                   *(at(row, f"valueFrom.{field}KeyRef") for row in rows(container, "env"))]
        for source in filter(None, sources):
            keys = [str(source["key"])] if "key" in source else []
            if error := _lack(cluster, kind, namespace_of(stored), source, keys, NO_KEY):
                return error
    security = {**(at(stored, "spec.securityContext") or {}), **(container.get("securityContext") or {})}
    if security.get("runAsNonRoot") and security.get("runAsUser") == 0:
        return f"container's runAsUser breaks non-root policy (container: {container.get('name')})"
    return ""


def _lack(cluster: Cluster, kind: str, space: str, source: JsonMap, keys: Sequence[str], sentence: str
          ) -> str:
    """Return why a container cannot have these keys of a ConfigMap or Secret, or an empty text."""
    name = str(source.get("name") or source.get("secretName"))
    found = cluster.find(kind, name, space)
    if source.get("optional"):
        return ""
    if found is None:
        return f'{kind.lower()} "{name}" not found'
    held = {key for field in ("data", "stringData", "binaryData") for key in found.get(field) or ()}
    words = {"kind": kind, "word": kind.lower().removesuffix("map"), "called": f"{space}/{name}"}
    return next((sentence.format(key=key, **words) for key in keys if key not in held), "")


def missing_file(pod: Pod) -> str:
    """Return which file a pod's program does not find: one that its command or a variable names and that belongs to a
    ConfigMap or Secret of the pod, by its folder or by its name."""
    mounts = [one for one in pod.mounts if one.files]
    there = {str(Path(one.path) / ("" if one.sub_path else name)): one.what for one in mounts for name in one.files}
    for word in [*" ".join(pod.words).split(), *pod.env.values()]:
        path = Path(word.rpartition("=")[2])
        is_named = path.name in {Path(one).name for one in there} or any(
            path.is_relative_to(one.path) and path != Path(one.path) for one in mounts)
        if path.is_absolute() and is_named and str(path) not in there:
            held = ", ".join(f"{one} ({what})" for one, what in there.items())
            return f"No such file or directory: '{path}'; there is {held}"
    return ""


def route(cluster: Cluster, service: Object, port: str) -> tuple[list[Object], str, str]:
    """Return the pods behind a port of a Service, the number of their port, and why nobody answers there."""
    name, selector = name_of(service), at(service, "spec.selector") or {}
    row = next((one for one in rows(service, "spec.ports") if port in (str(one.get("port")), one.get("name"))), {})
    target = str(row.get("targetPort") or row.get("port") or port)
    pods = [one for one in cluster.of_kind("Pod", namespace_of(service))
            if selector.items() <= labels_of(one).items()]
    if at(service, "spec.clusterIP") == "None":
        target = port  # Its name leads to the pods themselves.
    elif not row:
        return [], "", f"Service {name} does not have a service port {port}"
    if not pods:
        return [], "", f"Service {name} selects no pod: none has the labels {selector}"
    container = main_container(pods[0]["spec"])
    number, error = find_port(container, target)
    policies = cluster.of_kind("NetworkPolicy", namespace_of(service))
    error = error or policy_error(policies, labels_of(pods[0]), container, number)
    return pods, number, error and f"Service {name} leads to port {target}: {error}"


def mount_claim(cluster: Cluster, stored: Object, claim_name: str) -> VolumeFacts | str:
    """Return the file system of a claim on the pod's node, or the kubelet's error."""
    claim = cluster.find("PersistentVolumeClaim", claim_name, namespace_of(stored)) or {}
    volume = cluster.find("PersistentVolume", str(at(claim, "spec.volumeName") or ""))
    if volume is None:
        return f'MountVolume.SetUp failed: persistentvolume of claim "{claim_name}" not found'
    driver = at(volume, "spec.csi.driver")
    if driver and cluster.find("CSIDriver", str(driver)) is None:
        return (f"MountVolume.MountDevice failed for volume \"{volume['metadata']['name']}\": kubernetes.io/csi: "
                f"attacher.MountDevice failed to create newCsiDriverClient: driver name {driver} not found in the "
                "list of registered CSI drivers")
    if PROVISIONED in annotations_of(volume):
        return VolumeFacts(cluster.folder / "disks" / name_of(volume), takes_fs_group=True)
    return cluster.cloud.volume(volume, cluster.pool_of(stored))


def may_write(facts: VolumeFacts, spec: JsonMap) -> bool:
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


def path_trouble(cluster: Cluster, stored: Object, path: str, *, write: bool) -> str:
    """Return why a program of the pod cannot read or write a path or an address, or an empty text."""
    spec, space = stored.get("spec") or {}, namespace_of(stored)
    if path.startswith(OBJECT_STORES):
        name = str(spec.get("serviceAccountName") or "default")
        account = cluster.find("ServiceAccount", name, space) or {"metadata": {"name": name, "namespace": space}}
        return cluster.cloud.access_error(path, write=write, namespace=space, service_account=account, pod=stored)
    found = volume_of_path(cluster, stored, path)
    if found is None:
        # Such volumes have content without a claim.
        is_filled = any({"csi", "hostPath", "nfs"} & set(volume) for _, volume in _mounts_of(stored, path))
        return "" if write or is_filled else (
            f"there is no manifest.json in {path}: no volume of the pod is mounted there")
    facts, below = found
    target = facts.folder / below
    if (write or facts.fetches) and any(Path(path).is_relative_to(root) for root in cluster.full_paths):
        return f"OSError: [Errno 28] No space left on device: '{path}'"
    if write:
        return "" if may_write(facts, spec) else f"PermissionError: [Errno 13] Permission denied: '{path}'"
    there = ", ".join(sorted(one.name for one in facts.folder.glob("*"))) or "no files"
    return "" if target.exists() else f"{path}: no such file or directory: the root of the volume has {there}"


def volume_of_path(cluster: Cluster, stored: Object, path: str) -> tuple[VolumeFacts, str] | None:
    """Return the file system that a path of the pod is on, and the path inside it."""
    for mount, volume in _mounts_of(stored, path):
        claim = at(volume, "persistentVolumeClaim.claimName")
        facts = mount_claim(cluster, stored, str(claim)) if claim else ""
        if isinstance(facts, VolumeFacts):
            return facts, str(Path(str(mount.get("subPath") or "")) / Path(path).relative_to(mount["mountPath"]))
    return None


def _mounts_of(stored: Object, path: str) -> list[tuple[JsonMap, JsonMap]]:
    """Return the mounts below which a path of the pod is, each with its volume."""
    volumes = {one.get("name"): one for one in rows(stored, "spec.volumes")}
    return [(mount, volumes.get(mount.get("name"), {})) for container in rows(stored, "spec.containers")
            for mount in rows(container, "volumeMounts") if Path(path).is_relative_to(str(mount.get("mountPath")))]

"""Claims: they are bound to the volumes that they name, or to disks that a StorageClass provisions."""

from cloudsim.kubernetes.cluster import Cluster, Object, annotations_of
from embark.kubernetes.objects import at, name_of, namespace_of, quantity, rows

DEFAULT = "storageclass.kubernetes.io/is-default-class"
IN_TREE = {"kubernetes.io/aws-ebs": "ebs.csi.aws.com", "kubernetes.io/gce-pd": "pd.csi.storage.gke.io",
           "kubernetes.io/azure-disk": "disk.csi.azure.com"}
"""Provisioners of old StorageClasses, which CSI drivers have replaced."""
PROVISIONED = "pv.kubernetes.io/provisioned-by"


def add_storage_class(cluster: Cluster, name: str, provisioner: str, *, is_default: bool = False) -> None:
    cluster.add("StorageClass", name, provisioner=provisioner, reclaimPolicy="Delete",
                volumeBindingMode="WaitForFirstConsumer",
                metadata={"annotations": {DEFAULT: "true"} if is_default else {}})


def bind_claims(cluster: Cluster) -> None:
    """Bind claims to volumes that they name or that name them; a claim without a class is given the default one."""
    _delete_released(cluster)
    default = next((name_of(one) for one in cluster.of_kind("StorageClass")
                    if annotations_of(one).get(DEFAULT) == "true"), None)
    for claim in cluster.of_kind("PersistentVolumeClaim"):
        if at(claim, "status.phase") == "Bound":
            continue
        claim["status"] = {"phase": "Pending"}
        spec, own = claim["spec"], {"name": name_of(claim), "namespace": namespace_of(claim)}
        if default and spec.get("storageClassName") is None:
            spec["storageClassName"] = default
        reserved = (name_of(one) for one in cluster.of_kind("PersistentVolume") if at(one, "spec.claimRef") == own)
        name = str(spec.get("volumeName") or next(reserved, ""))
        volume = cluster.find("PersistentVolume", name)
        if not name:
            _provision(cluster, claim)
        elif volume is None:
            cluster.emit(claim, "FailedBinding", f'volume "{name}" not found')
        elif at(volume, "spec.claimRef") not in (None, own):
            cluster.emit(claim, "FailedBinding", f'volume "{name}" already bound to a different claim: its claimRef is '
                         f"{volume['spec']['claimRef']}")
        elif why := _mismatch(spec, volume["spec"]):
            cluster.emit(claim, "VolumeMismatch", f'Cannot bind to requested volume "{name}": {why}')
        else:
            claim["status"], spec["volumeName"] = {"phase": "Bound"}, name


def _mismatch(claim: Object, volume: Object) -> str:
    """Return what a claim asks for and its volume does not have, or an empty text."""
    wanted, offered = str(at(claim, "resources.requests.storage")), str(at(volume, "capacity.storage"))
    if (quantity(wanted) or 0.0) > (quantity(offered) or 0.0):
        return f"requested PV is too small: the claim asks for {wanted} and the volume has {offered}"
    if not set(claim["accessModes"]) <= set(volume["accessModes"]):
        return f"incompatible accessMode: the claim has {claim['accessModes']} and the volume {volume['accessModes']}"
    asked, there = claim.get("storageClassName") or "", volume.get("storageClassName") or ""
    return "" if asked == there else f"storageClassName does not match: the claim has {asked!r}, the volume {there!r}"


def _provision(cluster: Cluster, claim: Object) -> None:
    """Let the driver of the claim's StorageClass create a disk, once a pod uses the claim."""
    wanted = at(claim, "spec.storageClassName")
    found = cluster.find("StorageClass", str(wanted))
    if found is None:
        cluster.emit(claim, "ProvisioningFailed" if wanted else "FailedBinding",
                     f'storageclass.storage.k8s.io "{wanted}" not found' if wanted else
                     "no persistent volumes available for this claim and no storage class is set")
        return
    driver = IN_TREE.get(found["provisioner"]) or str(found["provisioner"])
    users = [pod for pod in cluster.of_kind("Pod", namespace_of(claim)) if name_of(claim) in [
        at(one, "persistentVolumeClaim.claimName") for one in rows(pod, "spec.volumes")]]
    if found.get("volumeBindingMode") == "WaitForFirstConsumer" and not users:
        cluster.emit(claim, "WaitForFirstConsumer", "waiting for first consumer to be created before binding",
                     warning=False)
    elif cluster.find("CSIDriver", driver) is None:
        cluster.emit(claim, "ExternalProvisioning", f"Waiting for a volume to be created either by the external "
                     f"provisioner '{driver}' or manually by the system administrator. The driver is not installed")
    else:
        gib = (quantity(str(at(claim, "spec.resources.requests.storage"))) or 0.0) / 2**30
        volume = f"pvc-{namespace_of(claim)}-{name_of(claim)}"
        if error := cluster.cloud.make_disk(volume, driver, gib):
            cluster.emit(claim, "ProvisioningFailed", f"failed to provision volume with StorageClass "
                         f'"{name_of(found)}": {error}')
            return
        cluster.put({"apiVersion": "v1", "kind": "PersistentVolume",
                     "metadata": {"name": volume, "annotations": {PROVISIONED: driver}},
                     "spec": {"csi": {"driver": driver, "volumeHandle": volume}, "capacity": {"storage": f"{gib:g}Gi"},
                              "accessModes": at(claim, "spec.accessModes"),
                              "persistentVolumeReclaimPolicy": found.get("reclaimPolicy", "Delete"),
                              "claimRef": {"name": name_of(claim), "namespace": namespace_of(claim)}}})
        claim["spec"]["volumeName"], claim["status"] = volume, {"phase": "Bound"}


def _delete_released(cluster: Cluster) -> None:
    for volume in cluster.of_kind("PersistentVolume"):
        claim = at(volume, "spec.claimRef") or {}
        if PROVISIONED not in annotations_of(volume) or cluster.find(
                "PersistentVolumeClaim", str(claim.get("name")), str(claim.get("namespace"))):
            continue
        if at(volume, "spec.persistentVolumeReclaimPolicy") == "Delete":
            cluster.cloud.drop_disk(name_of(volume))
            cluster.objects.pop(("PersistentVolume", "", name_of(volume)))

"""Claims: they are bound to the volumes that they name, or to disks that a StorageClass provisions."""

from cloudsim.kubernetes.cluster import Cluster, Object
from embark.kubernetes.objects import at, name_of, namespace_of, quantity, rows

DEFAULT = "storageclass.kubernetes.io/is-default-class"
IN_TREE = {"kubernetes.io/aws-ebs": "ebs.csi.aws.com", "kubernetes.io/gce-pd": "pd.csi.storage.gke.io",
           "kubernetes.io/azure-disk": "disk.csi.azure.com"}
"""Provisioners of old StorageClasses, which CSI drivers have replaced."""
PROVISIONED = "pv.kubernetes.io/provisioned-by"


def add_storage_class(cluster: Cluster, name: str, provisioner: str, *, is_default: bool = False) -> None:
    cluster.put({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": provisioner,
                 "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer",
                 "metadata": {"name": name, "annotations": {DEFAULT: "true"} if is_default else {}}})


def bind_claims(cluster: Cluster) -> None:
    _delete_released(cluster)
    for claim in cluster.of_kind("PersistentVolumeClaim"):
        if at(claim, "status.phase") == "Bound":
            continue
        claim["status"] = {"phase": "Pending"}
        name = at(claim, "spec.volumeName")
        if not name:
            _provision(cluster, claim)
            continue
        volume = cluster.find("PersistentVolume", str(name))
        if volume is None:
            cluster.emit(claim, "FailedBinding", f'volume "{name}" not found')
            continue
        owner = at(volume, "spec.claimRef") or {"name": name_of(claim), "namespace": namespace_of(claim)}
        wanted = quantity(str(at(claim, "spec.resources.requests.storage") or "0")) or 0.0
        offered = quantity(str(at(volume, "spec.capacity.storage") or "0")) or 0.0
        if (owner.get("name"), owner.get("namespace")) != (name_of(claim), namespace_of(claim)):
            cluster.emit(claim, "FailedBinding", f'volume "{name}" already bound to a different claim.')
        elif wanted > offered or not set(at(claim, "spec.accessModes") or ()) <= set(at(volume, "spec.accessModes")
                                                                                    or ()):
            cluster.emit(claim, "VolumeMismatch", f'Cannot bind to requested volume "{name}": requested PV is too '
                         "small or has other access modes")
        elif (at(claim, "spec.storageClassName") or "") != (at(volume, "spec.storageClassName") or ""):
            cluster.emit(claim, "VolumeMismatch", f'Cannot bind to requested volume "{name}": storageClassName does '
                         "not match")
        else:
            claim["status"] = {"phase": "Bound"}


def _provision(cluster: Cluster, claim: Object) -> None:
    """Let the driver of the claim's StorageClass create a disk, once a pod uses the claim."""
    wanted = at(claim, "spec.storageClassName")
    classes = cluster.of_kind("StorageClass")
    found = next((one for one in classes if (name_of(one) == wanted if wanted is not None else
                  (at(one, "metadata.annotations") or {}).get(DEFAULT) == "true")), None)
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
        if PROVISIONED not in (at(volume, "metadata.annotations") or {}) or cluster.find(
                "PersistentVolumeClaim", str(claim.get("name")), str(claim.get("namespace"))):
            continue
        if at(volume, "spec.persistentVolumeReclaimPolicy") == "Delete":
            cluster.cloud.drop_disk(name_of(volume))
            cluster.objects.pop(("PersistentVolume", "", name_of(volume)))

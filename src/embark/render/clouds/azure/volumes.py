"""Storage on Azure: NetApp Files or Managed Lustre, and BlobFuse."""

from typing import Any

from embark.render.job import Job
from embark.render.location import Bucket

FILLED_BY = "storage.sh substitutes its address."
BUCKET_NEEDS = "It needs az aks update --enable-blob-driver."


def capacity_gib(job: Job, least_gib: int) -> int:
    return least_gib


def volume_source(job: Job) -> dict[str, Any]:
    if "lustre" in job.spec.place.volume:
        return {"mountOptions": ["noatime", "flock"],
                "csi": {"driver": "azurelustre.csi.azure.com", "volumeHandle": "lustre#10.225.0.4#lustrefs",
                        "volumeAttributes": {"mgs-ip-address": "10.225.0.4", "fs-name": "lustrefs"}}}
    # Several connections: one alone carries a fraction of what the volume can.
    return {"mountOptions": ["vers=3", "nconnect=8", "rsize=262144", "wsize=262144", "hard"],
            "nfs": {"server": "10.225.0.4", "path": "/data"}}


def bucket_source(job: Job, bucket: Bucket) -> dict[str, Any]:
    account = job.spec.place.storage_account
    return {"mountOptions": ["-o allow_other", "--use-attr-cache=true", "--cancel-list-on-mount-seconds=10"],
            "csi": {"driver": "blob.csi.azure.com", "volumeHandle": f"{account}_{bucket.name}", "readOnly": True,
                    "volumeAttributes": {"storageAccount": account, "containerName": bucket.name,
                                         "protocol": "fuse2", "AzureStorageAuthType": "msi"}}}


def script_values(job: Job) -> dict[str, Any]:
    return {"level": job.spec.place.volume.rpartition("-")[2].capitalize()}

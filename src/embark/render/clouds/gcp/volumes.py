"""Storage on Google Cloud: Filestore or Managed Lustre, and Cloud Storage FUSE."""

from typing import Any

from embark.render.job import Job
from embark.render.location import Bucket, location_of

FILLED_BY = "storage.sh substitutes its address."
BUCKET_NEEDS = 'A pod that mounts it has the annotation gke-gcsfuse/volumes: "true".'
LUSTRE_STEP_GIB = 9000


def capacity_gib(job: Job, least_gib: int) -> int:
    """Managed Lustre is sold in multiples."""
    if "lustre" in job.spec.place.volume:
        return max(1, round(least_gib / LUSTRE_STEP_GIB)) * LUSTRE_STEP_GIB
    return least_gib


def volume_source(job: Job) -> dict[str, Any]:
    location, volume = location_of(job), job.spec.place.volume
    if "lustre" in volume:
        return {"csi": {"driver": "lustre.csi.storage.gke.io",
                        "volumeHandle": f"PROJECT/{location.zone}/{job.claim_name}",
                        "volumeAttributes": {"ip": "10.0.0.2", "filesystem": "data"}}}
    where = location.region if volume == "filestore-regional" else location.zone
    return {"csi": {"driver": "filestore.csi.storage.gke.io",
                    "volumeHandle": f"modeInstance/{where}/{job.claim_name}/data",
                    "volumeAttributes": {"ip": "10.0.0.2", "volume": "data"}}}


def bucket_source(job: Job, bucket: Bucket) -> dict[str, Any]:
    return {"mountOptions": ["implicit-dirs", "ro"],
            "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeHandle": bucket.name, "readOnly": True}}


def script_values(job: Job) -> dict[str, Any]:
    return {}

"""Storage on AWS: FSx for Lustre with its data repository, and Mountpoint for S3."""

from typing import Any

from embark.render.job import Job
from embark.render.location import Bucket, data_source, location_of

FILLED_BY = "storage.sh substitutes the file system's id and names."
BUCKET_NEEDS = "It needs the add-on aws-mountpoint-s3-csi-driver."


def capacity_gib(job: Job, least_gib: int) -> int:
    """FSx sells 1200, then multiples of 2400."""
    return 1200 if least_gib <= 1229 else -(-least_gib // 2400) * 2400


def volume_source(job: Job) -> dict[str, Any]:
    return {
        "mountOptions": ["flock"],
        "csi": {
            "driver": "fsx.csi.aws.com",
            "volumeHandle": "fs-00000000000000000",
            "volumeAttributes": {"dnsname": "fs-00000000000000000.fsx.us-east-1.amazonaws.com", "mountname": "fsx"},
        },
    }


def bucket_source(job: Job, bucket: Bucket) -> dict[str, Any]:
    return {"mountOptions": ["allow-other", f"region {location_of(job).region}", "read-only"],
            "csi": {"driver": "s3.csi.aws.com", "volumeHandle": f"{job.name}-bucket",
                    "volumeAttributes": {"bucketName": bucket.name}}}


def script_values(job: Job) -> dict[str, Any]:
    folder = job.spec.data.path.removeprefix(job.spec.place.volume_path).strip("/") or "data"
    return {"lustre_configuration": lustre_configuration(job), "token": f"{job.namespace}-{job.claim_name}",
            "data_source": data_source(job), "data_folder": f"/{folder}"}


def lustre_configuration(job: Job) -> str:
    """For `--lustre-configuration`. PERSISTENT_2 is refused without a throughput."""
    name = job.spec.place.volume.removeprefix("fsx-lustre-")
    if name == "scratch-2":
        return "DeploymentType=SCRATCH_2"
    return f"DeploymentType=PERSISTENT_2,PerUnitStorageThroughput={name},DataCompressionType=LZ4"

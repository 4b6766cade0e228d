"""Storage: the run's buckets, and the volume of `place.volume` with its claim and the copy that fills it."""

import posixpath
from collections.abc import Mapping
from typing import Any

from embark.render.clouds import aws, azure, gcp
from embark.render.folder import File
from embark.render.job import POD_TARGETS, Job
from embark.render.location import SCHEMES, data_source, object_store_paths, volume_of
from embark.render.scripts import script_file
from embark.render.yaml_text import note, yaml_text

GIB_PER_TIB = 1024
_CLOUDS = {"aws": aws, "azure": azure, "gcp": gcp}


def render_volumes(job: Job) -> list[File]:
    """`storage.sh` creates what the run needs; with `place.volume` also the volume, its claim and the copy."""
    cloud, volume = _CLOUDS[job.cloud], volume_of(job)
    values: dict[str, Any] = {"is_lustre": "lustre" in job.spec.place.volume}
    files: list[File] = []
    if volume:
        # The least that can be bought: the speed grows with it, and so does the bill.
        size_gib = cloud.capacity_gib(job, round((volume.min_tib or 1.0) * GIB_PER_TIB))
        rate = volume.gbyte_per_s(size_gib / GIB_PER_TIB)
        speed = "" if rate is None else f"{size_gib:,} GiB of {volume.title} read {rate:.1f} GB/s."
        values |= {**cloud.script_values(job), "size_gib": size_gib, "speed": speed}
        files = _volume_files(job, volume.title, f"{size_gib}Gi", cloud.volume_source(job), cloud.FILLED_BY)
    elif job.spec.place.target in POD_TARGETS:
        read = [path for path in object_store_paths(job) if path.scheme == SCHEMES[job.cloud] and not path.is_written]
        files = _bucket_files(job, read[0].uri, cloud.bucket_source(job, read[0]), cloud.BUCKET_NEEDS) if read else []
    return [script_file("storage.sh", f"{job.cloud}/storage.sh.j2", job, **values), *files]


def data_target(job: Job) -> str:
    """The folder of the volume that the run reads."""
    path, mount = job.spec.data.path, job.spec.place.volume_path
    return path if path.startswith(f"{mount}/") else f"{mount}/{posixpath.basename(data_source(job))}"


def copy_job(job: Job) -> dict[str, Any]:
    """`embark data copy` as a Job: on an ordinary machine of the cluster, since it needs no GPU."""
    name = f"{job.name}-data-copy"
    # Not the run's own labels: by those its Service and its machines' spread find its pods.
    labels = {"app.kubernetes.io/name": "embark", "app.kubernetes.io/instance": name}
    place = job.spec.place
    return {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "namespace": job.namespace, "labels": labels},
        "spec": {
            "backoffLimit": note(5, "A copy that was stopped resumes."),
            "ttlSecondsAfterFinished": 86400,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "Never",
                    "serviceAccountName": place.service_account,
                    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000,
                                        "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [{
                        "name": "copy",
                        "image": job.image,
                        "command": ["embark", "data", "copy", data_source(job), data_target(job)],
                        "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
                        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                        "volumeMounts": [{"name": "data", "mountPath": place.volume_path}],
                    }],
                    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": job.claim_name}}],
                },
            },
        },
    }


def _volume_files(job: Job, title: str, size: str, source: Mapping[str, Any], filled_by: str) -> list[File]:
    volume, claim = _volume_and_claim(job, job.claim_name, size, source, "ReadWriteMany")
    return [
        File("volume.yaml", yaml_text([volume], about=f"{title}, as Kubernetes sees it. {filled_by}")),
        File("claim.yaml", yaml_text([claim], about="What the run's pods mount: the volume of volume.yaml, by name.")),
        File("data_copy_job.yaml", yaml_text([copy_job(job)], about=(
            f"Copies {data_source(job)} to {data_target(job)} on the volume, once: existing files are left alone, and "
            "checksums are compared."))),
    ]


def _bucket_files(job: Job, uri: str, source: Mapping[str, Any], needs: str) -> list[File]:
    about = (f"{uri} as a folder, read only, for notebooks and other programs that want files. Embark itself does "
             f"not need it: it reads the bucket by its uri, and faster. {needs}")
    documents = _volume_and_claim(job, f"{job.name}-bucket", "1Ti", source, "ReadOnlyMany")
    return [File("bucket_volume.yaml", yaml_text(documents, about=about))]


def _volume_and_claim(
    job: Job, name: str, size: str, source: Mapping[str, Any], mode: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    volume = {
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": f"{job.namespace}-{name}", "labels": dict(job.labels)},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": [mode],
            "persistentVolumeReclaimPolicy": note("Retain", "Deleting the claim must not delete the data."),
            "storageClassName": note("", "Empty: bound to the claim by name; nothing is provisioned on demand."),
            "claimRef": {"namespace": job.namespace, "name": name},
            **source,
        },
    }
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": job.namespace, "labels": dict(job.labels)},
        "spec": {"accessModes": [mode], "storageClassName": "", "volumeName": f"{job.namespace}-{name}",
                 "resources": {"requests": {"storage": size}}},
    }
    return volume, claim

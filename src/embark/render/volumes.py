"""What storage is on every cloud: a claim, the volume behind it, and the copy that fills it."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from embark.catalog import Volume, find_volume, load_catalog
from embark.render.file import File
from embark.render.job import POD_TARGETS, Job
from embark.render.location import data_source
from embark.render.shell_text import Shell, command
from embark.render.yaml_text import note, yaml_text

GIB_PER_TIB = 1024


def volume_of(job: Job) -> Volume | None:
    """The file system that the spec names."""
    return find_volume(load_catalog(), job.spec.place.volume) if job.spec.place.volume else None


def capacity_gib(volume: Volume) -> int:
    """The least that can be bought of it: the speed grows with it, and so does the bill."""
    return round((volume.min_tib or 1.0) * GIB_PER_TIB)


def speed(volume: Volume, size_gib: int) -> str:
    """What that many GiB of it read, in words."""
    rate = volume.gbyte_per_s(size_gib / GIB_PER_TIB)
    return "" if rate is None else f"{size_gib:,} GiB of {volume.title} read {rate:.1f} GB/s."


def data_target(job: Job) -> str:
    """The folder of the volume that the run reads."""
    path, mount = job.spec.data.path, job.spec.place.volume_path
    return path if path.startswith(f"{mount}/") else f"{mount}/{posixpath.basename(data_source(job))}"


def bucket_files(job: Job, source: Mapping[str, Any], bucket: str, *, needs: str) -> list[File]:
    """`bucket_volume.yaml`: the data's bucket as a folder, for programs that know no object stores."""
    about = (f"{bucket} as a folder, read only, for notebooks and other programs that want files. Embark itself does "
             f"not need it: it reads the bucket by its uri, and faster. {needs}")
    if job.spec.place.target not in POD_TARGETS:
        return []
    name = f"{job.name}-bucket"
    documents = _volume_and_claim(job, name, "1Ti", source, "ReadOnlyMany")
    return [File("bucket_volume.yaml", yaml_text(documents, about=about))]


def volume_files(job: Job, source: Mapping[str, Any], size_gib: int, *, filled_by: str) -> list[File]:
    """The volume and its claim, and the job that fills it. `source` is the part of a PersistentVolume that is the
    cloud's own; `filled_by` says who puts the real names in."""
    volume = volume_of(job)
    about = (volume.title if volume else job.claim_name) + f", as Kubernetes sees it. {filled_by}"
    persistent, claim = _volume_and_claim(job, job.claim_name, f"{size_gib}Gi", source, "ReadWriteMany")
    return [
        File("volume.yaml", yaml_text([persistent], about=about)),
        File("claim.yaml", yaml_text([claim], about="What the run's pods mount: the volume of volume.yaml, by name.")),
        File("data_copy_job.yaml", yaml_text([copy_job(job)], about=(
            f"Copies {data_source(job)} to {data_target(job)} on the volume, once: files that are there already are "
            "left alone, and checksums are compared."))),
    ]


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
            "backoffLimit": note(5, "A copy that was stopped goes on where it was."),
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


def apply_filled(patch: str) -> str:
    """Applies volume.yaml with what only the cloud knows put in, and the claim. `patch` is JSON with shell variables in
    it, in double quotes."""
    fill = command("kubectl", "patch", "--local", "-f", "volume.yaml", "--type=merge", "--output=json",
                   Shell(f"--patch={patch}"), indent="  ")
    return "\n".join([
        'if [ "$DRY_RUN" = 0 ]; then',
        f"{fill} |",
        "    kubectl apply -f -",
        "fi",
        command(Shell("run"), "kubectl", "apply", "-f", "claim.yaml"),
    ])


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
            "storageClassName": note("", "Empty: bound to the claim by name, and nothing is made on demand."),
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

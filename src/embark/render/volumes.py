"""Storage: the run's buckets, and the volume of `place.volume` with its claim and the copy that fills it."""

import posixpath
from typing import Any

from embark.catalog import Volume
from embark.errors import ExitCode
from embark.render.folder import File
from embark.render.job import Job
from embark.render.pod import IDENTITY_LABEL, USER_ID, env_rows, has_identity_label, storage_settings
from embark.render.shell_text import job_text, script_file
from embark.render.yaml_text import header, plain

GIB_PER_TIB = 1024
LUSTRE_STEP_GIB = 9000
_FILLED_BY = {"aws": "storage.sh substitutes the file system's id and names.",
              "azure": "storage.sh substitutes its address.", "gcp": "storage.sh substitutes its address."}


def render_volumes(job: Job) -> list[File]:
    """Write `storage.sh`, which creates what the run needs; with `place.volume` also the volume, its claim and the
    copy."""
    values: dict[str, Any] = {"is_lustre": "lustre" in job.place.volume, "exit_codes": ExitCode}
    files: list[File] = []
    if job.volume:
        size_gib = capacity_gib(job, job.volume)
        rate = job.volume.gbyte_per_s(size_gib / GIB_PER_TIB)
        speed = "" if rate is None else f"{size_gib:,} GiB of {job.volume.title} read {rate:.1f} GB/s."
        values |= {"size_gib": size_gib, "speed": speed}
        files = _volume_files(job, job.volume.title, {**values, "size": f"{size_gib}Gi"})
    return [script_file("storage.sh", f"{job.cloud}/storage.sh.j2", job, **values), *files]


def capacity_gib(job: Job, volume: Volume) -> int:
    """Return the smallest size that can be bought: the speed grows with it, and so does the bill."""
    least_gib = round((volume.min_tib or 1.0) * GIB_PER_TIB)
    if job.cloud == "aws":  # FSx sells 1200, then multiples of 2400
        return 1200 if least_gib <= 1229 else -(-least_gib // 2400) * 2400
    if job.cloud == "gcp" and "lustre" in job.place.volume:
        return max(1, round(least_gib / LUSTRE_STEP_GIB)) * LUSTRE_STEP_GIB
    return least_gib


def needs_copy(job: Job) -> bool:
    """Return whether a Job fills the volume. FSx for Lustre reads the bucket by itself, through a data repository
    association."""
    return bool(job.place.volume) and job.cloud != "aws"


def data_target(job: Job) -> str:
    """Return the folder of the volume that the run reads."""
    path, mount = job.spec.data.path, job.place.volume_path
    return path if path.startswith(f"{mount}/") else f"{mount}/{posixpath.basename(job.data_source)}"


def _volume_files(job: Job, title: str, values: dict[str, Any]) -> list[File]:
    # Pods use the first mode. FSx's driver has the fsGroupPolicy ReadWriteOnceWithFSType: only to a volume that also
    # names this mode, and a file system's type, does the kubelet apply the pod's fsGroup.
    modes = ["ReadWriteMany", *(["ReadWriteOnce"] if job.cloud == "aws" else [])]
    values = {**values, "claim": job.claim_name, "mode": modes[0], "modes": modes}
    # The copy runs on an ordinary machine of the cluster, since it needs no GPU.
    about_copy = (f"Copies {job.data_source} to {data_target(job)} on the volume, once: existing files are left "
                  "alone, and checksums are compared.")
    files = [
        File("volume.yaml", job_text("volume.yaml.j2", job, about=f"{title}, as Kubernetes sees it. "
                                     f"{_FILLED_BY[job.cloud]}", source=f"{job.cloud}/volume_source.yaml.j2",
                                     **values)),
        File("claim.yaml", header("What the run's pods mount: the volume of volume.yaml, by name.")
             + job_text("claim.yaml.j2", job, **values)),
    ]
    if needs_copy(job):
        env = plain(env_rows(storage_settings(job)))
        files.append(File("data_copy_job.yaml", job_text(
            "data_copy_job.yaml.j2", job, about=about_copy, source=job.data_source, target=data_target(job), env=env,
            user=USER_ID, identity_label=IDENTITY_LABEL if has_identity_label(job) else {})))
    return files

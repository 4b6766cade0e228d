"""Storage: the run's buckets, and the volume of `place.volume` with its claim and the copy that fills it."""

import posixpath
from collections.abc import Mapping
from typing import Any

from embark.render.clouds import aws, azure, gcp
from embark.render.folder import File
from embark.render.job import POD_TARGETS, SCHEMES, Job
from embark.render.pod import IDENTITY_LABEL, USER_ID, env_rows, has_identity_label, storage_settings
from embark.render.shell_text import job_text, script_file
from embark.render.yaml_text import header, plain

GIB_PER_TIB = 1024
_CLOUDS = {"aws": aws, "azure": azure, "gcp": gcp}


def render_volumes(job: Job) -> list[File]:
    """`storage.sh` creates what the run needs; with `place.volume` also the volume, its claim and the copy."""
    cloud, volume = _CLOUDS[job.cloud], job.volume
    values: dict[str, Any] = {"is_lustre": "lustre" in job.place.volume}
    files: list[File] = []
    if volume:
        # The least that can be bought: the speed grows with it, and so does the bill.
        size_gib = cloud.capacity_gib(job, round((volume.min_tib or 1.0) * GIB_PER_TIB))
        rate = volume.gbyte_per_s(size_gib / GIB_PER_TIB)
        speed = "" if rate is None else f"{size_gib:,} GiB of {volume.title} read {rate:.1f} GB/s."
        values |= {**cloud.script_values(job), "size_gib": size_gib, "speed": speed}
        files = _volume_files(job, volume.title, f"{size_gib}Gi", cloud.volume_source(job), cloud.FILLED_BY)
    elif job.target in POD_TARGETS:
        read = [path for path in job.object_store_paths if path.scheme == SCHEMES[job.cloud] and not path.is_written]
        files = _bucket_files(job, read[0].uri, cloud.bucket_source(job, read[0]), cloud.BUCKET_NEEDS) if read else []
    return [script_file("storage.sh", f"{job.cloud}/storage.sh.j2", job, **values), *files]


def needs_copy(job: Job) -> bool:
    """Whether a Job fills the volume. FSx for Lustre reads the bucket by itself, through a data repository
    association."""
    return bool(job.place.volume) and job.cloud != "aws"


def data_target(job: Job) -> str:
    """The folder of the volume that the run reads."""
    path, mount = job.spec.data.path, job.place.volume_path
    return path if path.startswith(f"{mount}/") else f"{mount}/{posixpath.basename(job.data_source)}"


def _volume_files(job: Job, title: str, size: str, source: Mapping[str, Any], filled_by: str) -> list[File]:
    values = {"claim": job.claim_name, "size": size, "mode": "ReadWriteMany", "modes": _CLOUDS[job.cloud].VOLUME_MODES}
    # The copy runs on an ordinary machine of the cluster, since it needs no GPU.
    about_copy = (f"Copies {job.data_source} to {data_target(job)} on the volume, once: existing files are left "
                  "alone, and checksums are compared.")
    files = [
        File("volume.yaml", job_text("volume.yaml.j2", job, about=f"{title}, as Kubernetes sees it. {filled_by}",
                                     source=source, **values)),
        File("claim.yaml", header("What the run's pods mount: the volume of volume.yaml, by name.")
             + job_text("claim.yaml.j2", job, **values)),
    ]
    if needs_copy(job):
        env = plain(env_rows(storage_settings(job)))
        files.append(File("data_copy_job.yaml", job_text(
            "data_copy_job.yaml.j2", job, about=about_copy, source=job.data_source, target=data_target(job), env=env,
            user=USER_ID, identity_label=IDENTITY_LABEL if has_identity_label(job) else {})))
    return files


def _bucket_files(job: Job, uri: str, source: Mapping[str, Any], needs: str) -> list[File]:
    about = (f"{uri} as a folder, read only, for notebooks and other programs that want files. Embark itself does "
             f"not need it: it reads the bucket by its uri, and faster. {needs}")
    values = {"claim": f"{job.name}-bucket", "size": "1Ti", "mode": "ReadOnlyMany", "modes": ["ReadOnlyMany"]}
    return [File("bucket_volume.yaml", job_text("volume.yaml.j2", job, about=about, source=source, **values)
                 + "---\n" + job_text("claim.yaml.j2", job, **values))]

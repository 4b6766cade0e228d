"""Storage: the run's buckets, and the volume of `place.volume` with its claim and the copy that fills it."""

import posixpath

from embark.catalog import Volume
from embark.values import JsonDict
from .folder import File, Files
from .job import Job
from .pod import env_rows, identity_label, storage_settings
from .shell_text import job_text, script_file
from .yaml_text import header, plain

GIB_PER_TIB = 1024
HOURS_PER_MONTH = 730
_FILLED_BY = {"aws": "storage.sh substitutes the file system's id and names.",
              "azure": "storage.sh substitutes its address.", "gcp": "storage.sh substitutes its address."}


def render_volumes(job: Job) -> Files:
    """Write `storage.sh`, which creates what the run needs; with `place.volume` also the volume, its claim and the
    copy."""
    values: JsonDict = {"is_lustre": "lustre" in job.place.volume}
    files: Files = []
    if job.volume:
        size_gib = capacity_gib(job, job.volume)
        values |= {"size_gib": size_gib, "speed": volume_text(job)}
        files = _volume_files(job, job.volume.title, {**values, "size": f"{size_gib}Gi"})
    return [script_file("storage.sh", f"{job.cloud}/storage.sh.j2", job, **values), *files]


def capacity_gib(job: Job, volume: Volume) -> int:
    """Return the size that the plan needs, or the smallest that is sold if it is not known how much that is."""
    return round(job.bought_volume.tib * GIB_PER_TIB) if job.bought_volume else volume.bought_gib(0.0)


def volume_text(job: Job) -> str:
    """Say how large, how fast and how dear the volume is; empty without one."""
    volume = job.volume
    if volume is None:
        return ""
    tib = capacity_gib(job, volume) / GIB_PER_TIB
    rate, usd = volume.gbyte_per_s(tib), volume.usd_per_month(tib)
    parts = [*([] if rate is None else [f"read {rate:.2g} GB/s"]),
             *([] if usd is None else [f"cost {usd / HOURS_PER_MONTH:,.2f} USD an hour"])]
    size = f"{tib * GIB_PER_TIB:,.0f} GiB of {volume.title}"
    text = f"{size} {' and '.join(parts)}." if parts else f"The volume: {size}."
    if job.bought_volume is None:
        text += " It is the smallest that is sold: data.num_train_samples would tell what the run needs."
    elif not job.bought_volume.is_enough:
        text += " The run could read faster than this; embark plan says how long it takes."
    return text


def needs_copy(job: Job) -> bool:
    """Return whether a Job fills the volume. FSx for Lustre reads the bucket by itself, through a data repository
    association."""
    return bool(job.place.volume) and job.cloud != "aws"


def data_target(job: Job) -> str:
    """Return the folder of the volume that the run reads."""
    path, mount = job.spec.data.path, job.place.volume_path
    return path if path.startswith(f"{mount}/") else f"{mount}/{posixpath.basename(job.data_source)}"


def _volume_files(job: Job, title: str, values: JsonDict) -> Files:
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
             + job_text("claim.yaml.j2", job, **values))
    ]
    if needs_copy(job):
        env = plain(env_rows(storage_settings(job)))
        files.append(File("data_copy_job.yaml", job_text(
            "data_copy_job.yaml.j2", job, about=about_copy, source=job.data_source, target=data_target(job), env=env,
            identity_label=identity_label(job))))
    return files

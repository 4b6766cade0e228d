"""Storage on Google Cloud: the run's buckets, and Filestore or Managed Lustre."""

from __future__ import annotations

from typing import Any

from embark.render.clouds.gcp.cluster import project_setting
from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Bucket, Site, buckets, places, site_of
from embark.render.shell_text import PRELUDE, Shell, command, option, output_of, run, script, setting, unless, variable
from embark.render.volumes import apply_filled, bucket_files, capacity_gib, speed, volume_files, volume_of

SHARE = "data"
LUSTRE_STEP_GIB = 9000
"""Managed Lustre is bought by so much."""


def render_volumes(job: Job) -> list[File]:
    """`storage.sh` makes what the run needs; with `place.volume` also the volume, its claim and the copy."""
    files = [File("storage.sh", _script(job), is_executable=True)]
    volume = volume_of(job)
    if volume:
        site = site_of(job)
        source = lustre_source(job, site) if "lustre" in volume.name else filestore_source(job, site)
        files += volume_files(job, source, _size_gib(job), filled_by="storage.sh puts its address in.")
    return files + bucket_mount(job)


def bucket_mount(job: Job) -> list[File]:
    """Cloud Storage FUSE; the cluster has its driver."""
    read = [place for place in places(job) if place.scheme == "gs" and not place.is_written]
    if job.spec.place.volume or not read:
        return []
    bucket = read[0]
    source = {"mountOptions": ["implicit-dirs", "ro"],
              "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeHandle": bucket.name, "readOnly": True}}
    needs = 'A pod that mounts it has the annotation gke-gcsfuse/volumes: "true".'
    return bucket_files(job, source, bucket.uri, needs=needs)


def filestore_source(job: Job, site: Site) -> dict[str, Any]:
    where = site.region if job.spec.place.volume == "filestore-regional" else site.zone
    return {"csi": {"driver": "filestore.csi.storage.gke.io",
                    "volumeHandle": f"modeInstance/{where}/{job.claim_name}/{SHARE}",
                    "volumeAttributes": {"ip": "10.0.0.2", "volume": SHARE}}}


def lustre_source(job: Job, site: Site) -> dict[str, Any]:
    return {"csi": {"driver": "lustre.csi.storage.gke.io",
                    "volumeHandle": f"PROJECT/{site.zone}/{job.claim_name}",
                    "volumeAttributes": {"ip": "10.0.0.2", "filesystem": SHARE}}}


def _size_gib(job: Job) -> int:
    volume = volume_of(job)
    if volume is None:
        return 0
    size_gib = capacity_gib(volume)
    return max(1, round(size_gib / LUSTRE_STEP_GIB)) * LUSTRE_STEP_GIB if "lustre" in volume.name else size_gib


def _script(job: Job) -> str:
    site, volume = site_of(job), volume_of(job)
    parts = [
        "\n".join([project_setting(job), setting("REGION", site.region), setting("ZONE", site.zone)]),
        PRELUDE, 'cd "$(dirname "$0")"',
        *(_bucket(bucket) for bucket in buckets(job) if bucket.scheme == "gs"),
    ]
    if volume:
        size_gib = _size_gib(job)
        parts.append(f"# {speed(volume, size_gib)} More reads faster.\n{setting('CAPACITY_GIB', str(size_gib))}\n"
                     + setting("NETWORK", "default", "The cluster's."))
        parts += _lustre(job) if "lustre" in volume.name else _filestore(job)
    return script("Makes the run's storage where it is not there yet. Safe to repeat.", *parts)


def _bucket(bucket: Bucket) -> str:
    uri = f"gs://{bucket.name}"
    return unless(
        _gcloud("storage", "buckets", "describe", uri),
        _run("storage", "buckets", "create", uri, option("--location", variable("REGION")),
             "--uniform-bucket-level-access", "--public-access-prevention"))


def _filestore(job: Job) -> list[str]:
    is_regional = job.spec.place.volume == "filestore-regional"
    where = option("--location", variable("REGION" if is_regional else "ZONE"))
    name = job.claim_name
    address = output_of("gcloud", "filestore", "instances", "describe", name, where,
                        option("--project", variable("PROJECT")),
                        option("--format", "value(networks[0].ipAddresses[0])"))
    handle = f"modeInstance/${'REGION' if is_regional else 'ZONE'}/{name}/{SHARE}"
    return [
        run("gcloud", "services", "enable", "file.googleapis.com", option("--project", variable("PROJECT"))),
        unless(_gcloud("filestore", "instances", "describe", name, where),
               _run("filestore", "instances", "create", name, where,
                    f"--tier={'regional' if is_regional else 'zonal'}",
                    Shell(f'--file-share="name={SHARE},capacity=${{CAPACITY_GIB}}GiB"'),
                    Shell('--network="name=$NETWORK"'))),
        f'if [ "$DRY_RUN" = 0 ]; then ADDRESS={address}; fi\n'
        + apply_filled(f'"{{\\"spec\\":{{\\"csi\\":{{\\"volumeHandle\\":\\"{handle}\\",\\"volumeAttributes\\":'
                       '{\\"ip\\":\\"$ADDRESS\\"}}}}"'),
    ]


def _lustre(job: Job) -> list[str]:
    rate = job.spec.place.volume.rpartition("-")[2]
    name = job.claim_name
    where = option("--location", variable("ZONE"))
    address = output_of("gcloud", "lustre", "instances", "describe", name, where,
                        option("--project", variable("PROJECT")), option("--format", "value(mountPoint)"))
    handle = f"$PROJECT/$ZONE/{name}"
    network = option("--network", variable("NETWORK"))
    return [
        run("gcloud", "services", "enable", "lustre.googleapis.com", "servicenetworking.googleapis.com",
            option("--project", variable("PROJECT"))),
        "# A range of addresses that Lustre's side of the network takes, and the port that it listens on.\n"
        + unless(_gcloud("compute", "addresses", "describe", "embark-lustre", "--global"),
                 _run("compute", "addresses", "create", "embark-lustre", "--global", "--purpose=VPC_PEERING",
                      "--prefix-length=20", network),
                 _run("services", "vpc-peerings", "connect", network, "--ranges=embark-lustre",
                      "--service=servicenetworking.googleapis.com"),
                 _run("compute", "firewall-rules", "create", "embark-lustre", network, "--allow=tcp:988,tcp:6988",
                      "--source-ranges=10.0.0.0/8")),
        unless(_gcloud("lustre", "instances", "describe", name, where),
               _run("lustre", "instances", "create", name, where, option("--capacity-gib", variable("CAPACITY_GIB")),
                    f"--per-unit-storage-throughput={rate}", f"--filesystem={SHARE}",
                    Shell('--network="projects/$PROJECT/global/networks/$NETWORK"'))),
        # The mount point is ADDRESS@tcp:/NAME.
        f'if [ "$DRY_RUN" = 0 ]; then\n  MOUNT_POINT={address}\n  ADDRESS=${{MOUNT_POINT%%@*}}\nfi\n'
        + apply_filled(f'"{{\\"spec\\":{{\\"csi\\":{{\\"volumeHandle\\":\\"{handle}\\",\\"volumeAttributes\\":'
                       '{\\"ip\\":\\"$ADDRESS\\"}}}}"'),
    ]


def _gcloud(*words: str) -> str:
    return command("gcloud", *words, option("--project", variable("PROJECT")))


def _run(*words: str) -> str:
    return run("gcloud", *words, option("--project", variable("PROJECT")))

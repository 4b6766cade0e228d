"""Where a job's machines are, and the names of its cluster, node pool, buckets and volume."""

import posixpath
import re
from dataclasses import dataclass

from embark.catalog import Volume, find_volume, load_catalog
from embark.catalog.regions import default_zone
from embark.errors import Mistake, SpecError
from embark.kubernetes.names import object_label
from embark.render.job import FOLLOW, Job
from embark.render.serving import published_place

CLUSTER = "embark"  # One cluster for all runs: a run adds a node pool to it where it needs another machine.
SCHEMES = {"aws": "s3", "azure": "az", "gcp": "gs"}
BUCKET_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, or a container of Azure, that the run reads or writes."""

    scheme: str  # `s3`, `gs` or `az`.
    name: str
    prefix: str  # Below the bucket, without slashes at its ends.
    is_written: bool

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


@dataclass(frozen=True, slots=True)
class Location:
    """Region, zone, cluster and node pool of a job."""

    region: str
    zone: str
    cluster: str
    pool: str  # The node pool: named for the machine and for how it is paid, so that two can live beside each other.
    machine_type: str  # What the cloud calls a host.
    has_fabric: bool  # Traffic between machines goes past the ordinary network, which must be asked for.


def location_of(job: Job) -> Location:
    machine = job.machine
    region = job.price.region
    pool = object_label(machine.name.removeprefix("Standard_"))
    return Location(
        region=region, zone=job.spec.place.zone or default_zone(load_catalog(), machine, region), cluster=CLUSTER,
        pool=f"{pool}-spot" if job.spec.place.spot else pool, machine_type=machine.machine_type or machine.name,
        has_fabric=machine.fabric.transport not in ("tcp", "ici"),
    )


def object_store_paths(job: Job) -> list[Bucket]:
    """What the run reads and writes in object stores: its data, what fills its volume, and its own files."""
    read, written = [("data.path", job.spec.data.path)], [("store.root", job.spec.store.root)]
    if job.spec.place.volume:
        read.append(("data.path", data_source(job)))
    found: dict[str, Bucket] = {}
    if job.spec.place.target == FOLLOW:
        read.append(("stream.path", job.spec.stream.path))
        written.append(("publish.to", published_place(job.spec)))
    for field, uri in (*read, *written):
        scheme, name, prefix = _cut(uri)
        if scheme not in SCHEMES.values():
            continue
        if not BUCKET_NAME.fullmatch(name):
            raise SpecError([Mistake("", field, uri, f"{name!r} is no bucket's name",
                                     "small letters, digits, dots and dashes, at most 63")])
        bucket = Bucket(scheme, name, prefix, is_written=(field, uri) in written)
        found[bucket.uri] = bucket
    return list(found.values())


def buckets(job: Job) -> list[Bucket]:
    """The same, each bucket once and whole."""
    found: dict[tuple[str, str], Bucket] = {}
    for path in object_store_paths(job):
        key = (path.scheme, path.name)
        was_written = key in found and found[key].is_written
        found[key] = Bucket(*key, prefix="", is_written=path.is_written or was_written)
    return list(found.values())


def volume_of(job: Job) -> Volume | None:
    """The file system that the spec names."""
    return find_volume(load_catalog(), job.spec.place.volume) if job.spec.place.volume else None


def data_source(job: Job) -> str:
    """Where the copy to the volume comes from: `data/` beside the runs in their bucket."""
    scheme, name, _ = _cut(job.spec.store.root)
    folder = posixpath.basename(job.spec.data.path.rstrip("/")) or job.name
    bucket = f"{scheme}://{name}" if scheme in SCHEMES.values() else f"{SCHEMES[job.cloud]}://your-bucket"
    return f"{bucket}/data/{folder}"


def _cut(uri: str) -> tuple[str, str, str]:
    """Scheme, bucket and what is below it. Not urlsplit: that drops what it takes for a fragment, and line breaks."""
    scheme, mark, rest = uri.partition("://")
    name, _, prefix = rest.partition("/")
    return (scheme, name, prefix.strip("/")) if mark else ("", "", "")


"""The run as a job: every number, name and location that more than one rendered file needs, worked out once from the
spec."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

from embark.catalog import Catalog, Machine, SpecPrice, Volume, find_volume, load_catalog, machine_of_place, price_spec
from embark.catalog.machine import Fabric, Gpu, Origin, Reserve
from embark.catalog.pricing import DEFAULT_MACHINES
from embark.catalog.regions import default_zone, place_mistakes
from embark.errors import ExitCode, Mistake, Mistakes, SpecError, UserError, conflict
from embark.kubernetes.names import INSTANCE, dns_label, object_label
from embark.plan.storage import StorageOffer
from embark.spec import PlaceSpec, RunSpec, batch_mistakes, to_toml
from embark.spec.place import PodTarget
from embark.values import frozen
from .serving import (
    SERVE_TARGETS,
    artifact_of,
    endpoint_mistakes,
    follow_mistakes,
    has_own_broker,
    published_uri,
    serve_mistakes,
    with_broker,
    with_cloud,
)

CLUSTER = "embark"  # One cluster for all runs: a run adds a node pool to it if it needs another machine.
SCHEMES = {"aws": "s3", "azure": "az", "gcp": "gs"}
BUCKET_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
USER_ID = 1000  # The user `embark` of the image.
SCRATCH = "/scratch"
PORT = 29500  # The port of the rendezvous, which is torchrun's default.
MAX_RESTARTS = 3  # Restarts of one machine's ranks before its pod is replaced.
RESTARTS_PER_NODE = 10  # Restarts of an elastic run for each machine that may be lost.
MAX_SPEC_BYTES = 900_000  # A ConfigMap holds 1 MiB.
MAX_VARIABLE_BYTES = 90_000  # Linux hands over variables of 128 KiB, and base64 takes a third more.
POD_TARGETS: tuple[str, ...] = get_args(PodTarget)
FOLLOW = "follow"  # The target with a trainer, its publisher, servers and a broker.
SLURM = "slurm"
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
"""Topologies of v5e and v6e, by chips."""
_DEEP = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
        1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"}
"""Topologies of v4 and v5p, by chips."""
TOPOLOGIES = {"v5litepod": _FLAT, "v6e": _FLAT, "v4": _DEEP, "v5p": _DEEP}
_IDENTITIES = {
    "aws": (r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", "arn:aws:iam::123456789012:role/NAME"),
    "azure": (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "the client id of the managed identity, a UUID"),
    "gcp": (r"[a-z][a-z0-9-]{4,28}[a-z0-9]@[a-z0-9.:-]+\.iam\.gserviceaccount\.com",
            "NAME@PROJECT.iam.gserviceaccount.com")
}


_CAPACITIES = {"aws": ("on-demand", "reserved", "block"), "azure": ("on-demand", "reserved"),
               "gcp": ("on-demand", "reserved", "block", "flex-start")}
_RESERVATIONS = {
    "aws": (r"cr-[0-9a-f]{8,17}", "cr-0123456789abcdef0"),
    "azure": (r"(?i:/subscriptions/[\w-]+/resourceGroups/[\w.()-]+/providers/Microsoft\.Compute/"
              r"capacityReservationGroups/)[\w.-]+",
              "/subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Compute/capacityReservationGroups/NAME"),
    "gcp": (r"(projects/[a-z0-9-]+/reservations/)?[a-z]([a-z0-9-]*[a-z0-9])?(/reservationBlocks/[\w-]+)?",
            "NAME, or projects/PROJECT/reservations/NAME")
}
_POOL_ENDS = {"spot": "-spot", "reserved": "-reserved", "block": "-block", "flex-start": "-flex"}
MAX_FLEX_H = 168  # Google ends machines of flex-start after seven days.


class Setting(NamedTuple):
    """An environment variable and the reason for it."""

    name: str
    value: str
    why: str


@frozen
class Exit:
    """The action of a controller when a process ends with this code."""

    code: int
    means: str
    must_retry: bool


EXITS = (
    Exit(ExitCode.BAD_INPUT, "the spec or the data is wrong, or the budget is spent", must_retry=False),
    Exit(ExitCode.FAULT, "something broke that a retry may cure", must_retry=True),
    Exit(ExitCode.PREEMPTED, "preempted and saved", must_retry=True)
)


@frozen
class Bucket:
    """A bucket, or a container of Azure, that the run reads or writes."""

    scheme: str  # `s3`, `gs` or `az`.
    name: str
    prefix: str  # Below the bucket, without slashes at its ends.
    is_written: bool

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


@frozen
class Location:
    """Region, zone, cluster and node pool of a job."""

    region: str
    zone: str
    cluster: str
    pool: str  # The node pool: named for the machine and for how it is paid, so that two can live beside each other.
    machine_type: str  # The cloud's name for a host.
    has_fabric: bool  # Traffic between machines goes past the ordinary network, which must be asked for.


@dataclass(frozen=True)  # no slots: it has cached properties
class Job:
    """One run on machines of one cloud."""

    spec: RunSpec
    machine: Machine
    name: str  # The run's name as a DNS label: what Kubernetes and the clouds accept as an object's name.
    num_nodes: int
    num_processes: int  # Processes of each node, one for each accelerator.
    spec_toml: str  # The resolved spec, which travels into the container.

    @classmethod
    def of(cls, spec: RunSpec, machine: Machine) -> Job:
        """Return the job of a spec, not yet checked."""
        num_processes = 1 if spec.place.target == FOLLOW else max(1, machine.gpus_per_host)
        return cls(spec, machine, dns_label(spec.name), spec.place.max_nodes, num_processes,
                   to_toml(spec, only_set=True))

    @property
    def cloud(self) -> str:
        return self.machine.cloud

    @property
    def place(self) -> PlaceSpec:
        return self.spec.place

    @property
    def target(self) -> str:
        return self.place.target

    def with_target(self, target: str) -> Job:
        """Render the run for another target."""
        place = self.place.changed(target=target)
        return replace(self, spec=self.spec.changed(place=place))

    @property
    def num_pods(self) -> int:
        """One pod for each host; a slice of TPUs may have several hosts."""
        return self.num_nodes * self.machine.num_hosts

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def min_nodes(self) -> int:
        """Fewer than `num_nodes` if the run is elastic."""
        return self.spec.place.min_nodes

    @property
    def is_elastic(self) -> bool:
        return self.spec.place.is_elastic

    @property
    def nnodes(self) -> str:
        """torchrun's `--nnodes`: a number, or `2:3`."""
        return f"{self.min_nodes}:{self.num_nodes}" if self.is_elastic else str(self.num_nodes)

    @property
    def max_restarts(self) -> int:
        """Restarts of one machine's ranks before its pod is given up. An elastic run has more, since each lost machine
        costs every other one a restart."""
        return RESTARTS_PER_NODE * self.num_nodes if self.is_elastic else MAX_RESTARTS

    @property
    def is_tpu(self) -> bool:
        return self.machine.gpu.kind == "tpu"

    @property
    def topology(self) -> str:
        """The topology of a slice of TPUs; empty if GKE has no such slice."""
        return TOPOLOGIES.get(self.machine.name.rpartition("-")[0], {}).get(self.machine.num_gpus, "")

    @property
    def targets(self) -> tuple[str, ...]:
        """All targets whose files are rendered; the first is the one that is launched."""
        others = self.place.render_targets if self.target in POD_TARGETS else ()
        return tuple(dict.fromkeys((self.target, *others)))

    @property
    def is_spot(self) -> bool:
        return self.spec.place.spot

    @property
    def capacity(self) -> str:
        """How its machines are bought: a value of `place.capacity`, or `spot`."""
        if self.is_spot:
            return "spot"
        sold = self.machine.sold
        usual = "flex-start" if sold and "on-demand" not in sold and "flex-start" in sold else "on-demand"
        return self.place.capacity or usual

    @property
    def has_reservation(self) -> bool:
        """Whether its machines are those of `place.reservation`, which decides where they stand."""
        return self.capacity in ("reserved", "block")

    @property
    def reservation(self) -> tuple[str, str]:
        """A reservation of Google Cloud: the project that shares it, empty if it is the run's own, and its name."""
        text = self.place.reservation
        shared = re.match(r"projects/([^/]+)/reservations/([^/]+)", text)
        return (shared[1], shared[2]) if shared else ("", text.partition("/")[0])

    @property
    def is_queued(self) -> bool:
        """Whether its machines come all at once, when Google has them: Kueue holds the job back until then."""
        return self.capacity == "flex-start" and self.num_pods > 1 and bool(self.place.queue)

    @property
    def price(self) -> SpecPrice:
        found = price_spec(self.spec)
        if found is None:
            raise ValueError("a job has a machine")
        return found

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all its machines; None if neither the spec nor the catalog has one."""
        given = self.place.slurm.usd_per_node_hour if self.target == SLURM else None
        if given is not None:
            return given * self.num_nodes
        found = price_spec(self.spec)
        return None if found is None else found.usd_per_hour

    @property
    def spec_id(self) -> str:
        """A name of the spec's content, by which a script knows a job that an earlier spec has started."""
        return hashlib.sha256(self.spec_toml.encode()).hexdigest()[:12]

    @property
    def price_text(self) -> str:
        """The sentence that a script shows before it starts the machines."""
        price = self.price
        if price.usd_per_hour is None or price.origin is None:
            return f"The catalog has no price of {price.title}."
        text = f"{price.title}: {price.usd_per_hour:,.2f} USD an hour by the catalog ({price.origin.date})."
        return f"{text} The reservation is paid whether it is used or not." if self.has_reservation else text

    @property
    def title(self) -> str:
        """A title such as `quickstart on 2 x p5.48xlarge: 16 ranks`."""
        counts = f"{self.min_nodes} to {self.num_nodes}" if self.is_elastic else str(self.num_nodes)
        what = f"{self.spec.name} on {counts} x {self.machine.name}"
        return (f"{what}: {self.num_nodes * self.machine.num_gpus} chips" if self.is_tpu
                else f"{what}: {'up to ' if self.is_elastic else ''}{self.world_size} ranks")

    @property
    def image(self) -> str:
        return self.spec.place.image or self.default_image

    @property
    def default_image(self) -> str:
        return default_image(has_tpu=self.is_tpu, is_serving=self.spec.place.target in SERVE_TARGETS)

    @property
    def namespace(self) -> str:
        return self.spec.place.namespace

    @property
    def queue(self) -> str:
        """The Kueue queue that the run waits in; empty for none. A cluster that Embark makes has one for each kind of
        machine, since the quota of a queue is a number of machines."""
        place = self.place
        return place.queue if place.is_existing or not place.queue else dns_label(f"{place.queue}-{self.location.pool}")

    @property
    def config_name(self) -> str:
        """The name of the ConfigMap with the spec."""
        return f"{self.name}-spec"

    @property
    def claim_name(self) -> str:
        """The name of the PersistentVolumeClaim that pods mount; empty if they mount none."""
        return self.place.claim or (f"{self.name}-data" if self.place.volume else "")

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "embark", INSTANCE: self.name}

    @property
    def memory_gib(self) -> int | None:
        """Memory that a pod asks for: the machine's share for pods, less room for the agents on every node."""
        share = self.machine.allocatable_gib
        return None if share is None else max(1, math.floor(share - max(1.0, 0.03 * share)))

    @property
    def num_cpus(self) -> int | None:
        share = self.machine.allocatable_vcpus
        return None if share is None else max(1, math.floor(share - max(0.5, 0.03 * share)))

    @property
    def shm_gib(self) -> int:
        """The size of /dev/shm, which counts to the pod's memory: a small share of it."""
        return max(1, min(64, (self.memory_gib or 16) // 8))

    @cached_property
    def location(self) -> Location:
        machine, region = self.machine, self.price.region
        pool = object_label(machine.name.removeprefix("Standard_"))
        return Location(
            region=region, zone=self.place.zone or default_zone(load_catalog(), machine, region), cluster=CLUSTER,
            pool=pool + _POOL_ENDS.get(self.capacity, ""), machine_type=machine.machine_type or machine.name,
            has_fabric=machine.fabric.transport not in ("tcp", "ici")
        )

    @cached_property
    def volume(self) -> Volume | None:
        """The file system that the spec names."""
        return find_volume(load_catalog(), self.place.volume) if self.place.volume else None

    @cached_property
    def bought_volume(self) -> StorageOffer | None:
        """The file system in the size that the plan needs; None if the plan cannot know it."""
        from embark.plan.plan import plan_volume

        return plan_volume(self.spec, self.machine) if self.place.volume else None

    @property
    def data_source(self) -> str:
        """The source of the copy to the volume: `data/` next to the runs in their bucket."""
        scheme, name, _ = _split_uri(self.spec.store.root)
        folder = posixpath.basename(self.spec.data.path.rstrip("/")) or self.name
        bucket = f"{scheme}://{name}" if scheme in SCHEMES.values() else f"{SCHEMES[self.cloud]}://your-bucket"
        return f"{bucket}/data/{folder}"

    @cached_property
    def object_store_paths(self) -> list[Bucket]:
        """The paths in object stores that the run reads and writes: its data, the source of its volume, and its own
        files."""
        read, written = [("data.path", self.spec.data.path)], [("store.root", self.spec.store.root)]
        if self.place.volume and not self.place.is_existing:
            read.append(("data.path", self.data_source))
        if self.target == FOLLOW:
            read.append(("stream.path", self.spec.stream.path))
            written.append(("publish.to", published_uri(self.spec)))
        paths: dict[str, Bucket] = {}
        for field, uri in (*read, *written):
            scheme, name, prefix = _split_uri(uri)
            if scheme not in SCHEMES.values():
                continue
            if not BUCKET_NAME.fullmatch(name):
                raise SpecError([conflict(field, uri, f"{name!r} is not a bucket's name",
                                          "small letters, digits, dots and dashes, at most 63")])
            bucket = Bucket(scheme, name, prefix, is_written=(field, uri) in written)
            paths[bucket.uri] = bucket
        return list(paths.values())

    @property
    def versions(self) -> Bucket | None:
        """Where servers read versions of models, and may do nothing else: of every run that shares the store."""
        spec = self.spec
        is_usual = not spec.serve.artifact and not spec.stream.is_on
        scheme, name, prefix = _split_uri(f"{spec.store.root.rstrip('/')}/*/export" if is_usual else artifact_of(spec))
        return Bucket(scheme, name, prefix, is_written=False) if scheme == SCHEMES[self.cloud] else None

    @property
    def has_own_broker(self) -> bool:
        return self.target == FOLLOW and has_own_broker(self.spec, self.name)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of those paths, each once and without a prefix."""
        is_written = dict.fromkeys(((path.scheme, path.name) for path in self.object_store_paths), False)
        for path in self.object_store_paths:
            is_written[path.scheme, path.name] |= path.is_written
        return [Bucket(scheme, name, "", written) for (scheme, name), written in is_written.items()]

    def is_shared(self, path: str) -> bool:
        """Return whether every machine sees the same there: in an object store, on the mounted volume, or
        on the file system of a cluster of Slurm."""
        mount = self.place.volume_path
        if self.target == SLURM or "://" in path:
            return True
        return bool(self.claim_name) and (path == mount or path.startswith(f"{mount}/"))


def make_job(spec: RunSpec, catalog: Catalog) -> Job:
    """Make the job of a spec. Refuses, all at once, what cannot be rendered."""
    is_serving, is_following = spec.place.target in SERVE_TARGETS, spec.place.target == FOLLOW
    spec = with_cloud(spec) if is_serving or is_following else spec
    spec = with_broker(spec, dns_label(spec.name)) if is_following else spec
    machine = _machine(spec, catalog)
    job = Job.of(spec, machine)
    mistakes: list[Mistake] = []
    if is_following:
        mistakes += follow_mistakes(spec)
    if is_serving or is_following:
        mistakes += [*serve_mistakes(spec, catalog, job.cloud), *endpoint_mistakes(spec, job.cloud),
                     *_account_mistakes(job, artifact_of(spec))]
    if spec.place.target == SLURM:  # region, capacity, storage and identity are the cluster's own
        mistakes += [*_target_mistakes(job), *_budget_mistakes(job)]
    elif not is_serving:
        mistakes += [*place_mistakes(catalog, machine, spec.place), *_target_mistakes(job), *_capacity_mistakes(job),
                     *_storage_mistakes(job, catalog), *_budget_mistakes(job)]
    mistakes += _identity_mistakes(job)
    if mistakes:
        raise SpecError(list(dict.fromkeys(mistakes)))
    return job


def default_image(*, has_tpu: bool = False, is_serving: bool = False) -> str:
    from embark import __version__
    from embark.stack.versions import default_triple

    if is_serving:
        return f"embark:{__version__}-serve"
    if has_tpu:
        return f"embark:{__version__}-tpu"
    return f"embark:{__version__}-torch{default_triple().torch}"


def _machine(spec: RunSpec, catalog: Catalog) -> Machine:
    place = spec.place
    machine = machine_of_place(catalog, place)
    if place.target == SLURM and (machine is None or place.slurm.gpus_per_node is not None):
        return _slurm_node(machine, place.slurm.gpus_per_node or 0)
    if machine is None:
        raise SpecError([conflict("place.machine", "", "files are for a machine of a cloud, and none is named",
                                  "set it (embark catalog list shows them), or place.cloud for its usual one")])
    if machine.name not in catalog.machines and not place.is_existing and place.target != SLURM:
        raise SpecError([conflict("place.machine", place.machine, "describes a machine of a cluster that exists",
                                  'set place.cluster = "existing", or name a machine of embark catalog list')])
    if place.cloud not in ("", machine.cloud):
        raise SpecError([conflict("place.cloud", place.cloud, f"{machine.name} belongs to {machine.cloud}",
                                  f"leave place.machine out for {DEFAULT_MACHINES[place.cloud]}, or name another one")])
    return machine


def _slurm_node(machine: Machine | None, num_gpus: int) -> Machine:
    """Return a node with so many GPUs: a part of a machine, or one of which the catalog knows nothing."""
    if machine is not None:
        return replace(machine, num_gpus=num_gpus)
    origin = Origin("place.slurm", "2026-11", "unconfirmed")
    return Machine(name="nodes of Slurm", cloud="", num_gpus=num_gpus, num_hosts=1, origin=origin,
                   gpu=Gpu(name="GPU", kind="gpu", memory_mib=1, origin=origin),
                   fabric=Fabric(name="", title="", cloud="", transport="tcp", origin=origin),
                   reserve=Reserve(cloud="", memory_mib=1, origin=origin))


def _slurm_mistakes(job: Job) -> Mistakes:
    place, slurm = job.place, job.place.slurm
    if slurm.container and not (place.image or slurm.image_file):
        yield conflict("place.slurm.container", slurm.container, "there is no image to run",
                       "set place.image (embark image builds and names it) or place.slurm.image_file")
    if place.volume:
        yield conflict("place.volume", place.volume, "is not mounted on a cluster of Slurm",
                       "leave it out, and name folders of the cluster's own file system")
    if len(job.spec_toml.encode()) > MAX_VARIABLE_BYTES:
        yield conflict("model.tables", len(job.spec.model.tables), "the spec is too long for a variable of a process",
                       "give the tables by model.num_tables and rows_per_table")


def _target_mistakes(job: Job) -> Mistakes:
    spec, target = job.spec, job.target
    if target == SLURM:
        yield from _slurm_mistakes(job)
    is_tpu = job.is_tpu
    for other in job.targets[1:]:
        if is_tpu and other not in ("job", "jobset"):
            yield conflict("place.render_targets", other, f"{job.machine.name} is a TPU",
                           'list only "job" and "jobset", or leave it out')
    if is_tpu and target not in ("tpu-vm", "vertex", "job", "jobset"):
        yield conflict("place.target", target, f"{job.machine.name} is a TPU",
                       'set it to "tpu-vm", "vertex", "job" or "jobset"')
    if is_tpu and target in POD_TARGETS:
        if not job.topology or not job.machine.gke_accelerator:
            yield conflict("place.machine", job.machine.name, "GKE has no node pools of it",
                           'use a v4, v5e, v5p or v6e, or set place.target = "tpu-vm"')
        if target == "job" and job.num_nodes > 1:
            yield conflict("place.nodes", job.num_nodes, "a Job has the hosts of one slice only",
                           'set place.target = "jobset" for several slices, or name a larger one')
    if not is_tpu and target == "tpu-vm":
        yield conflict("place.target", target, f"{job.machine.name} is not a TPU", 'set it to "vm", or name a TPU')
    if target == "vertex" and job.cloud != "gcp":
        yield conflict("place.target", target, f"Vertex AI has no machines of {job.cloud}",
                       'set place.cloud = "gcp", or another target')
    if target == "vertex" and not spec.place.account:
        yield conflict("place.account", "", "Vertex AI needs a Google Cloud project", "set it to the project's id")
    if target == "vertex" and not spec.store.root.startswith("gs://"):
        yield conflict("store.root", spec.store.root, "Vertex AI stages its files in a bucket",
                       "set it to gs://BUCKET/runs")
    if not is_tpu:
        ranks = f"ranks ({job.num_nodes} × {job.num_processes})" if not job.is_elastic else \
            f"ranks ({job.num_processes} on each machine)"
        yield from batch_mistakes(spec.train.batch_size,
                                  [num * job.num_processes for num in spec.place.node_counts], ranks)
    if is_tpu and job.is_elastic:
        yield conflict("place.nodes", job.nnodes, f"{job.machine.name} is a TPU, whose hosts are a fixed number",
                       f"set it to {job.num_nodes}")
    if len(job.spec_toml.encode()) > MAX_SPEC_BYTES:
        yield conflict("model.tables", len(spec.model.tables), "the spec is too long for a ConfigMap",
                       "give the tables by model.num_tables and rows_per_table")
    if spec.place.device == "cpu" and job.machine.num_gpus and not is_tpu:
        yield conflict("place.device", "cpu", f"{job.machine.name} has {job.num_processes} accelerators",
                       'leave it out, or set it to "auto"')


def _capacity_mistakes(job: Job) -> Mistakes:
    place, capacity, machine = job.place, job.capacity, job.machine
    if place.is_existing:  # its owner bought the machines
        return
    if job.is_spot:
        if place.capacity or place.reservation:
            yield conflict("place.capacity", place.capacity, "place.spot = true takes spot machines",
                           "leave one of them out")
        return
    if job.cloud and capacity not in _CAPACITIES[job.cloud]:
        yield conflict("place.capacity", capacity, f"is no way to buy machines of {job.cloud}",
                       f"one of {', '.join(_CAPACITIES[job.cloud])}")
    elif machine.sold and capacity not in machine.sold:
        yield conflict("place.capacity", capacity, f"{machine.name} is not sold so, but by: {', '.join(machine.sold)}",
                       'place.spot = true for spot; for another one, set it, and with "reserved" or "block" also '
                       "place.reservation")
    elif job.has_reservation:
        pattern, example = _RESERVATIONS[job.cloud]
        if not re.fullmatch(pattern, place.reservation):
            yield conflict("place.reservation", place.reservation, f'place.capacity = "{capacity}" uses a reservation '
                           f"of {job.cloud}", f"set it to its id: {example}")
        if not place.zone:
            yield conflict("place.zone", "", "a reservation is in one zone", "set it to the reservation's")
        if job.target == "tpu-vm" and capacity == "block":
            yield conflict("place.capacity", capacity, "TPU machines outside of a cluster are not taken from a block",
                           'place.target = "jobset", or a reservation without a calendar: "reserved"')
        if job.target == "vm" and job.cloud == "azure" and job.num_nodes > 1 and job.location.has_fabric:
            yield conflict("place.capacity", capacity, "machines of a reservation cannot be in an availability set, "
                           "without which plain ones share no InfiniBand", 'place.target = "job", or one machine')
    elif place.reservation:
        yield conflict("place.reservation", place.reservation, f'place.capacity = "{capacity}" uses none',
                       'leave it out, or set place.capacity = "reserved" or "block"')
    if capacity == "flex-start":
        if (place.max_hours or 0) > MAX_FLEX_H:
            yield conflict("place.max_hours", f"{place.max_hours:g}", "Google ends machines of flex-start after 7 days",
                           f"at most {MAX_FLEX_H}; checkpoints let a second run continue")
        if job.is_tpu:
            yield conflict("place.capacity", capacity, "flex-start is used by GPU machines", "leave it out")
        if place.capacity and job.num_pods > 1 and job.target in POD_TARGETS and not place.queue:
            yield conflict("place.queue", "", "flex-start gives several machines at once to a queue alone; one by one "
                           "they would be paid while they wait for each other", 'set it, such as to "embark"')
        if job.is_queued and job.target == "torchx":
            yield conflict("place.target", job.target, "Kueue does not hold it back until its machines are there",
                           'set it to "job" or "jobset"')


def _storage_mistakes(job: Job, catalog: Catalog) -> Mistakes:
    place, store, data = job.place, job.spec.store, job.spec.data
    bucket = {"azure": "az://CONTAINER/runs", "gcp": "gs://BUCKET/runs"}.get(job.cloud, "s3://BUCKET/runs")
    if place.volume:
        try:
            volume = find_volume(catalog, place.volume)
        except UserError as error:
            yield conflict("place.volume", place.volume, "the catalog has no such volume", error.fix)
        else:
            if volume.cloud != job.cloud:
                yield conflict("place.volume", place.volume,
                               f"belongs to {volume.cloud}, and the machine to {job.cloud}",
                               "embark catalog list --volumes lists them")
            elif volume.kind != "file":
                yield conflict("place.volume", place.volume, "is an object store: it is read by its uri, not mounted",
                               f"leave it out and use {bucket}")
    where = job.cloud or "the cluster"
    yield from _account_mistakes(job, store.root, data.path)
    if not job.is_shared(store.root) and job.num_pods > 1:
        yield conflict("store.root", store.root, "each machine would keep its own part of every checkpoint",
                       f"set it to {bucket}, or to a folder under place.volume_path with place."
                       f"{'claim' if place.is_existing else 'volume'}")
    if data.kind != "synthetic" and data.path and not job.is_shared(data.path):
        yield conflict("data.path", data.path, f"is on this machine; a machine of {where} does not see it",
                       f"embark data copy {shlex.quote(data.path)} {bucket.removesuffix('runs')}data copies it; then "
                       f"--set data.path={bucket.removesuffix('runs')}data")
    warm_start = job.spec.train.warm_start
    run = warm_start.rpartition("@")[0] or warm_start
    run = run if "/" in run else f"{store.root}/{run}"
    if warm_start and not job.is_shared(run):
        yield conflict("train.warm_start", warm_start, f"is on this machine; a machine of {where} does not see it",
                       f"copy the run and name the copy: embark data copy {shlex.quote(run)} "
                       f"{bucket}/{shlex.quote(run.rpartition('/')[2])}")


def _account_mistakes(job: Job, *paths: str) -> Mistakes:
    if any(path.startswith("az://") for path in paths) and not job.place.storage_account:
        yield conflict("place.storage_account", "", "az:// names a container, and not the account that holds it",
                       "set it to the storage account's name")


def _identity_mistakes(job: Job) -> Mistakes:
    pattern, example = _IDENTITIES.get(job.cloud, ("", "nothing: set place.cloud if the cluster is one of its"))
    for field, identity in (("place.identity", job.place.identity), ("serve.identity", job.spec.serve.identity)):
        if identity and not re.fullmatch(pattern, identity):
            yield conflict(field, identity, f"is not an identity of {job.cloud}", f"it looks like {example}")


def _budget_mistakes(job: Job) -> Mistakes:
    budget = job.place.budget_usd
    if budget is not None and job.usd_per_hour is None:
        what, fix = (job.title, "set place.slurm.usd_per_node_hour") if job.target == SLURM else \
            (job.price.title, "take one in with embark catalog refresh")
        yield conflict("place.budget_usd", f"{budget:g}", f"the catalog has no price of {what} to keep it by",
                       f"{fix}, or leave it out")


def _split_uri(uri: str) -> tuple[str, str, str]:
    """Scheme, bucket and what is below it. Not urlsplit: that drops what it takes for a fragment, and line breaks."""
    scheme, mark, rest = uri.partition("://")
    name, _, prefix = rest.partition("/")
    return (scheme, name, prefix.strip("/")) if mark else ("", "", "")

"""What the clouds offer, as values. `None`, or an empty text, stands for what is not known. The annotations are the
rules by which `load` checks each field of a file."""

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from embark.errors import UserError, did_you_mean, near_names
from embark.values import frozen

Cloud = Literal["aws", "azure", "gcp"]
CLOUDS: tuple[Cloud, ...] = get_args(Cloud)
AnyCloud = Cloud | Literal[""]  # Empty: of a cluster that is described, in a cloud that the catalog does not know.
SaleMode = Literal["on-demand", "spot", "block", "flex-start", "reserved"]
WARNING_DAYS = 60  # Days before the end of support from which it is worth a warning.
NUM_NEAR = 3  # Names that an error suggests, at most.
DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")


def _split(value: Any) -> Any:
    return value.split() if isinstance(value, str) else value


def _date(value: str) -> str:
    if not DATE.fullmatch(value):
        raise ValueError("should be a date such as 2026-11 or 2026-11-15")
    return value


def _steps(steps: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if list(steps) != sorted(steps) or not all(0 <= share < 1 for _, share in steps):
        raise ValueError("steps should rise, and shares lie between 0 and 1")
    return steps


Text = Annotated[str, Field(min_length=1)]
Words = Annotated[tuple[str, ...], BeforeValidator(_split)]  # A list in TOML, words in CSV.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Known = Positive | None  # `None`: not known.
Count = Annotated[int, Field(gt=0)]
Discount = Annotated[float, Field(gt=0, lt=1)] | None
Steps = Annotated[tuple[tuple[float, float], ...], AfterValidator(_steps)]


@frozen
class Origin:
    """Source, date and confidence of a row."""

    source: Text
    date: Annotated[str, AfterValidator(_date)]  # Year and month, or the day.
    confidence: Literal["read", "documented", "unconfirmed"]
    """`read`: from a machine-readable listing or a source file. `documented`: as a public page says it. `unconfirmed`:
    neither was at hand, or it is an assumption."""

    @property
    def is_confirmed(self) -> bool:
        return self.confidence != "unconfirmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator: a GPU, or a chip of a TPU. Rates are dense, links count both directions together."""

    name: Text
    kind: Literal["gpu", "tpu"]
    memory_mib: Positive
    seen_mib: Known = None  # Memory that a driver shows, which is less than the listing says.
    hbm_gbyte_per_s: Known = None
    bf16_tflops: Known = None
    fp16_tflops: Known = None
    tf32_tflops: Known = None
    fp32_tflops: Known = None
    nvlink_gbyte_per_s: Known = None
    pcie_gbyte_per_s: Known = None
    ici_gbyte_per_s: Known = None
    origin: Origin

    @property
    def memory_gib(self) -> float:
        return self.memory_mib / 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network that carries traffic between machines."""

    name: Text
    title: Text
    cloud: AnyCloud
    transport: Text
    kubernetes_resource: str = ""  # Name of the resource in a pod's limits; empty if it needs none.
    kubernetes_also: Words = ()
    kubernetes_annotations: Words = ()
    share: Known = None  # Of the bandwidth, what collectives reach; measured.
    latency_s: Known = None  # What a collective takes more between hosts than within one; measured.
    message_s: Known = None  # What each further rank adds that an all-to-all sends to; measured.
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A quota of a cloud: what it counts, and its name."""

    name: Text
    cloud: Cloud
    unit: Text
    on_demand: str = ""
    on_demand_code: str = ""
    spot: str = ""
    spot_code: str = ""
    also: Words = ()  # Further quotas that must be raised too.
    service: str = ""  # Google's API that the code belongs to.
    dimension: str = ""  # Google's `gpu_family=NVIDIA_H200`, if one quota counts several families.
    vertex: str = ""  # Google's quota that applies on Vertex AI; `tpu_vm` is the one for TPU VMs.
    tpu_vm: str = ""
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """The memory and processors that a cloud's Kubernetes node reserves for itself."""

    cloud: AnyCloud
    memory_steps: Steps = ()  # Pairs of a size in GiB and the share that is reserved up to it.
    memory_mib: Positive
    vcpu_steps: Steps = ()
    seen_share: Annotated[float, Field(gt=0, le=1)] | None = None
    origin: Origin

    def allocatable_gib(self, memory_gib: float) -> float:
        """Memory of a machine that pods may request. Without `seen_share`, an upper bound."""
        seen_gib = memory_gib * (1.0 if self.seen_share is None else self.seen_share)
        return max(0.0, seen_gib - _kept(seen_gib, self.memory_steps) - self.memory_mib / 1024)

    def allocatable_vcpus(self, vcpus: float) -> float:
        return vcpus - _kept(vcpus, self.vcpu_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, or a slice of a TPU. Per host: `vcpus`, `memory_gib`, networks and disk. In all: accelerators."""

    name: Text
    also: Words = ()  # Other names of the machine.
    cloud: AnyCloud
    machine_type: str = ""  # The cloud's name for the host, if it differs from `name`.
    gpu: Gpu
    num_gpus: Count
    total_gpu_memory_gib: Known = field(default=None, repr=False)
    """The figure that the cloud publishes."""
    num_hosts: Count
    vcpus: Known = None
    memory_gib: Known = None
    link: Literal["", "nvlink", "pcie", "ici"] = ""
    """What joins the accelerators of one host: `nvlink`, `pcie`, `ici`; empty where there is one."""
    network_gbit_per_s: Known = None
    fabric: Fabric
    fabric_gbit_per_s: Known = None  # A host's share of the fabric, for traffic between accelerators.
    num_fabric_devices: Count | None = None
    local_disk_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    gke_accelerator: str = ""  # The value of the node label `cloud.google.com/gke-accelerator`, or its TPU counterpart.
    quota: Quota | None = None
    reserve: Reserve
    origin: Origin
    sold: Annotated[tuple[SaleMode, ...], BeforeValidator(_split)] = ()
    """How it can be had, of `WAYS`; empty for both on demand and spot."""

    @property
    def is_on_demand(self) -> bool:
        """Whether one can be started at any time, if the cloud has capacity."""
        return not self.sold or "on-demand" in self.sold

    @property
    def is_confirmed(self) -> bool:
        """Whether the machine, its accelerator and its fabric are all confirmed."""
        return self.origin.is_confirmed and self.gpu.origin.is_confirmed and self.fabric.origin.is_confirmed

    @property
    def gpu_memory_gib(self) -> float:
        return self.num_gpus * self.gpu.memory_gib

    @property
    def gpus_per_host(self) -> int:
        return self.num_gpus // self.num_hosts

    @property
    def link_gbyte_per_s(self) -> float | None:
        """Bandwidth between two accelerators of a host, both directions together."""
        by_link = {"nvlink": self.gpu.nvlink_gbyte_per_s, "pcie": self.gpu.pcie_gbyte_per_s,
                   "ici": self.gpu.ici_gbyte_per_s}
        return by_link.get(self.link)

    @property
    def allocatable_gib(self) -> float | None:
        """Memory of a host that pods may request."""
        return None if self.memory_gib is None else self.reserve.allocatable_gib(self.memory_gib)

    @property
    def allocatable_vcpus(self) -> float | None:
        return None if self.vcpus is None else self.reserve.allocatable_vcpus(self.vcpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMachine:
    """A machine without accelerators, for serving."""

    name: Text
    cloud: Cloud
    vcpus: Positive
    memory_gib: Positive
    reserve: Reserve
    origin: Origin

    @property
    def allocatable_gib(self) -> float:
        """Memory that pods may request."""
        return self.reserve.allocatable_gib(self.memory_gib)

    @property
    def allocatable_vcpus(self) -> float:
        return self.reserve.allocatable_vcpus(self.vcpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zones:
    """The zones that sell a machine, for clouds that sell it in few zones of a region."""

    name: Text  # The machine's name, or its generation's.
    zones: Annotated[Words, Field(min_length=1)]  # Open to everyone; the first of a region is its default.
    others: Words = ()  # Zones for single tenants, reservations or spot: used only if a spec names one.
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The prices of a machine in a region."""

    machine: Text
    region: Text
    on_demand_usd_per_hour: Known = None
    spot_usd_per_hour: Known = None
    commit_1y_discount: Discount = None  # The share of the on-demand price that a year's commitment takes off.
    commit_3y_discount: Discount = None
    origin: Origin
    block_usd_per_hour: Known = None
    """The price in a block of days booked ahead: Capacity Blocks of AWS, the calendar mode of Google."""

    def committed_usd_per_hour(self, years: int) -> float | None:
        """Return the hourly price with a commitment of one year or three."""
        discount = {1: self.commit_1y_discount, 3: self.commit_3y_discount}[years]
        if self.on_demand_usd_per_hour is None or discount is None:
            return None
        return self.on_demand_usd_per_hour * (1 - discount)

    @property
    def spot_saving(self) -> float | None:
        """The share of the on-demand price that spot takes off."""
        if self.on_demand_usd_per_hour is None or self.spot_usd_per_hour is None:
            return None
        return 1 - self.spot_usd_per_hour / self.on_demand_usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The rate at which a cloud takes spot machines back."""

    per_hour: Annotated[Positive, Field(validation_alias="spot_interruptions_per_hour")]
    """Expected interruptions of one machine in an hour that it runs."""
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A kind of storage for data and checkpoints."""

    name: Text
    title: Text
    cloud: Cloud
    kind: Literal["object", "file"]
    mbyte_per_s_per_tib: Known = None  # Reads, in 10^6 bytes; an object store has no such figure.
    min_gib: Known = None
    step_gib: Known = None
    max_tib: Known = None
    limit_gbit_per_s: Known = None
    limit_scope: str = ""
    usd_per_gib_month: Known = None
    price_region: str = ""
    origin: Origin
    price_origin: Origin  # The price's own origin: speed and size are often on another page.

    @property
    def min_tib(self) -> float:
        return (self.min_gib or 0.0) / 1024

    def bought_gib(self, tib: float) -> int:
        """Return the size that is sold with at least so many TiB, or the largest."""
        least_gib = min(tib, self.max_tib or tib) * 1024
        if self.min_gib is not None and least_gib <= self.min_gib:
            return round(self.min_gib)
        step_gib = self.step_gib or 1.0
        return round(math.ceil(least_gib / step_gib - 1e-9) * step_gib)

    def gbyte_per_s(self, tib: float) -> float | None:
        """Read speed of so many TiB of it, in 10^9 bytes a second."""
        if self.mbyte_per_s_per_tib is not None:
            return tib * self.mbyte_per_s_per_tib / 1000
        return None if self.limit_gbit_per_s is None else self.limit_gbit_per_s / 8

    def usd_per_month(self, tib: float) -> float | None:
        return None if self.usd_per_gib_month is None else tib * 1024 * self.usd_per_gib_month


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The end of a version's support."""

    name: Text  # The product and its minor version, such as `eks-1.35`.
    title: Text
    ends: datetime.date | None = None  # None: its project announces none.
    refused: datetime.date | None = None  # The cloud creates nothing of it after this day; None: it does.
    then: Text  # What happens after the end.
    version: Text = ""  # The complete version that rendered files name; empty: none does.
    named: Text = ""  # Commands and images have this text before the version.
    kubernetes: Text = ""  # The newest Kubernetes that its project supports it on, where the project says so.
    origin: Origin

    def is_refused(self, today: datetime.date) -> bool:
        return self.refused is not None and today > self.refused

    def notice(self, today: datetime.date) -> str:
        """Return a sentence on an end that has come or is near; empty if it is far away."""
        if self.ends is None or (num_days := (self.ends - today).days) > WARNING_DAYS:
            return ""
        ends = f"is supported until {self.ends}, {num_days} days from now" if num_days >= 0 else \
            f"is out of support since {self.ends}"
        return f"{self.title} {ends}: then {self.then}"


@frozen
class Citation:
    """The page behind a row's `source`."""

    title: Text
    url: Text


@frozen
class Catalog:
    """All tables of the catalog, by name."""

    machines: Mapping[str, Machine]
    gpus: Mapping[str, Gpu]
    fabrics: Mapping[str, Fabric]
    quotas: Mapping[str, Quota]
    volumes: Mapping[str, Volume]
    sources: Mapping[str, Citation]
    prices: Mapping[tuple[str, str], Price]  # Keyed by machine and region.
    spot_interruptions: Mapping[tuple[str, str, str], Interruption]
    """Keyed by cloud, machine and region; an empty text is any."""
    zones: Mapping[str, Zones]
    cpu_machines: Mapping[str, CpuMachine]  # They run no training, so that only serving asks for them.
    support: Mapping[str, Support]

    @property
    def versions(self) -> dict[str, str]:
        """The versions that rendered files name, by product: `eks`, `gpu_operator`."""
        return {name.rpartition("-")[0].replace("-", "_"): one.version for name, one in self.support.items()
                if one.version}

    def zones_of(self, machine: Machine | CpuMachine) -> Zones | None:
        """Return the zones that sell a machine; None if the catalog does not know: every zone of a region may have
        it."""
        return self.zones.get(machine.name) or self.zones.get(machine.name.rpartition("-")[0])

    def prices_of(self, machine: Machine | CpuMachine) -> list[Price]:
        """Return prices in every region that has the machine, by the region's name."""
        return sorted((p for p in self.prices.values() if p.machine == machine.name), key=lambda p: p.region)

    @property
    def priced(self) -> list[str]:
        """The names of machines that may have a price."""
        return [*self.machines, *self.cpu_machines]

    def interruptions(self, machine: Machine, region: str) -> Interruption:
        """Return the most specific rate: of the machine in the region, of the machine, or of its cloud; the highest of
        all clouds for a machine of none."""
        rows, cloud = self.spot_interruptions, machine.cloud
        for key in ((cloud, machine.name, region), (cloud, machine.name, "")):
            if key in rows:
                return rows[key]
        of_clouds = [row for (name, *others), row in rows.items() if name == (cloud or name) and not any(others)]
        return max(of_clouds, key=lambda row: row.per_hour)

    def urls(self, source: str) -> list[str]:
        """Return the pages behind a row's `source`."""
        return [self.sources[name].url if name in self.sources else name for name in source.split("+")]


def find_machine(catalog: Catalog, name: str) -> Machine:
    """Find a machine by any of its names, in any case."""
    wanted = name.strip().lower()
    for machine in catalog.machines.values():
        if wanted in (known.lower() for known in (machine.name, *machine.also)):
            return machine
    raise UserError(f"{name!r}: no such machine", _near_machines(catalog, wanted))


_DESCRIBED = re.compile(r"([1-9][0-9]?)x(?P<gpu>\S+)", re.IGNORECASE)


def describe_machine(catalog: Catalog, name: str, cloud: AnyCloud) -> Machine | None:
    """Return the machine that a name such as `8xH100` describes by its accelerators; None if it is no such name."""
    described = _DESCRIBED.fullmatch(name.strip())
    gpu = next((gpu for gpu in catalog.gpus.values() if described and gpu.kind == "gpu"
                and gpu.name.lower() == described["gpu"].lower()), None)
    if described is None or gpu is None:
        return None
    num_gpus = int(described[1])
    return Machine(
        name=f"{num_gpus}x{gpu.name}", cloud=cloud, gpu=gpu, num_gpus=num_gpus, num_hosts=1,
        link="" if num_gpus == 1 else "nvlink" if gpu.nvlink_gbyte_per_s else "pcie", origin=gpu.origin,
        fabric=Fabric(name="ethernet", title="Ethernet", cloud=cloud, transport="tcp", origin=gpu.origin),
        reserve=Reserve(cloud=cloud, memory_mib=1024, origin=gpu.origin))


def _near_machines(catalog: Catalog, wanted: str) -> str:
    by_name = {known.lower(): m.name for m in catalog.machines.values() for known in (m.name, *m.also)}
    names = dict.fromkeys(by_name[name] for name in near_names(wanted, by_name, 4 * NUM_NEAR))
    return did_you_mean(list(names)[:NUM_NEAR]) or (
        "embark catalog list shows them all; 8xH100 describes one of an existing cluster by its accelerators")


def _kept(amount: float, steps: tuple[tuple[float, float], ...]) -> float:
    kept, below = 0.0, 0.0
    for up_to, share in steps:
        kept += share * max(0.0, min(amount, up_to) - below)
        below = up_to
    return kept

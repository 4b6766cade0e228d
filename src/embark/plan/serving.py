"""How many replicas of `embark serve` a rate of requests needs, on which machines, for how much.

A replica has two vCPUs, which on every machine of the catalog are the two threads of one core, and is counted as if
this core read and scored one request at a time: its rate follows from the CPU time of a request, which was measured.
Waiting follows from M/D/1: requests arrive at random and take equally long. bench/serve_waiting.py compares the latency
with a server's.
"""

import math
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from embark.catalog import Price, load_catalog, lowest_price
from embark.catalog.machine import CLOUDS, CpuMachine
from embark.catalog.pricing import PURCHASE_NAMES, Purchase, hourly_usd
from embark.errors import UserError, nearest
from embark.events.results import Tabular
from embark.export.quantize import TABLE_DTYPES, TableDtype, row_format
from embark.export.write_version import MAX_SHARE
from embark.formatting import format_usd, pluralize
from embark.model.work import dense_work_of
from embark.spec import RunSpec
from embark.values import JsonDict, frozen
from .prediction import GIB
from .workload import resolve_data, trace_dense

VCPUS = 2  # A replica has one for each of its processes.
MAX_UTILIZATION = 0.75  # Share of its core. Beyond it, a little more traffic than expected multiplies the waiting.
VCPU_TARGET = 0.6  # Share of its vCPUs that `MAX_UTILIZATION` of a core shows, since its processes slow each other.
BESIDE_VCPUS = 0.5  # The part of a node that its agents take.
ID_MAP_BYTES = 16  # Each value of a prepared column has a key and an id.
HOURS_PER_MONTH = 730
SCRATCH_BYTES = 0.5 * GIB  # Logs and temporary files.


@frozen
class ServeCost:
    """Measured costs of `embark serve` on one core."""

    title: str
    date: str
    request_s: float
    column_s: float
    cell_s: float
    flop_s: float
    process_bytes: float


@frozen
class ServeRequest:
    """The traffic to plan for, and what answers it."""

    qps: float
    p99_ms: float
    rows_per_request: int = 128
    tables: TableDtype = "fp32"
    cloud: str = ""
    region: str = ""
    machine: str = ""
    spot: bool | None = None  # None: as `place.spot` says.

    @property
    def purchase(self) -> Purchase:
        return "spot" if self.spot else "on_demand"


@frozen
class ServeOffer:
    """One type of machine with all replicas on it."""

    machine: str
    cloud: str
    region: str
    replicas_per_machine: int  # 0 if not one replica fits.
    num_machines: int
    usd_per_month: float | None
    usd_per_million: float | None
    why_not: str = ""  # It has no room, or no price.


@frozen
class TableMemory:
    """Memory of tables of one type, and the cheapest machines for it."""

    tables: TableDtype
    table_bytes: float
    replica_bytes: float
    offer: ServeOffer | None


@frozen
class ServePlan(Tabular):
    """The number of replicas that are needed, and the machines and costs for them."""

    sentence: str
    is_ok: bool
    request: ServeRequest
    request_cpu_ms: float
    utilization: float  # Share of a core that a replica uses at its highest rate.
    replica_qps: float
    replica_rows_per_s: float
    num_replicas: int
    num_spare: int
    replica_vcpus: int
    replica_bytes: float
    p99_ms: float  # Latency at the busiest moment that is planned for: one replica is away.
    why: tuple[str, ...]
    offers: tuple[ServeOffer, ...]  # Cheapest first, then those without room or price.
    by_tables: tuple[TableMemory, ...]
    basis: str

    def to_rows(self) -> list[JsonDict]:
        """Return a row for each type of machine, the cheapest first."""
        return [asdict(one) for one in self.offers]


@cache
def measured_cost() -> ServeCost:
    text = Path(__file__).with_name("serving.toml").read_text(encoding="utf-8")
    return TypeAdapter(ServeCost).validate_python(tomllib.loads(text))


def num_columns(spec: RunSpec) -> int:
    """Return the columns of a request; each is read on its own, whatever the number of rows."""
    return spec.model.num_dense + len(spec.model.table_list())


def num_cells(spec: RunSpec) -> float:
    """Return the dense values and ids of a row."""
    return spec.model.num_dense + sum(table.multi_hot for table in spec.model.table_list())


def forward_flops(spec: RunSpec) -> float:
    """Return the arithmetic of a row, a third of a training step's."""
    return dense_work_of(spec.model).flops_per_sample / 3


def plan_serving(spec: RunSpec, request: ServeRequest) -> ServePlan:
    """Plan for a rate, a size of requests and a time in which 99 of 100 are answered."""
    _check(request)
    request = _with_place(spec, request)
    spec, _ = resolve_data(spec, 1)
    trace_dense(spec)
    cost = measured_cost()
    cpu_s = request_cpu_s(spec, request.rows_per_request)
    utilization = max_utilization(cpu_s, request.p99_ms / 1e3)
    memory = {tables: replica_bytes(spec, tables) for tables in TABLE_DTYPES}
    basis = (f"a request takes {cpu_s * 1e3:.3g} ms of a core: {cost.request_s * 1e3:.3g} ms, "
             f"{cost.column_s * 1e6:.3g} µs for each of {num_columns(spec)} columns, and of a row "
             f"{cost.cell_s * 1e6:.3g} µs for each of {num_cells(spec):g} cells and {cost.flop_s * 1e12:.3g} µs for "
             f"each million of {forward_flops(spec) / 1e6:,.3g} million FLOPs; fitted to measurements of {cost.date} "
             f"on {cost.title}. Waiting is that of M/D/1")
    name = f"{spec.name}: {request.qps:,.6g} requests/s of {pluralize(request.rows_per_request, 'row')} in " \
           f"{request.p99_ms:g} ms (p99)"
    if utilization <= 0:
        least = p99_ms(cpu_s, 0.0)
        return ServePlan(
            f"{name} is not possible: one such request takes {least:.3g} ms on an idle replica; send fewer rows in a "
            f"request, use a smaller model, or allow more than {least:.3g} ms", False, request, cpu_s * 1e3, 0.0, 0.0,
            0.0, 0, 0, VCPUS, memory[request.tables], least, (), (), (), basis)
    replica_qps = utilization / cpu_s
    needed = max(1, math.ceil(request.qps / replica_qps - 1e-9))
    num_replicas = needed + 1
    offers = {tables: offers_for(num_replicas, memory[tables], request) for tables in TABLE_DTYPES}
    best = offers[request.tables][0]
    is_ok = best.usd_per_month is not None
    p99 = p99_ms(cpu_s, request.qps / needed * cpu_s)
    sentence = f"{name}: {num_replicas} replicas of {VCPUS} vCPUs and {memory[request.tables] / GIB:,.1f} GiB"
    if is_ok:
        sentence += (f" on {best.num_machines} x {best.machine} in {best.region}, {format_usd(best.usd_per_month)} a "
                     f"month and {format_usd(best.usd_per_million)} a million requests "
                     f"{PURCHASE_NAMES[request.purchase]}")
    else:
        sentence += f", and no machine of the catalog has both the room and a price: {best.machine}: {best.why_not}"
    return ServePlan(
        sentence, is_ok, request, cpu_s * 1e3, utilization, replica_qps, replica_qps * request.rows_per_request,
        num_replicas, num_replicas - needed, VCPUS, memory[request.tables], p99,
        tuple(_why(request, cpu_s, needed, offers[request.tables])), tuple(offers[request.tables]),
        tuple(TableMemory(tables, table_bytes(spec, tables), memory[tables],
                          found[0] if found[0].usd_per_month is not None else None)
              for tables, found in offers.items()),
        basis)


def request_cpu_s(spec: RunSpec, num_rows: int) -> float:
    cost = measured_cost()
    row_s = num_cells(spec) * cost.cell_s + forward_flops(spec) * cost.flop_s
    return cost.request_s + num_columns(spec) * cost.column_s + num_rows * row_s


def p99_ms(cpu_s: float, utilization: float) -> float:
    """Return the latency that one of 100 requests exceeds."""
    return latency_ms(cpu_s, utilization, 0.99)


def latency_ms(cpu_s: float, utilization: float, quantile: float) -> float:
    """Return the time of a request with its wait in M/D/1.

    In units of the request's own time, a wait of t < 1 is exceeded by 1 - (1 - utilization) * exp(utilization * t), a
    longer one by about factor * exp(-decay * t).
    """
    if utilization >= 1:
        return math.inf
    if utilization <= 1 - quantile:
        return 1e3 * cpu_s
    short = math.log(quantile / (1 - utilization)) / utilization
    if short < 1:
        return 1e3 * cpu_s * (1 + short)
    decay = _root(lambda x: utilization * math.expm1(x) - x, -2 * math.log(utilization), 1e-9)
    factor = (1 - utilization) / (utilization * math.exp(decay) - 1)
    return 1e3 * cpu_s * (1 + max(1.0, math.log(factor / (1 - quantile)) / decay))


def max_utilization(cpu_s: float, p99_s: float) -> float:
    """Return the utilization at which a replica still answers in time; 0 where an idle one does not."""
    if p99_ms(cpu_s, 0.0) > 1e3 * p99_s:
        return 0.0
    if p99_ms(cpu_s, MAX_UTILIZATION) <= 1e3 * p99_s:
        return MAX_UTILIZATION
    return _root(lambda utilization: p99_ms(cpu_s, utilization) - 1e3 * p99_s, MAX_UTILIZATION, 0.0)


def _root(function: Callable[[float], float], above: float, below: float) -> float:
    """Return where a function falls to 0, on the side where it is not above 0."""
    for _ in range(60):
        middle = (above + below) / 2
        above, below = (middle, below) if function(middle) > 0 else (above, middle)
    return below


def table_bytes(spec: RunSpec, tables: TableDtype) -> float:
    def of_row(dim: int) -> int:
        dtype, num = row_format(tables, dim)
        return dtype.itemsize * num

    return float(sum(table.rows * of_row(table.dim) for table in spec.model.stored_tables()))


def version_bytes(spec: RunSpec, tables: TableDtype) -> float:
    """Return the size of a full version: its tables, id maps and dense network."""
    maps = ID_MAP_BYTES * sum(table.rows for table in spec.model.table_list()) if spec.data.kind == "prepared" else 0
    return table_bytes(spec, tables) + maps + 4.0 * dense_work_of(spec.model).num_values


def replica_bytes(spec: RunSpec, tables: TableDtype) -> float:
    """Return the memory of a pod.

    Tables are mapped from files, whose pages count as the pod's: with less, requests wait for the disk.
    """
    return 1.1 * version_bytes(spec, tables) + measured_cost().process_bytes


def versions_bytes(full_bytes: float) -> float:
    """Return the disk for all versions that a server has at the same moment, if a full one has `full_bytes`.

    Two are there: the one that answers and the one before it, which a rollback needs, or the next one, since the one
    before is deleted before the next is fetched. Each may have deltas.
    """
    return 2 * (1 + MAX_SHARE) * full_bytes + SCRATCH_BYTES


def offers_for(num_replicas: int, memory_bytes: float, request: ServeRequest) -> list[ServeOffer]:
    """Return every machine without accelerators, or the one that is named, cheapest first."""
    catalog = load_catalog()
    machines: Iterable[CpuMachine] = catalog.cpu_machines.values()
    if request.machine:
        if request.machine not in catalog.cpu_machines:
            raise UserError(f"{request.machine!r}: no machine without accelerators has this name",
                            nearest(request.machine, catalog.cpu_machines))
        machines = [catalog.cpu_machines[request.machine]]
    found = [_offer(machine, catalog.prices.get((machine.name, request.region)) if request.region else
                    lowest_price(catalog, machine, request.purchase), num_replicas, memory_bytes, request)
             for machine in machines if request.cloud in ("", machine.cloud)]
    if not found:
        raise UserError(f"{request.machine} is not a machine of {request.cloud}", "leave one of the two out")
    return sorted(found, key=lambda one: (one.usd_per_month is None, one.usd_per_month or 0.0, one.num_machines))


def _offer(machine: CpuMachine, price: Price | None, num_replicas: int, memory_bytes: float,
           request: ServeRequest) -> ServeOffer:
    by_vcpus = math.floor((machine.allocatable_vcpus - BESIDE_VCPUS) / VCPUS)
    by_memory = math.floor(machine.allocatable_gib * GIB / memory_bytes)
    each = min(by_vcpus, by_memory)
    usd_per_hour = hourly_usd(price, request.purchase)
    region = price.region if price is not None else request.region
    if each < 1:
        why_not = f"a replica needs {memory_bytes / GIB:,.1f} GiB, and pods have {machine.allocatable_gib:,.1f} of " \
                  f"its {machine.memory_gib:g}" if by_vcpus else "has too few vCPUs"
        return ServeOffer(machine.name, machine.cloud, region, 0, 0, None, None, why_not)
    num_machines = -(-num_replicas // each)
    if usd_per_hour is None:
        return ServeOffer(machine.name, machine.cloud, region, each, num_machines, None, None, "no price known there")
    usd_per_month = usd_per_hour * num_machines * HOURS_PER_MONTH
    return ServeOffer(machine.name, machine.cloud, region, each, num_machines, usd_per_month,
                      usd_per_month / (request.qps * 3600 * HOURS_PER_MONTH / 1e6))


def _why(request: ServeRequest, cpu_s: float, needed: int, offers: list[ServeOffer]) -> Iterable[str]:
    """Return why there are not fewer replicas, and why not a smaller machine."""
    busy = request.qps * cpu_s / needed
    yield (f"{pluralize(needed, 'replica')} at {busy:.0%} of a core each answer in {p99_ms(cpu_s, busy):.3g} ms (p99); "
           "one more, so that this holds while one is replaced")
    if needed > 1:
        fewer = request.qps * cpu_s / (needed - 1)
        late = p99_ms(cpu_s, fewer)
        yield (f"not {needed - 1}: each would be at {fewer:.0%} of a core, " + (
            "and its queue would grow without end" if late == math.inf else
            f"and answer in {late:.3g} ms" if late > request.p99_ms else
            f"above {MAX_UTILIZATION:.0%}, where a little more traffic makes requests wait long"))
    best = offers[0]
    if best.usd_per_month is None:
        return
    smaller = {machine.name: machine.memory_gib for machine in load_catalog().cpu_machines.values()
               if machine.cloud == best.cloud}
    below = [one for one in offers if one.cloud == best.cloud and smaller[one.machine] < smaller[best.machine]]
    for one in sorted(below, key=lambda one: -smaller[one.machine])[:1]:
        reason = one.why_not or f"{pluralize(one.num_machines, 'machine')}, {format_usd(one.usd_per_month)} a month"
        yield f"not the smaller {one.machine}: {reason}"


def _with_place(spec: RunSpec, request: ServeRequest) -> ServeRequest:
    """Fill in what the request leaves out from the spec: its region, its cloud or else the region's, spot."""
    place = spec.place
    region = request.region or place.region
    cloud_there = _cloud_of(region)
    cloud = request.cloud or place.cloud or cloud_there
    if not request.region and cloud_there not in ("", cloud):
        region = ""  # the spec's, and another cloud is asked for
    return replace(request, cloud=cloud, region=region, spot=place.spot if request.spot is None else request.spot)


def _cloud_of(region: str) -> str:
    """Return the cloud of a region; empty where no machine has a price there."""
    catalog = load_catalog()
    return next((catalog.cpu_machines[name].cloud for name, sold_in in catalog.prices
                 if sold_in == region and name in catalog.cpu_machines), "")


def _check(request: ServeRequest) -> None:
    for flag, value in (("--qps", request.qps), ("--p99-ms", request.p99_ms)):
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{flag} {value:g} must be greater than 0", f"{flag} 20")
    if request.cloud and request.cloud not in CLOUDS:
        raise UserError(f"{request.cloud!r}: no such cloud", nearest(request.cloud, CLOUDS))
    if not 1 <= request.rows_per_request <= 8_192:
        raise UserError(f"--rows {request.rows_per_request}: a request has 1 to 8,192 rows", "--rows 128")

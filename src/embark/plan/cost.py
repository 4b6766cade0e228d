"""Hours and dollars of a run, part by part, for each way to pay."""

import math
from collections.abc import Mapping
from dataclasses import replace

from embark.catalog import Catalog, Machine, Price
from embark.catalog.pricing import POD_GRACE_S, PURCHASE_NAMES, Purchase, hourly_usd
from embark.model.placement import DENSE_STATES, all_table_bytes, shard_bytes
from embark.model.work import dense_work_of
from embark.spec import RunSpec
from embark.store.checkpoint_interval import steps_between_saves
from embark.values import frozen
from .prediction import ASSUMPTIONS, Prediction
from .workload import Workload

COST = ASSUMPTIONS["cost"]


@frozen
class Failures:
    """The rate at which a run loses machines."""

    per_hour: float
    grace_s: float  # Seconds from the notice until the machine ends, as the trainer assumes.
    has_notice: bool  # Spot gives notice; a machine that breaks does not.
    why: str

    @property
    def mtbf_s(self) -> float:
        return 3600 / self.per_hour if self.per_hour else math.inf


@frozen
class SaveBytes:
    """Bytes of a checkpoint: in all, and the most of a rank, a process and a host."""

    checkpoint: float
    rank: float
    process: float  # The most of one process: one for each rank, but one for all chips of a TPU host.
    host: float


@frozen
class Saves:
    """The checkpoints of a run: their size, their interval, and the time they take."""

    checkpoint_bytes: float  # Tables and dense layers, with their optimizer state.
    host_bytes: float  # The largest part of a checkpoint that one host writes.
    pause_s: float  # Seconds for which a save pauses training.
    write_s: float  # Seconds from the beginning of a save to its commit.
    load_s: float  # Seconds of loading at a restart.
    every_steps: int  # Steps between two saves; 0 if the run saves only at its end.
    every_s: float  # Seconds of training between two saves; 0 if the run saves only at its end.
    why: str
    fits_notice: bool  # A step and a save fit between a notice and the end, so that nothing is lost.
    lost_each_s: float
    """Seconds of training that a failure is expected to lose: half an interval, and the time a save takes to write."""
    num_saves: int  # Number of saves before the one at the end.
    has_last: bool

    @property
    def total_s(self) -> float:
        """Seconds that the run waits for saves: their pauses, and all of the last one."""
        return self.num_saves * self.pause_s + (self.write_s if self.has_last else 0.0)


def checkpoint_bytes(spec: RunSpec) -> float:
    """Return the size of a complete checkpoint, except for a few kB of small files."""
    return all_table_bytes(spec) + _dense_bytes(spec)


def save_bytes(prediction: Prediction) -> SaveBytes:
    """Return what each writes, by where the tables are; rank 0 writes the dense layers and data-parallel tables."""
    placement, setup = prediction.placement, prediction.setup
    if placement is None:
        raise ValueError("what does not fit saves nothing")
    by_rank = [0.0] * placement.num_ranks
    for shard in placement.shards:
        if not shard.rank or placement.shardings.get(shard.table) != "data_parallel":
            by_rank[shard.rank] += shard_bytes(shard, setup.spec)
    by_rank[0] += _dense_bytes(setup.spec)
    each = setup.machine.gpus_per_host
    host = max(sum(by_rank[i : i + each]) for i in range(0, len(by_rank), each))
    return SaveBytes(sum(by_rank), max(by_rank), host if setup.machine.gpu.kind == "tpu" else max(by_rank), host)


def saves_of(prediction: Prediction, num_steps: int, failures: Failures, written: SaveBytes | None = None) -> Saves:
    """Return the saves of a prediction that fits. `written`: its `save_bytes`, where they are known already."""
    step, setup = prediction.step, prediction.setup
    if step is None:
        raise ValueError("what does not fit saves nothing")
    written = written or save_bytes(prediction)
    spec, machine = setup.spec, setup.machine
    network_gbit = machine.network_gbit_per_s or COST["unknown_network_gbit_per_s"]
    host_rate = network_gbit / 8 * COST["network_share"] * 1e9
    write_s = max(written.process / (COST["write_gbyte_per_s"] * 1e9), written.host / host_rate) + COST["commit_s"]
    load_s = max(written.process / (COST["load_gbyte_per_s"] * 1e9), written.host / host_rate)
    bus = (machine.gpu.pcie_gbyte_per_s or 2 * COST["unknown_bus_gbyte_per_s"]) / 2 * COST["copy_share"] * 1e9
    pause_s = written.rank / bus if spec.store.in_background else write_s
    write_s = max(write_s, pause_s)
    every_steps, why = _interval(spec, pause_s, write_s, step.total_s, failures)
    every_s, train_s = every_steps * step.total_s, num_steps * step.total_s
    fits_notice = failures.has_notice and step.total_s + write_s <= failures.grace_s
    lost_s = every_s / 2 + write_s - pause_s if every_steps else train_s / 2
    return Saves(
        written.checkpoint, written.host, pause_s, write_s, load_s, every_steps, every_s, why, fits_notice,
        lost_each_s=0.0 if fits_notice else min(lost_s, train_s / 2),
        num_saves=(num_steps - 1) // every_steps if every_steps else 0, has_last=spec.store.checkpoint_at_end
    )


def _interval(spec: RunSpec, pause_s: float, write_s: float, step_s: float, failures: Failures) -> tuple[int, str]:
    best = steps_between_saves(pause_s, write_s, step_s, failures.mtbf_s, failures.grace_s)
    every = spec.store.checkpoint_every
    if every == "auto":
        return best.every_steps, best.why
    if every == 0:
        return 0, f"store.checkpoint_every = 0 saves nothing before the end; best would be {best.why}"
    return every, f"store.checkpoint_every = {every}; best would be {best.why}"


def _dense_bytes(spec: RunSpec) -> float:
    return dense_work_of(spec.model).num_values * 4 * (1 + DENSE_STATES[spec.train.dense_optimizer])


@frozen
class StartUp:
    """Seconds from the first that is paid to the first step."""

    boot_s: float
    image_s: float
    rendezvous_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        return self.boot_s + self.image_s + self.rendezvous_s + self.first_step_s


@frozen
class RunTime:
    """Expected seconds of the run."""

    start: StartUp
    train_s: float
    eval_s: float
    save_s: float  # Pauses, and the wait for the last save.
    num_interruptions: float  # Expected number; less than one for most short runs.
    lost_s: float  # Seconds of training that are repeated after interruptions.
    restart_s: float  # Booting, loading and compiling again, all restarts together.
    waiting_s: float  # Waiting for replacements; the lost machine is not paid for.
    epoch_s: float  # Seconds of training in one epoch, without saves and evaluations.

    @property
    def total_s(self) -> float:
        return (self.start.total_s + self.train_s + self.eval_s + self.save_s + self.lost_s + self.restart_s
                + self.waiting_s)


@frozen
class Bill:
    """The run, paid one way. None is an unknown price, never a price of zero."""

    purchase: Purchase
    usd_per_hour: float | None  # Price of all machines together.
    time: RunTime | None  # None if interruptions undo more than is trained between them.
    saves: Saves
    failures: Failures
    machines_usd: float | None
    storage_usd: float | None  # Data and kept checkpoints, for as long as the run takes.
    missing: str  # Why there is no total; empty where there is.

    @property
    def total_usd(self) -> float | None:
        """Dollars of machines, and of storage where its price is known."""
        return None if self.machines_usd is None else self.machines_usd + (self.storage_usd or 0.0)

    @property
    def epoch_usd(self) -> float | None:
        """Dollars of one epoch among many: without the start and the last save, with its share of all else."""
        if self.usd_per_hour is None or self.time is None:
            return None
        last_s = self.saves.write_s if self.saves.has_last else 0.0
        running_s = self.time.total_s - self.time.start.total_s - last_s
        return self.usd_per_hour * running_s / 3600 * self.time.epoch_s / self.time.train_s


def bills(
    prediction: Prediction, workload: Workload, price: Price | None, failures: Mapping[Purchase, Failures]
) -> dict[Purchase, Bill]:
    """Return a bill for each way to pay in `failures`, without storage."""
    written = save_bytes(prediction)
    return {purchase: bill(prediction, workload, purchase, price, of_purchase, written)
            for purchase, of_purchase in failures.items()}


def bill(
    prediction: Prediction, workload: Workload, purchase: Purchase, price: Price | None, failures: Failures,
    written: SaveBytes | None = None
) -> Bill:
    """Return what the run costs without storage. `prediction` must fit."""
    saves = saves_of(prediction, workload.num_steps, failures, written)
    time = run_time(prediction, workload, saves, failures)
    num_nodes = prediction.setup.num_nodes
    rate = hourly_usd(price, purchase)
    missing = ""
    if time is None:
        missing = f"interrupted every {failures.mtbf_s / 3600:.2g} h, the run would never end"
    elif rate is None:
        where = f" in {price.region}" if price is not None else ""
        missing = f"no price {PURCHASE_NAMES[purchase]} known{where}"
    machines_usd = None
    if time is not None and rate is not None:
        hours = (num_nodes * time.total_s - time.waiting_s) / 3600
        if purchase == "block":
            hours = num_nodes * math.ceil(time.total_s / 3600 / COST["block_h"]) * COST["block_h"]
        machines_usd = rate * hours
    usd_per_hour = None if rate is None else rate * num_nodes
    return Bill(purchase, usd_per_hour, time, saves, failures, machines_usd, None, missing)


def add_storage(paid: Bill, usd_per_month: float, before_s: float = 0.0) -> Bill:
    """Add what storage costs while the run lasts, and before it, while it is filled."""
    if paid.time is None:
        return paid
    hours = (before_s + paid.time.total_s) / 3600
    return replace(paid, storage_usd=usd_per_month * hours / COST["hours_per_month"])


def run_time(prediction: Prediction, workload: Workload, saves: Saves, failures: Failures) -> RunTime | None:
    """Return the time of the complete run; None where it would never end."""
    if prediction.step is None:
        raise ValueError("what does not fit takes no time")
    step_s, setup = prediction.step.total_s, prediction.setup
    num_hosts = setup.num_nodes * setup.machine.num_hosts
    rendezvous_s = COST["rendezvous_s_per_rank"] * setup.num_ranks + (COST["rendezvous_s"] if num_hosts > 1 else 0.0)
    is_tpu = setup.machine.gpu.kind == "tpu"
    start = StartUp(COST["boot_s"], COST["image_s"], rendezvous_s,
                    COST["tpu_first_step_s" if is_tpu else "first_step_s"])
    train_s = workload.num_steps * step_s
    eval_s = workload.eval_steps * step_s * COST["eval_share"]
    once_s = start.total_s + train_s + eval_s + saves.total_s
    restart_s = COST["boot_s"] + COST["image_s"] + rendezvous_s + COST["resumed_step_s"] + saves.load_s
    if saves.fits_notice:
        restart_s += saves.write_s  # the save that the notice leaves time for
    # Interruptions come in what they themselves prolong: n = rate * (once + n * each).
    each_s = saves.lost_each_s + restart_s + COST["replacement_s"]
    share = failures.per_hour / 3600 * each_s
    if share >= 1:
        return None
    num = failures.per_hour / 3600 * once_s / (1 - share)
    return RunTime(start, train_s, eval_s, saves.total_s, num, num * saves.lost_each_s, num * restart_s,
                   num * COST["replacement_s"], workload.steps_per_epoch * step_s)


def failures_of(catalog: Catalog, machine: Machine, num_nodes: int, region: str, purchase: Purchase, *,
                failure_hours: float | None = None, grace_s: float | None = None) -> Failures:
    """Return what interrupts a run. `failure_hours` between failures of the run, given in the spec, take precedence."""
    if failure_hours is not None:
        per_hour, why = 1 / failure_hours, f"store.hours_between_failures = {failure_hours:g}"
    elif purchase == "spot":
        rate = catalog.interruptions(machine, region)
        per_hour = rate.per_hour * num_nodes
        confidence = "" if rate.origin.is_confirmed else ", an assumption"
        why = f"spot reclaims a machine every {1 / rate.per_hour:,.0f} h ({rate.origin.source}{confidence})"
    else:
        gpu_hours = COST["gpu_hours_between_failures"]
        per_hour = machine.num_gpus * num_nodes / gpu_hours
        why = f"one accelerator or its host fails every {gpu_hours:,.0f} h"
    return Failures(per_hour, grace_s or POD_GRACE_S[machine.cloud], purchase == "spot", why)

"""Hours and dollars of a run, part by part, for each way to pay."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from embark.catalog import Catalog, Machine, Price
from embark.catalog.grace_periods import POD_GRACE_S
from embark.catalog.pricing import PURCHASE_NAMES, Purchase, hourly_usd
from embark.plan.prediction import Prediction
from embark.plan.saves import Failures, SaveBytes, Saves, save_bytes, saves_of
from embark.plan.workload import Workload

BOOT_S = 120.0
"""From a machine's first paid second to a node that takes work: kernel, driver, kubelet. Clouds take 1 to 3 minutes."""
IMAGE_S = 60.0
"""An image with torch and CUDA is about 5 GB compressed, and is unpacked at about 100 MB/s."""
FIRST_STEP_S = 23.0
"""From the command to the first step: torch is loaded, kernels are compiled. Measured on an H200's host."""
TPU_FIRST_STEP_S = 90.0
"""The same on TPUs: their compiler worked for 30 to 90 s and more on steps like those of bench/tpu_memory.csv."""
RESUMED_STEP_S = 17.0
"""The same where the run's kernels are compiled already."""
RENDEZVOUS_S = 10.0
"""Hosts find each other and set their channels up; an assumption, as the next is."""
RENDEZVOUS_S_PER_RANK = 0.03
REPLACEMENT_S = 180.0
"""Until a machine is there for one that went. That one is not paid meanwhile, the others are."""
EVAL_SHARE = 0.4
"""Of a training step's time that a batch of an evaluation takes: forward only, and not captured."""
GPU_HOURS_BETWEEN_FAILURES = 50_700.0
"""419 unexpected interruptions in 54 days of 16,384 H100s: Llama Team, "The Llama 3 Herd of Models", 2024, table 5."""
BLOCK_H = 24.0
"""Blocks booked ahead are sold by whole days."""
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class StartUp:
    """From the first paid second to the first step."""

    boot_s: float
    image_s: float
    rendezvous_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        return self.boot_s + self.image_s + self.rendezvous_s + self.first_step_s


@dataclass(frozen=True, slots=True)
class RunTime:
    """Seconds of the whole run, as expected."""

    start: StartUp
    train_s: float
    eval_s: float
    save_s: float
    """Pauses, and the wait for the last save."""
    num_interruptions: float
    """Expected; less than one for most short runs."""
    lost_s: float
    """Training that is done again."""
    restart_s: float
    """Booting, loading and compiling again, all restarts together."""
    waiting_s: float
    """For replacements; the machine that went is not paid."""
    epoch_s: float
    """Training alone, of one epoch."""

    @property
    def total_s(self) -> float:
        return (self.start.total_s + self.train_s + self.eval_s + self.save_s + self.lost_s + self.restart_s
                + self.waiting_s)


@dataclass(frozen=True, slots=True)
class Bill:
    """The whole run, paid one way. None is a price that is not known, never nothing to pay."""

    purchase: Purchase
    usd_per_hour: float | None
    """Of all machines together."""
    time: RunTime | None
    """None: interruptions undo more than is trained between them."""
    saves: Saves
    failures: Failures
    machines_usd: float | None
    storage_usd: float | None
    """Data and kept checkpoints, for as long as the run takes."""
    missing: str
    """Why there is no total; empty where there is."""

    @property
    def total_usd(self) -> float | None:
        """Machines, and storage where its price is known."""
        return None if self.machines_usd is None else self.machines_usd + (self.storage_usd or 0.0)

    @property
    def epoch_usd(self) -> float | None:
        """Of one epoch among many: without the start and the last save, with its share of all else."""
        if self.usd_per_hour is None or self.time is None:
            return None
        last_s = self.saves.write_s if self.saves.has_last else 0.0
        running_s = self.time.total_s - self.time.start.total_s - last_s
        return self.usd_per_hour * running_s / 3600 * self.time.epoch_s / self.time.train_s


def bills(
    prediction: Prediction, workload: Workload, price: Price | None, failures: Mapping[Purchase, Failures]
) -> dict[Purchase, Bill]:
    """By each of `failures`' ways, storage not yet in it."""
    written = save_bytes(prediction)
    return {purchase: bill(prediction, workload, purchase, price, of_purchase, written)
            for purchase, of_purchase in failures.items()}


def bill(
    prediction: Prediction, workload: Workload, purchase: Purchase, price: Price | None, failures: Failures,
    written: SaveBytes | None = None,
) -> Bill:
    """What the run comes to, without storage. `prediction` must fit."""
    saves = saves_of(prediction, workload.num_steps, failures, written)
    time = run_time(prediction, workload, saves, failures)
    num_nodes = prediction.setup.num_nodes
    rate = hourly_usd(price, purchase)
    missing = ""
    if time is None:
        missing = f"interrupted every {failures.mtbf_s / 3600:.2g} h, it would never end"
    elif rate is None:
        where = f" in {price.region}" if price is not None else ""
        missing = f"no price {PURCHASE_NAMES[purchase]} known{where}"
    machines_usd = None
    if time is not None and rate is not None:
        hours = (num_nodes * time.total_s - time.waiting_s) / 3600
        if purchase == "block":
            hours = num_nodes * math.ceil(time.total_s / 3600 / BLOCK_H) * BLOCK_H
        machines_usd = rate * hours
    usd_per_hour = None if rate is None else rate * num_nodes
    return Bill(purchase, usd_per_hour, time, saves, failures, machines_usd, None, missing)


def add_storage(paid: Bill, usd_per_month: float) -> Bill:
    """The same with what storage costs while the run lasts."""
    if paid.time is None:
        return paid
    return replace(paid, storage_usd=usd_per_month * paid.time.total_s / 3600 / HOURS_PER_MONTH)


def run_time(
    prediction: Prediction, workload: Workload, saves: Saves, failures: Failures
) -> RunTime | None:
    """All of the run; None where it would never end."""
    if prediction.step is None:
        raise ValueError("what does not fit takes no time")
    step_s, setup = prediction.step.total_s, prediction.setup
    num_hosts = setup.num_nodes * setup.machine.num_hosts
    rendezvous_s = RENDEZVOUS_S_PER_RANK * setup.num_ranks + (RENDEZVOUS_S if num_hosts > 1 else 0.0)
    is_tpu = setup.machine.gpu.kind == "tpu"
    start = StartUp(BOOT_S, IMAGE_S, rendezvous_s, TPU_FIRST_STEP_S if is_tpu else FIRST_STEP_S)
    train_s = workload.num_steps * step_s
    eval_s = workload.eval_steps * step_s * EVAL_SHARE
    once_s = start.total_s + train_s + eval_s + saves.total_s
    restart_s = BOOT_S + IMAGE_S + rendezvous_s + RESUMED_STEP_S + saves.load_s
    if saves.fits_notice:
        restart_s += saves.write_s  # the save that the notice leaves time for
    # Interruptions come in what they themselves prolong: n = rate * (once + n * each).
    each_s = saves.lost_each_s + restart_s + REPLACEMENT_S
    share = failures.per_hour / 3600 * each_s
    if share >= 1:
        return None
    num = failures.per_hour / 3600 * once_s / (1 - share)
    return RunTime(start, train_s, eval_s, saves.total_s, num, num * saves.lost_each_s, num * restart_s,
                   num * REPLACEMENT_S, workload.steps_per_epoch * step_s)


def failures_of(catalog: Catalog, machine: Machine, num_nodes: int, region: str, purchase: Purchase, *,
                said_hours: float | None = None, said_grace_s: float | None = None) -> Failures:
    """What takes a run's machines away. `said_hours` between failures of the whole run, as the spec has them, win."""
    if said_hours is not None:
        per_hour, why = 1 / said_hours, f"store.hours_between_failures = {said_hours:g}"
    elif purchase == "spot":
        rate = catalog.interruptions(machine, region)
        per_hour = rate.per_hour * num_nodes
        confidence = "" if rate.origin.is_confirmed else ", an assumption"
        why = f"spot takes a machine back every {1 / rate.per_hour:,.0f} h ({rate.origin.source}{confidence})"
    else:
        num_gpus = machine.num_gpus * num_nodes
        per_hour = num_gpus / GPU_HOURS_BETWEEN_FAILURES
        why = f"an accelerator or its host fails every {GPU_HOURS_BETWEEN_FAILURES:,.0f} h of one"
    return Failures(per_hour, said_grace_s or POD_GRACE_S[machine.cloud], purchase == "spot", why)

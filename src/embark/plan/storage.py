"""What a run reads and writes each second, and which storage of the cloud gives it."""

import math
from dataclasses import replace
from typing import Literal

from embark.catalog import Catalog, Machine, Volume
from embark.formatting import format_bytes
from embark.store.checkpoint_interval import MAX_LOST_S
from embark.values import frozen
from .cost import COST, Failures, Saves
from .prediction import Prediction, Setup
from .workload import Workload

GIB, TIB = 1024**3, 1024**4
GIB_PER_TIB = 1024

Again = Literal["drawn", "memory", "disk", "storage"]


@frozen
class StorageNeed:
    """The size and rates of storage that the run needs at its full rate."""

    sample_bytes: float
    data_bytes: float  # Bytes of the stored samples; 0 for synthetic samples.
    kept_bytes: float  # Bytes of the kept checkpoints and of the one being written.
    samples_gbyte_per_s: float  # Rate at which all ranks together consume samples.
    file_gbyte_per_s: float  # Read rate of a file system, for all machines: each reads its own rows.
    object_gbyte_per_s: float
    """Read rate of an object store, for all machines: each fetches every file that contains rows of its share."""
    again: Again
    """Where an epoch after the first comes from: `drawn` as the first is, each machine's `memory`, its `disk`, or
    `storage` again."""
    reads_why: str
    write_gbyte_per_s: float
    """Rate that ends a save before the next begins, all machines together; a last one alone within ten minutes."""
    grace_gbyte_per_s: float | None
    """Rate that ends a save between a preemption's notice and the end; None where there is no notice."""
    num_hosts: int
    is_on_volume: bool  # Checkpoints are written to `place.volume`.

    @property
    def tib(self) -> float:
        """TiB that hold data and checkpoints."""
        return (self.data_bytes + self.kept_bytes) / TIB

    @property
    def object_gbyte_per_s_per_host(self) -> float:
        return self.object_gbyte_per_s / self.num_hosts


@frozen
class StorageOffer:
    """A volume, of the size that the run needs of it."""

    volume: Volume
    tib: float
    gbyte_per_s: float | None  # Read rate of the volume for all machines together.
    needed_gbyte_per_s: float  # Rate of reads and writes that the run needs.
    usd_per_month: float | None
    is_enough: bool
    why: str


def storage_need(prediction: Prediction, workload: Workload, saves: Saves, failures: Failures) -> StorageNeed:
    """Return what a prediction that fits needs of storage."""
    setup = prediction.setup
    place, store, num_hosts = setup.spec.place, setup.spec.store, setup.num_nodes * setup.machine.num_hosts
    rate = prediction.samples_per_s * workload.sample_bytes / 1e9
    read = rate if workload.is_stored else 0.0
    again, why = _again(prediction, workload)
    kept = store.keep_checkpoints + store.keep_best + (1 if saves.every_steps else 0)
    return StorageNeed(
        sample_bytes=workload.sample_bytes, data_bytes=workload.data_bytes if workload.is_stored else 0.0,
        kept_bytes=kept * saves.checkpoint_bytes, samples_gbyte_per_s=rate, file_gbyte_per_s=read,
        object_gbyte_per_s=read * fetches_per_file(workload, num_hosts), again=again, reads_why=why,
        write_gbyte_per_s=saves.checkpoint_bytes / max(saves.every_s or MAX_LOST_S, saves.write_s) / 1e9,
        grace_gbyte_per_s=saves.checkpoint_bytes / failures.grace_s / 1e9 if failures.has_notice else None,
        num_hosts=num_hosts, is_on_volume=bool(place.volume) and store.root.startswith(f"{place.volume_path}/")
    )


def fetches_per_file(workload: Workload, num_hosts: int) -> float:
    """Return how many hosts fetch a file of an object store.

    Its rows follow each other in the epoch's order, and a step deals them to the hosts in stretches of a batch's share
    each.
    """
    from embark.data.prepared.parts import PART_BYTES

    rows_per_file = PART_BYTES / workload.sample_bytes
    rows_per_host = workload.batch_size / num_hosts
    return min(float(num_hosts), rows_per_file / rows_per_host + 1)


def volume_offer(catalog: Catalog, setup: Setup, need: StorageNeed) -> StorageOffer | None:
    """Return `place.volume` in the size that `storage.sh` buys: large and fast enough for the data, and for checkpoints
    if they are written to it."""
    volume = catalog.volumes.get(setup.spec.place.volume)
    if volume is None or volume.cloud != setup.machine.cloud:
        return None
    if not need.is_on_volume:
        need = replace(need, kept_bytes=0.0, write_gbyte_per_s=0.0)
    return _offer(volume, setup.machine, need)


def wait_for_volume(prediction: Prediction, workload: Workload, need: StorageNeed, offer: StorageOffer) -> Prediction:
    """Return the prediction with steps that are as slow as the volume, in the epochs that are read from it."""
    step, rate = prediction.step, offer.gbyte_per_s
    if step is None or rate is None or not need.file_gbyte_per_s:
        return prediction
    read_s = workload.batch_size * need.sample_bytes / 1e9 / rate
    share = 1.0 if need.again == "storage" else min(1.0, 1 / workload.num_epochs)
    total_s = share * max(step.total_s, read_s) + (1 - share) * step.total_s
    bound_by = "storage" if read_s > step.total_s else step.bound_by
    return replace(prediction, step=replace(step, parts_s={**step.parts_s, "storage": read_s}, total_s=total_s,
                                            bound_by=bound_by))


def copy_s(need: StorageNeed, offer: StorageOffer) -> float:
    """Return the seconds of the copy that fills the volume before the machines start. FSx for Lustre fetches from the
    bucket what is read."""
    if offer.volume.cloud == "aws":
        return 0.0
    return need.data_bytes / 1e9 / min(COST["volume_copy_gbyte_per_s"], offer.gbyte_per_s or math.inf)


def storage_offers(catalog: Catalog, setup: Setup, need: StorageNeed) -> list[StorageOffer]:
    """Return every volume of the machine's cloud: those that are enough first, the cheapest of them before all."""
    found = [_offer(volume, setup.machine, need) for volume in catalog.volumes.values()
             if volume.cloud == setup.machine.cloud]
    return sorted(found, key=lambda o: (not o.is_enough, o.usd_per_month is None, o.usd_per_month or 0.0))


def best_offer(found: list[StorageOffer]) -> StorageOffer | None:
    """Return the cheapest that is enough and has a price, else one that is enough, else None."""
    return found[0] if found and found[0].is_enough else None


def _again(prediction: Prediction, workload: Workload) -> tuple[Again, str]:
    setup = prediction.setup
    data, machine = setup.spec.data, setup.machine
    each, held = f"samples of {workload.sample_bytes:.0f} bytes", format_bytes(workload.data_bytes)
    if not workload.is_stored:
        return "drawn", f"each machine generates its samples, nothing is read; prepared, they would be {each}"
    if data.kind == "columns":
        return "memory", f"{each}; each rank holds the complete file in memory"
    if "://" in data.path and not data.path.startswith("file://"):
        if workload.data_bytes <= data.cache_gb * 1e9:
            return "disk", f"{each}; data.cache_gb = {data.cache_gb:g} keeps all {held} on each machine's disk"
        disk = machine.local_disk_gb or 0.0
        advice = f"; the local disk of {disk:,.0f} GB would hold them" if workload.data_bytes <= disk * 1e9 else ""
        return "storage", (f"{each}; data.cache_gb = {data.cache_gb:g} is less than their {held}, so every epoch is "
                           f"fetched again{advice}")
    free = max(0.0, prediction.memory.host_limit - prediction.memory.host_total)
    if workload.data_bytes <= free:
        return "memory", f"{each}; all {held} fit in each machine's memory: only the first epoch is read from storage"
    return "storage", (f"{each}; {held} exceed the {free / GIB:,.0f} GiB of free memory of each machine: every epoch "
                       "is read from storage")


def _offer(volume: Volume, machine: Machine, need: StorageNeed) -> StorageOffer:
    host_rate = (machine.network_gbit_per_s or COST["unknown_network_gbit_per_s"]) / 8 * COST["network_share"]
    hosts_rate = host_rate * need.num_hosts
    is_object = volume.kind == "object"
    needed = need.write_gbyte_per_s + (need.object_gbyte_per_s if is_object else need.file_gbyte_per_s)
    tib, limit = need.tib, math.inf
    if is_object:
        if volume.limit_gbit_per_s is not None:
            of_limit = volume.limit_gbit_per_s / 8
            limit = of_limit * need.num_hosts if volume.limit_scope == "one machine" else of_limit
    elif volume.mbyte_per_s_per_tib is None:
        tib = volume.bought_gib(tib) / GIB_PER_TIB
        return StorageOffer(volume, tib, None, needed, volume.usd_per_month(tib), is_enough=False,
                     why="its speed is not known")
    else:
        tib = volume.bought_gib(max(tib, needed * 1000 / volume.mbyte_per_s_per_tib)) / GIB_PER_TIB
        limit = tib * volume.mbyte_per_s_per_tib / 1000
    rate = min(limit, hosts_rate)
    is_enough = needed <= rate * (1 + 1e-9) and tib * (1 + 1e-9) >= need.tib
    usd = volume.usd_per_month(tib)
    return StorageOffer(volume, tib, rate, needed, usd, is_enough, _why(volume, need, tib, rate, limit, is_enough, usd))


def _why(
    volume: Volume, need: StorageNeed, tib: float, rate: float, limit: float, is_enough: bool, usd: float | None
) -> str:
    if tib < need.tib * (1 - 1e-9):
        return f"holds at most {volume.max_tib:g} TiB"
    if not is_enough:
        return "the machines' network is too slow" if rate < limit else (
            f"at most {volume.limit_gbit_per_s:g} Gbit/s for {volume.limit_scope}" if volume.kind == "object"
            else f"at most {volume.max_tib:g} TiB")
    return "" if usd is not None else "its price is not known"


"""Finds machines and prices, or the nearest names."""

import math
from collections.abc import Sequence
from typing import Literal

from embark.errors import UserError, did_you_mean, near_names, nearest
from embark.values import frozen
from .machine import (
    CLOUDS,
    NUM_NEAR,
    Catalog,
    Interruption,
    Machine,
    Price,
    Volume,
    Zones,
    find_machine,
)
from .pricing import lowest_price

Sort = Literal["price", "memory", "name"]


@frozen
class MachineFilter:
    """The requirements for a machine to be listed."""

    words: tuple[str, ...] = ()  # Each found somewhere in its names, its cloud, its accelerator or its fabric.
    cloud: str = ""
    gpu: str = ""  # An accelerator's name, or its beginning: A100 is A100-80GB too.
    region: str = ""
    min_memory_gib: float = 0.0  # Accelerator memory of the complete machine.


@frozen
class MachineOffer:
    """A machine, and its price in one region, or its lowest anywhere."""

    machine: Machine
    price: Price | None


@frozen
class MachineDetails:
    """Everything about one machine: its prices in every region, or in one."""

    machine: Machine
    allocatable_gib: float | None
    allocatable_vcpus: float | None
    spot_interruptions: Interruption
    prices: tuple[Price, ...]
    zones: Zones | None  # None: not known.


@frozen
class VolumeOffer:
    """Storage, and how fast a given size of it reads and what it costs; None if there is no such size."""

    volume: Volume
    gbyte_per_s: float | None = None
    usd_per_month: float | None = None


def machine_details(catalog: Catalog, name: str, region: str) -> MachineDetails:
    machine = find_machine(catalog, name)
    prices = [price_in(catalog, machine, region)] if region else catalog.prices_of(machine)
    return MachineDetails(machine, machine.allocatable_gib, machine.allocatable_vcpus,
                          catalog.interruptions(machine, region), tuple(prices), catalog.zones_of(machine))


def list_volumes(catalog: Catalog, tib: float) -> list[VolumeOffer]:
    if not (tib >= 0 and math.isfinite(tib)):
        raise UserError("--tib must not be negative", "--tib 1.2")
    return [VolumeOffer(volume, volume.gbyte_per_s(tib), volume.usd_per_month(tib))
            if tib and volume.min_tib <= tib <= (volume.max_tib or tib) else VolumeOffer(volume)
            for volume in catalog.volumes.values()]


def find_volume(catalog: Catalog, name: str) -> Volume:
    if name not in catalog.volumes:
        raise UserError(f"{name!r}: no such volume", nearest(name, catalog.volumes))
    return catalog.volumes[name]


def price_in(catalog: Catalog, machine: Machine, region: str) -> Price:
    """Return the machine's price in a region that has it. What is not known is `None` in it."""
    price = catalog.prices.get((machine.name, region))
    if price is not None:
        return price
    regions = [price.region for price in catalog.prices_of(machine)]
    if not regions:
        raise UserError(f"{machine.name}: the catalog has no price of it in any region",
                        "import a price file that has one: embark catalog refresh FILE")
    raise UserError(f"{machine.name}: not offered in {region}", "regions that have it: " + ", ".join(regions))


def search_machines(catalog: Catalog, wanted: MachineFilter, sort: Sort = "name") -> list[MachineOffer]:
    """Return machines that have all that is wanted, each with its price in the region, or its lowest."""
    _check(catalog, wanted)
    found: list[MachineOffer] = []
    for machine in catalog.machines.values():
        if not _has(machine, wanted):
            continue
        if not wanted.region:
            found.append(MachineOffer(machine, lowest_price(catalog, machine, "on_demand")))
        elif (price := catalog.prices.get((machine.name, wanted.region))) is not None:
            found.append(MachineOffer(machine, price))
    if sort == "price":
        return sorted(found, key=lambda one: (one.price is None, *(_cost_order(one.price) if one.price else ())))
    if sort == "memory":
        return sorted(found, key=lambda one: one.machine.gpu_memory_gib)
    return found


def compare_machines(catalog: Catalog, names: Sequence[str], region: str = "") -> list[MachineOffer]:
    """Return machines side by side, in the given order. All wrong names are reported at once."""
    machines, wrong = [], []
    for name in names:
        try:
            machines.append(find_machine(catalog, name))
        except UserError as error:
            wrong.append(error)
    if wrong:
        raise UserError("\n".join(error.what for error in wrong), "\n       ".join(error.fix for error in wrong))
    return [MachineOffer(m, price_in(catalog, m, region) if region else lowest_price(catalog, m, "on_demand"))
            for m in machines]


def regions(catalog: Catalog) -> list[str]:
    return sorted({region for _, region in catalog.prices})


def _has(machine: Machine, wanted: MachineFilter) -> bool:
    text = " ".join((machine.name, *machine.also, machine.machine_type, machine.cloud, machine.gpu.name,
                     machine.gpu.kind, machine.fabric.name)).lower()
    return (
        all(word.lower() in text for word in wanted.words)
        and wanted.cloud in ("", machine.cloud)
        and machine.gpu.name.lower().startswith(wanted.gpu.lower())
        and machine.gpu_memory_gib >= wanted.min_memory_gib
    )


def _check(catalog: Catalog, wanted: MachineFilter) -> None:
    if wanted.cloud and wanted.cloud not in CLOUDS:
        raise UserError(f"{wanted.cloud!r}: no such cloud", nearest(wanted.cloud, CLOUDS))
    if not any(name.lower().startswith(wanted.gpu.lower()) for name in catalog.gpus):
        raise UserError(f"{wanted.gpu!r}: no such accelerator", nearest(wanted.gpu, catalog.gpus))
    if wanted.region and wanted.region not in regions(catalog):
        fix = (did_you_mean(near_names(wanted.region, regions(catalog), NUM_NEAR))
               or "embark catalog show MACHINE lists its regions")
        raise UserError(f"{wanted.region!r}: the catalog knows no such region", fix)


def _cost_order(price: Price) -> tuple[bool, float, float]:
    on_demand, spot = price.on_demand_usd_per_hour, price.spot_usd_per_hour
    return on_demand is None, on_demand or 0.0, spot if spot is not None else float("inf")

"""`embark catalog`: what the clouds offer, as a person and a program see it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from embark.catalog.load import clear_cache, load_catalog, prices_path
from embark.catalog.machine import Catalog, Machine, Origin, Price
from embark.catalog.refresh import PriceChange, refresh_prices
from embark.catalog.search import MachineFilter, Sort, compare_machines, find_machine, price_in, search_machines
from embark.cli.catalog_tables import GAP, fitting_table
from embark.cli.console import Console
from embark.errors import ExitCode, UserError
from embark.formatting import pluralize

UNKNOWN = "not known"
_MAX_SHOWN = 20

LIST_HEADINGS = {
    "machine": "machine", "cloud": "cloud", "gpu": "accelerator", "num_gpus": "num", "gpu_memory_gib": "its GiB",
    "vcpus": "vCPUs", "memory_gib": "RAM GiB", "fabric": "fabric", "fabric_gbit_per_s": "Gbit/s",
    "on_demand_usd_per_hour": "$/h", "spot_usd_per_hour": "spot $/h", "region": "in",
}
PEOPLE_LIST_HEADINGS = {
    "machine": "machine", "cloud": "cloud", "gpus": "accelerators", "gpu_memory_gib": "GiB", "vcpus": "vCPUs",
    "memory_gib": "RAM GiB", "fabric": "fabric", "fabric_gbit_per_s": "Gbit/s", "on_demand_usd_per_hour": "$/h",
    "spot_usd_per_hour": "spot $/h", "region": "in",
}
LIST_LEAVES_OUT = ("fabric", "cloud", "vcpus", "memory_gib", "fabric_gbit_per_s", "region")
PRICE_HEADINGS = {
    "region": "region", "on_demand_usd_per_hour": "on demand", "spot_usd_per_hour": "spot",
    "spot_saving": "saves", "commit_1y_usd_per_hour": "1 year", "commit_3y_usd_per_hour": "3 years",
    "block_usd_per_hour": "block", "date": "date", "confidence": "confidence", "source": "source",
}
PRICE_LEAVES_OUT = ("source", "date", "confidence", "spot_saving")
VOLUME_HEADINGS = {
    "volume": "volume", "cloud": "cloud", "kind": "kind", "mbyte_per_s_per_tib": "MB/s a TiB",
    "limit_gbit_per_s": "limit Gbit/s", "limit_scope": "for", "min_tib": "from TiB", "max_tib": "to TiB",
    "usd_per_gib_month": "$/GiB month", "price_region": "in", "date": "date", "confidence": "confidence",
    "price_confidence": "of its price",
}
VOLUME_LEAVES_OUT = (
    "kind", "limit_scope", "date", "cloud", "max_tib", "confidence", "price_region", "price_confidence",
    "limit_gbit_per_s", "min_tib", "usd_per_gib_month", "mbyte_per_s_per_tib",
)


def list_machines(console: Console, wanted: MachineFilter, sort: Sort) -> ExitCode:
    """Machines that have what is wanted, each with its price in the region or its lowest anywhere."""
    found = search_machines(load_catalog(), wanted, sort)
    rows = [_row(machine, price) for machine, price in found]
    if console.json:
        console.table(rows, LIST_HEADINGS)
        return ExitCode.DONE
    for (machine, _), row in zip(found, rows, strict=True):
        row |= {"machine": _short(machine), "gpus": f"{machine.num_gpus} x {machine.gpu.name}"}
    fitting_table(console, rows, PEOPLE_LIST_HEADINGS, LIST_LEAVES_OUT)
    unpriced = [machine.name for machine, price in found if price is None]
    if unpriced:
        console.text(f"\nno price known: {', '.join(unpriced)}", style="dim")
    booked = [_short(machine) for machine, price in found if price is not None and not machine.is_on_demand]
    if booked:
        console.text(f"\nnot sold on demand, $/h is the list price if any: {', '.join(booked)}", style="dim")
    if found and not wanted.region:
        console.text("\nprices are the lowest on demand anywhere; --region asks for one region", style="dim")
    return ExitCode.DONE


def show_machine(console: Console, name: str, region: str) -> ExitCode:
    """Everything about one machine, and its price in every region or in one."""
    catalog = load_catalog()
    machine = find_machine(catalog, name)
    prices = [price_in(catalog, machine, region)] if region else catalog.prices_of(machine)
    if console.json:
        console.data({**asdict(machine), "allocatable_gib": machine.allocatable_gib,
                      "allocatable_vcpus": machine.allocatable_vcpus, "gpu_memory_gib": machine.gpu_memory_gib,
                      "link_gbyte_per_s": machine.link_gbyte_per_s, "is_confirmed": machine.is_confirmed,
                      "spot_interruptions": asdict(catalog.interruptions(machine, region)),
                      "prices": [_price_row(price) for price in prices]})
        return ExitCode.DONE
    facts = _facts(catalog, machine) | _spot_facts(catalog, machine, region)
    console.table([{"what": what, "is": value} for what, value in facts.items()], {"what": "", "is": machine.name})
    if prices:
        console.text("\ndollars an hour", style="dim")
        rows = [_price_row(price) for price in prices]
        empty = tuple(key for key in ("commit_1y_usd_per_hour", "commit_3y_usd_per_hour", "block_usd_per_hour")
                      if all(row[key] is None for row in rows))
        fitting_table(console, rows, {key: PRICE_HEADINGS[key] for key in PRICE_HEADINGS if key not in empty},
                      PRICE_LEAVES_OUT)
        _say_sources(console, catalog, prices)
    _say_missing(console, machine, prices, region)
    return ExitCode.DONE


def show_comparison(console: Console, names: Sequence[str], region: str) -> ExitCode:
    """Machines side by side, a column each."""
    if len(names) < 2:
        raise UserError("one machine alone cannot be compared", fix=f"embark catalog show {names[0]}" if names else
                        "embark catalog compare p4d.24xlarge a2-highgpu-8g")
    catalog = load_catalog()
    pairs = compare_machines(catalog, names, region)
    if console.json:
        console.table([_row(machine, price) | _ratios(machine, price) for machine, price in pairs])
        return ExitCode.DONE
    columns = {_short(machine): _in_short(machine) | _price_facts(machine, price) |
               {"interruptions a day": f"{24 * catalog.interruptions(machine, region).per_hour:.2g}"}
               for machine, price in pairs}
    whats = list(next(iter(columns.values())))
    for number, names_here in enumerate(_that_fit(console, columns)):
        if number:
            console.text("")
        console.table([{"": what} | {name: columns[name][what] for name in names_here} for what in whats],
                      {name: name for name in ("", *names_here)})
    console.text("\na figure with ? is not confirmed; `embark catalog show NAME` says where each is from", style="dim")
    return ExitCode.DONE


def list_volumes(console: Console, tib: float) -> ExitCode:
    """Storage; with a size, how fast so much of it reads and what it costs."""
    if not (tib >= 0 and math.isfinite(tib)):
        raise UserError(f"--tib {tib:g} is no size", fix="--tib 1.2")
    rows: list[dict[str, object]] = []
    for volume in load_catalog().volumes.values():
        row: dict[str, object] = {"volume": volume.name, **asdict(volume), "date": volume.origin.date,
                                  "confidence": volume.origin.confidence,
                                  "price_confidence": volume.usd_per_gib_month and volume.price_origin.confidence}
        if tib:
            fits = tib >= (volume.min_tib or 0) and tib <= (volume.max_tib or tib)
            row |= {"gbyte_per_s": volume.gbyte_per_s(tib) if fits else None,
                    "usd_per_month": volume.usd_per_month(tib) if fits else None}
        rows.append(row)
    headings = VOLUME_HEADINGS | {"gbyte_per_s": f"GB/s of {tib:g} TiB", "usd_per_month": "$ a month"}
    fitting_table(console, rows, {key: heading for key, heading in headings.items() if key in rows[0]},
                  VOLUME_LEAVES_OUT)
    doubted = [volume.name for volume in load_catalog().volumes.values() if not volume.price_origin.is_confirmed]
    console.text(f"\nnot confirmed, the price at least: {', '.join(doubted)}", style="dim")
    return ExitCode.DONE


def take_in(console: Console, file: Path) -> ExitCode:
    """A newer price file. A mistake anywhere in it changes nothing."""
    from embark.store import write_atomic

    stored = prices_path()
    done = refresh_prices(load_catalog(), file, stored, datetime.date.today())
    if done.changes or done.num_same:
        try:
            write_atomic(stored, done.text)
        except OSError as error:
            raise UserError(f"{stored}: {error.strerror}", fix="XDG_DATA_HOME names another folder") from error
        clear_cache()
    rows = [_change_row(change) for change in done.changes]
    console.data({"path": str(stored), "changes": rows, "num_same": done.num_same, "num_older": done.num_older})
    if console.json:
        return ExitCode.DONE
    if rows and not console.quiet:
        console.table(rows[:_MAX_SHOWN])
        console.text(f"… and {len(rows) - _MAX_SHOWN} more" if len(rows) > _MAX_SHOWN else "")
    if done.num_older:
        console.warning(f"rows older than what the catalog has, left out: {done.num_older:,}")
    if not rows:
        console.result("no price changed")
    else:
        console.result(f"{pluralize(len(rows), 'price')} changed, {done.num_same:,} as before; kept in {stored}")
    return ExitCode.DONE


def _row(machine: Machine, price: Price | None) -> dict[str, object]:
    return {
        "machine": machine.name, "cloud": machine.cloud, "gpu": machine.gpu.name, "num_gpus": machine.num_gpus,
        "gpu_memory_gib": round(machine.gpu_memory_gib, 1), "vcpus": machine.vcpus, "memory_gib": machine.memory_gib,
        "fabric": machine.fabric.name, "fabric_gbit_per_s": machine.fabric_gbit_per_s,
        "on_demand_usd_per_hour": price and price.on_demand_usd_per_hour,
        "spot_usd_per_hour": price and price.spot_usd_per_hour, "region": price and price.region,
    }


def _price_row(price: Price) -> dict[str, object]:
    saving = price.spot_saving
    return {
        "region": price.region, "on_demand_usd_per_hour": price.on_demand_usd_per_hour,
        "spot_usd_per_hour": price.spot_usd_per_hour, "spot_saving": None if saving is None else f"{saving:.0%}",
        "commit_1y_usd_per_hour": price.committed_usd_per_hour(1),
        "commit_3y_usd_per_hour": price.committed_usd_per_hour(3),
        "block_usd_per_hour": price.block_usd_per_hour, "date": price.origin.date,
        "confidence": price.origin.confidence, "source": price.origin.source,
    }


def _change_row(change: PriceChange) -> dict[str, object]:
    old = change.old
    return {
        "machine": change.machine, "region": change.region,
        "was_usd_per_hour": old and old.on_demand_usd_per_hour, "is_usd_per_hour": change.new.on_demand_usd_per_hour,
        "spot_was_usd_per_hour": old and old.spot_usd_per_hour, "spot_is_usd_per_hour": change.new.spot_usd_per_hour,
        "date": change.new.origin.date,
    }


def _in_short(machine: Machine) -> dict[str, str]:
    """What fits a narrow column; a question mark where it is not confirmed."""
    gpu, own, cards = machine.gpu, machine.origin, machine.gpu.origin
    link = f"{machine.link}, {_bare(machine.link_gbyte_per_s, cards)}" if machine.link else "one alone"
    return {
        "accelerators": f"{machine.num_gpus} x {gpu.name}",
        "hosts": str(machine.num_hosts),
        "GiB each, in all": f"{gpu.memory_gib:,.4g}, {machine.gpu_memory_gib:,.0f}",
        "memory GB/s each": _bare(gpu.hbm_gbyte_per_s, cards),
        "bf16 TFLOP/s each": _bare(gpu.bf16_tflops, cards),
        "fp32 TFLOP/s each": _bare(gpu.fp32_tflops, cards),
        "joined by, GB/s": link,
        "vCPUs a host": _bare(machine.vcpus, own),
        "RAM GiB a host": _bare(machine.memory_gib, own),
        "RAM for pods": _bare(machine.allocatable_gib, own),
        "network Gbit/s": _bare(machine.network_gbit_per_s, own),
        "fabric": machine.fabric.name,
        "fabric Gbit/s": _bare(machine.fabric_gbit_per_s, own),
        "local disk GB": _bare(machine.local_disk_gb, own),
        "sold on demand": "yes" if machine.is_on_demand else "no",
    }


def _facts(catalog: Catalog, machine: Machine) -> dict[str, str]:
    """A machine in words, in the order one asks."""
    gpu, fabric, quota = machine.gpu, machine.fabric, machine.quota
    hosts = f" on {pluralize(machine.num_hosts, 'host')}" if machine.num_hosts > 1 else ""
    each = " a host" if machine.num_hosts > 1 else ""
    rates = ", ".join(f"{name} {rate:g}" for name, rate in (
        ("bf16", gpu.bf16_tflops), ("fp16", gpu.fp16_tflops), ("tf32", gpu.tf32_tflops), ("fp32", gpu.fp32_tflops),
    ) if rate is not None)
    devices = f", {machine.num_fabric_devices} x {fabric.kubernetes_resource}" if (
        machine.num_fabric_devices and fabric.kubernetes_resource) else ""
    link = f"{machine.link}, {_known(machine.link_gbyte_per_s, 'GB/s both ways')}" if machine.link else "one alone"
    bound = ", at most" if machine.reserve.seen_share is None else ""
    return {
        "cloud": machine.cloud,
        "machine type": machine.machine_type or UNKNOWN,
        "accelerators": f"{machine.num_gpus} x {gpu.name}{hosts}",
        "their memory": f"{gpu.memory_gib:,.4g} GiB each, {machine.gpu_memory_gib:,.0f} GiB in all",
        "memory bandwidth": _known(gpu.hbm_gbyte_per_s, "GB/s each"),
        "dense TFLOP/s": rates or UNKNOWN,
        "joined by": link,
        "vCPUs": _known(machine.vcpus, each.strip()),
        "memory": _known(machine.memory_gib, f"GiB{each}"),
        "for pods": f"{_known(machine.allocatable_vcpus, 'vCPUs')}, {_known(machine.allocatable_gib, 'GiB')}{bound}",
        "network": _known(machine.network_gbit_per_s, f"Gbit/s{each}"),
        "fabric": f"{fabric.title}, {_known(machine.fabric_gbit_per_s, 'Gbit/s')}{devices}",
        "local disk": "none" if machine.local_disk_gb == 0 else _known(machine.local_disk_gb, f"GB{each}"),
        "quota": _quota_words(quota.on_demand, quota.on_demand_code, quota.unit) if quota else UNKNOWN,
        "quota for spot": _quota_words(quota.spot, quota.spot_code, quota.unit) if quota else UNKNOWN,
        "sold": ", ".join(machine.sold) or "on demand, spot",
        "source": _from(catalog, machine.origin),
        "of the accelerator": _from(catalog, gpu.origin),
        "of the fabric": _from(catalog, fabric.origin),
        "of the quota": _from(catalog, quota.origin) if quota else UNKNOWN,
    }


def _spot_facts(catalog: Catalog, machine: Machine, region: str) -> dict[str, str]:
    interruption = catalog.interruptions(machine, region)
    titles = [catalog.sources[name].title for name in interruption.origin.source.split("+")]
    return {"spot is lost": f"{24 * interruption.per_hour:.2g} times a day; {', '.join(titles)} "
                            f"({interruption.origin.date}, {interruption.origin.confidence})"}


def _price_facts(machine: Machine, price: Price | None) -> dict[str, str]:
    ratios = _ratios(machine, price)
    return {
        "on demand": _usd(price.on_demand_usd_per_hour) if price else UNKNOWN,
        "spot": _usd(price.spot_usd_per_hour) if price else UNKNOWN,
        "in": price.region if price else UNKNOWN,
        "1 year committed": _usd(price.committed_usd_per_hour(1)) if price else UNKNOWN,
        "3 years committed": _usd(price.committed_usd_per_hour(3)) if price else UNKNOWN,
        "each accelerator": _usd(ratios["usd_per_gpu_hour"]),
        "each TiB of theirs": _usd(ratios["usd_per_gpu_tib_hour"]),
    }


def _ratios(machine: Machine, price: Price | None) -> dict[str, float | None]:
    usd = price.on_demand_usd_per_hour if price else None
    return {"usd_per_gpu_hour": None if usd is None else usd / machine.num_gpus,
            "usd_per_gpu_tib_hour": None if usd is None else usd * 1024 / machine.gpu_memory_gib}


def _say_sources(console: Console, catalog: Catalog, prices: Sequence[Price]) -> None:
    origins = dict.fromkeys((price.origin.source, price.origin.confidence) for price in prices)
    for source, confidence in origins:
        titles = [catalog.sources[name].title if name in catalog.sources else name for name in source.split("+")]
        console.text(f"{confidence}: {'; '.join(titles)}", style="dim")


def _say_missing(console: Console, machine: Machine, prices: Sequence[Price], region: str) -> None:
    """A price that is not there is said, and is no fault."""
    if not prices:
        console.result(f"{machine.name}: no price known in any region; embark catalog refresh FILE takes one in")
    elif all(price.on_demand_usd_per_hour is None for price in prices):
        console.result(f"{machine.name}: no price on demand known{f' in {region}' if region else ''}")
    elif region and prices[0].spot_usd_per_hour is None:
        console.result(f"{machine.name}: no spot price known in {region}")


def _from(catalog: Catalog, origin: Origin) -> str:
    return f"{', '.join(catalog.urls(origin.source))} ({origin.date}, {origin.confidence})"


def _short(machine: Machine) -> str:
    """Azure puts Standard_ before every name; people leave it out."""
    return machine.name.removeprefix("Standard_")


def _that_fit(console: Console, columns: dict[str, dict[str, str]]) -> list[list[str]]:
    """Machines in as many groups as there must be for each to fit the terminal."""
    labels = max(len(what) for what in next(iter(columns.values()))) + GAP
    groups: list[list[str]] = [[]]
    used = labels
    for name, facts in columns.items():
        wide = max(len(name), *(len(value) for value in facts.values())) + GAP
        if groups[-1] and used + wide - GAP > console.out.width:
            groups.append([])
            used = labels
        groups[-1].append(name)
        used += wide
    return groups


def _bare(value: float | None, origin: Origin) -> str:
    doubt = "" if origin.is_confirmed else "?"
    return UNKNOWN if value is None else (f"{value:,.4g}" if value < 1000 else f"{value:,.0f}") + doubt


def _known(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:,.5g} {unit}".rstrip() if value < 1e5 else f"{value:,.0f} {unit}"


def _usd(value: float | None) -> str:
    return UNKNOWN if value is None else f"${value:,.2f}/h"


def _quota_words(name: str, code: str, unit: str) -> str:
    return f"{name}{f' ({code})' if code else ''}, in {unit}s" if name else UNKNOWN

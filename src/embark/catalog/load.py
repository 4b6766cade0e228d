"""Reads the catalog's files, checks all of it, and names every mistake at once, with its file and line."""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from embark.catalog.machine import (
    CLOUDS,
    LINKS,
    SALE_MODES,
    Catalog,
    Fabric,
    Gpu,
    Interruption,
    Machine,
    Origin,
    Price,
    Quota,
    Reserve,
    Source,
    Volume,
)
from embark.catalog.rows import CatalogError, Row, csv_rows, toml_rows
from embark.errors import Mistake, UserError, nearest

HERE = Path(__file__).parent
MACHINE_COLUMNS = (
    "name", "also", "cloud", "machine_type", "gpu", "num_gpus", "total_gpu_memory_gib", "num_hosts", "vcpus",
    "memory_gib", "link", "network_gbit_per_s", "fabric", "fabric_gbit_per_s", "num_fabric_devices", "local_disk_gb",
    "gke_accelerator", "quota", "sold", "source", "date", "confidence",
)
PRICE_COLUMNS = (
    "machine", "region", "on_demand_usd_per_hour", "spot_usd_per_hour", "commit_1y_discount", "commit_3y_discount",
    "source", "date", "confidence",
)
OPTIONAL_PRICE_COLUMNS = ("block_usd_per_hour",)
INTERRUPTION_COLUMNS = ("cloud", "machine", "region", "spot_interruptions_per_hour", "source", "date", "confidence")
MEMORY_RATIOS = (0.97, 1.08)
"""What a cloud publishes over what its cards hold: some write GB for GiB, 7 % more, and some leave out a little."""
REQUIRED_TEXTS = ("name", "title", "cloud", "kind", "transport", "unit", "url")
CHOICES: dict[tuple[type, str], tuple[str, ...]] = {
    (Gpu, "kind"): ("gpu", "tpu"), (Volume, "kind"): ("object", "file"), (Machine, "link"): LINKS,
    **{(kind, "cloud"): CLOUDS for kind in (Fabric, Machine, Quota, Volume)},
}

T = TypeVar("T")


def load_catalog() -> Catalog:
    """The shipped catalog, with newer prices where the user has taken some in."""
    return _load(prices_path())


@cache
def _load(newer: Path) -> Catalog:
    return read_catalog(HERE, newer if newer.exists() else None)


def prices_path() -> Path:
    """Where `embark catalog refresh` keeps what it took in."""
    home = os.environ.get("XDG_DATA_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "share"
    return base / "embark" / "prices.csv"


def clear_cache() -> None:
    """Read the files again at the next call."""
    _load.cache_clear()


def read_catalog(folder: Path, newer: Path | None = None) -> Catalog:
    """A folder of catalog files; `newer` is a price file whose rows go before those that are older."""
    mistakes: list[Mistake] = []
    try:
        catalog = _read(folder, mistakes)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}", fix="install Embark again") from error
    if mistakes:
        raise CatalogError("the catalog", mistakes)
    if newer is None:
        return catalog
    taken_in = read_prices(newer, catalog.machines, fix=f"remove {newer}, or take in a whole one")
    return replace(catalog, prices=merge_newest(catalog.prices, taken_in))


def read_prices(path: Path, machines: Collection[str], *, fix: str = "") -> dict[tuple[str, str], Price]:
    """A price file from outside: its sources may be any text."""
    mistakes: list[Mistake] = []
    try:
        rows = csv_rows(path, PRICE_COLUMNS, "machine", mistakes, OPTIONAL_PRICE_COLUMNS)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    prices = _prices(rows, machines, None)
    if mistakes:
        raise CatalogError(str(path), mistakes, fix=fix)
    return prices


def merge_newest(
    old: Mapping[tuple[str, str], Price], new: Mapping[tuple[str, str], Price]
) -> dict[tuple[str, str], Price]:
    """For each machine and region the row of the later date; of one date, the new one."""
    merged = dict(old)
    for place, price in new.items():
        if place not in merged or price.origin.date >= merged[place].origin.date:
            merged[place] = price
    return merged


def _read(folder: Path, mistakes: list[Mistake]) -> Catalog:
    sources = _read_toml(folder / "sources.toml", Source, mistakes)
    gpus = _read_toml(folder / "gpus.toml", Gpu, mistakes)
    fabrics = _read_toml(folder / "fabrics.toml", Fabric, mistakes)
    quotas = _read_toml(folder / "quotas.toml", Quota, mistakes)
    reserves = _read_toml(folder / "reserves.toml", Reserve, mistakes)
    volumes = _read_toml(folder / "volumes.toml", Volume, mistakes)
    machines: dict[str, Machine] = {}
    names: set[str] = set()
    rows = csv_rows(folder / "machines.csv", MACHINE_COLUMNS, "name", mistakes)
    for row in rows:
        machine = _machine(row, gpus, fabrics, quotas, reserves, sources)
        for name in (row.name, *row.texts("also")):
            if name.lower() in names:
                row.wrong("name", f"{name} stands twice")
            names.add(name.lower())
        if machine is not None:
            machines[machine.name] = machine
    # A machine that has a mistake is no unknown machine to its prices.
    known = [row.name for row in rows]
    prices = _prices(csv_rows(folder / "prices.csv", PRICE_COLUMNS, "machine", mistakes, OPTIONAL_PRICE_COLUMNS),
                     known, sources)
    interruptions = _interruptions(csv_rows(folder / "interruptions.csv", INTERRUPTION_COLUMNS, "cloud", mistakes),
                                   known, sources, mistakes)
    return Catalog(machines, gpus, fabrics, quotas, volumes, sources, prices, interruptions)


def _machine(
    row: Row, gpus: Mapping[str, Gpu], fabrics: Mapping[str, Fabric], quotas: Mapping[str, Quota],
    reserves: Mapping[str, Reserve], sources: Collection[str],
) -> Machine | None:
    named: dict[str, Any] = {
        "gpu": gpus.get(row.text("gpu", one_of=gpus)), "fabric": fabrics.get(row.text("fabric", one_of=fabrics)),
        "quota": quotas.get(row.text("quota", required=False, one_of=quotas)),
        "origin": row.origin(sources),
    }
    values = {name: _field(row, Machine, name, hint) for name, hint in get_type_hints(Machine).items()
              if name not in (*named, "reserve")}
    published_gib = row.number("total_gpu_memory_gib")
    named["reserve"] = reserves.get(values["cloud"])
    machine = Machine(**values, **named)
    num_gpus, num_hosts, gpu = machine.num_gpus, machine.num_hosts, machine.gpu
    for way in machine.sold:
        if way not in SALE_MODES:
            row.wrong("sold", f"{way} is no way to sell", nearest(way, SALE_MODES))
    if not num_gpus or not num_hosts:
        row.wrong("num_gpus" if not num_gpus else "num_hosts", "should be 1 or more")
        return None
    if num_gpus % num_hosts:
        row.wrong("num_hosts", f"does not divide {num_gpus} accelerators")
    if (num_gpus == 1) != (machine.link == ""):
        row.wrong("link", f"{num_gpus} accelerators: " + ("no link" if num_gpus == 1 else "what joins them?"))
    if None in (gpu, machine.fabric, machine.reserve):
        return None
    for what, held in (("fabric", machine.fabric), ("quota", machine.quota)):
        if held is not None and held.cloud != machine.cloud:
            row.wrong(what, f"is of {held.cloud}, the machine of {machine.cloud}")
    sum_gib = machine.gpu_memory_gib
    ratio = 1.0 if published_gib is None else published_gib / sum_gib
    if ratio < MEMORY_RATIOS[0] or ratio > MEMORY_RATIOS[1]:
        row.wrong("total_gpu_memory_gib", f"{num_gpus} x {gpu.memory_gib:g} GiB of {gpu.name} are {sum_gib:g}")
    return machine


def _prices(
    rows: Iterable[Row], machines: Collection[str], sources: Collection[str] | None
) -> dict[tuple[str, str], Price]:
    prices: dict[tuple[str, str], Price] = {}
    for row in rows:
        place = row.text("machine", one_of=machines), row.text("region")
        on_demand, spot = row.number("on_demand_usd_per_hour"), row.number("spot_usd_per_hour")
        price = Price(*place, on_demand, spot, row.number("commit_1y_discount", below=1),
                      row.number("commit_3y_discount", below=1), row.origin(sources), row.number("block_usd_per_hour"))
        if on_demand is not None and spot is not None and spot >= on_demand:
            row.wrong("spot_usd_per_hour", f"is not below on demand, {on_demand:g}",
                      "leave it empty where there is no spot offer")
        if place in prices:
            row.wrong("region", f"a second price for {place[0]} in {place[1]}")
        prices[place] = price
    return prices


def _interruptions(
    rows: Iterable[Row], machines: Collection[str], sources: Collection[str], mistakes: list[Mistake]
) -> dict[tuple[str, str, str], Interruption]:
    interruptions: dict[tuple[str, str, str], Interruption] = {}
    for row in rows:
        cloud, machine = row.text("cloud", one_of=CLOUDS), row.text("machine", required=False, one_of=machines)
        place = cloud, machine, row.text("region", required=False)
        if place in interruptions:
            row.wrong("machine", "a second rate for the same place")
        interruptions[place] = Interruption(row.needed("spot_interruptions_per_hour"), row.origin(sources))
    for cloud in CLOUDS:
        if (cloud, "", "") not in interruptions:
            mistakes.append(Mistake("interruptions.csv", cloud, "", "no rate for the cloud as a whole"))
    return interruptions


def _read_toml(path: Path, kind: type[T], mistakes: list[Mistake]) -> dict[str, T]:
    """Every table of a file, by name: each field is read as its type says."""
    found: dict[str, T] = {}
    for row in toml_rows(path, mistakes):
        value = kind(**{name: _field(row, kind, name, hint) for name, hint in get_type_hints(kind).items()})
        if isinstance(value, Gpu) and value.seen_mib is not None and value.seen_mib > value.memory_mib:
            row.wrong("seen_mib", f"is more than memory_mib, {value.memory_mib:g}")
        row.done()
        found[row.name] = value
    return found


def _field(row: Row, kind: type, name: str, hint: Any) -> Any:
    if (name == "name" and kind is not Machine) or (name == "cloud" and kind is Reserve):
        return row.name
    if hint is Origin:
        return row.origin(of="price_" if name == "price_origin" and row.has("price_source") else "")
    if hint is str:
        return row.text(name, required=name in REQUIRED_TEXTS, one_of=CHOICES.get((kind, name), ()))
    if hint == tuple[str, ...]:
        return row.texts(name)
    if hint == tuple[tuple[float, float], ...]:
        return row.steps(name)
    if hint in (int, int | None):
        return row.whole(name) or (0 if hint is int else None)
    return row.needed(name) if hint is float else row.number(
        name, zero=name == "local_disk_gb", below=1.001 if name == "seen_share" else math.inf)

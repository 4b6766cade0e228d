"""Reads the catalog's files, checks all of it, and names every mistake at once, with its file and line."""

import csv
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from embark.errors import Mistake, UserError, nearest

DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")
CONFIDENCES = ("read", "documented", "unconfirmed")
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


class CatalogError(UserError):
    """All the mistakes of a catalog's files, at once."""

    def __init__(self, what: str, mistakes: Sequence[Mistake], *, fix: str = "") -> None:
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        super().__init__(f"{count} in {what}\n" + "\n".join(f"  {m}" for m in self.mistakes), fix=fix)


class Row:
    """One row or table. What is wrong in it goes to `mistakes`, and the reader gets a harmless value instead."""

    def __init__(self, where: str, name: str, values: dict[str, Any], mistakes: list[Mistake]) -> None:
        self.where = where
        self.name = name
        self._values = values
        self._mistakes = mistakes
        self._fields_read: set[str] = set()

    def wrong(self, field: str, what: str, fix: str = "") -> None:
        value = self._values.get(field, "")
        self._mistakes.append(Mistake(self.where, f"{self.name} {field}".strip(), str(value), what, fix))

    def text(self, field: str, *, required: bool = True, one_of: Iterable[str] = ()) -> str:
        self._fields_read.add(field)
        value: object = self._values.get(field, "")
        choices = list(one_of)
        if not isinstance(value, str):
            self.wrong(field, "should be text")
            return ""
        if not value and required and "" not in choices:
            self.wrong(field, "is empty")
        elif choices and value and value not in choices:
            self.wrong(field, "no such name", nearest(value, (choice for choice in choices if choice)))
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A list in TOML, words in CSV."""
        self._fields_read.add(field)
        value = self._values.get(field, [])
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            self.wrong(field, "should be a list of texts")
            return ()
        return tuple(words)

    def number(self, field: str, *, zero: bool = False, below: float = math.inf) -> float | None:
        """A number above zero, or nothing where the field is empty."""
        self._fields_read.add(field)
        value = self._values.get(field, "")
        if value == "":
            return None
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self.wrong(field, "should be a number, or empty where it is not known")
            return None
        if number < 0 or (number == 0 and not zero):
            self.wrong(field, "should be more than 0, or empty where it is not known")
            return None
        if number >= below:
            self.wrong(field, f"should be less than {below:g}")
            return None
        return number

    def needed(self, field: str) -> float:
        """A number that must be there; where it is not, one that no later check finds fault with."""
        value = self.number(field)
        if value is None and self._values.get(field, "") == "":
            self.wrong(field, "is empty")
        return value if value is not None else math.nan

    def whole(self, field: str) -> int | None:
        value = self.number(field)
        if value is not None and value != int(value):
            self.wrong(field, "should be a whole number")
        return None if value is None else int(value)

    def steps(self, field: str) -> tuple[tuple[float, float], ...]:
        self._fields_read.add(field)
        value = self._values.get(field, [])
        try:
            steps = tuple((float(up_to), float(share)) for up_to, share in value)
        except (TypeError, ValueError):
            self.wrong(field, "should be a list of [up to, share]")
            return ()
        if list(steps) != sorted(steps) or not all(0 <= share < 1 for _, share in steps):
            self.wrong(field, "steps should rise, and shares lie between 0 and 1")
        return steps

    def origin(self, sources: Iterable[str] | None = None, of: str = "") -> Origin:
        """Source, date and confidence; with `sources`, only what is named there may be a source. `of`: a part's own."""
        source = self.text(of + "source")
        known = None if sources is None else set(sources)
        for part in source.split("+") if known is not None and source else ():
            if part not in (known or ()):
                self.wrong(of + "source", "not in sources.toml", nearest(part, known or ()))
        date = self.text(of + "date")
        if date and not DATE.fullmatch(date):
            self.wrong(of + "date", "should be a date such as 2026-11 or 2026-11-15")
        return Origin(source, date, self.text(of + "confidence", one_of=CONFIDENCES))

    def has(self, field: str) -> bool:
        return field in self._values

    def done(self) -> None:
        """What nobody asked for is a misspelt field."""
        for field in self._values:
            if field not in self._fields_read:
                self.wrong(field, "no such field", nearest(field, self._fields_read))


def toml_rows(path: Path, mistakes: list[Mistake]) -> list[Row]:
    """Every table of a TOML file."""
    text = path.read_text(encoding="utf-8")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        mistakes.append(Mistake(path.name, "", "", f"is not TOML: {error}"))
        return []
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1)
             if (match := re.match(r"\[([\w.-]+)\]", line))}
    rows = []
    for name, values in tables.items():
        if isinstance(values, dict):
            rows.append(Row(f"{path.name}:{lines.get(name, 1)}", name, values, mistakes))
        else:
            mistakes.append(Mistake(path.name, name, str(values), "stands outside of a table", f"[{name}]"))
    return rows


def csv_rows(
    path: Path, columns: Sequence[str], key: str, mistakes: list[Mistake], optional: Sequence[str] = ()
) -> list[Row]:
    """Every row of a CSV file that has just these columns, in any order; the optional ones may be left out."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (csv.Error, UnicodeDecodeError) as error:
        mistakes.append(Mistake(path.name, "", "", f"is not CSV in UTF-8: {error}"))
        return []
    header = [cell.strip() for cell in lines[0][1]] if lines else []
    for column in columns:
        if column not in header:
            mistakes.append(Mistake(f"{path.name}:1", column, "", "no such column", f"columns: {','.join(columns)}"))
    for column in dict.fromkeys(header):
        if column not in (*columns, *optional):
            nearest_column = nearest(column, (*columns, *optional))
            mistakes.append(Mistake(f"{path.name}:1", column, "", "unknown column", nearest_column))
        elif header.count(column) > 1:
            mistakes.append(Mistake(f"{path.name}:1", column, "", "stands twice"))
    if set(header) - set(optional) != set(columns) or len(header) != len(set(header)):
        return []
    rows = []
    for number, cells in lines[1:]:
        where = f"{path.name}:{number}"
        if len(cells) != len(header):
            mistakes.append(Mistake(where, "", "", f"has {len(cells)} cells, the heading has {len(header)}"))
            continue
        values = {column: cell.strip() for column, cell in zip(header, cells, strict=True)}
        rows.append(Row(where, values[key], values, mistakes))
    return rows


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

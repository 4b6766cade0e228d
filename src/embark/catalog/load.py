"""Reads the catalog's files and imports price files; all of a file is checked, and every mistake named at once."""

import csv
import datetime
import io
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from embark.catalog.machine import (
    CLOUDS,
    Catalog,
    Citation,
    CpuMachine,
    Fabric,
    Gpu,
    Interruption,
    Machine,
    Origin,
    Price,
    Quota,
    Reserve,
    Volume,
    Zones,
)
from embark.errors import Mistake, MistakesError, UserError, nearest

HERE = Path(__file__).parent
ORIGIN_COLUMNS = ("source", "date", "confidence")
OPTIONAL_PRICE_COLUMNS = ("block_usd_per_hour",)


def _columns(kind: type) -> tuple[str, ...]:
    """Return the columns of a CSV file: the fields of its rows but for those that are looked up, and the origin's."""
    looked_up = ("reserve", "origin", *OPTIONAL_PRICE_COLUMNS)
    return (*(field.name for field in fields(kind) if field.name not in looked_up), *ORIGIN_COLUMNS)


PRICE_COLUMNS = _columns(Price)
INTERRUPTION_COLUMNS = ("cloud", "machine", "region", "spot_interruptions_per_hour", *ORIGIN_COLUMNS)
MEMORY_RATIOS = (0.97, 1.08)
"""What a cloud publishes over what its cards hold: some write GB for GiB, 7 % more, and some leave out a little."""

Mistakes = list[Mistake]
Prices = Mapping[tuple[str, str], Price]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a CSV file or a table of a TOML file. What is wrong in it is added to `mistakes`."""

    where: str
    name: str
    values: dict[str, Any]  # Cells that are not empty.
    mistakes: Mistakes

    def wrong(self, field: str, what: str, fix: str = "") -> None:
        value = self.values.get(field, "")
        self.mistakes.append(Mistake(self.where, f"{self.name} {field}".strip(), str(value), what, fix))

    def check_name(self, field: str, known: Collection[str], what: str = "no such name") -> None:
        """Check that the field names something known."""
        value = str(self.values.get(field, ""))
        if value and value not in known:
            self.wrong(field, what, nearest(value, known))

    def check_source(self, sources: Collection[str]) -> None:
        """Check that the source is one of sources.toml, or several joined by +."""
        for part in filter(None, str(self.values.get("source", "")).split("+")):
            if part not in sources:
                self.wrong("source", "not in sources.toml", nearest(part, sources))

    def build(self, kind: Any, **given: Any) -> Any:
        """Return the row as a dataclass, each field checked as its type says; None if one is wrong.

        `given` are fields that are looked up elsewhere; if one is None, its mistake is reported there.
        """
        values = self.values | given
        for field in fields(kind):
            if field.type is Origin:
                prefix = "price_" if field.name == "price_origin" and "price_source" in values else ""
                values[field.name] = {name: values[prefix + name] for name in ORIGIN_COLUMNS if prefix + name in values}
        try:
            return _adapter(kind).validate_python(values)
        except ValidationError as error:
            for item in error.errors():
                if item["loc"][0] not in given:
                    self._explain(item)
            return None

    def _explain(self, item: Any) -> None:
        names = [part for part in item["loc"] if isinstance(part, str)]
        prefix = "price_" if names[0] == "price_origin" and "price_source" in self.values else ""
        choices = re.findall(r"'([^']+)'", item["ctx"]["expected"]) if item["type"] == "literal_error" else ()
        what = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
        self.wrong(prefix + names[-1], "is missing" if item["type"] == "missing" else what,
                   nearest(str(item["input"]), choices) if choices else "")


def load_catalog() -> Catalog:
    """Return the shipped catalog, with newer prices if the user has imported some."""
    return _load(prices_path())


@cache
def _load(newer: Path) -> Catalog:
    catalog = _shipped()
    if not newer.exists():
        return catalog
    imported = read_prices(newer, catalog.priced, fix=f"remove {newer}, or import a complete one")
    return replace(catalog, prices=merge_newest(catalog.prices, imported))


@cache
def _shipped() -> Catalog:
    return read_catalog(HERE)


def clear_cache() -> None:
    """Read the imported prices again at the next call."""
    _load.cache_clear()


def user_data_dir() -> Path:
    """Return the folder for what belongs to the user and to no run."""
    home = os.environ.get("XDG_DATA_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "share"
    return base / "embark"


def prices_path() -> Path:
    """Return the file in which `embark catalog refresh` stores imported prices."""
    return user_data_dir() / "prices.csv"


def read_catalog(folder: Path) -> Catalog:
    """Read a folder of catalog files."""
    mistakes: Mistakes = []
    try:
        catalog = _read(folder, mistakes)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}", fix="install Embark again") from error
    if mistakes:
        raise MistakesError(mistakes, "the catalog")
    return catalog


def read_prices(path: Path, machines: Collection[str], *, fix: str = "") -> dict[tuple[str, str], Price]:
    """Read a price file from outside: its sources may be any text."""
    mistakes: Mistakes = []
    try:
        prices = _prices(path, machines, None, mistakes)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}",
                        fix=f"name a CSV file with the columns {','.join(PRICE_COLUMNS)}") from error
    if mistakes:
        raise MistakesError(mistakes, str(path), fix=fix)
    return prices


def merge_newest(old: Prices, new: Prices) -> dict[tuple[str, str], Price]:
    """Return the row of the later date for each machine and region; of one date, the new one."""
    return {**old, **{key: price for key, price in new.items()
                      if key not in old or price.origin.date >= old[key].origin.date}}


def _read(folder: Path, mistakes: Mistakes) -> Catalog:
    # A wrong row is None in its dict: its name is known, and the rows that name it are not wrong too.
    sources, gpus, fabrics, quotas, reserves, volumes = (
        _read_toml(folder / f"{name}.toml", kind, mistakes)
        for name, kind in (("sources", Citation), ("gpus", Gpu), ("fabrics", Fabric), ("quotas", Quota),
                           ("reserves", Reserve), ("volumes", Volume)))
    mistakes += [Mistake("quotas.toml", f"{quota.name} {field}", name, "no such name", nearest(name, quotas))
                 for quota in quotas.values() if quota is not None
                 for field, name in (("vertex", quota.vertex), ("tpu_vm", quota.tpu_vm)) if name and name not in quotas]
    zones = _read_toml(folder / "zones.toml", Zones, mistakes, sources)
    machines: dict[str, Any] = {}
    names: set[str] = set()
    for row in _csv_rows(folder / "machines.csv", _columns(Machine), "name", mistakes):
        row.check_source(sources)
        references = {"gpu": gpus, "fabric": fabrics, "quota": quotas}
        for field, known in references.items():
            row.check_name(field, known)
        found = {field: known.get(row.values.get(field, "")) for field, known in references.items()}
        machine: Machine | None = row.build(Machine, **found, reserve=reserves.get(row.values.get("cloud", "")))
        for name in (row.name, *str(row.values.get("also", "")).split()):
            if name.lower() in names:
                row.wrong("name", f"{name} occurs twice")
            names.add(name.lower())
        if machine is not None:
            _check_machine(row, machine)
        machines[row.name] = machine
    cpu_machines: dict[str, Any] = {}
    for row in _csv_rows(folder / "cpu_machines.csv", _columns(CpuMachine), "name", mistakes):
        row.check_source(sources)
        if row.name.lower() in names:
            row.wrong("name", f"{row.name} occurs twice")
        names.add(row.name.lower())
        cpu_machines[row.name] = row.build(CpuMachine, reserve=reserves.get(row.values.get("cloud", "")))
    prices = _prices(folder / "prices.csv", {**machines, **cpu_machines}, sources, mistakes)
    interruptions = _interruptions(folder / "interruptions.csv", machines, sources, mistakes)
    return Catalog(machines, gpus, fabrics, quotas, volumes, sources, prices, interruptions, zones, cpu_machines)


def _check_machine(row: Row, machine: Machine) -> None:
    num_gpus, gpu = machine.num_gpus, machine.gpu
    if num_gpus % machine.num_hosts:
        row.wrong("num_hosts", f"does not divide {num_gpus} accelerators")
    if (num_gpus == 1) != (machine.link == ""):
        row.wrong("link", f"{num_gpus} accelerators: " + ("no link" if num_gpus == 1 else "what joins them?"))
    for what, owner in (("fabric", machine.fabric.cloud), ("quota", machine.quota and machine.quota.cloud)):
        if owner not in (None, machine.cloud):
            row.wrong(what, f"is of {owner}, the machine of {machine.cloud}")
    ratio = (machine.total_gpu_memory_gib or machine.gpu_memory_gib) / machine.gpu_memory_gib
    if not MEMORY_RATIOS[0] <= ratio <= MEMORY_RATIOS[1]:
        row.wrong("total_gpu_memory_gib",
                  f"{num_gpus} x {gpu.memory_gib:g} GiB of {gpu.name} are {machine.gpu_memory_gib:g}")


def _prices(
    path: Path, machines: Collection[str], sources: Collection[str] | None, mistakes: Mistakes
) -> dict[tuple[str, str], Price]:
    prices: dict[tuple[str, str], Price] = {}
    for row in _csv_rows(path, PRICE_COLUMNS, "machine", mistakes, OPTIONAL_PRICE_COLUMNS):
        row.check_name("machine", machines)
        if sources is not None:
            row.check_source(sources)
        price: Price | None = row.build(Price)
        if price is None:
            continue
        on_demand, spot = price.on_demand_usd_per_hour, price.spot_usd_per_hour
        if on_demand is not None and spot is not None and spot >= on_demand:
            row.wrong("spot_usd_per_hour", f"is not below on demand, {on_demand:g}",
                      "leave it empty where there is no spot offer")
        if (price.machine, price.region) in prices:
            row.wrong("region", f"a second price for {price.machine} in {price.region}")
        prices[price.machine, price.region] = price
    return prices


def _interruptions(
    path: Path, machines: Collection[str], sources: Collection[str], mistakes: Mistakes
) -> dict[tuple[str, str, str], Interruption]:
    interruptions: dict[tuple[str, str, str], Any] = {}
    for row in _csv_rows(path, INTERRUPTION_COLUMNS, "cloud", mistakes):
        row.check_name("cloud", CLOUDS)
        row.check_name("machine", machines)
        row.check_source(sources)
        cloud, machine, region = (str(row.values.get(name, "")) for name in INTERRUPTION_COLUMNS[:3])
        if (cloud, machine, region) in interruptions:
            row.wrong("machine", "a second rate for the same machine and region")
        interruptions[cloud, machine, region] = row.build(Interruption)
    mistakes += [Mistake(path.name, cloud, "", "no rate for the cloud as a whole") for cloud in CLOUDS
                 if (cloud, "", "") not in interruptions]
    return interruptions


def _read_toml(path: Path, kind: type, mistakes: Mistakes, sources: Collection[str] | None = None) -> dict[str, Any]:
    """Return every table of a file, by name. With `sources`, each names its source among them."""
    found: dict[str, Any] = {}
    known = {field.name for field in fields(kind)} | {*ORIGIN_COLUMNS} | {f"price_{name}" for name in ORIGIN_COLUMNS}
    for row in _toml_rows(path, mistakes):
        for field in row.values:
            if field not in known:
                row.wrong(field, "no such field", nearest(field, known))
        if sources is not None:
            row.check_source(sources)
        key = "cloud" if kind is Reserve else "name"
        value = found[row.name] = row.build(kind, **{key: row.name} if key in known else {})
        if isinstance(value, Gpu) and (value.seen_mib or 0.0) > value.memory_mib:
            row.wrong("seen_mib", f"is more than memory_mib, {value.memory_mib:g}")
    return found


def _toml_rows(path: Path, mistakes: Mistakes) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        mistakes.append(Mistake(path.name, "", "", f"is not TOML: {error}"))
        return
    lines = {match[1]: number for number, line in enumerate(text.splitlines(), 1)
             if (match := re.match(r"\[([\w.-]+)\]", line))}
    for name, values in tables.items():
        if isinstance(values, dict):
            yield Row(f"{path.name}:{lines.get(name, 1)}", name, values, mistakes)
        else:
            mistakes.append(Mistake(path.name, name, str(values), "is outside of a table", f"[{name}]"))


def _csv_rows(
    path: Path, columns: Sequence[str], key: str, mistakes: Mistakes, optional: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield every row of a CSV file that has just these columns, in any order; the optional ones may be left out."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (csv.Error, UnicodeDecodeError) as error:
        mistakes.append(Mistake(path.name, "", "", f"is not CSV in UTF-8: {error}"))
        return
    header = [cell.strip() for cell in lines[0][1]] if lines else []
    known = (*columns, *optional)
    absent = ", ".join(column for column in columns if column not in header)
    wrong = [(absent, "missing in the heading", f"columns: {','.join(columns)}")] if absent else []
    wrong += [(column, "unknown column", nearest(column, known)) for column in dict.fromkeys(header)
              if column not in known]
    wrong += [(column, "occurs twice", "") for column in known if header.count(column) > 1]
    mistakes += [Mistake(f"{path.name}:1", column, "", what, fix) for column, what, fix in wrong]
    for number, cells in lines[1:] if not wrong else ():
        where = f"{path.name}:{number}"
        if len(cells) != len(header):
            mistakes.append(Mistake(where, "", "", f"has {len(cells)} cells, the heading has {len(header)}"))
            continue
        values = {column: text for column, cell in zip(header, cells, strict=True) if (text := cell.strip())}
        yield Row(where, values.get(key, ""), values, mistakes)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


Places = Mapping[tuple[str, str], Price]


@dataclass(frozen=True, slots=True)
class PriceChange:
    """A price that changed."""

    machine: str
    region: str
    old: Price | None  # None if the catalog had no price.
    new: Price


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """The price changes that importing a file made."""

    path: Path  # The file with the imported prices.
    changes: tuple[PriceChange, ...]
    num_same: int  # Rows that agree with the catalog.
    num_older: int  # Rows older than the catalog's; they are left out.


def refresh_prices(catalog: Catalog, file: Path, stored: Path, today: datetime.date) -> RefreshResult:
    """Import `file` into `stored`, the newest of every row that was ever imported. A mistake in it changes nothing."""
    from embark.store import write_atomic  # a catalog that is only read needs no store

    new = read_prices(file, catalog.priced, fix="nothing was changed; fix the file and import it again")
    if not new:
        raise UserError(f"{file}: has no prices", fix="one row for each machine and region below the heading")
    late = sorted(price.origin.date for price in new.values() if price.origin.date > today.isoformat())
    if late:
        raise UserError(f"{file}: is dated {late[-1]}, and today is {today}",
                        fix="nothing was changed; a date to come would outlast every later price")
    changes, num_same, num_older = [], 0, 0
    for key, price in new.items():
        old = catalog.prices.get(key)
        if old is not None and price.origin.date < old.origin.date:
            num_older += 1
        elif old is not None and _figures(old) == _figures(price):
            num_same += 1
        else:
            changes.append(PriceChange(*key, old, price))
    before = read_prices(stored, catalog.priced) if stored.exists() else {}
    if changes or num_same:
        from embark.store import write_atomic  # not at the top: reading the catalog needs no store

        try:
            write_atomic(stored, _to_csv(merge_newest(before, new)))
        except OSError as error:
            raise UserError(f"{stored}: {error.strerror}", fix="XDG_DATA_HOME names another folder") from error
        clear_cache()
    return RefreshResult(stored, tuple(changes), num_same, num_older)


def _figures(price: Price) -> tuple[float | None, ...]:
    return (price.on_demand_usd_per_hour, price.spot_usd_per_hour, price.commit_1y_discount, price.commit_3y_discount,
            price.block_usd_per_hour)


def _to_csv(prices: Places) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*PRICE_COLUMNS, *OPTIONAL_PRICE_COLUMNS))
    for _, price in sorted(prices.items()):
        *figures, block = ("" if figure is None else repr(figure) for figure in _figures(price))
        origin = price.origin
        writer.writerow([price.machine, price.region, *figures, origin.source, origin.date, origin.confidence, block])
    return out.getvalue()

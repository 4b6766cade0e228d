"""Reads the catalog's own files, which tests/unit/catalog checks, and imports price files, whose mistakes are all named
at once."""

import csv
import datetime
import io
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from embark.errors import Mistake, MistakesError, UserError, nearest
from embark.values import JsonDict, JsonMap, frozen
from .machine import (
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
    Support,
    Volume,
    Zones,
)

HERE = Path(__file__).parent
ORIGIN_COLUMNS = tuple(field.name for field in fields(Origin))
OPTIONAL_PRICE_COLUMNS = ("block_usd_per_hour",)
PRICE_COLUMNS = (*(field.name for field in fields(Price) if field.name not in ("origin", *OPTIONAL_PRICE_COLUMNS)),
                 *ORIGIN_COLUMNS)
KINDS = {"sources": Citation, "gpus": Gpu, "fabrics": Fabric, "quotas": Quota, "reserves": Reserve, "volumes": Volume,
         "zones": Zones, "support": Support}
"""Rows of the TOML files."""
FURTHER = "further cells"

Prices = Mapping[tuple[str, str], Price]


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
    home = os.getenv("XDG_DATA_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "share"
    return base / "embark"


def prices_path() -> Path:
    """Return the file in which `embark catalog refresh` stores imported prices."""
    return user_data_dir() / "prices.csv"


def read_catalog(folder: Path) -> Catalog:
    """Read a folder of catalog files."""
    tables: dict[str, JsonDict] = {}
    for name, kind in KINDS.items():
        rows = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        # A table is named by its row's name, or by the cloud that a reserve is of.
        tables[name] = {title: build(kind, {"name": title, "cloud": title, **row}) for title, row in rows.items()}
    machines, cpu_machines = ({row["name"]: build(kind, {
        **row, "gpu": tables["gpus"].get(row.get("gpu", "")), "fabric": tables["fabrics"].get(row.get("fabric", "")),
        "quota": tables["quotas"].get(row.get("quota", "")), "reserve": tables["reserves"][row["cloud"]]
    }) for _, row in read_csv(folder / file)[1]} for file, kind in (("machines.csv", Machine),
                                                                 ("cpu_machines.csv", CpuMachine)))
    interruptions = {(row["cloud"], row.get("machine", ""), row.get("region", "")): build(Interruption, row)
                     for _, row in read_csv(folder / "interruptions.csv")[1]}
    prices = read_prices(folder / "prices.csv", {**machines, **cpu_machines})
    return Catalog(machines, tables["gpus"], tables["fabrics"], tables["quotas"], tables["volumes"], tables["sources"],
                   prices, interruptions, tables["zones"], cpu_machines, tables["support"])


def build(kind: Any, row: JsonMap) -> Any:
    """Return a row as a dataclass, each field checked as its type says."""
    values = dict(row)
    for field in fields(kind):
        if field.type is Origin:
            prefix = "price_" if field.name == "price_origin" and "price_source" in row else ""
            values[field.name] = {name: row[prefix + name] for name in ORIGIN_COLUMNS if prefix + name in row}
    return _adapter(kind).validate_python(values)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_csv(path: Path) -> tuple[Sequence[str], list[tuple[int, dict[str, str]]]]:
    """Return the heading of a CSV file, and of each row its line and its cells that are not empty."""
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey=FURTHER, strict=True)
        for row in reader:
            if FURTHER in row or None in row.values():
                raise csv.Error(f"line {reader.line_num} has not as many cells as the heading")
            rows.append((reader.line_num, {column: cell.strip() for column, cell in row.items() if cell.strip()}))
        return reader.fieldnames or (), rows


def read_prices(path: Path, machines: Collection[str], *, fix: str = "") -> dict[tuple[str, str], Price]:
    """Read a price file; its sources may be any text."""
    try:
        header, rows = read_csv(path)
    except (csv.Error, UnicodeDecodeError) as error:
        mistake = Mistake(path.name, "", "", f"is not CSV in UTF-8: {error}")
        raise MistakesError([mistake], str(path), fix=fix) from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}",
                        f"name a CSV file with the columns {','.join(PRICE_COLUMNS)}") from error
    known = (*PRICE_COLUMNS, *OPTIONAL_PRICE_COLUMNS)
    wrong = {"missing in the heading": [column for column in PRICE_COLUMNS if column not in header],
             "unknown column": [column for column in header if column not in known]}
    mistakes = [Mistake(f"{path.name}:1", ", ".join(columns), "", what, f"columns: {','.join(known)}")
                for what, columns in wrong.items() if columns]
    prices: dict[tuple[str, str], Price] = {}
    for line, row in rows if not mistakes else ():
        name = row.get("machine", "")
        mistakes += [Mistake(f"{path.name}:{line}", f"{name} {field}", row.get(field, ""), what, advice)
                     for field, what, advice in _add_price(row, machines, prices)]
    if mistakes:
        raise MistakesError(mistakes, str(path), fix=fix)
    return prices


def _add_price(
    row: Mapping[str, str], machines: Collection[str], prices: dict[tuple[str, str], Price]
) -> Iterator[tuple[str, str, str]]:
    """Add a row to the prices; yield the field of each mistake, what is wrong, and the fix."""
    if row.get("machine") not in machines:
        yield "machine", "no such name", nearest(row.get("machine", ""), machines)
    try:
        price: Price = build(Price, row)
    except ValidationError as error:
        for item in error.errors():
            what = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            yield str(item["loc"][-1]), "is missing" if item["type"] == "missing" else what, ""
        return
    on_demand, spot = price.on_demand_usd_per_hour, price.spot_usd_per_hour
    if on_demand is not None and spot is not None and spot >= on_demand:
        yield ("spot_usd_per_hour", f"is not below on demand, {on_demand:g}",
               "leave it empty where there is no spot offer")
    if (price.machine, price.region) in prices:
        yield "region", f"a second price for {price.machine} in {price.region}", ""
    prices[price.machine, price.region] = price


def merge_newest(old: Prices, new: Prices) -> dict[tuple[str, str], Price]:
    """Return the row of the later date for each machine and region; of one date, the new one."""
    return {**old, **{key: price for key, price in new.items()
                      if key not in old or price.origin.date >= old[key].origin.date}}


@frozen
class PriceChange:
    """A price that changed."""

    machine: str
    region: str
    old: Price | None  # None if the catalog had no price.
    new: Price


@frozen
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
        raise UserError(f"{file}: has no prices", "one row for each machine and region below the heading")
    latest = max(price.origin.date for price in new.values())
    if latest > today.isoformat():
        raise UserError(f"{file}: is dated {latest}, and today is {today}",
                        "nothing was changed; a date to come would outlast every later price")
    newest = merge_newest(catalog.prices, new)
    taken = {key: price for key, price in new.items() if newest[key] is price}
    changes = [PriceChange(*key, old, price) for key, price in taken.items()
               if (old := catalog.prices.get(key)) is None or replace(old, origin=price.origin) != price]
    if taken:
        before = read_prices(stored, catalog.priced) if stored.exists() else {}
        try:
            write_atomic(stored, _to_csv(merge_newest(before, new)))
        except OSError as error:
            raise UserError(f"{stored}: {error.strerror}", "XDG_DATA_HOME names another folder") from error
        clear_cache()
    return RefreshResult(stored, tuple(changes), len(taken) - len(changes), len(new) - len(taken))


def _to_csv(prices: Prices) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, (*PRICE_COLUMNS, *OPTIONAL_PRICE_COLUMNS), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**asdict(price), **asdict(price.origin)} for _, price in sorted(prices.items()))
    return out.getvalue()

"""`embark catalog`: machines, prices and storage of the clouds."""

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from embark.catalog import MachineFilter, compare_machines, load_catalog, prices_path, search_machines
from embark.catalog.load import RefreshResult, refresh_prices
from embark.catalog.machine import Machine, Origin, Price, Quota
from embark.catalog.search import MachineDetails, MachineOffer, VolumeOffer, list_volumes, machine_details
from embark.errors import UserError
from embark.formatting import format_usd, pluralize
from embark.values import JsonDict, read_table
from .console import Console, Flag

Region = Annotated[str, Parameter(help="A region, such as us-east-1, eastus, us-central1.", show_default=False)]
Text = Annotated[str, Parameter(show_default=False)]
UNKNOWN = "not known"
TABLES: JsonDict = read_table(__file__, "catalog_tables.toml")


def list_(
    *words: str, cloud: Text = "", gpu: Text = "", region: Region = "", min_memory: float = 0.0,
    sort: Literal["price", "memory", "name"] = "name", volumes: Flag = False, tib: float = 0.0,
    console: Console = Console()
) -> None:
    """List machines with their accelerators, memory, fabric and price, or storage. Needs no network.

    Parameters
    ----------
    words
        Words that the name, accelerator or fabric must contain: p5, h100, infiniband.
    cloud
        aws, azure or gcp.
    gpu
        An accelerator, or the beginning of its name: A100 also matches A100-80GB.
    min_memory
        Minimum accelerator memory of the machine, in GiB.
    sort
        Sort by price, by accelerator memory, or by name within each cloud.
    volumes
        Instead, list storage with its throughput and price.
    tib
        With --volumes: a size in TiB, to show its throughput and its price per month.
    """
    if tib and not volumes:
        raise UserError("--tib is a size of storage", f"embark catalog list --volumes --tib {tib:g}")
    if volumes:
        if words or cloud or gpu or region or min_memory:
            raise UserError("--volumes lists all storage and takes no filter", "embark catalog list --volumes")
        console.show(list_volumes(load_catalog(), tib),
                     lambda console, offers: _render_volumes(console, offers, tib))
        return
    wanted = MachineFilter(words, cloud, gpu, region, min_memory)
    console.show(search_machines(load_catalog(), wanted, sort),
                 lambda console, offers: _render_list(console, offers, region))


def show(*names: str, region: Region = "", console: Console = Console()) -> None:
    """Show everything about a machine and its price in every region, or compare several machines side by side.

    Parameters
    ----------
    names
        A machine, such as p4d.24xlarge, ND96asr_v4, a2-highgpu-8g, v5e-4; two or more are compared.
    """
    if not names:
        raise UserError("name a machine, or several to compare", "embark catalog list shows them")
    if len(names) > 1:
        console.show(compare_machines(load_catalog(), names, region),
                     lambda console, offers: _render_comparison(console, offers, region))
        return
    console.show(machine_details(load_catalog(), names[0], region),
                 lambda console, details: _render_machine(console, details, region))


def refresh(file: Path, /, *, console: Console = Console()) -> None:
    """Import a newer price file. Its rows replace the catalog's unless they are older.

    Parameters
    ----------
    file
        A CSV with the catalog's own columns: machine, region, prices, discounts, source, date, confidence.
    """
    console.show(refresh_prices(load_catalog(), file, prices_path(), datetime.date.today()), _render_refresh)


def _render_list(console: Console, offers: Sequence[MachineOffer], region: str) -> None:
    console.table([{**asdict(one.machine), **(asdict(one.price) if one.price else {}),
                    "fabric": one.machine.fabric.name, "machine": _short(one.machine),
                    "gpus": f"{one.machine.num_gpus} x {one.machine.gpu.name}",
                    "gpu_memory_gib": round(one.machine.gpu_memory_gib, 1)} for one in offers],
                  **TABLES["list"])
    unpriced = [one.machine.name for one in offers if one.price is None]
    if unpriced:
        console.text(f"\nno price known: {', '.join(unpriced)}", style="dim")
    booked = [_short(one.machine) for one in offers if one.price is not None and not one.machine.is_on_demand]
    if booked:
        console.text(f"\nnot sold on demand, $/h is the list price if any: {', '.join(booked)}", style="dim")
    if offers and not region:
        console.text("\nprices are the lowest on demand in any region; --region chooses one", style="dim")


def _render_machine(console: Console, details: MachineDetails, region: str) -> None:
    facts = _facts("show", machine=details.machine, interruptions=details.spot_interruptions,
                   zones=details.zones, each=" a host" if details.machine.num_hosts > 1 else "")
    console.table([{"what": what, "is": value} for what, value in facts.items()],
                  {"what": "", "is": details.machine.name})
    if details.prices:
        console.text("\ndollars an hour", style="dim")
        rows = [{**asdict(price), **asdict(price.origin), "1y": price.committed_usd_per_hour(1),
                 "3y": price.committed_usd_per_hour(3),
                 "saving": None if price.spot_saving is None else f"{price.spot_saving:.0%}"}
                for price in details.prices]
        empty = [key for key in ("1y", "3y", "block_usd_per_hour") if all(row[key] is None for row in rows)]
        layout = TABLES["price"]
        console.table(rows, {key: text for key, text in layout["columns"].items() if key not in empty},
                      droppable=layout["droppable"])
        for text in dict.fromkeys(f"{one.origin.confidence}: {_titles(one.origin)}" for one in details.prices):
            console.text(text, style="dim")
    if missing := _missing_price(details.prices, region):
        console.result(f"{details.machine.name}: {missing}")


def _missing_price(prices: Sequence[Price], region: str) -> str:
    """Say that a price is unknown, which is no error."""
    if not prices:
        return "no price known in any region; embark catalog refresh FILE imports one"
    if all(price.on_demand_usd_per_hour is None for price in prices):
        return f"no price on demand known{f' in {region}' if region else ''}"
    return f"no spot price known in {region}" if region and prices[0].spot_usd_per_hour is None else ""


def _render_comparison(console: Console, offers: Sequence[MachineOffer], region: str) -> None:
    catalog = load_catalog()
    columns = {_short(one.machine): _facts("compare", machine=one.machine, price=one.price,
                                           interruptions=catalog.interruptions(one.machine, region))
               for one in offers}
    labels = list(next(iter(columns.values())))
    console.table([{"": label} | {name: facts[label] for name, facts in columns.items()} for label in labels],
                  {name: name for name in ("", *columns)})
    if any(value.endswith("?") for facts in columns.values() for value in facts.values()):
        console.text("\n? marks unconfirmed figures; embark catalog show NAME names their sources", style="dim")


def _render_volumes(console: Console, offers: Sequence[VolumeOffer], tib: float) -> None:
    sized = {"gbyte_per_s": f"GB/s of {tib:g} TiB", "usd_per_month": "$/month"} if tib else {}
    console.table([{**asdict(one.volume), **asdict(one.volume.origin), "volume": one.volume.name,
                    "price_confidence": one.volume.usd_per_gib_month and one.volume.price_origin.confidence,
                    "gbyte_per_s": one.gbyte_per_s, "usd_per_month": one.usd_per_month} for one in offers],
                  TABLES["volume"]["columns"] | sized, droppable=TABLES["volume"]["droppable"])
    doubted = [one.volume.name for one in offers if not one.volume.price_origin.is_confirmed]
    console.text(f"\nprices not confirmed: {', '.join(doubted)}", style="dim")


def _render_refresh(console: Console, done: RefreshResult) -> None:
    rows = [{"machine": change.machine, "region": change.region, "date": change.new.origin.date,
             "was $/h": change.old and change.old.on_demand_usd_per_hour,
             "is $/h": change.new.on_demand_usd_per_hour} for change in done.changes]
    if rows and not console.quiet:
        console.table(rows)
    if done.num_older:
        console.warning(f"skipped rows older than the catalog's: {done.num_older:,}")
    console.result(f"{pluralize(len(rows), 'price')} changed, {done.num_same:,} unchanged; saved in {done.path}"
                   if rows else "no price changed")


def _facts(layout: str, **values: object) -> dict[str, str]:
    """Return the rows of a table of `catalog_tables.toml` for one machine."""
    from jinja2 import Environment

    environment = Environment()
    environment.filters |= {"known": _known, "figure": _figure, "usd": _usd, "quota": _quota, "titles": _titles,
                            "urls": _urls}
    return {label: environment.from_string(text).render(unknown=UNKNOWN, **values)
            for label, text in TABLES[layout].items()}


def _titles(origin: Origin) -> str:
    known = load_catalog().sources
    return "; ".join(known[name].title if name in known else name for name in origin.source.split("+"))


def _urls(origin: Origin) -> str:
    return f"{', '.join(load_catalog().urls(origin.source))} ({origin.date}, {origin.confidence})"


def _short(machine: Machine) -> str:
    """Return the name without the Standard_ that Azure puts before every name."""
    return machine.name.removeprefix("Standard_")


def _figure(value: float | None, origin: Origin) -> str:
    """Format a figure for a narrow column, with a question mark where it is not confirmed."""
    doubt = "" if origin.is_confirmed else "?"
    return UNKNOWN if value is None else (f"{value:,.4g}" if value < 1000 else f"{value:,.0f}") + doubt


def _known(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:,.{'5g' if value < 1e5 else '0f'}} {unit.strip()}".rstrip()


def _usd(value: float | None, origin: Origin, factor: float = 1.0) -> str:
    return f"{format_usd(value * factor)}/h{'' if origin.is_confirmed else '?'}" if value else UNKNOWN


def _quota(quota: Quota | None, purchase: str) -> str:
    name = getattr(quota, purchase, "")
    code = getattr(quota, f"{purchase}_code", "")
    return f"{name}{f' ({code})' if code else ''}, in {quota.unit}s" if quota and name else UNKNOWN

"""Writes docs/reference/prices.md: machines and prices in TorchRec's deployment guides, beside the catalog's.

`make docs` runs it. claims.csv has the guides' figures; the rest comes from the shipped catalog.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

from embark.catalog.load import HERE, read_catalog
from embark.catalog.machine import Catalog, Machine, Origin, Price, Volume
from embark.catalog.search import find_machine

CLAIMS = Path(__file__).with_name("claims.csv")
REGIONS = {"aws": "us-west-2", "azure": "eastus", "gcp": "us-central1"}
TOLERANCE = 0.05
GB_PER_GIB = 1.073741824
OF_TERMS = {"gcp-price-list", "gcp-terms", "gcp-tpu-cud", "aws-terms", "azure-terms"}
"""Sources of discounts and of blocks, where another has the price."""

HEAD = """# Prices in deployment guides and in the catalog

TorchRec's cloud deployment guides have hand-written tables of machine types, sizes and prices. This page lists every
figure of those tables beside the catalog's, with its source. A figure in bold differs by more than 5 %. Prices are per
hour, in us-west-2, eastus and us-central1 unless another region is named; network bandwidth is per machine.

`make docs` generates this page from `tools/claims.csv` and the shipped catalog. Prices change: `embark catalog show
NAME` shows them by region, and [`embark catalog refresh`](../guides/catalog.md) imports newer ones.
"""


def page() -> str:
    catalog = read_catalog(HERE)
    lines, guide = [HEAD.rstrip()], ""
    with CLAIMS.open(encoding="utf-8", newline="") as file:
        for claim in csv.DictReader(file):
            if claim["guide"] != guide:
                guide = claim["guide"]
                lines += ["", f"## {guide}", "", "| subject | figure | guide | catalog | source |",
                          "|---|---|---|---|---|"]
            lines.append(_line(catalog, claim))
    return "\n".join(lines) + "\n"


def _line(catalog: Catalog, claim: dict[str, str]) -> str:
    amount = float(claim["amount"])
    unit = "TiB" if claim["field"] == "read speed" else "nodes"
    field = claim["field"] + (f", {amount:g} {unit}" if amount != 1 else "")
    today, value, origin = _today(catalog, claim["subject"], claim["field"], amount)
    if claim["value"] and value and not any(abs(v / float(claim["value"]) - 1) <= TOLERANCE for v in value):
        today = f"**{today}**"
    is_discount = claim["field"] in ("1 year saves", "3 years save")
    names = origin.source.split("+")
    chosen = [name for name in names if (name in OF_TERMS) == is_discount] or names
    sources = ", ".join(_linked(catalog, name) for name in chosen)
    doubt = "" if origin.is_confirmed else ", not confirmed"
    return f"| `{claim['subject']}` | {field} | {claim['said']} | {today} | {sources}, {origin.date}{doubt} |"


def _linked(catalog: Catalog, name: str) -> str:
    if name in catalog.sources:
        return f"[{catalog.sources[name].title}]({catalog.sources[name].url})"
    return f"[{name.split('/')[2]}]({name})"


def _today(catalog: Catalog, subject: str, field: str, amount: float) -> tuple[str, tuple[float, ...], Origin]:
    """As text, as numbers to compare the claim with, and the origin."""
    if field == "read speed":
        volume: Volume = catalog.volumes[subject]
        speed = volume.gbyte_per_s(amount) or 0.0
        return f"{speed:.2g} GB/s", (speed,), volume.origin
    if field == "spot saves across GPUs":
        return _savings(catalog, subject)
    if field == "accelerator memory":
        gpu = catalog.gpus[subject] if subject in catalog.gpus else find_machine(catalog, subject).gpu
        return f"{gpu.memory_gib:.3g} GiB each", (gpu.memory_gib, gpu.memory_gib * GB_PER_GIB), gpu.origin
    machine = find_machine(catalog, subject)
    if field in SIZES:
        words, number = SIZES[field](machine)
        return words, (number,), machine.origin
    price = catalog.prices.get((machine.name, REGIONS[machine.cloud])) or catalog.prices_of(machine)[0]
    figure = FIGURES[field](price)
    if figure is None:
        return "not known", (), price.origin
    if field.endswith(("save", "saves")):
        return f"{figure:.0%}", (figure,), price.origin
    region = "" if price.region == REGIONS[machine.cloud] else f" in {price.region}"
    return f"${figure * amount:,.2f}{region}", (figure * amount,), price.origin


SIZES: dict[str, Callable[[Machine], tuple[str, float]]] = {
    "accelerators": lambda m: (f"{m.num_gpus} x {m.gpu.name}", m.num_gpus),
    "chips": lambda m: (f"{m.num_gpus} chips on {m.num_hosts} host{'s' * (m.num_hosts > 1)}", m.num_gpus),
    "vCPUs": lambda m: (f"{m.vcpus:g}", m.vcpus or 0.0),
    "memory": lambda m: (f"{m.memory_gib:,g} GiB", m.memory_gib or 0.0),
    "network": lambda m: (f"{m.fabric_gbit_per_s:,g} Gbit/s, {m.fabric.title}", m.fabric_gbit_per_s or 0.0),
}
FIGURES: dict[str, Callable[[Price], float | None]] = {
    "on demand": lambda p: p.on_demand_usd_per_hour,
    "spot": lambda p: p.spot_usd_per_hour,
    "spot saves": lambda p: p.spot_saving,
    "1 year saves": lambda p: p.commit_1y_discount,
    "3 years save": lambda p: p.commit_3y_discount,
}


def _savings(catalog: Catalog, cloud: str) -> tuple[str, tuple[float, ...], Origin]:
    prices = [p for p in catalog.prices.values() if p.region == REGIONS[cloud] and p.spot_saving is not None
              and p.machine in catalog.machines and catalog.machines[p.machine].gpu.kind == "gpu"]
    savings = [saving for price in prices if (saving := price.spot_saving) is not None]
    return f"{min(savings):.0%} to {max(savings):.0%}", (), prices[0].origin


if __name__ == "__main__":
    sys.stdout.write(page())

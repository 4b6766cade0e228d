"""Dollars an hour of a machine, and of all machines of a spec: the only place that decides which price applies.

A named region has its own price, and a named zone its region's. Without one, the cheapest region for the purchase
option counts: the lowest spot price for a spot spec, the lowest on-demand price for any other.
"""

from typing import Literal

from embark.errors import EmbarkError, Mistake, SpecError, UserError
from embark.formatting import format_usd, to_one_line
from embark.spec import PlaceSpec, RunSpec
from embark.values import JsonMap, frozen
from .load import load_catalog
from .machine import Catalog, CpuMachine, Machine, Origin, Price, describe_machine, find_machine
from .regions import default_region, is_sold_in, region_of

Purchase = Literal["on_demand", "spot", "block", "commit_1y", "commit_3y"]
"""How machines are paid for: the clouds' purchase options."""
PURCHASES: tuple[Purchase, ...] = ("on_demand", "spot", "block", "commit_1y", "commit_3y")
PURCHASE_NAMES: dict[Purchase, str] = {
    "on_demand": "on demand", "spot": "on spot", "block": "in a block booked ahead",
    "commit_1y": "committed for 1 year", "commit_3y": "committed for 3 years"
}
DEFAULT_MACHINES = {"aws": "p4d.24xlarge", "azure": "Standard_ND96asr_v4", "gcp": "a2-highgpu-8g"}
"""Where only the cloud is named: its machine with eight A100s of 40 GB."""
GRACES: dict[str, tuple[float, str]] = {
    "aws": (120, "docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, 2026-11"),
    "azure": (30, "learn.microsoft.com/azure/virtual-machines/linux/scheduled-events: Preempt, 2026-11"),
    "gce": (30, "docs.cloud.google.com/compute/docs/instances/spot: unless set to 120 s, 2026-11"),
    "gke-spot": (15, "docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: user pods, 2026-11"),
    "kubernetes": (30, "Kubernetes 1.36 API, PodSpec.terminationGracePeriodSeconds: the default, 2026-11")
}
"""Seconds, and the source."""
POD_GRACE_S = {"aws": GRACES["aws"][0], "azure": GRACES["azure"][0], "gcp": GRACES["gke-spot"][0],
               "": GRACES["kubernetes"][0]}
"""The grace period of each cloud for a pod on a spot machine that asks for all it can get; empty: of no known cloud."""


@frozen
class SpecPrice:
    """The hourly price of a spec's machines, and their region."""

    machine: Machine
    num_machines: int
    region: str
    purchase: Purchase
    usd_per_machine_hour: float | None  # None: the catalog has no such price.
    origin: Origin | None  # The price's origin.

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all machines together."""
        return None if self.usd_per_machine_hour is None else self.usd_per_machine_hour * self.num_machines

    @property
    def title(self) -> str:
        """`2 x p5.48xlarge on spot in us-east-2`."""
        return f"{self.num_machines} x {self.machine.name} {PURCHASE_NAMES[self.purchase]} in {self.region}"


@frozen
class RunPrice:
    """The hourly price of all machines of a run."""

    usd_per_hour: float | None = None
    text: str = ""  # The price in words, or why it is unknown.
    source: str = ""  # The source of the price and its date; empty if it is unknown.


def price_of_run(spec: RunSpec | None, start: JsonMap) -> RunPrice:
    """Return the price of the machines that the spec names, if the run was on them. `start` has the values of its last
    start event."""
    try:
        price = price_spec(spec) if spec is not None else None
    except EmbarkError as error:
        return RunPrice(None, f"No price: {to_one_line(error.what)}.")
    if price is None:
        return RunPrice(None, "The spec names no machine, so there is no price: hours only.")
    num_ranks = price.machine.num_gpus * price.num_machines
    ranks, device = start.get("world_size"), start.get("device")
    if start and (device == "cpu" or (device == "cuda" and ranks != num_ranks)):
        where = to_one_line(start.get("device_name") or device or "another machine")
        return RunPrice(None, f"The spec names {price.num_machines} x {price.machine.name}, but the run was on {where} "
                              f"with {ranks} of {num_ranks} ranks: hours only.")
    if price.usd_per_hour is None or price.origin is None:
        return RunPrice(None, f"The catalog has no price of {price.title}: hours only.")
    return RunPrice(price.usd_per_hour, f"Price: {price.title}, {format_usd(price.usd_per_hour)} an hour.",
                    f"the catalog's of {price.origin.date} for {price.region}, from {price.origin.source}")


def machine_of_place(catalog: Catalog, place: PlaceSpec) -> Machine | None:
    """Return the machine that `[place]` names or describes, or its cloud's usual one; None if it names neither."""
    name = place.machine or DEFAULT_MACHINES.get(place.cloud, "")
    if (described := describe_machine(catalog, name, place.cloud)) is not None:
        return described
    try:
        return find_machine(catalog, name) if name else None
    except UserError as error:
        raise SpecError([Mistake("", "place.machine", name, "the catalog has no such machine", error.fix)]) from error


def purchase_of(place: PlaceSpec) -> Purchase:
    """Return how a spec's machines are paid for."""
    if place.spot:
        return "spot"
    return "block" if place.capacity == "block" else "on_demand"


def price_spec(spec: RunSpec, catalog: Catalog | None = None) -> SpecPrice | None:
    """Return the price of a spec's machines; None if `[place]` names neither a machine nor a cloud.

    Raises `SpecError` for an unknown machine.
    """
    catalog = catalog or load_catalog()
    place = spec.place
    machine = machine_of_place(catalog, place)
    if machine is None:
        return None
    purchase = purchase_of(place)
    if region := region_of(machine.cloud, place):
        price = catalog.prices.get((machine.name, region))
    else:
        price = lowest_price(catalog, machine, purchase)
        region = price.region if price else default_region(catalog, machine)
    return SpecPrice(machine, place.max_nodes, region, purchase, hourly_usd(price, purchase),
                     price.origin if price else None)


def lowest_price(catalog: Catalog, machine: Machine | CpuMachine, purchase: Purchase) -> Price | None:
    """Return the price of the cheapest region for this purchase option; if none sells it so, of any that sells it at
    all."""
    prices = [price for price in catalog.prices_of(machine) if is_sold_in(catalog, machine, price.region)]
    options: tuple[Purchase, ...] = (purchase, "on_demand", "spot")
    for option in options:
        paid = [(usd, _spot_usd(p), p.region, p) for p in prices if (usd := hourly_usd(p, option)) is not None]
        if paid:
            return min(paid)[-1]
    return prices[0] if prices else None


def hourly_usd(price: Price | None, purchase: Purchase) -> float | None:
    """Return the hourly price of one machine."""
    if price is None:
        return None
    if purchase == "spot":
        return price.spot_usd_per_hour
    if purchase == "block":
        return price.block_usd_per_hour
    if purchase == "on_demand":
        return price.on_demand_usd_per_hour
    return price.committed_usd_per_hour(1 if purchase == "commit_1y" else 3)


def _spot_usd(price: Price) -> float:
    return price.spot_usd_per_hour if price.spot_usd_per_hour is not None else float("inf")

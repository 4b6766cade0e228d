"""The complete catalog: every machine in every useful count, ranked, and the Pareto front."""

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Literal

from embark.catalog import Catalog, Machine, MachineFilter, Price, lowest_price, price_in, search_machines
from embark.catalog.pricing import PURCHASES, Purchase
from embark.model.placement import all_table_bytes
from embark.spec import RunSpec, divides
from embark.values import frozen
from .cost import Bill, add_storage, bills, failures_of
from .predict import fits_without_tables
from .prediction import Prediction, Setup
from .storage import (
    StorageNeed,
    StorageOffer,
    best_offer,
    copy_s,
    storage_need,
    storage_offers,
    volume_offer,
    wait_for_volume,
)
from .workload import Workload

Predict = Callable[[Setup], Prediction]
Order = Literal["dollars", "hours"]
MAX_NODES = 16
LEAST_GAIN = 0.02
"""A time shorter by less than this is no shorter: no prediction is that exact, and most are printed alike."""


@frozen
class Estimate:
    """A run on a setup; without bills, need and offers where it does not fit."""

    prediction: Prediction
    price: Price | None  # Price in the requested region, or the lowest; None: no price is known.
    bills: dict[Purchase, Bill] = field(default_factory=dict)
    need: StorageNeed | None = None
    offers: tuple[StorageOffer, ...] = ()
    volume: StorageOffer | None = None  # `place.volume` as `storage.sh` buys it.

    @property
    def setup(self) -> Setup:
        return self.prediction.setup

    @property
    def fits(self) -> bool:
        return self.prediction.fits

    @property
    def is_rough(self) -> bool:
        """Whether its time was never measured: TPUs are planned by memory, and take at least what their datasheets
        allow."""
        return self.setup.machine.gpu.kind == "tpu"

    def total_s(self, purchase: Purchase) -> float | None:
        """Return the seconds of the run, paid that way."""
        bill = self.bills.get(purchase)
        return None if bill is None or bill.time is None else bill.time.total_s

    def total_usd(self, purchase: Purchase) -> float | None:
        bill = self.bills.get(purchase)
        return None if bill is None else bill.total_usd


@frozen
class Estimator:
    """Estimates one run on any machine, by `predict` and arithmetic."""

    spec: RunSpec
    workload: Workload
    catalog: Catalog
    predict: Predict
    region: str = ""  # Empty: wherever the machine is cheapest.
    purchase: Purchase = "on_demand"  # The way to pay that decides.

    def __call__(
        self, machine: Machine, num_nodes: int, *, price: Price | None = None,
        purchases: tuple[Purchase, ...] = PURCHASES
    ) -> Estimate:
        """Estimate the run; raises `UserError` where the region does not have the machine."""
        prediction = self.predict(Setup(self.spec, machine, num_nodes))
        if price is None:
            price = self.price_of(machine)
        if not prediction.fits or prediction.step is None:
            return Estimate(prediction, price)
        region = price.region if price is not None else self.region
        store = self.spec.store
        hours = store.hours_between_failures if "hours_between_failures" in store.model_fields_set else None
        failures = {purchase: failures_of(self.catalog, machine, num_nodes, region, purchase, failure_hours=hours,
                                     grace_s=self.spec.place.grace_s) for purchase in purchases}
        made = bills(prediction, self.workload, price, failures)
        first = made[self.purchase]
        need = storage_need(prediction, self.workload, first.saves, first.failures)
        found = storage_offers(self.catalog, prediction.setup, need)
        volume, before_s = volume_offer(self.catalog, prediction.setup, need), 0.0
        if volume is not None:
            prediction = wait_for_volume(prediction, self.workload, need, volume)
            made = bills(prediction, self.workload, price, failures)
            before_s = copy_s(need, volume)
        paid = volume or best_offer(found)
        if paid is not None and paid.usd_per_month is not None:
            made = {purchase: add_storage(bill, paid.usd_per_month, before_s) for purchase, bill in made.items()}
        return Estimate(prediction, price, made, need, tuple(found), volume)

    def of_place(self, machine: Machine) -> Estimate:
        """Estimate the most machines of `place.nodes`; where an elastic run does not fit the fewest, those."""
        place = self.spec.place
        if place.is_elastic and not self.predicts(machine, place.min_nodes):
            return self(machine, place.min_nodes)
        return self(machine, place.max_nodes)

    def predicts(self, machine: Machine, num_nodes: int) -> bool:
        """Return whether it fits, and no more."""
        return self.predict(Setup(self.spec, machine, num_nodes)).fits

    def price_of(self, machine: Machine) -> Price | None:
        """Return the price in the region, or the lowest for the way to pay that decides."""
        if self.region:
            return price_in(self.catalog, machine, self.region)
        return lowest_price(self.catalog, machine, self.purchase)


@frozen
class Bounds:
    """Limits on an estimate."""

    deadline_s: float | None = None
    budget_usd: float | None = None

    def keeps(self, estimate: Estimate, purchase: Purchase) -> bool:
        total_s, usd = estimate.total_s(purchase), estimate.total_usd(purchase)
        if self.deadline_s is not None and (total_s is None or total_s > self.deadline_s):
            return False
        return self.budget_usd is None or (usd is not None and usd <= self.budget_usd)


@frozen
class Survey:
    """The machines of the catalog for a run."""

    purchase: Purchase
    fitting: tuple[Estimate, ...]  # Fits and has a price, in the order of the catalog.
    unpriced: tuple[Estimate, ...]  # Estimates that fit and whose price is not known.
    too_small: tuple[Setup, ...]  # The largest count tried of machines on which it does not fit.
    num_tried: int
    why_not: Prediction | None = None  # The prediction for the largest that is too small, where nothing fits.


def survey_catalog(
    estimator: Estimator, *, cloud: str = "", max_nodes: int = MAX_NODES,
    progress: Callable[[int, int], None] | None = None
) -> Survey:
    """Estimate every machine that the region has, 1, 2, 4, … of it, for as long as more of them help."""
    offers = search_machines(estimator.catalog, MachineFilter(cloud=cloud, region=estimator.region))
    fitting: list[Estimate] = []
    unpriced: list[Estimate] = []
    too_small: list[Setup] = []
    num_tried = 0
    for number, machine in enumerate(offer.machine for offer in offers):
        if progress is not None:
            progress(number, len(offers))
        counts = node_counts(machine, estimator.spec.train.batch_size, max_nodes)
        tried = list(_of_machine(estimator, machine, estimator.price_of(machine), counts))
        num_tried += len(tried)
        fits = [e for e in tried if e.fits]
        fitting += [e for e in fits if e.total_usd(estimator.purchase) is not None]
        unpriced += [e for e in fits if e.total_usd(estimator.purchase) is None]
        if counts and not fits:
            too_small.append(Setup(estimator.spec, machine, counts[-1]))
    why_not = None
    if too_small and not fitting and not unpriced:
        why_not = estimator.predict(max(too_small, key=lambda s: s.num_nodes * s.machine.gpu_memory_gib))
    return Survey(estimator.purchase, tuple(fitting), tuple(unpriced), tuple(too_small), num_tried, why_not)


def rank(found: Iterable[Estimate], purchase: Purchase, by: Order, bounds: Bounds | None = None) -> list[Estimate]:
    """Return those inside the bounds, best first; of equals the one that takes less of the other, then of fewer
    machines."""
    kept = [e for e in found if bounds is None or bounds.keeps(e, purchase)]

    def key(e: Estimate) -> tuple[float, float, int]:
        usd, total_s = e.total_usd(purchase), e.total_s(purchase)
        pair = (usd if usd is not None else float("inf"), total_s if total_s is not None else float("inf"))
        return (*(pair if by == "dollars" else pair[::-1]), e.setup.num_nodes)

    return sorted(kept, key=key)


def pareto_front(found: Iterable[Estimate], purchase: Purchase) -> list[Estimate]:
    """Return those that no other beats in both dollars and hours, fastest to cheapest, without rough estimates.

    Each takes less time than the next by `LEAST_GAIN` or more.
    """
    kept: list[Estimate] = []
    fastest_s = float("inf")
    for estimate in rank((e for e in found if not e.is_rough), purchase, "dollars"):
        total_s = estimate.total_s(purchase)
        if total_s is not None and estimate.total_usd(purchase) is not None and total_s < fastest_s * (1 - LEAST_GAIN):
            kept.append(estimate)
            fastest_s = total_s
    return kept[::-1]


def node_counts(machine: Machine, batch_size: int, max_nodes: int) -> list[int]:
    """Return 1, 2, 4, … machines that divide the batch equally.

    Larger TPU slices are machines of their own: there `max_nodes` limits the hosts.
    """
    most = max_nodes if machine.gpu.kind != "tpu" else 1 if machine.num_hosts <= max_nodes else 0
    counts: list[int] = []
    num = 1
    while num <= most:
        if divides(batch_size, num * machine.num_gpus):
            counts.append(num)
        num *= 2
    return counts


def could_fit(spec: RunSpec, machine: Machine, num_nodes: int) -> bool:
    """Return whether all memory together is as large as the tables, and a device's as all else.

    A setup with less needs no prediction.
    """
    hosts_gib = machine.num_hosts * (machine.memory_gib or 0.0)
    if all_table_bytes(spec) > num_nodes * (machine.gpu_memory_gib + hosts_gib) * 1024**3:
        return False
    return machine.gpu.kind == "tpu" or fits_without_tables(Setup(spec, machine, num_nodes))


def _of_machine(
    estimator: Estimator, machine: Machine, price: Price | None, counts: Iterable[int]
) -> Iterable[Estimate]:
    purchases: tuple[Purchase, ...] = tuple(dict.fromkeys((estimator.purchase, "on_demand", "spot")))
    before_s: float | None = None
    for num in counts:
        if not could_fit(estimator.spec, machine, num):
            continue
        estimate = estimator(machine, num, price=price, purchases=purchases)
        yield estimate
        total_s = estimate.total_s(estimator.purchase)
        if before_s is not None and total_s is not None and total_s > before_s * (1 - LEAST_GAIN):
            return
        before_s = total_s

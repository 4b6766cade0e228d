"""All that is foreseen of a run on so many of a machine: memory, time, money, storage. And who is asked for it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from embark.catalog import Catalog, Machine, Price, lowest_price, price_in
from embark.catalog.pricing import PURCHASES, Purchase
from embark.plan.cost import Bill, add_storage, bills, failures_of
from embark.plan.prediction import Prediction, Setup
from embark.plan.storage import StorageNeed, StorageOffer, best_offer, storage_need, storage_offers
from embark.plan.workload import Workload
from embark.spec import RunSpec

Predict = Callable[[Setup], Prediction]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run on a setup. Without bills, need and offers where it does not fit."""

    prediction: Prediction
    price: Price | None
    """In the region asked for, or where it is lowest; None: no price is known."""
    bills: dict[Purchase, Bill] = field(default_factory=dict)
    need: StorageNeed | None = None
    offers: tuple[StorageOffer, ...] = ()

    @property
    def setup(self) -> Setup:
        return self.prediction.setup

    @property
    def fits(self) -> bool:
        return self.prediction.fits

    @property
    def is_rough(self) -> bool:
        """TPUs are planned by their memory; their time is the least that their datasheets allow, and was never
        measured."""
        return self.setup.machine.gpu.kind == "tpu"

    def total_s(self, purchase: Purchase) -> float | None:
        """Of the whole run, paid that way."""
        bill = self.bills.get(purchase)
        return None if bill is None or bill.time is None else bill.time.total_s

    def total_usd(self, purchase: Purchase) -> float | None:
        bill = self.bills.get(purchase)
        return None if bill is None else bill.total_usd


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimates of one run on any machine: `predict`, and arithmetic."""

    spec: RunSpec
    workload: Workload
    catalog: Catalog
    predict: Predict
    region: str = ""
    """Empty: wherever the machine is cheapest."""
    purchase: Purchase = "on_demand"
    """The way to pay that decides."""

    def __call__(
        self, machine: Machine, num_nodes: int, *, price: Price | None = None,
        purchases: tuple[Purchase, ...] = PURCHASES,
    ) -> Estimate:
        """Raises `UserError` where the region does not have the machine."""
        prediction = self.predict(Setup(self.spec, machine, num_nodes))
        if price is None:
            price = self.price_of(machine)
        if not prediction.fits or prediction.step is None:
            return Estimate(prediction, price)
        region = price.region if price is not None else self.region
        said = self.spec.store.hours_between_failures if self._says_hours else None
        failures = {purchase: failures_of(self.catalog, machine, num_nodes, region, purchase, said_hours=said,
                                     said_grace_s=self.spec.place.grace_s) for purchase in purchases}
        made = bills(prediction, self.workload, price, failures)
        first = made[self.purchase]
        need = storage_need(prediction, self.workload, first.saves, first.failures)
        found = storage_offers(self.catalog, prediction.setup, need)
        best = best_offer(found)
        if best is not None and best.usd_per_month is not None:
            made = {purchase: add_storage(bill, best.usd_per_month) for purchase, bill in made.items()}
        return Estimate(prediction, price, made, need, tuple(found))

    def predicts(self, machine: Machine, num_nodes: int) -> bool:
        """Whether it fits, and no more."""
        return self.predict(Setup(self.spec, machine, num_nodes)).fits

    def price_of(self, machine: Machine) -> Price | None:
        """In the region, or the lowest for the way that decides."""
        if self.region:
            return price_in(self.catalog, machine, self.region)
        return lowest_price(self.catalog, machine, self.purchase)

    @property
    def _says_hours(self) -> bool:
        return "hours_between_failures" in self.spec.store.model_fields_set

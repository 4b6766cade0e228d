"""`embark plan` as a function: one setup in full, or the complete catalog ranked, as values to print or to dump."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Literal

from embark.catalog import Machine, load_catalog, machine_of_place
from embark.catalog.machine import CLOUDS
from embark.catalog.pricing import Purchase, purchase_of
from embark.catalog.regions import region_of
from embark.errors import UserError, nearest
from embark.events.results import Tabular
from embark.formatting import format_duration, format_usd
from embark.model.placement import Planner
from embark.spec import RunSpec
from embark.values import JsonDict, frozen
from .closed_form import CachedPlanner
from .cost import Bill
from .predict import predict
from .storage import StorageOffer
from .survey import (
    MAX_NODES,
    Bounds,
    Estimate,
    Estimator,
    Order,
    Predict,
    Survey,
    pareto_front,
    rank,
    survey_catalog,
)
from .verdict import Verdict, survey_sentence, verdict
from .workload import Workload, resolve_data, trace_dense, workload_of

CAPACITY_NOTES = {
    "reserved": "the reservation is paid whether the run uses it or not; the dollars are what its machines cost on "
                "demand for the time of the run",
    "block": "a block is paid ahead, in whole days, whether the run uses it or not",
    "flex-start": "flex-start waits for capacity before anything is paid, and ends machines after 7 days; it costs "
                  "less than on demand, which is the price here"
}


@frozen
class PlanRequest:
    """The options of a plan besides the spec."""

    across: bool = False  # Rank the complete catalog, whatever `place.machine` is.
    by: Order | Literal[""] = ""  # Empty: dollars, or hours where only a budget is given.
    deadline_h: float | None = None
    budget_usd: float | None = None
    cloud: str = ""
    region: str = ""
    spot: bool | None = None  # None: as `place.spot` says.
    max_nodes: int = MAX_NODES
    num_samples: int | None = None

    @property
    def bounds(self) -> Bounds:
        return Bounds(None if self.deadline_h is None else self.deadline_h * 3600, self.budget_usd)

    @property
    def order(self) -> Order:
        return self.by or ("hours" if self.budget_usd is not None and self.deadline_h is None else "dollars")

    @property
    def bounds_text(self) -> str:
        usd = self.budget_usd
        budget = "" if usd is None else f"${usd:g}" if 0 < usd < 0.001 else format_usd(usd)
        texts = [f"within {format_duration(self.deadline_h * 3600)}" if self.deadline_h is not None else "",
                 f"for {budget} or less" if budget else ""]
        return " and ".join(text for text in texts if text)


DEFAULT_REQUEST = PlanRequest()


@frozen
class MachinePlan(Tabular):
    """A spec planned for its machines."""

    estimate: Estimate
    verdict: Verdict
    workload: Workload
    purchase: Purchase
    sentence: str
    is_ok: bool  # It fits, within the deadline and the budget.

    def to_rows(self) -> list[JsonDict]:
        """Return a row for these machines, and one for each of the nearest that fit."""
        return [{"how": "as asked", **_row(self.estimate, self.purchase)}, *self.to_dict()["nearest"]]

    def to_dict(self) -> JsonDict:
        """Return everything, with units in the names."""
        alternatives = [{"how": n.how, **_row(n.estimate, self.purchase)} for n in self.verdict.nearest]
        return {"verdict": self.sentence, "fits": self.verdict.fits, "purchase": self.purchase,
                "workload": asdict(self.workload), **_estimate_dict(self.estimate), "nearest": alternatives}


@frozen
class CatalogPlan(Tabular):
    """A spec planned for every machine of the catalog."""

    survey: Survey
    ranked: tuple[Estimate, ...]  # Estimates within the deadline and the budget, best first.
    workload: Workload
    bounds: Bounds
    sentence: str

    @property
    def is_ok(self) -> bool:
        """Whether something fits, within the deadline and the budget."""
        return bool(self.ranked)

    def to_rows(self) -> list[JsonDict]:
        """Return a row for each type of machine, best first."""
        return list(self.to_dict()["ranked"])

    def to_dict(self) -> JsonDict:
        found = self.survey
        on_front = {id(e) for e in pareto_front(found.fitting, found.purchase)}
        return {
            "verdict": self.sentence, "purchase": found.purchase, "workload": asdict(self.workload),
            "num_tried": found.num_tried,
            "ranked": [{**_row(e, found.purchase), "is_on_front": id(e) in on_front} for e in self.ranked],
            "unpriced": [e.setup.title for e in found.unpriced], "too_small": [s.machine.name for s in found.too_small]
        }


def plan(
    spec: RunSpec, request: PlanRequest = DEFAULT_REQUEST, *, planner: Planner | None = None,
    progress: Callable[[int, int], None] | None = None
) -> MachinePlan | CatalogPlan:
    """Plan for `place.machine` and `place.nodes`, or for the complete catalog.

    The catalog is planned where no machine is named, or `across` is set.

    `planner` places the tables of one setup; without one the closed form does. Raises `UserError` for a bad request.
    """
    _check(request)
    catalog = load_catalog()
    named = machine_of_place(catalog, spec.place) if spec.place.machine else None  # checked even where it is not used
    machine = None if request.across or named is None else _checked(named, spec, request)
    spec, data_size = resolve_data(spec, request.num_samples)
    trace_dense(spec)
    purchase = purchase_of(spec.place)
    if request.spot is not None:
        purchase = "spot" if request.spot else "on_demand"
    region = request.region or ("" if machine is None else region_of(machine.cloud, spec.place))
    workload = workload_of(spec, data_size)
    estimator = Estimator(spec, workload, catalog, predict_with(CachedPlanner()), region, purchase)
    if machine is None:
        return _plan_catalog(estimator, request, progress)
    of_one = estimator
    if planner is not None:
        of_one = Estimator(spec, workload, catalog, predict_with(planner), region, purchase)
    estimate = of_one.of_place(machine)
    if note := CAPACITY_NOTES.get(spec.place.capacity):
        notes = (*estimate.prediction.notes, note)
        estimate = replace(estimate, prediction=replace(estimate.prediction, notes=notes))
    answer = verdict(estimate, estimator, max_nodes=request.max_nodes)
    is_within = request.bounds.keeps(estimate, purchase)
    sentence = answer.sentence + ("" if is_within or not answer.fits else f"; that is not {request.bounds_text}")
    return MachinePlan(estimate, answer, workload, purchase, sentence, answer.fits and is_within)


def plan_volume(spec: RunSpec, machine: Machine) -> StorageOffer | None:
    """Return `place.volume` as `storage.sh` buys it; None if the spec does not say how much data there is, or the run
    does not fit the machine."""
    try:
        spec, data_size = resolve_data(spec)
        workload = workload_of(spec, data_size)
    except UserError:
        return None
    trace_dense(spec)
    found = Estimator(spec, workload, load_catalog(), predict_with(CachedPlanner()), purchase=purchase_of(spec.place))
    return found.of_place(machine).volume


def predict_with(planner: Planner) -> Predict:
    """Return predictions whose tables this planner places."""
    return lambda setup: predict(setup, planner=planner)


def _plan_catalog(
    estimator: Estimator, request: PlanRequest, progress: Callable[[int, int], None] | None
) -> CatalogPlan:
    found = survey_catalog(estimator, cloud=request.cloud, max_nodes=request.max_nodes, progress=progress)
    ranked = rank(found.fitting, estimator.purchase, request.order, request.bounds)
    sentence = survey_sentence(found, ranked, estimator.spec.name, max_nodes=request.max_nodes,
                               bounds_text=request.bounds_text)
    return CatalogPlan(found, tuple(ranked), estimator.workload, request.bounds, sentence)


def _checked(machine: Machine, spec: RunSpec, request: PlanRequest) -> Machine:
    cloud = request.cloud or spec.place.cloud
    if cloud and cloud != machine.cloud:
        raise UserError(f"{machine.name} is a machine of {machine.cloud}, not of {cloud}",
                        f"leave the cloud out, or embark catalog list --cloud {cloud}")
    return machine


def _check(request: PlanRequest) -> None:
    if request.cloud and request.cloud not in CLOUDS:
        raise UserError(f"{request.cloud!r}: no such cloud", nearest(request.cloud, CLOUDS))
    for flag, value in (("--deadline", request.deadline_h), ("--budget", request.budget_usd)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{flag} {value:g} must be greater than 0", f"{flag} 8")
    if request.max_nodes < 1:
        raise UserError(f"--max-nodes {request.max_nodes} must be at least 1", "--max-nodes 16")
    if request.num_samples is not None and request.num_samples < 1:
        raise UserError(f"--samples {request.num_samples} must be at least 1", "--samples 4195197692")


def _estimate_dict(estimate: Estimate) -> JsonDict:
    prediction, setup = estimate.prediction, estimate.setup
    memory, step, placement = prediction.memory, prediction.step, prediction.placement
    return {
        "machine": setup.machine.name, "cloud": setup.machine.cloud, "num_nodes": setup.num_nodes,
        "num_ranks": setup.num_ranks, "gpu": setup.machine.gpu.name,
        "region": estimate.price and estimate.price.region, "why": prediction.why,
        "engine": prediction.engine, "engine_why": prediction.engine_why,
        "memory": {"device_bytes": memory.device, "device_total_bytes": memory.device_total,
                   "device_limit_bytes": memory.device_limit, "host_bytes": memory.host,
                   "host_total_bytes": memory.host_total, "host_limit_bytes": memory.host_limit},
        "placement": None if placement is None else {"made_by": placement.made_by, "shardings": placement.shardings,
                                                     "is_on_host": placement.is_on_host},
        "step": None if step is None else {**asdict(step), "samples_per_s": prediction.samples_per_s},
        "bills": {purchase: _bill_dict(bill) for purchase, bill in estimate.bills.items()},
        "storage": None if estimate.need is None else {
            **asdict(estimate.need), "offers": list(map(_offer_dict, estimate.offers)),
            "volume": estimate.volume and _offer_dict(estimate.volume)},
        "notes": list(prediction.notes)
    }


def _offer_dict(offer: StorageOffer) -> JsonDict:
    return {**asdict(offer), "volume": offer.volume.name}


def _bill_dict(bill: Bill) -> JsonDict:
    time = bill.time
    return {**asdict(bill), "total_usd": bill.total_usd, "epoch_usd": bill.epoch_usd,
            "time": None if time is None else {**asdict(time), "total_s": time.total_s},
            "saves": {**asdict(bill.saves), "total_s": bill.saves.total_s}}


def _row(estimate: Estimate, purchase: Purchase) -> JsonDict:
    setup, step = estimate.setup, estimate.prediction.step
    total_s = estimate.total_s(purchase)
    return {
        "machine": setup.machine.name, "cloud": setup.machine.cloud, "num_nodes": setup.num_nodes,
        "num_ranks": setup.num_ranks, "gpu": setup.machine.gpu.name,
        "region": estimate.price and estimate.price.region, "step_ms": None if step is None else step.total_s * 1e3,
        "bound_by": step and step.bound_by, "is_calibrated": step and step.is_calibrated,
        "is_rough": estimate.is_rough,
        "total_hours": None if total_s is None else total_s / 3600, "total_usd": estimate.total_usd(purchase),
        "on_demand_usd": estimate.total_usd("on_demand"), "spot_usd": estimate.total_usd("spot")
    }

"""What a launch will cost, before anything is spent: the plan's verdict, and the price."""

from dataclasses import dataclass

from embark.catalog import load_catalog
from embark.catalog.pricing import PURCHASE_NAMES
from embark.errors import EmbarkError
from embark.formatting import format_usd
from embark.plan.closed_form import CachedPlanner
from embark.plan.estimate import Estimator
from embark.plan.plan import predict_with
from embark.plan.verdict import verdict
from embark.plan.workload import resolve_data, workload_of
from embark.render.job import make_job
from embark.spec import RunSpec


@dataclass(frozen=True, slots=True)
class LaunchEstimate:
    """The plan's answer about the spec's own machines."""

    fits: bool
    verdict: str
    price: str
    """`$110.08 an hour on demand in us-west-2`, or that it is unknown."""
    usd_per_hour: float | None = None
    total_usd: float | None = None


def estimate_launch(spec: RunSpec) -> LaunchEstimate:
    """Of a run in a cloud. Where no plan can be made, the verdict says why, and only the price an hour is known."""
    catalog = load_catalog()
    job = make_job(spec, catalog)
    region, per_hour, purchase = job.price.region, job.usd_per_hour, job.price.purchase
    price = (f"{format_usd(per_hour)} an hour {PURCHASE_NAMES[purchase]} in {region}" if per_hour is not None
             else f"the catalog has no price {PURCHASE_NAMES[purchase]} in {region}")
    fits, sentence, total = True, "", None
    try:
        sized, size = resolve_data(spec)
        # The region of the launch, where its prices are known at all.
        known = region if (job.machine.name, region) in catalog.prices else ""
        estimator = Estimator(sized, workload_of(sized, size), catalog, predict_with(CachedPlanner()), known, purchase)
        estimate = estimator(job.machine, job.num_nodes)
        answer = verdict(estimate, estimator)
        fits, sentence, total = answer.fits, answer.sentence, estimate.total_usd(purchase)
    except EmbarkError as error:
        sentence = f"{job.title}; no plan could be made: {error.what}"
    return LaunchEstimate(fits=fits, verdict=sentence, price=price + _stops(spec, total), usd_per_hour=per_hour,
                          total_usd=total)


def _stops(spec: RunSpec, total_usd: float | None) -> str:
    budget = spec.place.budget_usd
    if budget is None:
        return ""
    early = f", before it is done: the plan says {format_usd(total_usd)}" if total_usd and total_usd > budget else ""
    return f"; it stops itself at {format_usd(budget)}{early}"

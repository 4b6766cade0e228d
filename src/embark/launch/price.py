"""What a launch will take, said before anything is spent: the plan's verdict, and the price."""

from __future__ import annotations

from dataclasses import dataclass

from embark.catalog import load_catalog
from embark.catalog.pricing import PURCHASE_NAMES
from embark.errors import EmbarkError
from embark.formatting import format_usd
from embark.plan.data_size import resolve_data
from embark.plan.estimate import Estimator, Predict
from embark.plan.verdict import verdict
from embark.plan.workload import workload_of
from embark.render.job import make_job
from embark.spec import RunSpec


@dataclass(frozen=True, slots=True)
class LaunchEstimate:
    """The plan's answer about the very machines that are asked for."""

    fits: bool
    sentence: str
    price: str
    """`$110.08 an hour on demand in us-west-2`, or that it is not known."""
    usd_per_hour: float | None = None
    total_usd: float | None = None


def estimate_launch(spec: RunSpec) -> LaunchEstimate:
    """Of a run in a cloud. Where the plan cannot be made, it says why, and the price an hour stands alone."""
    catalog = load_catalog()
    job = make_job(spec, catalog)
    region, per_hour, way = job.price.region, job.usd_per_hour, job.price.purchase
    price = (f"{format_usd(per_hour)} an hour {PURCHASE_NAMES[way]} in {region}" if per_hour is not None
             else f"a price {PURCHASE_NAMES[way]} in {region} that the catalog does not know")
    try:
        sized, size = resolve_data(spec)
        # The region that the machines are asked for in, where its prices are known at all.
        known = region if (job.machine.name, region) in catalog.prices else ""
        estimator = Estimator(sized, workload_of(sized, size), catalog, _predict(), known, way)
        estimate = estimator(job.machine, job.num_nodes)
        answer = verdict(estimate, estimator)
    except EmbarkError as error:
        return LaunchEstimate(True, f"{job.title}; no plan could be made: {error.what}", price + _stops(spec, None), per_hour)
    total = estimate.total_usd(way)
    return LaunchEstimate(answer.fits, answer.sentence, price + _stops(spec, total), per_hour, total)


def _stops(spec: RunSpec, total_usd: float | None) -> str:
    budget = spec.place.budget_usd
    if budget is None:
        return ""
    early = f", before it is done: the plan says {format_usd(total_usd)}" if total_usd and total_usd > budget else ""
    return f"; it stops itself at {format_usd(budget)}{early}"


def _predict() -> Predict:
    from embark.plan.cached_planner import CachedPlanner
    from embark.plan.predict import predict

    planner = CachedPlanner()
    return lambda setup: predict(setup, planner=planner)

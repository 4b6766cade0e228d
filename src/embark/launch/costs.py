"""What a run will cost, from its plan; and what it has cost, from its events, its platform and the price."""

import time
from collections.abc import Sequence
from contextlib import suppress

from embark.catalog import load_catalog
from embark.catalog.pricing import PURCHASE_NAMES, RunPrice, price_of_run
from embark.errors import EmbarkError
from embark.events import Event
from embark.events.spending import Spending, attempts, spending, usd_for
from embark.formatting import format_duration, format_usd
from embark.plan.closed_form import CachedPlanner
from embark.plan.plan import predict_with
from embark.plan.serving import HOURS_PER_MONTH, ServeRequest, offers_for
from embark.plan.survey import Estimator
from embark.plan.verdict import verdict
from embark.plan.workload import resolve_data, trace_dense, workload_of
from embark.render.job import make_job
from embark.render.serving import GIB, memory_gib, server_name
from embark.spec import RunSpec, parse_spec
from embark.store import SPEC, RunDir, find_run
from embark.store.lease import newest_holder
from embark.values import frozen
from .backend import Status, backend_of
from .run_registry import RunRecord, lookup_run, stored_events
from .shell import Notify, Shell

ALIVE_S = 300.0  # A run not launched from here whose last event is so recent is taken to be running.


@frozen
class LaunchEstimate:
    """The plan's answer about the spec's own machines."""

    fits: bool
    verdict: str
    price: str  # `$110.08 an hour on demand in us-west-2`, or that it is unknown.
    usd_per_hour: float | None = None
    total_usd: float | None = None


@frozen
class RunCost:
    """The past and expected cost of a run. Dollars are None where no price is known."""

    name: str
    title: str
    is_running: bool
    held_s: float  # Machine time so far: `lead_s`, and the spending's.
    spent_usd: float | None
    left_s: float | None  # Time to the last step, at the pace measured.
    left_usd: float | None
    total_usd: float | None
    predicted_usd: float | None  # The plan's prediction for the complete run.
    usd_per_hour: float | None
    price_source: str  # Source of the price, and its date.
    lead_s: float
    """Time from when the machines were there to the first process: the image is pulled. Without events, to now."""
    spending: Spending | None  # Computed from the run's own events; None if there are none.
    budget_usd: float | None
    is_within_budget: bool | None  # None: there is no budget, or no price to check it with.
    budget_verdict: str
    notes: tuple[str, ...] = ()  # Sentences about costs that could not be counted.


def run_cost(name: str, notify: Notify, *, budget_usd: float | None = None, now_s: float | None = None) -> RunCost:
    """Return what a run has cost and will cost.

    `name` is a run's directory, its name under ./runs, its URI, or the name it was launched by. `budget_usd` replaces
    the run's own budget.
    """
    now_s = time.time() if now_s is None else now_s
    launched = lookup_run(name)
    notes: list[str] = []
    status = _status(launched, notify, notes)
    uri = launched.handle.run_uri if launched else ""
    run_dir = find_run(name) if launched is None else RunDir(uri) if uri else None
    events = _events(run_dir, notes, is_only=launched is None)
    spec = _spec(run_dir, launched)
    price = _price(spec, events, launched.handle.usd_per_hour if launched else None)
    found = spending(events, usd_per_hour=price.usd_per_hour)
    ended_s = min(now_s, status.ended_s or 0.0 if status else _killed_s(run_dir, now_s))
    is_fresh = launched is None and found is not None and now_s - found.last_s < ALIVE_S and not found.outcome
    is_running = status.state == "running" if status else is_fresh and not ended_s
    found = spending(events, usd_per_hour=price.usd_per_hour, now_s=now_s if is_running else None, ended_s=ended_s)
    if found is not None and found.usd_per_hour is not None and found.usd_per_hour != price.usd_per_hour:
        price = RunPrice(found.usd_per_hour, source="the price the run was started with")
    lead_s = _lead_s(events, status, now_s, notes)
    spent_usd = usd_for(price.usd_per_hour, lead_s)
    if found is not None:
        spent_usd = None if found.usd is None else found.usd + (spent_usd or 0.0)
    left_s = found.left_s if found else None
    left_usd = usd_for(price.usd_per_hour, left_s)
    total_usd = None if spent_usd is None or left_usd is None else spent_usd + left_usd
    own_budget_usd = spec.place.budget_usd if spec else found.budget_usd if found else None
    limit_usd = budget_usd if budget_usd is not None else own_budget_usd
    name, title = (launched.handle.name, launched.handle.title) if launched else (run_dir.uri if run_dir else name,) * 2
    is_within, verdict = _check_budget(name, limit_usd, own_budget_usd, spent_usd, total_usd)
    return RunCost(
        name=name, title=title, is_running=is_running, held_s=lead_s + (found.held_s if found else 0.0),
        spent_usd=spent_usd, left_s=left_s, left_usd=left_usd, total_usd=total_usd, predicted_usd=_predicted_usd(spec),
        usd_per_hour=price.usd_per_hour, price_source=price.source, lead_s=lead_s, spending=found, budget_usd=limit_usd,
        is_within_budget=is_within, budget_verdict=verdict, notes=tuple(notes))


def _check_budget(name: str, limit_usd: float | None, own_usd: float | None, spent_usd: float | None,
                  total_usd: float | None) -> tuple[bool | None, str]:
    if limit_usd is None:
        return None, ""
    limit = format_usd(limit_usd)
    if spent_usd is None:
        return None, f"cannot check the budget of {limit}: the run has no price"
    if spent_usd >= limit_usd:
        return False, f"the budget of {limit} is spent"
    if total_usd is not None and total_usd > limit_usd:
        stop = (f"it stops itself at {format_usd(own_usd)}" if own_usd is not None
                else f"embark cancel {name} ends it after a checkpoint; place.budget_usd would have")
        excess = format_usd(total_usd - limit_usd)
        return False, f"at this pace it will exceed its budget of {limit} by {excess}; {stop}"
    return True, f"within its budget of {limit}"


def _price(spec: RunSpec | None, events: Sequence[Event], at_launch: float | None) -> RunPrice:
    """Return the catalog's price of today, unless it was another at the launch."""
    price = price_of_run(spec, next((event.values for event in reversed(events) if event.kind == "start"), {}))
    if at_launch is not None and at_launch != price.usd_per_hour:
        return RunPrice(at_launch, source="the catalog's on the day of the launch")
    return price


def _status(launched: RunRecord | None, notify: Notify, notes: list[str]) -> Status | None:
    if launched is None:
        return None
    try:
        return backend_of(launched.handle, Shell(), notify, is_hasty=True).status(launched.handle)
    except EmbarkError as error:
        notes.append(f"its state is unknown, so nothing is counted since its last event: {error.what}")
        return None


def _events(run_dir: RunDir | None, notes: list[str], *, is_only: bool) -> list[Event]:
    if run_dir is None:
        return []
    try:
        return stored_events(run_dir.store)
    except EmbarkError as error:
        if is_only:
            raise
        notes.append(f"cannot read its events from here: {error.what}")
        return []


def _killed_s(run_dir: RunDir | None, now_s: float) -> float:
    """Return when the run's process was killed, as far as its lease tells; 0 if it may be alive or ended in order."""
    if run_dir is None:
        return 0.0
    with suppress(EmbarkError):
        holder = newest_holder(run_dir.store)
        if holder is not None and not holder.is_released and (
                now_s - holder.renewed_s > holder.ttl_s or holder.state() == "dead"):
            return holder.ended_s
    return 0.0


def _spec(run_dir: RunDir | None, launched: RunRecord | None) -> RunSpec | None:
    if launched is not None:
        return launched.spec
    with suppress(EmbarkError):  # the hours count all the same
        if run_dir is not None and run_dir.store.exists(SPEC):
            return parse_spec(run_dir.store.read(SPEC).decode(errors="replace"))
    return None


def _lead_s(events: Sequence[Event], status: Status | None, now_s: float, notes: list[str]) -> float:
    """Return the seconds from when the machines were there to the first process; without events, to now."""
    if status is None:
        return 0.0
    # After a restart the pods that are there are not those that came first.
    replicas = () if status.num_restarts else status.replicas
    first_s = min((one.since_s for one in replicas if one.since_s is not None), default=None)
    if tries := attempts(events):
        return 0.0 if first_s is None else max(0.0, tries[0].began_s - first_s)
    began_s = status.since_s if first_s is None else first_s
    if began_s is None or status.has_ended or status.state == "pending":
        return 0.0
    if status.num_restarts:
        notes.append(f"it restarted {status.num_restarts} times, and its waits for machines are counted too")
    notes.append(f"counted from {format_duration(now_s - began_s)} ago, when it got its machines: it has no events yet")
    return max(0.0, now_s - began_s)


def _predicted_usd(spec: RunSpec | None) -> float | None:
    with suppress(EmbarkError):  # it has no machine of the catalog, or no plan
        return estimate_launch(spec).total_usd if spec and (spec.place.machine or spec.place.cloud) else None
    return None


def estimate_launch(spec: RunSpec) -> LaunchEstimate:
    """Estimate a run in a cloud. If no plan can be made, the verdict says why, and only the hourly price is known."""
    catalog = load_catalog()
    job = make_job(spec, catalog)
    region, per_hour, purchase = job.price.region, job.usd_per_hour, job.price.purchase
    price = (f"{format_usd(per_hour)} an hour {PURCHASE_NAMES[purchase]} in {region}" if per_hour is not None
             else f"the catalog has no price {PURCHASE_NAMES[purchase]} in {region}")
    fits, sentence, total = True, "", None
    try:
        sized, size = resolve_data(spec)
        trace_dense(sized)
        # The region of the launch, where its prices are known at all.
        known = region if (job.machine.name, region) in catalog.prices else ""
        estimator = Estimator(sized, workload_of(sized, size), catalog, predict_with(CachedPlanner()), known, purchase)
        estimate = estimator.of_place(job.machine)
        answer = verdict(estimate, estimator)
        fits, sentence, total = answer.fits, answer.sentence, estimate.total_usd(purchase)
    except EmbarkError as error:
        sentence = f"{job.title}; no plan could be made: {error.what}"
    return LaunchEstimate(fits, sentence, price + _stops(spec, total), per_hour, total)


def estimate_server(spec: RunSpec) -> LaunchEstimate:
    """Estimate the replicas that always run, on nodes of the cluster that have room for them."""
    job = make_job(spec, load_catalog())
    serve, gib = job.spec.serve, memory_gib(job.spec)
    request = ServeRequest(qps=1, p99_ms=10, cloud=job.cloud, region=job.spec.place.region, machine=serve.machine)
    best = offers_for(serve.min_replicas, gib * GIB, request)[0]
    sentence = f"{server_name(spec.name)}: {serve.min_replicas} to {serve.max_replicas} replicas of {gib} GiB each"
    if best.usd_per_month is None:
        return LaunchEstimate(True, sentence, f"the catalog has no price of machines for them: {best.why_not}")
    per_hour = best.usd_per_month / HOURS_PER_MONTH
    price = (f"{format_usd(best.usd_per_month)} a month on demand in {best.region} for {best.num_machines} x "
             f"{best.machine}, if the cluster has no such room already")
    return LaunchEstimate(True, sentence, price, usd_per_hour=per_hour)


def _stops(spec: RunSpec, total_usd: float | None) -> str:
    budget = spec.place.budget_usd
    if budget is None:
        return ""
    early = f", before it is done: the plan says {format_usd(total_usd)}" if total_usd and total_usd > budget else ""
    return f"; it stops itself at {format_usd(budget)}{early}"

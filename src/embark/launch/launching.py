"""Estimate, launch, supervise and cancel a run."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from embark.catalog import load_catalog
from embark.catalog.pricing import PURCHASE_NAMES
from embark.data import resolve_from_data, resolve_if_readable
from embark.errors import EmbarkError, Interrupted, UserError
from embark.formatting import format_usd, to_one_line
from embark.launch.backend import LaunchBackend, LaunchRequest, Resource, RunHandle, Status, backend_for, backend_of
from embark.launch.backends.local import Local
from embark.launch.run_registry import (
    STORE_RETRY,
    RunRecord,
    delete_record,
    launch_lock,
    location_hash,
    lookup_run,
    record_path,
    save_record,
)
from embark.launch.shell import Notify, Shell
from embark.plan.closed_form import CachedPlanner
from embark.plan.plan import predict_with
from embark.plan.survey import Estimator
from embark.plan.verdict import verdict
from embark.plan.workload import resolve_data, trace_dense, workload_of
from embark.render.job import make_job
from embark.render.serving import GIB, SERVE_TARGETS, memory_gib, server_name
from embark.spec import RunSpec, to_toml
from embark.store import CheckpointStore, open_store

SUPERVISE_POLL_S = 15.0


@dataclass(frozen=True, slots=True)
class LaunchEstimate:
    """The plan's answer about the spec's own machines."""

    fits: bool
    verdict: str
    price: str  # `$110.08 an hour on demand in us-west-2`, or that it is unknown.
    usd_per_hour: float | None = None
    total_usd: float | None = None


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A run that was checked and may be launched."""

    request: LaunchRequest
    backend: LaunchBackend = field(repr=False)
    estimate: LaunchEstimate | None  # None: it costs nothing.
    prepared_s: float = field(default_factory=time.time)  # A launch that came after it was not seen.

    @property
    def handle(self) -> RunHandle:
        return self.request.handle


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """A run that was launched or, on a dry run, the commands that would have."""

    name: str
    title: str
    backend: str
    where: Mapping[str, str | int]
    run_uri: str
    usd_per_hour: float | None
    estimate: LaunchEstimate | None = None
    state: str = "submitted"  # With `--supervise`: how it ended.
    reason: str = ""
    commands: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What `cancel` removed, and what remains."""

    name: str
    title: str
    removed: tuple[str, ...]
    remains: tuple[Resource, ...]
    is_complete: bool
    last_checkpoint: str  # Its name; empty where none can be seen from here.


def prepare_launch(spec: RunSpec, shell: Shell, notify: Notify, *, context: str = "") -> PreparedLaunch:
    """Checks everything and creates nothing. Raises where the run does not fit or cannot be launched."""
    try:
        backend = backend_for(spec, shell, notify, context=context)
        is_serving = spec.place.target in SERVE_TARGETS
        if isinstance(backend, Local):
            spec = spec if is_serving else resolve_from_data(spec)
        else:
            spec, unread = resolve_if_readable(spec)
            if unread:
                notify(unread)
        estimate = None
        if is_serving:
            estimate = None if isinstance(backend, Local) else estimate_server(spec)
        elif spec.place.machine or spec.place.cloud:
            estimate = estimate_launch(spec)
        if estimate is not None and not estimate.fits:
            raise UserError(estimate.verdict, fix="nothing was launched. embark plan shows what fits; embark render "
                                                  "writes the files in spite of it")
        request, prepared_s = LaunchRequest(spec, backend.handle_of(spec)), time.time()
        backend.check(request)
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C; nothing was created") from None
    return PreparedLaunch(request=request, backend=backend, estimate=estimate, prepared_s=prepared_s)


def submit_launch(launch: PreparedLaunch) -> RunRecord:
    """Whatever interrupts it, the error lists what may exist by then, with the commands that remove it."""
    with launch_lock(launch.handle):
        before = lookup_run(f"{launch.handle.name}@{location_hash(launch.handle)}")
        if before is not None and before.submitted_s > launch.prepared_s:  # another command was faster
            launch.backend.check(launch.request)
        return _submit(launch)


def _submit(launch: PreparedLaunch) -> RunRecord:
    run = RunRecord(handle=launch.handle, spec_toml=to_toml(launch.request.spec), submitted_s=time.time(),
                    is_submitted=False, path=record_path(launch.handle))
    created: list[Resource] = []
    try:
        save_record(run)
        launch.backend.submit(replace(launch.request, record=created.append))
        return save_record(replace(run, is_submitted=True))
    except KeyboardInterrupt:
        if not created:
            delete_record(run)
            raise Interrupted("stopped by Ctrl-C; nothing was created") from None
        raise Interrupted(f"stopped by Ctrl-C; {_may_exist(created)}", fix=_removal(created)) from None
    except EmbarkError as error:
        if not created:
            delete_record(run)
            raise
        fix = "; ".join(part for part in (error.fix, f"to remove: {_removal(created)}") if part)
        raise type(error)(f"{error.what}; {_may_exist(created)}", fix=fix) from error


def launch_result(launch: PreparedLaunch, *, status: Status | None = None,
                  commands: tuple[tuple[str, ...], ...] = ()) -> LaunchResult:
    return LaunchResult(**asdict(launch.handle), estimate=launch.estimate, commands=commands,
                        state=status.state if status else "dry run" if commands else "submitted",
                        reason=status.reason if status else "")


def find_active(name: str, shell: Shell, notify: Notify) -> RunRecord | None:
    """A launched run of that name which has not ended: supervision of it may be resumed."""
    run = lookup_run(name)
    return None if run is None or backend_of(run.handle, shell, notify).status(run.handle).has_ended else run


def supervise(run: RunRecord, shell: Shell, notify: Notify, *, poll_s: float = SUPERVISE_POLL_S) -> Status:
    """Re-creates machines that the run loses, until it ends. Ctrl-C ends the supervision and not the run."""
    handle = run.handle
    backend = backend_of(handle, shell, notify)
    said = ""
    try:
        while True:
            try:
                status = backend.status(handle)
                if status.has_ended or not backend.can_recover:
                    return status
                now = f"{handle.name}: {status.state}" + (f": {status.reason}" if status.reason else "")
                if now != said:
                    notify(now)
                    said = now
                if status.is_recoverable:
                    backend.recover(handle)
            except EmbarkError as error:  # a cloud without capacity now may have some later
                notify(f"{handle.name}: {error.what}; trying again")
            time.sleep(poll_s)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped supervising {handle.name}, which keeps running",
            fix=f"embark launch {handle.name} --supervise resumes; embark cancel {handle.name} ends the run",
        ) from None


def cancel_run(run: RunRecord, shell: Shell, notify: Notify) -> Cancellation:
    """Ends a run after a last checkpoint. A run that is not there any more is removed from the registry."""
    result = backend_of(run.handle, shell, notify).cancel(run.handle)
    if not shell.is_dry and result.is_complete:
        if result.removed:
            save_record(replace(run, is_submitted=True, is_cancelled=True))
        else:
            delete_record(run)
    return Cancellation(name=run.handle.name, title=run.handle.title, removed=result.removed, remains=result.remains,
                        is_complete=result.is_complete, last_checkpoint=_last_checkpoint(run.handle))


def _may_exist(created: list[Resource]) -> str:
    return "may exist by now: " + ", ".join(resource.what for resource in created)


def _removal(created: list[Resource]) -> str:
    return ", then ".join(dict.fromkeys(resource.remove for resource in reversed(created)))


def _last_checkpoint(handle: RunHandle) -> str:
    try:
        store = CheckpointStore(open_store(f"{handle.run_uri}/checkpoints", STORE_RETRY))
        return max((checkpoint.name for checkpoint in store.committed()), default="")
    except (EmbarkError, ImportError):
        return ""


def launch_title(handle: RunHandle) -> str:
    """One line for a person: what it is, and where it goes."""
    where = f" in {handle.where['context']}" if handle.where.get("context") else ""
    return f"{to_one_line(handle.title or handle.name)}{where}"


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
        trace_dense(sized)
        # The region of the launch, where its prices are known at all.
        known = region if (job.machine.name, region) in catalog.prices else ""
        estimator = Estimator(sized, workload_of(sized, size), catalog, predict_with(CachedPlanner()), known, purchase)
        estimate = estimator.of_place(job.machine)
        answer = verdict(estimate, estimator)
        fits, sentence, total = answer.fits, answer.sentence, estimate.total_usd(purchase)
    except EmbarkError as error:
        sentence = f"{job.title}; no plan could be made: {error.what}"
    return LaunchEstimate(fits=fits, verdict=sentence, price=price + _stops(spec, total), usd_per_hour=per_hour,
                          total_usd=total)


def estimate_server(spec: RunSpec) -> LaunchEstimate:
    """Of the replicas that always run, on nodes of the cluster that have room for them."""
    from embark.plan.serving import HOURS_PER_MONTH, ServeRequest, offers_for

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

"""`embark plan`: what a run takes on its machines, or the complete catalog ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from embark.catalog import load_catalog, machine_of_place
from embark.catalog.pricing import PURCHASE_NAMES, Purchase
from embark.errors import ExitCode, UserError
from embark.formatting import format_bytes, format_duration, format_usd, pluralize
from embark.model.placement import Planner
from embark.plan.cost import Bill
from embark.plan.plan import CatalogPlan, MachinePlan, PlanRequest
from embark.plan.plan import plan as make_plan
from embark.plan.prediction import GIB, MemoryUse, Prediction, StepTime
from embark.plan.storage import StorageNeed, StorageOffer, copy_s
from embark.plan.survey import Estimate, Survey, pareto_front
from embark.plan.workload import Workload
from embark.spec import RunSpec, load_spec
from .console import Console, Flag, Settings, Spec

if TYPE_CHECKING:
    from embark.plan.here import LocalPlan
    from embark.plan.serving import ServePlan

MOST_SHOWN = 15
MOST_OFFERS = 5
MOST_MACHINES = 6


def plan(
    spec: Spec, /, *, set_: Settings = (), here: Flag = False, across: Flag = False,
    by: Literal["dollars", "hours"] | None = None, deadline: float | None = None, budget: float | None = None,
    cloud: str = "", region: str = "",
    spot: Annotated[bool | None, Parameter(negative="--on-demand", show_default=False)] = None, max_nodes: int = 16,
    samples: int | None = None, exact: Flag = False,
    serve: Flag = False, qps: float | None = None, p99_ms: float | None = None, rows: int | None = None,
    tables: Literal["fp32", "fp16", "int8", "int4"] | None = None, cpu_machine: str = "", console: Console = Console()
) -> int:
    """Predict what fits, step time, hours and dollars before you pay. Needs neither torch nor a network.

    Plans for place.machine and place.nodes, or for the complete catalog if no machine is named.

    Exit code 1 if the run does not fit.

    Parameters
    ----------
    here
        Plan for this machine, its CPU or its GPUs; ignores place.machine. No dollars.
    across
        Rank every machine in the catalog, in every useful count; ignores place.machine.
    by
        With --across: cheapest or fastest first. Default: dollars, or hours if only --budget is given.
    deadline
        Maximum hours of the run.
    budget
        Maximum dollars of the run.
    cloud
        Only machines of this cloud: aws, azure or gcp.
    region
        The region; by default the cheapest for each machine.
    spot
        Use spot or on-demand prices; by default as place.spot says.
    max_nodes
        Maximum number of machines of one type.
    samples
        Samples per epoch, if the data cannot be read from here.
    exact
        Place the tables with TorchRec's own planner. Needs torch.
    serve
        Instead, plan `embark serve` on CPU machines: replicas, machines, dollars. Needs --qps and --p99-ms.
    qps
        With --serve: requests per second.
    p99_ms
        With --serve: milliseconds in which 99 of 100 requests are answered.
    rows
        With --serve: rows (candidates) of a request; default 128.
    tables
        With --serve: the tables' type as exported; default fp32.
    cpu_machine
        With --serve: only this machine, such as m7i.2xlarge.
    """
    loaded = load_spec(spec, set_)
    serving = {"--qps": qps, "--p99-ms": p99_ms, "--rows": rows, "--tables": tables, "--cpu-machine": cpu_machine}
    clouds = {"--cloud": cloud, "--region": region, "--spot": spot}
    training = {"--across": across, "--by": by, "--deadline": deadline, "--budget": budget, "--exact": exact}
    if serve:
        _refuse({**training, "--here": here, "--samples": samples}, "--serve plans a server, and {} a training run")
        if qps is None or p99_ms is None:
            raise UserError(f"--serve needs {'--qps' if qps is None else '--p99-ms'}",
                            "embark plan SPEC --serve --qps 500 --p99-ms 20")
        from embark.plan.serving import ServeRequest, plan_serving

        served = plan_serving(loaded, ServeRequest(
            qps=qps, p99_ms=p99_ms, rows_per_request=128 if rows is None else rows, tables=tables or "fp32",
            machine=cpu_machine, cloud=cloud, region=region, spot=spot))
        console.show(served, _render_serving)
        return ExitCode.DONE if served.is_ok else ExitCode.OTHER
    _refuse(serving, "{} is about serving", "add --serve, or leave it out")
    if here:
        from embark.doctor.machine import plan_this_machine

        _refuse({**training, **clouds}, "--here plans for this machine, and {} for those of a cloud")
        local = plan_this_machine(loaded, samples)
        console.show(local, _render_here)
        return ExitCode.DONE if local.is_ok else ExitCode.OTHER
    is_across = across or not loaded.place.machine
    if is_across and exact:
        raise UserError("--exact plans for one machine", "--set place.machine=p5.48xlarge, or leave --exact out")
    if not is_across and by:
        raise UserError("--by needs the complete catalog", "add --across")
    request = PlanRequest(across=across, by=by or "", deadline_h=deadline, budget_usd=budget, cloud=cloud,
                          region=region, spot=spot, max_nodes=max_nodes, num_samples=samples)
    planner = _torchrec_planner(loaded) if exact else None
    with console.stages() as stage:
        found = make_plan(loaded, request, planner=planner,
                          progress=lambda done, total: stage("machines", done / total, ""))
    if isinstance(found, CatalogPlan):
        console.show(found, _render_catalog)
    else:
        console.show(found, _render_machine)
    return ExitCode.DONE if found.is_ok else ExitCode.OTHER


def _refuse(flags: Mapping[str, object], what: str, fix: str = "leave one out") -> None:
    """Refuse the first of the flags that is given."""
    for flag, value in flags.items():
        if value:
            raise UserError(what.format(flag), fix)


def _render_here(console: Console, found: LocalPlan) -> None:
    console.result(found.sentence)
    if found.is_ok and found.memory is not None and not console.quiet:
        _render_memory(console, found.memory, "the fullest rank")
        if found.step is not None:
            _render_step_time(console, found.step)
            console.text(f"{found.workload.batch_size / found.step.total_s:,.0f} samples/s of "
                         f"{found.workload.model_kind}", style="dim")
    for note in found.notes:
        console.text(f"note: {note}", style="dim")


def _torchrec_planner(spec: RunSpec) -> Planner:
    from embark.stack.versions import require_stack

    machine = machine_of_place(load_catalog(), spec.place)
    if machine is not None and machine.gpu.kind == "tpu":
        raise UserError("--exact uses TorchRec's planner, and TorchRec does not run on a TPU", "leave --exact out")
    require_stack()
    from embark.trainers.torch.sharding import offline_plan

    planner: Planner = offline_plan
    return planner


def _render_machine(console: Console, found: MachinePlan) -> None:
    console.result(found.sentence)
    if found.verdict.fits and not console.quiet:
        _render_estimate(console, found)
    for note in found.estimate.prediction.notes:
        console.text(f"note: {note}", style="dim")


def _render_catalog(console: Console, found: CatalogPlan) -> None:
    console.result(found.sentence)
    console.text(_amount(found.workload), style="dim")
    if found.ranked and not console.quiet:
        _render_ranking(console, found.survey, found.ranked)


def _amount(workload: Workload) -> str:
    epochs = "" if workload.num_epochs == 1 else f", {workload.num_epochs:g} epochs"
    return f"for {workload.model_kind} on {workload.num_train_samples:,} samples{epochs} ({workload.source})"


def _render_ranking(console: Console, found: Survey, kept: Sequence[Estimate]) -> None:
    """Show the best of the ranking and all of the front, which has letters from the fastest on."""
    front = pareto_front(found.fitting, found.purchase)
    letters = {id(e): letter for e, letter in zip(front, ascii_lowercase, strict=False)}
    shown = [e for index, e in enumerate(kept) if index < MOST_SHOWN or id(e) in letters]
    purchase: Purchase = found.purchase
    other: Purchase = "on_demand" if purchase == "spot" else "spot"
    console.text("")
    console.table(
        [_rank_row(e, purchase, other, letters.get(id(e), "")) for e in shown],
        droppable=(PURCHASE_NAMES[other], "bound by", "step ms"))
    unpriced = {e.setup.machine.name for e in found.unpriced}
    more = [f"{len(kept) - len(shown):,} more: --json lists them" if len(kept) > len(shown) else "",
            "letters: nothing is both cheaper and faster; --here plans for this machine",
            f"{pluralize(len(found.too_small), 'machine')} too small" if found.too_small else "",
            f"{pluralize(len(unpriced), 'machine')} without a price" if unpriced else "",
            "~ TPU, planned by memory; its time is a rough estimate" if any(e.is_rough for e in shown) else ""]
    console.text("; ".join(filter(None, more)), style="dim")


def _rank_row(estimate: Estimate, purchase: Purchase, other: Purchase, letter: str) -> dict[str, object]:
    setup, step = estimate.setup, estimate.prediction.step
    return {
        "": letter or " ", "machines": setup.title,
        "accelerators": f"{setup.num_ranks} {setup.machine.gpu.name}",
        "step ms": None if step is None else step.total_s * 1e3, "bound by": step and step.bound_by,
        "time": f"{'~' if estimate.is_rough else ''}{format_duration(estimate.total_s(purchase))}",
        PURCHASE_NAMES[purchase]: format_usd(estimate.total_usd(purchase)),
        PURCHASE_NAMES[other]: format_usd(estimate.total_usd(other)),
        "region": estimate.price and estimate.price.region
    }


def _render_estimate(console: Console, found: MachinePlan) -> None:
    """Show all parts of a plan that fits."""
    estimate, purchase = found.estimate, found.purchase
    bill = estimate.bills[purchase]
    whose = "a chip" if estimate.setup.machine.gpu.kind == "tpu" else "the fullest rank"
    _render_memory(console, estimate.prediction.memory, whose)
    _render_step(console, estimate.prediction)
    _render_time(console, bill, found.workload)
    console.text("")
    shown = [b for b in estimate.bills.values() if b.usd_per_hour is not None or b.purchase == purchase]
    console.table([{
        "paid": PURCHASE_NAMES[b.purchase], "$/h": format_usd(b.usd_per_hour),
        "time": format_duration(b.time.total_s) if b.time else "never ends",
        "interruptions": round(b.time.num_interruptions, 2) if b.time else None,
        "machines": format_usd(b.machines_usd), "storage": format_usd(b.storage_usd), "in all": format_usd(b.total_usd)
    } for b in shown])
    missing = [PURCHASE_NAMES[b.purchase] for b in estimate.bills.values() if b.usd_per_hour is None]
    if missing:
        console.text(f"no price known: {', '.join(missing)}", style="dim")
    saves = bill.saves
    pause, write, load = (format_duration(s) for s in (saves.pause_s, saves.write_s, saves.load_s))
    is_once = 0 < found.workload.num_steps <= saves.every_steps
    why = "the run saves once, at its end" if is_once else saves.why
    console.text(f"\na checkpoint is {format_bytes(saves.checkpoint_bytes)}: it pauses training for {pause}, is "
                 f"committed after {write} and loads in {load}; {why}")
    hours = bill.failures.mtbf_s / 3600
    console.text(f"set store.hours_between_failures = {hours:{'.0f' if hours >= 100 else '.4g'}} to plan with the same "
                 "failure rate", style="dim")
    if estimate.need is not None:
        _render_storage(console, estimate.need, estimate.offers, estimate.volume)


def _render_memory(console: Console, memory: MemoryUse, whose: str) -> None:
    sizes = {**memory.device, "in all": memory.device_total, "available": memory.device_limit} if memory.device else {}
    console.text("")
    if sizes:
        console.table([{f"memory of {whose}": name, "GiB": round(num / GIB, 2)} for name, num in sizes.items()])
    limit = f" of {memory.host_limit / GIB:,.0f}" if memory.host_limit else ""
    parts = ", ".join(f"{name} {num / GIB:,.1f}" for name, num in memory.host.items())
    console.text(f"of a host: {memory.host_total / GIB:,.1f}{limit} GiB ({parts})", style="dim")


def _render_step(console: Console, prediction: Prediction) -> None:
    step, placement = prediction.step, prediction.placement
    if step is None or placement is None:
        return
    _render_step_time(console, step)
    console.text(f"{prediction.samples_per_s:,.0f} samples/s; {step.basis}", style="dim")
    shardings = ", ".join(f"{num} {kind}" for kind, num in Counter(placement.shardings.values()).most_common())
    console.text(f"{pluralize(len(placement.shardings), 'table')} by {placement.made_by}: {shardings}; engine "
                 f"{prediction.engine}: {prediction.engine_why}", style="dim")


def _render_step_time(console: Console, step: StepTime) -> None:
    console.text("")
    console.table([{"time of a step": name, "ms": round(part_s * 1e3, 3)}
                   for name, part_s in {**step.parts_s, "a step, overlapped": step.total_s}.items() if part_s])


def _render_time(console: Console, bill: Bill, workload: Workload) -> None:
    time = bill.time
    if time is None:
        return
    parts = {
        "start: machines, image, rendezvous, first step": time.start.total_s,
        f"training, {workload.num_steps:,} steps": time.train_s,
        f"evaluation, {pluralize(workload.num_evals, 'time')}": time.eval_s,
        f"checkpoints, {pluralize(bill.saves.num_saves + bill.saves.has_last, 'save')}": time.save_s,
        f"lost and repeated, {time.num_interruptions:.2f} interruptions": time.lost_s,
        "restarts and waiting for machines": time.restart_s + time.waiting_s,
        "in all": time.total_s
    }
    console.text("")
    console.table([{f"time of the run {PURCHASE_NAMES[bill.purchase]}": name, "expected": format_duration(part_s)}
                   for name, part_s in parts.items()])
    money = "" if bill.epoch_usd is None else f", {format_usd(bill.epoch_usd)}"
    console.text(f"an epoch of {workload.model_kind} on {workload.num_train_samples:,} samples trains in "
                 f"{format_duration(time.epoch_s)}{money} ({workload.source}); {bill.failures.why}", style="dim")


def _render_storage(
    console: Console, need: StorageNeed, offers: Sequence[StorageOffer], volume: StorageOffer | None
) -> None:
    reads = "no reads"
    if need.data_bytes:
        reads = (f"{need.file_gbyte_per_s:,.2f} GB/s of reads from a file system, or {need.object_gbyte_per_s:,.2f} "
                 f"from an object store, {need.object_gbyte_per_s_per_host:,.2f} by each of "
                 f"{pluralize(need.num_hosts, 'host')}")
    grace = "" if need.grace_gbyte_per_s is None else f", {need.grace_gbyte_per_s:,.2f} to end one within the notice"
    console.text(f"\nstorage: {reads}; {need.write_gbyte_per_s:,.2f} GB/s of writes to end a save before the next"
                 f"{grace}; {format_bytes(need.data_bytes + need.kept_bytes)} in all")
    console.text(need.reads_why, style="dim")
    if volume is not None:
        speed = "" if volume.gbyte_per_s is None else f", {volume.gbyte_per_s:,.2f} GB/s to these machines"
        seconds = copy_s(need, volume)
        copied = f"; filling it takes about {format_duration(seconds)} before the machines start" if seconds else ""
        why = f"; {volume.why}" if volume.why else ""
        console.text(f"place.volume: storage.sh buys {volume.tib * 1024:,.0f} GiB of {volume.volume.title}{speed}, "
                     f"{format_usd(volume.usd_per_month)} a month{copied}{why}")
    console.table([{"volume": o.volume.name, "TiB": round(o.tib, 2), "GB/s": o.gbyte_per_s,
                    "$ a month": format_usd(o.usd_per_month), "enough": o.is_enough, "": o.why or " "}
                   for o in offers[:MOST_OFFERS]])


def _render_serving(console: Console, found: ServePlan) -> None:
    console.result(found.sentence)
    if console.quiet:
        return
    if found.offers:
        console.text("\n".join(["", *found.why]))
        console.text("")
        console.table([{
            "machine": one.machine, "replicas": one.replicas_per_machine or None, "machines": one.num_machines or None,
            "$ a month": format_usd(one.usd_per_month), "$ a million": format_usd(one.usd_per_million),
            "region": one.region, "": one.why_not or " "} for one in found.offers[:MOST_MACHINES]])
        console.text("")
        console.table([{
            "tables": one.tables, "of all tables": format_bytes(one.table_bytes),
            "of a replica": format_bytes(one.replica_bytes),
            "cheapest": one.offer and f"{one.offer.num_machines} x {one.offer.machine}",
            "$ a month": format_usd(one.offer and one.offer.usd_per_month)} for one in found.by_tables])
        console.text(f"a replica: {found.replica_qps:,.4g} requests/s, {found.replica_rows_per_s:,.0f} rows/s at "
                     f"{found.utilization:.0%} of a core", style="dim")
    console.text(found.basis, style="dim")

"""`embark plan`: what a run takes on its machines, or the complete catalog ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from embark.catalog import find_machine, load_catalog
from embark.catalog.pricing import PURCHASE_NAMES, Purchase
from embark.cli.console import Console
from embark.cli.options import Flag, Settings, Spec
from embark.errors import ExitCode, UserError
from embark.formatting import MISSING, format_bytes, format_duration, format_usd, pluralize
from embark.model.placement import Planner
from embark.plan.cost import Bill
from embark.plan.plan import CatalogPlan, MachinePlan, PlanRequest
from embark.plan.plan import plan as make_plan
from embark.plan.predict import SEEN_SHARE
from embark.plan.prediction import Prediction
from embark.plan.storage import StorageNeed, StorageOffer
from embark.plan.survey import Estimate, Survey, setup_name
from embark.plan.tpu import ChipMemory, planned_chip_memory
from embark.plan.workload import Workload, resolve_data
from embark.spec import RunSpec, load_spec

if TYPE_CHECKING:
    from embark.trainers.jax.aot import Compiled

GIB = 1024**3
MOST_SHOWN = 15
MOST_OFFERS = 5
PLOT_WIDTH, PLOT_HEIGHT = 76, 14
WIDE, VERY_WIDE = 110, 122
"""Columns of a terminal from which the ranking has more of its own."""


def plan(
    spec: Spec, /, *, set_: Settings = (), across: Flag = False, by: Literal["dollars", "hours"] | None = None,
    deadline: float | None = None, budget: float | None = None, cloud: str = "", region: str = "",
    spot: Annotated[bool | None, Parameter(negative="--on-demand", show_default=False)] = None, max_nodes: int = 16,
    samples: int | None = None, picture: Path | None = None, exact: Flag = False, tpu_compile: str = "",
    console: Console = Console(),
) -> int:
    """Predict what a run takes before you pay for it: what fits, step time, hours, dollars. Needs no torch, no network.

    Plans for place.machine and place.nodes, or, where no machine is named, for the complete catalog. Exit code 1 if the
    run does not fit.

    Parameters
    ----------
    across
        Rank every machine of the catalog in every useful count, whatever place.machine is.
    by
        With --across: cheapest first, or fastest first. With a budget alone: fastest first.
    deadline
        Hours the run may take.
    budget
        Dollars the run may cost.
    cloud
        Only machines of this cloud: aws, azure or gcp.
    region
        Use this region's prices; by default those of the cheapest region.
    spot
        Spot or on-demand prices; by default as place.spot says.
    max_nodes
        Try at most so many machines of a kind.
    samples
        Samples in an epoch, where the data cannot be read from here.
    picture
        With --across: write a chart of cost against time to this SVG file.
    exact
        Place the tables with TorchRec's own planner. Needs torch.
    tpu_compile
        Instead, compile the step for these chips, such as v5e:2x4, and show the compiler's memory plan. Needs jax[tpu],
        but no TPU.
    """
    loaded = load_spec(spec, set_)
    if tpu_compile:
        return _compile(console, loaded, tpu_compile)
    is_across = across or not loaded.place.machine
    if is_across and exact:
        raise UserError("--exact plans for one machine", fix="--set place.machine=p5.48xlarge, or leave --exact out")
    if not is_across and (picture is not None or by):
        raise UserError("--picture and --by need the complete catalog", fix="add --across")
    request = PlanRequest(across=across, by=by or "", deadline_h=deadline, budget_usd=budget, cloud=cloud,
                          region=region, spot=spot, max_nodes=max_nodes, num_samples=samples)
    planner = _torchrec_planner(loaded) if exact else None
    with console.stages() as stage:
        found = make_plan(loaded, request, planner=planner,
                          progress=lambda done, total: stage("machines", done / total, ""))
    if isinstance(found, CatalogPlan):
        _show_catalog(console, found, loaded.name, picture)
    else:
        _show_machine(console, found)
    return ExitCode.DONE if found.is_ok else ExitCode.OTHER


def _torchrec_planner(spec: RunSpec) -> Planner:
    from embark.stack.versions import require_stack

    if find_machine(load_catalog(), spec.place.machine).gpu.kind == "tpu":
        raise UserError("--exact uses TorchRec's planner, and TorchRec does not run on a TPU", fix="leave --exact out")
    require_stack()
    from embark.trainers.torch.sharding import offline_plan

    planner: Planner = offline_plan
    return planner


def _show_machine(console: Console, found: MachinePlan) -> None:
    console.data(found.to_dict())
    console.result(found.sentence)
    if found.verdict.fits and not console.quiet and not console.json:
        _show_estimate(console, found)
    for note in found.estimate.prediction.notes:
        console.text(f"note: {note}", style="dim")


def _show_catalog(console: Console, found: CatalogPlan, name: str, picture: Path | None) -> None:
    if picture is not None:
        _draw(picture, found, name)
    console.data({**found.to_dict(), "picture": str(picture or "")})
    console.result(found.sentence)
    if found.ranked and not console.quiet and not console.json:
        _show_ranking(console, found.survey, found.ranked)
    if picture is not None:
        console.text(f"wrote {picture}")


def _show_ranking(console: Console, found: Survey, kept: Sequence[Estimate]) -> None:
    """The best of the ranking, all of the front, and both as a small plot."""
    from embark.plan.chart import front_letters, plot

    letters = front_letters(found)
    shown = [e for place, e in enumerate(kept) if place < MOST_SHOWN or id(e) in letters]
    console.text("")
    console.table([_rank_row(e, found.purchase, letters.get(id(e), "")) for e in shown],
                  _rank_headings(found.purchase, console.out.width))
    more = [f"{len(kept) - len(shown):,} more: --json lists them" if len(kept) > len(shown) else "",
            "letters: nothing is both cheaper and faster", _excluded(found),
            "~ TPU, planned by memory; its time is a rough estimate" if any(e.is_rough for e in shown) else ""]
    console.text("; ".join(words for words in more if words), style="dim")
    is_ascii = not console.out.encoding.lower().startswith("utf")
    lines = plot(found, width=min(console.out.width, PLOT_WIDTH), height=PLOT_HEIGHT, ascii_only=is_ascii)
    if lines:
        console.text("\n" + "\n".join(lines))


def _excluded(found: Survey) -> str:
    unpriced = {e.setup.machine.name for e in found.unpriced}
    words = [f"{pluralize(len(found.too_small), 'machine')} too small" if found.too_small else "",
             f"{pluralize(len(unpriced), 'machine')} without a price" if unpriced else ""]
    return ", ".join(word for word in words if word)


def _draw(path: Path, found: CatalogPlan, name: str) -> None:
    from embark.plan.chart import draw_svg
    from embark.store import write_atomic

    try:
        write_atomic(path, draw_svg(found.survey, name, found.bounds))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", fix="--picture FILE.svg, in a directory that exists") from error


def _rank_headings(purchase: Purchase, width: int) -> dict[str, str]:
    """As many columns as there is room for."""
    headings = {"letter": "", "setup": "machines", "accelerators": "accelerators"}
    if width >= WIDE:
        headings |= {"step_ms": "step ms", "bound_by": "bound by"}
    headings |= {"time": "time", "usd": PURCHASE_NAMES[purchase]}
    if width >= VERY_WIDE:
        headings |= {"other_usd": PURCHASE_NAMES[_other_purchase(purchase)]}
    return headings | {"region": "region"}


def _rank_row(estimate: Estimate, purchase: Purchase, letter: str) -> dict[str, object]:
    setup, step = estimate.setup, estimate.prediction.step
    return {
        "letter": letter or " ", "setup": setup_name(estimate),
        "accelerators": f"{setup.num_ranks} {setup.machine.gpu.name}",
        "step_ms": None if step is None else step.total_s * 1e3, "bound_by": step and step.bound_by,
        "time": f"{'~' if estimate.is_rough else ''}{_span(estimate.total_s(purchase))}",
        "usd": format_usd(estimate.total_usd(purchase)),
        "other_usd": format_usd(estimate.total_usd(_other_purchase(purchase))),
        "region": estimate.price and estimate.price.region,
    }


def _span(seconds: float | None) -> str:
    """`45 s`, `8.3 min`, `12.9 h`, `3.2 d`: short enough for a column."""
    if seconds is None:
        return MISSING
    for at_least, length_s, unit in ((172_800, 86_400, "d"), (5400, 3600, "h"), (90, 60, "min")):
        if seconds >= at_least:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def _show_estimate(console: Console, found: MachinePlan) -> None:
    """All parts of a plan that fits."""
    estimate, workload, purchase = found.estimate, found.workload, found.purchase
    bill, need = estimate.bills[purchase], estimate.need
    console.text("")
    _show_memory(console, estimate.prediction)
    console.text("")
    _show_step(console, estimate.prediction)
    console.text("")
    _show_time(console, bill, workload)
    console.text("")
    shown = [b for b in estimate.bills.values() if b.usd_per_hour is not None or b.purchase == purchase]
    console.table([_bill_row(b) for b in shown],
                  {"purchase": "paid", "usd_per_hour": "$/h", "time": "time", "interruptions": "interruptions",
                   "machines": "machines", "storage": "storage", "total": "in all"})
    missing = [PURCHASE_NAMES[b.purchase] for b in estimate.bills.values() if b.usd_per_hour is None]
    if missing:
        console.text(f"no price known: {', '.join(missing)}", style="dim")
    console.text("")
    _show_saves(console, bill)
    if need is not None:
        console.text("")
        _show_storage(console, need, estimate.offers)


def _show_memory(console: Console, prediction: Prediction) -> None:
    memory = prediction.memory
    sizes = {**memory.device, "in all": memory.device_total, "available": memory.device_limit}
    rows = [{"part": name, "gib": round(num / GIB, 2)} for name, num in sizes.items()]
    whose = "a chip" if prediction.setup.machine.gpu.kind == "tpu" else "the fullest rank"
    console.table(rows, {"part": f"memory of {whose}", "gib": "GiB"})
    limit = f" of {memory.host_limit / GIB:,.0f}" if memory.host_limit else ""
    parts = ", ".join(f"{name} {num / GIB:,.1f}" for name, num in memory.host.items())
    console.text(f"of a host: {memory.host_total / GIB:,.1f}{limit} GiB ({parts})", style="dim")


def _show_step(console: Console, prediction: Prediction) -> None:
    step, placement = prediction.step, prediction.placement
    if step is None or placement is None:
        return
    parts = {**step.parts_s, "a step, overlapped": step.total_s}
    rows = [{"part": name, "ms": round(part_s * 1e3, 3)} for name, part_s in parts.items() if part_s]
    console.table(rows, {"part": "time of a step", "ms": "ms"})
    console.text(f"{prediction.samples_per_s:,.0f} samples/s; {step.basis}", style="dim")
    kinds = Counter(placement.shardings.values())
    shardings = ", ".join(f"{num} {kind}" for kind, num in kinds.most_common())
    console.text(f"{pluralize(len(placement.shardings), 'table')} by {placement.made_by}: {shardings}; engine "
                 f"{prediction.engine}: {prediction.engine_why}", style="dim")


def _show_time(console: Console, bill: Bill, workload: Workload) -> None:
    time = bill.time
    if time is None:
        return
    parts = {
        "start: machines, image, rendezvous, first step": time.start.total_s,
        f"training, {workload.num_steps:,} steps": time.train_s,
        f"evaluation, {pluralize(workload.num_evals, 'time')}": time.eval_s,
        f"checkpoints, {pluralize(bill.saves.num_saves + bill.saves.has_last, 'save')}": time.save_s,
        f"lost and done again, {time.num_interruptions:.2f} interruptions": time.lost_s,
        "restarts and waiting for machines": time.restart_s + time.waiting_s,
    }
    rows = [{"part": name, "time": format_duration(part_s)} for name, part_s in parts.items()]
    console.table([*rows, {"part": "in all", "time": format_duration(time.total_s)}],
                  {"part": f"time of the run {PURCHASE_NAMES[bill.purchase]}", "time": "expected"})
    epochs = f"an epoch of {workload.num_train_samples:,} samples trains in {format_duration(time.epoch_s)}"
    money = "" if bill.epoch_usd is None else f", {format_usd(bill.epoch_usd)}"
    console.text(f"{epochs}{money} ({workload.source}); {bill.failures.why}", style="dim")


def _bill_row(bill: Bill) -> dict[str, object]:
    return {
        "purchase": PURCHASE_NAMES[bill.purchase], "usd_per_hour": format_usd(bill.usd_per_hour),
        "time": format_duration(bill.time.total_s) if bill.time else "never ends",
        "interruptions": round(bill.time.num_interruptions, 2) if bill.time else None,
        "machines": format_usd(bill.machines_usd), "storage": format_usd(bill.storage_usd),
        "total": format_usd(bill.total_usd),
    }


def _show_saves(console: Console, bill: Bill) -> None:
    saves = bill.saves
    pause, write, load = (format_duration(s) for s in (saves.pause_s, saves.write_s, saves.load_s))
    console.text(f"a checkpoint is {format_bytes(saves.checkpoint_bytes)}: it pauses training for {pause}, is "
                 f"committed after {write} and loaded in {load}; {saves.why}")
    console.text(f"store.hours_between_failures = {bill.failures.mtbf_s / 3600:.4g} tells the run to expect the same",
                 style="dim")


def _show_storage(console: Console, need: StorageNeed, offers: Sequence[StorageOffer]) -> None:
    reads = "storage: no reads"
    if need.data_bytes:
        each = f"{need.object_gbyte_per_s_per_host:,.2f} by each of {pluralize(need.num_hosts, 'host')}"
        reads = (f"storage: {need.file_gbyte_per_s:,.2f} GB/s of reads from a file system, or "
                 f"{need.object_gbyte_per_s:,.2f} from an object store, {each}")
    grace = "" if need.grace_gbyte_per_s is None else f", {need.grace_gbyte_per_s:,.2f} to end one within the notice"
    console.text(f"{reads}; {need.write_gbyte_per_s:,.2f} GB/s of writes to end a save before the next{grace}; "
                 f"{format_bytes(need.data_bytes + need.kept_bytes)} in all")
    console.text(need.reads_why, style="dim")
    rows = [{"volume": o.volume.name, "tib": round(o.tib, 2), "gbyte_per_s": o.gbyte_per_s,
             "usd": format_usd(o.usd_per_month), "enough": "yes" if o.is_enough else "no", "why": o.why or " "}
            for o in offers[:MOST_OFFERS]]
    console.table(rows, {"volume": "volume", "tib": "TiB", "gbyte_per_s": "GB/s", "usd": "$ a month",
                         "enough": "enough", "why": ""})


def _other_purchase(purchase: Purchase) -> Purchase:
    return "on_demand" if purchase == "spot" else "spot"


def _compile(console: Console, spec: RunSpec, topology: str) -> ExitCode:
    """Exit code 64 where the step does not fit the chips: the compiler says so."""
    from embark.trainers.jax.aot import compile_for

    spec, _ = resolve_data(spec, None)
    with console.stages() as stage:
        stage(f"compiling for {topology}", 0.0, "a minute or two")
        compiled = compile_for(spec, topology)
    chip = load_catalog().gpus[f"TPU-{topology.partition(':')[0]}"]
    ours = planned_chip_memory(spec, topology, compiled.num_chips)
    limit_bytes = (chip.seen_mib or chip.memory_mib * SEEN_SHARE) * 2**20
    sentence = (f"{spec.name} compiles for {topology}: {format_bytes(compiled.peak_bytes)} on each of "
                f"{compiled.num_chips} chips, {compiled.batch_per_chip:,} samples each")
    if console.json:
        planned = {"chip": chip.name, **asdict(ours), "argument_bytes": ours.arguments,
                   "temporary_bytes": ours.temporaries, "peak_bytes": ours.compiled, "device_bytes": ours.parts(),
                   "device_limit_bytes": limit_bytes}
        console.data({**asdict(compiled), "peak_bytes": compiled.peak_bytes, "verdict": sentence, "planned": planned})
        return ExitCode.DONE
    console.result(sentence)
    if not console.quiet:
        _show_compiled(console, compiled, ours, limit_bytes)
    return ExitCode.DONE


def _show_compiled(console: Console, compiled: Compiled, ours: ChipMemory, limit_bytes: float) -> None:
    rows = [
        ("tables, state, dense layers, batch", compiled.argument_bytes, ours.arguments),
        ("during a step", compiled.temporary_bytes, ours.temporaries),
        ("results not in place", compiled.output_bytes - compiled.shared_bytes, None),
        ("program", compiled.code_bytes, ours.program),
        ("in all", compiled.peak_bytes, ours.compiled),
        ("batches waiting", None, ours.ahead),
        ("available", None, limit_bytes),
    ]
    console.table([{"a chip's memory": part, "the compiler": MISSING if theirs is None else format_bytes(theirs),
                    "embark plan": MISSING if own is None else format_bytes(own)} for part, theirs, own in rows])
    if compiled.sparsecores:
        console.text(f"{compiled.sparsecores}; embark plan counts the lookup without them", style="dim")
    console.text(f"compiled in {compiled.compile_s:.0f} s; this says nothing about speed", style="dim")

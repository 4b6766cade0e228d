"""A plan as tables for a person and as plain values for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from embark.catalog.pricing import PURCHASE_NAMES, Purchase
from embark.cli.console import Console
from embark.formatting import MISSING, format_bytes, format_duration, format_usd, pluralize
from embark.plan.across import Survey, pareto_front, setup_name
from embark.plan.cost import Bill
from embark.plan.estimate import Estimate
from embark.plan.prediction import Prediction
from embark.plan.saves import Saves
from embark.plan.storage import StorageNeed, StorageOffer
from embark.plan.verdict import Verdict
from embark.plan.workload import Workload

GIB = 1024**3
WIDE, VERY_WIDE = 110, 122
"""Letters of a terminal from which the ranking has more columns."""
MOST_OFFERS = 5


def rank_headings(way: Purchase, width: int) -> dict[str, str]:
    """As many columns as there is room for."""
    headings = {"letter": "", "setup": "machines", "accelerators": "accelerators"}
    if width >= WIDE:
        headings |= {"step_ms": "step ms", "bound_by": "bound by"}
    headings |= {"time": "time", "usd": PURCHASE_NAMES[way]}
    if width >= VERY_WIDE:
        headings |= {"other_usd": PURCHASE_NAMES[_other(way)]}
    return headings | {"region": "region"}


def rank_row(estimate: Estimate, way: Purchase, letter: str) -> dict[str, object]:
    setup, step = estimate.setup, estimate.prediction.step
    return {
        "letter": letter or " ", "setup": setup_name(estimate),
        "accelerators": f"{setup.num_ranks} {setup.machine.gpu.name}",
        "step_ms": None if step is None else step.total_s * 1e3, "bound_by": step and step.bound_by,
        "time": f"{'~' if estimate.is_rough else ''}{span(estimate.total_s(way))}", "usd": format_usd(estimate.total_usd(way)),
        "other_usd": format_usd(estimate.total_usd(_other(way))), "region": estimate.price and estimate.price.region,
    }


def span(seconds: float | None) -> str:
    """`45 s`, `8.3 min`, `12.9 h`, `3.2 d`: short enough for a column."""
    if seconds is None:
        return MISSING
    for at_least, length_s, unit in ((172_800, 86_400, "d"), (5400, 3600, "h"), (90, 60, "min")):
        if seconds >= at_least:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def say_estimate(console: Console, estimate: Estimate, workload: Workload, way: Purchase) -> None:
    """All parts of a plan that fits."""
    bill, need = estimate.bills[way], estimate.need
    console.text("")
    _say_memory(console, estimate.prediction)
    console.text("")
    _say_step(console, estimate.prediction)
    console.text("")
    _say_time(console, bill, workload)
    console.text("")
    console.table([_bill_row(b) for b in estimate.bills.values() if b.usd_per_hour is not None or b.way == way],
                  {"way": "paid", "usd_per_hour": "$/h", "time": "time", "interruptions": "interruptions",
                   "machines": "machines", "storage": "storage", "total": "in all"})
    missing = [PURCHASE_NAMES[b.way] for b in estimate.bills.values() if b.usd_per_hour is None]
    if missing:
        console.text(f"no price known: {', '.join(missing)}", style="dim")
    console.text("")
    _say_saves(console, bill)
    if need is not None:
        console.text("")
        _say_storage(console, need, estimate.offers)


def estimate_data(estimate: Estimate, answer: Verdict, workload: Workload, way: Purchase) -> dict[str, object]:
    """Everything, with units in the names."""
    return {
        "verdict": answer.sentence, "fits": answer.fits, "way": way, "workload": asdict(workload),
        **_setup_data(estimate), "nearest": [{"how": n.how, **_short_data(n.estimate, way)} for n in answer.nearest],
    }


def survey_data(
    found: Survey, kept: Sequence[Estimate], sentence: str, workload: Workload, picture: str
) -> dict[str, object]:
    on_front = {id(e) for e in pareto_front(found.fitting, found.way)}
    return {
        "verdict": sentence, "way": found.way, "workload": asdict(workload), "num_tried": found.num_tried,
        "ranked": [{**_short_data(e, found.way), "is_on_front": id(e) in on_front} for e in kept],
        "unpriced": [setup_name(e) for e in found.unpriced], "too_small": [s.machine.name for s in found.too_small],
        "picture": picture,
    }


def _say_memory(console: Console, prediction: Prediction) -> None:
    memory = prediction.memory
    sizes = {**memory.device, "in all": memory.device_total, "there is": memory.device_limit}
    rows = [{"part": name, "gib": round(num / GIB, 2)} for name, num in sizes.items()]
    whose = "a chip" if prediction.setup.machine.gpu.kind == "tpu" else "the fullest rank"
    console.table(rows, {"part": f"memory of {whose}", "gib": "GiB"})
    limit = f" of {memory.host_limit / GIB:,.0f}" if memory.host_limit else ""
    parts = ", ".join(f"{name} {num / GIB:,.1f}" for name, num in memory.host.items())
    console.text(f"of a host: {memory.host_total / GIB:,.1f}{limit} GiB ({parts})", style="dim")


def _say_step(console: Console, prediction: Prediction) -> None:
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


def _say_time(console: Console, bill: Bill, workload: Workload) -> None:
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
                  {"part": f"time of the run {PURCHASE_NAMES[bill.way]}", "time": "expected"})
    epochs = f"an epoch of {workload.num_train_samples:,} samples trains in {format_duration(time.epoch_s)}"
    money = "" if bill.epoch_usd is None else f", {format_usd(bill.epoch_usd)}"
    console.text(f"{epochs}{money} ({workload.source}); {bill.failures.why}", style="dim")


def _bill_row(bill: Bill) -> dict[str, object]:
    return {
        "way": PURCHASE_NAMES[bill.way], "usd_per_hour": format_usd(bill.usd_per_hour),
        "time": format_duration(bill.time.total_s) if bill.time else "never ends",
        "interruptions": round(bill.time.num_interruptions, 2) if bill.time else None,
        "machines": format_usd(bill.machines_usd), "storage": format_usd(bill.storage_usd), "total": format_usd(bill.total_usd),
    }


def _say_saves(console: Console, bill: Bill) -> None:
    saves = bill.saves
    console.text(f"a checkpoint is {format_bytes(saves.checkpoint_bytes)}: it stops training for {format_duration(saves.pause_s)}, is "
                 f"committed after {format_duration(saves.write_s)} and loaded in {format_duration(saves.load_s)}; {saves.why}")
    console.text(f"store.hours_between_failures = {bill.failures.mtbf_s / 3600:.4g} tells the run to expect the same",
                 style="dim")


def _say_storage(console: Console, need: StorageNeed, offers: Sequence[StorageOffer]) -> None:
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


def _setup_data(estimate: Estimate) -> dict[str, object]:
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
        "bills": {way: _bill_data(bill) for way, bill in estimate.bills.items()},
        "storage": None if estimate.need is None else {
            **asdict(estimate.need), "offers": [_offer_data(offer) for offer in estimate.offers]},
        "notes": list(prediction.notes),
    }


def _short_data(estimate: Estimate, way: Purchase) -> dict[str, object]:
    setup, step = estimate.setup, estimate.prediction.step
    total_s = estimate.total_s(way)
    return {
        "machine": setup.machine.name, "cloud": setup.machine.cloud, "num_nodes": setup.num_nodes,
        "num_ranks": setup.num_ranks, "gpu": setup.machine.gpu.name,
        "region": estimate.price and estimate.price.region, "step_ms": None if step is None else step.total_s * 1e3,
        "bound_by": step and step.bound_by, "is_calibrated": step and step.is_calibrated,
        "is_rough": estimate.is_rough,
        "total_hours": None if total_s is None else total_s / 3600, "total_usd": estimate.total_usd(way),
        "on_demand_usd": estimate.total_usd("on_demand"), "spot_usd": estimate.total_usd("spot"),
    }


def _bill_data(bill: Bill) -> dict[str, object]:
    time = bill.time
    return {
        "usd_per_hour": bill.usd_per_hour, "machines_usd": bill.machines_usd, "storage_usd": bill.storage_usd,
        "total_usd": bill.total_usd, "epoch_usd": bill.epoch_usd, "missing": bill.missing,
        "time": None if time is None else {**asdict(time), "total_s": time.total_s},
        "saves": _saves_data(bill.saves),
        "failures": {"per_hour": bill.failures.per_hour, "grace_s": bill.failures.grace_s,
                     "has_notice": bill.failures.has_notice, "why": bill.failures.why},
    }


def _saves_data(saves: Saves) -> Mapping[str, object]:
    return {**asdict(saves), "total_s": saves.total_s}


def _offer_data(offer: StorageOffer) -> dict[str, object]:
    return {"volume": offer.volume.name, "tib": offer.tib, "gbyte_per_s": offer.gbyte_per_s,
            "needed_gbyte_per_s": offer.needed_gbyte_per_s, "usd_per_month": offer.usd_per_month,
            "is_enough": offer.is_enough, "why": offer.why}


def _other(way: Purchase) -> Purchase:
    return "on_demand" if way == "spot" else "spot"


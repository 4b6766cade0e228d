"""A plan's answer in one sentence: whether it fits, why, how long, how much; and the nearest setup that fits."""

from bisect import bisect_left
from dataclasses import replace
from typing import Literal

from embark.catalog import Machine
from embark.catalog.pricing import PURCHASE_NAMES, Purchase
from embark.formatting import format_duration, format_usd, pluralize
from embark.model.placement import all_table_bytes
from embark.spec import RunSpec, divides
from embark.values import frozen
from .cost import Bill
from .prediction import GIB
from .survey import (
    MAX_NODES,
    Estimate,
    Estimator,
    Survey,
    could_fit,
    node_counts,
    pareto_front,
    rank,
    survey_catalog,
)

MOST_RANKS = 1024  # Larger clusters of the same machine are tried up to this number of ranks.

How = Literal["more machines", "a larger machine of the cloud", "the cheapest"]


@frozen
class Alternative:
    """A setup that fits, and how it differs."""

    how: How
    estimate: Estimate


@frozen
class Verdict:
    """Whether a run fits its setup, and the nearest that fit where it does not."""

    fits: bool
    sentence: str
    nearest: tuple[Alternative, ...] = ()  # If the run does not fit: the nearest setups that do.


def verdict(estimate: Estimate, estimator: Estimator, *, max_nodes: int = MAX_NODES) -> Verdict:
    """Judge one setup. Alternatives are searched only where it does not fit."""
    if estimate.fits:
        return Verdict(True, fits_sentence(estimate, estimator.purchase))
    near, survey = _search(estimate, estimator, max_nodes)
    setup = estimate.setup
    begins = f"{setup.spec.name} does not fit {setup.description}: {estimate.prediction.why}"
    if near:
        ways: dict[str, list[str]] = {}
        for n in near:
            ways.setdefault(_offer_words(n.estimate, estimator.purchase), []).append(n.how)
        options = "; ".join(f"{words} ({' and '.join(hows)})" for words, hows in ways.items())
        return Verdict(False, f"{begins}; nearest that fits: {options}", tuple(near))
    return Verdict(False, f"{begins}; {_why_nowhere(setup.spec, survey, max_nodes)}")


def _why_nowhere(spec: RunSpec, survey: Survey, max_nodes: int) -> str:
    largest = survey.why_not
    parts = largest.memory.device if largest and largest.placement else {}
    in_tables = sum(parts.get(name, 0.0) for name in ("tables", "optimizer state"))
    if largest is None or in_tables >= sum(parts.values()) / 2:
        return (f"up to {max_nodes} machines of any type do not fit its {all_table_bytes(spec) / GIB:,.1f} GiB of "
                "tables: use fewer rows, a smaller model.embedding_dim, or train.table_dtype = \"fp16\"")
    part = max((name for name in parts if name not in ("tables", "optimizer state")), key=lambda name: parts[name])
    return (f"up to {max_nodes} machines of any type do not fit it either: on {largest.setup.title}, {largest.why}, "
            f"most of it for {part} ({parts[part] / GIB:,.1f} GiB): use smaller layers, fewer tables, or a smaller "
            "train.batch_size")


def fits_sentence(estimate: Estimate, purchase: Purchase) -> str:
    """Say on what it fits, why, how fast, how long and for how much."""
    setup, prediction = estimate.setup, estimate.prediction
    step, bill = prediction.step, estimate.bills[purchase]
    if step is None:
        raise ValueError("what fits has a step")
    basis = "" if step.is_calibrated else ", an estimate"
    least = ""
    if estimate.is_rough:
        least, basis = "at least ", ", an estimate from datasheets, unmeasured"
    takes = f"a step of {setup.spec.train.batch_size:,} samples takes {least}{step.total_s * 1e3:.3g} ms{basis}, " \
            f"bound by {step.bound_by}"
    return (f"{setup.spec.name} fits {setup.description}: {prediction.why}; {takes}; "
            f"{describe_run(bill)}{_other_way(estimate, purchase)}")


def describe_run(bill: Bill) -> str:
    """Describe a run as `the run takes 3 h 05 min and $102 on demand`."""
    if bill.time is None:
        return f"{PURCHASE_NAMES[bill.purchase]} the run would never end: {bill.missing}"
    paid = f"{format_usd(bill.total_usd)} {PURCHASE_NAMES[bill.purchase]}"
    money = f"({bill.missing})" if bill.total_usd is None else paid
    return f"the run takes {format_duration(bill.time.total_s)} and {money}"


def _search(estimate: Estimate, estimator: Estimator, max_nodes: int) -> tuple[list[Alternative], Survey]:
    """Find more of the same machine, a larger one of its cloud in the same number, and the cheapest anywhere."""
    setup = estimate.setup
    found: list[Alternative] = []
    if (more := _more_of_it(estimator, setup.machine, setup.num_nodes)) is not None:
        found.append(Alternative("more machines", more))
    if (larger := _larger_of_the_cloud(estimator, setup.machine, setup.num_nodes)) is not None:
        found.append(Alternative("a larger machine of the cloud", larger))
    anywhere = replace(estimator, region="")
    survey = survey_catalog(anywhere, max_nodes=max_nodes)
    best = _firm(rank(survey.fitting, estimator.purchase, "dollars"))
    if best:
        found.append(Alternative("the cheapest", best[0]))
    return found, survey


def survey_sentence(found: Survey, kept: list[Estimate], name: str, *, max_nodes: int, bounds_text: str = "") -> str:
    """Say what the catalog has: the cheapest and the fastest, or why there is none."""
    cheapest = _firm(rank(found.fitting, found.purchase, "dollars"))
    fastest = _firm(rank(found.fitting, found.purchase, "hours"))
    if not cheapest:
        if found.unpriced:
            num = len({e.setup.machine.name for e in found.unpriced})
            return (f"{name} fits {pluralize(num, 'machine')} here, but their price "
                    f"{PURCHASE_NAMES[found.purchase]} is not known")
        if found.why_not is None:
            return f"{name}: no machine here divides its batch equally among its ranks"
        return (f"{name} fits no machine here, up to {max_nodes} of each; on the largest, "
                f"{found.why_not.setup.title}: {found.why_not.why}")
    if not kept:
        return (f"nothing here runs {name} {bounds_text}; the cheapest is {_short_words(cheapest[0], found.purchase)}, "
                f"the fastest {_short_words(fastest[0], found.purchase)}")
    inside = f" {bounds_text}" if bounds_text else ""
    firm = _firm(kept)
    by_money = rank(firm, found.purchase, "dollars")[0]
    by_time = (pareto_front(firm, found.purchase) or rank(firm, found.purchase, "hours"))[0]
    if by_money is by_time:
        return f"{name}{inside}: cheapest and fastest is {_short_words(by_money, found.purchase)}"
    return (f"{name}{inside}: cheapest is {_short_words(by_money, found.purchase)}; fastest is "
            f"{_short_words(by_time, found.purchase)}")


def _more_of_it(estimator: Estimator, machine: Machine, num_nodes: int) -> Estimate | None:
    """Return the smallest number of them that fits: doubled until one does, then halved between."""
    if machine.gpu.kind == "tpu":
        return None
    batch, most = estimator.spec.train.batch_size, max(MOST_RANKS // machine.num_gpus, 1)
    fits: int | None = None
    below = num_nodes
    for num in node_counts(machine, batch, most):
        if num <= num_nodes:
            continue
        if could_fit(estimator.spec, machine, num) and estimator.predicts(machine, num):
            fits = num
            break
        below = num
    if fits is None:
        return None
    smaller = [n for n in range(below + 1, fits)
               if divides(batch, n * machine.num_gpus) and could_fit(estimator.spec, machine, n)]
    # Each of more machines holds less, so what fits some fits more of them.
    index = bisect_left(smaller, True, key=lambda n: estimator.predicts(machine, n))
    return estimator(machine, smaller[index] if index < len(smaller) else fits)


def _larger_of_the_cloud(estimator: Estimator, machine: Machine, num_nodes: int) -> Estimate | None:
    batch = estimator.spec.train.batch_size
    larger = [m for m in estimator.catalog.machines.values()
              if m.cloud == machine.cloud and m.gpu_memory_gib > machine.gpu_memory_gib
              and divides(batch, num_nodes * m.num_gpus) and m.gpu.kind == machine.gpu.kind
              and could_fit(estimator.spec, m, num_nodes)
              and (not estimator.region or (m.name, estimator.region) in estimator.catalog.prices)]
    fitting = [e for m in larger if (e := estimator(m, num_nodes)).fits]
    return next(iter(rank(fitting, estimator.purchase, "dollars")), None)


def _firm(found: list[Estimate]) -> list[Estimate]:
    """Return those that are not rough, if there are any."""
    return [e for e in found if not e.is_rough] or found


def _offer_words(estimate: Estimate, purchase: Purchase) -> str:
    """Describe an offer as `4 x a2-highgpu-1g, $0.52 an epoch on spot`."""
    bill = estimate.bills[purchase]
    if bill.total_usd is None:
        return f"{estimate.setup.title}, {bill.missing}"
    rough = ", a rough estimate" if estimate.is_rough else ""
    return f"{estimate.setup.title}, {format_usd(bill.total_usd)} the run {PURCHASE_NAMES[purchase]}{rough}"


def _short_words(estimate: Estimate, purchase: Purchase) -> str:
    bill = estimate.bills[purchase]
    time = "" if bill.time is None else f", {format_duration(bill.time.total_s)}"
    region = "" if estimate.price is None else f" in {estimate.price.region}"
    return f"{estimate.setup.title}{region}, {format_usd(bill.total_usd)} {PURCHASE_NAMES[purchase]}{time}"


def _other_way(estimate: Estimate, purchase: Purchase) -> str:
    """Return the other of the two ways to pay that most people weigh, if its price is known."""
    other: Purchase = "on_demand" if purchase == "spot" else "spot"
    bill = estimate.bills.get(other)
    region = f" in {estimate.price.region}" if estimate.price is not None else ""
    if bill is None or bill.total_usd is None:
        return region
    return f"{region}, {format_usd(bill.total_usd)} {PURCHASE_NAMES[other]}"

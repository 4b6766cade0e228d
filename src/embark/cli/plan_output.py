"""`embark plan`: one setup in full, or the whole catalog ranked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embark.catalog import Catalog, Machine, find_machine, load_catalog
from embark.catalog.machine import CLOUDS
from embark.catalog.pricing import Purchase
from embark.cli.console import Console
from embark.cli.plan_rows import estimate_data, rank_headings, rank_row, say_estimate, survey_data
from embark.errors import ExitCode, UserError, nearest
from embark.formatting import format_duration, format_usd, pluralize
from embark.model.placement import Cluster, Placement, Shard, TooLarge
from embark.plan.across import MAX_NODES, Bounds, Order, Survey, rank, survey_catalog
from embark.plan.data_size import resolve_data
from embark.plan.estimate import Estimate, Estimator, Predict
from embark.plan.prediction import Prediction, Setup
from embark.plan.verdict import survey_sentence, verdict
from embark.plan.workload import workload_of
from embark.spec import RunSpec

MOST_SHOWN = 15
PLOT_WIDTH, PLOT_HEIGHT = 76, 14


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags say."""

    across: bool = False
    by: Order | Literal[""] = ""
    """Empty: dollars, or hours where only a budget is given."""
    deadline_h: float | None = None
    budget_usd: float | None = None
    cloud: str = ""
    region: str = ""
    spot: bool | None = None
    """None: as `place.spot` says."""
    max_nodes: int = MAX_NODES
    picture: Path | None = None
    exact: bool = False
    """Ask TorchRec's own planner, which needs torch."""
    num_samples: int | None = None

    @property
    def bounds(self) -> Bounds:
        return Bounds(None if self.deadline_h is None else self.deadline_h * 3600, self.budget_usd)

    @property
    def order(self) -> Order:
        return self.by or ("hours" if self.budget_usd is not None and self.deadline_h is None else "dollars")


def plan_run(console: Console, spec: RunSpec, asked: Asked) -> ExitCode:
    """Exit code 1 where it does not fit, or nothing keeps the deadline or the budget."""
    catalog = load_catalog()
    is_across = asked.across or not spec.place.machine
    _refuse(asked, is_across=is_across)
    machine = None if is_across else _machine(catalog, spec, asked)
    spec, data_size = resolve_data(spec, asked.num_samples)
    is_spot = spec.place.spot if asked.spot is None else asked.spot
    way: Purchase = "spot" if is_spot else "on_demand"
    region = asked.region or ("" if is_across else spec.place.region)
    estimator = Estimator(spec, workload_of(spec, data_size), catalog, _closed_form(), region, way)
    if machine is None:
        return _across(console, estimator, asked)
    return _one(console, estimator, machine, asked)


def _one(console: Console, estimator: Estimator, machine: Machine, asked: Asked) -> ExitCode:
    spec, way = estimator.spec, estimator.way
    of_one = estimator
    if asked.exact:
        of_one = Estimator(spec, estimator.workload, estimator.catalog, _exact(), estimator.region, way)
    estimate = of_one(machine, spec.place.nodes)
    answer = verdict(estimate, estimator, max_nodes=asked.max_nodes)
    is_kept = asked.bounds.keeps(estimate, way)
    sentence = answer.sentence + ("" if is_kept or not answer.fits else f"; that is not {_bounds_words(asked)}")
    if console.json:
        console.data(estimate_data(estimate, answer, estimator.workload, way) | {"verdict": sentence})
    else:
        console.result(sentence)
        if answer.fits and not console.quiet:
            say_estimate(console, estimate, estimator.workload, way)
        for note in estimate.prediction.notes:
            console.text(f"note: {note}", style="dim")
    return ExitCode.DONE if answer.fits and is_kept else ExitCode.OTHER


def _across(console: Console, estimator: Estimator, asked: Asked) -> ExitCode:
    with console.stages() as tell:
        found = survey_catalog(estimator, cloud=asked.cloud, max_nodes=asked.max_nodes,
                       told=lambda done, total: tell("machines", done / total, ""))
    kept = rank(found.fitting, estimator.way, asked.order, asked.bounds)
    sentence = survey_sentence(found, kept, estimator.spec.name, max_nodes=asked.max_nodes,
                               bounds_words=_bounds_words(asked))
    if asked.picture is not None:
        _draw(asked.picture, found, estimator.spec.name, asked.bounds)
    if console.json:
        console.data(survey_data(found, kept, sentence, estimator.workload, str(asked.picture or "")))
        return ExitCode.DONE if kept else ExitCode.OTHER
    console.result(sentence)
    if kept and not console.quiet:
        _say_survey(console, found, kept)
    if asked.picture is not None:
        console.text(f"wrote {asked.picture}")
    return ExitCode.DONE if kept else ExitCode.OTHER


def _say_survey(console: Console, found: Survey, kept: Sequence[Estimate]) -> None:
    """The best of the ranking, all of the front, and both as a small picture."""
    from embark.plan.plot import front_letters, plot

    letters = front_letters(found)
    shown = [e for place, e in enumerate(kept) if place < MOST_SHOWN or id(e) in letters]
    console.text("")
    console.table([rank_row(e, found.way, letters.get(id(e), "")) for e in shown],
                  rank_headings(found.way, console.out.width))
    more = [f"{len(kept) - len(shown):,} more: --json lists them" if len(kept) > len(shown) else "",
            "letters: nothing is both cheaper and faster", _left_out(found),
            "~ TPU, planned by memory, its time a rough estimate" if any(e.is_rough for e in shown) else ""]
    console.text("; ".join(words for words in more if words), style="dim")
    is_ascii = not console.out.encoding.lower().startswith("utf")
    lines = plot(found, width=min(console.out.width, PLOT_WIDTH), height=PLOT_HEIGHT, ascii_only=is_ascii)
    if lines:
        console.text("\n" + "\n".join(lines))


def _left_out(found: Survey) -> str:
    unpriced = {e.setup.machine.name for e in found.unpriced}
    words = [f"{pluralize(len(found.too_small), 'machine')} too small" if found.too_small else "",
             f"{pluralize(len(unpriced), 'machine')} without a price" if unpriced else ""]
    return ", ".join(word for word in words if word)


def _draw(path: Path, found: Survey, name: str, bounds: Bounds) -> None:
    from embark.plan.chart import draw_svg
    from embark.store import write_atomic

    try:
        write_atomic(path, draw_svg(found, name, bounds))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", fix="--picture FILE.svg, in a folder that is there") from error


def _machine(catalog: Catalog, spec: RunSpec, asked: Asked) -> Machine:
    machine = find_machine(catalog, spec.place.machine)
    cloud = asked.cloud or spec.place.cloud
    if cloud and cloud != machine.cloud:
        raise UserError(f"{machine.name} is a machine of {machine.cloud}, not of {cloud}",
                        fix=f"leave the cloud out, or embark catalog list --cloud {cloud}")
    return machine


def _closed_form() -> Predict:
    from embark.plan.cached_planner import CachedPlanner
    from embark.plan.predict import predict

    planner = CachedPlanner()
    return lambda setup: predict(setup, planner=planner)


def _exact() -> Predict:
    """TorchRec's own planner decides where tables go."""
    from embark.plan.predict import predict
    from embark.stack.versions import require_stack

    require_stack()

    def ask(setup: Setup) -> Prediction:
        if setup.machine.gpu.kind == "tpu":
            raise UserError("--exact asks TorchRec's planner, and TorchRec does not run on a TPU",
                            fix="leave --exact out")
        return predict(setup, planner=_torchrec)

    return ask


def _torchrec(spec: RunSpec, cluster: Cluster) -> Placement:
    """What `train/`, which alone knows torch, offers; in the plan's own words."""
    from embark.trainers.torch.offline_plan import DoesNotFit, offline_plan

    try:
        plan = offline_plan(
            spec, num_ranks=cluster.num_ranks, ranks_per_host=cluster.ranks_per_host,
            device_bytes=cluster.device_bytes, host_bytes=cluster.host_bytes,
            device="cpu" if cluster.device == "cpu" else "cuda",
        )
    except DoesNotFit as error:
        raise TooLarge(f"TorchRec's planner finds no place for the tables: {error}") from error
    shards = tuple(Shard(*values) for values in plan["shards"])
    return Placement(cluster.num_ranks, shards, plan["shardings"], "TorchRec's planner")


def _refuse(asked: Asked, *, is_across: bool) -> None:
    if asked.cloud and asked.cloud not in CLOUDS:
        raise UserError(f"{asked.cloud!r}: no such cloud", fix=nearest(asked.cloud, CLOUDS))
    for flag, value in (("--deadline", asked.deadline_h), ("--budget", asked.budget_usd)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{flag} {value:g} is not above 0", fix=f"{flag} 8")
    if asked.max_nodes < 1:
        raise UserError(f"--max-nodes {asked.max_nodes}: nothing runs on no machine", fix="--max-nodes 16")
    if asked.num_samples is not None and asked.num_samples < 1:
        raise UserError(f"--samples {asked.num_samples} is no number of samples", fix="--samples 4195197692")
    if is_across and asked.exact:
        raise UserError("--exact asks TorchRec's planner about one machine",
                        fix="--set place.machine=p5.48xlarge, or leave --exact out")
    if not is_across and (asked.picture is not None or asked.by):
        raise UserError("--picture and --by are of the whole catalog", fix="add --across")


def _bounds_words(asked: Asked) -> str:
    words = [f"within {format_duration(asked.deadline_h * 3600)}" if asked.deadline_h is not None else "",
             f"for {format_usd(asked.budget_usd)} or less" if asked.budget_usd is not None else ""]
    return " and ".join(word for word in words if word)

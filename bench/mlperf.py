"""The planner against published figures: MLPerf's DLRM-DCNv2, which HugeCTR ran on 8 to 128 GPUs.

    python bench/mlperf.py
    python bench/mlperf.py without
    python bench/mlperf.py curves docs/internals

The runs stand in mlperf_runs.toml. Each is planned twice: as HugeCTR ran it, and as Embark would train the same model
on machines with these accelerators. As HugeCTR ran it means, by its public train.py and sharding/planner.py:

- Small tables are replicated, the others divided by its own planner: over GPUs by rows (`auto`), or over hosts and
  within a host over all GPUs (`hier_auto`).
- On several hosts the exchange is hierarchical (CommunicationStrategy.Hierarchical). Vectors and gradients are fp16.
- The next batch's ids are distributed meanwhile (train_inter_iteration_overlap).
- The gradients of the dense layers and of the replicated tables are summed in one operation (grouped_all_reduce) when
  the last of them is there, beside the update of the other tables (train_intra_iteration_overlap).

No constant is fitted to these runs. Time on one GPU is Embark's captured step on an H200 (plan/calibration.toml),
scaled as `embark plan` does; rates of links and fabrics are those of plan/assumptions.toml and catalog/fabrics.toml,
with their sources there; MATMUL_TFLOPS and SKEW are below. `without` leaves out one thing at a time that HugeCTR does,
or takes the other reading of an unclear description. `curves` writes figures of the throughput on 8 to 2,048 GPUs and
prints what the steps consist of.
"""

from __future__ import annotations

import math
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from embark.catalog import Catalog, find_machine, load_catalog
from embark.cli.console import Console
from embark.model.placement import Cluster, Placement, Shard
from embark.plan.calibration import Calibration, calibration_for
from embark.plan.exchange import Exchange
from embark.plan.predict import cluster_of, predict
from embark.plan.prediction import Setup, StepTime
from embark.plan.step_time import step_time
from embark.spec import RunSpec, load_spec

RUNS = Path(__file__).parent / "mlperf_runs.toml"
HUGECTR = Exchange(is_hierarchical=True, ids_go_ahead=True, gradient_bytes=2, beside_update=1.0)
MATMUL_TFLOPS = {"A100-80GB": 267.9, "H100": 792.1, "B200": 1745.0}
"""What large products in bf16 reach, the best of many shapes: https://github.com/stas00/ml-engineering,
compute/accelerator. The H200's is Embark's own; of the others datasheets are compared."""
SKEW = 1.04
"""The exponent of the ids of Criteo's data: https://github.com/chriscai-amd/training_results_v5.1,
NVIDIA/benchmarks/dlrm_dcnv2/implementations/hugectr/README-b200-1x8.md, section 7.2."""
ROW_BYTES = 128 * 8  # A row and its optimizer state, as HugeCTR's planner counts them.
TABLES_COST = 4.0  # Its mem_comm_work_ratio: what an exchanged vector costs less than the bandwidths' ratio says.
MAX_ROUNDS = 20  # Its max_search_iter.
MACHINES = {"A100-80GB": "Standard_ND96amsr_A100_v4", "H100": "Standard_ND96isr_H100_v5",
            "H200": "Standard_ND96isr_H200_v5", "B200": "a4-highgpu-8g", "B300": "p6-b300.48xlarge",
            "L40S": "g6e.48xlarge"}
"""Machines of the catalog with these accelerators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run."""

    system: str
    round: str
    gpu: str
    num_gpus: int
    num_hosts: int
    batch_size: int
    step_ms: float
    planner: str
    bandwidth_ratio: float
    source: str
    replicated_gib: float = 0.0
    memory_gb: float = 60.0
    fabric_gbit_per_s: float = 0.0
    adds_in_fabric: bool = False
    assumed: str = ""

    @property
    def title(self) -> str:
        return f"{self.num_gpus} × {self.system}, {self.round}"


def read_runs(path: Path = RUNS) -> list[Run]:
    return [Run(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["run"]]


def model_of(batch_size: int, replicated: set[int] | None = None) -> RunSpec:
    """Return MLPerf's model, with some tables on all ranks."""
    spec = load_spec("mlperf-dcnv2", [f"train.batch_size={batch_size}", "train.comms_dtype=fp16",
                                      f"data.zipf_exponent={SKEW}"])
    tables = tuple(table.model_copy(update={"sharding": "data_parallel"}) if at in (replicated or set()) else table
                   for at, table in enumerate(spec.model.tables))
    return spec.model_copy(update={"model": spec.model.model_copy(update={"tables": tables})})


@dataclass(frozen=True, slots=True)
class Division:
    """What HugeCTR's planner decides: the tables on all ranks, and the others' parts in each bucket: a GPU or host."""

    replicated: set[int]
    buckets: list[list[int]]
    num_parts: dict[int, int]


def divide(spec: RunSpec, run: Run) -> Division:
    """Divide the tables as HugeCTR's planner does.

    Again and again the table with the most ids for each part is cut in two, and all parts are put, the largest first,
    where the least is: a part costs its ids, and a vector that is exchanged. Of all divisions that fit, the one whose
    fullest bucket costs the least counts.
    """
    rows, ids = ([getattr(t, name) for t in spec.model.tables] for name in ("rows", "multi_hot"))
    is_by_host = run.planner == "hier_auto"
    num_buckets = run.num_hosts if is_by_host else run.num_gpus
    limit = run.replicated_gib * 1e9 / ROW_BYTES
    replicated = {at for at in range(len(rows)) if rows[at] < limit}
    room = run.memory_gb * 1e9 / ROW_BYTES * (run.num_gpus / run.num_hosts if is_by_host else 1)
    room -= sum(rows[at] for at in replicated)
    vector_cost = run.bandwidth_ratio / TABLES_COST
    num_parts = {at: 1 for at in range(len(rows)) if at not in replicated}
    best: Division | None = None
    best_cost = math.inf
    for _ in range(MAX_ROUNDS):
        parts = sorted((at for at, num in num_parts.items() for _ in range(num)),
                       key=lambda at: -ids[at] / num_parts[at])
        buckets: list[list[int]] = [[] for _ in range(num_buckets)]
        costs, held = [0.0] * num_buckets, [0.0] * num_buckets
        too_large = None
        for at in parts:
            size = rows[at] / num_parts[at]
            fitting = [b for b in range(num_buckets) if at not in buckets[b] and held[b] + size <= room]
            if not fitting:
                too_large = at
                break
            chosen = min(fitting, key=costs.__getitem__)
            buckets[chosen].append(at)
            costs[chosen] += ids[at] / num_parts[at] + vector_cost
            held[chosen] += size
        if too_large is None and max(costs) < best_cost:
            best, best_cost = Division(replicated, buckets, dict(num_parts)), max(costs)
        wanted = parts if too_large is None else [too_large]
        cut = next((at for at in wanted if 2 * num_parts[at] <= num_buckets), None)
        if cut is None:
            break
        num_parts[cut] *= 2
    assert best is not None, run.title
    return best


def place(spec: RunSpec, run: Run, division: Division) -> Placement:
    """Return where each part lies; a host's lie on all its GPUs."""
    tables, per_host = spec.model.table_list(), run.num_gpus // run.num_hosts
    shards = [Shard(tables[at].name, rank, tables[at].rows, tables[at].dim or 0)
              for at in sorted(division.replicated) for rank in range(run.num_gpus)]
    for bucket, parts in enumerate(division.buckets):
        ranks = range(bucket * per_host, (bucket + 1) * per_host) if run.planner == "hier_auto" else (bucket,)
        shards += [Shard(tables[at].name, rank, math.ceil(tables[at].rows / division.num_parts[at] / len(ranks)),
                         tables[at].dim or 0) for at in parts for rank in ranks]
    shardings = {t.name: "data_parallel" if at in division.replicated else "row_wise" for at, t in enumerate(tables)}
    return Placement(run.num_gpus, tuple(shards), shardings, "HugeCTR's planner")


def calibration_of(gpu: str, catalog: Catalog) -> Calibration:
    found = calibration_for(catalog.gpus[gpu])
    rates = dict(found.rates.matmul_flops)
    if gpu in MATMUL_TFLOPS:
        rates["bf16"] = MATMUL_TFLOPS[gpu] * 1e12
    return replace(found, rates=replace(found.rates, matmul_flops=rates))


def step_of(run: Run, catalog: Catalog, way: Exchange = HUGECTR) -> StepTime:
    """Return the step of a run as HugeCTR does it."""
    division = divide(model_of(run.batch_size), run)
    spec = model_of(run.batch_size, division.replicated)
    one = cluster_of(Setup(spec, find_machine(catalog, MACHINES[run.gpu]), 1))
    cluster = Cluster(run.num_gpus, run.num_gpus // run.num_hosts, one.device_bytes, one.host_bytes,
                      intra_gbyte_per_s=one.intra_gbyte_per_s, inter_gbyte_per_s=run.fabric_gbit_per_s / 8,
                      fabric="infiniband")
    return step_time(spec, place(spec, run, division), cluster, "cuda_graph", "bf16", calibration_of(run.gpu, catalog),
                     from_memory=True, exchange=replace(way, adds_in_fabric=run.adds_in_fabric))


def planned(run: Run, catalog: Catalog) -> StepTime:
    """Return the step of the same model and batch, as `embark plan` has it."""
    found = predict(Setup(model_of(run.batch_size), find_machine(catalog, MACHINES[run.gpu]), run.num_hosts))
    assert found.step is not None, found.why
    return found.step


def compare() -> None:
    catalog, runs = load_catalog(), read_runs()
    steps = [step_of(run, catalog) for run in runs]
    rows = []
    for run, step in zip(runs, steps, strict=True):
        rows.append({"GPUs": run.title + (" *" if run.assumed else ""), "batch": f"{run.batch_size:,}",
                     "published": f"{run.step_ms:.2f} ms", "as HugeCTR runs it": f"{step.total_s * 1e3:.2f} ms",
                     "off by": f"{off(run, step):+.1%}",
                     **{name: f"{step.parts_s.get(name, 0.0) * 1e3:.2f}" for name in
                        ("lookup and update", "dense layers", "launches", "all-to-all", "all-reduce")},
                     "as Embark would": f"{planned(run, catalog).total_s * 1e3:.2f} ms"})
    Console().table(rows)
    for limit in (0.15, 0.25):
        near = sum(abs(off(run, step)) <= limit for run, step in zip(runs, steps, strict=True))
        Console().text(f"within {limit:.0%}: {near} of {len(runs)}")
    for run in runs:
        if run.assumed:
            Console().text(f"* {run.title}: {run.assumed}")


def without() -> None:
    """Show what each thing counts that is taken to be as HugeCTR does it."""
    catalog, runs = load_catalog(), read_runs()
    ways = {"as HugeCTR runs it": HUGECTR, "flat exchange": replace(HUGECTR, is_hierarchical=False),
            "ids in turn": replace(HUGECTR, ids_go_ahead=False),
            "gradients in fp32": replace(HUGECTR, gradient_bytes=4),
            "gradients in turn": replace(HUGECTR, beside_update=0.0)}
    errors = {title: [off(run, step_of(run, catalog, way)) for run in runs] for title, way in ways.items()}
    others = {
        "no replicated tables": [replace(run, replicated_gib=0.0) for run in runs],
        "no sums in switches": [replace(run, adds_in_fabric=False) for run in runs],
        "Juniper: 2 adapters a host": [replace(run, fabric_gbit_per_s=50) if "Juniper" in run.system else run
                                       for run in runs],
        "HPE: Slingshot": [replace(run, fabric_gbit_per_s=200) if "HPE" in run.system and run.num_hosts > 1 else run
                           for run in runs]}
    errors |= {title: [off(run, step_of(run, catalog)) for run in changed] for title, changed in others.items()}
    Console().table([{"": title, "within 15%": sum(abs(one) <= 0.15 for one in of),
                      "within 25%": sum(abs(one) <= 0.25 for one in of), "largest": f"{max(of, key=abs):+.0%}"}
                     for title, of in errors.items()])


def off(run: Run, step: StepTime) -> float:
    return step.total_s * 1e3 / run.step_ms - 1


NUM_GPUS = tuple(2**power for power in range(3, 12))
PARTS = ("lookup and update", "dense layers", "launches", "all-to-all", "all-reduce", "host")
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
Points = dict[int, float]  # By the number of GPUs.


@dataclass(frozen=True, slots=True)
class Figure:
    """Curves, and points that others published, over the number of GPUs."""

    name: str
    title: str
    unit: str
    curves: dict[str, Points]
    published: dict[str, Points]


def curves(folder: Path) -> None:
    """Write the figures, and print what Embark's steps consist of."""
    catalog = load_catalog()
    for figure, steps in (dcnv2(catalog), hstu(catalog)):
        (folder / f"{figure.name}.svg").write_text(drawn(figure), encoding="utf-8")
        Console().text(figure.title)
        Console().table([
            {"GPUs": f"{num:,}", "step": f"{step.total_s * 1e3:,.2f} ms", "bound by": step.bound_by,
             **{name: f"{step.parts_s.get(name, 0.0) * 1e3:,.2f}" for name in PARTS},
             **{title: f"{points[num]:.3g}" for title, points in figure.curves.items()}}
            for num, step in steps.items()])


def dcnv2(catalog: Catalog) -> tuple[Figure, dict[int, StepTime]]:
    """Return the same batch on more and more H100s."""
    machine, runs = find_machine(catalog, MACHINES["H100"]), read_runs()
    of_64 = next(run for run in runs if run.gpu == "H100" and run.adds_in_fabric and run.num_gpus == 64)
    own: dict[int, StepTime] = {}
    theirs: dict[int, StepTime] = {}
    for num in NUM_GPUS:
        found = predict(Setup(model_of(of_64.batch_size), machine, num // 8))
        assert found.step is not None, found.why
        own[num] = found.step
        run = replace(of_64, num_gpus=num, num_hosts=num // 8)
        if run.num_hosts == 1:
            run = replace(run, planner="auto", bandwidth_ratio=7, replicated_gib=0.008)
        theirs[num] = step_of(run, catalog)
    million = of_64.batch_size / 1e6
    figure = Figure(
        "scaling-dcnv2", f"DLRM-DCNv2, batch {of_64.batch_size:,}, H100, 400 Gb/s a GPU", "million samples/s",
        {"Embark today": {num: million / step.total_s for num, step in own.items()},
         "HugeCTR, as planned": {num: million / step.total_s for num, step in theirs.items()}},
        {"published: H100, HugeCTR": {run.num_gpus: run.batch_size / run.step_ms / 1e3
                                      for run in runs if run.system == "H100 (NVIDIA)"}})
    return figure, own


MOST_SEQUENCES = 16_384
DLRMV4 = {8: 1_240.0, 16: 1_100.0, 32: 930.0}
"""Samples a second and GPU of the reference on MI350X, 1,024 of them in a GPU's batch, unoptimized: the times between
evaluations in github.com/mlcommons/training, recommendation_v4, README."""


def hstu(catalog: Catalog) -> tuple[Figure, dict[int, StepTime]]:
    """Return batches of 64 sequences a GPU, and of fewer where there are many GPUs."""
    machine = find_machine(catalog, MACHINES["H200"])
    steps: dict[int, StepTime] = {}
    rates: Points = {}
    for num in NUM_GPUS:
        batch_size = min(64 * num, MOST_SEQUENCES)
        found = predict(Setup(load_spec("mlperf-hstu", [f"train.batch_size={batch_size}"]), machine, num // 8))
        assert found.step is not None, found.why
        steps[num], rates[num] = found.step, found.samples_per_s
    figure = Figure("scaling-hstu", f"HSTU, 64 sequences a GPU, at most {MOST_SEQUENCES:,}, H200, 400 Gb/s a GPU",
                    "sequences/s", {"Embark today": rates},
                    {"published: MI350X, reference": {num: num * rate for num, rate in DLRMV4.items()}})
    return figure, steps


WIDTH, HEIGHT, MARGIN = 760, 420, 80
LEGEND = WIDTH - MARGIN - 230


def drawn(figure: Figure) -> str:
    """Draw a figure, with logarithmic axes."""
    points = {**figure.curves, **figure.published}
    values = [value for of in points.values() for value in of.values()]
    lowest, highest = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(num: int) -> float:
        first, last = math.log2(NUM_GPUS[0]), math.log2(NUM_GPUS[-1])
        return MARGIN + (math.log2(num) - first) / (last - first) * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (math.log10(value) - lowest) / (highest - lowest) * (HEIGHT - 2 * MARGIN)

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="13">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             text(WIDTH / 2, 24, f"{figure.title}: {figure.unit}", "middle")]
    for num in NUM_GPUS:
        lines += [rule(x(num), HEIGHT - MARGIN, x(num), MARGIN),
                  text(x(num), HEIGHT - MARGIN + 18, f"{num:,}", "middle")]
    for power in range(lowest, highest + 1):
        lines += [rule(MARGIN, y(10**power), WIDTH - MARGIN, y(10**power)),
                  text(MARGIN - 6, y(10**power) + 4, f"{10**power:,}", "end")]
    lines.append(text(WIDTH / 2, HEIGHT - 12, "GPUs", "middle"))
    for at, (title, of) in enumerate(points.items()):
        colour, row = COLOURS[at], HEIGHT - MARGIN - 18 * (len(points) - at)
        if title in figure.curves:
            path = " ".join(f"{x(num):.1f},{y(value):.1f}" for num, value in sorted(of.items()))
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            lines.append(f'<path d="M{LEGEND} {row - 4}h24" stroke="{colour}" stroke-width="2"/>')
        else:
            lines += [dot(x(num), y(value), colour) for num, value in of.items()]
            lines.append(dot(LEGEND + 12, row - 4, colour))
        lines.append(text(LEGEND + 34, row, title, "start"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="#ddd"/>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'


if __name__ == "__main__":
    if sys.argv[1:2] == ["curves"]:
        curves(Path(sys.argv[2]))
    elif sys.argv[1:] == ["without"]:
        without()
    else:
        compare()

"""Random but sensible specs from a seed each: what `embark plan` predicts beside what is measured.

    python bench/random_plan.py compile FILE [--seeds 0:120]                                 fills Triton's cache
    python bench/random_plan.py measure FILE [--device cuda] [--seeds 0:120] [--seconds 0.4]   appends to a CSV
    python bench/random_plan.py compare FILE [--device cuda] [--part fitted | unseen]          computes only
    python bench/random_plan.py fit FILE --device cpu                                        computes only

Calibrations may be fitted to all seeds but 220 to 259, and on a CPU but 300 to 399, which are only ever predicted. Each
is measured in a process of its own, forked from one that has imported torch, from batches in memory; for a GPU the next
one waits for the device meanwhile. On a CPU, what other processes took of it is in the CSV; where that is much, it is
not counted.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from embark.cli.console import Console
from embark.plan.calibration import (
    CPU,
    SHIPPED,
    CpuFit,
    cpu_calibration,
    load_calibrations,
    read_calibrations,
)
from embark.plan.fit import Measurement, fit_cpu
from embark.spec import ModelSpec, RunSpec, Table, load_spec
from embark.trainers.torch.bench.calibrate import Comparison, compare, measure

UNSEEN = {"cuda": range(220, 260), "cpu": range(300, 400)}
MAX_TABLE_BYTES = {"cuda": 12e9, "cpu": 0.8e9}
MAX_IDS = {"cuda": 8e6, "cpu": 1e5}  # Of a batch.
MAX_VALUES = 1e7  # Of all batches that are drawn before the clock starts.
COLUMNS = ("seed", "engine", "precision", "step_s", "used_bytes", "reserved_bytes", "allocated_bytes", "resident_bytes",
           "python_s")
CPU_COLUMNS = (*COLUMNS[:4], "others")  # A forked process's memory is not that of a run.
MAX_OTHERS = 0.05  # Of the cores' time, what other processes may take while one is measured.


def random_spec(seed: int, device: str) -> RunSpec:
    """The same for the same seed, everywhere."""
    draw = np.random.default_rng([seed, 20261116])
    scale = 1 if device == "cuda" else 16
    is_dlrm = bool(draw.random() < 0.55)
    dim = int(draw.choice([16, 32, 48, 64, 96, 128]))
    num_tables = round(_log_uniform(draw, 3, 60))
    several = draw.random() < 0.45
    tables = []
    for number in range(num_tables):
        rows = int(_log_uniform(draw, 500, 5e6 / scale))
        own_dim = dim if is_dlrm or draw.random() < 0.6 else int(draw.choice([16, 32, 64, 128]))
        ids = int(_log_uniform(draw, 2, 30)) if several and draw.random() < 0.4 else 1
        pooling = "mean" if ids > 1 and draw.random() < 0.3 else "sum"
        tables.append(Table(name=f"t{number}", rows=rows, dim=own_dim, multi_hot=ids, pooling=pooling))
    while (size := sum(4.0 * t.rows * (t.dim or 0) for t in tables)) > MAX_TABLE_BYTES[device]:
        factor = 0.9 * MAX_TABLE_BYTES[device] / size
        tables = [t.model_copy(update={"rows": max(500, int(t.rows * factor))}) for t in tables]
    widths = [width // (1 if device == "cuda" else 2) for width in (64, 128, 256, 384, 512, 768, 1024)]
    model = ModelSpec(
        kind="dlrm" if is_dlrm else "dcnv2", num_dense=int(draw.choice([0, 4, 13, 13, 13, 40, 200])),
        embedding_dim=dim, tables=tuple(tables), bottom_mlp=_layers(draw, widths, 1, 3),
        top_mlp=_layers(draw, widths, 1, 4),
        num_cross_layers=int(draw.integers(1, 5)), cross_rank=int(draw.choice([32, 64, 128, 256, 512])),
    )
    batch = 2 ** int(draw.integers(9, 18)) // scale
    ids = sum(t.multi_hot for t in tables)
    while batch * ids > MAX_IDS[device]:
        batch //= 2
    optimizer = str(draw.choice(["rowwise_adagrad", "adagrad", "sgd", "adam"], p=[0.5, 0.2, 0.15, 0.15]))
    if device == "cpu" and optimizer == "adam":  # FBGEMM has none there
        optimizer = "adagrad"
    dense_optimizer = str(draw.choice(["adagrad", "sgd", "adam"]))
    engine = "auto" if draw.random() < 0.65 and device == "cuda" else "pipeline"
    num_batches = int(np.clip(MAX_VALUES / batch / (ids + model.num_dense + 1), 2, 16))
    spec = load_spec("quickstart", [
        f"place.device={device}", f"train.batch_size={batch}", f"train.engine={engine}", "data.num_eval_samples=0",
        f"data.num_train_samples={num_batches * batch}", f"data.zipf_exponent={draw.choice([0.0, 0.0, 1.05])}",
        f"train.optimizer={optimizer}", f"train.dense_optimizer={dense_optimizer}",
    ])
    return spec.model_copy(update={"name": f"seed {seed}", "model": model})


def measure_all(path: Path, specs: dict[int, RunSpec], seconds: float, repeats: int) -> None:
    """In the order in which they are finished, so that nothing measured is lost when the rest is stopped. What the
    host may be the bottleneck of is measured in `repeats` processes: its pace differs from one to the other."""
    device = next(iter(specs.values())).place.device
    is_new = not path.exists()
    # One at a time: memory is the device's, whoever has it.
    with path.open("a", newline="") as file, process_for_each(1) as pool:
        rows = csv.writer(file, lineterminator="\n")
        if is_new:
            rows.writerow(COLUMNS if device == "cuda" else CPU_COLUMNS)
        for _ in range(repeats):
            waiting = {pool.submit(_measure_alone, spec, seconds): seed for seed, spec in specs.items()}
            for done in as_completed(waiting):
                seed = waiting[done]
                if error := done.exception():
                    print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                    continue
                found, others = done.result()
                rest = [f"{others:.3f}"] if device == "cpu" else [
                    *(round(float(getattr(found, name))) for name in COLUMNS[4:8]), f"{found.python_s:.4g}"]
                rows.writerow([seed, found.engine, found.precision, f"{found.step_s:.4g}", *rest])
                file.flush()
                print(f"seed {seed}: measured", flush=True)
                if found.engine != "pipeline":
                    del specs[seed]  # once is enough


def compile_all(specs: dict[int, RunSpec]) -> None:
    """Some at a time. What has its kernels in Triton's cache is measured in half the time."""
    specs = {seed: spec for seed, spec in specs.items() if spec.train.engine != "pipeline"}
    with process_for_each(10) as pool:
        for done in as_completed([pool.submit(measure, spec, 0.01) for spec in specs.values()]):
            if error := done.exception():
                print(f"{type(error).__name__}: {error}", flush=True)


def process_for_each(num_at_once: int) -> ProcessPoolExecutor:
    """A process for each call, forked from one that has imported torch and not touched the GPU."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked otherwise, whether there is one is for one process alone
    context = get_context("forkserver")
    context.set_forkserver_preload(["embark.cli.console", "embark.trainers.torch.bench.calibrate",
                                    "embark.trainers.torch.bench.contenders"])
    return ProcessPoolExecutor(num_at_once, mp_context=context, max_tasks_per_child=1)


def compare_all(path: Path, device: str, part: str) -> None:
    fitted, unseen = read_measured(path, device)
    calibration = cpu_calibration() if device == "cpu" else load_calibrations()["H200"]
    measured = sorted(unseen if part == "unseen" else fitted, key=lambda one: int(one.spec.name.split()[1]))
    show([compare(calibration, one) for one in measured])


def fit_cpu_steps(path: Path) -> CpuFit:
    """At the shipped rates. What few specs leave open on x86 stays as it is elsewhere."""
    shipped, fitted = read_calibrations(SHIPPED), read_measured(path, "cpu")[0]
    if "x86" in path.name:
        return fit_cpu(shipped[f"{CPU}-x86_64"], fitted, shipped[CPU].engines["pipeline"])
    return fit_cpu(shipped[CPU], fitted)


def _measure_alone(spec: RunSpec, seconds: float) -> tuple[Measurement, float]:
    """And what others took of the CPU meanwhile."""
    before_s = _cpu_seconds()
    found = measure(spec, seconds)
    own_s, all_s, in_all_s = (after - before for after, before in zip(_cpu_seconds(), before_s, strict=True))
    return found, max(0.0, all_s - own_s) / in_all_s


def _cpu_seconds() -> tuple[float, float, float]:
    """Of this process; of all, and with what no process used, on the cores that this one may run on."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    user, nice, system, idle, waiting, *rest = (
        sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        for ticks in zip(*(row[1:9] for row in rows if row[0] in names), strict=True))
    own, busy = os.times(), user + nice + system + sum(rest)
    return own.user + own.system, busy, busy + idle + waiting


def read_measured(path: Path, device: str) -> tuple[list[Measurement], list[Measurement]]:
    """Those that may be fitted, and the others. Of a spec that was measured several times, the medians of what each row
    has: step and memory may have rows of their own."""
    rows: dict[tuple[int, str], list[dict[str, str]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            if float(row.get("others") or 0) <= MAX_OTHERS:
                rows.setdefault((int(row["seed"]), row["engine"]), []).append(row)
    fitted, unseen = [], []
    for (seed, engine), of_seed in rows.items():
        sizes = (statistics.median([float(row[name]) for row in of_seed if row.get(name)] or [0.0])
                 for name in COLUMNS[3:])
        found = Measurement(random_spec(seed, device), engine, of_seed[0]["precision"], *sizes)
        (unseen if seed in UNSEEN[device] else fitted).append(found)
    return fitted, unseen


def show(compared: Sequence[Comparison]) -> None:
    """Print each measurement beside its prediction, and how many are near."""
    Console().table([_row(one) for one in compared])
    for name, errors in (("step time", [abs(c.predicted_s / c.step_s - 1) for c in compared if c.step_s]),
                         ("memory", [abs(c.predicted_bytes / c.used_bytes - 1) for c in compared if c.used_bytes])):
        if not errors:
            continue
        within = ", ".join(f"{sum(e <= bound for e in errors)} within {bound:.0%}" for bound in (0.05, 0.15, 0.2, 0.25))
        print(f"{name}: {within} of {len(errors)}; median {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def _row(one: Comparison) -> dict[str, object]:
    times = {"spec": one.model, "engine": one.engine, "batch": one.batch, "ms/step": f"{one.step_s * 1e3:.3f}",
             "predicted": f"{one.predicted_s * 1e3:.3f}",
             "off by": f"{one.predicted_s / one.step_s - 1:+.1%}" if one.step_s else ""}
    return times if not one.used_bytes else times | {
            "GB": f"{one.used_bytes / 1e9:.2f}", "predicted ": f"{one.predicted_bytes / 1e9:.2f}",
            "off by ": f"{one.predicted_bytes / one.used_bytes - 1:+.1%}"}


def _layers(draw: np.random.Generator, widths: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    chosen = draw.choice(widths, size=int(draw.integers(least, most + 1)))
    return tuple(sorted((int(width) for width in chosen), reverse=True))


def _log_uniform(draw: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(draw.uniform(np.log(low), np.log(high))))


def _numbers(text: str) -> Iterator[int]:
    """Of `0:40,43`."""
    for part in text.split(","):
        first, _, last = part.partition(":")
        yield from range(int(first), int(last) if last else int(first) + 1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("action", choices=("compile", "measure", "compare", "fit"))
    arguments.add_argument("file", type=Path)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--seeds", default="0:120")
    arguments.add_argument("--seconds", type=float, default=0.4)
    arguments.add_argument("--engine", choices=("", "pipeline"), default="", help="instead of the spec's own")
    arguments.add_argument("--repeats", type=int, default=1, help="processes for each spec of the pipeline engine")
    arguments.add_argument("--part", choices=("fitted", "unseen"), default="fitted")
    asked = arguments.parse_args()
    specs = {seed: random_spec(seed, asked.device) for seed in _numbers(asked.seeds)}
    if asked.engine:
        specs = {seed: spec.model_copy(update={"train": spec.train.model_copy(update={"engine": asked.engine})})
                 for seed, spec in specs.items()}
    if asked.action == "compile":
        compile_all(specs)
    elif asked.action == "measure":
        measure_all(asked.file, specs, asked.seconds, asked.repeats)
    elif asked.action == "fit":
        for name, factor in asdict(fit_cpu_steps(asked.file)).items():
            print(f"{name} = {factor:.4g}")
    else:
        compare_all(asked.file, asked.device, asked.part)


if __name__ == "__main__":
    main()

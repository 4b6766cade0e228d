"""What was measured on real machines, and how it is carried over to those that were not."""

from __future__ import annotations

import os
import platform
import statistics
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, TypeAdapter

from embark.catalog import Gpu, load_catalog
from embark.catalog.load import user_data_dir
from embark.errors import UserError
from embark.values import frozen

SHIPPED = Path(__file__).parent / "calibration.toml"
CPU = "cpu"
PRECISIONS = ("fp32", "tf32", "bf16")
PYTHON_SHARE = 0.6  # The share of the host's time for a step that goes with Python's pace (bench/RESULTS.md).
# Limits that no device reaches, by which the numbers of a damaged file are refused.
Rate = Annotated[float, Field(ge=1, le=1e18)]
Size = Annotated[float, Field(ge=0, le=1e12)]
Amount = Annotated[float, Field(ge=0, le=1e6)]  # Seconds, operations or a factor.


@frozen
class Rates:
    """The rates at which a device moves and computes, in units per second."""

    copy_bytes: Rate  # Bytes copied within its memory; reading and writing both count.
    matmul_flops: dict[str, Rate]  # Rate of a large matrix product, by precision: `fp32`, `tf32`, `bf16`.
    upload_bytes: Rate  # Rate from pinned host memory to the device; on a CPU, the same as `copy_bytes`.
    synthetic_values: Size = 0.0
    """Labels, features and ids of synthetic samples that a rank's loader draws; 0: not measured."""
    op_s: Amount = 0.0  # Seconds of a small operation; measured on CPUs alone.
    python_s: Amount = 0.0  # Seconds in which the host of a GPU compiles a fixed text; 0: not measured.


@frozen
class EngineFit:
    """The time that an engine needs beyond the least time for its bytes and arithmetic, fitted to measured steps."""

    host_s: Amount  # Host time of a step of any size; no step is shorter.
    host_layer_s: Amount  # Host time for each dense layer.
    host_group_s: Amount  # Host time for each group of tables with one pooling, which FBGEMM looks up together.
    host_wait: Amount  # Share of the device's time for which the host waits before it can go on.
    start_s: Amount  # Device time of a step of any size.
    layer_s: Amount  # Device time for each dense layer; layers after the lookup start while ids are sorted.
    group_s: Amount  # Device time for each group of tables with one width and one pooling.
    sort_s: Amount  # Device time for each group with too many or too uneven ids to be sorted table by table.
    large_sort_s: Amount  # Additional time for each group with more ids than torch sorts in a few launches.
    cross_s: Amount  # Device time of a step if the network has cross layers.
    skewed_s: Amount  # Device time of a step if many ids refer to the same few rows.
    mean_s: Amount  # Device time for each feature that averages several rows.
    layer_sample_s: Amount  # Device time for each sample in each dense layer.
    # The following fields are factors: measured time over the least time that the device needs for this work.
    sort: Amount  # Grouping equal ids.
    lookup: Amount  # Reading the rows of all ids.
    update: Amount  # Reading and writing each touched row.
    state: Amount  # Reading and writing the optimizer state of each touched row.
    matmul: Amount  # The arithmetic of each layer, or moving its values and weights if that takes longer.
    weights: Amount  # Reading and writing each dense weight, its gradient and its optimizer state.
    activations: Amount  # Moving the values of the layers.
    interaction: Amount  # Moving the vectors of DLRM's dot products.
    crossing: Amount  # Moving the values of DCNv2's cross layers.


@frozen
class CpuFit:
    """The time that the pipeline needs on a CPU beyond the least time for its bytes and arithmetic, fitted to measured
    steps. Operations of a step run one after another."""

    # The following fields count small operations, each of which takes `Rates.op_s`.
    start: Amount  # Operations of a step of any size.
    layer: Amount  # Operations for each dense layer.
    table: Amount  # Operations for each table.
    group: Amount  # Operations for each group of tables with one pooling and one width, which are looked up together.
    pooling: Amount  # Operations for each kind of pooling.
    id: Amount  # Operations for each id: it is sorted, its row is read and its gradient is added.
    ragged_id: Amount  # Additional operations for each id of a feature with several ids.
    dot_sample: Amount  # Operations for each sample of a model with dot products.
    # The following fields are factors: measured time over the least time that the CPU needs for this work.
    update: Amount  # Copying each touched row there and back.
    state: Amount  # Copying the optimizer state of each touched row there and back.
    pooled: Amount  # Copying the pooled vectors once.
    matmul: Amount  # The arithmetic of the layers.
    values: Amount  # Copying the values of the layers once.
    weights: Amount  # Reading and writing each dense weight, its gradient and its optimizer state.
    dots: Amount  # The arithmetic of the dot products.
    crossing: Amount  # Copying the values of DCNv2's cross layers once.


@frozen
class IdMapFit:
    """The time that dynamic tables add to a step, measured against the same step with static ones
    (bench/dynamic_tables.py)."""

    start_s: Amount  # Seconds added to a step of any batch size.
    lookup: Amount  # Amount: measured time over the least time for hashing all ids and reading their buckets.


@frozen
class MemoryFit:
    """The memory that a process holds beyond the counted bytes, as measured."""

    context_bytes: Size  # CUDA's context, kernels and libraries; on a CPU, the interpreter and its libraries.
    workspace_bytes: Size  # Working memory of the matrix libraries.
    pooled: Amount  # Peak bytes for each counted byte of the pooled vectors.
    layers: Amount  # Peak bytes for each counted byte of the layers' outputs.
    ids: Amount  # Peak bytes for each counted byte of the ids and their positions.
    gaps: Amount  # Bytes that the allocator cannot reuse, for each byte of the largest temporary tensor.


@frozen
class Calibration:
    """The measurements of one device, or estimates scaled to it."""

    device: str  # The catalog's name of the accelerator, or `cpu`.
    title: str  # The driver's or the kernel's name for it.
    date: str
    versions: str
    rates: Rates
    engines: dict[str, EngineFit | CpuFit]  # Fits by engine; on a CPU only `pipeline`.
    memory: dict[str, MemoryFit]
    is_measured: bool = True  # False: scaled from another device by the two datasheets.
    basis: str = ""
    id_maps: dict[str, IdMapFit] = field(default_factory=dict)  # Fits for dynamic tables, by engine.


def calibration_path() -> Path:
    """Return the file where `embark bench --calibrate` stores what it measured here."""
    return user_data_dir() / "calibration.toml"


def load_calibrations() -> dict[str, Calibration]:
    """Return the calibrations by device. Measurements of this machine replace those that come with Embark."""
    return _load(calibration_path())


def clear_cache() -> None:
    """Read the files again at the next call."""
    _load.cache_clear()
    _of_this_cpu.cache_clear()


@cache
def _load(own: Path) -> dict[str, Calibration]:
    return _shipped() | (read_calibrations(own) if own.exists() else {})


@cache
def _shipped() -> dict[str, Calibration]:
    return read_calibrations(SHIPPED)


def read_calibrations(path: Path) -> dict[str, Calibration]:
    try:
        tables = tomllib.loads(path.read_text())
        found = {name: TypeAdapter(Calibration).validate_python({
            **table, "device": name, "basis": f"measured on {table['title']}, {table['date']}"})
            for name, table in tables.items()}
        for name, one in found.items():
            needs = {"pipeline"} if name.startswith(CPU) else {"host", *one.engines}
            absent = sorted({*PRECISIONS} - {*one.rates.matmul_flops} | needs - {*one.memory})
            if absent:
                raise ValueError(f"{name} has no {', '.join(absent)} in rates.matmul_flops or memory")
        return found
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        fix = "remove it; embark bench --calibrate makes another"
        raise UserError(f"{path}: not a calibration: {error}", fix) from error


def calibration_for(gpu: Gpu, known: dict[str, Calibration] | None = None) -> Calibration:
    """Return the calibration of this accelerator, or an estimate from the nearest measured one."""
    known = load_calibrations() if known is None else known
    return known[gpu.name] if gpu.name in known else _scaled(known["H200"], gpu)


def calibration_here(gpu: Gpu) -> Calibration:
    """Return the calibration of an accelerator of this machine, at the pace of its host."""
    return at_pace(calibration_for(gpu), probe_python_s())


def cpu_calibration() -> Calibration:
    """Return the calibration of this machine's CPU, or one from another CPU scaled to the rates of this one."""
    return _of_this_cpu(calibration_path(), platform.machine())


@cache
def _of_this_cpu(own: Path, architecture: str) -> Calibration:
    """Prefer measurements on the same architecture: libraries have other kernels on another one."""
    if own.exists() and CPU in read_calibrations(own):
        return _load(own)[CPU]
    known = replace(_load(own).get(f"{CPU}-{architecture}", _load(own)[CPU]), device=CPU)
    found = _cpu_rates()
    drawn = known.rates.synthetic_values * found.copy_bytes / known.rates.copy_bytes
    rates = replace(with_probed(known.rates, found), synthetic_values=drawn)
    basis = (f"an estimate: measured on {known.title}, at the rates of this CPU ({found.matmul_flops / 1e9:,.0f} "
             f"GFLOP/s in fp32, {found.copy_bytes / 1e9:,.1f} GB/s)")
    if found.copy_bytes < LEAST_COPY_BYTES:
        basis += "; no idle machine copies so slowly: this one was busy, so the estimate may be far too long"
    return replace(known, rates=rates, is_measured=False, basis=basis)


@cache
def _cpu_rates() -> CpuRates:
    return probe_cpu()


def with_probed(rates: Rates, found: CpuRates) -> Rates:
    """Return rates scaled to those that a probe measured. The probe measures fp32 alone; other precisions keep their
    ratio to it."""
    factor = found.matmul_flops / rates.matmul_flops["fp32"]
    return replace(rates, copy_bytes=found.copy_bytes, upload_bytes=found.copy_bytes, op_s=found.op_s,
                   matmul_flops={name: rate * factor for name, rate in rates.matmul_flops.items()})


def host_pace(calibration: Calibration, python_s: float) -> float:
    """Return how much longer this GPU's host takes for a step than the calibration's, by the time of its Python."""
    known_s = calibration.rates.python_s
    return 1 + PYTHON_SHARE * (python_s / known_s - 1) if python_s and known_s else 1.0


def at_pace(calibration: Calibration, python_s: float) -> Calibration:
    """Return the calibration of a GPU whose host compiles the fixed text in `python_s`."""
    pace = host_pace(calibration, python_s)
    engines = {name: replace(fit, host_s=pace * fit.host_s, host_layer_s=pace * fit.host_layer_s,
                             host_group_s=pace * fit.host_group_s) if isinstance(fit, EngineFit) else fit
               for name, fit in calibration.engines.items()}
    return replace(calibration, engines=engines)


def _scaled(base: Calibration, gpu: Gpu) -> Calibration:
    """Scale rates by the ratio of the datasheets; fixed times stay the same."""
    of_base = load_catalog().gpus[base.device]
    memory = _ratio(gpu.hbm_gbyte_per_s, of_base.hbm_gbyte_per_s)
    matmul = {
        "bf16": _ratio(gpu.bf16_tflops or gpu.fp16_tflops, of_base.bf16_tflops),
        "tf32": _ratio(gpu.tf32_tflops or gpu.fp32_tflops or 0.5 * (gpu.bf16_tflops or 0.0), of_base.tf32_tflops),
        "fp32": _ratio(gpu.fp32_tflops or 0.07 * (gpu.bf16_tflops or 0.0), of_base.fp32_tflops)
    }
    upload = _ratio(gpu.pcie_gbyte_per_s, of_base.pcie_gbyte_per_s) if gpu.pcie_gbyte_per_s else 1.0
    rates = Rates(
        base.rates.copy_bytes * memory, {name: rate * matmul[name] for name, rate in base.rates.matmul_flops.items()},
        base.rates.upload_bytes * min(1.0, upload), base.rates.synthetic_values, python_s=base.rates.python_s
    )
    return replace(
        base, device=gpu.name, title=gpu.name, rates=rates, is_measured=False,
        basis=f"an estimate: measured on {base.title}, scaled by the datasheets of {base.device} and {gpu.name}"
    )


def to_toml(calibration: Calibration) -> str:
    """Return a table of the file that `read_calibrations` reads."""
    values = asdict(calibration)
    for name in ("device", "is_measured", "basis"):
        del values[name]
    return tomli_w.dumps({calibration.device: _rounded(values)})


def _rounded(value: Any) -> Any:
    """Round floats to four digits."""
    if isinstance(value, dict):
        return {name: _rounded(held) for name, held in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _ratio(of: float | None, to: float | None) -> float:
    return 1.0 if not of or not to else of / to


NUM_OPS = 2_000
NUM_FLOATS = 1 << 22  # Floats that each thread copies.
MATRIX_SIZE = 768
LEAST_S = 0.05  # Each is measured for so long.
LEAST_ROUNDS = 5  # The first one touches new memory, which is slow.
LEAST_COPY_BYTES = 1e9  # Bytes per second.
TEXT = "\n".join(f"def f{i}(a, b={i}, *c):\n    x = [a + {i} for a in c if a > b]\n    return {{'k': x, 'l': (a, b)}}"
                 for i in range(40))


@frozen
class CpuRates:
    """The rates of a CPU with all threads; `op_s` is measured with one thread."""

    copy_bytes: float  # Read and written, a second.
    matmul_flops: float  # Rate in fp32, a second.
    op_s: float  # Seconds of an operation on a handful of values: the time to begin one.


def probe_cpu() -> CpuRates:
    """Measure the rates of this CPU, the best of some rounds, since other programs only take away."""
    import numpy as np

    num_threads = len(os.sched_getaffinity(0))
    values = [(np.ones(NUM_FLOATS, np.float32), np.empty(NUM_FLOATS, np.float32)) for _ in range(num_threads)]
    square, few = np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32), np.ones(8, np.float32)

    def add() -> None:
        for _ in range(NUM_OPS):
            few + few

    with ThreadPoolExecutor(num_threads) as pool:
        copy_s = _best_s(lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), values)))
    return CpuRates(copy_bytes=2 * num_threads * values[0][0].nbytes / copy_s,
                    matmul_flops=2.0 * MATRIX_SIZE**3 / _best_s(lambda: square @ square), op_s=_best_s(add) / NUM_OPS)


def probe_python_s(num_rounds: int = 5) -> float:
    """Return the seconds that compiling a fixed text takes, the mean of some rounds' medians.

    What a host takes to launch a GPU's many small operations rises and falls with it.
    """
    return statistics.mean(statistics.median(_compile_s() for _ in range(5)) for _ in range(num_rounds))


def _compile_s() -> float:
    began_s = time.perf_counter()
    compile(TEXT, "probe", "exec")
    return time.perf_counter() - began_s


def _best_s(call: Callable[[], object]) -> float:
    taken_s: list[float] = []
    since_s = time.perf_counter()
    while (began_s := time.perf_counter()) < since_s + LEAST_S or len(taken_s) < LEAST_ROUNDS:
        call()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s)

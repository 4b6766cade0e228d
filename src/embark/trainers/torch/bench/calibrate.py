"""Measures what this machine moves, computes and uses, in processes of their own, and fits it for `embark plan`."""

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

from embark.catalog import load_catalog
from embark.errors import UserError
from embark.model.placement import Cluster
from embark.plan.calibration import (
    CPU,
    SHIPPED,
    Calibration,
    Rates,
    at_pace,
    calibration_path,
    clear_cache,
    probe_cpu,
    probe_python_s,
    read_calibrations,
    to_toml,
    with_probed,
)
from embark.plan.fit import Measurement, fit_calibration, one_rank_placement
from embark.plan.memory import device_parts, host_parts
from embark.plan.predict import match_gpu
from embark.plan.step_time import step_time
from embark.spec import ModelSpec, RunSpec, Table
from embark.store import write_atomic

T = TypeVar("T")
GPU_BATCHES = {"small": (2048,), "narrow": (1024, 8192, 131_072), "wide": (1024, 8192, 131_072),
               "crossed": (2048, 16_384, 65_536)}
CPU_BATCHES = {"small": (512, 4096), "narrow": (256, 1024, 4096), "wide": (256, 1024, 4096), "crossed": (256, 1024)}


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Measured bandwidths and compute rates of a device."""

    device: str
    kind: str
    versions: str
    device_bytes: int
    rates: Rates


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measurement beside what a calibration predicts for it."""

    model: str
    engine: str
    batch: int
    step_s: float
    predicted_s: float
    used_bytes: float
    predicted_bytes: float


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """A fitted calibration, saved in `path`, where the plan finds it."""

    path: str
    device: str
    rows: list[Comparison]


def calibrate(spec: RunSpec, *, seconds: float, progress: Callable[[str], None]) -> CalibrationResult:
    """Measure models of different shapes at several batch sizes, fit the calibration and save it."""
    found = in_new_process(measure_rates, spec)
    base = _base(found)
    progress(f"{found.device}: {_rates_text(base.rates)}")
    is_gpu = found.kind == "cuda"
    runs = list(_runs(spec, is_gpu=is_gpu))
    measured = []
    for number, run in enumerate(runs, 1):
        row = in_new_process(measure, run, seconds)
        measured.append(row)
        progress(f"{number:2} of {len(runs)}: {run.name}, {row.engine}, batch {run.train.batch_size:,}: "
                 f"{row.step_s * 1e3:.3f} ms, {row.used_bytes / 2**30:.2f} GiB")
    known = read_calibrations(SHIPPED)
    calibration = fit_calibration(base, measured, known.get(base.device, known["H200"]))
    _save(calibration)
    return CalibrationResult(str(calibration_path()), calibration.device, [compare(calibration, m) for m in measured])


def in_new_process(call: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process whose memory nothing else has touched."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def measure(spec: RunSpec, seconds: float) -> Measurement:
    """Return the seconds of a step, fed from memory, and the bytes at the peak."""
    import torch

    from embark.data import open_source, resolve_from_data
    from embark.run.host import peak_resident_bytes
    from embark.trainers.bench import WARM_UP_STEPS, num_batches, time_steps
    from embark.trainers.torch.world import join
    from .contenders import Embark

    with join(spec.place) as world:
        fit, is_gpu = resolve_from_data(spec), world.device.type == "cuda"
        source = open_source(fit)
        ours = Embark(fit, world, source, num_batches(fit, source))
        paces: list[float] = []
        times = time_steps(ours, seconds, WARM_UP_STEPS if is_gpu else 3, lambda: paces.append(probe_python_s(1)))
        resident, device = peak_resident_bytes(), world.device
        return Measurement(
            spec=spec, engine=ours.trainer.engine.name, precision=ours.trainer.precision,
            step_s=statistics.median(times), used_bytes=ours.trainer.peak_bytes(),
            reserved_bytes=torch.cuda.max_memory_reserved(device) if is_gpu else 0,
            allocated_bytes=torch.cuda.max_memory_allocated(device) if is_gpu else 0,
            resident_bytes=resident if is_gpu else 0.0, python_s=statistics.mean(paces) if is_gpu else 0.0,
        )


def measure_rates(spec: RunSpec) -> DeviceRates:
    """Measure what this device moves and computes."""
    import torch

    from embark.trainers.torch.trainer import set_matmul_precision
    from embark.trainers.torch.world import join
    from .run import bandwidth, matrix_rate, upload_rate

    with join(spec.place) as world:
        flops = {}
        for precision in ("fp32", "tf32", "bf16"):
            set_matmul_precision(precision)
            flops[precision] = matrix_rate(world.device, precision)
        rates = Rates(bandwidth(world.device), flops, upload_rate(world.device), _drawing_rate(),
                      python_s=probe_python_s())
        if world.device.type == "cpu":  # as an unmeasured one is planned: what a fit multiplies is counted at these
            rates = with_probed(rates, probe_cpu())
        return DeviceRates(device=world.device_name, kind=world.device.type, versions=f"torch {torch.__version__}",
                           device_bytes=world.device_bytes, rates=rates)


def compare(calibration: Calibration, measured: Measurement) -> Comparison:
    """Put a measurement beside what the calibration predicts for it, at the pace of its host."""
    calibration = at_pace(calibration, measured.python_s)
    spec, placement = measured.spec, one_rank_placement(measured.spec)
    is_cpu = calibration.device == CPU
    cluster = Cluster(1, 1, 0.0, 0.0, "cpu" if is_cpu else "cuda")
    step_s = step_time(spec, placement, cluster, measured.engine, measured.precision, calibration,
                       from_memory=True).total_s
    if is_cpu:
        parts = host_parts(spec, placement, 1, calibration, is_cpu=True, precision=measured.precision)
        parts.pop("checkpoint copy", None)  # nothing is saved while a step is measured
    else:
        parts = device_parts(spec, placement, measured.engine, measured.precision, calibration)
    return Comparison(
        model=spec.name, engine=measured.engine, batch=spec.train.batch_size, step_s=measured.step_s,
        predicted_s=step_s, used_bytes=measured.used_bytes, predicted_bytes=sum(parts.values()),
    )


def calibration_models(*, is_gpu: bool) -> dict[str, ModelSpec]:
    """Return a tiny model, one of mostly lookups, one of mostly layers, and one of several ids a feature under cross
    layers."""
    scale = 1 if is_gpu else 10
    many = tuple(Table(name=f"cat_{i}", rows=400_000 // scale, multi_hot=6) for i in range(20))
    return {
        "small": ModelSpec(embedding_dim=16, bottom_mlp=(64,), top_mlp=(64, 32), num_tables=6, rows_per_table=2_000),
        "narrow": ModelSpec(embedding_dim=64, bottom_mlp=(256,), top_mlp=(256, 128), num_tables=32,
                            rows_per_table=200_000 // scale),
        "wide": ModelSpec(embedding_dim=128, bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512), num_tables=20,
                          rows_per_table=500_000 // scale),
        "crossed": ModelSpec(kind="dcnv2", embedding_dim=128, bottom_mlp=(512,), top_mlp=(1024, 512), tables=many,
                             num_cross_layers=3, cross_rank=512),
    }


def _runs(spec: RunSpec, *, is_gpu: bool) -> Iterator[RunSpec]:
    for engine in ("cuda_graph", "pipeline") if is_gpu else ("pipeline",):
        for name, model in calibration_models(is_gpu=is_gpu).items():
            for batch in (GPU_BATCHES if is_gpu else CPU_BATCHES)[name]:
                train = spec.train.model_copy(update={"batch_size": batch, "engine": engine})
                data = spec.data.model_copy(update={"num_train_samples": 16 * batch, "num_eval_samples": 0,
                                                    "kind": "synthetic", "path": ""})
                yield spec.model_copy(update={"name": name, "model": model, "train": train, "data": data})


def _base(found: DeviceRates) -> Calibration:
    device = CPU
    if found.kind == "cuda":
        gpu = match_gpu(found.device, found.device_bytes, load_catalog())
        if gpu is None:
            raise UserError(f"{found.device}: the catalog has no such accelerator",
                            "embark catalog list shows those that can be planned for")
        device = gpu.name
    return Calibration(device, found.device, datetime.date.today().isoformat(), found.versions, found.rates, {}, {})


def _save(calibration: Calibration) -> None:
    path = calibration_path()
    known = read_calibrations(path) if path.exists() else {}
    known[calibration.device] = calibration
    write_atomic(path, "\n".join(to_toml(one) for one in known.values()))
    clear_cache()


def _rates_text(rates: Rates) -> str:
    flops = ", ".join(f"{name} {rate / 1e12:,.3g}" for name, rate in rates.matmul_flops.items())
    return (f"{rates.copy_bytes / 1e9:,.0f} GB/s within memory, {rates.upload_bytes / 1e9:,.0f} GB/s to the device, "
            f"TFLOP/s: {flops}")


def _drawing_rate(batch_size: int = 2048, num_batches: int = 200) -> float:
    """Return how many values of synthetic samples a rank's loader draws a second."""
    from embark.data import Loader, open_source
    from embark.spec import load_spec

    source = open_source(load_spec("quickstart", [f"train.batch_size={batch_size}"]))
    with Loader(source, batch_size=batch_size, rank=0, world_size=1, start_step=0, stop_step=num_batches) as loader:
        batches = iter(loader)
        first = next(batches)
        started = time.perf_counter()
        num_drawn = sum(1 for _ in batches)
        num_values = first.dense.size + first.ids.size + first.label.size
        return num_values * num_drawn / (time.perf_counter() - started)

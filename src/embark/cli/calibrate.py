"""`embark bench --calibrate`: what this machine moves, computes and holds, measured and kept for `embark plan`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.errors import ExitCode, UserError
from embark.model.placement import Cluster
from embark.plan.calibration import (
    CPU,
    Calibration,
    Rates,
    calibration_path,
    clear_cache,
    read_calibrations,
    to_toml,
)
from embark.plan.fit import Measurement, fit_calibration, one_rank_placement
from embark.plan.memory import device_parts, host_parts
from embark.plan.step_time import step_time
from embark.plan.this_machine import match_gpu
from embark.spec import ModelSpec, RunSpec, Table

GPU_BATCHES = {"small": (2048,), "narrow": (1024, 8192, 131_072), "wide": (1024, 8192, 131_072),
               "crossed": (2048, 16_384, 65_536)}
CPU_BATCHES = {"small": (512, 4096), "narrow": (256, 1024, 4096), "wide": (256, 1024, 4096), "crossed": (256, 1024)}


def calibrate(console: Console, spec: RunSpec, *, seconds: float) -> int:
    """Measure models of different shapes at several sizes, each in a process of its own; fit; keep."""
    from embark.trainers.torch.bench.measure import measure_apart, rates_apart

    found = rates_apart(spec)
    base = _base(found)
    console.text(f"{found['device']}: {_rates_text(base.rates)}")
    runs = list(_runs(spec, is_gpu=found["kind"] == "cuda"))
    measured = []
    for number, run in enumerate(runs, 1):
        row = as_measured(run, measure_apart(run, seconds=seconds), is_gpu=found["kind"] == "cuda")
        measured.append(row)
        console.text(f"{number:2} of {len(runs)}: {run.name}, {row.engine}, batch {run.train.batch_size:,}: "
                     f"{row.step_s * 1e3:.3f} ms, {row.used_bytes / 2**30:.2f} GiB")
    calibration = fit_calibration(base, measured)
    path = calibration_path()
    _keep(calibration)
    rows = [compared(calibration, m) for m in measured]
    if console.json:
        console.data({"path": str(path), "device": calibration.device, "rows": rows})
        return ExitCode.DONE
    console.table(rows, ROW_HEADINGS)
    console.text(f"kept in {path}; embark plan uses it from now on")
    return ExitCode.DONE


ROW_HEADINGS = {
    "model": "model", "engine": "engine", "batch": "batch", "step_ms": "ms a step", "predicted_ms": "predicted",
    "off": "off by", "gib": "GiB", "predicted_gib": "predicted ", "gib_off": "off by ",
}


def compared(calibration: Calibration, measured: Measurement) -> dict[str, Any]:
    """A measurement beside what the calibration says of it."""
    spec, placement = measured.spec, one_rank_placement(measured.spec)
    is_cpu = calibration.device == CPU
    cluster = Cluster(1, 1, 0.0, 0.0, "cpu" if is_cpu else "cuda")
    step_s = step_time(spec, placement, cluster, measured.engine, measured.precision, calibration).total_s
    if is_cpu:
        parts = host_parts(spec, placement, 1, calibration, is_cpu=True, engine=measured.engine,
                           precision=measured.precision)
        parts.pop("checkpoint copy", None)  # nothing is saved while a step is measured
    else:
        parts = device_parts(spec, placement, measured.engine, measured.precision, calibration)
    size = sum(parts.values())
    return {
        "model": spec.name, "engine": measured.engine, "batch": spec.train.batch_size,
        "step_ms": f"{measured.step_s * 1e3:.3f}", "predicted_ms": f"{step_s * 1e3:.3f}",
        "off": f"{step_s / measured.step_s - 1:+.1%}", "gib": f"{measured.used_bytes / 2**30:.2f}",
        "predicted_gib": f"{size / 2**30:.2f}", "gib_off": f"{size / measured.used_bytes - 1:+.1%}",
    }


def as_measured(spec: RunSpec, found: dict[str, Any], *, is_gpu: bool) -> Measurement:
    """What `measure` found, as the fit wants it."""
    used = found["used_bytes"] if is_gpu else found["resident_bytes"]
    return Measurement(spec, found["engine"], found["precision"], found["step_s"], used, found["reserved_bytes"],
                    found["allocated_bytes"], found["resident_bytes"] if is_gpu else 0.0)


def _runs(spec: RunSpec, *, is_gpu: bool) -> Iterator[RunSpec]:
    for engine in ("cuda_graph", "pipeline") if is_gpu else ("pipeline",):
        for name, model in calibration_models(is_gpu=is_gpu).items():
            for batch in (GPU_BATCHES if is_gpu else CPU_BATCHES)[name]:
                train = spec.train.model_copy(update={"batch_size": batch, "engine": engine})
                data = spec.data.model_copy(update={"num_train_samples": 16 * batch, "num_eval_samples": 0,
                                                    "kind": "synthetic", "path": ""})
                yield spec.model_copy(update={"name": name, "model": model, "train": train, "data": data})


def calibration_models(*, is_gpu: bool) -> dict[str, ModelSpec]:
    """Hardly anything, mostly lookups, mostly layers, and several ids a feature under cross layers."""
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


def _base(found: dict[str, Any]) -> Calibration:
    rates = Rates(found["copy_bytes"], found["matmul_flops"], found["upload_bytes"], found["synthetic_values"])
    today = datetime.date.today().isoformat()
    if found["kind"] != "cuda":
        return Calibration(CPU, found["device"], today, f"torch {found['torch']}", rates, {}, {})
    gpu = match_gpu(found["device"], found["device_bytes"], load_catalog())
    if gpu is None:
        raise UserError(f"{found['device']}: the catalog has no such accelerator",
                        fix="embark catalog list shows those that can be planned for")
    return Calibration(gpu.name, found["device"], today, f"torch {found['torch']}", rates, {}, {})


def _keep(calibration: Calibration) -> None:
    from embark.store import write_atomic

    path = calibration_path()
    kept = read_calibrations(path) if path.exists() else {}
    kept[calibration.device] = calibration
    write_atomic(path, "\n".join(to_toml(one) for one in kept.values()))
    clear_cache()


def _rates_text(rates: Rates) -> str:
    flops = ", ".join(f"{name} {rate / 1e12:,.3g}" for name, rate in rates.matmul_flops.items())
    return (f"{rates.copy_bytes / 1e9:,.0f} GB/s within memory, {rates.upload_bytes / 1e9:,.0f} GB/s to the device, "
            f"TFLOP/s: {flops}")

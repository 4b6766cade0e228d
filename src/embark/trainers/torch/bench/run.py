"""The contenders one after the other, each alone on the device, several times over; the median counts."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from embark.data import Batch, Source, fit_spec, open_source
from embark.errors import UserError
from embark.spec import RunSpec
from embark.trainers.torch.bench.ours import Ours
from embark.trainers.torch.bench.roofline import roofline, wait
from embark.trainers.torch.bench.stock import Stock
from embark.trainers.torch.precision import choose_precision, set_matmul_precision
from embark.trainers.torch.world import World, join

NUM_BATCHES = 16


class Contender(Protocol):
    """Something that trains."""

    name: str

    def run(self, num_steps: int) -> None: ...

    def close(self) -> None: ...


def bench(spec: RunSpec, *, seconds: float, peers: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """Samples a second of each, and how Embark's compare; `seconds` is for each contender."""
    with join(spec.place) as world:
        if world.world_size > 1:
            raise UserError("embark bench measures one process", fix="run it without torchrun")
        precision = choose_precision(spec.train, world.device)
        set_matmul_precision("tf32")  # the peers' best
        spec = fit_spec(spec)
        source = open_source(spec)
        batches = _batches(spec, source)
        rows = [_measure(make, spec, world, seconds, tell)
                for make in _contenders(spec, world, source, batches, peers, precision)]
        ours = rows[-1]
        if spec.data.kind == "prepared":
            rows.append(_measure(lambda: Ours(spec, world, source), spec, world, seconds, tell))
        for row in rows:
            row["ratio"] = ours["samples_per_s"] / row["samples_per_s"]
        limit = roofline(spec, batches[:4], precision, world.device)
        return {
            "batch_size": spec.train.batch_size, "device": world.device_name, "torch": torch.__version__,
            "rows": rows,
            "roofline": {
                "samples_per_s": spec.train.batch_size / limit.floor_s, "step_ms": limit.floor_s * 1e3,
                "bytes_per_step": limit.bytes_per_step, "flops_per_step": limit.flops_per_step,
                "bytes_per_s": limit.bytes_per_s, "flops_per_s": limit.flops_per_s,
                "share": limit.floor_s * ours["samples_per_s"] / spec.train.batch_size,
            },
        }


def profile(spec: RunSpec, num_steps: int = 20) -> list[dict[str, Any]]:
    """Where the device's time goes in Embark's step, the longest first."""
    with join(spec.place) as world:
        set_matmul_precision("tf32")
        spec = fit_spec(spec)
        ours = Ours(spec, world, open_source(spec), NUM_BATCHES)
        ours.run(10)
        wait(world.device)
        kinds = [torch.profiler.ProfilerActivity.CUDA if world.device.type == "cuda" else
                 torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds) as found:
            ours.run(num_steps)
            wait(world.device)
        is_gpu = world.device.type == "cuda"
        rows = [
            {"what": e.key, "us": (e.device_time_total if is_gpu else e.self_cpu_time_total) / num_steps,
             "calls": e.count / num_steps}
            for e in found.key_averages()
        ]
        return sorted(rows, key=lambda row: -row["us"])


def _contenders(
    spec: RunSpec, world: World, source: Source, batches: list[Batch], peers: bool, precision: str
) -> Iterator[Callable[[], Contender]]:
    if peers and spec.model.num_dense:
        yield lambda: Stock(spec, world, batches, is_bf16=False)
        if precision == "bf16":
            yield lambda: Stock(spec, world, batches, is_bf16=True)
    yield lambda: Ours(spec, world, source, len(batches))


def _measure(
    make: Callable[[], Contender], spec: RunSpec, world: World, seconds: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    began = time.perf_counter()
    contender = make()
    contender.run(1)
    wait(world.device)
    first_s = time.perf_counter() - began
    contender.run(20)
    wait(world.device)
    num_steps = _steps_for(contender, world.device, seconds / 8)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        contender.run(num_steps)
        wait(world.device)
        times.append((time.perf_counter() - started) / num_steps)
    step_s = statistics.median(times)
    row = {"name": contender.name, "samples_per_s": spec.train.batch_size / step_s, "step_ms": step_s * 1e3,
           "fastest_ms": min(times) * 1e3, "slowest_ms": max(times) * 1e3, "first_step_s": first_s}
    if world.device.type == "cuda":
        row["memory_bytes"] = torch.cuda.max_memory_allocated(world.device)
    tell(contender.name)
    contender.close()
    del contender
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return row


def _steps_for(contender: Contender, device: torch.device, seconds: float) -> int:
    started = time.perf_counter()
    contender.run(5)
    wait(device)
    return max(5, int(seconds / ((time.perf_counter() - started) / 5)))


def _batches(spec: RunSpec, source: Source) -> list[Batch]:
    size = spec.train.batch_size
    count = min(NUM_BATCHES, source.num_train_samples // size)
    if not count:
        raise UserError(f"the data has fewer than train.batch_size = {size} samples", fix="a smaller train.batch_size")
    return [source.train_rows(0, i * size, (i + 1) * size) for i in range(count)]

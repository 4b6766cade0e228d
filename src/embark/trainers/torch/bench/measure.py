"""A spec's first steps in a process of their own: how long one takes, and what it holds."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from embark.spec import RunSpec

NUM_BATCHES = 16
WARM_UP_STEPS = 20
ROUNDS = 5


def measure_apart(spec: RunSpec, *, seconds: float) -> dict[str, Any]:
    """What `measure` finds in a new process, whose memory nothing else has touched."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, spec, seconds).result()


def rates_apart(spec: RunSpec) -> dict[str, Any]:
    """What `measure_rates` finds in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_rates, spec).result()


def measure(spec: RunSpec, seconds: float) -> dict[str, Any]:
    """Seconds of a step, fed from memory, and bytes at the peak."""
    import torch

    from embark.data import fit_spec, open_source
    from embark.run.host_memory import peak_resident_bytes
    from embark.trainers.torch.bench.ours import Ours
    from embark.trainers.torch.bench.roofline import wait
    from embark.trainers.torch.world import join

    with join(spec.place) as world:
        spec = fit_spec(spec)
        ours = Ours(spec, world, open_source(spec), NUM_BATCHES)
        ours.run(WARM_UP_STEPS if world.device.type == "cuda" else 3)
        wait(world.device)
        started = time.perf_counter()
        ours.run(3)
        wait(world.device)
        num_steps = max(3, int(seconds / ROUNDS / ((time.perf_counter() - started) / 3)))
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            ours.run(num_steps)
            wait(world.device)
            times.append((time.perf_counter() - started) / num_steps)
        found = {"engine": ours.built.engine.name, "precision": ours.built.precision,
                 "step_s": statistics.median(times), "resident_bytes": peak_resident_bytes(),
                 "used_bytes": 0, "reserved_bytes": 0, "allocated_bytes": 0, "device": world.device_name}
        if world.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(world.device)
            found |= {"used_bytes": total - free, "reserved_bytes": torch.cuda.max_memory_reserved(world.device),
                      "allocated_bytes": torch.cuda.max_memory_allocated(world.device)}
        ours.close()
        return found


def measure_rates(spec: RunSpec) -> dict[str, Any]:
    """What this device moves and computes."""
    import torch

    from embark.trainers.torch.bench.roofline import bandwidth, matrix_rate, upload_rate
    from embark.trainers.torch.device_memory import device_bytes
    from embark.trainers.torch.precision import set_matmul_precision
    from embark.trainers.torch.world import join

    with join(spec.place) as world:
        device = world.device
        flops = {}
        for precision in ("fp32", "tf32", "bf16"):
            set_matmul_precision(precision)
            flops[precision] = matrix_rate(device, precision)
        return {"device": world.device_name, "kind": device.type, "torch": torch.__version__,
                "device_bytes": device_bytes(device) if device.type == "cuda" else 0,
                "copy_bytes": bandwidth(device), "upload_bytes": upload_rate(device), "matmul_flops": flops,
                "synthetic_values": drawing_rate()}


def drawing_rate(batch_size: int = 2048, num_batches: int = 200) -> float:
    """Labels, features and ids of the hidden model's samples that a rank's loader draws a second."""
    from embark.data import Loader, open_source
    from embark.spec import load_spec

    spec = load_spec("quickstart", [f"train.batch_size={batch_size}"])
    source = open_source(spec)
    with Loader(source, batch_size=batch_size, rank=0, world_size=1, start_step=0, stop_step=num_batches) as loader:
        taken = iter(loader)
        num_values = sum(batch.dense.size + batch.ids.size + batch.label.size for batch in [next(taken)])
        started = time.perf_counter()
        num_taken = sum(1 for _ in taken)
        return num_values * num_taken / (time.perf_counter() - started)

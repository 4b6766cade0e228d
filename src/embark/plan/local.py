"""What `embark plan` says of a run on this very machine: handed to the trainer, which sets it beside what came."""

import re
from typing import Any

from embark.catalog import Catalog, Gpu, load_catalog
from embark.errors import UserError
from embark.model.jax_layout import LINE_WIDTHS, make_layout
from embark.model.placement import Cluster, TooLarge
from embark.plan.calibration import CPU, calibration_for, load_calibrations
from embark.plan.closed_form import closed_form
from embark.plan.memory import device_parts, host_parts
from embark.plan.step_time import step_time
from embark.plan.tpu_memory import chip_memory
from embark.plan.tpu_time import tpu_step_time
from embark.spec import RunSpec


def predict_local(spec: RunSpec, here: dict[str, Any]) -> dict[str, Any] | None:
    """Bytes and step time of `spec` on the machine that `here` describes; None where nothing is known of it."""
    if here["engine"] == "jax" or here["device"] == "tpu":
        return _foresee_in_jax(spec, here)
    is_cpu = here["device"] == "cpu"
    engine, precision = here["engine"], here["precision"]
    if is_cpu:
        calibration = load_calibrations()[CPU]
    else:
        gpu = match_gpu(here["device_name"], here["device_bytes"], load_catalog())
        if gpu is None:
            return None
        calibration = calibration_for(gpu)
    if engine not in calibration.engines:
        return None
    cluster = local_cluster(device=here["device"], num_ranks=here["world_size"], device_bytes=here["device_bytes"],
                           host_bytes=here["host_bytes"])
    try:
        placement = closed_form(spec, cluster)
    except TooLarge:
        return None
    step = step_time(spec, placement, cluster, engine, precision, calibration,
                     draws_samples=spec.data.kind == "synthetic")
    parts = (
        host_parts(spec, placement, cluster.ranks_per_host, calibration, is_cpu=True, engine=engine,
                   precision=precision)
        if is_cpu else device_parts(spec, placement, engine, precision, calibration)
    )
    ranks = cluster.ranks_per_host if is_cpu else 1
    is_calibrated = calibration.is_measured and (not is_cpu or calibration.title == here["device_name"])
    return {"step_s": step.total_s, "is_calibrated": is_calibrated, "bound_by": step.bound_by,
            "peak_bytes": sum(parts.values()) / ranks, "parts": parts, "basis": step.basis}


def _foresee_in_jax(spec: RunSpec, here: dict[str, Any]) -> dict[str, Any] | None:
    """Of TPUs, from their datasheets. Of JAX on a GPU or a CPU nothing, nor of SparseCores: none was calibrated."""
    is_known = here["device"] == "tpu" and here["engine"] == "jax"
    chip = match_tpu(here["device_name"], load_catalog()) if is_known else None
    if chip is None:
        return None
    try:
        layout = make_layout(spec, here["world_size"], LINE_WIDTHS["tpu"])
    except UserError:
        return None
    parts = chip_memory(spec, layout, here["precision"], chip.name).parts()
    step = tpu_step_time(spec, chip, layout, here["precision"], chips_per_host=here["local_world_size"])
    return {"step_s": step.total_s, "is_calibrated": False, "bound_by": step.bound_by,
            "peak_bytes": sum(parts.values()), "parts": parts, "basis": step.basis}


def match_gpu(title: str, memory_bytes: float, catalog: Catalog) -> Gpu | None:
    """`NVIDIA A100-SXM4-80GB` is the catalog's A100-80GB. Of several with the name, the one whose memory is nearest."""
    words = set(re.split(r"[\s\-_]+", title.upper()))
    named = [g for g in catalog.gpus.values() if g.kind == "gpu" and g.name.upper().split("-")[0] in words]
    return min(named, key=lambda g: abs(g.memory_mib * 1024.0**2 - memory_bytes), default=None)


def match_tpu(title: str, catalog: Catalog) -> Gpu | None:
    """`TPU v5 lite`, as JAX names it, is the catalog's TPU-v5e. Older kinds are None: JAX counts their cores, two a
    chip, and the catalog counts chips."""
    found = re.search(r"TPU v([4-9])\s*(lite|e|p)?", title)
    if found is None:
        return None
    version, kind = found[1], {"lite": "e", "e": "e", "p": "p"}.get(found[2] or "", "")
    names = (f"TPU-v{version}{kind}",) if kind else (f"TPU-v{version}", f"TPU-v{version}p")
    return next((catalog.gpus[name] for name in names if name in catalog.gpus), None)


def local_cluster(*, device: str, num_ranks: int, device_bytes: float, host_bytes: float) -> Cluster:
    """All ranks on this host."""
    return Cluster(num_ranks, num_ranks, device_bytes, host_bytes, "cpu" if device == "cpu" else "cuda")

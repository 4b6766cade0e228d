"""Which accelerator of the catalog a driver or JAX means, and this computer as a cluster of one."""

from __future__ import annotations

import re

from embark.catalog import Catalog, Gpu
from embark.model.placement import Cluster


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

"""Which accelerator of the catalog a driver means, and this computer as a cluster of one."""

from __future__ import annotations

import re

from embark.catalog import Catalog, Gpu
from embark.plan.placement import Cluster


def gpu_of(title: str, memory_bytes: float, catalog: Catalog) -> Gpu | None:
    """`NVIDIA A100-SXM4-80GB` is the catalog's A100-80GB. Of several with the name, the one whose memory is nearest."""
    words = set(re.split(r"[\s\-_]+", title.upper()))
    named = [g for g in catalog.gpus.values() if g.kind == "gpu" and g.name.upper().split("-")[0] in words]
    return min(named, key=lambda g: abs(g.memory_mib * 1024.0**2 - memory_bytes), default=None)


def this_cluster(*, device: str, num_ranks: int, device_bytes: float, host_bytes: float) -> Cluster:
    """All ranks on this host."""
    return Cluster(num_ranks, num_ranks, device_bytes, host_bytes, "cpu" if device == "cpu" else "cuda")

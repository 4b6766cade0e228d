"""How much memory a device and its host really have."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def device_bytes(device: torch.device) -> int:
    """The GPU's whole memory."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def host_bytes() -> int:
    """The machine's memory, or the container's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(Path, CGROUP_LIMITS):
        try:
            limit = path.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total

"""How much memory a device and its host really have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def device_bytes(device: torch.device) -> int:
    """The GPU's whole memory."""
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def peak_bytes(device: torch.device) -> int:
    """What the run holds of the device, libraries and all; on a CPU, the most that this process has held."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory that this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


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

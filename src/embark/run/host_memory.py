"""How much memory the host has, and how much of it this process has held."""

import os
from collections.abc import Callable
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_resident_bytes() -> int:
    """The most memory that this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def host_bytes() -> int:
    """The machine's memory, or the container's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, cgroup_limit_bytes(_read) or total)


def cgroup_limit_bytes(read: Callable[[str], str]) -> int | None:
    """The container's memory limit; None where it has none. `read`: a file's text, empty where there is none."""
    limits = [int(text) for path in CGROUP_LIMITS if (text := read(path).strip()).isdigit()]
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

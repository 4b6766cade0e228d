"""Memory and processors of this host, as far as a process in a container may use them."""

import math
import os
from collections.abc import Callable
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def host_bytes() -> int:
    """Return the machine's memory, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, cgroup_limit_bytes(_read) or total)


def cgroup_limit_bytes(read: Callable[[str], str]) -> int | None:
    """Return the container's memory limit; None if it has none. `read` returns a file's text, empty if there is
    none."""
    limits = [int(text) for path in CGROUP_LIMITS if (text := read(path).strip()).isdigit()]
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def usable_cores() -> int:
    """Return the processors that this process may run on, or fewer if a container's limit allows less time."""
    quota = cpu_quota(_read)
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota(read: Callable[[str], str]) -> float | None:
    """Return how many processors the container may use; None if it has no limit. `read` returns a file's text, empty if
    there is none."""
    words = read("/sys/fs/cgroup/cpu.max").split()
    try:
        if len(words) == 2:
            return None if words[0] == "max" else int(words[0]) / int(words[1])
        quota = int(read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
        return quota / int(read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")) if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None

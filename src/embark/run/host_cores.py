"""The processors of this machine that a process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path


def usable_cores() -> int:
    """Those it may run on, or fewer where a container's limit allows less time."""
    quota = cpu_quota(_read)
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota(read: Callable[[str], str]) -> float | None:
    """Processors that the container may use; None where it has no limit. `read`: a file's text, empty where there is
    none."""
    words = read("/sys/fs/cgroup/cpu.max").split()
    try:
        if len(words) == 2:
            return None if words[0] == "max" else int(words[0]) / int(words[1])
        quota = int(read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
        return quota / int(read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")) if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

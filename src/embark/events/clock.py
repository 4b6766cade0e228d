"""The time of events: what the wall clock said when the process began, and the seconds counted since. A step of the
wall clock, by an operator or a time server, changes no duration and spends no budget."""

import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def uptime_s() -> float:
    """Seconds since this machine booted, or since some fixed moment where a system does not count these."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def boot_id() -> str:
    """The same for all processes that count the same uptime; empty where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


_began_s = time.time() - uptime_s()


def now_s() -> float:
    """Seconds since 1970."""
    return _began_s + uptime_s()

"""The host: Python, system, processors, memory, limits, clock."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator

from embark.doctor.check import GIB, Check, judged, size_text
from embark.doctor.here import Here
from embark.stack import versions as stack

MIN_SHM_BYTES = 1 * GIB
"""NCCL and processes that load pass data through /dev/shm; a container's default of 64 MiB ends in a bus error."""
MIN_OPEN_FILES = 4096
"""Every rank holds sockets to every other one, and files of prepared data."""
MIN_PROCESSES = 1024
"""Every rank has tens of threads, which count."""
_CONTAINERS = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))


def host(here: Here) -> Iterator[Check]:
    yield python()
    yield system()
    yield container(here)
    yield cpu_features(here)
    yield cores(here)
    yield memory(here)
    yield shared_memory(here)
    yield open_files()
    yield processes()
    yield compiler(here)
    yield clock()


def python() -> Check:
    pythons = stack.default_triple().pythons
    found = f"{sys.version_info.major}.{sys.version_info.minor}"
    fix = f"make the environment with one torch has wheels for: python{pythons[-1]} -m venv .venv"
    return judged("python", found in pythons, platform.python_version(), f"one of {', '.join(pythons)}", fix)


def system() -> Check:
    found = f"{platform.system()} {platform.machine()}"
    fix = "fbgemm has no wheels for other systems: use a Linux container or a Linux machine"
    return judged("system", found in ("Linux x86_64", "Linux aarch64"), found, "Linux x86_64 or aarch64", fix)


def container(here: Here) -> Check:
    """Never a fault; but it says whose limits the others are."""
    if here.env.get("KUBERNETES_SERVICE_HOST"):
        return Check("container", "ok", "a pod of Kubernetes")
    marked = next((name for path, name in _CONTAINERS if here.path(path).exists()), "")
    groups = here.read("/proc/1/cgroup")
    by_group = next((name for name in ("kubepods", "docker", "libpod", "containerd") if name in groups), "")
    return Check("container", "ok", f"yes: {marked or by_group}" if marked or by_group else "no")


def cpu_features(here: Here) -> Check:
    """Never a fault: without them bf16 on a CPU is emulated, and fp32 is the faster choice."""
    lines = (line for line in here.read("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features")))
    flags = set(next(lines, "").partition(":")[2].split())
    have = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    return Check("cpu bf16", "ok", ", ".join(have) or "no: fp32 is faster on this CPU", "amx_bf16 or avx512_bf16")


def cores(here: Here) -> Check:
    allowed = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    quota = cpu_quota(here)
    usable = min(allowed, quota) if quota else allowed
    found = f"{usable:g}" + (" (the container's limit)" if quota and quota < allowed else "")
    fix = "give the container or the job at least two CPUs: one loads while the other trains"
    return judged("cores", usable >= 2, found, "at least 2", fix)


def memory(here: Here) -> Check:
    total = _total_bytes(here)
    limit = cgroup_limit_bytes(here)
    usable = min(total, limit) if limit else total
    found = f"{usable / GIB:.1f} GiB" + (" (the container's limit)" if limit and limit < total else "")
    if usable < 4 * GIB:
        return Check("memory", "wrong", found, "at least 4 GiB", "raise the container's memory limit")
    kills = _oom_kills(here)
    if kills:
        return Check("memory", "warning", f"{found}; {kills} processes of this container were killed for it",
                     "none killed", "raise the container's memory limit, or run fewer ranks or a smaller batch")
    return Check("memory", "ok", found, "at least 4 GiB")


def shared_memory(here: Here) -> Check:
    where = here.path("/dev/shm")
    expected = f"at least {MIN_SHM_BYTES / GIB:.0f} GiB"
    fix = "start the container with --shm-size=8g; on Kubernetes mount an emptyDir of medium Memory at /dev/shm"
    if not where.exists():
        return Check("/dev/shm", "wrong", "missing", expected, fix)
    usage = shutil.disk_usage(where)
    if usage.total < MIN_SHM_BYTES:
        return Check("/dev/shm", "wrong", size_text(usage.total), expected, fix)
    found = f"{size_text(usage.total)}, {size_text(usage.free)} free"
    left = "processes that were killed leave files there: see ls -l /dev/shm"
    return judged("/dev/shm", usage.free >= MIN_SHM_BYTES // 2, found, expected, left, bad="warning")


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = soft == resource.RLIM_INFINITY
    reachable = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    fix = f"ulimit -n {MIN_OPEN_FILES}" if reachable else f"as root: prlimit --pid $$ --nofile={MIN_OPEN_FILES}"
    found = "unlimited" if infinite else str(soft)
    return judged("open files", infinite or soft >= MIN_OPEN_FILES, found, f"at least {MIN_OPEN_FILES}", fix)


def processes() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    infinite = soft == resource.RLIM_INFINITY
    reachable = hard == resource.RLIM_INFINITY or hard >= MIN_PROCESSES
    fix = f"ulimit -u {MIN_PROCESSES}" if reachable else f"as root: prlimit --pid $$ --nproc={MIN_PROCESSES}"
    found = "unlimited" if infinite else str(soft)
    return judged("processes", infinite or soft >= MIN_PROCESSES, found, f"at least {MIN_PROCESSES}", fix,
                  bad="warning")


def compiler(here: Here) -> Check:
    names = (here.env.get("CXX", "g++"), "g++", "clang++")
    found = next((path for name in names if (path := shutil.which(name, path=here.env.get("PATH", "")))), None)
    expected = "g++ or clang++, for torch.compile"
    return judged("c++ compiler", found is not None, found or "missing", expected, "apt-get install -y g++")


def clock(read: Callable[[], tuple[bool, float] | None] | None = None) -> Check:
    """Object stores refuse requests that are signed minutes off, and logs of several machines are merged by time."""
    told = (read or _kernel_clock)()
    if told is None:
        return Check("clock", "ok", "not known: the kernel does not say")
    is_set, error_s = told
    if not is_set:
        return Check("clock", "warning", "set by nobody", "kept by NTP",
                     "systemctl enable --now chrony (or systemd-timesyncd) on the host")
    return judged("clock", error_s < 1.0, f"kept, within {max(error_s * 1e3, 0.1):.3g} ms", "kept within a second",
                  "chronyc makestep on the host", bad="warning")


def cpu_quota(here: Here) -> float | None:
    """Processors that the container may use; None where it has no limit."""
    words = here.read("/sys/fs/cgroup/cpu.max").split()
    try:
        if len(words) == 2:
            return None if words[0] == "max" else int(words[0]) / int(words[1])
        quota = int(here.read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
        return quota / int(here.read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")) if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def cgroup_limit_bytes(here: Here) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return int(here.read(f"/sys/fs/cgroup/{name}"))
        except ValueError:  # absent, or the word `max`
            continue
    return None


def _total_bytes(here: Here) -> int:
    for line in here.read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _oom_kills(here: Here) -> int:
    for line in here.read("/sys/fs/cgroup/memory.events").splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return 0


def _kernel_clock() -> tuple[bool, float] | None:
    """adjtimex: whether someone keeps the clock, and the error that the kernel reckons with. It changes nothing."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    timex = ctypes.create_string_buffer(256)
    if adjtimex(timex) < 0 or struct.calcsize("l") != 8:
        return None
    max_error_us, = struct.unpack_from("l", timex, 24)
    status, = struct.unpack_from("i", timex, 40)
    return not status & 0x40, max_error_us / 1e6

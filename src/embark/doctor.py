"""Is this machine ready to train? Looks, changes nothing, imports no torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from pathlib import Path

from embark import stack
from embark.stack import Finding

GIB = 2**30
MIN_SHM_BYTES = 1 * GIB
"""Loader processes and NCCL pass batches through /dev/shm; a container's default of 64 MiB ends in a bus error."""
MIN_DISK_BYTES = 10 * GIB
MIN_OPEN_FILES = 4096
"""Every rank holds sockets to every other one, and every loader process its shared tensors."""


def examine() -> list[Finding]:
    """Everything looked at, in the order it should be mended."""
    gpus = _gpus()
    return [
        _python(),
        _linux(),
        *stack.check(stack.installed(), gpu=bool(gpus)),
        _gpu(gpus),
        _cpu_features(),
        _cores(),
        _memory(),
        _shared_memory(),
        _disk(),
        _open_files(),
        _compiler(),
    ]


def _python() -> Finding:
    pythons = stack.default_triple().pythons
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    expected = f"one of {', '.join(pythons)}"
    fix = f"make the environment with one torch has wheels for: python{pythons[-1]} -m venv .venv"
    return _judge("python", here in pythons, platform.python_version(), expected, fix)


def _linux() -> Finding:
    here = f"{platform.system()} {platform.machine()}"
    fix = "fbgemm has no wheels for other systems: use a Linux container or a Linux machine"
    return _judge("system", here in ("Linux x86_64", "Linux aarch64"), here, "Linux x86_64 or aarch64", fix)


def _gpus() -> list[str]:
    """`H200, 143771 MiB, driver 580.95.05`, one a GPU; none where there is no GPU or no driver."""
    rows = stack.nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [", driver ".join(row.rsplit(", ", 1)) for row in rows]


def _gpu(gpus: list[str]) -> Finding:
    if not gpus:
        driver = Path("/proc/driver/nvidia/version").exists()
        fix = "a driver is loaded but nvidia-smi sees no GPU: run the container with --gpus all, or reload the driver"
        return _judge("gpu", not driver, "none: training runs on the CPU", "a GPU for the driver that is loaded", fix)
    here = stack.installed()
    cpu_build = (here["torch"] or "").endswith("+cpu") or (here["fbgemm-gpu-cpu"] and not here["fbgemm-gpu"])
    found = f"{len(gpus)} x {gpus[0]}" + ("; torch or fbgemm is a CPU build" if cpu_build else "")
    fix = f"{sys.executable} -m embark.stack install --variant cuda"
    return _judge("gpu", not cpu_build, found, "CUDA builds of torch and fbgemm for this GPU", fix)


def _cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """Never a fault: without them bf16 on a CPU is emulated, and fp32 is the faster choice."""
    flags: set[str] = set()
    if cpuinfo.exists():
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features")))
        flags = set(next(lines, "").partition(":")[2].split())
    have = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    return Finding("cpu bf16", True, ", ".join(have) or "no: fp32 is faster on this CPU", "amx_bf16 or avx512_bf16")


def _cores() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fix = "give the container or the job at least two CPUs: one loads while the other trains"
    return _judge("cores", allowed >= 2, str(allowed), "at least 2", fix)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit_bytes()
    usable = min(total, limit) if limit else total
    found = f"{usable / GIB:.1f} GiB" + (" (the container's limit)" if limit and limit < total else "")
    return _judge("memory", usable >= 4 * GIB, found, "at least 4 GiB", "raise the container's memory limit")


def _cgroup_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return int((root / name).read_text())
        except (OSError, ValueError):  # absent, or the word `max`
            continue
    return None


def _shared_memory(where: Path = Path("/dev/shm")) -> Finding:
    fix = "start the container with --shm-size=8g; on Kubernetes mount an emptyDir of medium Memory at /dev/shm"
    if not where.exists():
        return Finding("/dev/shm", False, None, f"at least {MIN_SHM_BYTES / GIB:.0f} GiB", fix)
    size = shutil.disk_usage(where).total
    return _judge("/dev/shm", size >= MIN_SHM_BYTES, _size(size), f"at least {MIN_SHM_BYTES / GIB:.0f} GiB", fix)


def _disk(where: Path = Path()) -> Finding:
    free = shutil.disk_usage(where).free
    fix = "free some space, or set run_dir to a larger disk: checkpoints go there"
    return _judge("free disk", free >= MIN_DISK_BYTES, _size(free), f"at least {MIN_DISK_BYTES / GIB:.0f} GiB", fix)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = soft == resource.RLIM_INFINITY
    reachable = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    fix = f"ulimit -n {MIN_OPEN_FILES}" if reachable else f"as root: prlimit --pid $$ --nofile={MIN_OPEN_FILES}"
    found = "unlimited" if infinite else str(soft)
    return _judge("open files", infinite or soft >= MIN_OPEN_FILES, found, f"at least {MIN_OPEN_FILES}", fix)


def _compiler() -> Finding:
    names = (os.environ.get("CXX", "g++"), "g++", "clang++")
    found = next((path for path in map(shutil.which, names) if path), None)
    expected = "g++ or clang++, for torch.compile"
    return _judge("c++ compiler", found is not None, found, expected, "apt-get install -y g++")


def _judge(name: str, ok: bool, found: str | None, expected: str, fix: str) -> Finding:
    return Finding(name, ok, found, expected, "" if ok else fix)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"

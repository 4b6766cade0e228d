"""The machine's own metrics: processors, memory, network and disks by psutil, GPUs by NVML."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

INTERNAL = ("lo", "br-", "cali", "cni", "docker", "flannel", "ifb", "tunl", "veth", "virbr", "vxlan")
"""Interfaces inside the machine: what goes over them and then out would count twice."""
NOT_A_DISK = ("dm-", "loop", "md", "ram", "sr", "zram")
RDMA = (("counters/port_rcv_data", "counters/port_xmit_data", 4), ("hw_counters/rx_bytes", "hw_counters/tx_bytes", 1))
"""Counters of InfiniBand and RoCE, which count in words of four bytes, and of EFA: psutil knows neither."""
SYS = Path("/sys")


class SystemSampler:
    """A thread that samples this machine every so many seconds; one per machine is enough. What cannot be read is left
    out: metrics never stop a run."""

    def __init__(self, every_s: float, rank: int = 0) -> None:
        self._every_s, self._rank = every_s, rank
        self._newest: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embark-system", daemon=True)
        self.busy_s = 0.0  # Processor time that sampling has taken so far.
        self.num_samples = 0

    def __enter__(self) -> Self:
        if self._every_s > 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)

    def take(self) -> dict[str, Any] | None:
        """Return the newest sample, once."""
        newest, self._newest = self._newest, None
        return newest

    def _run(self) -> None:
        host, gpus = socket.gethostname(), _open_gpus()
        before: Counters | None = None
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            try:
                now = Counters.now()
                if before is not None:
                    self._newest = {"host": host, "rank": self._rank, **rates(before, now), **memory(),
                                    "gpus": [gpu_row(index, handle) for index, handle in gpus]}
                    self.num_samples += 1
            except (OSError, ValueError, psutil.Error):  # a kernel that psutil cannot read
                return
            # Rates need two samples: the second comes early.
            wait_s = min(1.0, self._every_s) if before is None else self._every_s
            before = now
            self.busy_s = time.thread_time()


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the kernel since it started."""

    time_s: float
    cpu_busy_s: float
    cpu_s: float
    net_in_bytes: int
    net_out_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int

    @staticmethod
    def now() -> Counters:
        """Read the counters. Steal time is another machine's, not work; partitions would count twice, and so would
        internal interfaces."""
        cpu = psutil.cpu_times()
        busy_s = cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq
        nics = [counted for name, counted in (psutil.net_io_counters(pernic=True, nowrap=False) or {}).items()
                if not name.startswith(INTERNAL)]
        disks = [counted for name, counted in (psutil.disk_io_counters(perdisk=True, nowrap=False) or {}).items()
                 if not name.startswith(NOT_A_DISK) and (SYS / "block" / name).exists()]
        rdma_in, rdma_out = _rdma_bytes()
        return Counters(
            time.monotonic(), busy_s, busy_s + cpu.idle + cpu.iowait + cpu.steal,
            sum(nic.bytes_recv for nic in nics) + rdma_in, sum(nic.bytes_sent for nic in nics) + rdma_out,
            sum(disk.read_bytes for disk in disks), sum(disk.write_bytes for disk in disks))


def rates(before: Counters, now: Counters) -> dict[str, float]:
    """Return the rates between two samples. A counter that decreased, as of a re-created interface, is left out."""
    seconds, busy_s, cpu_s, *counted = (b - a for a, b in zip(astuple(before), astuple(now), strict=True))
    names = ("net_in_bytes_per_s", "net_out_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    found = {name: round(grown / max(seconds, 1e-9), 1) for name, grown in zip(names, counted, strict=True)
             if grown >= 0}
    return {"cpu_percent": round(100 * busy_s / cpu_s, 2), **found} if cpu_s > 0 and busy_s >= 0 else found


def memory() -> dict[str, int]:
    host = psutil.virtual_memory()
    return {"resident_bytes": psutil.Process().memory_info().rss, "host_used_bytes": host.total - host.available,
            "host_bytes": host.total}


def gpu_row(index: int, handle: Any) -> dict[str, float]:
    """Sample a GPU; what it does not report is left out."""
    import pynvml

    row: dict[str, float] = {"index": index}
    for read in (
        lambda: {"util_percent": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)},
        lambda: {"used_bytes": (found := pynvml.nvmlDeviceGetMemoryInfo(handle)).used, "total_bytes": found.total},
        lambda: {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000},
        lambda: {"temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))},
    ):
        try:
            row |= read()
        except pynvml.NVMLError:
            continue
    return row


def _open_gpus() -> list[tuple[int, Any]]:
    """Return index and handle of the GPUs that the run may use; none without a driver. NVML ignores
    CUDA_VISIBLE_DEVICES."""
    try:
        import pynvml
    except ImportError:
        return []
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    found = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            if not visible or str(index) in visible or any(uuid.startswith(word) for word in visible):
                found.append((index, handle))
    except pynvml.NVMLError:
        return found
    return found


def _rdma_bytes() -> tuple[int, int]:
    """Return the bytes received and sent over all ports."""
    total = [0, 0]
    for port in (SYS / "class/infiniband").glob("*/ports/*"):
        for *names, word_bytes in RDMA:
            try:
                counts = [int((port / str(name)).read_text()) * int(word_bytes) for name in names]
            except (OSError, ValueError):
                continue
            total = [a + b for a, b in zip(total, counts, strict=True)]
    return total[0], total[1]

"""The machine's own metrics: processors, memory, network and disks by psutil, GPUs by NVML."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil

from embark.values import JsonDict

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
        self._newest: JsonDict | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embark-system", daemon=True)
        self.busy_s = 0.0  # Processor time that sampling has taken so far.
        self.num_samples = 0

    def __enter__(self) -> Self:
        if self._every_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)

    def take(self) -> JsonDict | None:
        """Return the newest sample, once."""
        newest, self._newest = self._newest, None
        return newest

    def _run(self) -> None:
        host, gpus = socket.gethostname(), _open_gpus()
        before: dict[str, int] = {}
        wait_s = before_s = 0.0
        while not self._stop.wait(wait_s):
            try:
                now, now_s, cpu_percent = counters(), time.monotonic(), busy_percent()
                if before:
                    self._newest = {"host": host, "rank": self._rank, "cpu_percent": cpu_percent,
                                    **rates(before, now, now_s - before_s), **memory(),
                                    "gpus": [gpu_row(index, handle) for index, handle in gpus]}
                    self.num_samples += 1
            except (OSError, ValueError, psutil.Error):  # a kernel that psutil cannot read
                return
            # Rates need two samples: the second comes early.
            wait_s = self._every_s if before else min(1.0, self._every_s)
            before, before_s = now, now_s
            self.busy_s = time.thread_time()


def counters() -> dict[str, int]:
    """Return the bytes that the kernel has counted since it started, by the names of their rates. Partitions would
    count twice, and so would internal interfaces."""
    nics = [counted for name, counted in (psutil.net_io_counters(pernic=True, nowrap=False) or {}).items()
            if not name.startswith(INTERNAL)]
    disks = [counted for name, counted in (psutil.disk_io_counters(perdisk=True, nowrap=False) or {}).items()
             if not name.startswith(NOT_A_DISK) and (SYS / "block" / name).exists()]
    rdma_in, rdma_out = _rdma_bytes()
    return {"net_in_bytes_per_s": sum(nic.bytes_recv for nic in nics) + rdma_in,
            "net_out_bytes_per_s": sum(nic.bytes_sent for nic in nics) + rdma_out,
            "disk_read_bytes_per_s": sum(disk.read_bytes for disk in disks),
            "disk_write_bytes_per_s": sum(disk.write_bytes for disk in disks)}


def rates(before: dict[str, int], now: dict[str, int], seconds: float) -> dict[str, float]:
    """Return the rates between two samples. A counter that decreased, as of a re-created interface, is left out."""
    return {name: round((now[name] - before[name]) / max(seconds, 1e-9), 1) for name in now
            if now[name] >= before[name]}


def busy_percent() -> float:
    """Return how busy the processors were since the last call. Steal time is another machine's, not work."""
    cpu = psutil.cpu_times_percent()
    return round(100.0 - float(cpu.idle + cpu.iowait + cpu.steal), 2)


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
        lambda: {"temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))}
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
    visible = [word.strip() for word in os.getenv("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    found = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            if not visible or str(index) in visible or any(uuid.startswith(word) for word in visible):
                found.append((index, handle))
    except pynvml.NVMLError:  # no driver
        pass
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

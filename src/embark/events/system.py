"""The machine's own figures: processors, memory, network and disks from /proc, GPUs from NVML."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from embark.events.nvml import Nvml

SECTOR_BYTES = 512
"""What /proc/diskstats counts in, whatever the disk's own sectors are."""
NOT_THE_WIRE = ("lo", "br-", "cali", "cni", "docker", "flannel", "ifb", "tunl", "veth", "virbr", "vxlan")
"""Interfaces inside the machine: what goes over them and then out would count twice."""
NOT_A_DISK = ("dm-", "loop", "md", "ram", "sr", "zram")
RDMA = (("counters/port_rcv_data", "counters/port_xmit_data", 4), ("hw_counters/rx_bytes", "hw_counters/tx_bytes", 1))
"""Of InfiniBand and RoCE, which count in words of four bytes, and of EFA: /proc/net/dev knows nothing of either."""


class SystemSampler:
    """A thread that looks at this machine every so many seconds; the newest row waits to be taken.

    One a machine is enough. What cannot be read is left out: the figures are never worth a run.
    """

    def __init__(
        self, every_s: float, rank: int = 0, proc: Path = Path("/proc"), sys: Path = Path("/sys"),
    ) -> None:
        self._every_s, self._rank, self._proc, self._sys = every_s, rank, proc, sys
        self._newest: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embark-system", daemon=True)
        self.busy_s = 0.0
        """Processor time that looking has taken so far."""
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
        """The newest row, once."""
        newest, self._newest = self._newest, None
        return newest

    def _run(self) -> None:
        with Nvml() as nvml:
            host = socket.gethostname()
            before: _Counted | None = None
            wait_s = 0.0
            while not self._stop.wait(wait_s):
                try:
                    now = _Counted.now(self._proc, self._sys)
                    if before is not None:
                        self._newest = {"host": host, "rank": self._rank, **rates(before, now), **_memory(self._proc),
                                        "gpus": nvml.gpus()}
                        self.num_samples += 1
                except (OSError, ValueError):  # a kernel that writes these files otherwise
                    return
                # Rates need two looks: the second comes early.
                wait_s = min(1.0, self._every_s) if before is None else self._every_s
                before = now
                self.busy_s = time.thread_time()


@dataclass(frozen=True, slots=True)
class _Counted:
    """What the kernel has counted since it started."""

    time_s: float
    cpu_busy: int | None
    cpu_all: int | None
    net_in_bytes: int | None
    net_out_bytes: int | None
    disk_read_bytes: int | None
    disk_write_bytes: int | None

    @staticmethod
    def now(proc: Path, sys: Path) -> _Counted:
        cpu = _processors(_text(proc / "stat"))
        net = _network(_text(proc / "net/dev"), sys / "class/infiniband")
        disk = _disks(_text(proc / "diskstats"))
        return _Counted(time.monotonic(), *cpu, *net, *disk)


def rates(before: _Counted, now: _Counted) -> dict[str, float]:
    """Between two looks. A counter that went backwards, as one of an interface that was made anew, is left out."""
    seconds = max(now.time_s - before.time_s, 1e-9)
    told: dict[str, float] = {}
    busy, whole = _grown(before.cpu_busy, now.cpu_busy), _grown(before.cpu_all, now.cpu_all)
    if busy is not None and whole:
        told["cpu_percent"] = round(100 * busy / whole, 2)
    for name in ("net_in_bytes", "net_out_bytes", "disk_read_bytes", "disk_write_bytes"):
        grown = _grown(getattr(before, name), getattr(now, name))
        if grown is not None:
            told[f"{name}_per_s"] = round(grown / seconds, 1)
    return told


def _grown(before: int | None, now: int | None) -> int | None:
    return now - before if before is not None and now is not None and now >= before else None


def _processors(stat: str) -> tuple[int | None, int | None]:
    """Ticks in which a processor worked, and all ticks; time that another machine took is not work."""
    ticks = [int(word) for word in stat.split("\n", 1)[0].split()[1:9]]
    if len(ticks) < 8:
        return None, None
    user, nice, system, idle, io_wait, irq, soft_irq, steal = ticks
    busy = user + nice + system + irq + soft_irq
    return busy, busy + idle + io_wait + steal


def _network(dev: str, rdma: Path) -> tuple[int | None, int | None]:
    """Bytes in and out over all that leads out of the machine."""
    num_in = num_out = 0
    is_any = False
    for line in dev.splitlines()[2:]:
        name, _, words = line.partition(":")
        counts = words.split()
        if name.strip().startswith(NOT_THE_WIRE) or len(counts) < 9:
            continue
        is_any = True
        num_in += int(counts[0])
        num_out += int(counts[8])
    for port in rdma.glob("*/ports/*"):
        for received, sent, word_bytes in RDMA:
            counted = _text(port / received).strip(), _text(port / sent).strip()
            if all(text.isdigit() for text in counted):
                is_any = True
                num_in += int(counted[0]) * word_bytes
                num_out += int(counted[1]) * word_bytes
    return (num_in, num_out) if is_any else (None, None)


def _disks(stats: str) -> tuple[int | None, int | None]:
    """Bytes read and written over whole disks: partitions, and what is laid over disks, would count twice."""
    read = written = 0
    disks: list[str] = []
    for line in stats.splitlines():
        words = line.split()
        if len(words) < 10 or words[2].startswith(NOT_A_DISK):
            continue
        name = words[2]
        if any(name.startswith(disk) and name[len(disk):].lstrip("p").isdigit() for disk in disks):
            continue
        disks.append(name)
        read += int(words[5]) * SECTOR_BYTES
        written += int(words[9]) * SECTOR_BYTES
    return (read, written) if disks else (None, None)


def _memory(proc: Path) -> dict[str, int]:
    told: dict[str, int] = {}
    resident = _text(proc / "self/statm").split()
    if len(resident) > 1:
        told["resident_bytes"] = int(resident[1]) * os.sysconf("SC_PAGE_SIZE")
    sizes = {}
    for line in _text(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            sizes[name] = int(rest.split()[0]) * 1024
    if len(sizes) == 2:
        told["host_used_bytes"] = sizes["MemTotal"] - sizes["MemAvailable"]
        told["host_bytes"] = sizes["MemTotal"]
    return told


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

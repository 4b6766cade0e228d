"""The machine's figures: read from where the kernel and the driver write them, at next to no cost."""

import os
import subprocess
import threading
import time

import pytest

from embark.events import system
from embark.events.nvml import Nvml
from embark.events.system import SystemSampler

STAT = "cpu  {user} 0 100 {idle} 50 0 0 10 0 0\ncpu0 1 2 3\n"
NET = """Inter-|   Receive  |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 999999 1 0 0 0 0 0 0 999999 1 0 0 0 0 0 0
  eth0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
docker0: 777777 1 0 0 0 0 0 0 777777 1 0 0 0 0 0 0
"""
DISKS = """   7 0 loop0 5 0 5 0 5 0 5 0 0 0 0
 259 0 nvme0n1 10 0 {read} 0 10 0 {written} 0 0 0 0
 259 1 nvme0n1p1 9 0 {read} 0 9 0 {written} 0 0 0 0
 253 0 dm-0 9 0 {read} 0 9 0 {written} 0 0 0 0
   8 0 sda 1 0 1 0 1 0 1 0 0 0 0
   8 1 sda1 1 0 1 0 1 0 1 0 0 0 0
"""
MEMORY = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n"


@pytest.fixture
def machine(tmp_path):
    """Writes the files of a kernel."""

    def write(**counts):
        for name, text in {"stat": STAT, "net/dev": NET, "diskstats": DISKS, "meminfo": MEMORY,
                           "self/statm": "99 7 1 1 0 1 0"}.items():
            path = tmp_path / "proc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format_map({"user": 100, "idle": 740, "received": 0, "sent": 0, "read": 0,
                                             "written": 0, **counts}))
        for name, count in (("counters/port_rcv_data", counts.get("rdma", 0)), ("counters/port_xmit_data", 5)):
            path = tmp_path / "sys/class/infiniband/mlx5_0/ports/1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{count}\n")
        return tmp_path / "proc", tmp_path / "sys"

    return write


def counted(paths, at_s):
    now = system._Counted.now(*paths)
    return type(now)(at_s, *(getattr(now, name) for name in list(now.__dataclass_fields__)[1:]))


def test_rates_are_what_was_counted_between_two_looks(machine):
    before = counted(machine(), 10.0)
    after = counted(machine(user=150, idle=890, received=4000, sent=8000, read=20, written=40, rdma=100), 12.0)
    assert system.rates(before, after) == {
        "cpu_percent": 25.0, "net_in_bytes_per_s": 2200.0, "net_out_bytes_per_s": 4000.0,
        "disk_read_bytes_per_s": 20 * 512 / 2, "disk_write_bytes_per_s": 40 * 512 / 2,
    }


def test_a_counter_that_went_backwards_is_left_out(machine):
    before, after = counted(machine(received=100), 1.0), counted(machine(received=0, idle=900), 2.0)
    assert "net_in_bytes_per_s" not in system.rates(before, after)
    assert system.rates(before, after)["cpu_percent"] == 0


def test_memory_is_the_process_s_and_the_machine_s(machine):
    proc, _ = machine()
    assert system._memory(proc) == {"resident_bytes": 7 * os.sysconf("SC_PAGE_SIZE"), "host_used_bytes": 600 * 1024,
                                    "host_bytes": 1000 * 1024}


def test_where_nothing_can_be_read_nothing_is_told(tmp_path):
    before = system._Counted.now(tmp_path, tmp_path)
    assert system.rates(before, system._Counted.now(tmp_path, tmp_path)) == {}
    assert system._memory(tmp_path) == {}


def test_a_kernel_that_writes_otherwise_ends_the_looking_quietly(machine, recwarn, capfd):
    proc, sys = machine()
    (proc / "stat").write_text("cpu what is this now then eh hm\n")
    with SystemSampler(0.01, proc=proc, sys=sys) as sampler:
        time.sleep(0.1)
        assert sampler.take() is None
    assert capfd.readouterr().err == ""
    assert not recwarn


def test_this_machine_is_seen_and_looking_costs_next_to_nothing():
    """At the pace that is set unless told otherwise, a look every 5 s, it must stay under 0.5 % of one processor."""
    with SystemSampler(0.05, rank=3) as sampler:
        rows = []
        until = time.monotonic() + 20
        while len(rows) < 8 and time.monotonic() < until:
            time.sleep(0.02)
            rows += [row] if (row := sampler.take()) else []
    assert len(rows) >= 8
    assert rows[-1]["rank"] == 3
    assert 0 < rows[-1]["resident_bytes"] < rows[-1]["host_used_bytes"] < rows[-1]["host_bytes"]
    assert any(0 <= row.get("cpu_percent", -1) <= 100 for row in rows)
    assert sampler.busy_s / sampler.num_samples < 0.005 * 5


def test_switched_off_there_is_no_thread():
    with SystemSampler(0.0) as sampler:
        assert "embark-system" not in [thread.name for thread in threading.enumerate()]
        assert sampler.take() is None


# The functions and structures of nvml.h that are used, with the sizes and places that it gives them.
DRIVER = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
static int devices[3];
extern "C" {
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &devices[index]; return 0; }
static int place(void *device) { return (int)((int *)device - devices); }
int nvmlDeviceGetUUID(void *device, char *name, unsigned int length) {
  snprintf(name, length, "GPU-%d000-abcd", place(device)); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, Utilization *to) {
  to->gpu = 90 + place(device); to->memory = 1; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *to) {
  to->total = 80000000000ULL; to->used = 70000000000ULL + place(device); to->free = 0; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned int *mw) { *mw = 650500; return place(device) == 2 ? 3 : 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *c) { *c = 60 + sensor; return 0; }
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A library with NVML's own interface."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.cpp").write_text(DRIVER)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "libnvml.so", folder / "nvml.cpp"], check=True)
    return str(folder / "libnvml.so")


@pytest.mark.needs("g++")
def test_gpus_are_asked_through_the_driver_s_own_library(driver, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with Nvml(driver) as nvml:
        rows = nvml.gpus()
    assert rows[0] == {"index": 0, "util_percent": 90.0, "used_bytes": 70_000_000_000, "total_bytes": 80_000_000_000,
                       "power_w": 650.5, "temperature_c": 60.0}
    assert [row["util_percent"] for row in rows] == [90.0, 91.0, 92.0]
    assert "power_w" not in rows[2]


@pytest.mark.needs("g++")
@pytest.mark.parametrize(("visible", "seen"), [("1", [1]), ("2,0", [0, 2]), ("GPU-1000-abcd", [1]), ("GPU-2", [2])])
def test_only_gpus_that_the_run_may_use_are_told(driver, monkeypatch, visible, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Nvml(driver) as nvml:
        assert [row["index"] for row in nvml.gpus()] == seen


def test_without_a_driver_there_are_no_gpus():
    with Nvml("libno-such-driver.so.1") as nvml:
        assert nvml.gpus() == []


@pytest.mark.needs("g++")
def test_a_library_that_is_another_is_no_driver():
    with Nvml("libc.so.6") as nvml:
        assert nvml.gpus() == []

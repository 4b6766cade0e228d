"""The machine's metrics: by psutil and NVML, at next to no cost."""

import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from limits import HANG_S

from embark.events import system
from embark.events.system import SystemSampler, counters, rates

BEFORE = {"net_in_bytes_per_s": 1000, "net_out_bytes_per_s": 0}


def test_rates_are_what_was_counted_between_two_samples():
    after = {"net_in_bytes_per_s": 5000, "net_out_bytes_per_s": 8000}
    assert rates(BEFORE, after, 2.0) == {"net_in_bytes_per_s": 2000.0, "net_out_bytes_per_s": 4000.0}


def test_a_counter_that_decreased_is_left_out():
    assert rates(BEFORE, {**BEFORE, "net_in_bytes_per_s": 3}, 1.0) == {"net_out_bytes_per_s": 0.0}


def test_interfaces_and_disks_count_once_and_rdma_counts(monkeypatch, tmp_path):
    nic = SimpleNamespace(bytes_recv=100, bytes_sent=200)
    disk = SimpleNamespace(read_bytes=10, write_bytes=20)
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: {"lo": nic, "eth0": nic, "docker0": nic})
    monkeypatch.setattr(psutil, "disk_io_counters",
                        lambda **_: {"nvme0n1": disk, "nvme0n1p1": disk, "dm-0": disk, "loop0": disk})
    (tmp_path / "block/nvme0n1").mkdir(parents=True)
    port = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_rcv_data").write_text("5\n")
    (port / "port_xmit_data").write_text("7\n")
    monkeypatch.setattr(system, "SYS", tmp_path)
    assert list(counters().values()) == [120, 228, 10, 20]


def test_a_kernel_that_cannot_be_read_ends_sampling_quietly(monkeypatch, recwarn, capfd):
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda: (_ for _ in ()).throw(ValueError("unknown format")))
    sampler = SystemSampler(0.01)
    with sampler:
        sampler._thread.join(HANG_S)
    assert not sampler._thread.is_alive()
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")


def test_this_machine_is_sampled():
    with SystemSampler(0.05, rank=3) as sampler:
        rows = []
        until = time.monotonic() + HANG_S
        while len(rows) < 8 and time.monotonic() < until:
            time.sleep(0.02)
            rows += [row] if (row := sampler.take()) else []
    assert len(rows) >= 8
    assert rows[-1]["rank"] == 3
    assert 0 < rows[-1]["resident_bytes"] < rows[-1]["host_used_bytes"] < rows[-1]["host_bytes"]
    assert any(0 <= row.get("cpu_percent", -1) <= 100 for row in rows)


def test_switched_off_there_is_no_thread():
    with SystemSampler(0.0) as sampler:
        assert "embark-system" not in [thread.name for thread in threading.enumerate()]
        assert sampler.take() is None


class Driver:
    """NVML with three GPUs, the last of which reports no power."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0
    nvmlInit = staticmethod(lambda: None)  # noqa: N815
    nvmlDeviceGetCount = staticmethod(lambda: 3)  # noqa: N815
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)  # noqa: N815
    nvmlDeviceGetUUID = staticmethod(lambda index: f"GPU-{index}000-abcd")  # noqa: N815
    nvmlDeviceGetUtilizationRates = staticmethod(lambda index: SimpleNamespace(gpu=90 + index))  # noqa: N815
    nvmlDeviceGetMemoryInfo = staticmethod(lambda index: SimpleNamespace(used=70, total=80))  # noqa: N815
    nvmlDeviceGetTemperature = staticmethod(lambda index, kind: 60)  # noqa: N815

    @classmethod
    def nvmlDeviceGetPowerUsage(cls, index):  # noqa: N802
        if index == 2:
            raise cls.NVMLError
        return 650_500


def test_gpus_are_read_by_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = [system.gpu_row(*gpu) for gpu in system._open_gpus()]
    assert rows[0] == {"index": 0, "util_percent": 90.0, "used_bytes": 70, "total_bytes": 80, "power_w": 650.5,
                       "temperature_c": 60.0}
    assert [row["util_percent"] for row in rows] == [90.0, 91.0, 92.0]
    assert "power_w" not in rows[2]


@pytest.mark.parametrize(("visible", "seen"), [("1", [1]), ("2,0", [0, 2]), ("GPU-1000-abcd", [1]), ("GPU-2", [2])])
def test_only_gpus_that_the_run_may_use_are_read(monkeypatch, visible, seen):
    monkeypatch.setitem(sys.modules, "pynvml", Driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [index for index, _ in system._open_gpus()] == seen


def test_without_nvml_or_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert system._open_gpus() == []

    class NoDriver(Driver):
        @classmethod
        def nvmlInit(cls):  # noqa: N802
            raise cls.NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", NoDriver)
    assert system._open_gpus() == []

"""GPUs are judged by what nvidia-smi prints."""

from __future__ import annotations

import subprocess
import sys

import pytest
from limits import HANG_S

from embark.doctor.gpus import check_driver, check_gpus, has_kernels, links, list_gpus, topology

H200 = "NVIDIA H200, 143771 MiB, 580.95.05, 9.0, 0\n"
T4 = "Tesla T4, 15360 MiB, 535.183.01, 7.5, [N/A]\n"
CUDA_BUILDS = {"torch": "2.13.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": None}
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NVLINK = """\
GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-0000-0000-000000000000)
\t Link 0: 26.562 GB/s
\t Link 1: {}
"""
BANNER = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: {:<9}|
+-----------------------------------------+------------------------+----------------------+
"""


def smi(machine, rows: str, topo: str = TOPOLOGY, nvlink: str = NVLINK.format("26.562 GB/s"), cuda: str = "13.0"):
    machine.runs("nvidia-smi", ("--query-gpu=", rows), ("topo -m", topo), ("nvlink --status", nvlink),
                 ("", BANNER.format(cuda)))
    return list_gpus(machine.host)


def of(checks) -> dict[str, tuple[str, str, str]]:
    return {check.name: (check.verdict, check.found, check.fix) for check in checks}


def test_gpus_are_counted_and_named_with_their_driver(machine):
    found = smi(machine, H200 * 2)
    verdict, text, _ = of(check_gpus(machine.host, found, CUDA_BUILDS))["gpu"]
    assert (verdict, text) == ("ok", "2 x NVIDIA H200, 143771 MiB; driver 580.95.05")


def test_gpus_of_two_kinds_are_both_named(machine):
    found = smi(machine, H200 + T4)
    text = of(check_gpus(machine.host, found, CUDA_BUILDS))["gpu"][1]
    assert "1 x NVIDIA H200, 143771 MiB; 1 x Tesla T4, 15360 MiB" in text


def test_an_old_driver_that_knows_fewer_fields_is_read_too(machine):
    query = "--query-gpu=name,memory.total,driver_version --format"
    machine.runs("nvidia-smi", (query, "Tesla K80, 11441 MiB, 418.67\n"))
    (gpu,) = list_gpus(machine.host)
    assert (gpu.name, gpu.driver, gpu.capability) == ("Tesla K80", "418.67", "")


@pytest.mark.parametrize("packages", [
    {"torch": "2.13.0+cpu", "fbgemm-gpu": "1.8.0"}, {"torch": "2.13.0", "fbgemm-gpu": None, "fbgemm-gpu-cpu": "1.8.0"},
])
def test_cpu_builds_beside_a_gpu_are_wrong(machine, packages: dict[str, str | None]):
    verdict, _, fix = of(check_gpus(machine.host, smi(machine, H200), packages))["gpu"]
    assert verdict == "wrong"
    assert fix.endswith("-m embark.stack.versions install --variant cuda")


def test_the_fix_for_cpu_builds_is_a_command_that_exists():
    words = [sys.executable, "-m", "embark.stack.versions", "install", "--variant", "cuda", "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def test_no_gpu_and_no_driver_is_no_fault(machine):
    assert of(check_gpus(machine.host, [], CUDA_BUILDS))["gpu"][0] == "ok"


def test_a_driver_without_a_gpu_is_a_fault(machine):
    machine.has("/proc/driver/nvidia/version", "NVRM version: 580.95.05")
    verdict, _, fix = of(check_gpus(machine.host, [], CUDA_BUILDS))["gpu"]
    assert verdict == "wrong"
    assert "--gpus all" in fix


def test_memory_that_lost_bits_is_wrong(machine):
    found = smi(machine, H200.replace(", 0\n", ", 3\n") + H200)
    assert of(check_gpus(machine.host, found, CUDA_BUILDS))["gpu memory"][:2] == (
        "wrong", "3 uncorrectable ECC errors since boot")


def test_links_between_gpus_are_read_with_colours_and_network_cards():
    assert topology(TOPOLOGY, 3) == ["NV18", "NV18", "NV18"]
    assert topology("no such thing", 3) == []


def test_nvlink_between_all_is_well(machine):
    check = links(machine.host, smi(machine, H200 * 3))
    assert (check.verdict, check.found) == ("ok", "NVLink between all: NV18 (3 pairs)")


def test_an_inactive_link_is_a_warning(machine):
    check = links(machine.host, smi(machine, H200 * 3, nvlink=NVLINK.format("<inactive>")))
    assert check.verdict == "warning"
    assert "1 of 2 links inactive" in check.found


def test_gpus_that_should_be_joined_and_are_not_are_a_warning(machine):
    slow = TOPOLOGY.replace("NV18", "SYS")
    check = links(machine.host, smi(machine, H200 * 3, topo=slow))
    assert check.verdict == "warning"
    assert "fabricmanager" in check.fix
    assert links(machine.host, smi(machine, T4 * 3, topo=slow)).verdict == "ok"


@pytest.mark.parametrize(("driver", "build", "verdict"), [
    ("13.0", "13.0", "ok"), ("13.1", "13.0", "ok"), ("13.0", "12.6", "ok"), ("12.4", "12.6", "warning"),
    ("12.8", "13.0", "wrong"),
])
def test_the_driver_is_held_against_torchs_build(machine, driver: str, build: str, verdict: str):
    found = smi(machine, H200, cuda=driver)
    checks = of(check_driver(machine.host, build, ["sm_90"], found))
    assert checks["driver"][0] == verdict
    assert checks["gpu kernels"][0] == "ok"


def test_a_gpu_that_torch_has_no_kernels_for_is_wrong(machine):
    found = smi(machine, T4)
    checks = of(check_driver(machine.host, "13.0", ["sm_80", "sm_90", "compute_90"], found))
    assert checks["gpu kernels"][0] == "wrong"
    assert "7.5" in checks["gpu kernels"][2]


def test_without_a_gpu_or_a_cuda_build_there_is_no_driver_to_judge(machine):
    assert list(check_driver(machine.host, "13.0", [], [])) == []
    assert list(check_driver(machine.host, None, [], smi(machine, H200))) == []


@pytest.mark.parametrize(("capability", "arches", "runs"), [
    ("9.0", ["sm_80", "sm_90"], True), ("8.6", ["sm_80"], True), ("8.0", ["sm_86"], False),
    ("12.0", ["sm_90", "compute_90"], True), ("12.0", ["sm_90a"], False), ("10.0", ["sm_100f"], True),
    ("9.0", [], False),
])
def test_which_gpus_a_build_runs_on(capability: str, arches: list[str], runs: bool):
    assert has_kernels(capability, arches) == runs

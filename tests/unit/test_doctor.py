from __future__ import annotations

import resource
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from embark import doctor, stack

Usage = namedtuple("Usage", "total used free")


def test_the_machine_is_examined_without_importing_torch():
    code = "import sys; from embark.doctor import examine; examine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_every_subject_is_told_once_and_what_is_wrong_has_a_fix():
    findings = doctor.examine()
    names = [finding.name for finding in findings]
    assert len(set(names)) == len(names)
    assert {"python", "system", "torch", "torchrec", "gpu", "cpu bf16", "cores", "memory"} <= set(names)
    assert {"/dev/shm", "free disk", "open files", "c++ compiler"} <= set(names)
    for finding in findings:
        assert bool(finding.fix) != finding.ok


def test_another_system_is_sent_to_a_container(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    finding = doctor._linux()
    assert not finding.ok
    assert "Linux container" in finding.fix


def with_smi(monkeypatch: pytest.MonkeyPatch, lines: list[str], here: dict[str, str | None]) -> stack.Finding:
    monkeypatch.setattr(stack, "nvidia_smi", lambda *_: lines)
    versions = dict.fromkeys(["torch", "fbgemm-gpu", "fbgemm-gpu-cpu"]) | here
    monkeypatch.setattr(stack, "installed", lambda: versions)
    return doctor._gpu(doctor._gpus())


H200 = "NVIDIA H200, 143771 MiB, 580.95.05"


def test_gpus_are_counted_and_named_with_their_driver(monkeypatch: pytest.MonkeyPatch):
    finding = with_smi(monkeypatch, [H200, H200], {"torch": "2.13.0", "fbgemm-gpu": "1.8.0"})
    assert finding.ok
    assert finding.found == "2 x NVIDIA H200, 143771 MiB, driver 580.95.05"


@pytest.mark.parametrize("here", [{"torch": "2.13.0+cpu"}, {"torch": "2.13.0", "fbgemm-gpu-cpu": "1.8.0"}])
def test_cpu_builds_beside_a_gpu_are_wrong(monkeypatch: pytest.MonkeyPatch, here: dict[str, str | None]):
    finding = with_smi(monkeypatch, [H200], here)
    assert not finding.ok
    assert finding.fix.endswith("-m embark.stack install --variant cuda")


def test_the_fix_for_cpu_builds_is_a_command_that_exists():
    words = [sys.executable, "-m", "embark.stack", "install", "--variant", "cuda", "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_no_gpu_and_no_driver_is_no_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert with_smi(monkeypatch, [], {}).ok


def test_a_driver_without_a_gpu_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert "--gpus all" in with_smi(monkeypatch, [], {}).fix


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n", "amx_bf16, avx512_bf16"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "bf16"),
        ("processor\t: 0\nflags\t\t: fpu avx2\n", "no: fp32 is faster on this CPU"),
    ],
)
def test_bf16_units_are_read_from_cpuinfo(text: str, found: str, tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert doctor._cpu_features(cpuinfo).found == found


@pytest.mark.parametrize(("name", "text", "limit"), [
    ("memory.max", "2147483648\n", 2**31),
    ("memory.max", "max\n", None),
    ("memory/memory.limit_in_bytes", "1073741824\n", 2**30),
])
def test_a_containers_memory_limit_is_read(name: str, text: str, limit: int | None, tmp_path: Path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert doctor._cgroup_limit_bytes(tmp_path) == limit


def test_a_small_container_is_told_its_own_limit_not_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_cgroup_limit_bytes", lambda: 2**30)
    finding = doctor._memory()
    assert not finding.ok
    assert finding.found == "1.0 GiB (the container's limit)"


def test_a_containers_default_shared_memory_is_too_small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(64 * 2**20, 0, 64 * 2**20))
    finding = doctor._shared_memory()
    assert finding.found == "64 MiB"
    assert "--shm-size" in finding.fix


def test_missing_shared_memory_is_told_not_raised(tmp_path: Path):
    finding = doctor._shared_memory(tmp_path / "none")
    assert not finding.ok
    assert finding.found is None


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(100 * 2**30, 99 * 2**30, 2**30))
    finding = doctor._disk()
    assert not finding.ok
    assert finding.found == "1.0 GiB"


@pytest.mark.parametrize(
    ("soft", "hard", "ok", "fix"),
    [
        (1024, 8192, False, "ulimit -n 4096"),
        (1024, 1024, False, "as root"),
        (4096, 4096, True, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, ""),
    ],
)
def test_the_limit_of_open_files(soft: int, hard: int, ok: bool, fix: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    finding = doctor._open_files()
    assert finding.ok == ok
    assert finding.fix.startswith(fix)


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert not doctor._cores().ok


def test_no_compiler_is_told_with_the_package_that_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = doctor._compiler()
    assert finding.found is None
    assert finding.fix == "apt-get install -y g++"

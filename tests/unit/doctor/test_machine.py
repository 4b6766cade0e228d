"""The host is judged by its own files and limits."""

from __future__ import annotations

import resource
from collections import namedtuple
from pathlib import Path

import pytest

from embark.doctor import machine as host
from embark.doctor.host import Host
from embark.doctor.machine import clock

Usage = namedtuple("Usage", "total used free")
UNLIMITED = resource.RLIM_INFINITY


def test_another_system_is_sent_to_a_container(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    check = host.system()
    assert check.verdict == "wrong"
    assert "Linux container" in check.fix


def test_this_python_is_one_that_torch_has_wheels_for():
    assert host.python().verdict == "ok"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n", "amx_bf16"),
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16\n", "no: fp32 is the default on this CPU"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "no: fp32 is the default on this CPU"),
        ("", "no: fp32 is the default on this CPU"),
    ],
)
def test_bf16_units_are_read_from_cpuinfo(text: str, found: str, machine):
    machine.has("/proc/cpuinfo", text)
    assert host.cpu_features(machine.host).found == found


@pytest.mark.parametrize(("path", "env", "found"), [
    ("/.dockerenv", {}, "yes: docker"),
    ("/run/.containerenv", {}, "yes: podman"),
    ("/nothing", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a pod of Kubernetes"),
    ("/nothing", {}, "no"),
])
def test_a_container_is_reported_from_a_machine(path: str, env: dict[str, str], found: str, machine):
    machine.has(path)
    machine.env |= env
    assert host.container(machine.host).found == found


def test_a_container_is_known_by_its_group_alone(machine):
    machine.has("/proc/1/cgroup", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-2.scope\n")
    assert host.container(machine.host).found == "yes: kubepods"


@pytest.mark.parametrize(("name", "text", "limit"), [
    ("memory.max", "2147483648\n", 2**31),
    ("memory.max", "max\n", None),
    ("memory/memory.limit_in_bytes", "1073741824\n", 2**30),
])
def test_a_containers_memory_limit_is_read(name: str, text: str, limit: int | None, machine):
    machine.has(f"/sys/fs/cgroup/{name}", text)
    assert host.cgroup_limit_bytes(machine.host.read) == limit


def test_a_small_container_is_reported_its_own_limit_not_the_hosts_memory(machine):
    machine.has("/proc/meminfo", "MemTotal:       65536000 kB\nMemFree: 1 kB\n")
    assert host.memory(machine.host).found == "62.5 GiB"
    machine.has("/sys/fs/cgroup/memory.max", str(2**30))
    check = host.memory(machine.host)
    assert (check.verdict, check.found) == ("wrong", "1.0 GiB (the container's limit)")


def test_processes_that_were_killed_for_memory_are_a_warning(machine):
    machine.has("/proc/meminfo", "MemTotal:       65536000 kB\n")
    machine.has("/sys/fs/cgroup/memory.events", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n")
    check = host.memory(machine.host)
    assert check.verdict == "warning"
    assert "2 processes" in check.found


@pytest.mark.parametrize(("files", "quota"), [
    ({"cpu.max": "150000 100000\n"}, 1.5),
    ({"cpu.max": "max 100000\n"}, None),
    ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ({}, None),
])
def test_a_containers_processors_are_read(files: dict[str, str], quota: float | None, machine):
    for name, text in files.items():
        machine.has(f"/sys/fs/cgroup/{name}", text)
    assert host.cpu_quota(machine.host.read) == quota


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch, machine):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert host.cores(machine.host).verdict == "wrong"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert host.cores(machine.host).verdict == "ok"
    machine.has("/sys/fs/cgroup/cpu.max", "100000 100000\n")
    check = host.cores(machine.host)
    assert (check.verdict, check.found) == ("wrong", "1 (the container's limit)")


@pytest.mark.parametrize(("total", "free", "verdict"), [
    (64 << 20, 64 << 20, "wrong"), (8 << 30, 8 << 30, "ok"), (8 << 30, 1 << 20, "warning"),
])
def test_shared_memory_must_be_there_and_be_free(
    total: int, free: int, verdict: str, monkeypatch: pytest.MonkeyPatch, machine
):
    (machine.root / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(total, total - free, free))
    assert host.shared_memory(machine.host).verdict == verdict


def test_missing_shared_memory_is_reported_not_raised(machine):
    check = host.shared_memory(machine.host)
    assert (check.verdict, check.found) == ("wrong", "missing")
    assert "--shm-size" in check.fix


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "fix"),
    [
        (1024, 8192, "wrong", "ulimit -n 4096"),
        (1024, 1024, "wrong", "as root"),
        (4096, 4096, "ok", ""),
        (UNLIMITED, UNLIMITED, "ok", ""),
    ],
)
def test_the_limit_of_open_files(soft: int, hard: int, verdict: str, fix: str, with_limits):
    with_limits(soft, hard)
    check = host.limit("open files", resource.RLIMIT_NOFILE, host.MIN_OPEN_FILES, "n")
    assert check.verdict == verdict
    assert check.fix.startswith(fix)


@pytest.mark.parametrize(("soft", "hard", "verdict", "fix"), [
    (100, 8192, "warning", "ulimit -u 1024"), (100, 100, "warning", "as root"), (UNLIMITED, UNLIMITED, "ok", ""),
])
def test_the_limit_of_processes(soft: int, hard: int, verdict: str, fix: str, with_limits):
    with_limits(soft, hard)
    check = host.limit("processes", resource.RLIMIT_NPROC, host.MIN_PROCESSES, "u", bad="warning")
    assert check.verdict == verdict
    assert check.fix.startswith(fix)


def test_no_compiler_is_reported_with_the_package_that_has_one(machine):
    check = host.compiler(machine.host)
    assert (check.verdict, check.found, check.fix) == ("wrong", "missing", "apt-get install -y g++")
    machine.runs("clang++")
    assert host.compiler(machine.host).verdict == "ok"


@pytest.mark.parametrize(("answer", "verdict", "found"), [
    ("yes\n", "ok", "synchronised"), ("no\n", "warning", "not synchronised"),
])
def test_a_clock_that_is_not_synchronised_is_a_warning(machine, answer: str, verdict: str, found: str):
    assert clock(machine.host).found == "unknown: timedatectl does not answer"
    machine.runs("timedatectl", ("NTPSynchronized", answer))
    check = clock(machine.host)
    assert (check.verdict, check.found) == (verdict, found)


def test_programs_that_fail_or_are_not_there_answer_nothing(machine):
    machine.runs("half", ("well", "yes\n"))
    assert machine.host.ask("half", "well") == "yes\n"
    assert machine.host.ask("half", "badly") is None
    assert machine.host.ask("none") is None
    assert Host(root=Path("/nonexistent")).read("/proc/cpuinfo") == ""

"""What a plan for this machine is made for: the container's limits, and the GPUs that nvidia-smi shows."""

from embark.doctor.machine import this_machine
from embark.plan.here import LocalGpu


def test_limits_of_a_container_and_gpus_are_seen_without_torch(machine):
    machine.has("/proc/meminfo", "MemTotal:       65536000 kB\n")
    machine.has("/sys/fs/cgroup/memory.max", str(8 * 2**30))
    machine.has("/sys/fs/cgroup/cpu.max", "50000 100000")
    machine.runs("nvidia-smi", ("--query-gpu=", "NVIDIA H200, 143771 MiB, 570.1, 9.0, 0\n" * 2))
    found = this_machine(machine.host)
    assert (found.num_cores, found.host_bytes) == (0.5, 8 * 2**30)
    assert found.gpus == (LocalGpu("NVIDIA H200", 143771 * 2**20, (9, 0)),) * 2
    assert found.description == "2 x NVIDIA H200, 0.5 CPU cores, 8.0 GiB"


def test_without_a_driver_there_are_no_gpus(machine):
    machine.has("/proc/meminfo", "MemTotal:       1024 kB\n")
    assert this_machine(machine.host).gpus == ()

"""This machine as `embark plan --here` needs it: cores, memory and GPUs, without torch."""

from embark.doctor import Host
from embark.doctor.gpus import list_gpus
from embark.doctor.machine import usable_bytes, usable_cores
from embark.plan.here import LocalGpu, LocalPlan, ThisMachine, plan_here
from embark.spec import RunSpec


def this_machine(host: Host | None = None) -> ThisMachine:
    """What a process here may use: the container's limits, and the GPUs that the driver shows."""
    host = host or Host()
    gpus = tuple(LocalGpu(gpu.name, float(gpu.memory.split()[0]) * 2**20, _capability(gpu.capability))
                 for gpu in list_gpus(host) if gpu.memory[:1].isdigit())
    return ThisMachine(usable_cores(host), usable_bytes(host), gpus)


def plan_this_machine(spec: RunSpec, num_samples: int | None = None) -> LocalPlan:
    """What the run takes here; `num_samples` in an epoch, if the data cannot be read from here."""
    return plan_here(spec, this_machine(), num_samples)


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if minor else None

"""Out of memory: what the plan says would fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from embark.catalog import Machine, find_machine, load_catalog
from embark.errors import UserError
from embark.plan.prediction import Prediction, Setup
from embark.spec import RunSpec

Predict = Callable[[Setup], Prediction]
MemoryKind = Literal["device", "host"]
GIB = 1024.0**3
MAX_FACTOR = 64


def memory_advice(spec: RunSpec, memory_kind: MemoryKind = "device", predict: Predict | None = None) -> str:
    """One sentence: does the spec fit its machine, and the nearest change that does; empty where it names no machine.
    `memory_kind`: which memory ran out."""
    from embark.plan.predict import predict as plan

    predict = predict or plan
    if (machine := machine_of(spec)) is None:
        return ""
    setup = Setup(spec, machine, spec.place.nodes)
    now = predict(setup)
    where = f"{spec.place.nodes} x {machine.name}"
    memory = now.memory
    if now.fits and memory_kind == "host":
        parts = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in memory.host.items() if size)
        limit = f" of {memory.host_limit / GIB:,.1f}" if memory.host_limit else ""
        return (f"the plan says a host of {where} needs {memory.host_total / GIB:,.1f}{limit} GiB ({parts}): give the "
                "container at least that plus /dev/shm, or look for what else uses memory there")
    if now.fits:
        is_tpu = machine.gpu.kind == "tpu"
        device, command = ("chip", "fuser -v /dev/accel* /dev/vfio/*") if is_tpu else ("GPU", "nvidia-smi")
        return (f"the plan says it fits {where}, with {memory.device_total / GIB:,.1f} of "
                f"{memory.device_limit / GIB:,.1f} GiB on the fullest rank: look for another process on the {device} "
                f"({command}), or for memory that is not the model's")
    offers = [words for words in (_smaller_batch(setup, predict), _more_nodes(setup, predict)) if words]
    rest = f"; would fit: {', or '.join(offers)}" if offers else "; no smaller batch and no number of nodes up to " \
        f"{MAX_FACTOR * spec.place.nodes} fits: use a machine with more memory, or train.table_dtype = \"fp16\""
    return f"the plan says it does not fit {where}: {now.why}{rest}"


def machine_of(spec: RunSpec) -> Machine | None:
    """The machine that the spec names; None where it names none, or one that the catalog does not have."""
    try:
        return find_machine(load_catalog(), spec.place.machine) if spec.place.machine else None
    except UserError:
        return None


def _smaller_batch(setup: Setup, predict: Predict) -> str:
    for factor in _doublings():
        size = setup.spec.train.batch_size // factor // setup.num_ranks * setup.num_ranks
        if size < setup.num_ranks:
            break
        train = setup.spec.train.model_copy(update={"batch_size": size})
        if predict(replace(setup, spec=setup.spec.model_copy(update={"train": train}))).fits:
            return f"--set train.batch_size={size}"
    return ""


def _more_nodes(setup: Setup, predict: Predict) -> str:
    for factor in _doublings():
        num_nodes = setup.num_nodes * factor
        divides = setup.spec.train.batch_size % (num_nodes * setup.machine.num_gpus) == 0
        if divides and predict(replace(setup, num_nodes=num_nodes)).fits:
            return f"--set place.nodes={num_nodes}"
    return ""


def _doublings() -> list[int]:
    return [2**power for power in range(1, MAX_FACTOR.bit_length())]

"""Out of memory: what the plan says would fit."""

from __future__ import annotations

from collections.abc import Callable

from embark.catalog import Catalog, find
from embark.diagnose.finding import Whose
from embark.errors import UserError
from embark.plan.prediction import Prediction, Setup
from embark.spec import RunSpec

Predict = Callable[[Setup], Prediction]
GIB = 1024.0**3
MOST_TIMES = 64


def what_fits(spec: RunSpec, catalog: Catalog, predict: Predict, whose: Whose = "device") -> str:
    """A sentence on the spec's machine, and the nearest change that fits it; empty where the spec names no machine.
    `whose`: of which the memory ran out."""
    if not spec.place.machine:
        return ""
    try:
        machine = find(catalog, spec.place.machine)
    except UserError:
        return ""
    setup = Setup(spec, machine, spec.place.nodes)
    now = predict(setup)
    where = f"{spec.place.nodes} x {machine.name}"
    memory = now.memory
    if now.fits and whose == "host":
        parts = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in memory.host.items() if size)
        limit = f" of {memory.host_limit / GIB:,.1f}" if memory.host_limit else ""
        return (f"the plan says a host of {where} needs {memory.host_total / GIB:,.1f}{limit} GiB ({parts}): give the "
                "container at least that and /dev/shm besides, or look for what else takes memory there")
    if now.fits:
        is_tpu = machine.gpu.kind == "tpu"
        device, seen = ("chip", "fuser -v /dev/accel* /dev/vfio/*") if is_tpu else ("GPU", "nvidia-smi")
        return (f"the plan says it fits {where}, with {memory.device_total / GIB:,.1f} of "
                f"{memory.device_limit / GIB:,.1f} GiB on the fullest rank: look for another process on the {device} "
                f"({seen}), or for memory that is not the model's")
    offers = [words for words in (_smaller_batch(setup, predict), _more_nodes(setup, predict)) if words]
    rest = f"; would fit: {', or '.join(offers)}" if offers else "; no smaller batch and no number of them up to " \
        f"{MOST_TIMES * spec.place.nodes} would do: a machine with more memory, or train.table_dtype = \"fp16\""
    return f"the plan says it does not fit {where}: {now.why}{rest}"


def _smaller_batch(setup: Setup, predict: Predict) -> str:
    batch_size = setup.spec.train.batch_size
    for times in _doublings():
        size = batch_size // times // setup.num_ranks * setup.num_ranks
        if size < setup.num_ranks:
            return ""
        train = setup.spec.train.model_copy(update={"batch_size": size})
        if predict(Setup(setup.spec.model_copy(update={"train": train}), setup.machine, setup.num_nodes)).fits:
            return f"--set train.batch_size={size}"
    return ""


def _more_nodes(setup: Setup, predict: Predict) -> str:
    for times in _doublings():
        num_nodes = setup.num_nodes * times
        if setup.spec.train.batch_size % (num_nodes * setup.machine.num_gpus):
            continue
        if predict(Setup(setup.spec, setup.machine, num_nodes)).fits:
            return f"--set place.nodes={num_nodes}"
    return ""


def _doublings() -> list[int]:
    return [2**power for power in range(1, MOST_TIMES.bit_length())]

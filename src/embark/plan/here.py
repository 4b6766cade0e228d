"""A run on the machine that plans it: whether it fits and how long a step takes, for nothing but time."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Literal

from embark.catalog import Gpu, load_catalog
from embark.errors import UserError
from embark.events.results import Tabular
from embark.formatting import format_duration, pluralize
from embark.model.engine_selection import choose_precision, cpu_has_matrix_bf16, gpu_has_matrix_bf16
from embark.model.placement import Cluster
from embark.spec import RunSpec
from embark.values import JsonDict, frozen
from .calibration import Calibration, calibration_here, calibration_path, cpu_calibration, load_calibrations
from .predict import match_gpu, predict_cluster
from .prediction import GIB, MemoryUse, StepTime
from .workload import Workload, dense_notes, resolve_data, trace_dense, workload_of

UNKNOWN_GPU = "H200"  # Whose memory beside the tables an unknown GPU is taken to need.


@frozen
class LocalGpu:
    """A GPU of this machine, as its driver shows it."""

    name: str
    memory_bytes: float
    capability: tuple[int, int] | None = None  # CUDA capability; None where the driver does not say.


@frozen
class ThisMachine:
    """This machine, as `embark doctor` sees it."""

    num_cores: float
    host_bytes: float
    gpus: tuple[LocalGpu, ...] = ()

    @property
    def description(self) -> str:
        gpus = f"{len(self.gpus)} x {self.gpus[0].name}, " if self.gpus else ""
        return f"{gpus}{self.num_cores:g} CPU cores, {self.host_bytes / GIB:,.1f} GiB"


@frozen
class LocalPlan(Tabular):
    """A spec on this machine, in as many ranks as it takes."""

    machine: ThisMachine
    device: Literal["cpu", "cuda"]
    num_ranks: int
    engine: str
    precision: str
    workload: Workload
    memory: MemoryUse | None  # None where the tables alone are too large.
    step: StepTime | None  # None where it does not fit, or nothing is known of the device's speed.
    is_ok: bool
    why: str
    sentence: str
    notes: tuple[str, ...] = ()

    @property
    def train_s(self) -> float | None:
        return None if self.step is None else self.step.total_s * self.workload.num_steps

    def to_rows(self) -> list[JsonDict]:
        """Return one row."""
        return [{
            "machine": self.machine.description, "device": self.device, "num_ranks": self.num_ranks,
            "engine": self.engine, "precision": self.precision, "fits": self.is_ok,
            "step_ms": None if self.step is None else self.step.total_s * 1e3, "train_s": self.train_s}]

    def to_dict(self) -> JsonDict:
        """Return everything, with units in the names."""
        memory = self.memory
        return {
            "verdict": self.sentence, "fits": self.is_ok, "machine": asdict(self.machine), "device": self.device,
            "num_ranks": self.num_ranks, "engine": self.engine, "precision": self.precision, "why": self.why,
            "workload": asdict(self.workload), "train_s": self.train_s, "notes": list(self.notes),
            "memory": None if memory is None else {
                "device_bytes": memory.device, "device_limit_bytes": memory.device_limit, "host_bytes": memory.host,
                "host_limit_bytes": memory.host_limit},
            "step": None if self.step is None else asdict(self.step)
        }


def plan_here(spec: RunSpec, machine: ThisMachine, num_samples: int | None = None) -> LocalPlan:
    """Plan one process, as `embark train` runs; on several GPUs, where one does not suffice, a rank on each."""
    spec, data_size = resolve_data(spec, num_samples)
    trace_dense(spec)
    workload = workload_of(spec, data_size)
    device = _device(spec, machine)
    ranks = [1, len(machine.gpus)] if device == "cuda" and len(machine.gpus) > 1 else [1]
    plans = [_plan(spec, machine, workload, device, num) for num in ranks if num == 1 or num <= spec.train.batch_size]
    return next((plan for plan in plans if plan.is_ok), plans[-1])


def _device(spec: RunSpec, machine: ThisMachine) -> Literal["cpu", "cuda"]:
    wanted = spec.place.device
    if wanted in ("jax", "tpu"):
        raise UserError(f'place.device = "{wanted}": this machine is planned for torch only, on a CPU or NVIDIA GPUs',
                        "--set place.device=auto")
    if wanted == "cuda" and not machine.gpus:
        raise UserError('place.device = "cuda", and nvidia-smi shows no GPU here', "--set place.device=auto")
    return "cuda" if machine.gpus and wanted != "cpu" else "cpu"


def _plan(
    spec: RunSpec, machine: ThisMachine, workload: Workload, device: Literal["cpu", "cuda"], num_ranks: int
) -> LocalPlan:
    gpu = None if device == "cpu" else match_gpu(machine.gpus[0].name, machine.gpus[0].memory_bytes, load_catalog())
    device_bytes = 0.0 if device == "cpu" else min(one.memory_bytes for one in machine.gpus)
    link = 0.0 if gpu is None else (gpu.nvlink_gbyte_per_s or gpu.pcie_gbyte_per_s or 0.0) / 2  # of both directions
    cluster = Cluster(num_ranks, num_ranks, device_bytes, machine.host_bytes, device, intra_gbyte_per_s=link)
    precision = choose_precision(spec.train, has_matrix_bf16=_has_matrix_bf16(machine, device))
    calibration = _calibration(device, gpu)
    found = predict_cluster(spec, cluster, precision, calibration, is_local=True)
    step = found.step if device == "cpu" or gpu is not None else None
    plan = LocalPlan(machine, device, num_ranks, found.engine, precision, workload, found.memory, step,
                     found.memory is not None and found.memory.fits, found.why, "",
                     (*_notes(machine, device, step), *dense_notes(spec)))
    return _with_sentence(plan, spec)


def _calibration(device: str, gpu: Gpu | None) -> Calibration:
    if device == "cpu":
        return cpu_calibration()
    return load_calibrations()[UNKNOWN_GPU] if gpu is None else calibration_here(gpu)


def _has_matrix_bf16(machine: ThisMachine, device: str) -> bool:
    if device == "cpu":
        return cpu_has_matrix_bf16()
    capability = machine.gpus[0].capability
    return capability is None or gpu_has_matrix_bf16(capability)


def _notes(machine: ThisMachine, device: str, step: StepTime | None) -> Iterator[str]:
    if step is not None and device == "cpu":
        yield step.basis + ("" if calibration_path().exists() else "; embark bench --calibrate measures this machine")
    elif step is not None and not step.is_calibrated:
        yield step.basis
    if device == "cpu" and machine.gpus:
        yield f"place.device = \"cpu\": the {pluralize(len(machine.gpus), 'GPU')} here stay unused"


def _with_sentence(plan: LocalPlan, spec: RunSpec) -> LocalPlan:
    where = f"this machine ({plan.machine.description})"
    if not plan.is_ok:
        sentence = f"{spec.name} does not fit {where}: {plan.why}; embark plan --across ranks the machines that do"
    else:
        how = "" if plan.num_ranks == 1 else f" in {plan.num_ranks} ranks (torchrun --nproc-per-node {plan.num_ranks})"
        sentence = f"{spec.name} fits {where}{how}: {plan.why}; {_speed(plan, spec)}"
    return replace(plan, sentence=sentence)


def _speed(plan: LocalPlan, spec: RunSpec) -> str:
    if plan.step is None or plan.train_s is None:
        where = plan.machine.gpus[0].name if plan.device == "cuda" else "a CPU, one operation at a time,"
        return f"how long a step takes on {where} is not known"
    return (f"a step of {spec.train.batch_size:,} samples takes about {plan.step.total_s * 1e3:.3g} ms, bound by "
            f"{plan.step.bound_by}; {pluralize(plan.workload.num_steps, 'step')} take {format_duration(plan.train_s)}")

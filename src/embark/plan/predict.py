"""Memory and step time of a spec on a number of machines, or on this one, and whether it fits."""

import re
from typing import NamedTuple

from embark.catalog import Catalog, Gpu, load_catalog
from embark.errors import UserError
from embark.model.engine_selection import choose_precision, cuda_graph_obstacle, select_engine
from embark.model.placement import Cluster, Placement, Planner, TooLarge, all_table_bytes
from embark.spec import RunSpec, batch_mistakes
from embark.spec.section import remembered
from embark.values import JsonDict
from .calibration import Calibration, MemoryFit, calibration_for, calibration_here, cpu_calibration
from .closed_form import closed_form
from .memory import MEMORY, device_parts, host_parts, with_own_input
from .prediction import GIB, MemoryUse, Prediction, Setup, StepTime, refused
from .step_time import step_time
from .tpu import predict_on_tpu
from .workload import dense_notes


def predict(setup: Setup, *, planner: Planner | None = None, calibration: Calibration | None = None) -> Prediction:
    """Predict a run on a setup. One that does not fit is no error: `fits` is False."""
    if setup.machine.gpu.kind == "tpu":
        return predict_on_tpu(setup, cluster_of(setup))
    calibration = calibration or calibration_for(setup.machine.gpu)
    precision = choose_precision(setup.spec.train, has_matrix_bf16=setup.machine.gpu.bf16_tflops is not None)
    return predict_on(setup, cluster_of(setup), precision, calibration, planner)


def cluster_of(setup: Setup) -> Cluster:
    """Return the machines as a planner sees them."""
    machine = setup.machine
    host_gib = machine.allocatable_gib or (machine.memory_gib or 0.0) * MEMORY["host_share"]
    fabric = machine.fabric_gbit_per_s or machine.network_gbit_per_s or 0.0
    return Cluster(
        num_ranks=setup.num_ranks, ranks_per_host=machine.gpus_per_host, device_bytes=device_bytes(machine.gpu),
        host_bytes=host_gib * GIB, device="tpu" if machine.gpu.kind == "tpu" else "cuda",
        # Links are listed for both directions together, fabrics for one.
        intra_gbyte_per_s=(machine.link_gbyte_per_s or 0.0) / 2,
        inter_gbyte_per_s=fabric / 8 / machine.gpus_per_host, fabric=machine.fabric.name
    )


def device_bytes(gpu: Gpu) -> float:
    """Return the memory of an accelerator as its driver shows it."""
    return (gpu.seen_mib or gpu.memory_mib * MEMORY["seen_share"]) * 1024.0**2


def predict_on(
    setup: Setup, cluster: Cluster, precision: str, calibration: Calibration, planner: Planner | None
) -> Prediction:
    """Predict a run on any cluster, this machine among them."""
    spec, notes = setup.spec, tuple(_notes(setup, calibration))
    if spec.train.batch_size < cluster.num_ranks:
        why = f"a batch of {spec.train.batch_size:,} samples leaves some of the {cluster.num_ranks:,} ranks without one"
        return refused(setup, cluster, why, notes)
    found = predict_cluster(spec, cluster, precision, calibration, planner=planner)
    if found.memory is None:
        return refused(setup, cluster, found.why, notes)
    return Prediction(setup, found.engine, found.engine_why, found.placement, found.memory, found.step,
                      found.memory.fits, found.why, notes)


class ClusterPrediction(NamedTuple):
    """The memory and step time of a spec on a cluster. Memory is missing if the tables do not fit at all, the step time
    if the run does not fit."""

    engine: str
    engine_why: str
    placement: Placement | None
    memory: MemoryUse | None
    step: StepTime | None
    why: str


def predict_cluster(
    spec: RunSpec, cluster: Cluster, precision: str, calibration: Calibration, *, planner: Planner | None = None,
    is_local: bool = False
) -> ClusterPrediction:
    """Place the tables, choose the engine, and predict memory and step time.

    `is_local`: the run reads or draws its samples as it does on this machine, which a plan for a cloud leaves out.
    """
    try:
        placement = planner(spec, cluster) if planner else closed_form(spec, cluster)
        engine, engine_why = choose_engine(spec, cluster, placement)
    except (TooLarge, UserError) as error:
        why = error.what if isinstance(error, UserError) else str(error)
        return ClusterPrediction("", "", None, None, None, why)
    is_cpu = cluster.device == "cpu"
    on_device = {} if is_cpu else device_parts(spec, placement, engine, precision, calibration)
    if is_local and not is_cpu:
        on_device = with_own_input(on_device, spec, engine, cluster.num_ranks)
    memory = MemoryUse(
        on_device, cluster.device_bytes,
        host_parts(spec, placement, cluster.ranks_per_host, calibration, is_cpu=is_cpu, precision=precision),
        cluster.host_bytes)
    step = None
    if memory.fits and engine in calibration.engines:
        step = step_time(spec, placement, cluster, engine, precision, calibration,
                         draws_samples=is_local and spec.data.kind == "synthetic")
    return ClusterPrediction(engine, engine_why, placement, memory, step,
                             explain_fit(spec, cluster, placement, memory))


def fits_without_tables(setup: Setup) -> bool:
    """Return whether a GPU can hold everything that does not depend on where the tables are. This is quick to check;
    placing thousands of tables takes seconds."""
    spec, gpu, cluster = setup.spec, setup.machine.gpu, cluster_of(setup)
    calibration = calibration_for(gpu)
    precision = choose_precision(spec.train, has_matrix_bf16=gpu.bf16_tflops is not None)
    # The code of a custom network may have been run since.
    held = _WithoutTables(spec) if spec.model.is_custom else _held_without_tables(spec)
    return any(held.num_bytes(engine, precision, cluster.num_ranks, calibration) <= cluster.device_bytes
               for engine in held.engines)


class _WithoutTables:
    """Bytes that a GPU holds besides the tables, counted once for all clusters with the same number of ranks, since
    counting takes a tenth of a second with thousands of tables."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._known: dict[tuple[str, str, int, MemoryFit], float] = {}
        obstacle = cuda_graph_obstacle(spec, "cuda", has_tables_on_host=False)
        self.engines = ("pipeline",) if obstacle else ("pipeline", "cuda_graph")

    def num_bytes(self, engine: str, precision: str, num_ranks: int, calibration: Calibration) -> float:
        key = engine, precision, num_ranks, calibration.memory[engine]
        if key not in self._known:
            nothing = Placement(num_ranks, (), {}, "")
            self._known[key] = sum(device_parts(self._spec, nothing, engine, precision, calibration).values())
        return self._known[key]


@remembered
def _held_without_tables(spec: RunSpec) -> _WithoutTables:
    return _WithoutTables(spec)


def choose_engine(spec: RunSpec, cluster: Cluster, placement: Placement) -> tuple[str, str]:
    """Return the trainer's choice and why, by what is known before it runs.

    Raises `UserError` for an engine that cannot be used.
    """
    obstacle = cuda_graph_obstacle(spec, cluster.device, has_tables_on_host=placement.is_on_host,
                                   num_ranks=cluster.num_ranks)
    return select_engine(spec, cluster.device, obstacle)


def explain_fit(spec: RunSpec, cluster: Cluster, placement: Placement, memory: MemoryUse) -> str:
    """Return why it fits, or what does not."""
    total = all_table_bytes(spec) / GIB
    if memory.device_total > memory.device_limit:
        return (f"the fullest rank needs {memory.device_total / GIB:,.1f} GiB and its device has "
                f"{memory.device_limit / GIB:,.1f}")
    if memory.host_shortage:
        return memory.host_shortage
    if cluster.device == "cpu":
        return f"tables of {total:,.1f} GiB in {memory.host_limit / GIB:,.1f} GiB of memory"
    if placement.is_on_host:
        in_all = cluster.num_ranks * memory.device_limit / GIB
        return (f"tables of {total:,.1f} GiB do not fit in the devices' {in_all:,.1f} GiB: some are in host "
                "memory (UVM), cached on the device")
    return (f"tables of {total:,.1f} GiB in the devices' memory, {memory.device_total / GIB:,.1f} of "
            f"{memory.device_limit / GIB:,.1f} GiB on the fullest rank")


def _notes(setup: Setup, calibration: Calibration) -> list[str]:
    notes = []
    batch, ranks = setup.spec.train.batch_size, setup.num_ranks
    if batch >= ranks:
        notes += [f"{m.field} = {m.value} {m.what}: {m.fix}" for m in batch_mistakes(batch, ranks)]
    if not calibration.is_measured:
        notes.append(calibration.basis)
    return [*notes, *dense_notes(setup.spec)]


def predict_local(spec: RunSpec, here: JsonDict) -> JsonDict | None:
    """Predict bytes and step time on the machine that `here` describes; None where nothing is known of it.

    The trainer sets them beside what it measures.
    """
    engine, precision, num_ranks = here["engine"], here["precision"], here["world_size"]
    is_cpu = here["device"] == "cpu"
    gpu = None if is_cpu else match_gpu(here["device_name"], here["device_bytes"], load_catalog())
    if engine == "jax" or (gpu is None and not is_cpu):
        return None
    calibration = cpu_calibration() if gpu is None else calibration_here(gpu)
    if engine not in calibration.engines:
        return None
    cluster = Cluster(num_ranks, num_ranks, here["device_bytes"], here["host_bytes"], "cpu" if is_cpu else "cuda")
    try:
        placement = closed_form(spec, cluster)
    except TooLarge:
        return None
    step = step_time(spec, placement, cluster, engine, precision, calibration,
                     draws_samples=spec.data.kind == "synthetic")
    parts = (host_parts(spec, placement, num_ranks, calibration, is_cpu=True, precision=precision)
             if is_cpu else
             with_own_input(device_parts(spec, placement, engine, precision, calibration), spec, engine, num_ranks))
    is_calibrated = step.is_calibrated and (not is_cpu or calibration.title == here["device_name"])
    return {"step_s": step.total_s, "is_calibrated": is_calibrated, "bound_by": step.bound_by,
            "peak_bytes": sum(parts.values()) / (num_ranks if is_cpu else 1), "parts": parts, "basis": step.basis}


def match_gpu(title: str, memory_bytes: float, catalog: Catalog) -> Gpu | None:
    """Return the catalog's GPU with this title, as A100-80GB for `NVIDIA A100-SXM4-80GB`.

    Of several with the name it is the one whose memory is nearest.
    """
    words = set(re.split(r"[\s\-_]+", title.upper()))
    named = [g for g in catalog.gpus.values() if g.kind == "gpu" and g.name.upper().split("-")[0] in words]
    return min(named, key=lambda g: abs(g.memory_mib * 1024.0**2 - memory_bytes), default=None)

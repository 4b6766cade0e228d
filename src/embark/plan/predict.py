"""Puts memory and time together: what a spec takes on so many of a machine, and whether it fits."""

from embark.catalog import Machine
from embark.errors import UserError
from embark.model.batch import batch_mistakes
from embark.model.engine_selection import cuda_graph_obstacle, select_engine
from embark.model.placement import Cluster, Placement, Planner, TooLarge, all_table_bytes
from embark.plan.calibration import Calibration, calibration_for
from embark.plan.memory import device_parts, host_parts
from embark.plan.prediction import MemoryUse, Prediction, Setup, StepTime
from embark.plan.step_time import step_time
from embark.plan.tpu import predict_on_tpu
from embark.spec import RunSpec

GIB = 1024.0**3
SEEN_SHARE = 0.99
"""Of an accelerator's listed memory, what its driver shows, where no one has looked."""
HOST_SHARE = 0.9
"""Of a host's memory, what is left for a run, where its reserve is not known."""


def predict(
    setup: Setup, *, planner: Planner | None = None, calibration: Calibration | None = None
) -> Prediction:
    """Never raises for what does not fit: the answer says so."""
    if setup.machine.gpu.kind == "tpu":
        return predict_on_tpu(setup, cluster_of(setup))
    calibration = calibration or calibration_for(setup.machine.gpu)
    precision = precision_on(setup.spec, has_bf16=_has_bf16(setup.machine))
    return predict_on(setup, cluster_of(setup), precision, calibration, planner)


def cluster_of(setup: Setup) -> Cluster:
    """The machines as a planner sees them."""
    machine = setup.machine
    gpu = machine.gpu
    seen_mib = gpu.seen_mib or gpu.memory_mib * SEEN_SHARE
    host_gib = machine.allocatable_gib or (machine.memory_gib or 0.0) * HOST_SHARE
    fabric = machine.fabric_gbit_per_s or machine.network_gbit_per_s or 0.0
    return Cluster(
        num_ranks=setup.num_ranks, ranks_per_host=machine.gpus_per_host, device_bytes=seen_mib * 1024.0**2,
        host_bytes=host_gib * GIB, device="tpu" if gpu.kind == "tpu" else "cuda",
        # Links are listed for both directions together, fabrics for one.
        intra_gbyte_per_s=(machine.link_gbyte_per_s or 0.0) / 2,
        inter_gbyte_per_s=fabric / 8 / machine.gpus_per_host,
    )


def predict_on(
    setup: Setup, cluster: Cluster, precision: str, calibration: Calibration, planner: Planner | None = None
) -> Prediction:
    """On any cluster, this computer among them."""
    spec = setup.spec
    place = planner or _closed_form
    notes = list(_notes(setup, calibration))
    if spec.train.batch_size < cluster.num_ranks:
        why = (f"a batch of {spec.train.batch_size:,} samples leaves some of the {cluster.num_ranks:,} ranks without "
               "one")
        return _refused(setup, cluster, why, notes)
    try:
        placement = place(spec, cluster)
    except TooLarge as error:
        return _refused(setup, cluster, str(error), notes)
    try:
        engine, engine_why = choose_engine(spec, cluster, placement)
    except UserError as error:
        return _refused(setup, cluster, error.what, notes)
    memory = _memory(spec, cluster, placement, engine, precision, calibration)
    step: StepTime | None = None
    if memory.fits:
        step = step_time(spec, placement, cluster, engine, precision, calibration)
    return Prediction(setup, engine, engine_why, placement, memory, step, memory.fits,
                      _why(spec, cluster, placement, memory), tuple(notes))


def choose_engine(spec: RunSpec, cluster: Cluster, placement: Placement) -> tuple[str, str]:
    """The trainer's choice, by what is known before it runs. Raises `UserError` for an engine that cannot be used."""
    obstacle = cuda_graph_obstacle(spec, cluster.device, has_tables_on_host=placement.is_on_host)
    return select_engine(spec, cluster.device, obstacle)


def precision_on(spec: RunSpec, *, has_bf16: bool) -> str:
    if spec.train.precision != "auto":
        return spec.train.precision
    return "bf16" if has_bf16 else "fp32"


def _has_bf16(machine: Machine) -> bool:
    return machine.gpu.bf16_tflops is not None


def _closed_form(spec: RunSpec, cluster: Cluster) -> Placement:
    from embark.plan.closed_form import closed_form

    return closed_form(spec, cluster)


def _memory(
    spec: RunSpec, cluster: Cluster, placement: Placement, engine: str, precision: str, calibration: Calibration
) -> MemoryUse:
    is_cpu = cluster.device == "cpu"
    return MemoryUse(
        {} if is_cpu else device_parts(spec, placement, engine, precision, calibration), cluster.device_bytes,
        host_parts(spec, placement, cluster.ranks_per_host, calibration, is_cpu=is_cpu, engine=engine,
                   precision=precision),
        cluster.host_bytes,
    )


def _refused(setup: Setup, cluster: Cluster, why: str, notes: list[str]) -> Prediction:
    memory = MemoryUse({"tables and optimizer state": all_table_bytes(setup.spec) / cluster.num_ranks},
                       cluster.device_bytes, {}, cluster.host_bytes)
    return Prediction(setup, "", "", None, memory, None, False, why, tuple(notes))


def _why(spec: RunSpec, cluster: Cluster, placement: Placement, memory: MemoryUse) -> str:
    total = all_table_bytes(spec) / GIB
    if not memory.fits and memory.device_total > memory.device_limit:
        return (f"the fullest rank needs {memory.device_total / GIB:,.1f} GiB and its device has "
                f"{memory.device_limit / GIB:,.1f}")
    if not memory.fits:
        return (f"a host needs {memory.host_total / GIB:,.1f} GiB and has {memory.host_limit / GIB:,.1f} to give: "
                + ", ".join(f"{name} {size / GIB:,.1f}" for name, size in memory.host.items()))
    if cluster.device == "cpu":
        return f"tables of {total:,.1f} GiB in {memory.host_limit / GIB:,.1f} GiB of memory"
    if placement.is_on_host:
        in_all = cluster.num_ranks * memory.device_limit / GIB
        return (f"tables of {total:,.1f} GiB are more than the devices' {in_all:,.1f} GiB leave room for: some live in "
                "the host's memory (UVM), with a cache on the device")
    return (f"tables of {total:,.1f} GiB in the devices' memory, {memory.device_total / GIB:,.1f} of "
            f"{memory.device_limit / GIB:,.1f} GiB on the fullest rank")


def _notes(setup: Setup, calibration: Calibration) -> list[str]:
    notes = []
    batch, ranks = setup.spec.train.batch_size, setup.num_ranks
    if batch >= ranks:
        notes += [f"{m.field} = {m.value} {m.what}: {m.fix}" for m in batch_mistakes(batch, ranks)]
    if not calibration.is_measured:
        notes.append(calibration.basis)
    return notes

"""A run on slices of TPUs, where JAX's trainer runs: what its layout, its program and the chips' datasheets come to."""

from embark.errors import Mistake, SpecError, UserError
from embark.model.jax_layout import LINE_WIDTHS, make_layout
from embark.model.placement import Cluster, Placement, all_table_bytes
from embark.plan.prediction import MemoryUse, Prediction, Setup
from embark.plan.tpu_memory import ChipMemory, chip_memory, copied_bytes, host_parts
from embark.plan.tpu_time import tpu_step_time
from embark.spec import RunSpec

GIB = 1024.0**3
ENGINE, ENGINE_WHY = "jax", "the whole step as one program of XLA"


def predict_on_tpu(setup: Setup, cluster: Cluster) -> Prediction:
    """Never raises for what does not fit or what that trainer refuses: the answer says so."""
    spec, machine = setup.spec, setup.machine
    precision = tpu_precision(spec.train.precision)
    try:
        layout = make_layout(spec, setup.num_ranks, LINE_WIDTHS["tpu"])
    except UserError as error:
        memory = MemoryUse({"tables and optimizer state": all_table_bytes(spec) / cluster.num_ranks},
                           cluster.device_bytes, {}, cluster.host_bytes)
        return Prediction(setup, "", "", None, memory, None, False, _refusal(error))
    chip = chip_memory(spec, layout, precision, machine.gpu.name)
    memory = MemoryUse(chip.parts(), cluster.device_bytes,
                       host_parts(spec, chip, setup.num_ranks, machine.gpus_per_host), cluster.host_bytes)
    step = None
    notes: tuple[str, ...] = ()
    placement: Placement | None = None
    if memory.fits:
        placement = layout.placement(spec)
        step = tpu_step_time(
            spec, machine.gpu, layout, precision, chips_per_host=machine.gpus_per_host,
            network_gbyte_per_s=(machine.network_gbit_per_s or 0.0) / 8, num_slices=setup.num_nodes,
        )
    if chip.copies:
        dims = ", ".join(str(group.dim) for group in layout.groups if copied_bytes(spec, group))
        notes += (f"rows of {dims} numbers neither fill lines of 128 nor share them: the program copies those tables "
                  f"at every step, {chip.copies / GIB:,.1f} GiB; take a width that divides 128 (in fp32) or is a "
                  "multiple of it",)
    return Prediction(setup, ENGINE, ENGINE_WHY, placement, memory, step, memory.fits, _why(setup, memory), notes)


def planned_chip_memory(spec: RunSpec, topology: str, num_chips: int) -> ChipMemory:
    """On each chip of a topology such as `v5e:2x4`."""
    layout = make_layout(spec, num_chips, LINE_WIDTHS["tpu"])
    return chip_memory(spec, layout, tpu_precision(spec.train.precision), f"TPU-{topology.partition(':')[0]}")


def tpu_precision(asked: str) -> str:
    """As JAX's trainer chooses it there."""
    return "bf16" if asked == "auto" else asked


def _refusal(error: UserError) -> str:
    mistakes = error.mistakes if isinstance(error, SpecError) else (Mistake("", error.what, "", "", error.fix),)
    return "; ".join(f"{m.field}{f' = {m.value} ' if m.value else ''}{m.what}: {m.fix}" for m in mistakes)


def _why(setup: Setup, memory: MemoryUse) -> str:
    needs, has = memory.device_total / GIB, memory.device_limit / GIB
    if memory.device_total > memory.device_limit:
        return f"a chip needs {needs:,.1f} GiB and has {has:,.1f}"
    if not memory.fits:
        return (f"a host needs {memory.host_total / GIB:,.1f} GiB and has {memory.host_limit / GIB:,.1f} to give: "
                + ", ".join(f"{name} {size / GIB:,.1f}" for name, size in memory.host.items()))
    total = all_table_bytes(setup.spec) / GIB
    return f"tables of {total:,.1f} GiB in the chips' memory, {needs:,.1f} of {has:,.1f} GiB on each"

"""A run on slices of TPUs, where JAX's trainer runs: what its layout, its program and the chips' datasheets come to."""

import math
from collections.abc import Sequence

from embark.catalog import Gpu
from embark.errors import Mistake, SpecError, UserError
from embark.model.engine_selection import choose_precision
from embark.model.jax_layout import (
    LINE_WIDTHS,
    MAX_IN_FLIGHT,
    NUM_AHEAD,
    Group,
    Layout,
    expected_capacities,
    make_layout,
)
from embark.model.placement import (
    DENSE_STATES,
    Cluster,
    all_table_bytes,
    table_value_bytes,
    value_bytes,
    wire_bytes,
)
from embark.model.work import Layers, layers_of
from embark.spec import RunSpec
from embark.values import frozen
from .exchange import STEP
from .prediction import ASSUMPTIONS, GIB, MemoryUse, Prediction, Setup, StepTime, refused
from .step_time import activation_bytes, sample_bytes

ENGINE, ENGINE_WHY = "jax", "the complete step as one XLA program"
LINE = LINE_WIDTHS["tpu"]
SUBLANES = 8  # Lines that lie together, of numbers of four bytes.
TPU = ASSUMPTIONS["tpu"]
BATCHES_AHEAD = MAX_IN_FLIGHT + NUM_AHEAD + 1
"""Batches on a chip besides the one that is trained: the host may be 8 steps ahead, two wait, one is on its way."""


@frozen
class ChipMemory:
    """Bytes on one chip; all chips hold as much."""

    tables: float
    state: float  # Optimizer state of the tables.
    dense: float  # Dense layers with their optimizer's state, and the histograms of metrics: the same on every chip.
    batch: float
    ahead: float  # Batches that were uploaded ahead; the compiler does not count them.
    copies: float  # Padded copies of tables that a step makes if rows neither fill nor share memory lines.
    step: float  # Rows exchanged between chips, activations and gradients, at the peak of a step.
    program: float

    def parts(self) -> dict[str, float]:
        """Return the parts that are there, by name."""
        named = {
            "tables": self.tables, "optimizer state": self.state, "dense layers": self.dense,
            "batches": self.batch + self.ahead, "exchange and activations": self.step, "tables copied": self.copies,
            "program": self.program
        }
        return {name: size for name, size in named.items() if size}


def predict_on_tpu(setup: Setup, cluster: Cluster) -> Prediction:
    """Predict a run on TPUs. What does not fit, or what the trainer refuses, is no error: `fits` is False."""
    spec, machine = setup.spec, setup.machine
    precision = choose_precision(spec.train, has_matrix_bf16=True)
    try:
        layout = make_layout(spec, setup.num_ranks, LINE_WIDTHS["tpu"])
    except UserError as error:
        return refused(setup, cluster, _refusal(error))
    chip = chip_memory(spec, layout, precision, machine.gpu.name)
    memory = MemoryUse(chip.parts(), cluster.device_bytes,
                       host_parts(spec, chip, setup.num_ranks, machine.gpus_per_host), cluster.host_bytes)
    step = None
    notes: tuple[str, ...] = ()
    placement = None
    if memory.fits:
        placement = layout.placement(spec)
        step = tpu_step_time(
            spec, machine.gpu, layout, precision, chips_per_host=machine.gpus_per_host,
            network_gbyte_per_s=(machine.network_gbit_per_s or 0.0) / 8, num_slices=setup.num_nodes
        )
    if chip.copies:
        dims = ", ".join(str(group.dim) for group in layout.groups if copied_bytes(spec, group))
        notes += (f"rows of {dims} numbers neither fill lines of 128 nor share them: the program copies those tables "
                  f"at every step, {chip.copies / GIB:,.1f} GiB; take a width that divides 128 (in fp32) or is a "
                  "multiple of it",)
    return Prediction(setup, ENGINE, ENGINE_WHY, placement, memory, step, memory.fits, _why(setup, memory), notes)


def _refusal(error: UserError) -> str:
    mistakes = error.mistakes if isinstance(error, SpecError) else (Mistake("", error.what, "", "", error.fix),)
    return "; ".join(f"{m.field}{f' = {m.value} ' if m.value else ''}{m.what}: {m.fix}" for m in mistakes)


def _why(setup: Setup, memory: MemoryUse) -> str:
    needs, has = memory.device_total / GIB, memory.device_limit / GIB
    if memory.device_total > memory.device_limit:
        return f"a chip needs {needs:,.1f} GiB and has {has:,.1f}"
    total = all_table_bytes(setup.spec) / GIB
    fits = f"tables of {total:,.1f} GiB in the chips' memory, {needs:,.1f} of {has:,.1f} GiB on each"
    return memory.host_shortage or fits


def chip_memory(spec: RunSpec, layout: Layout, precision: str, chip_name: str) -> ChipMemory:
    """Return the memory of one of a layout's chips."""
    layers, samples = layers_of(spec.model), spec.train.batch_size // layout.num_devices
    tables = state = copies = 0.0
    for group in layout.groups:
        lines = (group.lines_per_device, group.width)
        tables += tiled_bytes(lines, table_value_bytes(spec))
        if spec.train.optimizer == "adagrad":
            state += tiled_bytes(lines, 4)
        elif spec.train.optimizer == "rowwise_adagrad":
            state += tiled_bytes((group.rows_per_device,), 4)
        copies += copied_bytes(spec, group)
    num_ids = layout.num_columns
    batch = (tiled_bytes((samples, spec.model.num_dense), 4) + tiled_bytes((samples, num_ids), 4)
             + tiled_bytes((samples,), 4))
    peak = max(_exchanging(spec, layout, samples), _computing(spec, layers, samples, precision))
    return ChipMemory(
        tables, state, _dense_bytes(spec, layers) + TPU["histogram_bytes"], batch, BATCHES_AHEAD * batch, copies,
        _in_hbm(peak, ASSUMPTIONS["vmem_bytes"].get(chip_name, 0.0)),
        TPU["program_bytes"] + TPU["program_bytes_per_table"] * len(spec.model.table_list())
        + TPU["program_bytes_per_id"] * min(samples * num_ids, TPU["max_ids"])
    )


def copied_bytes(spec: RunSpec, group: Group) -> float:
    """Return the bytes of arrays that are transposed at every step.

    Rows are taken line by line, and an array that takes less when transposed is stored so.
    """
    lines = (group.lines_per_device, group.width)
    state = _lined_anew(lines, 4) if spec.train.optimizer == "adagrad" else 0.0
    return _lined_anew(lines, table_value_bytes(spec)) + state


def host_parts(spec: RunSpec, chip: ChipMemory, num_chips: int, chips_per_host: int) -> dict[str, float]:
    """Return the bytes of one host and its one process; a background save, and the start of a run, hold its rows
    once."""
    samples = spec.train.batch_size / num_chips * chips_per_host
    return {"process": TPU["process_bytes"], "loader": TPU["loader_batches"] * samples * sample_bytes(spec),
            "copy of the tables": chips_per_host * (chip.tables + chip.state)}


def tiled_bytes(shape: Sequence[int], size: int) -> float:
    """Return the bytes of an array on a TPU, transposed where that takes less.

    It is in tiles of eight lines of 128 (of 16 lines, of two-byte numbers); a vector is in tiles of 1,024.
    """
    if len(shape) < 2:
        return _up(math.prod(shape), SUBLANES * LINE) * size
    *outer, high, wide = shape
    return math.prod(outer) * size * min(_tiled(high, wide, size), _tiled(wide, high, size))


def lined_bytes(shape: Sequence[int], size: int) -> float:
    """Return the bytes of an array whose rows each fill one or several complete memory lines, so that they can be read
    one by one."""
    *outer, high, wide = shape
    return math.prod(outer) * size * _tiled(high, wide, size)


def line_bytes(group: Group) -> int:
    """Return the bytes of one fp32 row taken out of its line: a narrow one fills a line of its own."""
    return _up(group.dim, LINE) * 4


def _tiled(high: int, wide: int, size: int) -> int:
    tile = SUBLANES * 4 // size
    while tile > 1 and high <= tile // 2:
        tile //= 2
    return _up(high, tile) * _up(wide, LINE)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _lined_anew(lines: tuple[int, int], size: int) -> float:
    lined = lined_bytes(lines, size)
    return lined if tiled_bytes(lines, size) < lined else 0.0


def _exchanging(spec: RunSpec, layout: Layout, samples: int) -> float:
    """Return the peak bytes of an exchange: the rows of the batch's ids, the rows sent and received, and the received
    rows in order."""
    total = 0.0
    for group, capacity in zip(layout.groups, expected_capacities(spec, layout), strict=True):
        wide = line_bytes(group)
        num_ids = samples * len(group.columns)
        exchanged = layout.num_devices * capacity if layout.num_devices > 1 else num_ids
        bags = max((lined_bytes((samples, p.table.multi_hot, group.dim), 4) for p in group.places
                    if p.table.multi_hot > 1), default=0.0)
        total += 3 * exchanged * wide + num_ids * wide + bags
    return total


def _computing(spec: RunSpec, layers: Layers, samples: int, precision: str) -> float:
    """Return the most bytes of the layers: pooled vectors, their stack and its gradient, layers' outputs."""
    size = value_bytes(precision)
    pooled = sum(tiled_bytes((samples, t.dim or 0), size) for t in spec.model.table_list())
    outputs = sum(tiled_bytes((samples, layer.num_out), size) for layer in (*layers.bottom, *layers.top[:-1]))
    outputs += tiled_bytes((samples, layers.middle_width), size)
    if not layers.up:
        stack = lined_bytes((samples, layers.num_vectors, layers.dim), size)
        return pooled + 4 * stack + outputs
    crossed = tiled_bytes((samples, layers.middle_width), 4)
    narrow = sum(tiled_bytes((samples, layer.num_out), size) for layer in layers.down)
    return pooled + (len(layers.up) + 2) * crossed + narrow + outputs


def _dense_bytes(spec: RunSpec, layers: Layers) -> float:
    weights = sum(tiled_bytes((layer.num_out, layer.num_in), 4) + 4.0 * layer.num_out * layer.has_bias
                  for layer in layers.all)
    return weights * (1 + DENSE_STATES[spec.train.dense_optimizer])


def _in_hbm(peak: float, vmem_bytes: float) -> float:
    """Return the part of the peak that is in HBM. The compiler keeps as much as it can in the chip's fast memory:
    nearly all of a small step, little of a large one."""
    return TPU["min_step_bytes"] + TPU["spill_factor"] * peak * peak / (peak + vmem_bytes)


def tpu_step_time(
    spec: RunSpec, chip: Gpu, layout: Layout, precision: str, *, chips_per_host: int, network_gbyte_per_s: float,
    num_slices: int
) -> StepTime:
    """Return what bytes and arithmetic alone take. A step is never faster; how much slower it is, nobody has
    measured."""
    num_chips = layout.num_devices
    layers, samples = layers_of(spec.model), spec.train.batch_size // num_chips
    capacities = expected_capacities(spec, layout)
    exchange_bytes = _exchange_bytes(spec, layout, capacities)
    memory_rate = (chip.hbm_gbyte_per_s or 0.0) * 1e9
    matrix_rate = (chip.bf16_tflops or 0.0) * 1e12 / ASSUMPTIONS["matmul_passes"][precision]
    dense_bytes = activation_bytes(layers, spec, samples, value_bytes(precision))
    # Weights and their state, read and written, and gradients, read.
    optimizer_bytes = 4.0 * layers.num_values * (2 * (1 + DENSE_STATES[spec.train.dense_optimizer]) + 1)
    parts = {
        "lookup and update": _over(_row_bytes(spec, layout, capacities, samples), memory_rate),
        "dense layers": max(_over(samples * layers.flops_per_sample, matrix_rate), _over(dense_bytes, memory_rate)),
        "optimizer": _over(optimizer_bytes, memory_rate),
        "all-to-all": 0.0,
        "all-reduce": 0.0
    }
    if num_chips > 1:
        parts |= _between_chips(chip, num_chips // num_slices, num_chips, exchange_bytes, layers)
    if num_slices > 1:
        parts["between slices"] = _over(
            exchange_bytes * chips_per_host * (1 - 1 / num_slices), network_gbyte_per_s * 1e9
        )
    device_s = sum(parts.values())
    # One process feeds all chips of its host.
    beside = {"loader": chips_per_host * samples * sample_bytes(spec) / STEP["loader_bytes_per_s"]}
    total_s = max(device_s, *beside.values())
    bound_by = max(parts, key=lambda name: parts[name]) if device_s >= beside["loader"] else "loader"
    return StepTime({name: s for name, s in {**parts, **beside}.items() if s}, total_s, bound_by, is_calibrated=False,
                    basis=basis_of(chip))


def basis_of(chip: Gpu) -> str:
    """Say where the rates come from."""
    rates = [f"{chip.hbm_gbyte_per_s:,.0f} GB/s of memory" if chip.hbm_gbyte_per_s else "",
             f"{chip.bf16_tflops:,.0f} TFLOP/s in bf16" if chip.bf16_tflops else "",
             f"{chip.ici_gbyte_per_s / 2:,.0f} GB/s each way between chips" if chip.ici_gbyte_per_s else
             "no figure for the links between chips, so their time is left out"]
    return (f"an estimate from the datasheet of {chip.name}, unmeasured, the least a step can take: "
            f"{', '.join(rate for rate in rates if rate)}")


def _row_bytes(spec: RunSpec, layout: Layout, capacities: tuple[int, ...], samples: int) -> float:
    """Return the bytes through a chip's memory: rows and state of the tables, and the arrays that carry them."""
    total = 0.0
    for group, capacity in zip(layout.groups, capacities, strict=True):
        num_ids, wide = samples * len(group.columns), line_bytes(group)
        exchanged = layout.num_devices * capacity if layout.num_devices > 1 else 0
        moved = exchanged or num_ids
        line = max(group.width, LINE) * table_value_bytes(spec)
        state = {"adagrad": line * 2, "rowwise_adagrad": 8}.get(spec.train.optimizer, 0)
        total += num_ids * (2 * TPU["id_passes"] * wide + TPU["sort_bytes"]) + moved * (3 * line + state)
        total += exchanged * (2 * TPU["exchange_passes"] * wide + TPU["sort_bytes"])
    return total


def _between_chips(
    chip: Gpu, chips_per_slice: int, num_chips: int, exchange_bytes: float, layers: Layers
) -> dict[str, float]:
    """Return the seconds between chips. Over a torus each part passes several links, on average as many as its side
    says."""
    rate = (chip.ici_gbyte_per_s or 0.0) / 2 * 1e9
    dimensions = ASSUMPTIONS["torus_dimensions"].get(chip.name, 2)
    hops = max(1.0, dimensions * chips_per_slice ** (1 / dimensions) / 4)
    others = (num_chips - 1) / num_chips
    return {"all-to-all": _over(exchange_bytes * others * hops, rate),
            "all-reduce": _over(2 * 4.0 * layers.num_values * others, rate)}


def _exchange_bytes(spec: RunSpec, layout: Layout, capacities: tuple[int, ...]) -> float:
    """Return the bytes that leave a chip: row numbers, twice; rows; their gradients."""
    wire = wire_bytes(spec, 4)
    return float(sum(layout.num_devices * capacity * (2 * 4 + 2 * wire * group.dim)
                     for group, capacity in zip(layout.groups, capacities, strict=True)))


def _over(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0

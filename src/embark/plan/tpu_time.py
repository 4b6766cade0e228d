"""Seconds of a step of JAX's trainer on TPU chips: a roofline over the chip's datasheet. No TPU was ever timed."""

from embark.catalog import Gpu
from embark.model.jax_layout import Layout, expected_capacities
from embark.model.placement import table_value_bytes
from embark.model.work import Layers, layers_of
from embark.plan.prediction import StepTime
from embark.plan.step_time import LOADER_BYTES_PER_S, PASSES, sample_bytes
from embark.plan.tpu_memory import LINE, line_bytes
from embark.spec import RunSpec

PASSES_OF_IDS = 6
"""Arrays of a batch's rows that are written and read in a step: found, pooled, gradients, sorted, summed, sent."""
PASSES_OF_EXCHANGE = 5
"""… and of what chips exchange: gathered, received, gradients received, sorted, summed."""
SORT_BYTES = 48.0
"""Moved for each id by three sorts of keys and places, each read and written once."""
MATMUL_PASSES = {"bf16": 1.0, "tf32": 3.0, "fp32": 6.0}
"""Products in bf16 that a TPU makes of one: its matrix units know no wider numbers (XLA's precision high, highest)."""
TORUS_DIMENSIONS = {"TPU-v4": 3, "TPU-v5p": 3}
"""Of the links between chips; two for the others (Google's system architecture pages)."""


def tpu_step_time(
    spec: RunSpec, chip: Gpu, layout: Layout, precision: str, *, chips_per_host: int,
    network_gbyte_per_s: float = 0.0, num_slices: int = 1,
) -> StepTime:
    """What bytes and arithmetic alone take. A step is never faster; how much slower it is, nobody has measured."""
    num_chips = layout.num_devices
    layers, samples = layers_of(spec.model), spec.train.batch_size // num_chips
    capacities = expected_capacities(spec, layout)
    exchange_bytes = _exchange_bytes(spec, layout, capacities)
    size = 2 if precision == "bf16" else 4
    memory_rate = (chip.hbm_gbyte_per_s or 0.0) * 1e9
    matrix_rate = (chip.bf16_tflops or 0.0) * 1e12 / MATMUL_PASSES[precision]
    dense_bytes = PASSES * size * samples * (layers.output_width + 2 * sum(t.dim or 0 for t in spec.model.table_list()))
    parts = {
        "lookup and update": _over(_row_bytes(spec, layout, capacities, samples), memory_rate),
        "dense layers": max(_over(samples * layers.flops_per_sample, matrix_rate), _over(dense_bytes, memory_rate)),
        "optimizer": _over(_optimizer_bytes(spec, layers), memory_rate),
        "all-to-all": 0.0,
        "all-reduce": 0.0,
    }
    if num_chips > 1:
        parts |= _between_chips(chip, num_chips // num_slices, num_chips, exchange_bytes, layers)
    if num_slices > 1:
        parts["between slices"] = _over(
            exchange_bytes * chips_per_host * (1 - 1 / num_slices), network_gbyte_per_s * 1e9
        )
    device_s = sum(parts.values())
    # One process feeds all chips of its host.
    beside = {"loader": chips_per_host * samples * sample_bytes(spec) / LOADER_BYTES_PER_S}
    total_s = max(device_s, *beside.values())
    bound_by = max(parts, key=lambda name: parts[name]) if device_s >= beside["loader"] else "loader"
    return StepTime({name: s for name, s in {**parts, **beside}.items() if s}, total_s, bound_by, is_calibrated=False,
                    basis=basis_of(chip))


def basis_of(chip: Gpu) -> str:
    """Where the rates come from."""
    rates = [f"{chip.hbm_gbyte_per_s:,.0f} GB/s of memory" if chip.hbm_gbyte_per_s else "",
             f"{chip.bf16_tflops:,.0f} TFLOP/s in bf16" if chip.bf16_tflops else "",
             f"{chip.ici_gbyte_per_s / 2:,.0f} GB/s each way between chips" if chip.ici_gbyte_per_s else
             "no figure for the links between chips, so their time is left out"]
    return (f"an estimate from the datasheet of {chip.name}, unmeasured, the least a step can take: "
            f"{', '.join(rate for rate in rates if rate)}")


def _row_bytes(spec: RunSpec, layout: Layout, capacities: tuple[int, ...], samples: int) -> float:
    """Through a chip's memory: rows and state of the tables, and the arrays that carry them."""
    total = 0.0
    for group, capacity in zip(layout.groups, capacities, strict=True):
        num_ids, wide = samples * len(group.columns), line_bytes(group)
        exchanged = layout.num_devices * capacity if layout.num_devices > 1 else 0
        moved = exchanged or num_ids
        line = max(group.width, LINE) * table_value_bytes(spec)
        state = {"adagrad": line * 2, "rowwise_adagrad": 8}.get(spec.train.optimizer, 0)
        total += num_ids * (2 * PASSES_OF_IDS * wide + SORT_BYTES) + moved * (3 * line + state)
        total += exchanged * (2 * PASSES_OF_EXCHANGE * wide + SORT_BYTES)
    return total


def _between_chips(
    chip: Gpu, chips_per_slice: int, num_chips: int, exchange_bytes: float, layers: Layers
) -> dict[str, float]:
    """Over a torus each part passes several links; how many, on average, follows from its side."""
    rate = (chip.ici_gbyte_per_s or 0.0) / 2 * 1e9
    dimensions = TORUS_DIMENSIONS.get(chip.name, 2)
    hops = max(1.0, dimensions * chips_per_slice ** (1 / dimensions) / 4)
    others = (num_chips - 1) / num_chips
    return {"all-to-all": _over(exchange_bytes * others * hops, rate),
            "all-reduce": _over(2 * 4.0 * layers.num_values * others, rate)}


def _exchange_bytes(spec: RunSpec, layout: Layout, capacities: tuple[int, ...]) -> float:
    """That leave a chip: numbers of rows, twice; rows; their gradients."""
    wire = 4 if spec.train.comms_dtype == "fp32" else 2
    return float(sum(layout.num_devices * capacity * (2 * 4 + 2 * wire * group.dim)
                     for group, capacity in zip(layout.groups, capacities, strict=True)))


def _optimizer_bytes(spec: RunSpec, layers: Layers) -> float:
    """Weights and their state, read and written; gradients, read."""
    states = {"sgd": 0, "adagrad": 1, "adam": 2}[spec.train.dense_optimizer]
    return 4.0 * layers.num_values * (2 * (1 + states) + 1)


def _over(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0

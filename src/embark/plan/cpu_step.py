"""What a training step consists of on a CPU: small operations, bytes and arithmetic, each at the machine's own rate."""

from embark.model.placement import DENSE_STATES, value_bytes
from embark.model.work import DenseWork, Layers, Lookups
from embark.plan.calibration import CpuFit, Rates
from embark.spec import RunSpec
from embark.spec.model import Table

PARTS = {
    "lookup and update": ("table", "group", "pooling", "id", "ragged_id", "update", "state", "pooled"),
    "dense layers": ("layer", "matmul", "values", "weights", "dot_sample", "dots", "crossing"),
    "launches": ("start",),
}
"""Of a step time, by what a fit multiplies."""


def cpu_features(
    spec: RunSpec, layers: Layers | DenseWork, looked_up: Lookups, num_ranks: int, precision: str, rates: Rates
) -> dict[str, float]:
    """Seconds that each part alone would take, by the names of `CpuFit`."""
    samples, size, flops = spec.train.batch_size / num_ranks, value_bytes(precision), rates.matmul_flops[precision]
    tables = spec.model.table_list()
    moved = samples * size / rates.copy_bytes  # For each value of a sample.
    dot_sample = dots = crossing = 0.0
    if isinstance(layers, Layers):
        matmul = 6 * samples * sum(layer.num_weights for layer in layers.all if layer.num_out > 1) / flops
        width: float = sum(layer.num_out for layer in (*layers.bottom, *layers.top, *layers.head)) + layers.mixed_width
        crossing = moved * len(layers.up) * layers.middle_width
        if layers.num_vectors:
            dot_sample = samples * rates.op_s
            dots = 4 * samples * layers.num_vectors**2 * layers.dim / flops
    else:
        matmul, width = samples * layers.flops_per_sample / flops, layers.output_width
    weights = 4 * layers.num_values * (3 + 2 * DENSE_STATES[spec.train.dense_optimizer])
    return {
        "start": rates.op_s,
        "layer": rates.op_s * layers.num_layers,
        "table": rates.op_s * len(tables),
        "group": rates.op_s * len({(table.pooling, table.dim) for table in tables}),
        "pooling": rates.op_s * len({table.pooling for table in tables}),
        "id": rates.op_s * looked_up.num_ids,
        "ragged_id": rates.op_s * samples * _num_ragged_ids(tables),
        "update": (looked_up.update_bytes - looked_up.state_bytes) / rates.copy_bytes,
        "state": looked_up.state_bytes / rates.copy_bytes,
        "pooled": 4 * looked_up.pooled_values / rates.copy_bytes,
        "matmul": matmul, "values": moved * width, "weights": weights / rates.copy_bytes,
        "dot_sample": dot_sample, "dots": dots, "crossing": crossing,
    }


def cpu_parts(fit: CpuFit, features: dict[str, float]) -> dict[str, float]:
    return {part: sum(getattr(fit, name) * features[name] for name in names) for part, names in PARTS.items()}


def _num_ragged_ids(tables: tuple[Table, ...]) -> float:
    """Of a sample, those looked up beside features of several ids, whose places in a batch have to be counted."""
    ragged = {table.pooling for table in tables if table.multi_hot > 1}
    return sum(table.mean_ids for table in tables if table.pooling in ragged)

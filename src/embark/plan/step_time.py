"""Seconds of a step: bytes and arithmetic over measured rates, traffic over links and fabric, input over its roads. The
slowest of what runs side by side wins, as the engine lets it."""

from dataclasses import astuple, fields

from embark.model.placement import DENSE_STATES, Cluster, Placement, value_bytes
from embark.model.work import MAX_SORTED_AT_ONCE, DenseWork, Layers, Lookups, dense_work_of, lookups_of
from embark.spec import ModelSpec, RunSpec, Table
from .autograd import passes_of
from .calibration import Calibration, CpuFit, EngineFit, Rates
from .exchange import ENGINES, STEP, Exchange, all_reduce_s, all_to_all_s, num_dynamic_ids
from .memory import counted_engine
from .prediction import StepTime

NUM_OF_HOST = 4
FEATURES = tuple(field.name for field in fields(EngineFit))[NUM_OF_HOST:]  # Fields about the device.
ALIGNED = 8  # Values: cuBLAS has fast kernels for rows of 16 bytes.
LAUNCHES = ("start_s", "layer_s", "group_s", "sort_s", "large_sort_s", "cross_s", "skewed_s", "mean_s")
LARGE_SORT = 32_768  # Number of ids above which a sort takes more passes.
WEIGHT_BYTES = 30  # A dense weight in a step: its rounded copy, its gradient and itself, each written and read.
RANKS_LOOKED_AT = 64  # The number of ranks whose step is computed in a large cluster: the busiest ones.


def step_time(
    spec: RunSpec, placement: Placement, cluster: Cluster, engine: str, precision: str, calibration: Calibration,
    *, draws_samples: bool = False, from_memory: bool = False, exchange: Exchange | None = None
) -> StepTime:
    """Return the time of the slowest rank.

    `draws_samples`: they are drawn as it goes, which a plan for real data leaves out; by the device itself in the
    captured engine, else by the loader. `from_memory`: no loader has to make the batches. `exchange`: how ranks
    exchange values, if not as this engine does.
    """
    engine = counted_engine(spec, engine)
    exchange = exchange or ENGINES[engine]
    fit = calibration.engines[engine]
    layers = dense_work_of(spec.model, spec.train.batch_size)
    samples = spec.train.batch_size / placement.num_ranks
    size = value_bytes(precision)
    rank, looked_up = _busiest(spec, placement, size)
    rates = calibration.rates
    if isinstance(fit, CpuFit):
        features = cpu_features(spec, layers, looked_up, placement.num_ranks, precision, rates)
        took = {part: sum(getattr(fit, name) * features[name] for name in names) for part, names in PARTS.items()}
    else:
        took = _device_parts(fit, _features(spec, layers, looked_up, samples, precision, calibration, engine),
                             layers_behind_lookup(layers))
    parts = {
        "lookup and update": took["lookup and update"],
        "id maps": _id_map_s(spec, placement.num_ranks, engine, calibration),
        "dense layers": took["dense layers"],
        "launches": took["launches"],
        "all-to-all": 0.0,
        "all-reduce": 0.0,
        "host memory": looked_up.host_bytes / rates.upload_bytes
    }
    ids_ahead_s = 0.0
    if placement.num_ranks > 1:
        parts["all-to-all"], ids_s = all_to_all_s(exchange, spec, placement, cluster, rank, size)
        if exchange.ids_go_ahead:
            ids_ahead_s = ids_s
        else:
            parts["all-to-all"] += ids_s
        parts["all-reduce"] = all_reduce_s(exchange, spec, layers, cluster)
    batch_bytes = samples * sample_bytes(spec)
    draws_on_device = draws_samples and engine == "cuda_graph"
    draw_s = 0.0
    if draws_samples and not draws_on_device and rates.synthetic_values:
        draw_s = batch_bytes / 4 / rates.synthetic_values
    if cluster.device == "cpu":
        parts["drawing samples"] = draw_s  # by the cores that train
    device_s = sum(parts.values())
    meanwhile_s = exchange.beside_dense * parts["dense layers"] + exchange.beside_update * took.get("update", 0.0)
    device_s -= min(parts["all-reduce"], meanwhile_s)
    # What runs while the device computes.
    beside = {"host": 0.0 if isinstance(fit, CpuFit) else sum(factor * value for factor, value in zip(
        astuple(fit)[:NUM_OF_HOST], (*host_features(spec), device_s), strict=True))}
    beside["ids of the next batch"] = ids_ahead_s
    if cluster.device != "cpu" and not draws_on_device:
        beside["copy to the device"] = batch_bytes / rates.upload_bytes
        beside["drawing samples"] = draw_s
        if not from_memory:
            beside["loader"] = batch_bytes / STEP["loader_bytes_per_s"]
    total_s = max(device_s, *beside.values())
    bound_by = max(beside, key=lambda name: beside[name])
    if beside[bound_by] <= device_s:
        bound_by = max(parts, key=lambda name: parts[name])
    return StepTime({name: s for name, s in {**parts, **beside}.items() if s}, total_s, bound_by,
                    calibration.is_measured and not draws_on_device, calibration.basis)


def _device_parts(fit: EngineFit, features: tuple[float, ...], num_behind: int) -> dict[str, float]:
    took = {name: getattr(fit, name) * value for name, value in zip(FEATURES, features, strict=True)}
    update_s = took["update"] + took["state"]
    return {
        "lookup and update": took["sort"] + took["lookup"] + update_s,
        "update": update_s,
        "dense layers": sum(took[name] for name in ("layer_sample_s", "matmul", "weights", "activations", "interaction",
                                                    "crossing")),
        "launches": sum(took[name] for name in LAUNCHES)
                    - min(side_by_side_s(fit, features, num_behind))
    }


def side_by_side_s(fit: EngineFit, features: tuple[float, ...], num_behind: int) -> tuple[float, float]:
    """Return the longer of sorting ids and starting the layers after the lookup, which run side by side."""
    took = dict(zip(FEATURES, features, strict=True))
    return fit.sort_s * took["sort_s"] + fit.sort * took["sort"], fit.layer_s * num_behind


def layers_behind_lookup(layers: Layers | DenseWork) -> int:
    return layers.num_layers - (len(layers.bottom) if isinstance(layers, Layers) else 0)


def one_rank_cpu_features(spec: RunSpec, placement: Placement, precision: str, rates: Rates) -> tuple[float, ...]:
    """Return what a fit multiplies on a CPU, in the order of `CpuFit`."""
    layers, (_, looked_up) = dense_work_of(spec.model, spec.train.batch_size), _busiest(spec, placement, 4)
    found = cpu_features(spec, layers, looked_up, 1, precision, rates)
    return tuple(found[field.name] for field in fields(CpuFit))


def features(
    spec: RunSpec, placement: Placement, precision: str, calibration: Calibration, engine: str
) -> tuple[float, ...]:
    """Return what a fit multiplies, in the order of FEATURES: counts, and the seconds that bytes and arithmetic alone
    take."""
    layers, samples = dense_work_of(spec.model, spec.train.batch_size), spec.train.batch_size / placement.num_ranks
    _, looked_up = _busiest(spec, placement, value_bytes(precision))
    return _features(spec, layers, looked_up, samples, precision, calibration, engine)


def host_features(spec: RunSpec) -> tuple[float, float, float]:
    """Return the counts that a fit of the host's own time multiplies. FBGEMM looks up tables of one pooling
    together."""
    num_groups = len({table.pooling for table in spec.model.table_list()})
    return 1.0, float(dense_work_of(spec.model).num_layers), float(num_groups)


def _features(
    spec: RunSpec, layers: Layers | DenseWork, looked_up: Lookups, samples: float, precision: str,
    calibration: Calibration, engine: str
) -> tuple[float, ...]:
    size, copy_bytes = value_bytes(precision), calibration.rates.copy_bytes
    flops = calibration.rates.matmul_flops[precision]
    moved = samples * STEP["passes"] * size / copy_bytes  # Seconds for each value of a sample.
    layer_samples, interaction, crossing = samples * layers.num_layers, 0.0, 0.0
    if isinstance(layers, Layers):
        crossed = 2 * len(layers.up) * layers.middle_width
        interaction, crossing = moved * layers.num_vectors * layers.dim, moved * crossed
        matmul = 3 * sum(max(2 * samples * layer.num_weights / flops,
                             size * (samples * (layer.num_in + layer.num_out) + layer.num_weights) / copy_bytes)
                         for layer in layers.all)
        width: float = sum(layer.num_out for layer in (*layers.bottom, *layers.top, *layers.head)) + layers.mixed_width
        if engine == "pipeline":  # all that autograd's operations write; products of unaligned matrices are slow
            moved, width, crossing = 1 / copy_bytes, float(passes_of(spec, layers, round(samples), size).written), 0.0
            interaction *= layers.num_vectors % ALIGNED > 0
            layer_samples = 0.0
    else:
        matmul = samples * layers.flops_per_sample / flops
        width = layers.output_width
    num_means = sum(t.multi_hot > 1 and t.pooling == "mean" for t in spec.model.table_list())
    weights = layers.num_values * (WEIGHT_BYTES + 8 * DENSE_STATES[spec.train.dense_optimizer])
    return (
        1.0, float(layers.num_layers), *_num_groups(spec.model, spec.train.batch_size),
        float(isinstance(layers, Layers) and bool(layers.up)), float(spec.data.zipf_exponent > 0), float(num_means),
        layer_samples,
        STEP["sort_bytes"] * looked_up.num_ids / copy_bytes, looked_up.read_bytes / copy_bytes,
        (looked_up.update_bytes - looked_up.state_bytes) / copy_bytes, looked_up.state_bytes / copy_bytes,
        matmul, weights / copy_bytes, moved * width, interaction, crossing
    )


def _num_groups(model: ModelSpec, batch_size: int) -> tuple[float, float, float]:
    """Count the groups of tables with one width and one pooling, those of them whose ids the captured step does not
    sort table by table, and those of these with many ids."""
    groups: dict[object, list[int]] = {}
    for table in model.table_list():
        groups.setdefault((table.dim, table.pooling), []).append(table.multi_hot)
    whole = [ids for ids in groups.values() if batch_size > MAX_SORTED_AT_ONCE or max(ids) > 1]
    return float(len(groups)), float(len(whole)), float(sum(batch_size * sum(ids) > LARGE_SORT for ids in whole))


def sample_bytes(spec: RunSpec) -> float:
    """Return the bytes of labels, dense features and ids, four each."""
    model = spec.model
    return 4.0 * (max(1, len(model.tasks)) + model.num_dense + sum(t.mean_ids for t in model.table_list()))


def activation_bytes(layers: Layers | DenseWork, spec: RunSpec, samples: float, size: int) -> float:
    pooled = sum(t.mean_width for t in spec.model.table_list())
    return STEP["passes"] * size * samples * (layers.output_width + 2 * pooled)


def _table_bytes(looked_up: Lookups, size: int) -> float:
    return looked_up.device_bytes + 2 * looked_up.pooled_values * size + STEP["sort_bytes"] * looked_up.num_ids


def _busiest(spec: RunSpec, placement: Placement, size: int) -> tuple[int, Lookups]:
    """Return the rank whose tables move the most bytes. If there are many ranks, only those that are expected to look
    up the most are computed."""
    hot = {t.name: t.mean_ids / t.rows for t in spec.model.stored_tables()}
    promise: dict[int, float] = {}
    for shard in placement.shards:
        promise[shard.rank] = promise.get(shard.rank, 0.0) + hot[shard.table] * shard.num_rows * shard.num_columns
    ranks = sorted(promise, key=lambda rank: -promise[rank])[:RANKS_LOOKED_AT] or [0]
    found = [(rank, lookups_of(spec, placement, rank, size)) for rank in ranks]
    return max(found, key=lambda pair: _table_bytes(pair[1], size))


def _id_map_s(spec: RunSpec, num_ranks: int, engine: str, calibration: Calibration) -> float:
    """Return the seconds of dynamic tables: a rank hashes the ids of the whole batch, and reads the buckets of its
    own."""
    num_ids, fit = num_dynamic_ids(spec), calibration.id_maps.get(engine)
    if not num_ids or fit is None:
        return 0.0
    num_bytes = num_ids * (STEP["id_hash_bytes"] + STEP["id_bucket_bytes"] / num_ranks)
    return fit.start_s + fit.lookup * num_bytes / calibration.rates.copy_bytes


PARTS = {
    "lookup and update": ("table", "group", "pooling", "id", "ragged_id", "update", "state", "pooled"),
    "dense layers": ("layer", "matmul", "values", "weights", "dot_sample", "dots", "crossing"),
    "launches": ("start",)
}
"""The parts of a step time, and what a fit multiplies for each."""


def cpu_features(
    spec: RunSpec, layers: Layers | DenseWork, looked_up: Lookups, num_ranks: int, precision: str, rates: Rates
) -> dict[str, float]:
    """Return the seconds that each part alone would take, by the names of `CpuFit`."""
    samples, size, flops = spec.train.batch_size / num_ranks, value_bytes(precision), rates.matmul_flops[precision]
    tables = spec.model.table_list()
    moved = samples * size / rates.copy_bytes  # Seconds for each value of a sample.
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
        "dot_sample": dot_sample, "dots": dots, "crossing": crossing
    }


def _num_ragged_ids(tables: tuple[Table, ...]) -> float:
    """Count the ids of a sample that are looked up beside features of several ids.

    Their positions in a batch have to be counted.
    """
    ragged = {table.pooling for table in tables if table.multi_hot > 1}
    return sum(table.mean_ids for table in tables if table.pooling in ragged)

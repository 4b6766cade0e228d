"""Bytes that a run takes on the fullest rank and on a host, part by part: counted where the trainer's own buffers are
known, measured where they are a library's."""

from dataclasses import replace

from embark.model.placement import (
    DENSE_STATES,
    Placement,
    data_parallel_values,
    shard_bytes,
    table_value_bytes,
    tables_by_name,
    value_bytes,
    wire_bytes,
)
from embark.model.sharding import CACHED_SHARE
from embark.model.steps import EVAL_SAMPLES, num_together
from embark.model.work import Layers, dense_work_of, layers_of, lookups_of, padded
from embark.spec import RunSpec
from embark.spec.model import id_map_bytes
from embark.values import frozen
from .autograd import passes_of
from .calibration import Calibration, MemoryFit
from .prediction import ASSUMPTIONS

MEMORY = ASSUMPTIONS["memory"]
UPDATE_TILE = 32
STEP_BYTES_PER_ID = 28  # A dynamic table's id: hash, slot, whether it is missing, how many are before it, row.
EXCHANGE_BYTES_PER_ID = 24  # … on several ranks: as it came and in order, its row for its rank and from each.


@frozen
class ByteCounts:
    """Bytes of a rank that follow from the spec. Activations are split into the parts of which a library holds a
    multiple."""

    tables: float
    state: float
    dense: float
    pooled: float
    layers: float
    ids: float
    inputs: float
    exchange: float
    id_maps: float = 0.0
    largest: float = 0.0  # The largest tensor that comes and goes: the allocator leaves gaps as large.

    @property
    def fixed(self) -> float:
        """Bytes that no allocator multiplies."""
        return self.tables + self.state + self.dense + self.inputs + self.exchange + self.id_maps


def counted_engine(spec: RunSpec, engine: str) -> str:
    """Return the engine by whose bytes and times a run is predicted: the captured step of sequences was not measured
    yet."""
    return "pipeline" if spec.model.has_sequences else engine


def device_parts(
    spec: RunSpec, placement: Placement, engine: str, precision: str, calibration: Calibration
) -> dict[str, float]:
    """Return the bytes of the fullest rank of a GPU run."""
    engine = counted_engine(spec, engine)
    fit = calibration.memory[engine]
    rank = fullest_rank(spec, placement)
    counted = counted_bytes(spec, placement, rank, engine, precision)
    held = _held(counted, fit)
    parts = {
        "tables": counted.tables,
        "optimizer state": counted.state,
        "dense layers": counted.dense,
        "activations": held,
        "input buffers": counted.inputs,
        "exchange": counted.exchange,
        "id maps": counted.id_maps,
        "fragmentation": counted.largest * fit.gaps,
        "CUDA and libraries": fit.context_bytes + fit.workspace_bytes,
        "NCCL": MEMORY["nccl_bytes"] if placement.num_ranks > 1 else 0.0
    }
    return {name: size for name, size in parts.items() if size}


def with_own_input(parts: dict[str, float], spec: RunSpec, engine: str, num_ranks: int) -> dict[str, float]:
    """Return `device_parts` of a run that reads its own data.

    Its buffers hold as many batches as are made together, and its evaluation, which is no part of the captured step,
    takes memory of its own.
    """
    if counted_engine(spec, engine) != "cuda_graph":
        return parts
    pooled, layers = sum(t.dim or 0 for t in spec.model.table_list()), dense_work_of(spec.model)
    if spec.data.num_eval_samples:
        parts = parts | {"evaluation": EVAL_SAMPLES * (8.0 * pooled + value_bytes("bf16") * layers.output_width)}
    if spec.data.kind == "columns":
        return parts
    return parts | {"input buffers": num_together(spec.train.batch_size // num_ranks) * parts["input buffers"]}


def counted_bytes(spec: RunSpec, placement: Placement, rank: int, engine: str, precision: str) -> ByteCounts:
    """Return the bytes of a rank on a GPU."""
    count = cuda_graph_bytes if engine == "cuda_graph" else gpu_pipeline_bytes
    return count(spec, placement, rank, precision)


def fullest_rank(spec: RunSpec, placement: Placement) -> int:
    sizes: dict[int, float] = {}
    for shard in placement.shards:
        share = 1.0 if shard.memory == "device" else CACHED_SHARE
        sizes[shard.rank] = sizes.get(shard.rank, 0.0) + share * shard_bytes(shard, spec)
    return max(sizes, key=lambda rank: (sizes[rank], -rank), default=0)


def cuda_graph_bytes(spec: RunSpec, placement: Placement, rank: int, precision: str) -> ByteCounts:
    """Return the bytes that the captured engine allocates before the first step, which is all of them."""
    model, size = spec.model, value_bytes(precision)
    samples = spec.train.batch_size / placement.num_ranks
    tables = model.table_list()
    num_ids = sum(t.multi_hot for t in tables)
    looked_up = lookups_of(spec, placement, rank, size)
    multi_hot = {t.name: t.multi_hot for t in model.stored_tables()}
    num_keys = sum(spec.train.batch_size * multi_hot[s.table] for s in placement.of_rank(rank))
    dim = max((s.num_columns for s in placement.of_rank(rank)), default=0)
    # Key, sorted key and order of each id; what two kernels hand each other; the sort's own memory. The steps that
    # `ids` is fitted to also had 10 bytes of places and shards.
    keys = num_keys * (8 + 2 + 4 + 4 + 8 + 8 * _power_of_2(dim) / UPDATE_TILE + 24)
    on_device, state = _table_bytes(spec, placement, rank)
    exchange = 0.0
    if placement.num_ranks > 1:
        wire = wire_bytes(spec, size)
        exchange = wire * (2 * looked_up.pooled_values + samples * sum(t.dim or 0 for t in tables))
        exchange += 4 * (3 * looked_up.num_ids + samples * num_ids) + 8 * (looked_up.num_ids + samples * num_ids)
    dense, per_sample = (_own_network_bytes if model.goes_back_by_autograd else _flat_dense_bytes)(spec, size, samples)
    return ByteCounts(on_device, state, dense, 0.0, samples * (per_sample + 4), keys,
                      2 * samples * 4 * (1 + model.num_dense + num_ids), exchange,
                      _id_map_bytes(spec, placement.num_ranks))


def gpu_pipeline_bytes(spec: RunSpec, placement: Placement, rank: int, precision: str) -> ByteCounts:
    """Return the bytes of TorchRec's pipeline: what autograd holds at its peak, and three batches.

    A batch has features, ids, lengths and offsets. FBGEMM has one batch's ids and offsets in 64 bits, and each group of
    tables has its own.
    """
    counted, model = pipeline_bytes(spec, placement, rank, precision), spec.model
    layers, tables, size = dense_work_of(model, spec.train.batch_size), model.table_list(), value_bytes(precision)
    samples = spec.train.batch_size // placement.num_ranks
    if isinstance(layers, Layers):
        held = float(passes_of(spec, layers, samples, size).peak)
        width = sum(table.max_width for table in tables)
        largest: float = samples * max(size * max(layer.num_out for layer in layers.all),
                                       size * layers.num_vectors * layers.dim,
                                       4 * width if layers.num_vectors and not layers.bottom else 0)
    else:
        held = MEMORY["own_pooled"] * counted.pooled + MEMORY["own_outputs"] * counted.layers
        largest = counted.pooled
    copied = 8 * (len({table.pooling for table in tables}) > 1)
    ids = (20 + copied) * counted.ids / 8 + (32 + copied) * samples * len(tables)
    return replace(counted, pooled=0.0, layers=held, ids=ids, largest=largest)


def pipeline_bytes(spec: RunSpec, placement: Placement, rank: int, precision: str) -> ByteCounts:
    """Return what autograd makes on any device: pooled vectors in fp32, each layer's output.

    How much of it lives at once is measured.
    """
    layers, model = dense_work_of(spec.model, spec.train.batch_size), spec.model
    size = value_bytes(precision)
    samples = spec.train.batch_size / placement.num_ranks
    tables = model.table_list()
    pooled = sum(t.max_width for t in tables)
    looked_up = lookups_of(spec, placement, rank, 4)
    on_device, state = _table_bytes(spec, placement, rank)
    exchange = 0.0 if placement.num_ranks == 1 else 4 * 2 * (looked_up.pooled_values + samples * pooled)
    states = DENSE_STATES[spec.train.dense_optimizer]
    return ByteCounts(
        on_device, state, layers.num_values * (4 * (2 + states) + (2 if size == 2 else 0))
        + 4.0 * data_parallel_values(spec),
        4 * samples * pooled, samples * layers.output_width * size, 8 * looked_up.num_ids,
        3 * samples * 4 * (max(1, len(model.tasks)) + model.num_dense), exchange,
        _id_map_bytes(spec, placement.num_ranks)
    )


def host_parts(
    spec: RunSpec, placement: Placement, ranks_per_host: int, calibration: Calibration, *, is_cpu: bool,
    precision: str
) -> dict[str, float]:
    """Return the bytes of one host with all its ranks."""
    fit = calibration.memory["pipeline" if is_cpu else "host"]  # on a CPU no other engine was measured
    tables = spec.model.table_list()
    num_ids = sum(t.multi_hot for t in tables)
    samples = spec.train.batch_size / placement.num_ranks
    batch = samples * 4 * (max(1, len(spec.model.tasks)) + spec.model.num_dense + 2 * num_ids)
    ranks = range(min(ranks_per_host, placement.num_ranks))
    on_host = sum(shard_bytes(s, spec) for r in ranks for s in placement.of_rank(r) if is_cpu or s.memory == "host")
    on_device = sum(shard_bytes(s, spec) for r in ranks for s in placement.of_rank(r))
    parts = {"tables": on_host, "processes": fit.context_bytes * len(ranks),
             "loader": MEMORY["loader_batches"] * batch * len(ranks)}
    if spec.store.in_background and (spec.store.checkpoint_every != 0 or spec.store.checkpoint_at_end):
        parts["checkpoint copy"] = on_device
    if is_cpu:
        rank = fullest_rank(spec, placement)
        counted = pipeline_bytes(spec, placement, rank, precision)
        parts["dense layers"] = counted.dense * len(ranks)
        parts["id maps"] = counted.id_maps * len(ranks)
        parts["activations"] = _held(counted, fit) * len(ranks)
    return {name: size for name, size in parts.items() if size}


def _held(counted: ByteCounts, fit: MemoryFit) -> float:
    return counted.pooled * fit.pooled + counted.layers * fit.layers + counted.ids * fit.ids


def _table_bytes(spec: RunSpec, placement: Placement, rank: int) -> tuple[float, float]:
    """Return the bytes of rows and of optimizer state on the device."""
    rows = state = 0.0
    for shard in placement.of_rank(rank):
        share = 1.0 if shard.memory == "device" else CACHED_SHARE
        values = shard.num_rows * shard.num_columns * table_value_bytes(spec, tables_by_name(spec.model)[shard.table])
        rows += share * values
        state += share * (shard_bytes(shard, spec) - values)
    return rows, state


def _id_map_bytes(spec: RunSpec, num_ranks: int) -> float:
    """Return what dynamic tables take of a rank: its part of the maps, and a step's bytes for each id of the whole
    batch."""
    of_id = STEP_BYTES_PER_ID + (EXCHANGE_BYTES_PER_ID if num_ranks > 1 else 0)
    return sum(float(id_map_bytes(table.features[0], num_ranks)) + of_id * spec.train.batch_size * table.multi_hot
               for table in spec.model.stored_tables() if table.is_dynamic)


def _flat_dense_bytes(spec: RunSpec, size: int, samples: float) -> tuple[float, float]:
    """Return the bytes of the weights, and of the buffers between layers for each sample.

    A weight has a master copy, an index, two states, a gradient, the copy that is computed with, sums over portions of
    the batch, and its decay if there is one.
    """
    layers, model = layers_of(spec.model), spec.model
    head, before = layers.top[-1], (*layers.bottom, *layers.down, *layers.up, *layers.top[:-1])
    weights = sum(padded(layer.num_out) * padded(layer.num_in) for layer in before)
    in_all = padded(weights + sum(padded(layer.num_out) for layer in before if layer.has_bias) + head.num_in + 1)
    portions = min(1024, max(128, samples // 64)) if size == 2 else 1
    values = layers.num_values * (4 + 8 + 4 + 4 + 4 * bool(spec.train.weight_decay))
    widths = padded(model.num_dense) if layers.bottom else 0
    widths += 2 * sum(padded(layer.num_out) for layer in (*layers.bottom, *layers.top[:-1]))
    wide = padded(layers.middle_width)
    if layers.up:
        widths += (2 * len(layers.up) + 5) * wide + 2 * sum(padded(layer.num_out) for layer in layers.down)
    else:
        widths += 2 * sum(t.dim or 0 for t in model.table_list()) + 2 * wide
    return values + in_all * (4 + size) + 4 * portions * (in_all - weights), widths * size


def _own_network_bytes(spec: RunSpec, size: int, samples: float) -> tuple[float, float]:
    """Return the bytes of a network that goes back by autograd, as `_flat_dense_bytes` does.

    A sample has its inputs, pooled rows and their gradients in fp32, what autograd keeps, and its gradient.
    """
    work = dense_work_of(spec.model)
    values = work.num_values * (4 + 8 + 4 + 4 + 4 * bool(spec.train.weight_decay) + 4 + size)
    pooled = sum(t.dim or 0 for t in spec.model.table_list())
    return values, 4 * (spec.model.num_dense + 3 * pooled) + 2 * size * work.output_width


def _power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()

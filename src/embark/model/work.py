"""What one step of a model does, counted: layers, weights, arithmetic, bytes. No machine is in it yet."""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from embark.spec import ModelSpec, RunSpec, StoredTable, is_item_table
from embark.spec.model import FIELD_KINDS
from embark.spec.sequence import SEQUENCE_KINDS
from embark.values import frozen
from .placement import Placement, Shard, state_bytes, table_value_bytes, tables_by_name

MAX_SORTED_AT_ONCE = 4096  # Keys: torch sorts rows of a matrix up to this length in one launch, longer ones in turn.
PADDING = 8  # The captured step rounds widths up to this: tensor cores want rows of 16 bytes.
DENSE_STATES: dict[str, tuple[str, ...]] = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
"""What an optimizer keeps for each dense weight, by torch's names."""


@frozen
class Linear:
    num_in: int
    num_out: int
    has_bias: bool = True

    @property
    def num_weights(self) -> int:
        return self.num_in * self.num_out

    @property
    def num_values(self) -> int:
        return self.num_weights + self.num_out * self.has_bias


@frozen
class Layers:
    """The dense network of a model."""

    bottom: tuple[Linear, ...]
    down: tuple[Linear, ...]  # `dcnv2` only: the projection of each cross layer to its low rank.
    up: tuple[Linear, ...]  # `dcnv2` only: the projection of each cross layer back to full width.
    top: tuple[Linear, ...]
    num_vectors: int  # Vectors of `dlrm`'s dot products; 0 for `dcnv2`.
    dim: int
    head: tuple[Linear, ...] = ()  # Layers of a model with several tasks, which replace `top`.
    head_width: int = 0  # Width of the input of `head`.
    mixed_width: int = 0  # Values for each sample that the gates of `head` weight.

    @property
    def all(self) -> tuple[Linear, ...]:
        return (*self.bottom, *self.down, *self.up, *self.top, *self.head)

    @property
    def num_values(self) -> int:
        return sum(layer.num_values for layer in self.all)

    @property
    def num_layers(self) -> int:
        return len(self.all)

    @property
    def middle_width(self) -> int:
        """The width that the top layers begin with."""
        return self.head_width or self.top[0].num_in

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward: a multiplication and an addition for each weight, three times; the dots likewise."""
        dots = self.num_vectors**2 * self.dim
        return 6.0 * (sum(layer.num_weights for layer in self.all) + dots + self.mixed_width)

    @property
    def output_width(self) -> int:
        """Values that go through memory for each sample, of all layers and of what stands between them."""
        crossed = 2 * len(self.up) * self.middle_width  # the raised and the crossed vector
        narrow = sum(layer.num_out for layer in self.down)
        mlps = sum(layer.num_out for layer in (*self.bottom, *self.top, *self.head)) + self.mixed_width
        return mlps + crossed + narrow + self.middle_width


@frozen
class DenseWork:
    """Totals of a network without `Layers`; of a custom one, as its trace counts them."""

    num_values: int = 0
    flops_per_sample: float = 0.0
    output_width: float = 0.0
    num_layers: int = 0
    note: str = "its dense layers are not counted: that would run its code"


TRACED: dict[ModelSpec, DenseWork] = {}
"""Custom networks whose code a command has run. Commands that only read run none."""


def dense_work_of(model: ModelSpec, batch_size: int = 0) -> Layers | DenseWork:
    """Count the dense network of any kind of model.

    `batch_size` is a training step's; two towers compare each sample with the items of all.
    """
    if model.kind == "two_tower":
        return _two_tower_work(model, batch_size)
    if model.kind in (*SEQUENCE_KINDS, *FIELD_KINDS):
        found = (count_field_model if model.kind in FIELD_KINDS else count_sequence_model)(model)
        return DenseWork(found.num_values, found.flops_per_sample, found.output_width, found.num_layers, note="")
    return TRACED.get(model, DenseWork()) if model.is_custom else layers_of(model)


def _two_tower_work(model: ModelSpec, batch_size: int) -> DenseWork:
    """Count both towers.

    Sampled negatives go through the item tower too. Logits, their softmax and the mask have a value for each pair of a
    sample and a candidate.
    """
    two = model.two_tower
    num_dense = {"user": model.num_dense - two.num_item_dense, "item": two.num_item_dense}
    layers = {tower: _mlp(num_dense[tower] + sum(t.dim or 0 for t in model.table_list()
                                                 if is_item_table(model, t.name) == (tower == "item")), sizes)
              for tower, sizes in (("user", two.user_layers), ("item", two.item_layers))}
    width = two.item_layers[-1] if two.item_layers else model.table_list()[0].dim or 0
    per_sample = {"user": 1.0, "item": 1 + two.num_sampled_negatives / batch_size if batch_size else 1.0}
    num_candidates = batch_size + two.num_sampled_negatives if batch_size else 1
    every = [layer for one in layers.values() for layer in one]
    flops = sum(per_sample[tower] * layer.num_weights for tower, one in layers.items() for layer in one)
    outputs = sum(per_sample[tower] * (width + sum(layer.num_out for layer in one)) for tower, one in layers.items())
    num_biases = width * sum(not one for one in layers.values())  # of towers without layers
    return DenseWork(num_values=sum(layer.num_values for layer in every) + num_biases,
                     flops_per_sample=6.0 * (flops + width * num_candidates),
                     output_width=outputs + 3 * num_candidates, num_layers=len(every) + 1, note="")


def layers_of(model: ModelSpec) -> Layers:
    """Return the layers of DLRM and DLRM-DCNv2, as the trainer builds them."""
    bottom = _mlp(model.num_dense, (*model.bottom_mlp, model.embedding_dim)) if model.num_dense else ()
    tables = model.table_list()
    if model.kind == "dcnv2":
        width = sum(t.dim or 0 for t in tables) + (model.embedding_dim if bottom else 0)
        rank = min(model.cross_rank, width)
        down = tuple(Linear(width, rank, has_bias=False) for _ in range(model.num_cross_layers))
        up = tuple(Linear(rank, width) for _ in range(model.num_cross_layers))
        return _with_top(Layers(bottom, down, up, (), 0, model.embedding_dim), model, width)
    vectors = len(tables) + bool(bottom)
    passed_on = model.embedding_dim * (1 if bottom else vectors)
    return _with_top(Layers(bottom, (), (), (), vectors, model.embedding_dim), model,
                     passed_on + vectors * (vectors - 1) // 2)


def _with_top(layers: Layers, model: ModelSpec, width: int) -> Layers:
    """Add what lies over an interaction of `width`."""
    if not model.tasks:
        return replace(layers, top=_mlp(width, (*model.top_mlp, 1)))
    head = task_layers_of(model, width)
    return replace(layers, head=tuple(Linear(*sizes) for sizes in head.sizes), head_width=width,
                   mixed_width=head.mixed_width)


@frozen
class Lookups:
    """The lookups and updates of one rank in a step."""

    num_ids: float
    read_bytes: float  # Bytes of rows that the lookup reads.
    pooled_values: float  # Values that the lookup returns; as many gradients come back.
    grad_bytes: float  # Bytes of gradients, which are read once for each id.
    update_bytes: float  # Bytes read and written to update touched rows and their optimizer state.
    state_bytes: float  # The part of `update_bytes` for optimizer state.
    host_bytes: float  # The part of all bytes that is transferred from or to host memory.

    @property
    def device_bytes(self) -> float:
        return self.read_bytes + self.grad_bytes + self.update_bytes


def lookups_of(spec: RunSpec, placement: Placement, rank: int, value_bytes: int) -> Lookups:
    """Count a rank's lookups for the whole batch, since it looks its rows up for the samples of all ranks.

    Ids are as unequal as synthetic ones are by `data.zipf_exponent`; how unequal real ones are stands in no spec.
    """
    tables = tables_by_name(spec.model)
    ids = read = pooled = grads = updates = states = host = 0.0
    for shard in placement.of_rank(rank):
        table = tables[shard.table]
        num_ids = spec.train.batch_size * table.mean_ids + sum(
            spec.model.two_tower.num_sampled_negatives * feature.multi_hot for feature in table.features
            if is_item_table(spec.model, feature.name))
        of_shard = num_ids * (shard.num_rows / table.rows)
        num_samples = float(spec.train.batch_size)
        if table.is_data_parallel:  # each rank looks up its own samples
            of_shard, num_samples = of_shard / placement.num_ranks, num_samples / placement.num_ranks
        touched = distinct(round(of_shard), shard.num_rows, spec.data.zipf_exponent)
        row_bytes = shard.num_columns * table_value_bytes(spec, table)
        of_row = row_bytes + _state_bytes_per_row(spec, table, shard)
        ids += of_shard
        read += of_shard * row_bytes
        pooled += num_samples * values_per_sample(shard, table)
        grads += of_shard * shard.num_columns * value_bytes
        states += 2 * touched * (of_row - row_bytes)
        if table.is_data_parallel:  # a gradient of all rows, set to zero, added to and read
            updates += shard.num_rows * (2 * of_row + 3 * row_bytes)
        else:
            updates += 2 * touched * of_row
        if shard.memory == "host":
            host += 2 * touched * of_row
    return Lookups(ids, read, pooled, grads, updates, states, host)


def values_per_sample(shard: Shard, table: StoredTable) -> float:
    """Return the values that a part of a table gives for each sample. Rows of a sequence come as they are, each from
    the part that has it; others are added up, and every part of the rows gives a sum."""
    values = shard.num_columns * table.vectors_per_sample
    return values * shard.num_rows / table.rows if table.is_sequence else values


def padded(width: int) -> int:
    return -(-width // PADDING) * PADDING


@lru_cache(maxsize=16_384)
def distinct(num_ids: int, num_rows: int, exponent: float) -> float:
    """Return how many rows `num_ids` ids are expected to touch, where the k-th row's chance falls as k to the
    −exponent.

    Rows are taken together in spans that grow by a tenth: within one, all are about as likely.
    """
    if not num_rows or not num_ids:
        return 0.0
    whole = _integral(0.5, num_rows + 0.5, exponent)
    touched, start = 0.0, 0.5
    while start < num_rows + 0.5:
        stop = min(num_rows + 0.5, start + max(1.0, 0.1 * start))
        chance = _integral(start, stop, exponent) / whole / (stop - start)
        touched += (stop - start) * -math.expm1(-num_ids * chance)
        start = stop
    return touched


def _integral(start: float, stop: float, exponent: float) -> float:
    """Integrate x to the −exponent."""
    if abs(exponent - 1) < 1e-9:
        return math.log(stop / start)
    return float(stop ** (1 - exponent) - start ** (1 - exponent)) / (1 - exponent)


def _state_bytes_per_row(spec: RunSpec, table: StoredTable, shard: Shard) -> float:
    a_row, a_value = state_bytes(spec, table)
    return a_row + a_value * shard.num_columns


def _mlp(width: int, sizes: tuple[int, ...]) -> tuple[Linear, ...]:
    return tuple(Linear(*pair) for pair in _widths(width, sizes))


NUM_TIME_BUCKETS = 32  # Powers of two of seconds: the last bucket begins after 68 years.
DIN_UNITS = (64, 16)  # Widths of the layers that weigh one item of the history.


class Counts:
    """Adds up weights, arithmetic and the values that autograd keeps: the outputs of layers and others."""

    def __init__(self) -> None:
        self.num_values = self.num_layers = 0
        self.flops_per_sample = self.output_width = 0.0

    def linear(self, num_in: int, num_out: int, mean_rows: float = 1.0, max_rows: float = 1.0, *,
               has_bias: bool = True) -> None:
        """Add a dense layer over rows of a sample, forward and backward: six operations for each weight and row."""
        self.num_values += (num_in + has_bias) * num_out
        self.num_layers += 1
        self.flops_per_sample += 6 * mean_rows * num_in * num_out
        self.output_width += max_rows * num_out

    def mlp(self, width: int, sizes: tuple[int, ...]) -> None:
        for pair in _widths(width, sizes):
            self.linear(*pair)

    def products(self, mean_pairs: float, dim: int) -> None:
        """Add dot products of rows."""
        self.num_layers += 1
        self.flops_per_sample += 6 * mean_pairs * dim


def count_sequence_model(model: ModelSpec) -> Counts:
    """Count DIN, SASRec or HSTU: arithmetic by the mean length, memory by the longest sequence."""
    counts, roles = Counts(), model.sequence
    history = model.feature(roles.history)
    dim, mean, longest = history.dim or 0, history.mean_ids, float(history.multi_hot)
    if model.kind == "din":
        counts.output_width += longest * (4 + 2) * dim  # the items beside the candidate; what is weighed
        for pair in _widths(4 * dim, (*DIN_UNITS, 1)):
            counts.linear(*pair, mean, longest)
        _count_head(counts, model, 3 * dim)
        return counts
    change = -1 if roles.is_next_item else 1  # the last item is only predicted; the candidate comes behind the history
    mean, longest = max(1.0, mean + change), max(1.0, longest + change)
    _count_encoder(counts, model, dim, mean, longest)
    if roles.is_next_item:
        negatives = model.feature(roles.negatives)
        counts.products(mean * (negatives.mean_ids + 1), dim)
        counts.output_width += 2 * longest * negatives.multi_hot
    else:
        _count_head(counts, model, dim)
    return counts


def _count_encoder(counts: Counts, model: ModelSpec, dim: int, mean: float, longest: float) -> None:
    """Add causal attention, in which each row sees itself and those before it.

    Scores are not counted as kept: kernels on a GPU compute them again.
    """
    has_times = bool(model.sequence.times)
    counts.num_values += int(longest) * dim + 2 * dim  # positions, and the last normalization
    counts.num_values += NUM_TIME_BUCKETS * dim if has_times and model.kind == "sasrec" else 0
    counts.output_width += 3 * longest * dim
    if model.kind == "hstu" and model.is_next_item:  # the normalization of its inputs
        counts.num_values += 2 * dim
        counts.output_width += longest * dim
    for _ in range(model.sequence.num_blocks):
        counts.num_values += 4 * dim  # two normalizations
        counts.products(2 * mean * (mean + 1) / 2, dim)
        if model.kind == "hstu":
            counts.num_values += 2 * int(longest) - 1 + (NUM_TIME_BUCKETS if has_times else 0)
            counts.linear(dim, 4 * dim, mean, longest)
            # After SiLU; normalized, attended, normalized, gated, dropped.
            counts.output_width += longest * (4 + 5) * dim
            counts.linear(dim, dim, mean, longest)
        else:
            counts.linear(dim, 3 * dim, mean, longest)
            counts.output_width += longest * 8 * dim
            for _ in range(3):
                counts.linear(dim, dim, mean, longest)


def _count_head(counts: Counts, model: ModelSpec, width: int) -> None:
    roles = (model.sequence.history, model.sequence.candidate, model.sequence.times)
    if model.num_dense:
        counts.mlp(model.num_dense, (*model.bottom_mlp, model.embedding_dim))
        width += model.embedding_dim
    width += sum(table.dim or 0 for table in model.table_list() if table.name not in roles)
    counts.mlp(width, (*model.top_mlp, 1))


def count_field_model(model: ModelSpec) -> Counts:
    """Count a network over fields; what autograd keeps is what its operations read."""
    counts, dims = Counts(), [table.dim or 0 for table in model.table_list()]
    if model.kind == "tabm":
        num = model.num_members
        sizes = (model.num_dense + sum(dims), *model.top_mlp)
        for width, after in pairwise(sizes):
            counts.linear(width, after, num, num, has_bias=False)
            counts.num_values += num * (width + after)
            counts.output_width += num * width
        counts.num_values += num * (sizes[-1] + 1)
        counts.output_width += sizes[0]
        return counts
    dim, num_layers = model.embedding_dim, model.num_cross_layers
    if model.num_dense and model.kind != "wide_deep":
        dims = [dim] * model.num_dense + dims
        counts.num_values += model.num_dense * dim
    width, num_fields, num_terms = sum(dims), len(dims), 0
    if model.kind == "wide_deep":
        width += model.num_dense
    counts.output_width += width
    if model.kind == "deepfm":
        counts.output_width += dim
        num_terms = 2
    elif model.kind == "wide_deep":
        num_terms = 1
        if model.num_dense:
            counts.linear(model.num_dense, 1, has_bias=False)
    elif model.kind == "xdeepfm":
        for number in range(num_layers):
            counts.linear(model.num_feature_maps if number else num_fields, model.num_feature_maps * num_fields,
                          dim, dim, has_bias=False)
            counts.output_width += (model.num_feature_maps if number else num_fields) * dim
        num_terms = 1 + num_layers * model.num_feature_maps
    elif model.kind == "autoint":
        for _ in range(num_layers):
            for _ in range(4):
                counts.linear(dim, dim, num_fields, num_fields, has_bias=False)
            counts.products(2 * num_fields**2, dim)
            counts.output_width += model.num_heads * num_fields**2
        num_terms = width
    elif model.kind == "finalmlp":
        for _ in range(2):
            counts.mlp(width, (dim, width))
            counts.mlp(width, model.top_mlp)
            counts.output_width += 2 * width
        out = model.top_mlp[-1]
        counts.linear(out // model.num_heads, out // model.num_heads, model.num_heads, model.num_heads, has_bias=False)
        counts.num_values += (model.num_heads - 1) * (out // model.num_heads) ** 2
        width, num_terms = 2 * out, model.num_heads
    else:
        rank = min(model.cross_rank, width)
        counts.num_values += 2 * width
        counts.output_width += 3 * width
        for _ in range(num_layers):
            counts.mlp(width, (rank, width))
            counts.linear(width, rank, has_bias=False)
            counts.num_values += 2 * rank
            counts.output_width += width + 2 * rank
        width = rank * num_layers
    _count_top(counts, model, width, num_terms)
    return counts


def _count_top(counts: Counts, model: ModelSpec, width: int, num_terms: int) -> None:
    """Add the deep part of a network over fields, or the head of several tasks."""
    if model.tasks:
        head = task_layers_of(model, width + num_terms)
        for pair in head.sizes:
            counts.linear(*pair)
        counts.flops_per_sample += 6 * head.mixed_width
        counts.output_width += head.mixed_width + width + num_terms
        return
    counts.mlp(width, (1,) if model.kind == "finalmlp" else (*model.top_mlp, 1))
    if model.kind in ("xdeepfm", "autoint"):
        weighed = num_terms - (model.kind == "xdeepfm")
        counts.linear(weighed, 1, has_bias=False)
        counts.output_width += weighed


@frozen
class TaskLayers:
    """The layers between the interaction and several tasks, and what their gates mix."""

    sizes: tuple[tuple[int, int], ...]  # Width in and out of each linear layer.
    mixed_width: int  # Values of a sample that gates weight, over all gates.


def task_layers_of(model: ModelSpec, width: int) -> TaskLayers:
    """Return the layers of `model.task_head` over inputs of one width, as the trainer builds them."""
    num_tasks, num_shared, num_own = len(model.tasks), model.num_experts, model.num_task_experts
    sizes: list[tuple[int, int]] = []
    mixed = 0
    after = model.top_mlp[-1] if model.top_mlp else width
    if model.task_head == "shared_bottom":
        sizes += _widths(width, model.top_mlp)
    elif model.task_head == "mmoe":
        sizes += num_shared * _widths(width, model.top_mlp) + num_tasks * [(width, num_shared)]
        mixed = num_tasks * num_shared * after
    else:
        for number in range(model.num_extraction_layers):
            sizes += (num_shared + num_tasks * num_own) * _widths(width, model.top_mlp)
            sizes += num_tasks * [(width, num_own + num_shared)]
            mixed += num_tasks * (num_own + num_shared) * after
            if number < model.num_extraction_layers - 1:
                sizes.append((width, num_tasks * num_own + num_shared))
                mixed += (num_tasks * num_own + num_shared) * after
            width = after
    for task in model.tasks:
        sizes += _widths(after, (*model.tower_mlp, task.num_outputs))
    return TaskLayers(tuple(sizes), mixed)


def _widths(width: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((width, *sizes), sizes, strict=False))

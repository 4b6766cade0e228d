"""Models as they are trained: sharded tables, and a dense network over what they give."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.overrides import TorchFunctionMode
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embark.spec import ModelSpec, StoredTable, TrainSpec
from .batch import DeviceBatch
from .networks import dense_network
from .networks.field_networks import of_members
from .networks.jagged import JaggedSequence
from .task_metrics import TaskLoss

torch.fx.wrap("of_members")  # the train pipeline traces the model; whether it trains is known only when it runs


class Recommender(nn.Module):
    """Tables whose rows are pooled, and a dense network over them. Its output is what a train pipeline wants: loss and
    rest."""

    def __init__(self, model: ModelSpec, train: TrainSpec, device: torch.device, *, is_bf16: bool) -> None:
        super().__init__()
        self.tables = tables_without_values(model.stored_tables(), train)
        self.names = [t.name for t in model.table_list()]
        self.dense = dense_network(model).to(device)
        self.is_bf16 = is_bf16
        self.device_type = device.type
        self.loss = TaskLoss(model.tasks) if model.tasks else nn.BCEWithLogitsLoss()
        self.has_members = model.kind == "tabm"
        self.embedding_l2 = train.embedding_l2

    def forward(self, batch: DeviceBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        pooled = ordered_values(self.tables(batch.sparse), self.names)
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.is_bf16):
            logits = self.dense(batch.dense, pooled)
        logits = logits.float()
        if self.has_members:
            logits, losses = of_members(logits, batch.label)
        loss = minimized = self.loss(logits, batch.label)
        if self.has_members:
            minimized = losses.mean()
        if self.embedding_l2:
            minimized = minimized + self.embedding_l2 / 2 * pooled.float().square().sum(dim=1).mean()
        return minimized, (loss.detach(), logits.detach(), batch.label)


@torch.fx.wrap  # the train pipeline traces the model; the order of keys is known only when it runs
def ordered_values(pooled: KeyedTensor, names: list[str]) -> Tensor:
    """Return [B, sum of widths] in the order of `names`: a sharded collection has an order of its own."""
    if pooled.keys() == names:
        return pooled.values()
    # The gradient of a split is one concatenation; that of `pooled[name]` is a sum of the full width for each table.
    parts = dict(zip(pooled.keys(), pooled.values().split(pooled.length_per_key(), dim=1), strict=True))
    return torch.cat([parts[name] for name in names], dim=1)


def tables_without_values(tables: Iterable[StoredTable], train: TrainSpec) -> EmbeddingBagCollection:
    """Make tables on `meta`, so that no rank ever holds a table whole: sharding gives each its part."""
    tables = list(tables)
    is_weighted = any(feature.weights_column for table in tables for feature in table.features)
    with WithoutValues():
        return EmbeddingBagCollection(tables=[_config(t, train, is_weighted=is_weighted) for t in tables],
                                      device=torch.device("meta"), is_weighted=is_weighted)


class WithoutValues(TorchFunctionMode):
    """Skips the initial values of tables, which `fill_tables` draws.

    TorchRec would draw them twice. On `meta` there are none to set; where torch sets them all the same, it computes
    shapes and strides in Python, and loads its compiler for that.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        if func in (nn.init.uniform_, Tensor.uniform_):
            return tensor
        if isinstance(tensor, Tensor) and tensor.is_meta:
            if func in (nn.init.normal_, Tensor.normal_):
                return tensor
            if func is torch.full_like:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if func is Tensor.mean and kwargs == {"axis": 1}:  # row-wise Adagrad's state
                return torch.empty(tensor.shape[:1], dtype=tensor.dtype, device="meta")
        return func(*args, **kwargs)


def _config(table: StoredTable, train: TrainSpec, *, is_weighted: bool) -> EmbeddingBagConfig:
    """Describe a table to TorchRec. Where ids have weights, rows are summed: the weights of a mean are shares of the
    whole (`weights_in_sum`)."""
    return EmbeddingBagConfig(
        name=table.name, embedding_dim=table.dim, num_embeddings=table.rows,
        feature_names=[feature.name for feature in table.features],
        pooling=PoolingType.MEAN if table.pooling == "mean" and not is_weighted else PoolingType.SUM,
        data_type=data_type_of(table, train),
    )


def data_type_of(table: StoredTable, train: TrainSpec) -> DataType:
    """Return the type of a table's rows."""
    return DataType[(table.dtype or train.table_dtype).upper()]


ROWS_PER_BLOCK = 65_536


def fill_tables(tables: nn.Module, model: ModelSpec, seed: int) -> None:
    """Fill the local shards of every table, uniform in ±`init_range`."""
    by_name = {t.name: t for t in model.stored_tables()}
    blocks = [partial(_fill_block, block, shard, row, column, by_name[name.split(".")[-2]], seed)
              for name, shard, row, column in local_shards(tables)
              for block in range(row // ROWS_PER_BLOCK, -(-(row + shard.shape[0]) // ROWS_PER_BLOCK))]
    if any(block.args[1].is_cuda for block in blocks):
        for block in blocks:
            block()
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # a CPU draws in one thread
        for filled in [threads.submit(block) for block in blocks]:
            filled.result()


def local_shards(tables: nn.Module) -> Iterator[tuple[str, Tensor, int, int]]:
    """Yield this rank's parts: the parameter's name, the values, and where in the whole table they begin."""
    for name, value in tables.state_dict().items():
        if not name.endswith(".weight"):
            continue
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                yield name, shard.tensor, row, column
        else:  # data-parallel
            yield name, value, 0, 0


@torch.no_grad()
def _fill_block(block: int, shard: Tensor, first_row: int, first_column: int, table: StoredTable, seed: int) -> None:
    """Fill a block from a generator of its own, so that any shard of a block takes the same numbers."""
    bound = math.sqrt(1 / table.rows) if table.init_range is None else table.init_range
    start, stop = block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, table.rows)
    generator = torch.Generator(device=shard.device)
    generator.manual_seed(zlib.crc32(f"{seed}/{table.name}/{block}".encode()))
    values = torch.empty(stop - start, table.dim, device=shard.device)
    values.uniform_(-bound, bound, generator=generator)
    low, high = max(start, first_row), min(stop, first_row + shard.shape[0])
    shard[low - first_row : high - first_row] = values[
        low - start : high - start, first_column : first_column + shard.shape[1]
    ]


class SequenceRecommender(nn.Module):
    """A `Recommender` with sequences.

    A table that some feature reads as a sequence is looked up row by row for all of its features.
    """

    def __init__(self, model: ModelSpec, train: TrainSpec, device: torch.device, *, is_bf16: bool) -> None:
        super().__init__()
        stored = model.stored_tables()
        pooled = [table for table in stored if not table.is_sequence]
        self.tables = tables_without_values(pooled, train) if pooled else None
        self.sequences = sequence_tables_without_values([table for table in stored if table.is_sequence], train)
        self.pooled_names = [feature.name for table in pooled for feature in table.features]
        self.unpooled = [(feature.name, feature.is_sequence, feature.lookup) for feature in model.table_list()
                         if feature.name not in self.pooled_names]
        self.dense = dense_network(model).to(device)
        self.is_next_item = model.is_next_item
        self.is_bf16, self.device_type = is_bf16, device.type

    def forward(self, batch: DeviceBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        pooled = self.tables(batch.sparse) if self.tables is not None else None
        rows = self.sequences(batch.sparse)
        by_name, sequences = network_inputs(pooled, self.pooled_names, rows, batch.sparse, self.unpooled)
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.is_bf16):
            logits = self.dense(batch.dense, by_name, sequences)
        return loss_and_predictions(logits, batch.label, self.is_next_item)


@torch.fx.wrap  # the train pipeline traces the model; a batch's features are known only when it runs
def network_inputs(
    pooled: KeyedTensor | None, pooled_names: list[str], rows: dict[str, JaggedTensor], ids: KeyedJaggedTensor,
    unpooled: list[tuple[str, bool, bool]],
) -> tuple[dict[str, Tensor], dict[str, JaggedSequence]]:
    """Return, by feature, one vector for each sample, and sequences.

    `unpooled` has names, whether each is a sequence, and whether it is looked up.
    """
    by_name = {name: pooled[name] for name in pooled_names} if pooled is not None else {}
    looked_up, sequences = dict(rows.items()), dict[str, JaggedSequence]()
    for name, is_sequence, is_looked_up in unpooled:
        own = ids[name]
        offsets = own.offsets()
        values = looked_up[name].values() if is_looked_up else own.values()
        if is_sequence:
            sequences[name] = JaggedSequence(values, offsets, own.values())
        elif len(values) == len(offsets) - 1:  # one id for each sample
            by_name[name] = values
        else:
            by_name[name] = torch.segment_reduce(values.float(), "sum", offsets=offsets, initial=0.0)
    return by_name, sequences


@torch.fx.wrap
def loss_and_predictions(
    logits: Tensor, label: Tensor, is_next_item: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return what a train pipeline wants: loss and rest.

    A model of the next item gives, in training, the log-odds of each position, of which ranks have different numbers;
    each rank's loss is its share of the mean over all of them. In evaluation it gives vectors, which have no loss yet.
    """
    logits = logits.float()
    if not is_next_item:
        loss = binary_cross_entropy_with_logits(logits, label)
    elif logits.ndim == 2:
        loss = logits.new_zeros(())
    else:
        label = torch.ones_like(logits)
        count = torch.tensor(float(len(logits)), device=logits.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(count)
            count /= dist.get_world_size()
        loss = softplus(-logits).sum() / count.clamp(min=1)
    return loss, (loss.detach(), logits.detach(), label)


def sequence_tables_without_values(tables: Iterable[StoredTable], train: TrainSpec) -> EmbeddingCollection:
    """Make tables whose rows are not pooled on `meta`: sharding gives each rank its part."""
    with WithoutValues():
        return EmbeddingCollection(tables=[
            EmbeddingConfig(name=table.name, embedding_dim=table.dim, num_embeddings=table.rows,
                            data_type=data_type_of(table, train),
                            feature_names=[feature.name for feature in table.features]) for table in tables
        ], device=torch.device("meta"))


def table_collections(model: ModelSpec, train: TrainSpec) -> nn.Module:
    """Make all tables of a model on `meta`."""
    stored = model.stored_tables()
    pooled, sequences = [t for t in stored if not t.is_sequence], [t for t in stored if t.is_sequence]
    if not sequences:
        return tables_without_values(pooled, train)
    found: list[nn.Module] = [tables_without_values(pooled, train)] if pooled else []
    return nn.ModuleList([*found, sequence_tables_without_values(sequences, train)])

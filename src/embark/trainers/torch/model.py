"""DLRM and DLRM-DCNv2 around one `EmbeddingBagCollection`."""

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from embark.spec import ModelSpec, Table, TrainSpec
from embark.trainers.torch.batch import DeviceBatch


class Recommender(nn.Module):
    """Tables, and a dense network over what they give. Its output is what a train pipeline wants: loss and rest."""

    def __init__(self, model: ModelSpec, train: TrainSpec, device: torch.device, *, is_bf16: bool) -> None:
        super().__init__()
        tables = model.table_list()
        self.tables = tables_without_values(tables, train)
        self.names = [t.name for t in tables]
        self.dense = dense_network(model).to(device)
        self.is_bf16 = is_bf16
        self.device_type = device.type
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: DeviceBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        pooled = ordered_values(self.tables(batch.sparse), self.names)
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.is_bf16):
            logits = self.dense(batch.dense, pooled)
        logits = logits.float()
        loss = self.loss(logits, batch.label)
        return loss, (loss.detach(), logits.detach(), batch.label)


@torch.fx.wrap  # the train pipeline traces the model; the order of keys is known only when it runs
def ordered_values(pooled: KeyedTensor, names: list[str]) -> Tensor:
    """[B, sum of widths] in the order of `names`: a sharded collection has an order of its own."""
    if pooled.keys() == names:
        return pooled.values()
    return torch.cat([pooled[name] for name in names], dim=1)


def tables_without_values(tables: Iterable[Table], train: TrainSpec) -> EmbeddingBagCollection:
    """On `meta`, so that no rank ever holds a table whole: sharding gives each its part."""
    return EmbeddingBagCollection(tables=[_config(t, train) for t in tables], device=torch.device("meta"))


def dense_network(model: ModelSpec) -> nn.Module:
    """The part that every rank holds whole."""
    return CrossNetwork(model) if model.kind == "dcnv2" else DotNetwork(model)


class DotNetwork(nn.Module):
    """DLRM: bottom MLP, dot products of all pairs, top MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.dim = model.embedding_dim
        self.num_vectors = len(model.table_list()) + bool(model.num_dense)
        self.bottom = _bottom(model)
        self.dots = PairwiseDots(self.num_vectors)
        num_dots = self.num_vectors * (self.num_vectors - 1) // 2
        # Without dense features the vectors themselves stand where the bottom MLP's output would.
        passed_on = self.dim if self.bottom is not None else self.dim * self.num_vectors
        self.top = _mlp(passed_on + num_dots, (*model.top_mlp, 1), ends_linear=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        passed_on = pooled
        if self.bottom is not None:
            passed_on = self.bottom(dense)
            pooled = torch.cat([passed_on, pooled.to(passed_on.dtype)], dim=1)
        dots = self.dots(pooled.reshape(-1, self.num_vectors, self.dim))
        return self.top(torch.cat([passed_on, dots], dim=1)).squeeze(1)


class CrossNetwork(nn.Module):
    """DLRM-DCNv2: bottom MLP, low-rank cross layers over all of it, top MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.bottom = _bottom(model)
        width = sum(t.dim or 0 for t in model.table_list()) + (model.embedding_dim if self.bottom is not None else 0)
        rank = min(model.cross_rank, width)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(model.num_cross_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(model.num_cross_layers))
        self.top = _mlp(width, (*model.top_mlp, 1), ends_linear=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        first = pooled if self.bottom is None else torch.cat([self.bottom(dense), pooled], dim=1)
        crossed = first
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        return self.top(crossed).squeeze(1)


def _bottom(model: ModelSpec) -> nn.Module | None:
    return _mlp(model.num_dense, (*model.bottom_mlp, model.embedding_dim)) if model.num_dense else None


def _mlp(width: int, sizes: tuple[int, ...], *, ends_linear: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*(layers[:-1] if ends_linear else layers))


def _config(table: Table, train: TrainSpec) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name, embedding_dim=table.dim or 0, num_embeddings=table.rows, feature_names=[table.name],
        pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
        data_type=DataType.FP16 if train.table_dtype == "fp16" else DataType.FP32,
    )


class PairwiseDots(nn.Module):
    """`[batch, F, D]` vectors to the `[batch, F * (F - 1) / 2]` dots of pairs i < j, by rows.

    Autograd's way back from picking the upper triangle is a scatter, two batched products and a sum, and costs several
    times the forward pass. The gradient of the full matrix is symmetric, so here it is one gather and one product.
    """

    pair_cells: Tensor  # Cell of the flattened F x F matrix that holds each pair.
    cell_pairs: Tensor  # Pair that each cell holds, either way round; the diagonal's zeros mean nothing.

    def __init__(self, num_vectors: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if num_vectors < 1:
            raise ValueError(f"PairwiseDots needs at least one vector, got {num_vectors}.")
        self.num_vectors = num_vectors
        self.num_pairs = num_vectors * (num_vectors - 1) // 2
        pair_cells = torch.empty(self.num_pairs, dtype=torch.int64, device=device)
        cell_pairs = torch.empty(num_vectors**2, dtype=torch.int64, device=device)
        self.register_buffer("pair_cells", pair_cells, persistent=False)
        self.register_buffer("cell_pairs", cell_pairs, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the index buffers; DMP calls this after it moves a module off `meta`."""
        first, second = torch.triu_indices(self.num_vectors, self.num_vectors, 1, device="cpu")
        pairs = torch.arange(self.num_pairs, device="cpu")
        cell_pairs = torch.zeros(self.num_vectors, self.num_vectors, dtype=torch.int64, device="cpu")
        cell_pairs[first, second] = pairs
        cell_pairs[second, first] = pairs
        self.pair_cells.copy_(first * self.num_vectors + second)
        self.cell_pairs.copy_(cell_pairs.view(-1))

    def forward(self, vectors: Tensor) -> Tensor:
        if self.num_vectors == 1:
            return vectors[:, 0, :0]
        if isinstance(vectors, torch.fx.Proxy):
            # Traced for serving: plain operations, which TorchScript can hold.
            return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pair_cells)
        dots: Tensor = _Dots.apply(_as_autocast(vectors), self.pair_cells, self.cell_pairs)
        return dots


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pair_cells: Tensor, cell_pairs: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, cell_pairs)
        cells = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        # On a CPU in bfloat16 three times as fast as index_select.
        return cells.gather(1, pair_cells.expand(cells.shape[0], -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        vectors, cell_pairs = ctx.saved_tensors
        num_vectors = vectors.shape[1]
        cells = grad.gather(1, cell_pairs.expand(grad.shape[0], -1))
        cells = cells.view(-1, num_vectors, num_vectors)
        cells.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(cells, vectors), None, None


def _as_autocast(vectors: Tensor) -> Tensor:
    """Cast once, for both directions: autocast would only cast inside the product."""
    device_type = vectors.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return vectors.to(torch.get_autocast_dtype(device_type))
    return vectors


ROWS_PER_BLOCK = 65_536


def fill_tables(tables: nn.Module, model: ModelSpec, seed: int) -> None:
    """Fill the local shards of every table, uniform in ±sqrt(1 / rows) as TorchRec itself does."""
    by_name = {t.name: t for t in model.table_list()}
    with torch.no_grad():
        for name, shard, first_row, first_column in local_shards(tables):
            _fill(shard, first_row, first_column, by_name[name.split(".")[-2]], seed)


def local_shards(tables: nn.Module) -> Iterator[tuple[str, Tensor, int, int]]:
    """This rank's parts: the parameter's name, the values, and where in the whole table they begin."""
    for name, value in tables.state_dict().items():
        if not name.endswith(".weight"):
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield name, shard.tensor, row, column


def _fill(shard: Tensor, first_row: int, first_column: int, table: Table, seed: int) -> None:
    """Block by block, each from a generator of its own, so that any shard of a block takes the same numbers."""
    bound = math.sqrt(1 / table.rows)
    generator = torch.Generator(device=shard.device)
    end = first_row + shard.shape[0]
    for block in range(first_row // ROWS_PER_BLOCK, -(-end // ROWS_PER_BLOCK)):
        start, stop = block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, table.rows)
        generator.manual_seed(zlib.crc32(f"{seed}/{table.name}/{block}".encode()))
        values = torch.empty(stop - start, table.dim or 0, device=shard.device)
        values.uniform_(-bound, bound, generator=generator)
        low, high = max(start, first_row), min(stop, end)
        shard[low - first_row : high - first_row] = values[
            low - start : high - start, first_column : first_column + shard.shape[1]
        ]

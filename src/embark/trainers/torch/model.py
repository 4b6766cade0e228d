"""DLRM and DLRM-DCNv2 around one `EmbeddingBagCollection`."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from embark.spec import ModelSpec, Table, TrainSpec
from embark.trainers.torch.batch import DeviceBatch
from embark.trainers.torch.interaction import PairwiseDots


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
        name=table.name,
        embedding_dim=table.dim or 0,
        num_embeddings=table.rows,
        feature_names=[table.name],
        pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
        data_type=DataType.FP16 if train.table_dtype == "fp16" else DataType.FP32,
    )

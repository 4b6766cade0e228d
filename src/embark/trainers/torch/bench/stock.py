"""TorchRec as its own examples use it, at its best settings: what Embark is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch as StockBatch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from embark.data import Batch
from embark.errors import UserError
from embark.spec import RunSpec
from embark.trainers.torch.batch import ToDevice
from embark.trainers.torch.optimizers import DENSE_OPTIMIZERS, TABLE_OPTIMIZERS
from embark.trainers.torch.world import World

TABLES = "model.sparse_arch.embedding_bag_collection"


class Stock:
    """`DistributedModelParallel` and `TrainPipelineSparseDist` over TorchRec's own DLRM."""

    def __init__(self, spec: RunSpec, world: World, batches: list[Batch], *, is_bf16: bool) -> None:
        if not spec.model.num_dense:
            raise UserError("TorchRec's DLRM has no form without dense features", fix="set model.num_dense")
        self.name = f"stock TorchRec, {'bf16 autocast' if is_bf16 else 'fp32'}"
        self._is_bf16, self._device = is_bf16, world.device
        torch.manual_seed(0)
        model, optimizer = _sharded(spec, world)
        self._pipeline = TrainPipelineSparseDist(model, optimizer, world.device)
        to_device = ToDevice([t.name for t in spec.model.table_list()], world.device)
        made = [to_device(batch) for batch in batches]
        self._batches: Iterator[StockBatch] = cycle([StockBatch(b.dense, b.sparse, b.label) for b in made])

    def run(self, num_steps: int) -> None:
        """Train so many steps."""
        for _ in range(num_steps):
            # Within the loop: a context keeps its casts of the weights until it ends.
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16):
                self._pipeline.progress(self._batches)

    def close(self) -> None:
        """Nothing of it runs beside the caller."""


def _sharded(spec: RunSpec, world: World) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model, train = spec.model, spec.train
    tables = EmbeddingBagCollection(
        [EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim or 0, feature_names=[t.name],
            pooling=PoolingType.MEAN if t.pooling == "mean" else PoolingType.SUM,
        ) for t in model.table_list()],
        device=torch.device("meta"),
    )
    layers = {
        "embedding_bag_collection": tables, "dense_in_features": model.num_dense,
        "dense_arch_layer_sizes": [*model.bottom_mlp, model.embedding_dim],
        "over_arch_layer_sizes": [*model.top_mlp, 1], "dense_device": world.device,
    }
    if model.kind == "dcnv2":
        whole = DLRM_DCN(**layers, dcn_num_layers=model.num_cross_layers, dcn_low_rank_dim=model.cross_rank)
    else:
        whole = DLRM(**layers)
    trained = DLRMTrain(whole)
    ebc = trained.get_submodule(TABLES)
    apply_optimizer_in_backward(TABLE_OPTIMIZERS[train.optimizer], ebc.parameters(), {"lr": train.learning_rate})
    sharder = EmbeddingBagCollectionSharder()
    kind = world.device.type
    plan = construct_module_sharding_plan(
        ebc, {t.name: table_wise(rank=0, device=kind, compute_kernel="fused") for t in model.table_list()}, sharder,
        world_size=1, device_type=kind,
    )
    sharded = DistributedModelParallel(
        trained, device=world.device, plan=ShardingPlan({TABLES: plan}), sharders=[sharder]
    )
    is_fused = world.device.type == "cpu" or train.dense_optimizer != "adagrad"
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: DENSE_OPTIMIZERS[train.dense_optimizer](
            parameters, lr=train.learning_rate, fused=is_fused or None
        ),
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])

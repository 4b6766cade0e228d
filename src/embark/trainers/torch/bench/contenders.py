"""Contenders of `embark bench`: Embark's own step, and TorchRec as its own examples use it, at its best settings."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

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

from embark.data import Batch, SampleSource
from embark.errors import UserError
from embark.spec import RunSpec
from embark.trainers.bench import ENDLESS
from embark.trainers.torch.batch import ToDevice
from embark.trainers.torch.engines.cuda_graph.batch_layout import HostBuffer
from embark.trainers.torch.engines.cuda_graph.engine import CudaGraphEngine
from embark.trainers.torch.optimizers import DENSE_OPTIMIZERS, TABLE_OPTIMIZERS
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import World

TABLES = "model.sparse_arch.embedding_bag_collection"


class TorchContender:
    """A contender on one device."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def close(self) -> None:
        """Free the device for the next one."""
        self.__dict__ = {"name": self.name, "device": self.device}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


class Embark(TorchContender):
    """This trainer's step, as `embark train` runs it. Fed by its own loader, or from `num_batches` batches that are in
    host memory before the clock starts; every step copies its batch to the device. TorchRec's own pipeline `is_stock`:
    TorchRec has no custom model to compare with."""

    def __init__(
        self, spec: RunSpec, world: World, source: SampleSource, num_batches: int = 0, *, is_stock: bool = False
    ) -> None:
        self.trainer = TorchTrainer(spec, world, ENDLESS, source)
        origin = "from memory" if num_batches else "from its loader"
        name = "TorchRec's pipeline, {}" if is_stock else f"Embark, {self.trainer.engine.name}, {{}}, {origin}"
        super().__init__(name.format(self.trainer.precision), world.device)
        self._step = 0
        self._open = ExitStack()
        self._batches: Iterator[Any] = self._open.enter_context(self.trainer.feed(source, 0, ENDLESS))
        if num_batches:
            self._batches = cycle([_detached(batch, self.trainer) for batch in islice(self._batches, num_batches)])
            self._open.close()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.trainer.step(self._batches, self._step)
            self._step += 1

    def close(self) -> None:
        self._open.close()
        super().close()


class Stock(TorchContender):
    """`DistributedModelParallel` and `TrainPipelineSparseDist` over TorchRec's own DLRM."""

    def __init__(self, spec: RunSpec, world: World, batches: list[Batch], *, is_bf16: bool) -> None:
        if not spec.model.num_dense:
            raise UserError("TorchRec's DLRM has no form without dense features", "set model.num_dense")
        super().__init__(f"stock TorchRec, {'bf16 autocast' if is_bf16 else 'fp32'}", world.device)
        self._is_bf16 = is_bf16
        torch.manual_seed(0)
        model, optimizer = _sharded(spec, world)
        self._pipeline = TrainPipelineSparseDist(model, optimizer, world.device)
        to_device = ToDevice([t.name for t in spec.model.table_list()], world.device)
        made = [to_device(batch) for batch in batches]
        self._batches: Iterator[StockBatch] = cycle([StockBatch(b.dense, b.sparse, b.label) for b in made])

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            # Within the loop: a context keeps its casts of the weights until it ends.
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_bf16):
                self._pipeline.progress(self._batches)


def _detached(batch: Any, trainer: TorchTrainer) -> Any:
    """Copy a batch so that it outlives its loader, in host memory."""
    if not isinstance(trainer.engine, CudaGraphEngine):
        return batch
    if isinstance(batch, HostBuffer) and batch.shape is not None:
        kept = torch.empty_like(batch.buffer, pin_memory=trainer.world.device.type == "cuda").copy_(batch.buffer)
        batch.release(None)  # its loader writes the next batch there
        return replace(batch, buffer=kept, release=lambda event: None)
    slot = torch.empty(trainer.engine.layout.size_bytes, dtype=torch.uint8, device=trainer.world.device)
    batch.write(slot)
    batch.release(None)
    batch.correct(slot)
    copy = slot.cpu()
    return HostBuffer(copy.pin_memory() if slot.is_cuda else copy, lambda event: None, batch.num_batches)


def _sharded(spec: RunSpec, world: World) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model, train = spec.model, spec.train
    tables = EmbeddingBagCollection(
        [EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f.name for f in t.features],
            pooling=PoolingType.MEAN if t.pooling == "mean" else PoolingType.SUM,
        ) for t in model.stored_tables()],
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
        ebc, {t.name: table_wise(rank=0, device=kind, compute_kernel="fused") for t in model.stored_tables()}, sharder,
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

"""The model of a spec, sharded over the ranks, with its optimizers and its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel

from embark.spec import RunSpec
from embark.train.cpu_lookup import use_fast_cpu_lookup
from embark.train.engine import PipelineEngine
from embark.train.initial import fill_tables
from embark.train.model import Recommender
from embark.train.optimizers import Optimizers, fuse_into_backward, make_optimizers
from embark.train.precision import choose_precision, set_matmul_precision
from embark.train.sharding import describe, make_plan, make_sharder
from embark.train.world import World


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that learns."""

    model: DistributedModelParallel
    optimizers: Optimizers
    engine: PipelineEngine
    precision: str
    layout: dict[str, Any]
    """The sharding plan in plain values."""
    num_parameters: int


def build(spec: RunSpec, world: World, num_steps: int) -> Built:
    """Put it together in the order TorchRec needs: optimizer into backward, plan, shard, fill, pipeline."""
    torch.manual_seed(spec.train.seed)
    precision = choose_precision(spec.train, world.device)
    set_matmul_precision(precision)
    model = Recommender(spec.model, spec.train, world.device, is_bf16=precision == "bf16")
    fuse_into_backward(model.tables, spec.train)
    sharder = make_sharder(spec)
    plan = make_plan(model, sharder, spec, world)
    sharded = DistributedModelParallel(model, device=world.device, plan=plan, sharders=[sharder])
    fill_tables(sharded_tables(sharded), spec.model, spec.train.seed)
    if world.device.type == "cpu":
        use_fast_cpu_lookup(sharded)
    optimizers = make_optimizers(sharded, spec.train, num_steps, world.device)
    return Built(
        model=sharded,
        optimizers=optimizers,
        engine=PipelineEngine(sharded, optimizers, world.device),
        precision=precision,
        layout=describe(plan, spec),
        num_parameters=_num_parameters(spec, model),
    )


def sharded_tables(model: DistributedModelParallel) -> ShardedEmbeddingBagCollection:
    """The tables inside a sharded model."""
    return next(m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))


def _num_parameters(spec: RunSpec, model: Recommender) -> int:
    in_tables = sum(t.rows * (t.dim or 0) for t in spec.model.table_list())
    return in_tables + sum(p.numel() for p in model.dense.parameters())

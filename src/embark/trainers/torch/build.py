"""The model of a spec, sharded over the ranks, with its optimizers and its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from embark.data import Source
from embark.spec import RunSpec
from embark.trainers.torch.cpu_lookup import use_fast_cpu_lookup
from embark.trainers.torch.engine_selection import make_engine
from embark.trainers.torch.engines.pipeline import Engine
from embark.trainers.torch.initial import fill_tables
from embark.trainers.torch.metrics import MetricWindow
from embark.trainers.torch.model import Recommender
from embark.trainers.torch.optimizers import Optimizers, fuse_into_backward, make_optimizers
from embark.trainers.torch.precision import choose_precision, set_matmul_precision
from embark.trainers.torch.sharding import describe, make_plan, make_sharder, sharded_tables
from embark.trainers.torch.world import World


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that learns."""

    model: DistributedModelParallel
    optimizers: Optimizers
    engine: Engine
    window: MetricWindow
    """What the engine counts its predictions in."""
    precision: str
    layout: dict[str, Any]
    """The sharding plan in plain values."""
    num_parameters: int


def build(spec: RunSpec, world: World, num_steps: int, source: Source) -> Built:
    """Put it together in the order TorchRec needs: optimizer into backward, plan, shard, fill, pipeline."""
    torch.manual_seed(spec.train.seed)
    precision = choose_precision(spec.train, world.device)
    set_matmul_precision(precision)
    model = Recommender(spec.model, spec.train, world.device, is_bf16=precision == "bf16")
    fuse_into_backward(model.tables, spec.train)
    sharder = make_sharder(spec)
    plan = make_plan(model, sharder, spec, world)
    sharded = DistributedModelParallel(model, device=world.device, plan=plan, sharders=[sharder])
    if isinstance(sharded._dmp_wrapped_module, DistributedDataParallel):
        # Else it lays its buckets out anew after the first step, and sums over more than two ranks round otherwise
        # from then on: a run that was resumed would not be, bit for bit, the one that was not.
        sharded._dmp_wrapped_module.reducer._push_all_rebuilt_params()
    fill_tables(sharded_tables(sharded), spec.model, spec.train.seed)
    if world.device.type == "cpu":
        use_fast_cpu_lookup(sharded)
    optimizers = make_optimizers(sharded, spec.train, num_steps, world.device)
    window = MetricWindow(world.device)
    return Built(
        model=sharded,
        optimizers=optimizers,
        engine=make_engine(spec, world, plan, sharded, model, optimizers, precision, window, source),
        window=window,
        precision=precision,
        layout=describe(plan, spec),
        num_parameters=_num_parameters(spec, model),
    )


def _num_parameters(spec: RunSpec, model: Recommender) -> int:
    in_tables = sum(t.rows * (t.dim or 0) for t in spec.model.table_list())
    return in_tables + sum(p.numel() for p in model.dense.parameters())

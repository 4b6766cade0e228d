"""Which engine a run gets, and the sentence that says why."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from embark.data import Source
from embark.data.prepared.source import PreparedSource
from embark.errors import UserError
from embark.spec import RunSpec
from embark.trainers.torch.batch import ToDevice
from embark.trainers.torch.engines.cuda_graph.batch_layout import BatchLayout, PackedLayout, RawLayout
from embark.trainers.torch.engines.cuda_graph.engine import CudaGraphEngine, Parts
from embark.trainers.torch.engines.cuda_graph.local_shards import LocalShard, local_shards, planned
from embark.trainers.torch.engines.cuda_graph.lookup import why_not_by_kernels
from embark.trainers.torch.engines.pipeline import Engine, PipelineEngine
from embark.trainers.torch.metrics import MetricWindow
from embark.trainers.torch.model import Recommender
from embark.trainers.torch.optimizers import Optimizers
from embark.trainers.torch.sharding import has_tables_on_the_host, sharded_tables
from embark.trainers.torch.world import World

MAX_IDS_PER_SAMPLE = 1024
"""Past this the places kept for ids that most samples lack cost more than the launches saved."""


def make_engine(
    spec: RunSpec, world: World, plan: ShardingPlan, model: DistributedModelParallel, whole: Recommender,
    optimizers: Optimizers, precision: str, window: MetricWindow, source: Source,
) -> Engine:
    """The engine that `train.engine` asks for, or the one that `auto` finds right."""
    names = [t.name for t in spec.model.table_list()]
    shards = planned(plan, spec.model.table_list())
    mine = local_shards(sharded_tables(model), names, world.rank)
    why_not = next((why for why in world.gathered(_why_not(spec, world, mine)) if why), "")
    if spec.train.engine == "cuda_graph" and why_not:
        raise UserError(f"train.engine = \"captured\" cannot be: {why_not}",
                        fix='train.engine = "pipeline", or "auto", which chooses')
    is_gpu = world.device.type == "cuda"
    if spec.train.engine == "pipeline" or why_not or (spec.train.engine == "auto" and not is_gpu):
        asked = "asked for" if spec.train.engine == "pipeline" else why_not or "there is no GPU to capture the step on"
        on_host = has_tables_on_the_host(plan)
        if on_host:
            asked += ", and their rows are fetched one batch ahead"
        return PipelineEngine(model, optimizers, world.device, window, ToDevice(names, world.device),
                              f"TorchRec's pipeline; {asked}", must_prefetch=on_host)
    tables = spec.model.table_list()
    reason = "the whole step as one CUDA graph" if is_gpu else "the captured step, run one operation at a time: no GPU"
    form = _form(spec, source, spec.train.batch_size // world.world_size, world)
    if isinstance(form, RawLayout):
        reason += "; the device decodes the rows as they lie on disk"
    elif any(t.multi_hot > 1 for t in tables) and not (spec.data.kind == "synthetic" and not spec.data.ragged):
        reason += "; a sample with fewer ids than multi_hot is padded"
    return CudaGraphEngine(
        Parts(spec, world, model, whole.dense, optimizers, shards, mine, precision), form, window, reason
    )


def _form(spec: RunSpec, source: Source, num_samples: int, world: World) -> BatchLayout:
    """Raw bytes where the source has blocks of one shape, for the very tables of the model; else packed."""
    tables = spec.model.table_list()
    if isinstance(source, PreparedSource) and source.layout.is_fixed:
        stored = {f.name: f.multi_hot for f in source.layout.features}
        if all(stored.get(t.name) == t.multi_hot for t in tables):
            return RawLayout(source.layout, [t.name for t in tables], num_samples, world.device)
    return PackedLayout(num_samples, spec.model.num_dense, tuple(t.multi_hot for t in tables))


def _why_not(spec: RunSpec, world: World, mine: Sequence[LocalShard]) -> str:
    """What stands against the captured engine on this rank."""
    if spec.train.optimizer == "adam":
        return "fused Adam counts its steps on the host"
    num_ids = sum(t.multi_hot for t in spec.model.table_list())
    if num_ids > MAX_IDS_PER_SAMPLE:
        return f"up to {num_ids} ids a sample, each with a place in the graph, are too many"
    return why_not_by_kernels(mine) if world.device.type == "cuda" else ""

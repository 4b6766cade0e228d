"""Which engine a run gets, and the sentence that says why."""

from embark.data import Source
from embark.data.prepared.source import PreparedSource
from embark.model.engine_selection import cuda_graph_obstacle, select_engine
from embark.spec import RunSpec
from embark.trainers.torch.engines.cuda_graph.batch_layout import BatchLayout, PackedLayout, RawLayout
from embark.trainers.torch.engines.cuda_graph.engine import CudaGraphEngine
from embark.trainers.torch.engines.cuda_graph.local_shards import local_shards, planned
from embark.trainers.torch.engines.cuda_graph.lookup import why_not_by_kernels
from embark.trainers.torch.engines.pipeline import Engine, EngineInputs, PipelineEngine
from embark.trainers.torch.sharding import has_tables_on_the_host, sharded_tables
from embark.trainers.torch.world import World


def make_engine(inputs: EngineInputs, source: Source) -> Engine:
    """The engine that `train.engine` asks for, or the one that `auto` chooses."""
    spec, world = inputs.spec, inputs.world
    tables = spec.model.table_list()
    names = [t.name for t in tables]
    mine = local_shards(sharded_tables(inputs.model), names, world.rank)
    device, on_host = world.device.type, has_tables_on_the_host(inputs.plan)
    obstacle = cuda_graph_obstacle(spec, device, has_tables_on_host=on_host) or (
        why_not_by_kernels(mine) if device == "cuda" else "")
    obstacle = next((of_rank for of_rank in world.gathered(obstacle) if of_rank), "")
    engine, reason = select_engine(spec, device, obstacle)
    if engine == "pipeline":
        if on_host:
            reason += ", and their rows are fetched one batch ahead"
        return PipelineEngine(inputs, f"TorchRec's pipeline; {reason}", must_prefetch=on_host)
    layout = _batch_layout(spec, source, spec.train.batch_size // world.world_size, world)
    if isinstance(layout, RawLayout):
        reason += "; the device decodes the rows as they lie on disk"
    elif any(t.multi_hot > 1 for t in tables) and not (spec.data.kind == "synthetic" and not spec.data.ragged):
        reason += "; a sample with fewer ids than multi_hot is padded"
    return CudaGraphEngine(inputs, planned(inputs.plan, tables), mine, layout, reason)


def _batch_layout(spec: RunSpec, source: Source, num_samples: int, world: World) -> BatchLayout:
    """Raw bytes where the source has blocks of one shape, for the very tables of the model; else packed."""
    tables = spec.model.table_list()
    if isinstance(source, PreparedSource) and source.layout.is_fixed:
        stored = {f.name: f.multi_hot for f in source.layout.features}
        if all(stored.get(t.name) == t.multi_hot for t in tables):
            return RawLayout(source.layout, [t.name for t in tables], num_samples, world.device)
    return PackedLayout(num_samples, spec.model.num_dense, tuple(t.multi_hot for t in tables))

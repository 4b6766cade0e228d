"""TorchRec's own planner for hypothetical machines: no process group, no GPU, no table in memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

from embark.model.placement import Cluster, Memory, Placement, Shard, TooLarge
from embark.spec import RunSpec
from embark.trainers.torch.model import tables_without_values
from embark.trainers.torch.optimizers import fuse_into_backward
from embark.trainers.torch.sharding import first_line, first_plan, make_sharder, topology_of
from embark.trainers.torch.world import World


def offline_plan(spec: RunSpec, cluster: Cluster) -> Placement:
    """What the trainer would plan on such machines: a `Planner`. TorchRec's own rates apply, as in a run."""
    is_cpu = cluster.device == "cpu"
    local_size = min(cluster.ranks_per_host, cluster.num_ranks)
    world = World(0, cluster.num_ranks, 0, local_size, torch.device("cpu" if is_cpu else "cuda"))
    tables = tables_without_values(spec.model.table_list(), spec.train)
    fuse_into_backward(tables, spec.train)
    with _quiet_planner():
        topology = topology_of(world, 0 if is_cpu else int(cluster.device_bytes), int(cluster.host_bytes))
        try:
            plan = first_plan(spec, world, topology, lambda planner: planner.plan(tables, [make_sharder(spec)]))
        except PlannerError as error:
            raise TooLarge(f"TorchRec's planner found no placement for the tables: {first_line(error)}") from error
    return _placement(plan, spec, cluster)


def _placement(plan: ShardingPlan, spec: RunSpec, cluster: Cluster) -> Placement:
    of_tables = {name: sharding for parameters in plan.plan.values() for name, sharding in parameters.items()}
    names = [table.name for table in spec.model.table_list()]
    shards: list[Shard] = []
    for name in names:
        is_cached = of_tables[name].compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        memory: Memory = "host" if is_cached else "device"
        shards += [Shard(name, part.placement.rank(), part.shard_sizes[0], part.shard_sizes[1], memory=memory)
                   for part in of_tables[name].sharding_spec.shards if part.shard_sizes[0]]
    shardings = {name: of_tables[name].sharding_type for name in names}
    return Placement(cluster.num_ranks, tuple(shards), shardings, "TorchRec's planner")


@contextmanager
def _quiet_planner() -> Iterator[None]:
    """It logs warnings that are meant for its authors' own clusters."""
    logger = logging.getLogger("torchrec.distributed.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

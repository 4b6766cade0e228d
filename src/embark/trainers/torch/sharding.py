"""Which table, or which part of one, lives on which rank: TorchRec's planner, made to search the same way every time,
and in seconds where tables and ranks are many."""

import heapq
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Enumerator, PlannerError, Proposer, ShardingOption
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan

from embark.errors import UserError
from embark.model.placement import Cluster, Memory, Placement, Shard, TooLarge, table_value_bytes
from embark.model.sharding import (
    MAX_GRID,
    NUM_STRIDES,
    SHARDINGS,
    SearchRound,
    column_width,
    search_rounds,
    stride_ends,
)
from embark.run.host import host_bytes
from embark.spec import RunSpec, StoredTable
from embark.spec.sequence import EMBEDDING_SHARDINGS
from .model import table_collections
from .optimizers import fuse_into_backward
from .world import World


class AnywhereSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, with the row-wise types open on a CPU too: they run on gloo, and a plan made for a
    fleet can then be tried on a laptop."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*SHARDINGS, "data_parallel"]


class SequenceSharder(EmbeddingCollectionSharder):
    """`AnywhereSharder` for tables whose rows are not pooled."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind for kind in EMBEDDING_SHARDINGS if kind != "auto"]


def make_sharders(spec: RunSpec) -> list[Any]:
    """Make the sharders of all tables of the model, with the precision of transfers between ranks."""
    registry: Any = None
    if spec.train.comms_dtype != "fp32":
        # Here, since it imports Triton.
        from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

        kind = CommType.FP16 if spec.train.comms_dtype == "fp16" else CommType.BF16
        registry = get_qcomm_codecs_registry(QCommsConfig(forward_precision=kind, backward_precision=kind))
    # FBGEMM knows no cache in bf16, and wants to know its type where there is none too.
    fused = {"cache_precision": SparseType.FP32} if spec.has_bf16_tables else None
    pooled = AnywhereSharder(fused_params=fused, qcomm_codecs_registry=registry)
    return [pooled, SequenceSharder(qcomm_codecs_registry=registry)] if spec.model.has_sequences else [pooled]


def make_plan(model: nn.Module, sharders: list[Any], spec: RunSpec, world: World) -> ShardingPlan:
    """Plan with TorchRec over this machine's true topology; the plan is the same on every rank."""
    try:
        return first_plan(spec, true_topology(world),
                          lambda planner: planner.collective_plan(model, sharders, dist.group.WORLD))
    except PlannerError as error:
        raise UserError(
            f"the tables do not fit {world.world_size} × {world.device_name}: {first_line(error)}",
            "more ranks, smaller tables, train.table_dtype = \"fp16\", or a smaller train.memory_reserve",
        ) from error


def first_plan(
    spec: RunSpec, topology: Topology, ask: Callable[[EmbeddingShardingPlanner], ShardingPlan]
) -> ShardingPlan:
    """Return the plan of the first search that finds one; raises the last search's `PlannerError`."""
    storage = topology.devices[0].storage
    cluster = Cluster(topology.world_size, topology.local_world_size, storage.hbm,
                      storage.ddr * topology.local_world_size, "cuda" if topology.compute_device == "cuda" else "cpu")
    *others, last = search_rounds(spec, cluster)
    with _without_root_handler():
        for search in others:
            with suppress(PlannerError):
                return ask(make_planner(spec, topology, search))
        return ask(make_planner(spec, topology, last))


@contextmanager
def _without_root_handler() -> Iterator[None]:
    """Silence TorchRec's planner, which warns for each data-parallel table that its parts are not described."""
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


def make_planner(spec: RunSpec, topology: Topology, search: SearchRound) -> EmbeddingShardingPlanner:
    """Make the planner that decides, here and for machines that are only thought of."""
    batch_size = max(1, spec.train.batch_size // topology.world_size)
    allowed = constraints(spec, search)
    return EmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size, enumerator=OrderedEnumerator(topology, batch_size, allowed),
        proposer=proposers(is_long=search.is_long), constraints=allowed,
        storage_reservation=FixedPercentageStorageReservation(spec.train.memory_reserve), stats=[], debug=False,
    )


def true_topology(world: World) -> Topology:
    """Return the topology of the machines this process runs on."""
    return topology_of(world, world.device_bytes, host_bytes())


def topology_of(world: World, device_bytes: int, host_bytes: int) -> Topology:
    """Return a topology; TorchRec's default would take all ranks for one host with 32 GB each.

    `host_bytes` are a whole host's.
    """
    return Topology(
        world_size=world.world_size, local_world_size=world.local_world_size, compute_device=world.device.type,
        hbm_cap=device_bytes, ddr_cap=host_bytes // world.local_world_size,
    )


def constraints(spec: RunSpec, search: SearchRound) -> dict[str, ParameterConstraints]:
    """Return what the planner may choose from, and how many ids to expect."""
    kernels = [EmbeddingComputeKernel.FUSED.value]
    if search.may_spill:
        kernels.append(EmbeddingComputeKernel.FUSED_UVM_CACHING.value)
    # Rows that live in the host's memory are fetched for the next batch while this one trains.
    cache = CacheParams(prefetch_pipeline=True) if search.may_spill else None
    return {
        table.name: ParameterConstraints(
            sharding_types=search.shardings[table.name],
            compute_kernels=[EmbeddingComputeKernel.DENSE.value] if table.is_data_parallel else kernels,
            pooling_factors=[float(feature.multi_hot) for feature in table.features],
            min_partition=column_width(table.dim), cache_params=None if table.is_data_parallel else cache,
        )
        for table in spec.model.stored_tables()
    }


def first_line(error: PlannerError) -> str:
    """Return what the planner says, without the advice below it."""
    return str(error).strip().splitlines()[0].strip()


def has_tables_on_the_host(plan: ShardingPlan) -> bool:
    """Return whether the devices hold some tables only as a cache."""
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return any(p.compute_kernel == kernel for parameters in plan.plan.values() for p in parameters.values())


def sharded_collections(model: nn.Module) -> list[nn.Module]:
    """Return all tables inside a sharded model."""
    return [m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)]


def sharded_tables(model: nn.Module) -> ShardedEmbeddingBagCollection:
    """Return the tables inside a sharded model that are pooled."""
    return next(m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))


def describe(plan: ShardingPlan, spec: RunSpec) -> dict[str, Any]:
    """Return the plan as plain values, which the `plan` event and `plan.txt` show."""
    sizes = {t.name: t for t in spec.model.stored_tables()}
    tables: list[dict[str, Any]] = []
    per_rank: dict[int, int] = {}
    for parameters in plan.plan.values():
        for name, sharding in sorted(parameters.items(), key=lambda item: list(sizes).index(item[0])):
            table, ranks = sizes[name], list(sharding.ranks)
            bytes_per_element = table_value_bytes(spec, table)
            for rank, rows, columns in shards_of(table, sharding):
                per_rank[rank] = per_rank.get(rank, 0) + rows * columns * bytes_per_element
            tables.append({
                "table": name, "rows": table.rows, "dim": table.dim, "sharding": sharding.sharding_type,
                "kernel": sharding.compute_kernel, "ranks": ranks,
                "bytes": table.rows * table.dim * bytes_per_element,
            })
    return {"tables": tables, "per_rank": [{"rank": r, "bytes": per_rank[r]} for r in sorted(per_rank)]}


def shards_of(table: StoredTable, sharding: ParameterSharding) -> Iterator[tuple[int, int, int]]:
    """Return rank, rows and columns of each shard."""
    if sharding.sharding_spec is None:  # data-parallel
        yield from ((rank, table.rows, table.dim) for rank in sharding.ranks or ())
        return
    for part in sharding.sharding_spec.shards:
        yield part.placement.rank(), *part.shard_sizes


def offline_plan(spec: RunSpec, cluster: Cluster) -> Placement:
    """Plan as the trainer would on such machines: a `Planner`. TorchRec's own rates apply, as in a run."""
    is_cpu = cluster.device == "cpu"
    local_size = min(cluster.ranks_per_host, cluster.num_ranks)
    world = World(0, cluster.num_ranks, 0, local_size, torch.device("cpu" if is_cpu else "cuda"))
    tables = table_collections(spec.model, spec.train)
    fuse_into_backward(tables, spec)
    topology = topology_of(world, 0 if is_cpu else int(cluster.device_bytes), int(cluster.host_bytes))
    try:
        plan = first_plan(spec, topology, lambda planner: planner.plan(tables, make_sharders(spec)))
    except PlannerError as error:
        raise TooLarge(f"TorchRec's planner found no placement for the tables: {first_line(error)}") from error
    return _placement(plan, spec, cluster)


def _placement(plan: ShardingPlan, spec: RunSpec, cluster: Cluster) -> Placement:
    of_tables = {name: sharding for parameters in plan.plan.values() for name, sharding in parameters.items()}
    tables = {table.name: table for table in spec.model.stored_tables()}
    shards: list[Shard] = []
    for name, table in tables.items():
        is_cached = of_tables[name].compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        memory: Memory = "host" if is_cached else "device"
        shards += [Shard(name, rank, rows, columns, memory=memory)
                   for rank, rows, columns in shards_of(table, of_tables[name]) if rows]
    shardings = {name: of_tables[name].sharding_type for name in tables}
    return Placement(cluster.num_ranks, tuple(shards), shardings, "TorchRec's planner")


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, its options in the order in which the constraints name them.

    TorchRec takes them out of a set of strings. Among options that its estimate holds for equal, such as a table in the
    device's memory and one in the host's, the first wins: with one of Python's hash seeds three tables would go to the
    host, with another all of them.
    """

    def __init__(self, topology: Topology, batch_size: int, constraints: dict[str, ParameterConstraints]) -> None:
        super().__init__(topology, batch_size, constraints)
        self._named = constraints
        self._tables = {name: index for index, name in enumerate(constraints)}

    def enumerate(self, module: nn.Module, sharders: list[Any]) -> list[ShardingOption]:
        return sorted(super().enumerate(module, sharders), key=self._place)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate shards of one size once: of a table over 512 ranks, 511 are alike."""
        all_shards = [option.shards for option in sharding_options]
        for option, shards in zip(sharding_options, all_shards, strict=True):
            option.shards = list({tuple(shard.size): shard for shard in shards}.values())
        super().populate_estimates(sharding_options)
        for option, shards in zip(sharding_options, all_shards, strict=True):
            estimated = {tuple(shard.size): shard for shard in option.shards}
            for shard in shards:
                like = estimated[tuple(shard.size)]
                shard.storage, shard.perf = like.storage, like.perf
            option.shards = shards

    def _place(self, option: ShardingOption) -> tuple[int, int, int]:
        named = self._named[option.name]
        return (self._tables[option.name], named.compute_kernels.index(option.compute_kernel),
                named.sharding_types.index(option.sharding_type))


def proposers(*, is_long: bool) -> list[Proposer]:
    """Return TorchRec's proposers without the grid, which would take half a minute for eight tables on 128 ranks."""
    if is_long:
        return [LongStrides("part"), LongStrides("sum")]
    return [GridSearchProposer(MAX_GRID), GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]


class LongStrides(Proposer):
    """TorchRec's greedy proposer, in strides.

    It begins with each table's fastest option and turns to the next option of the table that takes the most memory, one
    step for each proposal. The first steps move the large tables and count the most: strides grow from one step.
    """

    def __init__(self, judged_by: Literal["part", "sum"]) -> None:
        self._judged_by = judged_by
        self._options: list[list[ShardingOption]] = []
        self._current: list[int] = []
        self._heap: list[tuple[Any, ...]] = []
        self._ends: Iterator[int] = iter(())
        self._num_steps = 0
        self._is_done = False

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.fqn, []).append(option)
        self._options = [sorted(options, key=self._cost) for options in by_table.values()]
        self._current = [0] * len(self._options)
        self._heap = []
        for index in range(len(self._options)):
            self._push(index)
        num_steps = sum(len(options) - 1 for options in self._options)
        self._ends = stride_ends(num_steps, NUM_STRIDES[self._judged_by])
        self._num_steps = 0
        self._is_done = not self._options

    def propose(self) -> list[ShardingOption] | None:
        if self._is_done:
            return None
        return [options[index] for options, index in zip(self._options, self._current, strict=True)]

    def feedback(self, *_results: Any, **_more: Any) -> None:
        end = next(self._ends, None)
        if end is None:
            self._is_done = True
            return
        while self._num_steps < end:
            index = heapq.heappop(self._heap)[-1]
            self._current[index] += 1
            self._num_steps += 1
            self._push(index)

    def _push(self, index: int) -> None:
        options, current = self._options[index], self._current[index]
        if current + 1 < len(options):
            hbm = [s.storage.hbm for s in options[current].shards]
            ddr = [s.storage.ddr for s in options[current].shards]
            heapq.heappush(self._heap, (-max(hbm), -sum(hbm), -max(ddr), -sum(ddr), index))

    def _cost(self, option: ShardingOption) -> float:
        costs = [s.perf.total for s in option.shards]
        return max(costs) if self._judged_by == "part" else sum(costs)

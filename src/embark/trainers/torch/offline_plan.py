"""TorchRec's own planner for hypothetical machines: no process group, no GPU, no table in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypedDict

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

from embark.spec import RunSpec
from embark.trainers.torch.model import tables_without_values
from embark.trainers.torch.optimizers import fuse_into_backward
from embark.trainers.torch.sharding import first_line, first_plan, make_sharder, topology_of
from embark.trainers.torch.world import World

ShardValues = tuple[str, int, int, int, Literal["device", "host"]]
"""Table, rank, rows, columns, and where the rows live."""


class OfflinePlan(TypedDict):
    """A sharding plan in plain values."""

    shards: list[ShardValues]
    """In the order of the spec's tables; those that hold rows."""
    shardings: dict[str, str]
    """By table."""


class DoesNotFit(ValueError):
    """The planner found no place for the tables. The text is its first line."""


def offline_plan(
    spec: RunSpec,
    *,
    num_ranks: int,
    ranks_per_host: int,
    device_bytes: float,
    host_bytes: float,
    device: Literal["cuda", "cpu"] = "cuda",
    intra_bytes_per_s: float = 0.0,
    inter_bytes_per_s: float = 0.0,
) -> OfflinePlan:
    """What the trainer would plan on such machines.

    `host_bytes` are a whole host's. A rate of 0 takes TorchRec's own, which is what the trainer plans by.
    """
    world = World(0, num_ranks, 0, min(ranks_per_host, num_ranks), torch.device(device))
    rates = {"intra_host_bw": intra_bytes_per_s / 1000, "inter_host_bw": inter_bytes_per_s / 1000}  # a millisecond
    known_rates = {name: rate for name, rate in rates.items() if rate}
    tables = tables_without_values(spec.model.table_list(), spec.train)
    fuse_into_backward(tables, spec.train)
    with _quiet_planner():
        topology = topology_of(world, int(device_bytes) if device == "cuda" else 0, int(host_bytes), **known_rates)
        try:
            plan = first_plan(spec, world, topology, lambda planner: planner.plan(tables, [make_sharder(spec)]))
        except PlannerError as error:
            raise DoesNotFit(first_line(error)) from error
    return _plain(plan, spec)


def _plain(plan: ShardingPlan, spec: RunSpec) -> OfflinePlan:
    of_tables = {name: sharding for parameters in plan.plan.values() for name, sharding in parameters.items()}
    names = [table.name for table in spec.model.table_list()]
    shards: list[ShardValues] = []
    for name in names:
        is_cached = of_tables[name].compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        for part in of_tables[name].sharding_spec.shards:
            num_rows, num_columns = part.shard_sizes
            if num_rows:
                shards.append((name, part.placement.rank(), num_rows, num_columns, "host" if is_cached else "device"))
    return {"shards": shards, "shardings": {name: of_tables[name].sharding_type for name in names}}


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

"""The dynamic tables of a run: raw ids of batches to rows, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from embark.data import Batch
from embark.data.dynamic_ids import NO_ID, SIGNED_STEP, mixed
from embark.errors import UserError
from embark.spec import RunSpec
from embark.trainers.torch.world import World
from .batch_ids import IdLayout, NewRows
from .id_map import IdMap


class DynamicTables:
    """Every rank has a part of the map, and gives rows to the ids of that part that the whole batch has: all parts
    together are the same at any number of ranks. The rows are sharded as those of any table."""

    def __init__(self, spec: RunSpec, world: World, sharded: ShardedEmbeddingBagCollection) -> None:
        self._world = world
        features = [table.name for table in spec.model.table_list()]
        stored = [table for table in spec.model.stored_tables() if table.is_dynamic]
        self.map = IdMap(stored, spec.train.seed, world)
        self.features = [[features.index(one.name) for one in table.features] for table in stored]
        """For each table, the positions of its features among the model's."""
        self.reset = RowReset(sharded, self.map)

    def assign(self, batch: Batch, step: int) -> Batch:
        """Replace ids by rows in this rank's part of a step's batch; every rank must call it."""
        return self._replaced(batch, torch.tensor([step], device=self.map.device))

    def look_up(self, batch: Batch) -> Batch:
        """Replace ids by rows without changing the map; every rank must call it."""
        return self._replaced(batch, None)

    def rows(self, own: Tensor, exchange: IdExchange, step: Tensor | None) -> Tensor:
        """Return the rows of this rank's ids, which lie as `exchange` says; `step` is the step that they are trained
        in, if any."""
        ids = exchange.ids(own)
        if step is None:
            return exchange.rows(self.map.look_up(ids, exchange.layout))
        rows, new = self.map.assign(ids, exchange.layout, step)
        self.reset(new)
        return exchange.rows(rows)

    def metrics(self) -> dict[str, Any]:
        """Return metrics by name and table since the last call, over all ranks; every rank must call it."""
        found = self.map.take_statistics()
        return {
            "id_hit_rate": {name: one["hits"] / max(1, one["lookups"]) for name, one in found.items()},
            "id_default_rate": {name: one["defaults"] / max(1, one["lookups"]) for name, one in found.items()},
            "ids_admitted": {name: one["admissions"] for name, one in found.items()},
            "ids_evicted": {name: one["evictions"] for name, one in found.items()},
            "table_fullness": {name: one["fullness"] for name, one in found.items()},
        }

    def _replaced(self, batch: Batch, step: Tensor | None) -> Batch:
        """Replace the ids of dynamic features by rows."""
        parts = np.split(batch.ids, np.cumsum(batch.lengths.sum(axis=1))[:-1])
        features = [feature for of_table in self.features for feature in of_table]
        sizes = [len(parts[feature]) for feature in features]
        if self._world.world_size > 1:  # as many on every rank
            sizes = self._world.stacked(torch.tensor(sizes)).amax(0).tolist()
        sizes[0] = max(1, sizes[0])  # a kernel has something to read
        own = np.full(sum(sizes), NO_ID)
        places = [slice(start, start + len(parts[feature])) for feature, start in zip(
            features, accumulate([0, *sizes]), strict=False)]
        for feature, place in zip(features, places, strict=True):
            own[place] = parts[feature]
        of_feature = iter(sizes)
        exchange = IdExchange([[next(of_feature) for _ in of_table] for of_table in self.features], self._world)
        rows = self.rows(torch.from_numpy(own).to(self.map.device), exchange, step).cpu().numpy()
        for feature, place in zip(features, places, strict=True):
            parts[feature] = rows[place]
        return replace(batch, ids=np.concatenate(parts).astype(np.int32))


class IdExchange:
    """Sends the ids of a batch to the ranks that have their part of the map, and their rows back.

    Features have as many ids on every rank, so sizes follow from the shapes alone and a graph can hold the exchange. A
    rank gets all ids, and looks its own up.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], world: World) -> None:
        """`sizes`: the ids that a rank has of each feature, table by table."""
        self._world, self.sizes = world, [size for of_table in sizes for size in of_table]
        self.layout = IdLayout(list(accumulate(world.world_size * sum(of_table) for of_table in sizes)), world.device)

    def ids(self, own: Tensor) -> Tensor:
        """Gather the ids of all ranks, feature by feature, as they lie in the whole batch."""
        if self._world.world_size == 1:
            return own
        return torch.cat([part.reshape(-1) for part in self._world.stacked(own).split(self.sizes, dim=1)])

    def rows(self, found: Tensor) -> Tensor:
        """Return the rows of this rank's ids. `found` has the rows of ids in this rank's part of the map, and −1 for
        all others."""
        num_ranks = self._world.world_size
        if num_ranks == 1:
            return found
        parts = found.split([num_ranks * size for size in self.sizes])
        of_ranks = torch.cat([part.view(num_ranks, -1) for part in parts], dim=1)
        got = torch.empty_like(of_ranks)
        dist.all_to_all_single(got, of_ranks)
        return got.amax(0)


@dataclass(frozen=True, slots=True)
class RowShard:
    """A rectangle of a dynamic table, in FBGEMM's storage."""

    table: int  # Index among the map's tables.
    first_row: int
    first_column: int
    weights: Tensor  # [rows, columns]
    states: tuple[Tensor, ...]  # The optimizer's state: [rows], or [rows, columns].


def row_shards(tables: ShardedEmbeddingBagCollection, ids: IdMap) -> list[RowShard]:
    """List this rank's parts of the dynamic tables."""
    numbers = {table.name: at for at, table in enumerate(ids.tables)}
    found = []
    for lookup in tables._lookups:
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            batch = kernel.emb_module
            if not any(table.name in numbers for table in kernel._config.embedding_tables):
                continue
            if getattr(batch, "weights_uvm", torch.empty(0)).numel():
                raise UserError("a dynamic table does not fit the memory of its GPU",
                                "a smaller capacity, more GPUs, or train.table_dtype = \"fp16\"")
            weights, states = batch.split_embedding_weights(), batch.split_optimizer_states()
            for at, table in enumerate(kernel._config.embedding_tables):
                if table.name in numbers and weights[at].numel():
                    first_row, first_column = table.local_metadata.shard_offsets
                    found.append(RowShard(numbers[table.name], first_row, first_column, weights[at].detach(),
                                          tuple(states[at]) if states else ()))
    return found


class RowReset:
    """Gives new rows the first values of their ids, and clears their optimizer's state."""

    def __init__(self, tables: ShardedEmbeddingBagCollection, ids: IdMap) -> None:
        self.shards, self._ids = row_shards(tables, ids), ids
        self._on_gpu: list[tuple[list[RowShard], Tensor]] = []  # Shards of one type, and what the kernel reads.
        if ids.device.type == "cuda":
            from . import map_kernels

            for dtype in {shard.weights.dtype: None for shard in self.shards}:
                alike = [shard for shard in self.shards if shard.weights.dtype == dtype]
                self._on_gpu.append((alike, map_kernels.about_shards(ids, alike)))

    def __call__(self, new: NewRows) -> None:
        if self._ids.device.type != "cuda":
            reset_rows(self._ids, new, self.shards)
        for shards, about in self._on_gpu:
            from . import map_kernels

            map_kernels.reset(self._ids, new, shards, about)


@torch.no_grad()
def reset_rows(ids: IdMap, new: NewRows, shards: list[RowShard]) -> None:
    """Reset new rows in plain torch, with shapes that follow from the values."""
    for shard in shards:
        rows = new.slots - ids.first_slots[shard.table] + 1 - shard.first_row
        is_mine = (new.slots >= 0) & (new.tables == shard.table) & (rows >= 0) & (rows < len(shard.weights))
        rows, hashes = rows[is_mine], new.hashes[is_mine]
        columns = torch.arange(shard.weights.shape[1], device=rows.device) + shard.first_column
        shard.weights[rows] = first_values(hashes, columns, ids, shard.table).to(shard.weights.dtype)
        for state in shard.states:
            state[rows] = 0


def first_values(hashes: Tensor, columns: Tensor, ids: IdMap, table: int) -> Tensor:
    """Return values [ids, columns], uniform in ± the table's bound, by the seed, the id and the column.

    Only a product is rounded, so that every device gives the same.
    """
    bits = mixed(hashes[:, None] + columns * SIGNED_STEP, ids.value_keys[table])
    return (((bits >> 40) & 0xFFFFFF).float() * 2.0**-23 - 1) * ids.bounds[table]

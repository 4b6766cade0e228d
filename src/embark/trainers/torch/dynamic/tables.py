"""The dynamic tables of a run: raw ids of batches to rows, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from embark.data import Batch
from embark.data.dynamic_ids import NO_ID
from embark.spec import RunSpec
from embark.trainers.torch.dynamic.id_exchange import IdExchange
from embark.trainers.torch.dynamic.id_map import IdMap
from embark.trainers.torch.dynamic.rows import RowReset
from embark.trainers.torch.world import World


class DynamicTables:
    """Every rank has a part of the map, and gives rows to the ids of that part that the whole batch has: all parts
    together are the same at any number of ranks. The rows are sharded as those of any table."""

    def __init__(self, spec: RunSpec, world: World, sharded: ShardedEmbeddingBagCollection) -> None:
        self._world = world
        features = [table.name for table in spec.model.table_list()]
        stored = [table for table in spec.model.stored_tables() if table.is_dynamic]
        self.map = IdMap(stored, spec.train.seed, world)
        self.features = [[features.index(one.name) for one in table.features] for table in stored]
        """Of each table, the positions of its features among the model's."""
        self.reset = RowReset(sharded, self.map)

    def assign(self, batch: Batch, step: int) -> Batch:
        """This rank's part of a step's batch with rows in place of ids; every rank must call it."""
        return self._replaced(batch, torch.tensor([step], device=self.map.device))

    def look_up(self, batch: Batch) -> Batch:
        """A batch with rows in place of ids; nothing changes. Every rank must call it."""
        return self._replaced(batch, None)

    def rows(self, own: Tensor, exchange: IdExchange, step: Tensor | None) -> Tensor:
        """Of this rank's ids, which lie as `exchange` says; `step`: the step that they are trained in, if any."""
        ids = exchange.ids(own)
        if step is None:
            return exchange.rows(self.map.look_up(ids, exchange.layout))
        rows, new = self.map.assign(ids, exchange.layout, step)
        self.reset(new)
        return exchange.rows(rows)

    def metrics(self) -> dict[str, Any]:
        """By metric and table, since the last call, over all ranks; every rank must call it."""
        found = self.map.take_statistics()
        return {
            "id_hit_rate": {name: one["hits"] / max(1, one["lookups"]) for name, one in found.items()},
            "id_default_rate": {name: one["defaults"] / max(1, one["lookups"]) for name, one in found.items()},
            "ids_admitted": {name: one["admissions"] for name, one in found.items()},
            "ids_evicted": {name: one["evictions"] for name, one in found.items()},
            "table_fullness": {name: one["fullness"] for name, one in found.items()},
        }

    def _replaced(self, batch: Batch, step: Tensor | None) -> Batch:
        """With rows in place of the ids of dynamic features."""
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

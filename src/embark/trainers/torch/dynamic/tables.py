"""The dynamic tables of a run: raw ids of batches to rows, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from embark.data import Batch
from embark.data.dynamic_ids import NO_ID
from embark.spec import RunSpec
from embark.trainers.torch.dynamic.batch_ids import IdLayout
from embark.trainers.torch.dynamic.id_map import IdMap
from embark.trainers.torch.dynamic.rows import RowReset
from embark.trainers.torch.world import World


class DynamicTables:
    """Every rank has the whole map, and gives rows by the ids of the whole batch: the map is the same at any number of
    ranks. The rows are sharded as those of any table."""

    def __init__(self, spec: RunSpec, world: World, sharded: ShardedEmbeddingBagCollection) -> None:
        self._world = world
        features = [table.name for table in spec.model.table_list()]
        stored = [table for table in spec.model.stored_tables() if table.is_dynamic]
        self.map = IdMap(stored, spec.train.seed, world.device)
        self.features = [[features.index(one.name) for one in table.features] for table in stored]
        """Of each table, the positions of its features among the model's."""
        self.reset = RowReset(sharded, self.map)

    def assign(self, batch: Batch, step: int) -> Batch:
        """This rank's part of a step's batch with rows in place of ids; every rank must call it."""
        own = self._parts(batch)
        of_ranks: list[list[NDArray[np.int64]]] = self._world.gathered(own) if self._world.world_size > 1 else [own]
        # A feature's ids lie as in the whole batch.
        ids = [np.concatenate([of_rank[feature] for of_rank in of_ranks]) for feature in range(len(own))]
        rows, new = self.map.assign(*self._on_device(ids), torch.tensor([step], device=self.map.device))
        self.reset(new)
        found = _split(rows, ids)
        for feature, mine in enumerate(own):
            before = sum(len(of_rank[feature]) for of_rank in of_ranks[: self._world.rank])
            found[feature] = found[feature][before : before + len(mine)]
        return self._replaced(batch, found)

    def look_up(self, batch: Batch) -> Batch:
        """A batch with rows in place of ids; nothing changes."""
        ids = self._parts(batch)
        return self._replaced(batch, _split(self.map.look_up(*self._on_device(ids)), ids))

    def metrics(self) -> dict[str, Any]:
        """By metric and table, since the last call; the map is the same on all ranks."""
        found = self.map.take_statistics()
        return {
            "id_hit_rate": {name: one["hits"] / max(1, one["lookups"]) for name, one in found.items()},
            "id_default_rate": {name: one["defaults"] / max(1, one["lookups"]) for name, one in found.items()},
            "ids_admitted": {name: one["admissions"] for name, one in found.items()},
            "ids_evicted": {name: one["evictions"] for name, one in found.items()},
            "table_fullness": {name: one["fullness"] for name, one in found.items()},
        }

    def _parts(self, batch: Batch) -> list[NDArray[np.int64]]:
        """The ids of each dynamic feature, table by table."""
        ends = np.cumsum(batch.lengths.sum(axis=1))
        parts = np.split(batch.ids, ends[:-1])
        return [parts[feature].astype(np.int64) for of_table in self.features for feature in of_table]

    def _on_device(self, ids: Sequence[NDArray[np.int64]]) -> tuple[Tensor, IdLayout]:
        sizes = iter(map(len, ids))
        ends = np.cumsum([sum(next(sizes) for _ in of_table) for of_table in self.features]).tolist()
        flat = np.concatenate(ids)
        if not len(flat):  # a kernel has something to read
            flat, ends = np.array([NO_ID]), [1] * len(ends)
        return torch.from_numpy(flat).to(self.map.device), IdLayout(ends, self.map.device)

    def _replaced(self, batch: Batch, rows: Sequence[NDArray[np.int32]]) -> Batch:
        parts = np.split(batch.ids, np.cumsum(batch.lengths.sum(axis=1))[:-1])
        for feature, own in zip([one for of_table in self.features for one in of_table], rows, strict=True):
            parts[feature] = own
        return replace(batch, ids=np.concatenate(parts).astype(np.int32))


def _split(rows: Tensor, ids: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int32]]:
    """By feature, as the ids are."""
    ends = np.cumsum([len(one) for one in ids])
    return np.split(rows.cpu().numpy()[: ends[-1]], ends[:-1])

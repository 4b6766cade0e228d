"""The rows of dynamic tables as this rank holds them, and what they begin with when another id gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from embark.data.dynamic_ids import SIGNED_STEP, mixed
from embark.errors import UserError
from embark.trainers.torch.dynamic.batch_ids import NewRows

if TYPE_CHECKING:
    from embark.trainers.torch.dynamic.id_map import IdMap


@dataclass(frozen=True, slots=True)
class RowShard:
    """A rectangle of a dynamic table, in FBGEMM's storage."""

    table: int  # Which of the map's.
    first_row: int
    first_column: int
    weights: Tensor  # [rows, columns]
    states: tuple[Tensor, ...]  # Of the optimizer: [rows], or [rows, columns].


def row_shards(tables: ShardedEmbeddingBagCollection, ids: IdMap) -> list[RowShard]:
    """This rank's."""
    numbers = {table.name: at for at, table in enumerate(ids.tables)}
    found = []
    for lookup in tables._lookups:
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            batch = kernel.emb_module
            if not any(table.name in numbers for table in kernel._config.embedding_tables):
                continue
            if getattr(batch, "weights_uvm", torch.empty(0)).numel():
                raise UserError("a dynamic table does not fit the memory of its GPU",
                                fix="a smaller capacity, more GPUs, or train.table_dtype = \"fp16\"")
            weights, states = batch.split_embedding_weights(), batch.split_optimizer_states()
            for at, table in enumerate(kernel._config.embedding_tables):
                if table.name in numbers and weights[at].numel():
                    first_row, first_column = table.local_metadata.shard_offsets
                    found.append(RowShard(numbers[table.name], first_row, first_column, weights[at].detach(),
                                          tuple(states[at]) if states else ()))
    return found


class RowReset:
    """Gives new rows the first values of their ids, and their optimizer's state none."""

    def __init__(self, tables: ShardedEmbeddingBagCollection, ids: IdMap) -> None:
        self.shards, self._ids = row_shards(tables, ids), ids
        self._on_gpu: list[tuple[list[RowShard], Tensor]] = []  # By type of the rows, and what a kernel reads of them.
        if ids.device.type == "cuda":
            from embark.trainers.torch.dynamic import reset_kernels

            for dtype in {shard.weights.dtype: None for shard in self.shards}:
                alike = [shard for shard in self.shards if shard.weights.dtype == dtype]
                self._on_gpu.append((alike, reset_kernels.about_shards(ids, alike)))

    def __call__(self, new: NewRows) -> None:
        if self._ids.device.type != "cuda":
            reset_rows(self._ids, new, self.shards)
        for shards, about in self._on_gpu:
            from embark.trainers.torch.dynamic import reset_kernels

            reset_kernels.reset(self._ids, new, shards, about)


@torch.no_grad()
def reset_rows(ids: IdMap, new: NewRows, shards: list[RowShard]) -> None:
    """The same with shapes that follow from the values."""
    for shard in shards:
        rows = new.slots - ids.first_slots[shard.table] + 1 - shard.first_row
        is_mine = (new.slots >= 0) & (new.tables == shard.table) & (rows >= 0) & (rows < len(shard.weights))
        rows, hashes = rows[is_mine], new.hashes[is_mine]
        columns = torch.arange(shard.weights.shape[1], device=rows.device) + shard.first_column
        shard.weights[rows] = first_values(hashes, columns, ids, shard.table).to(shard.weights.dtype)
        for state in shard.states:
            state[rows] = 0


def first_values(hashes: Tensor, columns: Tensor, ids: IdMap, table: int) -> Tensor:
    """Uniform in ± the table's bound, by the seed, the id and the column: [ids, columns]. A product is all that is
    rounded, so that every device gives the same."""
    bits = mixed(hashes[:, None] + columns * SIGNED_STEP, ids.value_keys[table])
    return (((bits >> 40) & 0xFFFFFF).float() * 2.0**-23 - 1) * ids.bounds[table]

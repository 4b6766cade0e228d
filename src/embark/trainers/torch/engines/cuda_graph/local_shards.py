"""Which rank holds which rectangle of which table, and where in its memory."""

from dataclasses import dataclass

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingPlan

from embark.spec import Table


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A rectangle of a table, on one rank."""

    rank: int
    feature: int
    """Position of the table among the model's."""
    first_row: int
    first_column: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One of this rank's own, inside a batch of tables of FBGEMM's."""

    shard: Shard
    batch: SplitTableBatchedEmbeddingBagsCodegen
    position: int
    """Among the tables of the batch."""


def planned(plan: ShardingPlan, tables: tuple[Table, ...]) -> list[Shard]:
    """Every shard of every table, in the order in which all ranks count them."""
    positions = {table.name: position for position, table in enumerate(tables)}
    found = []
    for parameters in plan.plan.values():
        for name, parameter in parameters.items():
            for part in parameter.sharding_spec.shards:
                rows, columns = part.shard_sizes
                if rows and columns:
                    first_row, first_column = part.shard_offsets
                    rank = part.placement.rank()
                    found.append(Shard(rank, positions[name], first_row, first_column, rows, columns))
    return sorted(found)


def local_shards(tables: ShardedEmbeddingBagCollection, names: list[str], rank: int) -> list[LocalShard]:
    """This rank's shards, in the same order."""
    found = []
    for lookup in tables._lookups:
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            for position, table in enumerate(kernel._config.embedding_tables):
                part = table.local_metadata
                rows, columns = part.shard_sizes
                if rows and columns:
                    first_row, first_column = part.shard_offsets
                    shard = Shard(rank, names.index(table.name), first_row, first_column, rows, columns)
                    found.append(LocalShard(shard, kernel.emb_module, position))
    return sorted(found, key=lambda one: one.shard)

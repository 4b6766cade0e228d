"""Initial weights that depend on the seed and nothing else: not on the ranks, not on the sharding."""

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from embark.spec import ModelSpec

ROWS_PER_BLOCK = 65_536


def fill_tables(tables: nn.Module, model: ModelSpec, seed: int) -> None:
    """Fill the local shards of every table, uniform in ±sqrt(1 / rows) as TorchRec itself does."""
    rows_of = {t.name: t.rows for t in model.table_list()}
    with torch.no_grad():
        for name, shard, first_row, first_column in local_shards(tables):
            table = name.split(".")[-2]
            _fill(shard, first_row, first_column, model_width(model, table), rows_of[table], table, seed)


def local_shards(tables: nn.Module) -> Iterator[tuple[str, Tensor, int, int]]:
    """This rank's parts: the parameter's name, the values, and where in the whole table they begin."""
    for name, value in tables.state_dict().items():
        if not name.endswith(".weight"):
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield name, shard.tensor, row, column


def model_width(model: ModelSpec, table: str) -> int:
    """How wide `table` is, whole."""
    return next(t.dim or 0 for t in model.table_list() if t.name == table)


def _fill(shard: Tensor, first_row: int, first_column: int, width: int, rows: int, table: str, seed: int) -> None:
    """Block by block, each from a generator of its own, so that any shard of a block takes the same numbers."""
    bound = math.sqrt(1 / rows)
    generator = torch.Generator(device=shard.device)
    end = first_row + shard.shape[0]
    for block in range(first_row // ROWS_PER_BLOCK, -(-end // ROWS_PER_BLOCK)):
        start, stop = block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, rows)
        generator.manual_seed(zlib.crc32(f"{seed}/{table}/{block}".encode()))
        values = torch.empty(stop - start, width, device=shard.device)
        values.uniform_(-bound, bound, generator=generator)
        low, high = max(start, first_row), min(stop, end)
        shard[low - first_row : high - first_row] = values[
            low - start : high - start, first_column : first_column + shard.shape[1]
        ]

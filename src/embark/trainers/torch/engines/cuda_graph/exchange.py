"""Sends ids to the ranks that hold their rows, pooled rows back, and gradients there again, in sizes known before the
run.

Every rank sends every other the ids of the features that one holds a shard of, for its own part of the batch; the
lookup there is over the whole batch. So only values are exchanged, and a graph can capture all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from embark.spec import RunSpec
from .lookup import Shard


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one rank's part of the batch."""

    num_samples: int
    num_ids: tuple[int, ...]  # Ids a sample has in each feature.
    widths: tuple[int, ...]  # Width of each feature's rows.

    @property
    def id_starts(self) -> list[int]:
        """Index of each feature's first id in a flat tensor of all."""
        return [0, *accumulate(self.num_samples * ids for ids in self.num_ids)]

    @property
    def columns(self) -> list[int]:
        """First column of each feature's vector."""
        return [0, *accumulate(self.widths)]


class Exchange:
    """Buffers and sizes of what one rank sends and gets."""

    def __init__(
        self, shards: Sequence[Shard], sizes: Sizes, rank: int, world_size: int, device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._sizes, self._world_size = sizes, world_size
        self._of_rank = [[s for s in shards if s.rank == rank_] for rank_ in range(world_size)]
        self.mine = self._of_rank[rank]
        features = [sorted({s.feature for s in of_rank}) for of_rank in self._of_rank]
        starts, n = sizes.id_starts, sizes.num_samples
        self._send_ids = torch.cat([
            torch.arange(starts[f], starts[f + 1]) for of_rank in features for f in of_rank
        ] or [torch.empty(0, dtype=torch.int64)]).to(device)
        self._send_sizes = [sum(n * sizes.num_ids[f] for f in of_rank) for of_rank in features]
        num_mine = self._send_sizes[rank]
        self._get_sizes = [num_mine] * world_size
        within = [0, *accumulate(n * sizes.num_ids[f] for f in features[rank])]
        # Turns what came, rank by rank, into feature by feature.
        self._sort_ids = torch.cat([
            torch.arange(source * num_mine + within[at], source * num_mine + within[at + 1])
            for at in range(len(features[rank])) for source in range(world_size)
        ] or [torch.empty(0, dtype=torch.int64)]).to(device)
        self.id_starts = {f: world_size * within[at] for at, f in enumerate(features[rank])}
        """Where the ids of each of this rank's features begin in what `ids` gives."""
        self._got = {dtype: torch.zeros(world_size * num_mine, dtype=dtype, device=device)
                     for dtype in (torch.int32, torch.float32)}
        self._widths = [sum(s.num_columns for s in of_rank) for of_rank in self._of_rank]
        self.width = self._widths[rank]
        self.num_global = world_size * n
        self.looked_up = torch.zeros(self.num_global, self.width, dtype=dtype, device=device)
        """[B of all ranks, own width]: what the lookup fills."""
        self.grads = torch.zeros_like(self.looked_up)  # Gradients, which the update reads.
        self._parts = torch.zeros(n * sum(self._widths), dtype=dtype, device=device)
        self._row_splits = sorted({s.feature for s in shards if s.num_rows < _rows_of(shards, s.feature)})

    def ids(self, ids: Tensor) -> Tensor:
        """Return the ids, or their factors, of the features that this rank holds, over the whole batch, feature by
        feature."""
        got = self._got[ids.dtype]
        dist.all_to_all_single(got, ids.index_select(0, self._send_ids), self._get_sizes, self._send_sizes)
        return got.index_select(0, self._sort_ids)

    def pooled(self, out: Tensor) -> None:
        """Send the looked-up vectors to the ranks that own the samples, and assemble the received ones in `out`."""
        n = self._sizes.num_samples
        dist.all_to_all_single(
            self._parts, self.looked_up.view(-1), [n * width for width in self._widths],
            [n * self.width] * self._world_size,
        )
        for feature in self._row_splits:
            start = self._sizes.columns[feature]
            out[:, start : start + self._sizes.widths[feature]].zero_()
        for shard, part in self._parts_by_shard():
            columns = self._columns(out, shard)
            if shard.feature in self._row_splits:
                columns.add_(part)
            else:
                columns.copy_(part)

    def send_grads(self, grads: Tensor) -> None:
        """Send the gradients of pooled rows to the ranks that hold the rows, into `self.grads`."""
        n = self._sizes.num_samples
        for shard, part in self._parts_by_shard():
            part.copy_(self._columns(grads, shard))
        dist.all_to_all_single(
            self.grads.view(-1), self._parts, [n * self.width] * self._world_size, [n * width for width in self._widths]
        )

    def _parts_by_shard(self) -> list[tuple[Shard, Tensor]]:
        found, start = [], 0
        for of_rank, width in zip(self._of_rank, self._widths, strict=True):
            size = self._sizes.num_samples * width
            part = self._parts[start : start + size].view(self._sizes.num_samples, width)
            column = 0
            for shard in of_rank:
                found.append((shard, part[:, column : column + shard.num_columns]))
                column += shard.num_columns
            start += size
        return found

    def _columns(self, values: Tensor, shard: Shard) -> Tensor:
        start = self._sizes.columns[shard.feature] + shard.first_column
        return values[:, start : start + shard.num_columns]


def _rows_of(shards: Sequence[Shard], feature: int) -> int:
    return max(s.first_row + s.num_rows for s in shards if s.feature == feature)


def wire_dtype(spec: RunSpec, shards: list[Shard], dtype: torch.dtype) -> torch.dtype:
    """Return the type that pooled rows are sent in.

    Rounding before the wire changes nothing where the dense layers round anyway, but sums over shards of rows would be
    of rounded inputs.
    """
    if spec.train.comms_dtype != "fp32":
        return torch.float16 if spec.train.comms_dtype == "fp16" else torch.bfloat16
    rows = {f: t.stored_rows for f, t in enumerate(spec.model.table_list())}
    return torch.float32 if any(s.num_rows < rows[s.feature] for s in shards) else dtype

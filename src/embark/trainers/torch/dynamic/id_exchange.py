"""The ids of a batch to the ranks whose part of the map they are of, and their rows back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from embark.trainers.torch.dynamic.batch_ids import IdLayout
from embark.trainers.torch.world import World


class IdExchange:
    """Of features that have as many ids on every rank: sizes follow from the shapes alone, so that a graph can hold it.
    A rank gets all ids, and looks its own up."""

    def __init__(self, sizes: Sequence[Sequence[int]], world: World) -> None:
        """`sizes`: the ids that a rank has of each feature, table by table."""
        self._world, self.sizes = world, [size for of_table in sizes for size in of_table]
        self.layout = IdLayout(list(accumulate(world.world_size * sum(of_table) for of_table in sizes)), world.device)

    def ids(self, own: Tensor) -> Tensor:
        """Of all ranks, feature by feature, as they lie in the whole batch."""
        if self._world.world_size == 1:
            return own
        return torch.cat([part.reshape(-1) for part in self._world.stacked(own).split(self.sizes, dim=1)])

    def rows(self, found: Tensor) -> Tensor:
        """Of this rank's ids: each rank found those of its own part, and −1 of all others."""
        num_ranks = self._world.world_size
        if num_ranks == 1:
            return found
        parts = found.split([num_ranks * size for size in self.sizes])
        of_ranks = torch.cat([part.view(num_ranks, -1) for part in parts], dim=1)
        got = torch.empty_like(of_ranks)
        dist.all_to_all_single(got, of_ranks)
        return got.amax(0)

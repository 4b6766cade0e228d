"""The ids of dynamic tables as rows, inside the captured step: ids in fixed places, nothing decided on the host."""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from embark.data.dynamic_ids import NO_ID
from embark.trainers.torch.dynamic.batch_ids import IdLayout
from embark.trainers.torch.dynamic.tables import DynamicTables
from embark.trainers.torch.engines.cuda_graph.exchange import Sizes


class DynamicStep:
    """Of a batch's ids, those of dynamic tables are replaced by rows."""

    def __init__(self, dynamic: DynamicTables, sizes: Sizes, rank: int, world_size: int, device: torch.device) -> None:
        self._dynamic, self._world_size = dynamic, world_size
        features = [feature for of_table in dynamic.features for feature in of_table]
        starts, num_ids = sizes.id_starts, [sizes.num_samples * num for num in sizes.num_ids]
        places = torch.cat([torch.arange(starts[f], starts[f] + num_ids[f]) for f in features])
        is_all = len(places) == starts[-1] and bool((places == torch.arange(len(places))).all())
        self._places = None if is_all else places.to(device)
        ends = accumulate(world_size * sum(num_ids[f] for f in of_table) for of_table in dynamic.features)
        self._layout = IdLayout(list(ends), device)
        self._before_any = torch.zeros(1, dtype=torch.int64, device=device)
        if world_size == 1:
            return
        # From what came, rank by rank, to feature by feature, and this rank's part of that.
        size, within = len(places), [0, *accumulate(num_ids[f] for f in features)]
        self._from_ranks = torch.cat([
            torch.arange(source * size + within[at], source * size + within[at + 1])
            for at in range(len(features)) for source in range(world_size)]).to(device)
        self._own = torch.cat([
            torch.arange(num_ids[f]) + world_size * within[at] + rank * num_ids[f]
            for at, f in enumerate(features)]).to(device)

    def __call__(self, ids: Tensor, step: Tensor, *, has_ids: bool = True) -> Tensor:
        """`has_ids`: false where all are left out, and the map must stay as it is."""
        own = ids if self._places is None else ids.index_select(0, self._places)
        raw = own
        if self._world_size > 1:
            every = torch.empty(self._world_size * len(own), dtype=own.dtype, device=own.device)
            dist.all_gather_into_tensor(every, own.contiguous())
            raw = every.index_select(0, self._from_ranks)
        rows, new = self._dynamic.map.assign(raw, self._layout, step if has_ids else self._before_any)
        self._dynamic.reset(new)
        if self._world_size > 1:
            rows = rows.index_select(0, self._own)
        if self._places is None:
            return rows
        found = (torch.where(ids == NO_ID, -1, ids) if ids.dtype == torch.int64 else ids).to(torch.int32, copy=True)
        return found.index_copy_(0, self._places, rows)

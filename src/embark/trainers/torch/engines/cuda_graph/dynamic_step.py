"""The ids of dynamic tables as rows, inside the captured step: ids in fixed places, nothing decided on the host."""

import torch
from torch import Tensor

from embark.data.dynamic_ids import NO_ID
from embark.trainers.torch.dynamic.id_exchange import IdExchange
from embark.trainers.torch.dynamic.tables import DynamicTables
from embark.trainers.torch.engines.cuda_graph.exchange import Sizes
from embark.trainers.torch.world import World


class DynamicStep:
    """Of a batch's ids, those of dynamic tables are replaced by rows."""

    def __init__(self, dynamic: DynamicTables, sizes: Sizes, world: World) -> None:
        self._dynamic, device = dynamic, world.device
        starts, num_ids = sizes.id_starts, [sizes.num_samples * num for num in sizes.num_ids]
        places = torch.cat([torch.arange(starts[f], starts[f] + num_ids[f])
                            for of_table in dynamic.features for f in of_table])
        is_all = len(places) == starts[-1] and bool((places == torch.arange(len(places))).all())
        self._places = None if is_all else places.to(device)
        self._exchange = IdExchange([[num_ids[f] for f in of_table] for of_table in dynamic.features], world)
        self._before_any = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, ids: Tensor, step: Tensor, *, has_ids: bool = True) -> Tensor:
        """`has_ids`: false where all are left out, and the map must stay as it is."""
        own = ids if self._places is None else ids.index_select(0, self._places)
        rows = self._dynamic.rows(own, self._exchange, step if has_ids else self._before_any)
        if self._places is None:
            return rows
        found = (torch.where(ids == NO_ID, -1, ids) if ids.dtype == torch.int64 else ids).to(torch.int32, copy=True)
        return found.index_copy_(0, self._places, rows)

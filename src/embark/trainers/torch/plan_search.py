"""How TorchRec's planner searches: the same way every time, and in seconds where tables and ranks are many."""

import heapq
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption

from embark.model.sharding import MAX_GRID, NUM_STRIDES, stride_ends


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, its options in the order in which the constraints name them.

    TorchRec takes them out of a set of strings. Among options that its estimate holds for equal, such as a table in the
    device's memory and one in the host's, the first wins: with one of Python's hash seeds three tables would go to the
    host, with another all of them.
    """

    def __init__(self, topology: Topology, batch_size: int, constraints: dict[str, ParameterConstraints]) -> None:
        super().__init__(topology, batch_size, constraints)
        self._named = constraints
        self._tables = {name: index for index, name in enumerate(constraints)}

    def enumerate(self, module: nn.Module, sharders: list[Any]) -> list[ShardingOption]:
        return sorted(super().enumerate(module, sharders), key=self._place)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Once for shards of one size: of a table over 512 ranks, 511 are alike."""
        all_shards = [option.shards for option in sharding_options]
        for option, shards in zip(sharding_options, all_shards, strict=True):
            option.shards = list({tuple(shard.size): shard for shard in shards}.values())
        super().populate_estimates(sharding_options)
        for option, shards in zip(sharding_options, all_shards, strict=True):
            estimated = {tuple(shard.size): shard for shard in option.shards}
            for shard in shards:
                like = estimated[tuple(shard.size)]
                shard.storage, shard.perf = like.storage, like.perf
            option.shards = shards

    def _place(self, option: ShardingOption) -> tuple[int, int, int]:
        named = self._named[option.name]
        return (
            self._tables[option.name],
            named.compute_kernels.index(option.compute_kernel),
            named.sharding_types.index(option.sharding_type),
        )


def proposers(*, is_long: bool) -> list[Proposer]:
    """TorchRec's own, but for the grid, which would take half a minute for eight tables on 128 ranks."""
    if is_long:
        return [LongStrides("part"), LongStrides("sum")]
    return [GridSearchProposer(MAX_GRID), GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]


class LongStrides(Proposer):
    """The way of TorchRec's greedy proposer, in strides.

    It begins with each table's fastest option and turns to the next option of the table that takes the most memory,
    one step for each proposal. The first steps move the large tables and count the most: strides grow from one step.
    """

    def __init__(self, judged_by: Literal["part", "sum"]) -> None:
        self._judged_by = judged_by
        self._options: list[list[ShardingOption]] = []
        self._current: list[int] = []
        self._heap: list[tuple[Any, ...]] = []
        self._ends: Iterator[int] = iter(())
        self._num_steps = 0
        self._is_done = False

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.fqn, []).append(option)
        self._options = [sorted(options, key=self._cost) for options in by_table.values()]
        self._current = [0] * len(self._options)
        self._heap = []
        for index in range(len(self._options)):
            self._push(index)
        num_steps = sum(len(options) - 1 for options in self._options)
        self._ends = stride_ends(num_steps, NUM_STRIDES[self._judged_by])
        self._num_steps = 0
        self._is_done = not self._options

    def propose(self) -> list[ShardingOption] | None:
        if self._is_done:
            return None
        return [options[index] for options, index in zip(self._options, self._current, strict=True)]

    def feedback(self, *_results: Any, **_more: Any) -> None:
        end = next(self._ends, None)
        if end is None:
            self._is_done = True
            return
        while self._num_steps < end:
            index = heapq.heappop(self._heap)[-1]
            self._current[index] += 1
            self._num_steps += 1
            self._push(index)

    def _push(self, index: int) -> None:
        options, current = self._options[index], self._current[index]
        if current + 1 < len(options):
            hbm = [s.storage.hbm for s in options[current].shards]
            ddr = [s.storage.ddr for s in options[current].shards]
            heapq.heappush(self._heap, (-max(hbm), -sum(hbm), -max(ddr), -sum(ddr), index))

    def _cost(self, option: ShardingOption) -> float:
        costs = [s.perf.total for s in option.shards]
        return max(costs) if self._judged_by == "part" else sum(costs)

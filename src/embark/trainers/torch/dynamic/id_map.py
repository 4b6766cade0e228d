"""The rows of ids, of all dynamic tables of a run: found, given and taken away, a batch at a time.

The map is sharded by id: of each table a rank has a range of buckets, which is one of hashes, and all that the ids of
those buckets have. A bucket's ids compete with each other alone; that `max_new` counts those of all ranks, and that any
rank may hold the new rows, is what ranks tell each other.

What a step does to the map follows from the map before it, the step's number and the ids of the whole batch, whatever
the device and the number of ranks:

1. At every `half_life`-th step counts are halved.
2. Ids that have a row touch it: it was seen in this step, so often.
3. Of the others the first `max_new` of each table, in the batch's order, are candidates, each once. The admitted ones,
   by rising hash, get rows of their bucket that were not touched in this step: the free ones first, then those of the
   lowest score, and of equal scores the first. A candidate that finds none gets none.
4. Every id is looked up; one without a row has row 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embark.data.dynamic_ids import (
    CHANCE,
    COUNTER,
    FREE,
    MAP,
    VALUE,
    table_key,
)
from embark.spec import StoredTable
from embark.spec.model import BUCKET_COUNTERS, BUCKET_SLOTS, num_buckets, own_buckets
from embark.trainers.torch.world import World
from . import torch_ops
from .batch_ids import (
    AGE,
    LAST_HASH,
    LFU,
    LRU,
    NEVER,
    STATISTICS,
    Candidates,
    IdLayout,
    NewRows,
)

POLICIES = {"lru": LRU, "lfu": LFU, "age": AGE}


@dataclass(frozen=True, slots=True)
class MapPart:
    """This rank's part of a tensor that describes a whole table."""

    tensor: Tensor
    first: int
    size: int  # Size of the whole tensor.


class IdMap:
    """This rank's part of the map. A row of a table is a slot; slots are counted over this rank's parts of all tables.
    """

    def __init__(self, tables: Sequence[StoredTable], seed: int, world: World) -> None:
        self.tables, self.world, self.device = tables, world, world.device
        device = self.device
        specs = [table.features[0] for table in tables]
        self._buckets = [num_buckets(spec.capacity or 1) for spec in specs]
        self._own = [own_buckets(num, world.rank, world.world_size) for num in self._buckets]
        own = [end - first for first, end in self._own]
        counters = [num * BUCKET_COUNTERS * (spec.admit == "count") for num, spec in zip(own, specs, strict=True)]
        self.first_slots = _starts([num * BUCKET_SLOTS for num in self._buckets])
        """First slot of each table, counted over all ranks, as `NewRows` counts them."""
        self._slot_starts, self._counter_starts = _starts([num * BUCKET_SLOTS for num in own]), _starts(counters)

        def on_device(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def keys(purpose: int) -> Tensor:
            return on_device([table_key(seed, table.name, purpose) for table in tables])

        self.keys, self.chance_keys, self.counter_keys, self.value_keys = map(keys, (MAP, CHANCE, COUNTER, VALUE))
        self.bounds = on_device([math.sqrt(1 / table.rows) if table.init_range is None else table.init_range
                                 for table in tables], torch.float32)
        self.num_buckets = on_device(self._buckets)
        self.own_first, self.own_end = (on_device(ends) for ends in zip(*self._own, strict=True))
        self.first_bucket = on_device(self._slot_starts[:-1]) // BUCKET_SLOTS - self.own_first
        """Where bucket 0 of each table would be in this rank's part."""
        self._from_own = on_device(self.first_slots[:-1]) - self.first_bucket * BUCKET_SLOTS
        self.policies = on_device([POLICIES[spec.evict] for spec in specs])
        self._counter_half_lives = on_device([spec.half_life for spec in specs])
        self._count_half_lives = on_device([spec.half_life if spec.evict == "lfu" else NEVER for spec in specs])
        self.chances = on_device([round(spec.admit_probability * 2**32) if spec.admit == "probability" else 2**32
                                   for spec in specs])
        self.counts_needed = on_device([spec.admit_count if spec.admit == "count" else 0 for spec in specs])
        self.first_counter = on_device(self._counter_starts[:-1]) - self.own_first * BUCKET_COUNTERS
        self.max_new = on_device([spec.max_new for spec in specs])
        self.most_new = max(spec.max_new for spec in specs)
        self.has_counters, self.has_chances = (any(spec.admit == kind for spec in specs)
                                               for kind in ("count", "probability"))
        self.has_counts = any(spec.evict == "lfu" for spec in specs)
        num_slots = max(BUCKET_SLOTS, self._slot_starts[-1])  # a rank may have no bucket
        self.hashes = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.tags = torch.zeros(num_slots if device.type == "cuda" else 0, dtype=torch.int16, device=device)
        """The lower bits of the hashes, by which kernels look first."""
        self.seen = torch.full((num_slots,), FREE, dtype=torch.int32, device=device)
        """The step in which the id was seen last."""
        self.counts = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """`lfu`: how often it was seen. `age`: the step in which it got its row."""
        self.counters = torch.zeros(max(1, self._counter_starts[-1]), dtype=torch.int32, device=device)
        """How often ids without a row were seen; those with the same hash share one."""
        self.statistics = torch.zeros(len(tables), len(STATISTICS), dtype=torch.int64, device=device)
        """Statistics of this rank's ids since they were taken last."""
        self.ops: Any = torch_ops
        if device.type == "cuda":
            from . import map_kernels

            self.ops = map_kernels
        self._slot_ends, self._counter_ends = on_device(self._slot_starts), on_device(self._counter_starts)
        self._most_slots, self._most_counters = max(own) * BUCKET_SLOTS, max(counters)

    def assign(self, ids: Tensor, layout: IdLayout, step: Tensor) -> tuple[Tensor, NewRows]:
        """Return the rows of a step's ids, which are those of all ranks, and the rows that are new on any rank.

        A row is −1 where another rank has it or there is no id. `step` is [1].
        """
        self._halve(step)
        found = self.ops.find(self, ids, layout, step)
        candidates = self._first_of_all(self.ops.candidates(self, found, layout))
        hashes = candidates.hashes.sort(dim=1, stable=True).values
        ranked = self.ops.rank(self, hashes, candidates.nums, step)
        new = NewRows(self.ops.choose(self, hashes, ranked, step), hashes.view(-1), len(self.tables))
        self.ops.place(self, new, ranked, step)
        return self.ops.rows(self, found, layout, candidates), self._of_all(new)

    def look_up(self, ids: Tensor, layout: IdLayout) -> Tensor:
        """Return the rows of ids without changing the map."""
        found: Tensor = self.ops.rows(self, self.ops.find(self, ids, layout, None), layout, None)
        return found

    def loaded(self) -> None:
        """Compute what follows from `state` after it was filled. Rank 0 has the statistics of all."""
        if not self.world.is_first:
            self.statistics.zero_()
        if self.tags.numel():
            self.tags.copy_(self.hashes)  # keeps the lower bits

    def state(self, *, is_load: bool = False) -> dict[str, dict[str, MapPart | Tensor]]:
        """Return what a checkpoint holds of each table: views, except for the statistics of all ranks, unless they are
        loaded."""
        found: dict[str, dict[str, MapPart | Tensor]] = {}
        statistics = self.statistics if is_load else self.world.sum_over_ranks(self.statistics.clone())
        for at, table in enumerate(self.tables):
            slots, counters = slice(*self._slot_starts[at : at + 2]), slice(*self._counter_starts[at : at + 2])
            parts = {"hashes": (self.hashes[slots], BUCKET_SLOTS), "seen": (self.seen[slots], BUCKET_SLOTS),
                     "counts": (self.counts[slots], BUCKET_SLOTS)}
            if table.features[0].admit == "count":
                parts["counters"] = self.counters[counters], BUCKET_COUNTERS
            found[table.name] = {"statistics": statistics[at], **{
                name: MapPart(values, self._own[at][0] * of_bucket, self._buckets[at] * of_bucket)
                for name, (values, of_bucket) in parts.items()}}
        return found

    def take_statistics(self) -> dict[str, dict[str, float]]:
        """Return `STATISTICS` of each table since the last call, over all ranks, and the share of rows that ids have.
        """
        taken = torch.stack([(self.seen[slice(*self._slot_starts[at : at + 2])] != FREE).sum()
                             for at in range(len(self.tables))])
        values = self.world.sum_over_ranks(torch.cat([self.statistics, taken[:, None]], 1)).tolist()
        self.statistics.zero_()
        return {table.name: {**dict(zip(STATISTICS, of_table, strict=True)), "fullness": num / (table.rows - 1)}
                for table, (*of_table, num) in zip(self.tables, values, strict=True)}

    def _first_of_all(self, own: Candidates) -> Candidates:
        """Select the candidates of this rank that are among the first `max_new` of all ranks."""
        if self.world.world_size == 1:
            return own
        columns = torch.arange(own.places.shape[1], device=self.device)
        places = torch.where(columns < own.nums[:, None], own.places, LAST_HASH)
        every = self.world.stacked(places).transpose(0, 1).flatten(1).sort(dim=1).values
        last = every.gather(1, (self.max_new[:, None] - 1).clamp(max=every.shape[1] - 1))
        is_first = (places <= last) & (places < LAST_HASH)
        return replace(own, hashes=torch.where(is_first, own.hashes, LAST_HASH), nums=is_first.sum(1))

    def _of_all(self, own: NewRows) -> NewRows:
        """Return the new rows of all ranks."""
        if self.world.world_size == 1:
            return own
        slots = own.slots.view(len(self.tables), -1)
        slots = torch.where(slots >= 0, slots + self._from_own[:, None], -1)
        every = self.world.stacked(torch.stack([slots, own.hashes.view_as(slots)]))  # [ranks, 2, tables, most of any]
        slots, hashes = every.permute(1, 2, 0, 3).reshape(2, -1)
        return NewRows(slots, hashes, own.num_tables)

    def _halve(self, step: Tensor) -> None:
        """Halve the counts of tables whose half-life has passed."""
        for values, ends, half_lives, most in (
                (self.counts, self._slot_ends, self._count_half_lives, self._most_slots * self.has_counts),
                (self.counters, self._counter_ends, self._counter_half_lives, self._most_counters)):
            if most:
                self.ops.halve(values, ends, half_lives, step, most)


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts

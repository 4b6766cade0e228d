"""The rows of ids, of all dynamic tables of a run: found, given and taken away, a batch at a time.

What a step does to the map follows from the map before it, the step's number and the ids of the whole batch, whatever
the device and the number of ranks:

1. At every `half_life`-th step counts are halved.
2. Ids that have a row touch it: it was seen in this step, so often.
3. Of the others the first `max_new` of each table, in the batch's order, are candidates, each once. The admitted ones,
   by rising hash, get rows of their bucket that were not touched in this step: the free ones first, then those of the
   lowest score, and of equal scores the first. A candidate that finds none gets none.
4. Every id is looked up; one without a row has row 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from embark.spec.dynamic import BUCKET_SLOTS, num_buckets, num_counters
from embark.trainers.torch.dynamic import torch_ops
from embark.trainers.torch.dynamic.batch_ids import AGE, LFU, LRU, STATISTICS, IdLayout, NewRows

POLICIES = {"lru": LRU, "lfu": LFU, "age": AGE}


class IdMap:
    """The same on every rank. A row of a table is a slot of the map, which are counted over all tables."""

    def __init__(self, tables: Sequence[StoredTable], seed: int, device: torch.device) -> None:
        self.tables, self.device = tables, device
        specs = [table.features[0] for table in tables]
        buckets = [num_buckets(spec.capacity or 1) for spec in specs]
        counters = [num_counters(spec.capacity or 1) if spec.admit == "count" else 0 for spec in specs]
        self.first_slots = _starts([num * BUCKET_SLOTS for num in buckets])
        self._first_counters = _starts(counters)

        def on_device(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def keys(purpose: int) -> Tensor:
            return on_device([table_key(seed, table.name, purpose) for table in tables])

        self.keys, self.chance_keys, self.counter_keys, self.value_keys = map(keys, (MAP, CHANCE, COUNTER, VALUE))
        self.bounds = on_device([math.sqrt(1 / table.rows) if table.init_range is None else table.init_range
                                 for table in tables], torch.float32)
        self.num_buckets, self.first_slot = on_device(buckets), on_device(self.first_slots[:-1])
        self.policies = on_device([POLICIES[spec.evict] for spec in specs])
        self._half_lives = on_device([spec.half_life for spec in specs])
        self.chances = on_device([round(spec.admit_probability * 2**32) if spec.admit == "probability" else 2**32
                                   for spec in specs])
        self.counts_needed = on_device([spec.admit_count if spec.admit == "count" else 0 for spec in specs])
        self.counter_masks = on_device([max(0, num - 1) for num in counters])
        self.first_counter = on_device(self._first_counters[:-1])
        self.max_new = on_device([spec.max_new for spec in specs])
        self.most_new = max(spec.max_new for spec in specs)
        self.has_counters, self.has_chances = any(counters), any(spec.admit == "probability" for spec in specs)
        self.has_counts = any(spec.evict == "lfu" for spec in specs)
        num_slots = self.first_slots[-1]
        self.hashes = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.tags = torch.zeros(num_slots if device.type == "cuda" else 0, dtype=torch.int16, device=device)
        """The lower bits of the hashes, by which kernels look first."""
        self.seen = torch.full((num_slots,), FREE, dtype=torch.int32, device=device)
        """The step in which the id was seen last."""
        self.counts = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """`lfu`: how often it was seen. `age`: the step in which it got its row."""
        self.counters = torch.zeros(max(1, self._first_counters[-1]), dtype=torch.int32, device=device)
        """How often ids without a row were seen; those with the same hash share one."""
        self.statistics = torch.zeros(len(tables), len(STATISTICS), dtype=torch.int64, device=device)
        """Since they were taken last."""
        self.ops: Any = torch_ops
        if device.type == "cuda":
            from embark.trainers.torch.dynamic import map_kernels

            self.ops = map_kernels
        self.first_bucket = self.first_slot // BUCKET_SLOTS
        numbers = torch.arange(len(tables), dtype=torch.int32, device=device)
        self._slot_tables = numbers.repeat_interleave(self.num_buckets * BUCKET_SLOTS if self.has_counts else 0)
        self._counter_tables = numbers.repeat_interleave(on_device(counters))

    def assign(self, ids: Tensor, layout: IdLayout, step: Tensor) -> tuple[Tensor, NewRows]:
        """The rows of a step's ids, −1 where there is no id, and which rows are new; `step` is [1]."""
        self._halve(step)
        found = self.ops.find(self, ids, layout, step)
        candidates = self.ops.candidates(self, found, layout)
        hashes = candidates.hashes.sort(dim=1, stable=True).values
        ranked = self.ops.rank(self, hashes, candidates.nums, step)
        new = NewRows(self.ops.choose(self, hashes, ranked, step), hashes.view(-1), len(self.tables))
        self.ops.place(self, new, ranked, step)
        return self.ops.rows(self, found, layout, candidates), new

    def look_up(self, ids: Tensor, layout: IdLayout) -> Tensor:
        """The rows of ids; nothing changes."""
        found: Tensor = self.ops.rows(self, self.ops.find(self, ids, layout, None), layout, None)
        return found

    def loaded(self) -> None:
        """After `state` was filled: make what follows from it."""
        if self.tags.numel():
            self.tags.copy_(self.hashes)  # keeps the lower bits

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By table, views: what a checkpoint holds."""
        found = {}
        for at, table in enumerate(self.tables):
            slots = slice(*self.first_slots[at : at + 2])
            found[table.name] = {"hashes": self.hashes[slots], "seen": self.seen[slots], "counts": self.counts[slots],
                                 "statistics": self.statistics[at]}
            if self._first_counters[at] < self._first_counters[at + 1]:
                found[table.name]["counters"] = self.counters[slice(*self._first_counters[at : at + 2])]
        return found

    def take_statistics(self) -> dict[str, dict[str, float]]:
        """By table: `STATISTICS` since the last call, and the share of rows that ids have."""
        found, values = {}, self.statistics.tolist()
        for at, table in enumerate(self.tables):
            seen = self.seen[slice(*self.first_slots[at : at + 2])]
            found[table.name] = {**dict(zip(STATISTICS, values[at], strict=True)),
                                 "fullness": int((seen != FREE).sum()) / len(seen)}
        self.statistics.zero_()
        return found

    def _halve(self, step: Tensor) -> None:
        """Counts of tables whose time has come."""
        if not (self.has_counts or self.has_counters):
            return
        is_due = ((step % self._half_lives == 0) & (step > 0)).int()
        if self.has_counts:
            self.counts >>= (is_due * (self.policies == LFU))[self._slot_tables]
        if self.has_counters:
            self.counters[: self._first_counters[-1]] >>= is_due[self._counter_tables]


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts

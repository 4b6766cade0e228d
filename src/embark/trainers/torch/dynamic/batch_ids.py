"""The ids of a batch on their way to rows, and what the map's numbers mean, on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_SLOT, NO_ID = -1, -2  # Stand for a slot: the id has none; there is no id.
LRU, LFU, AGE = range(3)
LAST_HASH = 2**63 - 1  # Fills the unused entries of candidates.
NEVER = 2**62  # A score above all others: of rows that were touched in this step.
LOOKUPS, HITS, DEFAULTS, ADMISSIONS, EVICTIONS = range(5)
STATISTICS = ("lookups", "hits", "defaults", "admissions", "evictions")
"""Ids that were looked up, those that had a row before the step, those that have none after it; rows given, and those
of them that another id lost."""


class IdLayout:
    """The layout of the ids of a batch: table by table, each up to its end."""

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        self.size = ends[-1]
        self.longest = max(end - start for start, end in zip([0, *ends], ends, strict=False))
        self.starts = torch.tensor([0, *ends], device=device)
        self.sizes = self.starts.diff()
        self.tables = torch.repeat_interleave(torch.arange(len(ends), device=device), self.sizes,
                                              output_size=self.size)


@dataclass(frozen=True, slots=True)
class IdSlots:
    """Slots of the ids of a batch."""

    hashes: Tensor
    slots: Tensor
    is_missing: Tensor  # True for ids that have no slot.


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ids without a slot, in the order of the batch: [tables, most ids of a table]."""

    hashes: Tensor
    nums: Tensor  # Number of candidates of each table.
    places: Tensor  # Index of each candidate in the batch.
    before: Tensor | None = None  # Number of ids without a slot up to each, itself included; as kernels need it.
    until: Tensor | None = None  # Number of ids without a slot up to each table.


@dataclass(frozen=True, slots=True)
class RankedIds:
    """Candidates, sorted and without duplicates: [tables, most ids of a table], flat."""

    is_admitted: Tensor
    number: Tensor  # Index among the candidates of its bucket.
    occurrences: Tensor
    counters: Tensor | None  # Index of the id's counter; −1 if it has none.


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows that ids got in a step: [tables, most rows of a table], flat."""

    slots: Tensor  # Slots in the map; −1 for unused entries.
    hashes: Tensor  # Hashes of the ids.
    num_tables: int

    @property
    def tables(self) -> Tensor:
        """Index of each row's table in the map."""
        numbers = torch.arange(self.num_tables, device=self.slots.device)
        return numbers.repeat_interleave(len(self.slots) // self.num_tables)

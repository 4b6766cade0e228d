"""How often each id of a column is looked up, exactly, in a stated amount of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.blocks import Block

NUM_TOP = 20
_SMALL = 1 << 16
_CHUNK = 1 << 20


class IdCounts:
    """Lookups of the ids `first` to `stop`, and those of them in rows whose label is 1."""

    def __init__(self, first: int, stop: int, *, has_many: bool) -> None:
        self.first, self.stop = first, stop
        self._one = np.uint64(1) if has_many else np.uint32(1)
        # Filled at once: pages of zeros that come one by one cost more than all the counting.
        self._all = np.full(stop - first, 0, self._one.dtype)
        self._positive = np.full(stop - first, 0, self._one.dtype)

    @staticmethod
    def size_bytes(num_rows: int, *, has_many: bool) -> int:
        """What counting so many rows of a table takes."""
        return num_rows * 2 * (8 if has_many else 4)

    def __len__(self) -> int:
        return self.stop - self.first

    def add(self, block: Block, feature: int, *, is_whole: bool) -> None:
        """Count a block. `is_whole`: no id is outside the range."""
        lengths, at = block.lengths(feature), block.ids(feature).astype(np.intp)
        if lengths is None:
            positive = at.take(block.positive, axis=0).reshape(-1)
        else:
            positive = at[np.repeat(block.label, lengths) != 0]
        # In place, where np.bincount would make a new array of the table's size for every block.
        for values, into in ((at.reshape(-1), self._all), (positive, self._positive)):
            if not is_whole:
                values = values[(values >= self.first) & (values < self.stop)] - self.first
            np.add.at(into, values, self._one)

    def used(self) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]]:
        """Ids that are looked up at all, rising, how often, and how often with a label of 1; in portions."""
        for start in range(0, len(self._all), _CHUNK):
            at = start + np.flatnonzero(self._all[start : start + _CHUNK] != 0)
            yield self.first + at, self._all[at].astype(np.int64), self._positive[at].astype(np.int64)

    def rates(self, ids: NDArray[Any], prior: float, weight: float) -> NDArray[np.float64]:
        """Share of label 1 among the lookups of each id, drawn to `prior` as by `weight` lookups more."""
        at = ids.astype(np.intp) - self.first
        rates: NDArray[np.float64] = (self._positive[at] + prior * weight) / (self._all[at] + weight)
        return rates

    def is_used(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of the ids are looked up at all."""
        found: NDArray[np.bool_] = self._all[ids.astype(np.intp) - self.first] != 0
        return found


class FewIdCounts:
    """The same of a table with far more rows than the data has lookups: only the ids that are met are held."""

    def __init__(self, stop: int) -> None:
        self.first, self.stop = 0, stop
        self._met: list[tuple[NDArray[np.intp], NDArray[np.bool_]]] = []

    @staticmethod
    def size_bytes(num_ids: int) -> int:
        """What counting so many lookups takes."""
        return 48 * num_ids

    def __len__(self) -> int:
        return self.stop - self.first

    def add(self, block: Block, feature: int, *, is_whole: bool) -> None:
        lengths, ids = block.lengths(feature), block.ids(feature)
        is_positive = np.repeat(block.label, ids.shape[1] if lengths is None else lengths) != 0
        self._met.append((ids.reshape(-1).astype(np.intp), is_positive))

    def used(self) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]]:
        yield self._counted

    def rates(self, ids: NDArray[Any], prior: float, weight: float) -> NDArray[np.float64]:
        _, counts, positive = self._counted
        at, is_used = self._places(ids)
        rates: NDArray[np.float64] = (positive[at] + prior * weight) / (counts[at] + weight)
        return np.where(is_used, rates, prior)

    def is_used(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        return self._places(ids)[1]

    @cached_property
    def _counted(self) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]:
        none = (np.zeros(0, np.intp), np.zeros(0, bool))
        ids, is_positive = (np.concatenate(arrays) for arrays in zip(none, *self._met, strict=True))
        found, places = np.unique(ids, return_inverse=True)
        counts = np.bincount(places, minlength=len(found)).astype(np.int64)
        return found, counts, np.bincount(places[is_positive], minlength=len(found)).astype(np.int64)

    def _places(self, ids: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        found = self._counted[0]
        at = np.minimum(np.searchsorted(found, ids), max(len(found) - 1, 0))
        return at, (found[at] == ids) if len(found) else np.zeros(len(ids), bool)


Counts = IdCounts | FewIdCounts


@dataclass(frozen=True, slots=True)
class TopId:
    """One of the most frequent."""

    id: int
    count: int
    num_positive: int


class Frequencies:
    """What is told of a column, gathered from counts of one range of ids after another."""

    def __init__(self) -> None:
        self.top: list[TopId] = []
        self.id_0 = 0
        self._few = np.zeros(_SMALL, np.int64)
        """Ids that were looked up so often, by how often."""
        self._often: list[NDArray[np.int64]] = []
        """Counts that are larger."""

    def add(self, counts: Counts) -> None:
        for ids, values, positive in counts.used():
            self._few += np.bincount(np.minimum(values, _SMALL - 1), minlength=_SMALL)
            self._often.append(values[values >= _SMALL - 1])
            self._add_top(ids, values, positive)
            if len(ids) and ids[0] == 0:
                self.id_0 = int(values[0])

    def _add_top(self, ids: NDArray[np.intp], values: NDArray[np.int64], positive: NDArray[np.int64]) -> None:
        at = np.flatnonzero(values > (self.top[-1].count if len(self.top) == NUM_TOP else 0))
        if len(at) > NUM_TOP:
            least = np.partition(values[at], len(at) - NUM_TOP)[len(at) - NUM_TOP]
            above = at[values[at] > least]
            at = np.concatenate([above, at[values[at] == least][: NUM_TOP - len(above)]])
        found = [TopId(int(ids[i]), int(values[i]), int(positive[i])) for i in at]
        self.top = sorted([*self.top, *found], key=lambda top: (-top.count, top.id))[:NUM_TOP]

    def summary(self, num_rows: int) -> dict[str, Any]:
        """As `statistics.json` has it; `num_rows` is the table's."""
        values, nums = self._levels()
        num_ids, num_used = int((values * nums).sum()), int(nums.sum())
        ranks = [rank for rank in _ranks() if rank < num_used] + [num_used]
        covered = _covered(values, nums, ranks)
        parts = _covered(values, nums, [-(-num_rows // 100), -(-num_rows // 10)])
        return {
            "rows": num_rows, "num_ids": num_ids, "num_used": num_used,
            "id_0_share": _share(self.id_0, num_ids),
            "top_share": {str(rank): _share(c, num_ids) for rank, c in zip(ranks, covered, strict=True) if rank},
            "share_of_top_1_percent_rows": _share(parts[0], num_ids),
            "share_of_top_10_percent_rows": _share(parts[1], num_ids),
            "top": [{"id": t.id, "count": t.count, "label_rate": _share(t.num_positive, t.count)} for t in self.top],
        }

    def _levels(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How often, falling, and how many ids were."""
        often, often_nums = np.unique(np.concatenate([np.zeros(0, np.int64), *self._often]), return_counts=True)
        few = np.flatnonzero(self._few[: _SMALL - 1])
        few = few[few > 0]
        values = np.concatenate([few, often])[::-1].astype(np.int64)
        return values, np.concatenate([self._few[few], often_nums])[::-1].astype(np.int64)


def _covered(values: NDArray[np.int64], nums: NDArray[np.int64], ranks: Iterable[int]) -> list[int]:
    """Lookups of the so many most frequent ids."""
    num_ids = np.concatenate([[0], np.cumsum(nums)])
    lookups = np.concatenate([[0], np.cumsum(nums * values)])
    covered = []
    for rank in ranks:
        level = int(np.searchsorted(num_ids, rank, side="right")) - 1
        rest = (rank - int(num_ids[level])) * int(values[level]) if level < len(values) else 0
        covered.append(int(lookups[level]) + rest)
    return covered


def _ranks() -> Iterator[int]:
    """1, 2, 5, 10, 20, …"""
    ten = 1
    while ten < 1 << 40:
        yield from (ten, 2 * ten, 5 * ten)
        ten *= 10


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None

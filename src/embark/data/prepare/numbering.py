"""Ids by frequency, whatever the number of distinct values: counted and numbered range of keys by range of keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.pieces import Keys
from embark.data.prepare.pool import Report
from embark.data.prepare.staging import RunKeys

_SAMPLES_PER_PARTITION = 512


@dataclass(frozen=True, slots=True)
class Numbered:
    """What numbering a column gave."""

    num_distinct: int
    """Values in the training rows."""
    num_kept: int
    """Those with an id of their own, from 1 on."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the result goes."""

    keys: Path
    """The distinct keys that have an id, rising, as `.npy`."""
    ids: Path
    """Their ids, as `.npy`."""
    codes: Path
    """int32: for every run one after the other, the id of each of its keys."""


def number_keys(
    runs: Sequence[RunKeys], targets: Targets, *, min_count: int, max_kept: int, max_entries: int, report: Report
) -> Numbered:
    """Id 1 for the most frequent, ties by key; 0 for those seen fewer than `min_count` times and all behind
    `max_kept`. At most about `max_entries` keys of runs are in memory at once."""
    bounds = _partitions(runs, max_entries)
    counted = Path(f"{targets.codes}.counted")
    tally = _Tally()
    sizes: list[int] = []
    with open(counted, "wb") as file:
        for part in range(bounds.shape[1] - 1):
            keys, counts = _count(runs, bounds[:, part], bounds[:, part + 1])
            tally.num_distinct += int((counts > 0).sum())
            is_kept = counts >= min_count
            keys, counts = keys[is_kept], counts[is_kept]
            tally.add(counts)
            sizes.append(len(keys))
            file.write(keys.data)
            file.write(counts.data)
            report(int((bounds[:, part + 1] - bounds[:, part]).sum()), 0, 0)
    num_kept = min(tally.num_values, max_kept)
    ranks = tally.ranks()
    dtype = runs[0].dtype if runs else np.dtype(np.uint64)
    starts = np.cumsum([0] + [run.num_keys for run in runs])
    with (
        open(counted, "rb") as file,
        _npy(targets.keys, dtype, num_kept) as keys_file,
        _npy(targets.ids, np.dtype("<i4"), num_kept) as ids_file,
        open(f"{targets.codes}.part", "wb") as codes_file,
    ):
        for part, size in enumerate(sizes):
            keys = np.frombuffer(file.read(size * dtype.itemsize), dtype)
            ids = ranks.ids_of(np.frombuffer(file.read(size * 8), np.int64))
            ids[ids > num_kept] = 0
            keys_file.write(keys[ids > 0].data)
            ids_file.write(ids[ids > 0].astype("<i4").data)
            for run, start, low, high in zip(runs, starts, bounds[:, part], bounds[:, part + 1], strict=False):
                codes_file.seek(int(start + low) * 4)
                codes_file.write(_looked_up(run.read_keys(int(low), int(high)), keys, ids).data)
            report(int((bounds[:, part + 1] - bounds[:, part]).sum()), 0, 0)
        for written in (keys_file, ids_file, codes_file):
            written.flush()
            os.fsync(written.fileno())
    for path in (targets.keys, targets.ids, targets.codes):
        os.replace(f"{path}.part", path)
    counted.unlink()
    return Numbered(tally.num_distinct, num_kept)


def read_codes(path: Path, starts: Sequence[int], counts: Sequence[int]) -> Iterator[NDArray[np.int32]]:
    """The ids of runs' keys, by each run's place among all."""
    for start, count in zip(starts, counts, strict=True):
        yield np.fromfile(path, "<i4", count, offset=start * 4)


def _partitions(runs: Sequence[RunKeys], max_entries: int) -> NDArray[np.int64]:
    """[runs, partitions + 1]: where each run is cut, at the same keys in all."""
    total = sum(run.num_keys for run in runs)
    num = -(-total // max_entries) if total else 1
    bounds = np.zeros((len(runs), 2), np.int64)
    bounds[:, 1] = [run.num_keys for run in runs]
    if num == 1:
        return bounds
    step = max(1, total // (num * _SAMPLES_PER_PARTITION))
    samples, before = [], 0
    for run in runs:
        samples.append(np.array(run.map_keys()[-before % step :: step]))
        before += run.num_keys
    drawn = np.sort(np.concatenate(samples))
    cuts = np.unique(drawn[np.arange(1, num) * len(drawn) // num])
    inner = np.array([np.searchsorted(run.map_keys(), cuts) for run in runs], np.int64).reshape(len(runs), len(cuts))
    return np.concatenate([bounds[:, :1], inner, bounds[:, 1:]], axis=1)


def _count(
    runs: Sequence[RunKeys], lows: NDArray[np.int64], highs: NDArray[np.int64]
) -> tuple[Keys, NDArray[np.int64]]:
    """The distinct keys between the bounds, rising, and how many training rows have each."""
    pieces = [(run, int(low), int(high)) for run, low, high in zip(runs, lows, highs, strict=True) if high > low]
    if not pieces:
        return np.empty(0, runs[0].dtype if runs else np.uint64), np.empty(0, np.int64)
    keys: Keys = np.concatenate([run.read_keys(low, high) for run, low, high in pieces])
    counts = np.concatenate([run.read_counts(low, high) for run, low, high in pieces])
    if len(pieces) == 1:
        return keys, counts.astype(np.int64)
    order = np.argsort(keys)
    keys, counts = keys[order], counts[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.add.reduceat(counts, starts, dtype=np.int64)


def _looked_up(wanted: Keys, keys: Keys, ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """The id of each, 0 where it has none. Both are rising, so the search walks along."""
    if not len(keys):
        return np.zeros(len(wanted), np.int32)
    places = np.searchsorted(keys, wanted)
    np.minimum(places, len(keys) - 1, out=places)
    found = ids[places].astype(np.int32)
    found[keys[places] != wanted] = 0
    return found


class _Tally:
    """How many values have which count."""

    def __init__(self) -> None:
        self.num_distinct = self.num_values = 0
        self._values_by_count: dict[int, int] = {}

    def add(self, counts: NDArray[np.int64]) -> None:
        self.num_values += len(counts)
        for count, num in zip(*(a.tolist() for a in np.unique(counts, return_counts=True)), strict=True):
            self._values_by_count[count] = self._values_by_count.get(count, 0) + num

    def ranks(self) -> _Ranks:
        counts = np.array(sorted(self._values_by_count), np.int64)
        nums = np.array([self._values_by_count[int(c)] for c in counts], np.int64)
        return _Ranks(counts, 1 + nums.sum() - np.cumsum(nums))


class _Ranks:
    """Hands out ids: those of a count follow all of larger counts, in the order in which they are asked for."""

    def __init__(self, counts: NDArray[np.int64], first_ids: NDArray[np.int64]) -> None:
        self._counts, self._next = counts, first_ids

    def ids_of(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        kinds = np.searchsorted(self._counts, counts)
        order = np.argsort(kinds, kind="stable")
        num_of_kind = np.bincount(kinds, minlength=len(self._counts))
        ids = np.empty(len(counts), np.int64)
        starts = np.cumsum(num_of_kind) - num_of_kind
        ids[order] = np.arange(len(counts)) + np.repeat(self._next - starts, num_of_kind)
        self._next = self._next + num_of_kind
        return ids


def _npy(path: Path, dtype: np.dtype[Any], num: int) -> BinaryIO:
    """A `.npy` file of so many, to write them one behind the other."""
    file = open(f"{path}.part", "wb")  # noqa: SIM115
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num,)})
    return file

"""Ids by frequency. All training rows are counted before the first id is known, so rows wait in files, in runs.

In a run each column's values are numbered among themselves: `codes` from 1 by rising key, 0 for a missing value. The
distinct keys and how many training rows have each are in a second file. Ids are then given one range of keys after
another, whatever the number of distinct values.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.rows import Keys
from embark.data.prepared.layout import Rows
from embark.data.workers import Report
from embark.store.atomic_file import commit

_SAMPLES_PER_PARTITION = 512


@dataclass(frozen=True, slots=True)
class Codes:
    """The values of a column of a run, numbered among themselves."""

    codes: NDArray[Any]
    keys: Keys  # Distinct, rising; code − 1 is the position.
    counts: NDArray[np.uint32]  # Training rows that have each key.


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Where a column's distinct keys of one run lie."""

    path: Path
    start: int  # In bytes; the counts follow the keys.
    num_keys: int
    dtype: np.dtype[Any]

    def read_keys(self, start: int, stop: int) -> Keys:
        return np.fromfile(self.path, self.dtype, stop - start, offset=self.start + start * self.dtype.itemsize)

    def read_counts(self, start: int, stop: int) -> NDArray[np.uint32]:
        offset = self.start + self.num_keys * self.dtype.itemsize + start * 4
        return np.fromfile(self.path, np.uint32, stop - start, offset=offset)

    def map_keys(self) -> Keys:
        """Without reading them, for looking at a few."""
        if not self.num_keys:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.start, (self.num_keys,))


def encode(
    keys: Keys, is_missing: NDArray[np.bool_] | None, is_train: NDArray[np.bool_], lengths: NDArray[np.int32] | None
) -> Codes:
    """Number the values of a run among themselves. `is_train` is by row."""
    if lengths is not None:
        is_train = np.repeat(is_train, lengths)
    present = None if is_missing is None else np.flatnonzero(~is_missing)
    order, rising = _sorted(keys if present is None else keys[present])
    if present is not None:
        order = present[order]
    is_new = np.empty(len(rising), np.bool_)
    is_new[:1] = True
    np.not_equal(rising[1:], rising[:-1], out=is_new[1:])
    distinct = rising[is_new]
    codes = np.zeros(len(keys), np.min_scalar_type(len(distinct)))
    codes[order] = np.cumsum(is_new, dtype=np.uint32)
    counts = np.bincount(codes[is_train], minlength=len(distinct) + 1)[1:].astype(np.uint32)
    return Codes(codes, distinct, counts)


class RunWriter:
    """Writes the runs of one segment."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._paths = _paths(directory, name)
        self._rows, self._keys = (open(f"{path}.part", "wb") for path in self._paths)  # noqa: SIM115
        self._runs: list[dict[str, Any]] = []

    def add(self, rows: Rows, split: NDArray[np.uint8], numbered: Mapping[int, Codes]) -> None:
        """Write one more run; the ids of the columns in `numbered` are their codes."""
        for array in (rows.label, split, rows.dense, *rows.lengths, *rows.ids):
            if array is not None:
                np.save(self._rows, array)
        keys = {}
        for column, codes in numbered.items():
            keys[str(column)] = {"start": self._keys.tell(), "num": len(codes.keys), "dtype": codes.keys.dtype.str}
            self._keys.write(codes.keys.data)
            self._keys.write(codes.counts.data)
        self._runs.append(keys)

    def close(self) -> list[dict[str, Any]]:
        """Everything is on disk; the record by which it is found again."""
        for file, path in zip((self._rows, self._keys), self._paths, strict=True):
            commit(file, path)
        return self._runs


def read_runs(
    directory: Path, name: str, num_runs: int, is_list: Sequence[bool]
) -> Iterator[tuple[Rows, NDArray[np.uint8]]]:
    """The rows of each run of a segment, and their splits."""
    with open(_paths(directory, name)[0], "rb") as file:
        for _ in range(num_runs):
            label, split, dense = (np.load(file) for _ in range(3))
            lengths = tuple(np.load(file) if has_lengths else None for has_lengths in is_list)
            yield Rows(label, dense, tuple(np.load(file) for _ in is_list), lengths), split


def keys_of(directory: Path, name: str, runs: Sequence[dict[str, Any]], column: int) -> list[RunKeys]:
    """A column's keys in each run of a segment."""
    path, found = _paths(directory, name)[1], [run[str(column)] for run in runs]
    return [RunKeys(path, about["start"], about["num"], np.dtype(about["dtype"])) for about in found]


@dataclass(frozen=True, slots=True)
class IdFiles:
    """Where the ids of a column are written."""

    keys: Path  # The distinct keys that have an id, rising, as `.npy`.
    ids: Path  # Their ids, as `.npy`.
    codes: Path  # int32: for every run one after the other, the id of each of its keys.

    def sha256(self) -> str:
        """Of the map: keys and ids."""
        digest = hashlib.sha256()
        for path in (self.keys, self.ids):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def number_keys(
    runs: Sequence[RunKeys], files: IdFiles, *, min_count: int, max_kept: int, max_entries: int, report: Report
) -> tuple[int, int]:
    """Id 1 for the most frequent, ties by key; 0 for those seen fewer than `min_count` times and all behind
    `max_kept`. At most about `max_entries` keys of runs are in memory at once. How many distinct values the training
    rows have, and how many of them have an id of their own."""
    bounds, dtype = _partitions(runs, max_entries), runs[0].dtype if runs else np.dtype(np.uint64)
    parts = list(pairwise(bounds.T))
    counted, num_distinct = Path(f"{files.codes}.counted"), 0
    values_by_count: Counter[int] = Counter()
    with open(counted, "wb") as file:
        for lows, highs in parts:
            keys, counts = _count(runs, lows, highs)
            num_distinct += int((counts > 0).sum())
            is_kept = counts >= min_count
            np.save(file, keys[is_kept])
            np.save(file, counts[is_kept])
            levels, nums = np.unique(counts[is_kept], return_counts=True)
            values_by_count.update(dict(zip(levels.tolist(), nums.tolist(), strict=True)))
            report(int((highs - lows).sum()), 0, 0)
    num_kept = min(values_by_count.total(), max_kept)
    levels = np.array(sorted(values_by_count), np.int64)
    nums = np.array([values_by_count[count] for count in levels.tolist()], np.int64)
    next_ids = 1 + nums.sum() - np.cumsum(nums)
    starts = np.cumsum([0] + [run.num_keys for run in runs])
    with (
        open(counted, "rb") as file, _npy(files.keys, dtype, num_kept) as keys_file,
        _npy(files.ids, np.dtype("<i4"), num_kept) as ids_file, open(f"{files.codes}.part", "wb") as codes_file,
    ):
        for lows, highs in parts:
            keys, ids = np.load(file), _take_ids(np.load(file), levels, next_ids)
            ids[ids > num_kept] = 0
            keys_file.write(keys[ids > 0].data)
            ids_file.write(ids[ids > 0].astype("<i4").data)
            for run, start, low, high in zip(runs, starts, lows, highs, strict=False):
                codes_file.seek(int(start + low) * 4)
                codes_file.write(_look_up(run.read_keys(int(low), int(high)), keys, ids).data)
            report(int((highs - lows).sum()), 0, 0)
        for written, path in ((keys_file, files.keys), (ids_file, files.ids), (codes_file, files.codes)):
            commit(written, path)
    counted.unlink()
    return num_distinct, num_kept


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


def _look_up(wanted: Keys, keys: Keys, ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """The id of each, 0 where it has none. Both are rising, so the search walks along."""
    if not len(keys):
        return np.zeros(len(wanted), np.int32)
    places = np.searchsorted(keys, wanted)
    np.minimum(places, len(keys) - 1, out=places)
    found = ids[places].astype(np.int32)
    found[keys[places] != wanted] = 0
    return found


def _take_ids(counts: NDArray[np.int64], levels: NDArray[np.int64], next_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of values that were seen `counts` times: those of a count follow all of larger counts, in the order of
    the calls. `levels` are all counts, rising, and `next_ids`, which are advanced, the next id of each."""
    kinds = np.searchsorted(levels, counts)
    order = np.argsort(kinds, kind="stable")
    num_of_kind = np.bincount(kinds, minlength=len(levels))
    ids = np.empty(len(counts), np.int64)
    ids[order] = np.arange(len(counts)) + np.repeat(next_ids - (np.cumsum(num_of_kind) - num_of_kind), num_of_kind)
    next_ids += num_of_kind
    return ids


def _npy(path: Path, dtype: np.dtype[Any], num: int) -> BinaryIO:
    """A `.npy` file of so many, to write them one behind the other."""
    file = open(f"{path}.part", "wb")  # noqa: SIM115
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num,)})
    return file


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.rows", directory / f"{name}.keys"


def _sorted(keys: Keys) -> tuple[NDArray[np.integer[Any]], Keys]:
    """The order that sorts them, and them in it."""
    if keys.dtype == np.uint32:
        # Key and position in one word: sorting words takes half the time of sorting positions by key.
        words = keys.astype(np.uint64)
        words <<= np.uint64(32)
        words |= np.arange(len(keys), dtype=np.uint64)
        words.sort()
        return words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    order = np.argsort(keys)
    return order, keys[order]

"""Ids by frequency. All training rows are counted before the first id is known, so rows wait in files, in runs.

In a run each column's values are numbered among themselves: `codes` from 1 by rising key, 0 for a missing value. The
distinct keys and how many training rows have each are in a second file. Ids are then given one range of keys after
another, whatever the number of distinct values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from embark.data.prepared.manifest import IDS
from embark.data.workers import Report
from embark.features.arrays import Array, Bytes, Int32s, Int64s, Mask, UInt32s, is_first
from embark.features.encoding import look_up
from embark.features.layout import Rows
from embark.features.rows import Keys
from embark.store import commit
from embark.values import JsonDict, frozen

_SAMPLES_PER_PARTITION = 512
COUNT, ID = np.dtype("<u4"), np.dtype("<i4")


@frozen
class Codes:
    """The values of a column of a run, numbered among themselves."""

    codes: Array
    keys: Keys  # Distinct, rising; code − 1 is the position.
    counts: UInt32s  # Training rows that have each key.


@frozen
class RunKeys:
    """The position of a column's distinct keys of one run in a file."""

    path: Path
    start: int  # The first byte; the counts follow the keys.
    num_keys: int
    dtype: np.dtype[Any]

    def read_keys(self, start: int, stop: int) -> Keys:
        return np.fromfile(self.path, self.dtype, stop - start, offset=self.start + start * self.dtype.itemsize)

    def read_about(self, start: int, stop: int, dtype: np.dtype[Any] = COUNT) -> Array:
        """Read what is known of each key."""
        offset = self.start + self.num_keys * self.dtype.itemsize + start * dtype.itemsize
        return np.fromfile(self.path, dtype, stop - start, offset=offset)

    def map_keys(self) -> Keys:
        """Map the keys, to look at a few without reading all."""
        if not self.num_keys:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.start, (self.num_keys,))


def encode(
    keys: Keys, is_missing: Mask | None, is_train: Mask, lengths: Int32s | None
) -> Codes:
    """Number the values of a run among themselves. `is_train` is by row."""
    if lengths is not None:
        is_train = np.repeat(is_train, lengths)
    present = None if is_missing is None else np.flatnonzero(~is_missing)
    order, rising = _sorted(keys if present is None else keys[present])
    if present is not None:
        order = present[order]
    is_new = is_first(rising)
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
        self._runs: list[JsonDict] = []

    def add(self, rows: Rows, split: Bytes, keys_of: Mapping[str, tuple[Keys, Array]]) -> None:
        """Write one more run, with the distinct keys by which ids are codes, by name, and what is known of each."""
        arrays = [array for array in (rows.label, split, rows.dense, *rows.lengths, *rows.ids) if array is not None]
        # One header for all: numpy's own take longer than most of the arrays.
        self.write([np.array(json.dumps([(array.dtype.str, array.shape) for array in arrays]))], keys_of)
        for array in arrays:
            self._rows.write(np.ascontiguousarray(array).data)

    def write(self, arrays: Iterable[Array], keys_of: Mapping[str, tuple[Keys, Array]]) -> None:
        """Write arrays as one more run, with the distinct keys of some columns, by name, and what is known of each."""
        keys: JsonDict = {"start": self._rows.tell()}
        for array in arrays:
            np.save(self._rows, array)
        for name, (distinct, about) in keys_of.items():
            keys[name] = {"start": self._keys.tell(), "num": len(distinct), "dtype": distinct.dtype.str}
            self._keys.write(distinct.data)
            self._keys.write(about.data)
        self._runs.append(keys)

    def close(self) -> list[JsonDict]:
        """Write everything to disk, and return the record that says where it is."""
        for file, path in zip((self._rows, self._keys), self._paths, strict=True):
            commit(file, path)
        return self._runs


def read_runs(
    directory: Path, name: str, num_runs: int, is_list: Sequence[bool]
) -> Iterator[tuple[Rows, Bytes]]:
    """Yield the rows of each run of a segment, and their splits."""
    with open(rows_file(directory, name), "rb") as file:
        for _ in range(num_runs):
            arrays = (np.fromfile(file, dtype, math.prod(shape)).reshape(shape)
                      for dtype, shape in json.loads(str(np.load(file))))
            label, split, dense = (next(arrays) for _ in range(3))
            lengths = tuple(next(arrays) if has_lengths else None for has_lengths in is_list)
            yield Rows(label, dense, tuple(arrays), lengths), split


def keys_of(directory: Path, name: str, runs: Sequence[JsonDict], of: str) -> list[RunKeys]:
    """Return the position of the keys with the name `of` in each run of a segment."""
    path, found = _paths(directory, name)[1], [run[of] for run in runs]
    return [RunKeys(path, about["start"], about["num"], np.dtype(about["dtype"])) for about in found]


@frozen
class IdFiles:
    """The files of a column's ids."""

    keys: Path  # The distinct keys that have an id, rising, as `.npy`.
    ids: Path  # The ids of these keys, as `.npy`.
    codes: Path  # int32: for every run one after the other, the id of each of its keys.

    @staticmethod
    def of(folder: Path, name: str, codes: Path = Path()) -> IdFiles:
        """Name the files of a column whose map is in `folder`."""
        return IdFiles(folder / f"{name}.keys.npy", folder / f"{name}.ids.npy", codes)

    @property
    def counts(self) -> Path:
        """How many rows have each of the keys, as `.npy`; of a log's items alone."""
        return self.keys.with_name(self.keys.name.replace(".keys.", ".counts."))

    def record(self, how: str, about: Mapping[str, Any]) -> JsonDict:
        """Return the manifest's record of an id map or of statistics."""
        return {"how": how, **{key: value for key, value in about.items() if key != "name"},
                "keys": f"{IDS}/{self.keys.name}", "ids": f"{IDS}/{self.ids.name}"}

    def sha256(self) -> str:
        """Return the checksum of the map's keys and ids."""
        digest = hashlib.sha256()
        for path in (self.keys, self.ids):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


class _KnownKeys(RunKeys):
    """The keys of an earlier map, as the keys of a run without rows."""

    def read_about(self, start: int, stop: int, dtype: np.dtype[Any] = COUNT) -> Array:
        return np.zeros(stop - start, dtype)


@frozen
class KnownIds:
    """A column's ids of an earlier preparation, which keep their rows."""

    keys: Path
    ids: Path
    num_rows: int  # Rows of the table.

    def as_run(self) -> RunKeys:
        keys = np.load(self.keys, mmap_mode="r")
        return _KnownKeys(self.keys, keys.offset, len(keys), keys.dtype)


@frozen
class Numbered:
    """The result of numbering a column."""

    num_distinct: int  # Values of the training rows.
    num_known: int  # Ids that an earlier map gave.
    num_new: int
    num_rows: int  # Up to the largest id.


def number_keys(
    runs: Sequence[RunKeys], files: IdFiles, *, min_count: int, max_rows: int, max_entries: int, report: Report,
    known: KnownIds | None = None, beside: Sequence[RunKeys] = (), has_counts: bool = False
) -> Numbered:
    """Number the keys: id 1 for the most frequent, ties by key; 0 for those seen fewer than `min_count` times and all
    that find no row below `max_rows`.

    Ids that are `known` stay; new ones follow them. `beside`: runs of other columns that share the ids; they count as
    much. At most about `max_entries` keys of runs are in memory at once. `has_counts`: write how often each key occurs
    in place of the ids of each run's keys.
    """
    every = [*runs, *beside, *([known.as_run()] if known else [])]
    bounds, dtype = partitions(every, max_entries), every[0].dtype if every else np.dtype(np.uint64)
    parts = list(pairwise(bounds.T))
    counted, num_distinct = Path(f"{files.codes}.counted"), 0
    known_ids: Int32s = np.load(known.ids, mmap_mode="r") if known else np.empty(0, np.int32)
    by_count: Counter[int] = Counter()  # How many new values have each count.
    with open(counted, "wb") as file:
        for lows, highs in parts:
            keys, counts = _count(every, lows, highs)
            ids = np.zeros(len(keys), np.int64)
            if known:
                low, high = int(lows[-1]), int(highs[-1])
                ids[np.searchsorted(keys, every[-1].read_keys(low, high))] = known_ids[low:high]
            num_distinct += int((counts > 0).sum())
            is_kept = (ids > 0) | (counts >= min_count)
            for array in (keys, counts, ids):
                np.save(file, array[is_kept])
            levels, nums = np.unique(counts[is_kept & (ids == 0)], return_counts=True)
            by_count.update(dict(zip(levels.tolist(), nums.tolist(), strict=True)))
            report(int((highs - lows).sum()), 0, 0)
    first_new = int(known_ids.max(initial=0)) + 1
    num_known, num_new = len(known_ids), min(by_count.total(), max_rows - first_new)
    levels = np.array(sorted(by_count), np.int64)
    nums = np.array([by_count[count] for count in levels.tolist()], np.int64)
    next_ranks = nums.sum() - np.cumsum(nums)
    starts = np.cumsum([0] + [run.num_keys for run in runs])
    num_kept = num_known + num_new
    with (
        open(counted, "rb") as file, npy_file(files.keys, dtype, (num_kept,)) as keys_file,
        npy_file(files.ids, ID, (num_kept,)) as ids_file,
        npy_file(files.counts, np.dtype("<i8"), (num_kept,)) if has_counts else open(f"{files.codes}.part", "wb")
        as more_file
    ):
        for lows, highs in parts:
            keys, counts, ids = (np.load(file) for _ in range(3))
            is_new = ids == 0
            ranks = _take_ranks(counts[is_new], levels, next_ranks)
            ids[is_new] = np.where(ranks < num_new, first_new + ranks, 0)
            keys_file.write(keys[ids > 0].data)
            ids_file.write(ids[ids > 0].astype("<i4").data)
            if has_counts:
                more_file.write(counts[ids > 0].data)
            for run, start, low, high in () if has_counts else zip(runs, starts, lows, highs, strict=False):
                more_file.seek(int(start + low) * 4)
                more_file.write(look_up(run.read_keys(int(low), int(high)), keys, ids).data)
            report(int((highs - lows).sum()), 0, 0)
        for written, path in ((keys_file, files.keys), (ids_file, files.ids),
                              (more_file, files.counts if has_counts else files.codes)):
            commit(written, path)
    counted.unlink()
    return Numbered(num_distinct, num_known, num_new, first_new + num_new)


def read_codes(path: Path, starts: Sequence[int], counts: Sequence[int], dtype: np.dtype[Any] = ID) -> Iterator[Array]:
    """Yield what each code of a run stands for, by the run's position among all: the ids of its keys."""
    for start, count in zip(starts, counts, strict=True):
        yield np.fromfile(path, dtype, count, offset=start * dtype.itemsize)


def partitions(runs: Sequence[RunKeys], max_entries: int) -> Int64s:
    """Return [runs, partitions + 1]: where each run is cut, at the same keys in all."""
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
    runs: Sequence[RunKeys], lows: Int64s, highs: Int64s
) -> tuple[Keys, Int64s]:
    """Return the distinct keys between the bounds, rising, and how many training rows have each."""
    pieces = [(run, int(low), int(high)) for run, low, high in zip(runs, lows, highs, strict=True) if high > low]
    if not pieces:
        return np.empty(0, runs[0].dtype if runs else np.uint64), np.empty(0, np.int64)
    keys: Keys = np.concatenate([run.read_keys(low, high) for run, low, high in pieces])
    counts = np.concatenate([run.read_about(low, high) for run, low, high in pieces])
    if len(pieces) == 1:
        return keys, counts.astype(np.int64)
    order = np.argsort(keys)
    keys, counts = keys[order], counts[order]
    starts = np.flatnonzero(is_first(keys))
    return keys[starts], np.add.reduceat(counts, starts, dtype=np.int64)


def _take_ranks(
    counts: Int64s, levels: Int64s, next_ranks: Int64s
) -> Int64s:
    """Return the ranks, from 0, of values that were seen `counts` times: those of a count follow all of larger counts,
    in the order of the calls. `levels` are all counts, rising, and `next_ranks`, which are advanced, the next rank of
    each."""
    kinds = np.searchsorted(levels, counts)
    order = np.argsort(kinds, kind="stable")
    num_of_kind = np.bincount(kinds, minlength=len(levels))
    ranks = np.empty(len(counts), np.int64)
    ranks[order] = np.arange(len(counts)) + np.repeat(next_ranks - (np.cumsum(num_of_kind) - num_of_kind), num_of_kind)
    next_ranks += num_of_kind
    return ranks


def npy_file(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> BinaryIO:
    """Open a `.npy` file of this shape, to write its values one behind the other."""
    file = open(f"{path}.part", "wb")  # noqa: SIM115
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return file


def rows_file(directory: Path, segment: str) -> Path:
    return directory / f"{segment}.rows"


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return rows_file(directory, name), directory / f"{name}.keys"


def _sorted(keys: Keys) -> tuple[NDArray[np.integer[Any]], Keys]:
    """Return the order that sorts the keys, and the sorted keys."""
    if keys.dtype == np.uint32:
        # Key and position in one word: sorting words takes half the time of sorting positions by key.
        words = keys.astype(np.uint64)
        words <<= np.uint64(32)
        words |= np.arange(len(keys), dtype=np.uint64)
        words.sort()
        return words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    order = np.argsort(keys)
    return order, keys[order]

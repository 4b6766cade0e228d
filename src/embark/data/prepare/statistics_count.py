"""Counting of values and of their labels over all training rows, one range of keys after another.

Training rows are cut into bins: by time if rows have one, else by chance. A row gets the statistics of the bins before
its own, which hold neither its own label nor that of a later row; a held-out row those of all bins. In a run the pairs
of a value and a bin are numbered among themselves, as `codes`.
"""

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from embark.data.workers import Report
from embark.features.arrays import Array, Bytes, Floats, Hashes, Int64s, Mask, is_first
from embark.features.hashing import hash_counters, stream_key
from embark.features.statistics import statistic_values
from embark.spec.features import Statistic
from embark.store import commit
from embark.values import frozen
from .id_numbering import IdFiles, RunKeys, npy_file, partitions

NUM_BINS = 64
HELD_OUT = NUM_BINS
"""The bin of rows that are not for training: all others are before it."""
_DRAW = 0xB125
_SAMPLES = 1 << 20
ENTRY = np.dtype([("bin", "u1"), ("rows", "<u4"), ("positive", "<u4")])
"""How many training rows of a run are of a value and a bin, and how many of them have label 1."""
BEFORE = np.dtype([("before", "<u4"), ("positive", "<u4"), ("all", "<u4")])
"""Training rows of a value in the bins before one, those of them with label 1, and those in all bins."""


def time_bins(files: Sequence[Path], stop: int | None) -> tuple[int, ...]:
    """Return where bins begin that have about as many rows each, from a sample of the times before `stop`."""
    num_rows = sum(path.stat().st_size // 8 for path in files)
    step = max(1, num_rows // _SAMPLES)
    times = np.sort(np.concatenate([np.fromfile(path, np.int64)[::step] for path in files]))
    if stop is not None:
        times = times[times < stop]
    return tuple(np.unique(times[np.arange(1, NUM_BINS) * len(times) // NUM_BINS]).tolist()) if len(times) else ()


def random_bins(seed: int, file_index: int, positions: Int64s) -> Bytes:
    """Return the bin of each row by its own position alone."""
    bits = hash_counters(stream_key(seed, _DRAW, file_index), positions)
    return (bits >> np.uint64(58)).astype(np.uint8)


@frozen
class BinCodes:
    """The values of a column of a run with their bins, numbered among themselves."""

    codes: Array
    keys: Hashes  # Rising; code is the position. A value occurs once for each of its bins.
    entries: Array


def encode_bins(keys: Hashes, bins: Bytes, is_positive: Mask) -> BinCodes:
    """Number the pairs of a value and a bin of a run."""
    order = np.lexsort((bins, keys))
    rising, their_bins = keys[order], bins[order]
    is_new = is_first(rising, their_bins)
    number = np.cumsum(is_new) - 1
    codes = np.empty(len(keys), np.int32)
    codes[order] = number
    entries = np.zeros(int(is_new.sum()), ENTRY)
    entries["bin"] = their_bins[is_new]
    is_train = entries["bin"] < HELD_OUT
    entries["rows"] = np.where(is_train, np.bincount(number, minlength=len(entries)), 0)
    entries["positive"] = np.where(is_train, np.bincount(number[is_positive[order]], minlength=len(entries)), 0)
    return BinCodes(codes, rising[is_new], entries)


def count_values(
    runs: Sequence[RunKeys], files: IdFiles, wanted: Sequence[Statistic], mean: float, max_entries: int, report: Report
) -> int:
    """Write what is before each value and bin of every run, and the statistics of each value of all training rows.
    Return the number of values. At most about `max_entries` entries of runs are in memory at once."""
    bounds = partitions(runs, max_entries)
    starts = np.cumsum([0] + [run.num_keys for run in runs])
    raw_keys, raw_values = Path(f"{files.codes}.keys"), Path(f"{files.codes}.values")
    num_values = 0
    with (
        open(f"{files.codes}.part", "wb") as codes_file, open(raw_keys, "wb") as keys_file,
        open(raw_values, "wb") as values_file
    ):
        for lows, highs in pairwise(bounds.T):
            pieces = [(run, int(low), int(high)) for run, low, high in zip(runs, lows, highs, strict=True)]
            keys = np.concatenate([run.read_keys(low, high) for run, low, high in pieces] or [np.empty(0, np.uint64)])
            entries = np.concatenate([np.empty(0, ENTRY), *(run.read_about(low, high, ENTRY)
                                                            for run, low, high in pieces)])
            before, distinct, totals = _before(keys, entries)
            at = 0
            for start, (_, low, high) in zip(starts, pieces, strict=False):
                codes_file.seek(int(start + low) * BEFORE.itemsize)
                codes_file.write(before[at : at + high - low].data)
                at += high - low
            keys_file.write(distinct.data)
            values_file.write(_statistics(wanted, totals, totals["all"], mean).data)
            num_values += len(distinct)
            report(len(keys), 0, 0)
        values_file.write(_statistics(wanted, np.zeros(1, BEFORE), np.zeros(1, np.int64), mean).data)
        commit(codes_file, files.codes)
    for raw, path, dtype, shape in ((raw_keys, files.keys, "<u8", (num_values,)),
                                    (raw_values, files.ids, "<f4", (num_values + 1, len(wanted)))):
        with raw.open("rb") as source, npy_file(path, np.dtype(dtype), shape) as target:
            shutil.copyfileobj(source, target)
            commit(target, path)
        raw.unlink()
    return num_values


def _before(keys: Hashes, entries: Array) -> tuple[Array, Hashes, Array]:
    """Return what is before each entry, the distinct keys of training rows, rising, and all that there is of each."""
    order = np.lexsort((entries["bin"], keys))
    keys, bins = keys[order], entries["bin"][order]
    is_key, is_bin = is_first(keys), is_first(keys, bins)
    firsts, number = np.flatnonzero(is_key), np.cumsum(is_key) - 1
    first_of_bin = np.flatnonzero(is_bin)[np.cumsum(is_bin) - 1]
    found, totals = np.empty(len(keys), BEFORE), np.zeros(len(firsts), BEFORE)
    for name, of in (("before", "rows"), ("positive", "positive")):
        values = entries[of][order].astype(np.int64)
        sums = np.cumsum(values) - values
        totals[name] = np.add.reduceat(values, firsts) if len(firsts) else 0
        found[name] = sums[first_of_bin] - sums[firsts][number]
    totals["all"] = totals["before"]
    found["all"] = totals["all"][number]
    in_order = np.empty_like(found)
    in_order[order] = found
    is_trained = totals["all"] > 0
    return in_order, keys[firsts][is_trained], totals[is_trained]


def row_statistics(
    wanted: Sequence[Statistic], before: Array, codes: Array, is_train: Mask, mean: float, *, has_time: bool
) -> Floats:
    """Return the statistics of rows. Without a time, a training row counts all others of its value, which no label
    goes into; with one, only the earlier ones."""
    rows = before[codes]
    counts = rows["before"].astype(np.int64)
    if not has_time:
        counts = rows["all"].astype(np.int64) - is_train
    return _statistics(wanted, rows, counts, mean)


def _statistics(wanted: Sequence[Statistic], rows: Array, counts: Array, mean: float) -> Floats:
    return statistic_values(wanted, counts.astype(np.int64), rows["before"].astype(np.int64),
                            rows["positive"].astype(np.int64), mean)

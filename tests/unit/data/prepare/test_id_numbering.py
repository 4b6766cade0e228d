"""Ids by frequency are those that a Counter gives, however little of the keys fits in memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from embark.data.prepare.id_numbering import IdFiles, RunWriter, encode, keys_of, number_keys, read_codes, read_runs
from embark.data.prepared import Rows


def reference(keys: list[int], *, min_count: int, max_kept: int) -> dict[int, int]:
    """Id 1 for the most frequent, ties by key."""
    counts = Counter(keys)
    retained = sorted((key for key, count in counts.items() if count >= min_count), key=lambda key: (-counts[key], key))
    return {key: rank + 1 for rank, key in enumerate(retained[:max_kept])}


def drawn_runs(dtype, num_runs: int, seed: int = 3):
    draw = np.random.default_rng(seed)
    for _ in range(num_runs):
        num = int(draw.integers(0, 400))
        values = (draw.zipf(1.3, num).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(dtype)
        yield values, draw.random(num) < 0.1, draw.random(num) < 0.8


def staged(column) -> Rows:
    num = len(column.codes)
    return Rows(np.zeros(num, np.uint8), np.zeros((num, 0), np.float32), (column.codes,), (None,))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize(("max_entries", "min_count", "max_kept"),
                         [(10**9, 1, 10**9), (97, 1, 10**9), (97, 3, 10**9), (1, 2, 40), (500, 1, 1), (97, 10**6, 5)])
def test_ids_are_those_of_a_counter_in_one_partition_or_many(tmp_path, dtype, max_entries, min_count, max_kept):
    writer = RunWriter(tmp_path, "00000-00000")
    train_keys, columns = [], []
    for keys, is_missing, is_train in drawn_runs(dtype, 12):
        column = encode(keys, is_missing, is_train, None)
        columns.append((keys, is_missing))
        train_keys += keys[is_train & ~is_missing].tolist()
        writer.add(staged(column), (~is_train).astype(np.uint8), {"0": (column.keys, column.counts)})
    record = writer.close()
    targets = IdFiles(tmp_path / "c.keys.npy", tmp_path / "c.ids.npy", tmp_path / "c.codes")
    runs = keys_of(tmp_path, "00000-00000", record, "0")
    done = []
    numbered = number_keys(
        runs, targets, min_count=min_count, max_rows=1 + max_kept, max_entries=max_entries,
        report=lambda num, _rows, _bad: done.append(num))
    wanted = reference(train_keys, min_count=min_count, max_kept=max_kept)
    assert numbered.num_distinct == len(set(train_keys))
    assert (numbered.num_new, numbered.num_rows) == (len(wanted), 1 + len(wanted))
    assert sum(done) == 2 * sum(run.num_keys for run in runs)
    saved_keys, saved_ids = np.load(targets.keys), np.load(targets.ids)
    assert dict(zip(saved_keys.tolist(), saved_ids.tolist(), strict=True)) == wanted
    assert (np.diff(saved_keys.astype(object)) > 0).all()
    # And the rows, by way of the runs' own codes.
    nums = [run.num_keys for run in runs]
    tables = read_codes(targets.codes, (np.cumsum(nums) - nums).tolist(), nums)
    for run, table, (keys, is_missing) in zip(
        read_runs(tmp_path, "00000-00000", len(record), [False]), tables, columns, strict=True
    ):
        ids = np.concatenate([[0], table])[run[0].ids[0]]
        plain = [0 if missing else wanted.get(key, 0)
                 for key, missing in zip(keys.tolist(), is_missing.tolist(), strict=True)]
        assert ids.tolist() == plain


def test_partitions_keep_near_the_limit(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path, "00000-00000")
    for seed in range(20):
        keys = np.random.default_rng(seed).integers(0, 2**32, 1000, dtype=np.uint32)
        column = encode(keys, None, np.ones(1000, np.bool_), None)
        writer.add(staged(column), np.zeros(1000, np.uint8), {"0": (column.keys, column.counts)})
    runs = keys_of(tmp_path, "00000-00000", writer.close(), "0")
    sizes = []
    number_keys(runs, IdFiles(tmp_path / "k", tmp_path / "i", tmp_path / "c"), min_count=1, max_rows=10**9,
                max_entries=2000, report=lambda num, _rows, _bad: sizes.append(num))
    assert len(sizes) >= 20
    assert max(sizes) <= 2 * 2000


def test_lists_are_numbered_value_by_value(tmp_path):
    column = encode(np.array([7, 7, 9, 4, 7], np.uint64), None, np.array([True, False, True]),
                    np.array([2, 1, 2], np.int32))
    assert column.keys.tolist() == [4, 7, 9]
    assert column.codes.tolist() == [2, 2, 3, 1, 2]
    assert column.counts.tolist() == [1, 3, 0]

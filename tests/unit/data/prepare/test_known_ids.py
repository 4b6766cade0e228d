"""Ids of earlier data keep their rows: random streams of keys, month after month, against plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from embark.data.prepare.id_numbering import IdFiles, KnownIds, RunWriter, encode, keys_of, number_keys, read_codes
from embark.data.prepared import Rows


def reference(old: dict[int, int], counts: Counter[int], *, min_count: int, max_rows: int) -> dict[int, int]:
    """The new map: known keys as they were, and new ones behind them, the most frequent first."""
    new = sorted((key for key in counts if counts[key] >= min_count and key not in old), key=lambda k: (-counts[k], k))
    return old | dict(zip(new, range(len(old) + 1, max_rows), strict=False))


def numbered(folder: Path, months: list[list[np.ndarray]], column_rows: int, dtype, **limits):
    """Each month's map and the rows of its keys, every month with the ids of the one before."""
    known, rows = None, 1
    for month, runs_of_keys in enumerate(months):
        out = folder / str(month)
        writer = RunWriter(out, "s")
        for keys in runs_of_keys:
            codes = encode(keys.astype(dtype), None, np.arange(len(keys)) % 5 > 0, None)
            writer.add(Rows(np.zeros(len(keys), np.uint8), np.zeros((len(keys), 0), np.float32), (codes.codes,),
                            (None,)), np.zeros(len(keys), np.uint8), {"0": (codes.keys, codes.counts)})
        runs = keys_of(out, "s", writer.close(), "0")
        files = IdFiles.of(out, "c", out / "codes")
        found = number_keys(runs, files, report=lambda *_: None, known=known, **limits)
        ids = dict(zip(np.load(files.keys).tolist(), np.load(files.ids).tolist(), strict=True))
        nums = [run.num_keys for run in runs]
        looked_up = dict(
            pair for run, table in zip(runs, read_codes(files.codes, (np.cumsum(nums) - nums).tolist(), nums),
                                       strict=True)
            for pair in zip(run.read_keys(0, run.num_keys).tolist(), table.tolist(), strict=True))
        yield found, ids, looked_up
        rows = max(column_rows, found.num_rows)
        known = KnownIds(files.keys, files.ids, rows)


@pytest.mark.parametrize("max_entries", [10**9, 37])
@pytest.mark.parametrize("seed", range(4))
def test_ids_of_a_random_stream_are_those_of_plain_python(tmp_path, seed, max_entries):
    draw = np.random.default_rng(seed)
    dtype = (np.uint64, np.uint32)[seed % 2]
    months = [[draw.zipf(1.2, int(draw.integers(0, 120))) % 300 * 7 + 40 * month for _ in range(4)]
              for month in range(3)]
    min_count, column_rows = int(draw.integers(1, 4)), int(draw.choice([0, 50]))
    max_rows = column_rows or int(draw.choice([30, 10**6]))
    old: dict[int, int] = {}
    limits = {"min_count": min_count, "max_entries": max_entries}
    found_months = numbered(tmp_path, months, column_rows, dtype, max_rows=max_rows, **limits)
    for number, (found, ids, looked_up) in enumerate(found_months):
        counts = Counter(key for keys in months[number] for at, key in enumerate(keys.tolist()) if at % 5 > 0)
        assert ids == reference(old, counts, min_count=min_count, max_rows=max_rows)
        assert len(set(ids.values())) == len(ids)
        assert (found.num_known, found.num_new) == (len(old), len(ids) - len(old))
        assert looked_up == {key: ids.get(key, 0) for key in looked_up}
        assert set(looked_up) == {key for keys in months[number] for key in keys.tolist()}
        assert found.num_rows == 1 + len(ids)
        old = ids

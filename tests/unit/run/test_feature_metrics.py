"""The interval of permutation importance, and the permutation itself."""

from __future__ import annotations

import numpy as np
import pytest

from embark.data.loader import Batch
from embark.data.permuted_rows import RowsInMemory
from embark.run.feature_metrics import estimate


@pytest.mark.parametrize(("num", "quantile"), [(5, 2.776), (10, 2.262), (30, 2.045), (200, 1.972)])
def test_the_interval_is_student_s_t_at_95_percent(num, quantile):
    values = np.arange(num, dtype=float)
    found = estimate(values.tolist())
    half = quantile * values.std(ddof=1) / num**0.5
    assert found.mean == values.mean()
    assert (found.mean - found.low, found.high - found.mean) == pytest.approx((half, half), rel=5e-3)


def test_95_of_100_intervals_include_what_is_true():
    rng = np.random.default_rng(1)
    hits = sum(estimate(rng.normal(size=8).tolist()).includes_zero for _ in range(2_000))
    assert 0.935 < hits / 2_000 < 0.965


def samples() -> Batch:
    lengths = np.array([[1, 1, 1, 1], [2, 0, 1, 3]], np.int32)
    return Batch(np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(10, dtype=np.int32), lengths,
                 np.array([0, 1, 0, 1], np.float32), is_fixed=False)


def ids_by_row(batch: Batch) -> list[list[list[int]]]:
    ids, rows = batch.ids.tolist(), []
    for lengths in batch.lengths.tolist():
        rows.append([[ids.pop(0) for _ in range(length)] for length in lengths])
    return rows


@pytest.mark.parametrize("feature", [0, 1, 2, 3])
def test_only_the_feature_moves_and_each_row_s_ids_stay_together(feature):
    order = np.array([2, 0, 3, 1])
    before, after = samples(), RowsInMemory(samples()).permuted(feature, order).eval_rows(0, 4)
    expected, dense = ids_by_row(before), before.dense.copy()
    if feature < 2:
        expected[feature] = [expected[feature][row] for row in order]
    else:
        dense[:, feature - 2] = before.dense[order, feature - 2]
    assert ids_by_row(after) == expected
    assert after.dense.tolist() == dense.tolist()
    assert after.label.tolist() == before.label.tolist()


class Numbered:
    """Rows whose id is their place."""

    num_eval_samples = 1_003

    def eval_rows(self, start, stop):
        ids = np.arange(start, stop, dtype=np.int32)
        return Batch(np.zeros((len(ids), 0), np.float32), ids, np.ones((1, len(ids)), np.int32),
                     (ids % 2).astype(np.float32))


@pytest.mark.parametrize("num_rows", [40, 700, 5_000])
def test_folds_are_disjoint_of_one_size_and_spread_over_all_rows(num_rows):
    folds = RowsInMemory.folds(Numbered(), num_rows, 5)
    ids = [fold.eval_rows(0, fold.num_eval_samples).ids for fold in folds]
    everything = np.concatenate(ids)
    assert len({len(one) for one in ids}) == 1
    assert len(everything) == len(set(everything.tolist()))
    assert 0.9 * min(num_rows, 1_003) <= len(everything) <= num_rows
    assert everything.min() == 0
    assert everything.max() == 1_002

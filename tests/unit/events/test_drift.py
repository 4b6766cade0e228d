"""Drift of counts from reference counts: planted drift is found, and chance in small samples is not taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from embark.events.drift import drift

SHARES = {
    "even": np.full(20, 0.05), "skewed": np.array([0.97, *([0.03 / 19] * 19)]), "two": np.array([0.99, 0.01]),
    "zipf": 1 / np.arange(1, 36) / (1 / np.arange(1, 36)).sum(),
}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES.keys())
def test_samples_of_the_same_shares_raise_no_alarm_however_few_rows(shares):
    rng = np.random.default_rng(3)
    found = [drift(rng.multinomial(num_reference, shares), rng.multinomial(num, shares))
             for num_reference in (300, 65_536) for num in (1, 5, 30, 100, 1_000, 20_000) for _ in range(40)]
    assert {one.level for one in found} == {""}
    assert max(one.psi for one in found if one.num == 20_000) < 0.1
    mean = np.mean([drift(rng.multinomial(65_536, shares), rng.multinomial(300, shares)).psi for _ in range(60)])
    assert mean < 0.03  # without the correction, 35 bins and 300 rows have 0.11


def test_a_fifth_of_the_values_gone_missing_is_large_drift():
    before = np.array([100, *([990] * 10)])
    now = 0.77 * before / before.sum()
    now[0] += 0.23
    rng = np.random.default_rng(4)
    found = drift(before, rng.multinomial(300, now))
    assert found.level == "large"
    assert found.psi > 0.5
    assert found.moved[0] == 0
    assert found.reference[0] == 0.01
    assert 0.15 < found.shares[0] < 0.35
    exact = drift(before, 1e6 * now)
    assert exact.psi == pytest.approx(((now - before / 1e4) * np.log(now / (before / 1e4))).sum(), abs=0.01)


def test_a_value_that_the_reference_never_has_is_found_in_few_rows():
    found = drift([0, *([2_000] * 10)], [15, *([3] * 10)])
    assert found.level == "large"
    assert found.moved[0] == 0


def test_levels_follow_the_usual_thresholds_and_empty_counts_have_none():
    before = np.array([5_000, 5_000])
    found = {share: drift(before, np.array([share, 1 - share]) * 20_000).level for share in (0.5, 0.6, 0.68, 0.8)}
    assert found == {0.5: "", 0.6: "", 0.68: "moderate", 0.8: "large"}
    assert drift(before, np.zeros(2)).psi == 0
    assert drift(np.zeros(2), before).level == ""
    assert drift(np.array([1_000, 0]), np.array([0, 1_000])).psi < np.inf


def test_one_replaced_popular_id_is_no_drift():
    before = np.round(100_000 / np.arange(1, 41))
    replaced = before.copy()
    replaced[0], replaced[39] = before[0], before[39] + before[1]
    replaced[1] = 0
    assert drift(before, replaced).level == "large"
    assert drift(before, replaced, without=4).level == ""
    assert drift(before, np.roll(before, 1), without=4).level == "large"
    missing = before * 0.7
    missing[0] += 0.3 * before.sum()  # the first bin is that of missing values, and counts
    assert drift(before, missing, without=4).psi == pytest.approx(drift(before, missing).psi, rel=0.5)
    assert drift(before, missing, without=4).level

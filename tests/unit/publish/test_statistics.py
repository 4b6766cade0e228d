"""The gate's tests are what they say: AUC by all pairs, errors that repeated samples have, few false alarms."""

from __future__ import annotations

import numpy as np
import pytest

from embark.publish.statistics import AucParts, Estimate, LabelCount, calibration_shift, critical, miscalibration

RNG = np.random.default_rng(0)


def draw(num: int, shift: float = 1.0):
    label = RNG.random(num) < 0.3
    scores = np.round(1 / (1 + np.exp(1 - shift * label - RNG.normal(size=num))), 2)  # with ties
    return label, scores, np.clip(scores + RNG.normal(0, 0.05, num), 0, 1)


def test_auc_is_the_share_of_pairs_in_order():
    label, scores, other = draw(200)
    pairs = scores[label][:, None] - scores[~label][None, :]
    assert AucParts.of(label, scores).measured().value == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    drop = AucParts.of(label, scores).measured(AucParts.of(label, other))
    assert drop.value == pytest.approx(
        AucParts.of(label, other).measured().value - AucParts.of(label, scores).measured().value)
    assert AucParts.of(label, scores).measured(AucParts.of(label, scores)) == Estimate(0.0, 0.0)


def test_delong_s_errors_are_those_of_repeated_samples():
    found = []
    for _ in range(300):
        label, scores, other = draw(300)
        one, both = AucParts.of(label, scores), AucParts.of(label, scores).measured(AucParts.of(label, other))
        found.append((one.measured().value, one.measured().error, both.value, both.error))
    values = np.array(found)
    assert values[:, 0].std() == pytest.approx(values[:, 1].mean(), rel=0.15)
    assert values[:, 2].std() == pytest.approx(values[:, 3].mean(), rel=0.15)


@pytest.mark.parametrize("expected", [3.0, 30.0, 300.0])
def test_numbers_of_labels_give_no_more_false_alarms_than_asked_for(expected):
    beyond = critical(0.01, 1)
    labels = RNG.poisson(expected, 20_000)
    alarms = np.mean([LabelCount(float(one), expected, 1.0).beyond(0.0) > beyond for one in labels])
    assert alarms < 2 * 0.01 * 1.35  # two sides; few labels are not quite normal
    then, now = RNG.poisson(expected, 5_000), RNG.poisson(expected, 5_000)
    alarms = np.mean([calibration_shift(expected, float(a), expected, float(b)).beyond(0.0) > beyond
                      for a, b in zip(then, now, strict=True)])
    assert alarms < 2 * 0.01 * 2
    assert calibration_shift(expected, expected, expected, 0.0).value > 1


def test_predictions_within_the_bound_are_never_beyond_it():
    label = np.arange(1000) < 250
    assert miscalibration(label, np.full(1000, 0.27)).beyond(np.log(1.1)) < 0
    assert miscalibration(label, np.full(1000, 0.5)).beyond(np.log(1.1)) > 5
    assert miscalibration(label, np.full(1000, 0.1)).beyond(np.log(1.1)) > 5

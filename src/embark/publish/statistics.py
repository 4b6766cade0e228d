"""Tests of predictions on labelled rows: AUC with its error by DeLong, calibration, log loss against another model's.

Each test says by how many standard errors a figure is beyond its bound: what chance explains refuses nothing.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from embark.features.arrays import Doubles, Mask
from embark.values import frozen

_LEAST_PROBABILITY = 1e-7


@frozen
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float

    def beyond(self, bound: float) -> float:
        """Return by how many standard errors the value exceeds the bound."""
        excess = self.value - bound
        return excess / self.error if self.error > 0 else math.copysign(math.inf, excess) if excess else 0.0


def critical(false_alarm_rate: float, num_tests: int) -> float:
    """Return how many standard errors chance alone exceeds in any of so many one-sided tests, with at most this
    probability (Bonferroni)."""
    return NormalDist().inv_cdf(1 - false_alarm_rate / max(1, num_tests))


@frozen
class AucParts:
    """DeLong's structural components (https://doi.org/10.2307/2531595): the share of negatives below each positive, and
    the share of positives above each negative."""

    positives: Doubles
    negatives: Doubles

    @staticmethod
    def of(label: Mask, scores: Doubles) -> AucParts:
        """Compute the components; both labels must occur."""
        own = np.empty(len(scores))
        own[label], own[~label] = _mid_ranks(scores[label]), _mid_ranks(scores[~label])
        above = _mid_ranks(scores) - own  # of the other label, below each
        num = int(label.sum())
        return AucParts(above[label] / (len(label) - num), 1 - above[~label] / num)

    def measured(self, other: AucParts | None = None) -> Estimate:
        """Return the AUC; with `other`, from the same rows, how much higher the other's AUC is."""
        positives = self.positives if other is None else other.positives - self.positives
        negatives = self.negatives if other is None else other.negatives - self.negatives
        variance = sum(float(np.var(part, ddof=1)) / len(part) for part in (positives, negatives) if len(part) > 1)
        return Estimate(float(positives.mean()), math.sqrt(variance))


def _mid_ranks(values: Doubles) -> Doubles:
    """Return ranks from 1 on; equal values share the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Doubles = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return ranks


def log_losses(label: Mask, scores: Doubles) -> Doubles:
    """Return the log loss of each row."""
    clipped = np.clip(scores, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    losses: Doubles = -np.log(np.where(label, clipped, 1 - clipped))
    return losses


def loss_increase(before: Doubles, now: Doubles) -> Estimate:
    """Return the mean difference of two losses of the same rows, as a share of the mean before."""
    base = max(float(before.mean()), 1e-12)
    difference = now - before
    return Estimate(float(difference.mean()) / base, float(difference.std(ddof=1)) / math.sqrt(len(now)) / base)


@frozen
class LabelCount:
    """A number of labels beside the number that predictions expect; its square root is nearly normal, even for few."""

    observed: float
    expected: float
    dispersion: float  # Variance over mean.

    @property
    def value(self) -> float:
        """Return |log| of expected over observed. Half a label is added to both, so that rows without any have a
        value."""
        return abs(math.log((self.expected + 0.5) / (self.observed + 0.5)))

    def beyond(self, bound: float) -> float:
        """Return by how many standard errors the |log| exceeds the bound."""
        side = 1 if self.observed > self.expected else -1
        limit, observed = self.expected * math.exp(side * bound), self.observed + (side < 0)  # for continuity
        return 2 * side * (math.sqrt(observed) - math.sqrt(limit)) / math.sqrt(max(self.dispersion, 1e-12))


def miscalibration(label: Mask, scores: Doubles) -> LabelCount:
    """Measure how far the number of labels is from what the predictions expect, if labels are drawn from them."""
    expected = max(float(scores.sum()), 1e-9)
    return LabelCount(float(label.sum()), expected, float((scores * (1 - scores)).sum()) / expected)


def calibration_shift(predicted_then: float, labels_then: float, predicted: float, labels: float) -> LabelCount:
    """Measure how far the number of labels is from what the predictions expect, if these are as far off as on earlier
    rows."""
    expected = max(predicted * (labels_then + 0.5) / (predicted_then + 0.5), 1e-9)
    return LabelCount(labels, expected, 1 + expected / (labels_then + 0.5))

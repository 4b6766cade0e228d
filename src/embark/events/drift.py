"""How far counts have moved from reference counts of the same bins: the population stability index (PSI), without the
part that chance alone gives a small sample; and the bins that scores are counted in."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embark.values import frozen

MODERATE, LARGE = 0.1, 0.25
"""The usual thresholds; where they come from: Yurdakul and Naranjo, https://doi.org/10.1080/00949655.2019.1663434"""
_SURE = 4.0  # Standard deviations; one of 30,000 samples without drift is further off.

Level = Literal["", "moderate", "large"]
Counts = Sequence[float] | NDArray[Any]


@frozen
class Drift:
    """The drift of one column."""

    psi: float  # The index, without the part that chance gives.
    level: Level  # Empty: below the thresholds, or too few rows to say.
    shares: tuple[float, ...]  # Share of the rows in each bin.
    reference: tuple[float, ...]
    num: int

    @property
    def moved(self) -> list[int]:
        """The bins, those first whose share changed most."""
        return sorted(range(len(self.shares)), key=lambda i: -abs(self.shares[i] - self.reference[i]))


def drift(reference: Counts, counts: Counts, *, without: int = 0) -> Drift:
    """Compare counts with reference counts. PSI has the expectation (bins − 1)(1/n + 1/m) if nothing moved: this is
    subtracted. A level needs a likelihood-ratio test, too, that chance does not pass. `without` leaves so many of the
    bins that moved most out of the PSI, but never the first, which is that of missing values."""
    before, now = np.asarray(reference, np.float64), np.asarray(counts, np.float64)
    is_used = (before > 0) | (now > 0)
    num_bins, n, m = int(is_used.sum()), float(now.sum()), float(before.sum())
    p_all, q_all = before / max(m, 1.0), now / max(n, 1.0)
    if not n or not m or num_bins < 2:
        return Drift(0.0, "", tuple(q_all.tolist()), tuple(p_all.tolist()), int(n))
    p = (before[is_used] + 0.5) / (m + 0.5 * num_bins)
    q = (now[is_used] + 0.5 * num_bins * p) / (n + 0.5 * num_bins)  # an empty bin is no infinite drift
    parts = (q - p) * np.log(q / p)
    others = np.sort(parts[1:] if is_used[0] else parts)
    left_out = float(others[len(others) - without :].sum()) if without else 0.0
    psi = float(parts.sum()) - left_out - (num_bins - 1) * (1 / n + 1 / m)
    level: Level = "" if psi < MODERATE or not _is_sure(before, now) else "moderate" if psi < LARGE else "large"
    return Drift(max(0.0, psi), level, tuple(q_all.tolist()), tuple(p_all.tolist()), int(n))


def _is_sure(before: NDArray[np.float64], now: NDArray[np.float64]) -> bool:
    """Test by the likelihood ratio that both are samples of the same shares, which also holds if a bin expects no row;
    the quantile of its chi-squared distribution is that of Wilson and Hilferty."""
    statistic, total = 0.0, before.sum() + now.sum()
    for sample in (before, now):
        expected = (before + now) * (sample.sum() / total)
        is_there = sample > 0
        statistic += 2 * float((sample[is_there] * np.log(sample[is_there] / expected[is_there])).sum())
    free = int(((before + now) > 0).sum()) - 1
    return statistic > free * (1 - 2 / (9 * free) + _SURE * math.sqrt(2 / (9 * free))) ** 3


# Bins of scores, in evaluation and in serving, are half a unit of the logit wide, so that scores near 0 and 1 differ.
_WIDTH = 0.5
_LARGEST = 8.0
LOGITS = np.arange(-_LARGEST, _LARGEST + _WIDTH / 2, _WIDTH)  # Edges; below the first and above the last is a bin too.
NUM_SCORE_BINS = len(LOGITS) + 1
SCORES = 1 / (1 + np.exp(-LOGITS))  # These edges as probabilities.


def logit_counts(logits: NDArray[Any]) -> list[int]:
    """Count the logits in each bin."""
    found: list[int] = np.bincount(np.searchsorted(LOGITS, logits, side="right"), minlength=NUM_SCORE_BINS).tolist()
    return found


def score_bins(scores: NDArray[Any]) -> NDArray[np.intp]:
    """Return the bin of each probability."""
    return np.searchsorted(SCORES, scores, side="right")

"""AUC, normalized entropy, log loss and calibration from binned scores, whichever library counted them.

Scores are counted in fine bins of the logit, so a window of any length has a fixed size and adds up over ranks. The
AUC differs from the exact one by less than 1e-5.
"""

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
NUM_BINS = 16_384
LARGEST_LOGIT = 12.0
STATE_SIZE = 2 * NUM_BINS + 4
"""Samples without a click and with one, by bin; then summed log loss, predicted clicks, clicks, number of samples."""


def metrics_of(state: F64) -> dict[str, float]:
    """The metrics of a window's state; undefined ones are NaN."""
    negatives, positives = state[:NUM_BINS], state[NUM_BINS : 2 * NUM_BINS]
    loss, predicted, clicks, samples = state[2 * NUM_BINS :].tolist()
    log_loss = _ratio(loss, samples)
    return {
        "auc": _auc(negatives, positives), "log_loss": log_loss,
        "normalized_entropy": _ratio(log_loss, _entropy(_ratio(clicks, samples))),
        "calibration": _ratio(predicted, clicks), "num_samples": samples,
    }


def count_probabilities(state: F64, probability: NDArray[np.floating], label: NDArray[np.floating]) -> None:
    """Add samples whose true click probability is known."""
    p = np.clip(probability.astype(np.float64), 1e-9, 1 - 1e-9)
    logits = np.log(p) - np.log1p(-p)
    bins = (np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT) + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT))
    numbers = np.minimum(bins.astype(np.int64), NUM_BINS - 1) + label.astype(np.int64) * NUM_BINS
    state[: 2 * NUM_BINS] += np.bincount(numbers, minlength=2 * NUM_BINS)
    loss = -(label * np.log(p) + (1 - label) * np.log1p(-p)).sum()
    state[2 * NUM_BINS :] += [loss, p.sum(), label.sum(), len(label)]


def _auc(negatives: F64, positives: F64) -> float:
    """Share of (click, no click) pairs in the right order; a tie is half right."""
    below = negatives.cumsum() - negatives
    right = float((positives * (below + negatives / 2)).sum())
    return _ratio(right, float(positives.sum() * negatives.sum()))


def _entropy(rate: float) -> float:
    if not 0 < rate < 1:
        return math.nan
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan

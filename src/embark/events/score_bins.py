"""The bins that scores are counted in, in evaluation and in serving: half a unit of the logit wide, so that scores near
0 and 1 keep apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDTH = 0.5
_LARGEST = 8.0
LOGITS = np.arange(-_LARGEST, _LARGEST + _WIDTH / 2, _WIDTH)  # Edges; below the first and above the last is a bin too.
NUM_SCORE_BINS = len(LOGITS) + 1
SCORES = 1 / (1 + np.exp(-LOGITS))  # The same edges as probabilities.


def logit_counts(logits: NDArray[Any]) -> list[int]:
    """How many lie in each bin."""
    found: list[int] = np.bincount(np.searchsorted(LOGITS, logits, side="right"), minlength=NUM_SCORE_BINS).tolist()
    return found


def score_bins(scores: NDArray[Any]) -> NDArray[np.intp]:
    """The bin of each probability."""
    return np.searchsorted(SCORES, scores, side="right")

"""Labels that come back for scores: predicted against observed, by bin of the score."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.events.drift import NUM_SCORE_BINS, score_bins
from embark.serve.request_rows import Scores

MAX_REQUESTS, MAX_ROWS = 65_536, 1 << 20  # Whose scores are kept for their labels.
MAX_ID_CHARS = 256
MAX_VERSIONS = 16  # Whose labels are counted in one window: clients say which, and each becomes an event.
Kept = Sequence[float | None] | NDArray[np.float64]  # NaN, and in JSON None, of a row without a score.
_SENT = """send {"id": "…", "labels": [0, 1, null, …]}, or {"version": 1, "scores": […], "labels": […]}"""


class LabelSums:
    """Sums of one version since they were last written."""

    def __init__(self) -> None:
        self.num = np.zeros(NUM_SCORE_BINS, np.int64)
        self.predicted, self.clicks = np.zeros(NUM_SCORE_BINS), np.zeros(NUM_SCORE_BINS)

    def add(self, scores: NDArray[np.float64], labels: NDArray[np.float64]) -> None:
        """Add rows that have a score and a label."""
        bins = score_bins(scores)
        for total, weights in ((self.num, None), (self.predicted, scores), (self.clicks, labels)):
            total += np.bincount(bins, weights, NUM_SCORE_BINS).astype(total.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"num": self.num.tolist(), "predicted": [round(one, 6) for one in self.predicted.tolist()],
                "clicks": self.clicks.tolist()}


class Feedback:
    """Keeps the scores of the last requests that have an id until their labels come."""

    def __init__(self) -> None:
        self._scores: OrderedDict[str, tuple[int, Kept]] = OrderedDict()
        self._num_rows = 0
        self._sums: dict[int, LabelSums] = {}
        self._lock = threading.Lock()

    def keep(self, request_id: str, found: Scores) -> None:
        """Keep the scores of a request for labels that may come."""
        scores = found.values.astype(np.float64)
        if len(request_id) > MAX_ID_CHARS or scores.ndim > 1 or np.isnan(scores).all():  # only of one task
            return
        with self._lock:
            self._drop(request_id)
            self._scores[request_id] = found.version, scores
            self._num_rows += len(found)
            while len(self._scores) > MAX_REQUESTS or self._num_rows > MAX_ROWS:
                self._drop(next(iter(self._scores)))

    def _drop(self, request_id: str) -> tuple[int, Kept] | None:
        found = self._scores.pop(request_id, None)
        self._num_rows -= len(found[1]) if found else 0
        return found

    def add(self, body: Mapping[str, Any]) -> int:
        """Return how many rows had a score and a label; 0 if no scores of the request are known. Raises ValueError."""
        labels, request_id = body.get("labels"), body.get("id")
        if not isinstance(labels, list) or not labels or not all(one is None or one in (0, 1) for one in labels):
            raise ValueError(f"'labels' is no array of 0, 1 and null; {_SENT}")
        if "scores" in body:
            version, scores = body.get("version"), body["scores"]
            if type(version) is not int or not 0 < version < 1 << 53 or not isinstance(scores, list) or not all(
                    one is None or (isinstance(one, int | float) and 0 <= one <= 1) for one in scores):
                raise ValueError(f"'version' is no number, or 'scores' no array of probabilities; {_SENT}")
            if version not in self._sums and len(self._sums) >= MAX_VERSIONS:
                raise ValueError(f"labels of {MAX_VERSIONS} other versions came in the last seconds; send them later")
            found: tuple[int, Kept] = version, scores
        elif isinstance(request_id, str):
            with self._lock:
                known = self._scores.get(request_id)
                if known is None:
                    return 0
                if len(known[1]) == len(labels):
                    self._drop(request_id)
            found = known
        else:
            raise ValueError(_SENT)
        if len(found[1]) != len(labels):
            raise ValueError(f"{len(labels)} labels, and the request has {len(found[1])} scores")
        scores_of, labels_of = (np.array(one, np.float64) for one in (found[1], labels))
        is_both = np.isfinite(scores_of) & np.isfinite(labels_of)
        with self._lock:
            self._sums.setdefault(found[0], LabelSums()).add(scores_of[is_both], labels_of[is_both])
        return len(labels)

    def take(self) -> dict[int, LabelSums]:
        """Return what came since the last call, by version."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return taken

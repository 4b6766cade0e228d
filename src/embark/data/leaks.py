"""How well one column alone predicts the label: almost perfect prediction means a leak."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.counts import Counts
from embark.data.prepared import Manifest, Split
from embark.data.prepared.parts import iter_blocks

MAX_IDS = 2_000_000
"""Held-out ids of a column that are scored; more would give the same."""
MAX_ROWS = 1_000_000
MIN_OF_EACH = 10
"""Rows of each label, below which an AUC says nothing."""
PRIOR_WEIGHT = 10.0
"""An id seen once or twice says little: its label rate is drawn to that of all rows as by so many rows more."""


@dataclass(frozen=True, slots=True)
class ColumnScore:
    """How well a column predicts the label of held-out rows."""

    auc: float | None
    """Of the column as the only feature, never below 0.5; None where there are too few rows."""
    new_share: float | None = None
    """Of the held-out ids, those that no training row has."""


def held_out(manifest: Manifest) -> Split | None:
    """The rows to look at: those of validation, else of test."""
    return next((split for split in ("validation", "test") if manifest.num_rows(split)), None)


class SparseScorer:
    """The ids of held-out rows, each scored by the label rate it has among the training rows."""

    def __init__(self, directory: Path, manifest: Manifest, feature: int, prior: float) -> None:
        split, multi_hot = held_out(manifest), manifest.layout.features[feature].multi_hot
        assert split is not None
        at_most = max(1, MAX_IDS // (manifest.block_rows * multi_hot))
        some = list(iter_blocks(directory, manifest, split, at_most))
        lengths = [block.lengths(feature) for block in some]
        self._ids = np.concatenate([block.ids(feature).reshape(-1) for block in some])
        self._label = np.concatenate([block.label for block in some])
        self._lengths = np.concatenate(
            [np.full(len(b.label), multi_hot) if n is None else n.astype(np.intp)
             for b, n in zip(some, lengths, strict=True)]
        )
        self._prior = prior
        self._rates = np.full(len(self._ids), prior)
        self._is_new = np.ones(len(self._ids), bool)

    def add(self, counts: Counts) -> None:
        """Score the ids of a range."""
        at = np.flatnonzero((self._ids >= counts.first) & (self._ids < counts.stop))
        self._rates[at] = counts.rates(self._ids[at], self._prior, PRIOR_WEIGHT)
        self._is_new[at] = ~counts.is_used(self._ids[at])

    def result(self) -> ColumnScore:
        """A row's score is the mean of its ids'."""
        row = np.repeat(np.arange(len(self._label)), self._lengths)
        sums = np.bincount(row, weights=self._rates, minlength=len(self._label))
        scores = np.where(self._lengths > 0, sums / np.maximum(self._lengths, 1), self._prior)
        return ColumnScore(auc(scores, self._label), float(self._is_new.mean()) if len(self._ids) else None)


def score_dense_columns(directory: Path, manifest: Manifest) -> dict[str, ColumnScore]:
    """Of each dense column, its own value being the score."""
    split = held_out(manifest)
    assert split is not None
    some = list(iter_blocks(directory, manifest, split, max(1, MAX_ROWS // manifest.block_rows)))
    label = np.concatenate([block.label for block in some])
    found = {}
    for i, name in enumerate(manifest.layout.dense):
        found[name] = ColumnScore(auc(np.concatenate([block.dense[:, i] for block in some]).astype(np.float64), label))
    return found


def auc(scores: NDArray[np.float64], label: NDArray[Any]) -> float | None:
    """The share of pairs of a 1 and a 0 that the score orders rightly, or, if more are, wrongly."""
    num_positive = int((label == 1).sum())
    num_negative = len(label) - num_positive
    if min(num_positive, num_negative) < MIN_OF_EACH:
        return None
    values, place = np.unique(scores, return_inverse=True)
    positive = np.bincount(place, weights=label == 1, minlength=len(values))
    negative = np.bincount(place, weights=label != 1, minlength=len(values))
    below = np.cumsum(negative) - negative
    area = float((positive * (below + negative / 2)).sum()) / num_positive / num_negative
    return max(area, 1 - area)


def equal_columns(directory: Path, manifest: Manifest) -> list[tuple[str, ...]]:
    """Columns that hold the same in every training row that was looked at."""
    layout = manifest.layout
    marks: dict[str, tuple[str, int]] = {}

    def mark(name: str, kind: str, values: NDArray[Any]) -> None:
        before = marks.get(name, ("", 0))[1]
        marks[name] = kind, zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data, before)

    for block in iter_blocks(directory, manifest, "train", max(1, MAX_ROWS // manifest.block_rows)):
        for i, name in enumerate(layout.dense):
            mark(name, "dense", block.dense[:, i])
        for i, feature in enumerate(layout.features):
            mark(feature.name, f"{feature.id_dtype} {feature.multi_hot} {feature.is_ragged}", block.ids(i).reshape(-1))
            lengths = block.lengths(i)
            if lengths is not None:
                mark(feature.name, f"{feature.id_dtype} ragged", lengths)
    groups: dict[tuple[str, int], list[str]] = {}
    for name, seen in marks.items():
        groups.setdefault(seen, []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]

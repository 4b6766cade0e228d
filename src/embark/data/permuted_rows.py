"""Samples in memory, for measuring what a model loses when a feature no longer belongs to its sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.loader import Batch, SampleSource

_CHUNK_ROWS = 128


class RowsInMemory:
    """Some of a source's held-out samples, of which a feature may be that of other samples."""

    notes: tuple[str, ...] = ()
    num_train_samples = 0

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.num_eval_samples = len(batch.label)
        self._starts = np.concatenate([[0], np.cumsum(batch.lengths.sum(axis=1, dtype=np.int64))])
        offsets = np.zeros((len(batch.lengths), len(batch.label) + 1), np.int64)
        np.cumsum(batch.lengths, axis=1, out=offsets[:, 1:])
        self._offsets = offsets + self._starts[:-1, None]

    @staticmethod
    def folds(source: SampleSource, num_rows: int, num_folds: int) -> list[RowsInMemory]:
        """At most `num_rows`, dealt to folds of one size in chunks spread evenly over the source."""
        per_fold = min(num_rows, source.num_eval_samples) // num_folds
        if not per_fold:
            return []
        chunks_per_fold = -(-per_fold // _CHUNK_ROWS)
        size, num_chunks = per_fold // chunks_per_fold, chunks_per_fold * num_folds
        starts = [i * (source.num_eval_samples - size) // max(1, num_chunks - 1) for i in range(num_chunks)]
        return [RowsInMemory(_joined([source.eval_rows(start, start + size) for start in starts[fold::num_folds]]))
                for fold in range(num_folds)]

    def permuted(self, feature: int, order: NDArray[np.int64]) -> RowsInMemory:
        """With the values of a feature in another order of the rows. The sparse features come first, then the dense."""
        batch = self.batch
        if (column := feature - len(batch.lengths)) >= 0:
            dense = batch.dense.copy()
            dense[:, column] = dense[order, column]
            return RowsInMemory(replace(batch, dense=dense))
        lengths, ids = batch.lengths.copy(), batch.ids.copy()
        weights = None if batch.weights is None else batch.weights.copy()
        lengths[feature] = batch.lengths[feature][order]
        ends = np.cumsum(lengths[feature], dtype=np.int64)
        # Of each id: where it was, which is its row's first place there, and its own place within the row.
        moved = np.repeat(self._offsets[feature][order] - (ends - lengths[feature]), lengths[feature])
        moved += np.arange(len(moved))
        ids[self._starts[feature] : self._starts[feature + 1]] = batch.ids[moved]
        if weights is not None and batch.weights is not None:
            weights[self._starts[feature] : self._starts[feature + 1]] = batch.weights[moved]
        return RowsInMemory(replace(batch, ids=ids, lengths=lengths, weights=weights))

    def taken(self, samples: NDArray[np.int64]) -> RowsInMemory:
        """These samples alone, in this order."""
        batch, lengths = self.batch, self.batch.lengths[:, samples]
        places = []
        for of_feature, starts in zip(lengths, self._offsets, strict=True):
            ends = np.cumsum(of_feature, dtype=np.int64)
            places.append(np.repeat(starts[samples] - (ends - of_feature), of_feature)
                          + np.arange(ends[-1] if len(ends) else 0))
        at = np.concatenate(places)
        return RowsInMemory(replace(batch, dense=batch.dense[samples], label=batch.label[samples], lengths=lengths,
                                    ids=batch.ids[at], best_probability=None,
                                    weights=None if batch.weights is None else batch.weights[at]))

    def ids_of(self, feature: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """All ids of a sparse feature, and the sample of each."""
        ids = self.batch.ids[self._starts[feature] : self._starts[feature + 1]]
        return ids, np.repeat(np.arange(self.num_eval_samples), self.batch.lengths[feature])

    def fingerprint(self) -> str:
        return ""

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        raise NotImplementedError("there is nothing to train on")

    def eval_rows(self, start: int, stop: int) -> Batch:
        batch, at = self.batch, np.concatenate([np.arange(of[start], of[stop]) for of in self._offsets])
        return replace(batch, dense=batch.dense[start:stop], label=batch.label[start:stop], ids=batch.ids[at],
                       lengths=batch.lengths[:, start:stop], best_probability=None,
                       weights=None if batch.weights is None else batch.weights[at])


def _joined(batches: list[Batch]) -> Batch:
    ends = [np.cumsum(batch.lengths.sum(axis=1, dtype=np.int64)) for batch in batches]

    def by_feature(values: list[NDArray[Any]]) -> NDArray[Any]:
        by_batch = [np.split(of, at[:-1]) for of, at in zip(values, ends, strict=True)]
        return np.concatenate([of[feature] for feature in range(len(ends[0])) for of in by_batch])

    weights = [batch.weights for batch in batches if batch.weights is not None]
    return replace(
        batches[0], dense=np.concatenate([b.dense for b in batches]), label=np.concatenate([b.label for b in batches]),
        ids=by_feature([batch.ids for batch in batches]), weights=by_feature(weights) if weights else None,
        lengths=np.concatenate([b.lengths for b in batches], axis=1), best_probability=None)

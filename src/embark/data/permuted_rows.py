"""Samples in memory, for measuring what a model loses when a feature no longer belongs to its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embark.features.arrays import Int32s, Int64s, ragged_positions
from .loader import Batch, SampleSource

_CHUNK_ROWS = 128


def dense_groups(columns: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return each column with the position of the first of its dense values, and how many it has, one after another."""
    return [(name, columns.index(name), columns.count(name)) for name in dict.fromkeys(columns)]


class RowsInMemory:
    """Some of a source's held-out samples; a feature may be replaced by that of other samples."""

    notes: tuple[str, ...] = ()
    num_train_samples = 0

    def __init__(self, batch: Batch) -> None:
        self.batch = replace(batch, best_probability=None)
        self.num_eval_samples = len(batch.label)
        self._starts = batch.starts()

    @staticmethod
    def folds(source: SampleSource, num_rows: int, num_folds: int) -> list[RowsInMemory]:
        """Deal at most `num_rows` samples to folds of one size, in chunks spread evenly over the source."""
        per_fold = min(num_rows, source.num_eval_samples) // num_folds
        if not per_fold:
            return []
        chunks_per_fold = -(-per_fold // _CHUNK_ROWS)
        size, num_chunks = per_fold // chunks_per_fold, chunks_per_fold * num_folds
        starts = [i * (source.num_eval_samples - size) // max(1, num_chunks - 1) for i in range(num_chunks)]
        return [RowsInMemory(Batch.join([source.eval_rows(start, start + size) for start in starts[fold::num_folds]]))
                for fold in range(num_folds)]

    def permuted(self, feature: int, order: Int64s, width: int = 1) -> RowsInMemory:
        """Return the samples with the values of a feature in another order. The sparse features come first, then the
        dense ones, of which a column may have several: the next `width`."""
        batch = self.batch
        if (column := feature - len(batch.lengths)) >= 0:
            dense = batch.dense.copy()
            dense[:, column : column + width] = dense[order, column : column + width]
            return RowsInMemory(replace(batch, dense=dense))
        rows = np.broadcast_to(np.arange(len(order)), batch.lengths.shape).copy()
        rows[feature] = order
        lengths = np.take_along_axis(batch.lengths, rows, axis=1)
        at = ragged_positions(np.take_along_axis(self._starts, rows, axis=1), lengths)
        weights = None if batch.weights is None else batch.weights[at]
        return RowsInMemory(replace(batch, ids=batch.ids[at], lengths=lengths, weights=weights))

    def taken(self, samples: Int64s) -> RowsInMemory:
        """Return these samples alone, in this order."""
        return RowsInMemory(self.batch.take(samples, self._starts))

    def ids_of(self, feature: int) -> tuple[Int32s, Int64s]:
        """Return all ids of a sparse feature, and the sample of each."""
        ids = self.batch.by_feature(self.batch.ids)[feature]
        return ids, np.repeat(np.arange(self.num_eval_samples), self.batch.lengths[feature])

    def fingerprint(self) -> str:
        return ""

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        raise NotImplementedError("there is nothing to train on")

    def eval_rows(self, start: int, stop: int) -> Batch:
        return self.batch.take(np.arange(start, stop), self._starts)

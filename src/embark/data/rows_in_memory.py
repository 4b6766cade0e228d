"""Samples in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from embark.data.loader import Batch, SampleSource
from embark.features.arrays import Int32s, Int64s

_CHUNK_ROWS = 128


class RowsInMemory:
    """Some of a source's held-out samples."""

    notes: tuple[str, ...] = ()
    num_train_samples = 0

    def __init__(self, batch: Batch) -> None:
        self.batch = replace(batch, best_probability=None)
        self.num_eval_samples = len(batch.label)
        self._starts = batch.starts()

    @staticmethod
    def spread(source: SampleSource, num_rows: int) -> RowsInMemory:
        """Take at most `num_rows` samples, in chunks spread evenly over the source."""
        num_rows = min(num_rows, source.num_eval_samples)
        num_chunks = -(-num_rows // _CHUNK_ROWS)
        size = num_rows // num_chunks
        starts = [i * (source.num_eval_samples - size) // max(1, num_chunks - 1) for i in range(num_chunks)]
        return RowsInMemory(Batch.join([source.eval_rows(start, start + size) for start in starts]))

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

"""Samples drawn from a hidden model, each a function of (seed, split, position) alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embark.data.batch import Batch
from embark.data.hashing import Hashes, bell, hash_counters, stream_key, stream_keys, uniform
from embark.data.teacher_model import Parts, TeacherModel
from embark.spec.data import DataSpec
from embark.spec.model import ModelSpec, Table

_TRAIN, _EVAL, _CALIBRATION = range(3)
_IDS, _LENGTHS, _DENSE, _LABEL = range(4)
_CALIBRATION_SAMPLES = 16_384
_VALUES_AT_A_TIME = 131_072
"""Ids drawn together: their hashes stay in the second-level cache."""


class SyntheticSource:
    """As many samples as the spec says; an epoch is the same samples in the same order."""

    notes: tuple[str, ...] = ()

    def __init__(self, model: ModelSpec, data: DataSpec) -> None:
        tables = model.table_list()
        self._data = data
        self._num_dense = model.num_dense
        self._multi_hot = [table.multi_hot for table in tables]
        self._table_keys = {
            (split, what): stream_keys(data.seed, split, what, columns=len(tables))
            for split in (_TRAIN, _EVAL, _CALIBRATION)
            for what in (_IDS, _LENGTHS)
        }
        self._groups = list(_grouped(tables, data.zipf_exponent))
        values_per_sample = max(sum(self._multi_hot), self._num_dense)
        self._samples_at_a_time = max(1, _VALUES_AT_A_TIME // values_per_sample)
        self._teacher = TeacherModel(tables, model.num_dense, seed=data.seed, signal=data.signal)
        chunks = [self._draw(_CALIBRATION, span)[-1] for span in self._spans(0, _CALIBRATION_SAMPLES)]
        self._scales = self._teacher.fit_scales(
            Parts(
                np.concatenate([c.dense for c in chunks]),
                np.concatenate([c.tables for c in chunks], axis=1),
                np.concatenate([c.pairs for c in chunks], axis=1),
            )
        )

    @property
    def num_train_samples(self) -> int:
        """In one epoch."""
        return self._data.num_train_samples

    @property
    def num_eval_samples(self) -> int:
        """Never seen in training."""
        return self._data.num_eval_samples

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """The same in every epoch."""
        return self._rows(_TRAIN, start, stop, self.num_train_samples)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Held-out samples."""
        return self._rows(_EVAL, start, stop, self.num_eval_samples)

    def _rows(self, split: int, start: int, stop: int, num_samples: int) -> Batch:
        if not 0 <= start <= stop <= num_samples:
            raise IndexError(f"samples {start} to {stop} of {num_samples}")
        n = stop - start
        dense = np.empty((n, self._num_dense), np.float32)
        lengths = np.empty((len(self._multi_hot), n), np.int32)
        ids = [np.empty((n, multi_hot), np.int32) for multi_hot in self._multi_hot]
        probability = np.empty(n, np.float32)
        for span in self._spans(start, stop):
            at = slice(span.start - start, span.stop - start)
            dense[at], group_ids, group_lengths, parts = self._draw(split, span)
            probability[at] = self._teacher.probability(parts, self._scales)
            for group, values, counts in zip(self._groups, group_ids, group_lengths, strict=True):
                lengths[group.tables, at] = group.multi_hot if counts is None else counts
                for table, table_values in zip(group.tables, values, strict=True):
                    ids[table][at] = table_values
        if self._data.ragged:
            chosen = [v[np.arange(v.shape[1]) < count[:, None]] for v, count in zip(ids, lengths, strict=True)]
        else:
            chosen = [v.reshape(-1) for v in ids]
        coin = uniform(hash_counters(self._key(split, _LABEL), np.arange(start, stop)))
        return Batch(
            dense=dense,
            ids=np.concatenate(chosen),
            lengths=lengths,
            label=(coin < probability).astype(np.float32),
            is_fixed=not self._data.ragged,
            best_probability=probability,
        )

    def _spans(self, start: int, stop: int) -> Iterator[range]:
        for first in range(start, stop, self._samples_at_a_time):
            yield range(first, min(first + self._samples_at_a_time, stop))

    def _draw(
        self, split: int, span: range
    ) -> tuple[NDArray[np.float32], list[NDArray[np.int32]], list[NDArray[np.int32] | None], Parts]:
        """Dense features [n, num_dense]; for each group its ids [G, n, multi_hot] and lengths; what they bring."""
        counters = np.arange(span.start * self._num_dense, span.stop * self._num_dense)
        dense = bell(hash_counters(self._key(split, _DENSE), counters)).reshape(len(span), self._num_dense)
        ids = [group.draw_ids(self._table_keys[split, _IDS], span) for group in self._groups]
        lengths = [
            group.draw_lengths(self._table_keys[split, _LENGTHS], span) if self._data.ragged else None
            for group in self._groups
        ]
        parts = self._teacher.parts(dense, ids, lengths, [group.tables for group in self._groups])
        return dense, ids, lengths, parts

    def _key(self, split: int, what: int) -> int:
        return stream_key(self._data.seed, split, what)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tables with the same number of ids a sample, drawn together: an array each would be mostly call overhead."""

    tables: list[int]
    multi_hot: int
    zipf: _Zipf

    def draw_ids(self, table_keys: Hashes, span: range) -> NDArray[np.int32]:
        """[G, n, multi_hot]"""
        counters = np.arange(span.start * self.multi_hot, span.stop * self.multi_hot)
        bits = hash_counters(table_keys[self.tables][:, None], counters)
        return self.zipf.ids(uniform(bits)).reshape(len(self.tables), len(span), self.multi_hot)

    def draw_lengths(self, table_keys: Hashes, span: range) -> NDArray[np.int32]:
        """[G, n]: 0 to `multi_hot`, all equally likely."""
        bits = hash_counters(table_keys[self.tables][:, None], np.arange(span.start, span.stop))
        return (uniform(bits) * (self.multi_hot + 1)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Zipf:
    """Id k of a table has a chance close to (k + 1)^−s.

    It is the integral of x^−s from k + ½ to k + 1½, which has an inverse in closed form at any number of rows.
    """

    rows: NDArray[np.int64]
    """[G, 1]"""
    exponent: float

    def ids(self, u: NDArray[np.float64]) -> NDArray[np.int32]:
        """[G, n] in 0 to rows − 1 from [G, n] in [0, 1)."""
        low, high = 0.5, self.rows + 0.5
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            u *= np.log(high / low)
            np.exp(u, out=u)
            u *= low
        else:
            u *= high**power - low**power
            u += low**power
            np.power(u, 1 / power, out=u)
        u -= low
        np.clip(u, 0, self.rows - 1, out=u)
        return u.astype(np.int32)


def _grouped(tables: Sequence[Table], zipf_exponent: float) -> Iterator[_Group]:
    for multi_hot, pooling in sorted({(t.multi_hot, t.pooling) for t in tables}):
        members = [i for i, t in enumerate(tables) if (t.multi_hot, t.pooling) == (multi_hot, pooling)]
        rows = np.array([[tables[i].rows] for i in members], np.int64)
        yield _Group(members, multi_hot, _Zipf(rows, zipf_exponent))

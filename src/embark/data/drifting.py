"""Synthetic samples of a world that changes: ids come and go, effects drift, the best AUC of every moment is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

import numpy as np

from embark.data.synthetic import (
    CALIBRATION,
    CURVATURE,
    EVAL,
    IDS,
    TRAIN,
    Drawn,
    Ids,
    Lengths,
    SyntheticSource,
    TeacherModel,
)
from embark.features.arrays import Doubles, Floats, Hashes, Int32s, Int64s
from embark.features.hashing import STEP, hash_counters, quarter, stream_keys, uniform
from embark.spec.data import DataSpec, DriftSpec
from embark.spec.model import ModelSpec, Table

_STREAM = 0xD21F
_SUCCESSION, _NAMES, _DRIFT_OF_IDS, _DRIFT_OF_DENSE = range(4)
_CALIBRATION_SAMPLES_PER_DAY = 256  # The scales are those of the mean over many days.



class DriftingSource(SyntheticSource):
    """Sample `i` is a function of the seed and of `i` alone, at the time `i / samples_per_day`; there is no last one.

    A feature has `num_ids` ranks by popularity, each held by one id at a time. New ids replace those of all ranks
    alike, and an id's effect drifts while it lives.
    """

    def __init__(self, model: ModelSpec, data: DataSpec) -> None:
        self.drift, self._tables = data.drift, model.table_list()
        self._is_raw = [table.is_dynamic for table in self._tables]
        if any(self._is_raw):
            self.id_dtype = np.int64
        keys = stream_keys(data.seed, _STREAM, _SUCCESSION, columns=len(self._tables))
        names = stream_keys(data.seed, _STREAM, _NAMES, columns=len(self._tables))
        numbers = {table.name: number for number, table in enumerate(self._tables)}
        shared = [numbers[table.weights] for table in self._tables]  # features of one table share its ids
        self._succession_keys, self._name_keys = keys[shared], names[shared]
        super().__init__(model, data)

    def days(self, split: int, span: range) -> Doubles:
        """Return the times of samples."""
        positions = np.arange(span.start, span.stop, dtype=np.float64)
        if split == CALIBRATION:
            return positions / _CALIBRATION_SAMPLES_PER_DAY
        return (positions + (self.num_train_samples if split == EVAL else 0)) / self.drift.samples_per_day

    def raw_ids(self, start: int, stop: int) -> list[Int64s]:
        """Return the ids themselves of training samples: [n, multi_hot] for each feature."""
        span, found = range(start, stop), [np.empty(0, np.int64)] * len(self._tables)
        for group in self.groups:
            ranks = group.draw_ids(self.table_keys[TRAIN, IDS], span)
            for table, ids in zip(group.tables, self._raw(ranks, group.tables, self.days(TRAIN, span)), strict=True):
                found[table] = ids
        return found

    def best_auc(self, start: int, stop: int) -> float:
        """Return the AUC that the true probabilities of these training samples reach in expectation over their
        labels."""
        p = self.train_rows(0, start, stop).best_probability
        assert p is not None
        clicks = np.sort(p.astype(np.float64))
        others = 1 - clicks
        in_order = float((clicks * (np.cumsum(others) - others)).sum())
        return in_order / float(clicks.sum() * others.sum() - (clicks * others).sum())

    def _check_range(self, split: int, start: int, stop: int) -> None:
        if split != TRAIN:  # a stream that is followed goes on behind the samples of an epoch
            super()._check_range(split, start, stop)

    def _id_spaces(self, tables: Sequence[Table]) -> Sequence[Table]:
        num_ids = self.drift.num_ids
        return [table.model_copy(update={"rows": num_ids}) for table in tables] if num_ids else tables

    def _make_teacher(self, tables: Sequence[Table]) -> TeacherModel:
        return DriftingTeacher(tables, self._data, self.num_dense)

    def _taught(self, split: int, span: range, dense: Floats, ids: Ids, lengths: Lengths) -> Drawn:
        days, ranks = self.days(split, span), ids
        raw = [self._raw(drawn, group.tables, days) for drawn, group in zip(ranks, self.groups, strict=True)]
        assert isinstance(self.teacher, DriftingTeacher)
        teacher = self.teacher.at(days, {group.tables[0]: ids for group, ids in zip(self.groups, raw, strict=True)})
        parts = teacher.parts(dense, ranks, lengths, self._positions)
        return dense, [self._in_tables(ids, group.tables) for ids, group in zip(raw, self.groups, strict=True)], \
            lengths, parts

    def _raw(self, ranks: Int32s, tables: list[int], days: Doubles) -> Int64s:
        """Return [G, n, multi_hot]: the ids that hold these ranks at these times."""
        phase = uniform(hash_counters(self._succession_keys[tables][:, None, None], ranks))
        generation = (phase + days[:, None] * self.drift.id_churn).astype(np.int64)
        bits = hash_counters(self._name_keys[tables][:, None, None], (generation << 32) + ranks)
        return (bits >> np.uint64(1)).view(np.int64)

    def _in_tables(self, ids: Int64s, tables: list[int]) -> Int32s:
        """Take ids modulo the rows of their tables; a dynamic table takes the ids themselves."""
        rows = np.array([1 << 62 if self._is_raw[t] else self._tables[t].rows for t in tables], np.int64)
        raw = np.array([self._is_raw[t] for t in tables])
        found: Int32s = np.where(raw[:, None, None], ids, ids % rows[:, None, None]).astype(self.id_dtype)
        return found


class DriftingTeacher(TeacherModel):
    """A teacher model whose weights and effects move from one random value to the next; their variance stays."""

    def __init__(self, tables: Sequence[Table], data: DataSpec, num_dense: int) -> None:
        super().__init__(tables, num_dense, seed=data.seed, signal=data.signal)
        drift: DriftSpec = data.drift
        self.head, self._rate = drift.head_ids, drift.preference_drift
        self._dense_keys = stream_keys(data.seed, _STREAM, _DRIFT_OF_DENSE, columns=num_dense)
        self._days: Doubles = np.empty(0)
        self._raw: dict[int, Int64s] = {}

    def at(self, days: Doubles, raw: dict[int, Int64s]) -> Self:
        """Return this teacher at the times of the given samples. `raw` has their raw ids, by the first table of each
        group."""
        then = copy(self)
        then._days, then._raw = days, raw
        return then

    def _id_values(self, ids: Int32s, tables: list[int]) -> Callable[[int, int], Floats]:
        keys, raw = self.table_keys[tables][:, None, None], self._raw[tables[0]].view(np.uint64)
        knot, share = self._moment(raw, self._days[:, None])
        before, after = (hash_counters(keys, raw + (knot + np.uint64(one)) * np.uint64(STEP ^ _DRIFT_OF_IDS))
                         for one in (0, 1))
        return lambda component, num: _between(quarter(before[:num], component), quarter(after[:num], component),
                                               share[:num])

    def _dense_part(self, dense: Floats) -> Floats:
        total = np.zeros(len(dense), np.float32)
        for column, key in zip(dense.T, self._dense_keys, strict=True):
            knot, share = self._moment(np.full(len(dense), key), self._days)
            before, after = (quarter(hash_counters(int(key), knot + np.uint64(one)), 0) for one in (0, 1))
            total += _between(before, after, share) * (column + np.float32(CURVATURE) * column * column)
        return total

    def _moment(self, bits: Hashes, days: Doubles) -> tuple[Hashes, Floats]:
        """Return which random value comes before, and how far it is to the next."""
        moment = uniform(bits * np.uint64(STEP)) + days * self._rate
        knot = np.floor(moment)
        return knot.astype(np.uint64), (moment - knot).astype(np.float32)


def _between(before: Floats, after: Floats, share: Floats) -> Floats:
    """Mix two values of variance 1 into one of variance 1. Without sin and cos: a square root rounds alike
    everywhere."""
    stay = np.float32(1) - share
    mixed: Floats = (before * stay + after * share) / np.sqrt(stay * stay + share * share)
    return mixed

"""Samples drawn from a hidden model, each a function of (seed, split, position) alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from embark.features.arrays import Array, Doubles, Floats, Hashes, Int32s, Int64s
from embark.features.hashing import bell, hash_counters, quarter, stream_key, stream_keys, uniform
from embark.spec import DataSpec, ModelSpec, Table, Task
from embark.values import frozen
from .loader import Batch, check_range

TRAIN, EVAL, CALIBRATION = range(3)
IDS, LENGTHS, DENSE, LABEL, WEIGHTS = range(5)
LOGIT_STD = 1.4  # Standard deviation that gives a best AUC of about 0.80 with `signal` = 1.
CLICK_RATE = 0.25
DENSE_SHARE, IDS_SHARE, PAIRS_SHARE = 0.40, 0.45, 0.15
"""Shares of the logit's variance. The tables' shares fall with their position: a few features matter most."""
HEAD = 50  # Rank at which an id's effect is half of what it would be at rank 0.
MAX_PAIRS = 4  # Tables 0 and 1, 2 and 3, … interact, up to so many pairs.
NUM_LATENT = 2
LATENT_MEAN = 1.0
"""Off zero, or else a dot product of small rows has no slope to learn it by. A third of a pair's part is then pure
interaction, which no sum of effects can stand for."""
CURVATURE = 0.3  # Weight of a dense feature's square relative to the feature.
_STREAM = 0x1DDE
LOW = 0.5  # Lower limit of the integral over ids.
NOISE_STD = 1.0  # The spread of a `regression` label around its score.
SPREAD = 2.0  # The first class's score is −SPREAD × that of the sample, the last one's SPREAD × it.
_TASK = 0x7A5C
_CALIBRATION_SAMPLES = 16_384
_VALUES_AT_A_TIME = 131_072  # Ids drawn together: their hashes stay in the second-level cache.

Ids = list[Int32s]
Lengths = list[Int32s | None]


class SyntheticSource:
    """Draws as many samples as the spec says; an epoch is the same samples in the same order."""

    notes: tuple[str, ...] = ()

    def __init__(self, model: ModelSpec, data: DataSpec) -> None:
        tables = model.table_list()
        self._data = data
        self.num_train_samples, self.num_eval_samples = data.num_train_samples, data.num_eval_samples
        self.is_ragged = data.ragged
        self.num_dense = model.num_dense
        self.multi_hot = [table.multi_hot for table in tables]
        self._is_weighted = [bool(table.weights_column) for table in tables]
        self.table_keys = {
            (split, what): stream_keys(data.seed, split, what, columns=len(tables))
            for split in (TRAIN, EVAL, CALIBRATION)
            for what in (IDS, LENGTHS)
        }
        self.groups = list(grouped(tables, data.zipf_exponent))
        values_per_sample = max(sum(self.multi_hot), self.num_dense)
        self._samples_at_a_time = max(1, _VALUES_AT_A_TIME // values_per_sample)
        self.teacher = TeacherModel(tables, model.num_dense, seed=data.seed, signal=data.signal)
        self.tasks = model.tasks
        # A task's own hidden model does not depend on which other tasks there are.
        own = [TeacherModel(tables, model.num_dense, signal=data.signal,
                            seed=stream_key(data.seed, _TASK, zlib.crc32(task.name.encode())))
               for task in model.tasks]
        samples: list[list[Parts]] = [[] for _ in (self.teacher, *own)]
        for span in self._spans(0, _CALIBRATION_SAMPLES):
            dense, ids, lengths, common = self._draw(CALIBRATION, span)
            of_own = [teacher.parts(dense, ids, lengths, self._positions) for teacher in own]
            for found, parts in zip(samples, (common, *of_own), strict=True):
                found.append(parts)
        sample, *own_samples = (Parts.join(parts) for parts in samples)
        self.scales = self.teacher.fit_scales(sample)
        self._own = [(teacher, *self._fit_task(task, teacher, sample, own_sample))
                     for task, teacher, own_sample in zip(model.tasks, own, own_samples, strict=True)]

    def fingerprint(self) -> str:
        return ""

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        """Return training samples, the same in every epoch."""
        return self.rows(TRAIN, start, stop)

    def eval_rows(self, start: int, stop: int) -> Batch:
        """Return samples that are never trained on."""
        return self.rows(EVAL, start, stop)

    def rows(self, split: int, start: int, stop: int) -> Batch:
        """Return samples `start` to `stop` of `TRAIN` or `EVAL`."""
        check_range(start, stop, self.num_train_samples if split == TRAIN else self.num_eval_samples)
        n = stop - start
        dense = np.empty((n, self.num_dense), np.float32)
        lengths = np.empty((len(self.multi_hot), n), np.int32)
        ids = [np.empty((n, multi_hot), np.int32) for multi_hot in self.multi_hot]
        probability = np.empty(n, np.float32)
        scores = np.empty((len(self.tasks), n), np.float32)
        for span in self._spans(start, stop):
            at = slice(span.start - start, span.stop - start)
            dense[at], group_ids, group_lengths, parts = self._draw(split, span)
            if self.tasks:
                scores[:, at] = self._scores(dense[at], group_ids, group_lengths, parts)
            else:
                probability[at] = self.teacher.probability(parts, self.scales)
            for group, values, counts in zip(self.groups, group_ids, group_lengths, strict=True):
                lengths[group.tables, at] = group.multi_hot if counts is None else counts
                for table, table_values in zip(group.tables, values, strict=True):
                    ids[table][at] = table_values
        weights = self._weights(split, start, stop) if any(self._is_weighted) else []

        def chosen(values: Sequence[Array]) -> Array:
            if not self.is_ragged:
                return np.concatenate([v.reshape(-1) for v in values])
            return np.concatenate([v[np.arange(v.shape[1]) < count[:, None]]
                                   for v, count in zip(values, lengths, strict=True)])

        if self.tasks:
            best = [best_outputs(task, score) for task, score in zip(self.tasks, scores, strict=True)]
            label = np.stack([draw_labels(task, one, self.key(split, LABEL), start)
                              for task, one in zip(self.tasks, best, strict=True)], axis=1)
            probability = np.concatenate(best, axis=1)
        else:
            coin = uniform(hash_counters(self.key(split, LABEL), np.arange(start, stop)))
            label = (coin < probability).astype(np.float32)
        return Batch(
            dense=dense, ids=chosen(ids), lengths=lengths, label=label, is_fixed=not self.is_ragged,
            best_probability=probability, weights=chosen(weights) if weights else None
        )

    def _weights(self, split: int, start: int, stop: int) -> list[Floats]:
        """Return [n, multi_hot] for each table: in (0, 1], or 1 if its ids have none. The labels do not depend on
        them."""
        return [1 - uniform(hash_counters(stream_key(self._data.seed, split, WEIGHTS, table),
                                          np.arange(start * most, stop * most))).astype(np.float32).reshape(-1, most)
                if is_weighted else np.ones((stop - start, most), np.float32)
                for table, (most, is_weighted) in enumerate(zip(self.multi_hot, self._is_weighted, strict=True))]

    def _fit_task(self, task: Task, teacher: TeacherModel, common: Parts, own: Parts) -> tuple[Scales, Mixture]:
        """Return how a task's own hidden model is scaled, and how much of each model its score has."""
        scales = teacher.fit_scales(own)
        return scales, Mixture.fit(
            self.teacher.score(common, self.scales), teacher.score(own, scales), self._data.task_conflict,
            LOGIT_STD * self._data.signal,
            lambda scores: _bias_for(scores, CLICK_RATE) if task.loss == "binary" else -float(scores.mean()))

    def _scores(self, dense: Floats, ids: Ids, lengths: Lengths, parts: Parts) -> Floats:
        """Return the scores of all tasks: [tasks, n]."""
        common = self.teacher.score(parts, self.scales)
        if not self._data.task_conflict:
            return np.stack([mixture.score(common, np.zeros_like(common)) for *_, mixture in self._own])
        own = [teacher.score(teacher.parts(dense, ids, lengths, self._positions), scales)
               for teacher, scales, _ in self._own]
        return np.stack([mixture.score(common, score) for (*_, mixture), score in zip(self._own, own, strict=True)])

    @property
    def _positions(self) -> list[list[int]]:
        return [group.tables for group in self.groups]

    def _spans(self, start: int, stop: int) -> Iterator[range]:
        for first in range(start, stop, self._samples_at_a_time):
            yield range(first, min(first + self._samples_at_a_time, stop))

    def _draw(self, split: int, span: range) -> Drawn:
        """Return the dense features [n, num_dense], for each group its ids [G, n, multi_hot] and lengths, and what
        they bring to the logits."""
        counters = np.arange(span.start * self.num_dense, span.stop * self.num_dense)
        dense = bell(hash_counters(self.key(split, DENSE), counters)).reshape(len(span), self.num_dense)
        ids = [group.draw_ids(self.table_keys[split, IDS], span) for group in self.groups]
        lengths = [
            group.draw_lengths(self.table_keys[split, LENGTHS], span) if self.is_ragged else None
            for group in self.groups
        ]
        return dense, ids, lengths, self.teacher.parts(dense, ids, lengths, self._positions)

    def key(self, split: int, what: int) -> int:
        return stream_key(self._data.seed, split, what)


@frozen
class Parts:
    """The contributions of n samples to their logits, before scaling."""

    dense: Floats  # [n]
    tables: Floats  # [F, n]: pooled effects of each table's ids.
    pairs: Floats  # [pairs, n]: dot products of the pooled latent vectors.

    @staticmethod
    def join(several: Sequence[Parts]) -> Parts:
        return Parts(np.concatenate([one.dense for one in several]),
                     np.concatenate([one.tables for one in several], axis=1),
                     np.concatenate([one.pairs for one in several], axis=1))


@frozen
class Scales:
    """Factors that turn `Parts` into a logit."""

    dense: np.float32
    tables: Floats
    pairs: Floats
    bias: np.float32


Drawn = tuple[Floats, Ids, Lengths, Parts]


class TeacherModel:
    """Knows, for samples it is shown, the probability of a 1."""

    def __init__(self, tables: Sequence[Table], num_dense: int, *, seed: int, signal: float) -> None:
        self._signal = signal
        numbers = {table.name: number for number, table in enumerate(tables)}
        # An id of a shared table has the same effect in each of its features.
        self.table_keys = stream_keys(seed, _STREAM, 0, columns=len(tables))[[numbers[t.weights] for t in tables]]
        weights = hash_counters(stream_key(seed, _STREAM, 1), np.arange(num_dense))
        self.dense_weights = quarter(weights, 0)
        self.num_pairs = min(MAX_PAIRS, len(tables) // 2)
        self.is_mean = np.array([table.pooling == "mean" for table in tables])

    def parts(
        self, dense: Floats, ids: Sequence[Int32s], lengths: Sequence[Int32s | None],
        positions: Sequence[Sequence[int]]
    ) -> Parts:
        """Return what samples bring whose ids come in groups [G, n, multi_hot]; `positions` are the tables of each
        group.

        Without lengths every id counts, else the first ids of a sample, as many as its length says.
        """
        num_tables, n = len(self.table_keys), len(dense)
        effects = np.empty((num_tables, n), np.float32)
        latent = np.empty((2 * self.num_pairs, NUM_LATENT, n), np.float32)
        for group_ids, group_lengths, tables in zip(ids, lengths, positions, strict=True):
            self._pool_group(group_ids, group_lengths, list(tables), effects, latent)
        pairs = np.zeros((self.num_pairs, n), np.float32)
        for component in range(NUM_LATENT):
            pairs += latent[0::2, component] * latent[1::2, component]
        return Parts(self._dense_part(dense), effects, pairs)

    def fit_scales(self, sample: Parts) -> Scales:
        """Give each part its share of the variance, and choose the bias that gives `CLICK_RATE`."""
        tables = _per_row_scale(sample.tables, IDS_SHARE)
        pairs = _per_row_scale(sample.pairs, PAIRS_SHARE)
        dense = _per_row_scale(sample.dense[None, :], DENSE_SHARE)[0]
        total = self.score(sample, Scales(dense, tables, pairs, np.float32(0))).astype(np.float64)
        spread = float(total.std())
        to_wanted = self._signal * LOGIT_STD / spread if spread > 1e-6 else 0.0
        factor = np.float32(to_wanted)
        bias = _bias_for(total * to_wanted, CLICK_RATE)
        return Scales(dense * factor, tables * factor, pairs * factor, np.float32(bias))

    def probability(self, parts: Parts, scales: Scales) -> Floats:
        return self.probability_of(self.score(parts, scales))

    def probability_of(self, logits: Floats) -> Floats:
        logit = np.clip(logits, -30, 30)
        np.negative(logit, out=logit)
        np.exp(logit, out=logit)
        logit += np.float32(1)
        return np.reciprocal(logit, out=logit)

    def score(self, parts: Parts, scales: Scales) -> Floats:
        """Return the logits [n]."""
        # One row after another: sum(axis=0) adds in another order for one sample than for many.
        score = parts.dense * scales.dense
        score += scales.bias
        for row, scale in zip(parts.tables, scales.tables, strict=True):
            score += row * scale
        for row, scale in zip(parts.pairs, scales.pairs, strict=True):
            score += row * scale
        return score

    def _dense_part(self, dense: Floats) -> Floats:
        # A matrix product would round differently for another number of samples.
        total = np.zeros(len(dense), np.float32)
        for column, weight in zip(dense.T, self.dense_weights, strict=True):
            total += weight * (column + np.float32(CURVATURE) * column * column)
        return total

    def _pool_group(
        self, ids: Int32s, lengths: Int32s | None, tables: list[int], effects: Floats,
        latent: Floats
    ) -> None:
        num_ids = ids.shape[2]
        bits = hash_counters(self.table_keys[tables][:, None, None], ids)
        weight = np.float32(HEAD) / (ids + np.float32(HEAD))
        if lengths is not None:
            weight *= np.arange(num_ids) < lengths[:, :, None]
        if num_ids > 1 and self.is_mean[tables[0]]:
            weight /= np.float32(num_ids) if lengths is None else np.maximum(lengths, 1)[:, :, None].astype(np.float32)
        effects[tables] = _pool(quarter(bits, 0).reshape(ids.shape) * weight)
        # Tables are in order, so those that interact come first in their group.
        num_paired = sum(table < len(latent) for table in tables)
        for component in range(NUM_LATENT if num_paired else 0):
            values = quarter(bits[:num_paired], component + 1) + np.float32(LATENT_MEAN)
            latent[tables[:num_paired], component] = _pool(values * weight[:num_paired])


def _pool(values: Floats) -> Floats:
    # One id after another: sum(axis=2) over a few is several times slower.
    pooled = values[:, :, 0].copy()
    for position in range(1, values.shape[2]):
        pooled += values[:, :, position]
    return pooled


def _per_row_scale(rows: Floats, share: float) -> Floats:
    """Return factors that make the rows' variances `share` together, the first rows' the largest."""
    spread = rows.std(axis=1, dtype=np.float64) if len(rows) else np.zeros(0)
    varies = spread > 1e-6
    importance = np.where(varies, 1 / (2 + np.arange(len(rows))), 0)
    wanted = np.sqrt(share * importance / max(float(importance.sum()), 1e-30))
    return (wanted / np.where(varies, spread, 1)).astype(np.float32)


def _bias_for(scores: Doubles, rate: float) -> float:
    low, high = -50.0, 50.0
    shifted = scores - scores.mean()
    for _ in range(60):
        middle = (low + high) / 2
        mean = float(np.mean(1 / (1 + np.exp(-np.clip(shifted + middle, -50, 50)))))
        low, high = (middle, high) if mean < rate else (low, middle)
    return (low + high) / 2 - float(scores.mean())


@frozen
class Group:
    """Tables with the same number of ids per sample, drawn together: one array for each would be mostly call
    overhead."""

    tables: list[int]
    multi_hot: int
    zipf: Zipf

    def draw_ids(self, table_keys: Hashes, span: range) -> Int32s:
        """Return [G, n, multi_hot]."""
        counters = np.arange(span.start * self.multi_hot, span.stop * self.multi_hot)
        bits = hash_counters(table_keys[self.tables][:, None], counters)
        return self.zipf.ids(uniform(bits)).reshape(len(self.tables), len(span), self.multi_hot)

    def draw_lengths(self, table_keys: Hashes, span: range) -> Int32s:
        """Return [G, n]: 0 to `multi_hot`, all equally likely."""
        bits = hash_counters(table_keys[self.tables][:, None], np.arange(span.start, span.stop))
        return (uniform(bits) * (self.multi_hot + 1)).astype(np.int32)


@frozen
class Zipf:
    """Gives id k of a table a chance close to (k + 1)^−s.

    It is the integral of x^−s from k + ½ to k + 1½, which has an inverse in closed form at any number of rows.
    """

    rows: Int64s  # [G, 1]
    exponent: float

    @property
    def power(self) -> float:
        """The power that the integral is; 0: it is a logarithm."""
        power = 1 - self.exponent
        return power if abs(power) >= 1e-9 else 0.0

    @property
    def factor(self) -> Doubles:
        """The integral over all rows: [G, 1]."""
        high = self.rows + LOW
        integral: Doubles = high**self.power - LOW**self.power if self.power else np.log(high / LOW)
        return integral

    def ids(self, u: Doubles) -> Int32s:
        """Return ids [G, n] in 0 to rows − 1 for numbers [G, n] in [0, 1)."""
        u *= self.factor
        if self.power:
            u += LOW**self.power
            np.power(u, 1 / self.power, out=u)
        else:
            np.exp(u, out=u)
            u *= LOW
        u -= LOW
        np.clip(u, 0, self.rows - 1, out=u)
        return u.astype(np.int32)


def grouped(tables: Sequence[Table], zipf_exponent: float) -> Iterator[Group]:
    """Group tables by the number of ids per sample and the pooling."""
    for multi_hot, pooling in sorted({(t.multi_hot, t.pooling) for t in tables}):
        members = [i for i, t in enumerate(tables) if (t.multi_hot, t.pooling) == (multi_hot, pooling)]
        rows = np.array([[tables[i].rows] for i in members], np.int64)
        yield Group(members, multi_hot, Zipf(rows, zipf_exponent))


@frozen
class Mixture:
    """Mixes the scores of the common hidden model and of a task's own into the score of the task: √(1 − conflict) ×
    the common one + √conflict × its own."""

    common: np.float32
    own: np.float32
    bias: np.float32

    @staticmethod
    def fit(common: Floats, own: Floats, conflict: float, wanted_std: float,
            bias_for: Callable[[Doubles], float]) -> Mixture:
        """Fit the mixture to the scores of a sample of rows."""
        shares = math.sqrt(1 - conflict), math.sqrt(conflict)
        mixed = shares[0] * common.astype(np.float64) + shares[1] * own.astype(np.float64)
        std = float(mixed.std())
        factor = wanted_std / std if std > 1e-6 else 0.0
        return Mixture(np.float32(shares[0] * factor), np.float32(shares[1] * factor),
                       np.float32(bias_for(mixed * factor)))

    def score(self, common: Floats, own: Floats) -> Floats:
        """Return the scores [n] of the task."""
        score = common * self.common
        score += own * self.own
        score += self.bias
        return score


def best_outputs(task: Task, score: Floats) -> Floats:
    """Return the best that a network could give, [n, outputs]: the probability of a 1, the mean of the label, or the
    probability of each class."""
    if task.loss == "regression":
        return score[:, None]
    score = np.clip(score, -30, 30)
    if task.loss == "binary":
        return (1 / (1 + np.exp(-score)))[:, None].astype(np.float32)
    weights: Floats = np.exp(np.linspace(-SPREAD, SPREAD, task.num_classes, dtype=np.float32) * score[:, None])
    total = np.zeros(len(score), np.float32)
    for column in weights.T:  # a sum over an axis may round differently for another number of rows
        total += column
    return weights / total[:, None]


def draw_labels(task: Task, best: Floats, key: int, start: int) -> Floats:
    """Draw labels [n] for rows `start` and on, whose `best_outputs` are known: `binary` by a coin, `regression` with
    noise, `softmax` by the classes' probabilities."""
    bits = hash_counters(stream_key(key, _TASK, zlib.crc32(task.name.encode())), np.arange(start, start + len(best)))
    if task.loss == "regression":
        return best[:, 0] + np.float32(NOISE_STD) * bell(bits)
    coin = uniform(bits)
    if task.loss == "binary":
        return (coin < best[:, 0]).astype(np.float32)
    reached = np.zeros(len(best), np.float64)
    label = np.zeros(len(best), np.float32)
    for column in best.T[:-1]:
        reached += column
        label += coin >= reached
    return label

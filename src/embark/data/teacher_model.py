"""The model that synthetic labels are drawn from: learnable, and its own score is known.

    logit = bias + signal · LOGIT_STD · (dense part + ids' part + pairs' part)

Nothing is stored for an id: its effect and its latent vector are a hash of (seed, table, id), so that a table of
40 million rows costs nothing. Both shrink with the id's rank by `HEAD / (HEAD + id)`, for an id that is seen a
few times in an epoch cannot be learned by any model. Each part is scaled to its share of the logit's variance on
a sample drawn for it, which holds for any tables, pooling and skew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embark.data.hashing import hash_counters, quarter, stream_key, stream_keys
from embark.spec.model import Table

LOGIT_STD = 1.4
"""With `signal` = 1 the best AUC is then about 0.80."""
CLICK_RATE = 0.25
DENSE_SHARE, IDS_SHARE, PAIRS_SHARE = 0.40, 0.45, 0.15
"""Of the logit's variance. The tables' shares fall with their position: a few features matter most."""
HEAD = 50
"""Rank at which an id's effect is half of what it would be at rank 0."""
MAX_PAIRS = 4
"""Tables 0 and 1, 2 and 3, … interact, up to so many pairs."""
NUM_LATENT = 2
LATENT_MEAN = 1.0
"""Off zero, or else a dot product of small rows has no slope to learn it by. A third of a pair's part is then pure
interaction, which no sum of effects can stand for."""
CURVATURE = 0.3
"""How much of a dense feature's square goes with the feature."""
_STREAM = 0x1DDE

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Parts:
    """What n samples bring to their logits, before it is scaled."""

    dense: Floats
    """[n]"""
    tables: Floats
    """[F, n]: pooled effects of each table's ids."""
    pairs: Floats
    """[pairs, n]: dot products of the pooled latent vectors."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Turns `Parts` into a logit."""

    dense: np.float32
    tables: Floats
    pairs: Floats
    bias: np.float32


class TeacherModel:
    """Knows, for samples it is shown, the probability of a 1."""

    def __init__(self, tables: Sequence[Table], num_dense: int, *, seed: int, signal: float) -> None:
        self._signal = signal
        self._table_keys = stream_keys(seed, _STREAM, 0, columns=len(tables))
        weights = hash_counters(stream_key(seed, _STREAM, 1), np.arange(num_dense))
        self._dense_weights = quarter(weights, 0)
        self._num_pairs = min(MAX_PAIRS, len(tables) // 2)
        self._is_mean = np.array([table.pooling == "mean" for table in tables])

    def parts(
        self,
        dense: Floats,
        ids: Sequence[NDArray[np.int32]],
        lengths: Sequence[NDArray[np.int32] | None],
        positions: Sequence[Sequence[int]],
    ) -> Parts:
        """Of samples whose ids come in groups [G, n, multi_hot]; `positions` are the tables of each group.

        Without lengths every id counts, else a sample's first so many of each table.
        """
        num_tables, n = len(self._table_keys), len(dense)
        effects = np.empty((num_tables, n), np.float32)
        latent = np.empty((2 * self._num_pairs, NUM_LATENT, n), np.float32)
        for group_ids, group_lengths, tables in zip(ids, lengths, positions, strict=True):
            self._pool_group(group_ids, group_lengths, list(tables), effects, latent)
        pairs = np.zeros((self._num_pairs, n), np.float32)
        for component in range(NUM_LATENT):
            pairs += latent[0::2, component] * latent[1::2, component]
        return Parts(self._dense_part(dense), effects, pairs)

    def fit_scales(self, sample: Parts) -> Scales:
        """Give each part its share of the variance, and choose the bias that gives `CLICK_RATE`."""
        tables = _per_row_scale(sample.tables, IDS_SHARE)
        pairs = _per_row_scale(sample.pairs, PAIRS_SHARE)
        dense = _per_row_scale(sample.dense[None, :], DENSE_SHARE)[0]
        total = self._score(sample, Scales(dense, tables, pairs, np.float32(0))).astype(np.float64)
        spread = float(total.std())
        to_wanted = self._signal * LOGIT_STD / spread if spread > 1e-6 else 0.0
        factor = np.float32(to_wanted)
        bias = _bias_for(total * to_wanted, CLICK_RATE)
        return Scales(dense * factor, tables * factor, pairs * factor, np.float32(bias))

    def probability(self, parts: Parts, scales: Scales) -> Floats:
        """[n]"""
        logit = np.clip(self._score(parts, scales), -30, 30)
        np.negative(logit, out=logit)
        np.exp(logit, out=logit)
        logit += np.float32(1)
        return np.reciprocal(logit, out=logit)

    def _score(self, parts: Parts, scales: Scales) -> Floats:
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
        for column, weight in zip(dense.T, self._dense_weights, strict=True):
            total += weight * (column + np.float32(CURVATURE) * column * column)
        return total

    def _pool_group(
        self,
        ids: NDArray[np.int32],
        lengths: NDArray[np.int32] | None,
        tables: list[int],
        effects: Floats,
        latent: Floats,
    ) -> None:
        num_ids = ids.shape[2]
        bits = hash_counters(self._table_keys[tables][:, None, None], ids)
        weight = np.float32(HEAD) / (ids + np.float32(HEAD))
        if lengths is not None:
            weight *= np.arange(num_ids) < lengths[:, :, None]
        if num_ids > 1 and self._is_mean[tables[0]]:
            weight /= np.float32(num_ids) if lengths is None else np.maximum(lengths, 1)[:, :, None].astype(np.float32)
        effects[tables] = _pool(quarter(bits, 0).reshape(ids.shape) * weight)
        # Tables are in order, so those that interact come first in their group.
        num_paired = sum(table < len(latent) for table in tables)
        for component in range(NUM_LATENT if num_paired else 0):
            values = quarter(bits[:num_paired], component + 1).reshape(ids[:num_paired].shape) + np.float32(LATENT_MEAN)
            latent[tables[:num_paired], component] = _pool(values * weight[:num_paired])


def _pool(values: Floats) -> Floats:
    # One id after another: sum(axis=2) over a few is several times slower.
    pooled = values[:, :, 0].copy()
    for position in range(1, values.shape[2]):
        pooled += values[:, :, position]
    return pooled


def _per_row_scale(rows: Floats, share: float) -> Floats:
    """Factors that make the rows' variances `share` together, the first rows' the largest."""
    spread = rows.std(axis=1, dtype=np.float64) if len(rows) else np.zeros(0)
    varies = spread > 1e-6
    importance = np.where(varies, 1 / (2 + np.arange(len(rows))), 0)
    wanted = np.sqrt(share * importance / max(float(importance.sum()), 1e-30))
    return (wanted / np.where(varies, spread, 1)).astype(np.float32)


def _bias_for(scores: NDArray[np.float64], rate: float) -> float:
    low, high = -50.0, 50.0
    shifted = scores - scores.mean()
    for _ in range(60):
        middle = (low + high) / 2
        mean = float(np.mean(1 / (1 + np.exp(-np.clip(shifted + middle, -50, 50)))))
        low, high = (middle, high) if mean < rate else (low, middle)
    return (low + high) / 2 - float(scores.mean())

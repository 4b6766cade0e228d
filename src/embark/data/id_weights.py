"""Weights of ids: in rows that were read and in batches, and what they come to when rows are pooled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embark.data.loader import Batch
from embark.data.prepare.rows import Keys
from embark.data.prepared.layout import Feature
from embark.spec.model import Table


def weights_features(tables: Sequence[Table]) -> tuple[Feature, ...]:
    """What prepared data and rows to score hold behind the ids."""
    return tuple(Feature(table.weights_feature, 1, table.multi_hot, is_ragged=True, weights_of=table.name)
                 for table in tables if table.weights_column)


def weights_of_keys(keys: Keys) -> NDArray[np.float32]:
    """As readers have them: the bits of a float64 each."""
    return keys.view(np.float64).astype(np.float32)


def weights_by_feature(batch: Batch, tables: Sequence[Table]) -> dict[str, NDArray[np.float32]]:
    """The weights of a batch, under the names of `weights_features`."""
    if batch.weights is None:
        return {}
    ends = np.cumsum(batch.lengths.sum(axis=1, dtype=np.int64))
    parts = np.split(batch.weights, ends[:-1])
    return {table.weights_feature: part for table, part in zip(tables, parts, strict=True) if table.weights_column}


def pooling_weights(batch: Batch, tables: Sequence[Table]) -> NDArray[np.float32]:
    """What each row is multiplied by before rows are summed."""
    assert batch.weights is not None
    weights, start = batch.weights.copy(), 0
    for table, lengths in zip(tables, batch.lengths, strict=True):
        part = weights[start : start + int(lengths.sum())]
        start += len(part)
        part[:] = weights_in_sum(part, lengths, table)
    return weights


def weights_in_sum(weights: NDArray[np.float32], lengths: NDArray[np.int32], table: Table) -> NDArray[np.float32]:
    """Of the ids of one feature: of a mean, each one's share of its sample's weights."""
    if table.pooling != "mean":
        return weights
    owner = np.repeat(np.arange(len(lengths)), lengths)
    total = np.bincount(owner, weights, minlength=len(lengths))
    return weights / np.where(total > 0, total, 1).astype(np.float32)[owner]

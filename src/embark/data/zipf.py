"""Ids of tables, some frequent and most rare: functions of a counter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embark.data.hashing import Hashes, hash_counters, uniform
from embark.spec.model import Table

LOW = 0.5  # Where the integral of the ids begins.


@dataclass(frozen=True, slots=True)
class Group:
    """Tables with the same number of ids a sample, drawn together: an array each would be mostly call overhead."""

    tables: list[int]
    multi_hot: int
    zipf: Zipf

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
class Zipf:
    """Id k of a table has a chance close to (k + 1)^−s.

    It is the integral of x^−s from k + ½ to k + 1½, which has an inverse in closed form at any number of rows.
    """

    rows: NDArray[np.int64]  # [G, 1]
    exponent: float

    @property
    def power(self) -> float:
        """What the integral is the power of; 0: it is a logarithm."""
        power = 1 - self.exponent
        return power if abs(power) >= 1e-9 else 0.0

    @property
    def factor(self) -> NDArray[np.float64]:
        """[G, 1]: the integral over all rows."""
        high = self.rows + LOW
        integral: NDArray[np.float64] = high**self.power - LOW**self.power if self.power else np.log(high / LOW)
        return integral

    def ids(self, u: NDArray[np.float64]) -> NDArray[np.int32]:
        """[G, n] in 0 to rows − 1 from [G, n] in [0, 1)."""
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
    """By the number of ids a sample and the pooling."""
    for multi_hot, pooling in sorted({(t.multi_hot, t.pooling) for t in tables}):
        members = [i for i, t in enumerate(tables) if (t.multi_hot, t.pooling) == (multi_hot, pooling)]
        rows = np.array([[tables[i].rows] for i in members], np.int64)
        yield Group(members, multi_hot, Zipf(rows, zipf_exponent))

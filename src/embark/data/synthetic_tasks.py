"""Labels of several tasks from hidden models: what the tasks have in common, and what each has of its own.

The score of a task is √(1 − conflict) × the common hidden model + √conflict × one of its own, by its name. A `binary`
label is a coin with the score as logit, `regression` the score with noise, `softmax` a class drawn with probabilities
that follow the score. The best any model can predict is known for each sample.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embark.data.hashing import bell, hash_counters, stream_key, uniform
from embark.spec.tasks import Task

Floats = NDArray[np.float32]
NOISE_STD = 1.0  # Of a `regression` label around its score.
SPREAD = 2.0  # The first class's score is −SPREAD × that of the sample, the last one's SPREAD × it.
_TASK = 0x7A5C


def seed_of(seed: int, task: Task) -> int:
    """Of a task's own hidden model; it does not depend on which other tasks there are."""
    return stream_key(seed, _TASK, zlib.crc32(task.name.encode()))


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the centred scores of the common and of the own hidden model become a task's."""

    common: np.float32
    own: np.float32
    bias: np.float32

    @staticmethod
    def fit(common: Floats, own: Floats, conflict: float, wanted_std: float,
            bias_for: Callable[[NDArray[np.float64]], float]) -> Mixture:
        """`common` and `own` are scores of a sample of rows."""
        shares = math.sqrt(1 - conflict), math.sqrt(conflict)
        mixed = shares[0] * common.astype(np.float64) + shares[1] * own.astype(np.float64)
        std = float(mixed.std())
        factor = wanted_std / std if std > 1e-6 else 0.0
        return Mixture(np.float32(shares[0] * factor), np.float32(shares[1] * factor),
                       np.float32(bias_for(mixed * factor)))

    def score(self, common: Floats, own: Floats) -> Floats:
        """[n]"""
        score = common * self.common
        score += own * self.own
        score += self.bias
        return score


def best_outputs(task: Task, score: Floats) -> Floats:
    """[n, outputs]: the probability of a 1, the mean of the label, or the probability of each class."""
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
    """[n] for rows `start` and on, whose `best_outputs` are known."""
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

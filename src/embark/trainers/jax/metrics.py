"""Predictions and labels, counted on the devices as the torch trainer counts them.

Each device has a histogram; the sums of a step come back as three numbers and are added up in fp64 on the host.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from embark.run.evaluation import F64, LARGEST_LOGIT, NUM_BINS, metrics_of

MAX_WAITING = 256
"""Steps whose sums may wait on the devices before they are added up."""


def losses(logits: jax.Array, label: jax.Array) -> jax.Array:
    """[b]: the log loss of each sample."""
    return jnp.maximum(logits, 0) - logits * label + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def counted(counts: jax.Array, logits: jax.Array, label: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Add a device's samples to its histogram: those without a click, then those with one."""
    within = jnp.clip(jnp.nan_to_num(logits, nan=0.0), -LARGEST_LOGIT, LARGEST_LOGIT)
    bins = ((within + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT))).astype(jnp.int32)
    bins = jnp.minimum(bins, NUM_BINS - 1) + label.astype(jnp.int32) * NUM_BINS
    return counts.at[bins].add(1 if valid is None else valid.astype(counts.dtype))


def sums_of(logits: jax.Array, label: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Of a device's samples: log loss, predicted clicks, clicks."""
    values = jnp.stack([losses(logits, label), jax.nn.sigmoid(logits), label])
    return (values if valid is None else jnp.where(valid, values, 0.0)).sum(axis=1)


class Window:
    """What was predicted and what happened since the last `take`. The histograms themselves travel with the step."""

    def __init__(self, fetch: Callable[[jax.Array], NDArray[Any]]) -> None:
        self._fetch = fetch
        self._base: F64 = np.zeros(2 * NUM_BINS)
        """Counts from a checkpoint, which no device has."""
        self._sums: F64 = np.zeros(3)
        self._num_samples = 0
        self._waiting: list[jax.Array] = []

    def add(self, sums: jax.Array, num_samples: int) -> None:
        """Count a step; nothing is waited for."""
        self._waiting.append(sums)
        self._num_samples += num_samples
        if len(self._waiting) >= MAX_WAITING:
            self._settle()

    def state(self, counts: jax.Array) -> F64:
        """The window of all devices, for a checkpoint."""
        self._settle()
        return np.concatenate([self._base + self._on_devices(counts), self._sums, [self._num_samples]])

    def set_state(self, state: F64) -> None:
        """Resume from a checkpoint; the devices' histograms begin empty."""
        self._base, self._sums = state[: 2 * NUM_BINS].copy(), state[2 * NUM_BINS : -1].copy()
        self._num_samples = int(state[-1])

    def take(self, counts: jax.Array) -> dict[str, float]:
        """The metrics of all devices; the window starts anew, and the caller empties the histograms."""
        state = self.state(counts)
        self.set_state(np.zeros_like(state))
        return metrics_of(state)

    def _settle(self) -> None:
        for sums in self._waiting:
            self._sums += np.asarray(self._fetch(sums), np.float64)
        self._waiting.clear()

    def _on_devices(self, counts: jax.Array) -> F64:
        return np.asarray(self._fetch(counts), np.float64).reshape(-1, 2 * NUM_BINS).sum(axis=0)

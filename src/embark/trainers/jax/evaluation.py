"""How good the model is on samples it never learns from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from embark.data import Source, eval_batches
from embark.trainers.jax.metrics import F64, LARGEST_LOGIT, NUM_BINS, Window, metrics_of
from embark.trainers.jax.prefetch import to_devices
from embark.trainers.jax.trainer import JaxTrainer


class Evaluation:
    """The held-out samples, and the best any model could do on them where the source knows it."""

    def __init__(self, source: Source, built: JaxTrainer) -> None:
        self._source, self._built = source, built
        self._best: dict[str, float] | None = None

    def run(self, is_stopping: Callable[[], bool]) -> dict[str, float]:
        """Metrics over all devices; every process must call it. Empty where the run was asked to stop meanwhile."""
        started = time.perf_counter()
        built, world = self._built, self._built.world
        window, counts = Window(world.fetch), built.empty_counts()
        best = np.zeros(2 * NUM_BINS + 4) if self._best is None else None
        for batch in eval_batches(self._source, batch_size=built.spec.train.batch_size, rank=world.rank,
                                  world_size=world.world_size):
            if is_stopping():
                return {}
            placed = to_devices(batch, built.spec, built.places, world, is_eval=True)
            counts, sums = built.evaluate(counts, placed)
            window.add(sums, 0)
            if best is not None and batch.best_probability is not None:
                _count(best, batch.best_probability[: batch.num_samples], batch.label[: batch.num_samples])
        state = window.state(counts)
        state[-1] = self._source.num_eval_samples
        if best is not None:
            taken = metrics_of(np.sum(world.gathered(best), axis=0))
            self._best = {f"best_{k}": taken[k] for k in ("auc", "log_loss") if not math.isnan(taken[k])}
        return {**metrics_of(state), **(self._best or {}), "eval_s": time.perf_counter() - started}


def _count(window: F64, probability: np.ndarray, label: np.ndarray) -> None:
    """Add samples whose probability is known."""
    p = np.clip(probability.astype(np.float64), 1e-9, 1 - 1e-9)
    logits = np.log(p) - np.log1p(-p)
    bins = (np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT) + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT))
    numbers = np.minimum(bins.astype(np.int64), NUM_BINS - 1) + label.astype(np.int64) * NUM_BINS
    window[: 2 * NUM_BINS] += np.bincount(numbers, minlength=2 * NUM_BINS)
    loss = -(label * np.log(p) + (1 - label) * np.log1p(-p)).sum()
    window[2 * NUM_BINS :] += [loss, p.sum(), label.sum(), len(label)]

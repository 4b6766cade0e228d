"""How good the model is on samples it never trains on."""

import math
import time
from collections.abc import Callable

import numpy as np

from embark.data import Source, eval_batches
from embark.run.metrics import STATE_SIZE, count_probabilities, metrics_of
from embark.run.trainer import Ranks, Trainer


class Evaluation:
    """The held-out samples, and the best any model could do on them where the source knows it."""

    def __init__(self, source: Source, batch_size: int, world: Ranks) -> None:
        self._source, self._batch_size, self._world = source, batch_size, world
        self._best: dict[str, float] | None = None

    def run(self, trainer: Trainer, step: int, is_stopping: Callable[[], bool]) -> dict[str, float]:
        """Metrics over all ranks; every rank must call it. Empty where the run was asked to stop meanwhile."""
        started, world = time.perf_counter(), self._world
        best = np.zeros(STATE_SIZE) if self._best is None else None
        with trainer.evaluating(step) as evaluator:
            for batch in eval_batches(self._source, batch_size=self._batch_size, rank=world.rank,
                                      world_size=world.world_size):
                if is_stopping():
                    return {}
                evaluator.add(batch)
                if best is not None and batch.best_probability is not None:
                    count_probabilities(best, batch.best_probability[: batch.num_samples],
                                        batch.label[: batch.num_samples])
            metrics = metrics_of(evaluator.state())
        if best is not None:
            reachable = metrics_of(np.sum(world.gathered(best), axis=0))
            self._best = {f"best_{k}": reachable[k] for k in ("auc", "log_loss") if not math.isnan(reachable[k])}
        return {**metrics, **(self._best or {}), "eval_s": time.perf_counter() - started}

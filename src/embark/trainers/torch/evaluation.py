"""How good the model is on samples it never learns from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from embark.data import Batch, Source, eval_batches
from embark.trainers.torch.batch import ToDevice
from embark.trainers.torch.engines.pipeline import Engine
from embark.trainers.torch.metrics import MetricWindow
from embark.trainers.torch.world import World


class Evaluation:
    """The held-out samples, and the best any model could do on them where the source knows it."""

    def __init__(self, source: Source, batch_size: int, to_device: ToDevice, world: World) -> None:
        self._source = source
        self._batch_size = batch_size
        self._to_device = to_device
        self._world = world
        self._best: dict[str, float] | None = None

    def run(self, engine: Engine, is_stopping: Callable[[], bool]) -> dict[str, float]:
        """Metrics over all ranks; all of them must call it. Empty where the run was asked to stop meanwhile."""
        started = time.perf_counter()
        window = MetricWindow(self._world.device)
        best = MetricWindow(torch.device("cpu")) if self._best is None else None
        with engine.evaluating() as model:
            for batch in self._batches():
                if is_stopping():
                    return {}
                _, (_, logits, label) = model(self._to_device(batch).to(self._world.device, non_blocking=True))
                window.add(logits[: batch.num_samples], label[: batch.num_samples])
                if best is not None and batch.best_probability is not None:
                    probability = torch.from_numpy(batch.best_probability[: batch.num_samples]).double()
                    best.add(probability.logit(eps=1e-9), torch.from_numpy(batch.label[: batch.num_samples]).double())
        result = window.take(self._world)
        if best is not None:
            taken = best.take(self._world)
            self._best = {f"best_{k}": taken[k] for k in ("auc", "log_loss") if not math.isnan(taken[k])}
        return {**result, **(self._best or {}), "eval_s": time.perf_counter() - started}

    def _batches(self) -> Iterator[Batch]:
        return eval_batches(
            self._source, batch_size=self._batch_size, rank=self._world.rank, world_size=self._world.world_size
        )

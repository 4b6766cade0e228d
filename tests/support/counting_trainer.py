"""A trainer that counts its steps and looks its AUC up by them, so that a run takes milliseconds; it is killed or
interrupted at any instant of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from embark.run.checkpointer import Checkpointer
from embark.run.clock import HostWaits
from embark.store import RunDir
from embark.store.checkpoint_arrays import CheckpointArrays, TensorChunk, unsharded

AucOf = Callable[[Any, int], float]


class Killed(BaseException):
    """The process is gone."""


class Instants:
    """Kills or interrupts once: at what the trainer does, after so many steps."""

    def __init__(self, at: tuple[str, int] = ("", 0), signal: str = "") -> None:
        self.at, self.signal, self.caught, self.is_over = at, signal, "", False

    def passed(self, what: str, steps: int) -> None:
        if (what, steps) == self.at and not self.is_over:
            self.is_over = True
            if not self.signal:
                raise Killed
            self.caught = self.signal


class Counter(Checkpointer):
    """Saves how many steps its trainer has done."""

    def __init__(self, trainer: Trainer, run_dir: RunDir) -> None:
        super().__init__(trainer.spec, run_dir, WORLD, lambda value: [value], trainer.layout, 1)
        self.trainer = trainer

    def _copied(self, step: int) -> list[TensorChunk]:
        self.trainer.instants.passed("copy", step)
        return [unsharded("steps", np.array([self.trainer.steps]))]

    def _commit(self, step: int, *args: Any) -> None:
        self.trainer.instants.passed("commit", step)
        super()._commit(step, *args)
        self.trainer.instants.passed("committed", step)

    def _load(self, arrays: CheckpointArrays, step: int) -> None:
        self.trainer.steps = int(arrays.tensor("steps", (1,))[0])

    def _weight_sizes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def _load_weights(self, arrays: CheckpointArrays, kept: Any) -> None:
        raise NotImplementedError


class Trainer:
    """Learns as `auc_of` says, a function of its spec and its steps."""

    precision, num_parameters, engine = "fp32", 1, SimpleNamespace(name="pipeline", reason="")

    def __init__(self, spec: Any, instants: Instants, auc_of: AucOf) -> None:
        self.spec, self.instants, self.auc_of, self.steps = spec, instants, auc_of, 0
        self.layout: dict[str, Any] = {"tables": [], "per_rank": []}
        self.input_waits = HostWaits
        self.profiler = self.trouble = lambda: None
        self.feed = lambda *_: nullcontext(iter(()))
        self.peak_bytes = lambda: 0

    def step(self, batches: Iterator[Any], step: int) -> float:
        self.steps += 1
        self.instants.passed("step", self.steps)
        return 0.1

    def window_metrics(self) -> dict[str, float]:
        return {"log_loss": 0.5, "auc": 0.5}

    @contextmanager
    def evaluating(self, step: int) -> Iterator[Any]:
        auc = self.auc_of(self.spec, self.steps)
        yield SimpleNamespace(eval_source=lambda source: source, batch_size=lambda of_training: of_training,
                              add=lambda batch: self.instants.passed("evaluate", self.steps),
                              metrics=lambda: {"auc": auc, "log_loss": 1 - auc, "num_samples": 200, "recall_at_k": auc,
                                               "ndcg_at_k": auc / 2})

    def checkpointer(self, run_dir: RunDir) -> Counter:
        return Counter(self, run_dir)


WORLD: Any = SimpleNamespace(
    rank=0, world_size=1, is_first=True, sum_of=lambda numbers: numbers, gathered=lambda value: [value],
    is_host_leader=False, device_type="cpu", device_name="CPU", device_bytes=0, num_devices=1, devices_per_host=1)


def backend_of(instants: Instants, auc_of: AucOf) -> Any:
    """A trainer backend of one rank."""
    return SimpleNamespace(
        join=lambda place: nullcontext(WORLD), allocator=lambda world: None, explain=lambda error: None,
        build=lambda spec, world, num_steps, source, run_dir: Trainer(spec, instants, auc_of))

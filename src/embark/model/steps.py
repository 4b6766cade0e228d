"""The steps of a run: how many there are, how many samples of each a rank gets, and at which learning rate."""

import math

from embark.errors import DataError, SpecError
from embark.spec import TrainSpec, batch_mistakes


def steps_per_epoch(num_train_samples: int, batch_size: int) -> int:
    """Return the full batches in an epoch; the remainder is left out, so that every rank has as many."""
    steps = num_train_samples // batch_size
    if steps == 0:
        raise DataError(
            f"the data has {num_train_samples} rows to train on, fewer than train.batch_size = {batch_size}",
            f"set train.batch_size to {max(num_train_samples, 1)} or less, or bring more data"
        )
    return steps


def num_steps_of(train: TrainSpec, num_train_samples: int) -> int:
    """Return the steps of a complete run; `num_train_samples` are an epoch's."""
    per_epoch = steps_per_epoch(num_train_samples, train.batch_size)
    return train.num_steps or train.num_epochs * per_epoch


def samples_per_rank(batch_size: int, num_ranks: int, ranks: str = "ranks") -> int:
    """Divide a batch; raises `SpecError` where it does not divide."""
    if mistakes := batch_mistakes(batch_size, num_ranks, ranks):
        raise SpecError(mistakes)
    return batch_size // num_ranks


TOGETHER_ROWS = 65_536
MOST_TOGETHER = 8  # Batches that are made together: as many as come to about so many rows, and no more than this.


def num_together(num_samples: int) -> int:
    """Return how many batches of this size are made together.

    To hand one from thread to thread costs as much as to fill a small one, and small copies do not run beside each
    other.
    """
    return max(1, min(MOST_TOGETHER, TOGETHER_ROWS // max(1, num_samples)))


EVAL_SAMPLES = 8_192
"""Held-out samples that a GPU evaluates at a time."""


def rate_factor(train: TrainSpec, step: int, num_steps: int) -> float:
    """Return the share of the full rate at `step`, counted from 0: linear warm-up, then the decay."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.decay == "none":
        return 1.0
    done = min(1.0, max(0.0, (step - decay_start(train)) / decay_length(train, num_steps)))
    left = {
        "linear": 1 - done,
        "polynomial": (1 - done) ** 2,
        "cosine": (1 + math.cos(math.pi * done)) / 2
    }[train.decay]
    return train.final_rate + (1 - train.final_rate) * left


def decay_start(train: TrainSpec) -> int:
    """Return the first step of the decay."""
    return max(train.decay_start_step, train.warmup_steps)


def decay_length(train: TrainSpec, num_steps: int) -> int:
    """Return the number of steps of the decay."""
    return train.decay_steps or max(1, num_steps - decay_start(train))


def dense_rate(train: TrainSpec) -> float:
    """Return the full rate of the dense layers."""
    return train.learning_rate if train.dense_learning_rate is None else train.dense_learning_rate

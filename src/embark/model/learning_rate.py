"""How the rates of tables and dense layers go over the steps. Knows no torch."""

import math

from embark.spec import TrainSpec


def rate_factor(train: TrainSpec, step: int, num_steps: int) -> float:
    """Share of the full rate at `step`, counted from 0: linear warm-up, then the decay."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.decay == "none":
        return 1.0
    done = min(1.0, max(0.0, (step - decay_start(train)) / decay_length(train, num_steps)))
    left = {
        "linear": 1 - done,
        "polynomial": (1 - done) ** 2,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[train.decay]
    return train.final_rate + (1 - train.final_rate) * left


def decay_start(train: TrainSpec) -> int:
    """The first step of the decay."""
    return max(train.decay_start_step, train.warmup_steps)


def decay_length(train: TrainSpec, num_steps: int) -> int:
    """In steps."""
    return train.decay_steps or max(1, num_steps - decay_start(train))


def dense_rate(train: TrainSpec) -> float:
    """The dense layers' full rate."""
    return train.learning_rate if train.dense_learning_rate is None else train.dense_learning_rate

"""What `[train]` is where a spec leaves it out and the data decides: a batch and a warm-up that suit the samples.

Trials behind these numbers: bench/LOG.md, by bench/defaults.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embark.spec.run import RunSpec

LARGEST_BATCH, SMALLEST_BATCH = 2048, 64
STEPS_PER_EPOCH = 400  # At least so many, where that leaves a batch of SMALLEST_BATCH.
ADAM_RATE = 0.001
MAX_WARMUP_STEPS, WARMUP_SHARE = 100, 4
"""Adagrad's first steps move every weight by the full rate. Of a bottom MLP that reads few columns they kill the ReLUs:
the model then ignores its dense columns for good. A quarter of an epoch, at most 100 steps, of warm-up prevents it."""


def suited_batch(num_train_samples: int) -> int:
    """A power of two, unless there are fewer samples than that."""
    wanted = max(1, num_train_samples // STEPS_PER_EPOCH)
    suited = min(LARGEST_BATCH, max(SMALLEST_BATCH, 1 << (wanted.bit_length() - 1)))
    return max(1, min(suited, num_train_samples))


def with_train_defaults(spec: RunSpec, num_train_samples: int) -> RunSpec:
    """The spec with the fields of `[train]` filled in that it does not name and that have no default of their own.

    They are set then, so that a second call changes nothing. The batch is not of retrieval and of the next item, where
    the samples of a batch are each other's negatives, nor of a stream, whose samples nobody has counted.
    """
    train, named, changes = spec.train, spec.train.model_fields_set, dict[str, Any]()
    has_own_batch = spec.stream.is_on or spec.model.kind == "two_tower" or spec.model.is_next_item
    if "batch_size" not in named and not has_own_batch:
        changes["batch_size"] = suited_batch(num_train_samples)
    has_own_rate = not named.isdisjoint({"learning_rate", "dense_learning_rate"})
    if train.dense_optimizer == "adam" and not has_own_rate:
        changes["dense_learning_rate"] = ADAM_RATE
    is_abrupt = train.dense_optimizer == "adagrad" and spec.model.num_dense > 0
    if is_abrupt and not (has_own_rate or has_own_batch or "warmup_steps" in named):
        # Not by the number of steps to train: a run that is continued for longer must have the same.
        num_steps = num_train_samples // changes.get("batch_size", train.batch_size)
        changes["warmup_steps"] = min(MAX_WARMUP_STEPS, num_steps // WARMUP_SHARE)
    return spec.model_copy(update={"train": train.model_copy(update=changes)}) if changes else spec

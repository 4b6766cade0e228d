"""How many batches a run trains, and how many samples of each a rank gets."""

from embark.errors import DataError, SpecError
from embark.spec import TrainSpec
from embark.spec.train import batch_mistakes


def steps_per_epoch(num_train_samples: int, batch_size: int) -> int:
    """Full batches in an epoch; the remainder is left out, so that every rank has as many."""
    steps = num_train_samples // batch_size
    if steps == 0:
        raise DataError(
            f"the data has {num_train_samples} rows to train on, fewer than train.batch_size = {batch_size}",
            fix=f"set train.batch_size to {max(num_train_samples, 1)} or less, or bring more data",
        )
    return steps


def num_steps_of(train: TrainSpec, num_train_samples: int) -> int:
    """Of a complete run; `num_train_samples` are an epoch's."""
    per_epoch = steps_per_epoch(num_train_samples, train.batch_size)
    return train.num_steps or train.num_epochs * per_epoch


def samples_per_rank(batch_size: int, num_ranks: int, ranks: str = "ranks") -> int:
    """Raises `SpecError` where the batch does not divide."""
    if mistakes := batch_mistakes(batch_size, num_ranks, ranks):
        raise SpecError(mistakes)
    return batch_size // num_ranks


TOGETHER_ROWS = 65_536
MOST_TOGETHER = 8  # Batches that are made together: as many as come to about so many rows, and no more than this.


def num_together(num_samples: int) -> int:
    """How many batches of this size go together: to hand one from thread to thread costs as much as to fill a small
    one, and small copies do not run beside each other."""
    return max(1, min(MOST_TOGETHER, TOGETHER_ROWS // max(1, num_samples)))


EVAL_SAMPLES = 8_192
"""Held-out samples that a GPU evaluates at a time."""

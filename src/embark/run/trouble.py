"""A loss or an id that ends a run, explained by the batch it came from."""

import math

import numpy as np

from embark.data import Batch, Source
from embark.errors import DataError, EmbarkError
from embark.spec import RunSpec

Trouble = tuple[str, int, str]
"""`id` or `loss`, the step it first happened in, and the table."""


def refuse_trouble(
    loss: float, trouble: Trouble | None, source: Source, spec: RunSpec, step: int, per_epoch: int
) -> None:
    """A NaN loss never recovers, and an id outside its table trains nothing: name the batch and the value. Called
    after `step` steps."""
    if trouble is None and math.isfinite(loss):
        return
    kind, first, table = trouble or ("loss", step - 1, "")
    epoch, place = divmod(first, per_epoch)
    size = spec.train.batch_size
    batch = source.train_rows(epoch, place * size, (place + 1) * size)
    where = f"in step {first + 1} (samples {place * size} to {(place + 1) * size - 1} of epoch {epoch})"
    if kind == "id":
        raise DataError(f"table {table}: {_bad_id(batch, spec, table)} {where}",
                        fix="`embark data check` finds all of them; fix the data and run the same command to resume "
                            "from the last checkpoint")
    is_bad = ~np.isfinite(batch.dense)
    if is_bad.any():
        sample, column = (int(at) for at in np.argwhere(is_bad)[0])
        names = spec.data.dense_columns
        name = names[column] if column < len(names) else f"{column} (counted from 0)"
        raise DataError(f"dense column {name}: {batch.dense[sample, column]} in sample {place * size + sample}, "
                        f"{where}, made the loss NaN", fix="drop such rows, or fill in the values")
    shown = f"at step {step}" if trouble is None else where
    raise EmbarkError(f"the loss became NaN {shown}; all inputs were finite, so the weights diverged",
                      fix="a smaller train.learning_rate, or some train.warmup_steps; the same command resumes from "
                          "the last checkpoint")


def _bad_id(batch: Batch, spec: RunSpec, name: str) -> str:
    start = 0
    for table, lengths in zip(spec.model.table_list(), batch.lengths, strict=True):
        count = int(lengths.sum())
        ids = batch.ids[start : start + count]
        start += count
        is_bad = (ids < 0) | (ids >= table.rows)
        if table.name == name and is_bad.any():
            at = int(is_bad.argmax())
            sample = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            return f"id {ids[at]} of sample {sample} of the batch is not in 0 to {table.rows - 1},"
    return "an id outside the table"

"""What torch raises, as errors of our own tree."""

from __future__ import annotations

import math

import numpy as np

from embark.data import Batch, Source
from embark.errors import DataError, EmbarkError, Fault, UserError
from embark.spec import RunSpec

Trouble = tuple[str, int, str]
"""`id` or `loss`, the step it first happened in, and the table."""

LOST_PEER = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "timed out waiting")


def explain(error: RuntimeError) -> EmbarkError | None:
    """The error in our words; None where it is none that we know."""
    import torch
    import torch.distributed as dist

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(f"out of GPU memory: {text.splitlines()[0]}",
                         fix='a smaller train.batch_size, train.table_dtype = "fp16", or more ranks')
    if isinstance(error, dist.DistError) or any(sign in text.lower() for sign in LOST_PEER):
        return Fault(f"a rank was lost: {text.splitlines()[0]}",
                     fix="start the run again: it goes on from its last checkpoint")
    return None


def refuse_trouble(
    loss: float, trouble: Trouble | None, source: Source, spec: RunSpec, step: int, per_epoch: int
) -> None:
    """A loss that is no number never becomes one again, and an id of no row trains nothing: say which batch it was,
    and what of it. Called after `step` steps."""
    if trouble is None and math.isfinite(loss):
        return
    kind, first, table = trouble or ("loss", step - 1, "")
    epoch, place = divmod(first, per_epoch)
    size = spec.train.batch_size
    batch = source.train_rows(epoch, place * size, (place + 1) * size)
    where = f"in step {first + 1} (samples {place * size} to {(place + 1) * size - 1} of epoch {epoch})"
    if kind == "id":
        raise DataError(f"table {table}: {_bad_id(batch, spec, table)} {where}",
                        fix="`embark data check` finds all of them; the run goes on from its last checkpoint once the "
                            "data is mended")
    is_bad = ~np.isfinite(batch.dense)
    if is_bad.any():
        sample, column = (int(at) for at in np.argwhere(is_bad)[0])
        names = spec.data.dense_columns
        name = names[column] if column < len(names) else f"{column} (counted from 0)"
        raise DataError(f"dense column {name}: {batch.dense[sample, column]} in sample {place * size + sample}, "
                        f"{where}, made the loss no number", fix="drop such rows, or fill the values in")
    shown = f"at step {step}" if trouble is None else where
    raise EmbarkError(f"the loss is no number {shown}; every value of the batch is one, so the weights ran away",
                      fix="a smaller train.learning_rate, or some train.warmup_steps; the run goes on from its last "
                          "checkpoint")


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

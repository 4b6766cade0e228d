"""How good the model is on samples it never trains on; and the exact AUC over all ranks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embark.data import Batch, SampleSource, eval_batches
from embark.errors import DataError, Diverged
from embark.features.arrays import Array, Doubles, Floats, Mask
from embark.formatting import shortlist
from embark.spec import RunSpec, Task
from embark.values import JsonDict
from .trainer import Ranks, Trainer


@dataclass
class Evaluation:
    """The held-out samples, and the best any model could do on them where the source knows it."""

    source: SampleSource
    batch_size: int
    world: Ranks
    tasks: tuple[Task, ...] = ()
    _best: JsonDict | None = field(default=None, init=False)

    def run(self, trainer: Trainer, step: int, is_stopping: Callable[[], bool]) -> JsonDict:
        """Measure the metrics over all ranks; every rank must call it. Empty if the run was asked to stop meanwhile."""
        started, world = time.perf_counter(), self.world
        best: list[tuple[Doubles, Floats]] = []  # The true probabilities, and the labels.
        with trainer.evaluating(step) as evaluator:
            for batch in eval_batches(evaluator.eval_source(self.source), rank=world.rank, world_size=world.world_size,
                                      batch_size=evaluator.batch_size(self.batch_size)):
                if is_stopping():
                    return {}
                evaluator.add(batch)
                if self._best is None and batch.best_probability is not None:
                    best.append((batch.best_probability[: batch.num_samples].astype(np.float64),
                                 batch.label[: batch.num_samples]))
            metrics = evaluator.metrics()
        if "auc" not in metrics:  # as of two towers
            return {**metrics, "eval_s": time.perf_counter() - started}
        if self.tasks:
            return {**self._with_best_of_tasks(metrics, best), "eval_s": time.perf_counter() - started}
        if self._best is None:
            reachable = of_probabilities(world, [(p, label > 0.5) for p, label in best])
            self._best = {f"best_{k}": reachable[k] for k in ("auc", "log_loss") if not math.isnan(reachable[k])}
        return {**metrics, **(self._best or {}), "eval_s": time.perf_counter() - started}

    def _with_best_of_tasks(
        self, metrics: JsonDict, found: Sequence[tuple[Doubles, Floats]]
    ) -> JsonDict:
        from .task_metrics import best_of, with_best

        if self._best is None and not any(self.world.gathered(bool(found))):
            self._best = {}
        if self._best is None:
            num_outputs = sum(task.num_outputs for task in self.tasks)
            outputs = [np.empty((0, num_outputs)), *(best for best, _ in found)]
            labels = [np.empty((0, len(self.tasks))), *(label.astype(np.float64) for _, label in found)]
            self._best = best_of(self.world, self.tasks, np.concatenate(outputs), np.concatenate(labels))
        return with_best(self.tasks, metrics, self._best)


def leak_warning(source: SampleSource, spec: RunSpec, held: Mapping[str, float]) -> str:
    """Name the columns that give the label away, if the model predicts it so well that one may; empty otherwise."""
    from embark.data.column_report import LEAK_AUC, describe_columns, leak_note

    if "best_auc" in held or not held.get("auc", math.nan) >= LEAK_AUC:
        return ""
    return leak_note(list(describe_columns(source, spec)))


MAX_COLUMNS, NUM_ROWS = 64, 1024


def influence_warning(trainer: Trainer, source: SampleSource, spec: RunSpec, world: Ranks, step: int) -> str:
    """Name the dense columns that change no prediction when their values are another sample's; empty if there are none.
    Every rank must call it."""
    from embark.data.evaluation_rows import dense_columns
    from embark.data.permuted_rows import RowsInMemory, dense_groups

    num = min(NUM_ROWS, source.num_eval_samples)
    if spec.data.kind not in ("prepared", "columns") or num < 2:
        return ""
    names = dense_columns(spec)
    groups = dense_groups(names)
    if not 0 < len(groups) <= MAX_COLUMNS or len(names) != spec.model.num_dense:
        return ""
    rows = RowsInMemory(source.eval_rows(0, num))

    def loss(of: RowsInMemory) -> Any:
        found = Evaluation(of, spec.train.batch_size, world, spec.model.tasks).run(trainer, step, lambda: False)
        return found["log_loss"]

    before, order, first = loss(rows), np.roll(np.arange(num), 1), len(rows.batch.lengths)
    idle = [name for name, at, width in groups if np.ptp(rows.batch.dense[:, at : at + width], axis=0).any()
            and loss(rows.permuted(first + at, order, width)) == before]
    has = "has" if len(idle) == 1 else "have"
    return f"{shortlist(idle, 8)} {has} no influence on the predictions of {num:,} held-out samples" if idle else ""


NUM_BINS = 16_384
LARGEST_LOGIT = 12.0
STATE_SIZE = 2 * NUM_BINS + 4
"""Size of a window's state: samples without a click and with one, by bin; then summed log loss, predicted clicks,
clicks, number of samples."""


def metrics_of(state: Doubles) -> dict[str, float]:
    """Return the metrics of a training window's state; undefined ones are NaN. `auc_error`: pairs within a bin count as
    ties, so the exact AUC lies at most half their share away."""
    loss, predicted, clicks, samples = state[2 * NUM_BINS :].tolist()
    negatives, positives = state[:NUM_BINS], state[NUM_BINS : 2 * NUM_BINS]
    error = ratio(float((negatives * positives).sum()) / 2, float(negatives.sum() * positives.sum()))
    return metrics_from((loss, predicted, clicks), _auc(negatives, positives), samples) | {"auc_error": error}


def metrics_from(sums: Sequence[float], auc: float | None, samples: float) -> dict[str, float]:
    """Return the metrics; `sums` are log loss, predicted clicks and clicks of all samples."""
    loss, predicted, clicks = sums
    log_loss = ratio(loss, samples)
    return {
        "auc": math.nan if auc is None else auc, "log_loss": log_loss,
        "normalized_entropy": ratio(log_loss, _entropy(ratio(clicks, samples))),
        "calibration": ratio(predicted, clicks), "num_samples": samples
    }


def of_probabilities(world: Ranks, found: Sequence[tuple[Doubles, Mask]]) -> dict[str, float]:
    """Return the metrics of the true probabilities over all ranks."""
    p = np.concatenate([p for p, _ in found] or [np.empty(0)])
    is_click = np.concatenate([is_click for _, is_click in found] or [np.empty(0, bool)])
    auc, samples = exact_auc(world, p[is_click], int((~is_click).sum()), halves_counter(p[~is_click]))
    p = np.clip(p, 1e-9, 1 - 1e-9)
    loss = -np.where(is_click, np.log(p), np.log1p(-p)).sum()
    return metrics_from(np.sum(world.gathered([loss, p.sum(), is_click.sum()]), axis=0).tolist(), auc, samples)


def _auc(negatives: Doubles, positives: Doubles) -> float:
    """Return the share of (click, no click) pairs in the right order; a tie is half right."""
    below = negatives.cumsum() - negatives
    right = float((positives * (below + negatives / 2)).sum())
    return ratio(right, float(positives.sum() * negatives.sum()))


def _entropy(rate: float) -> float:
    if not 0 < rate < 1:
        return math.nan
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def ratio(numerator: float, denominator: float) -> float:
    """Divide; NaN if there is nothing to divide by."""
    return numerator / denominator if denominator else math.nan


Trouble = tuple[str, int, str]  # `id` or `loss`, the step it first happened in, and the table.


def refuse_trouble(
    loss: float, trouble: Trouble | None, source: SampleSource, spec: RunSpec, step: int, per_epoch: int
) -> None:
    """Raise if the loss is NaN, which never recovers, or if an id lies outside its table, which trains nothing, and
    name the batch and the value. Called after `step` steps."""
    if trouble is None and math.isfinite(loss):
        return
    kind, first, table = trouble or ("loss", step - 1, "")
    epoch, index = divmod(first, per_epoch)
    start, stop = index * spec.train.batch_size, (index + 1) * spec.train.batch_size
    batch = source.train_rows(epoch, start, stop)
    where = f"in step {first + 1} (samples {start} to {stop - 1} of epoch {epoch})"
    if kind == "id":
        raise DataError(f"table {table}: {_bad_id(batch, spec, table)} {where}",
                        "`embark data check` finds all of them; fix the data and run the same command to resume "
                            "from the last checkpoint")
    is_bad = ~np.isfinite(batch.dense)
    if is_bad.any():
        sample, column = (int(at) for at in np.argwhere(is_bad)[0])
        names = spec.data.dense_columns
        name = names[column] if column < len(names) else f"{column} (counted from 0)"
        raise DataError(f"dense column {name}: {batch.dense[sample, column]} in sample {start + sample}, "
                        f"{where}, made the loss NaN", "drop such rows, or fill in the values")
    shown = f"at step {step}" if trouble is None else where
    raise Diverged(f"the loss became NaN {shown}; all inputs were finite, so the weights diverged",
                   "a smaller train.learning_rate, or some train.warmup_steps; the same command resumes from "
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


PIECE = 1 << 18  # Predictions of a rank that are sent at once.


def exact_auc(
    world: Ranks, clicks: Array, num_others: int, count_halves: Callable[[Array], int]
) -> tuple[float | None, int]:
    """Return the share of (click, no click) pairs in the right order, a tie being half right, and the number of
    samples. `clicks` are the predictions for this rank's clicks; `count_halves` says how many of this rank's other
    samples lie below each of some clicks, summed up, where one below counts 2 and an equal one 1. Pairs are counted in
    whole numbers, so the result depends neither on how the samples are split nor on how close their predictions are.
    Every rank must call it."""
    num_rounds = max(world.gathered(-(-len(clicks) // PIECE)))
    halves = sum(count_halves(piece) for round_ in range(num_rounds)
                 for piece in world.gathered(clicks[round_ * PIECE : (round_ + 1) * PIECE]))
    counts = world.gathered((halves, len(clicks), num_others))
    halves, num_clicks, num_rest = (sum(column) for column in zip(*counts, strict=True))
    num_pairs = num_clicks * num_rest
    return (halves / (2 * num_pairs) if num_pairs else None), num_clicks + num_rest


def halves_counter(others: Array) -> Callable[[Array], int]:
    """Make a `count_halves` for the host."""
    ordered = np.sort(others)
    return lambda some: sum(int(np.searchsorted(ordered, some, side).sum()) for side in ("left", "right"))

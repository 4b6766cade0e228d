"""Metrics by the values of one feature, with intervals: where the model is better and worse than on all rows.

A slice is the rows that have a value of a sparse feature, or whose value of a dense one lies in a range. Its rows are
dealt into disjoint parts; the spread of their metrics gives the interval, by Student's t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embark.data.evaluation_rows import EvaluationRows, open_rows
from embark.data.permuted_rows import RowsInMemory
from embark.errors import DataError, UserError, nearest
from embark.run.evaluate_run import LoadedRun, loaded, refuse_two_towers
from embark.run.importance import (
    Estimate,
    Sampling,
    clicks_in,
    estimate,
    feature_names,
    metrics_on,
    refuse_next_item,
)
from embark.run.trainer import TrainerBackend
from embark.spec import RunSpec
from embark.store.checkpoint_inspect import TrainedRun

NUM_RANGES = 10  # Of a dense feature: with as many rows each as its values allow.
METHOD = ("95% intervals by Student's t over {repeats} disjoint parts of a slice, none where a part has rows of one "
          "label only; given this trained model, not corrected for several slices")


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows that one value, or one range of values, selects."""

    value: str
    num_samples: int
    click_rate: float
    log_loss: float
    auc: float | None  # None where all labels are equal.
    calibration: float | None  # None where there is no click.
    auc_interval: Estimate | None
    calibration_interval: Estimate | None


@dataclass(frozen=True, slots=True)
class SliceResult:
    """The slices with the most rows, and all rows together."""

    run: str
    step: int
    data: str
    split: str
    rows: str
    feature: str
    kind: str  # `sparse` or `dense`.
    all_rows: Slice
    slices: tuple[Slice, ...]
    num_values: int  # That the rows have; `slices` are at most as many as were asked for, and the rest together.
    method: str
    notes: tuple[str, ...] = ()


def measure_slices(
    trained: TrainedRun, open_backend: Callable[[RunSpec], TrainerBackend], feature: str, sampling: Sampling, *,
    top: int = 20, data: str = "", split: str = "", on_progress: Callable[[int, int], None] | None = None,
) -> SliceResult:
    """By `feature`, a column of the data or a table, on rows as `evaluate_run` takes them."""
    refuse_two_towers(trained, "--by")
    if top < 1:
        raise UserError(f"--top {top}: must be positive", fix="--top 20 is the default")
    refuse_next_item(trained)
    with open_rows(trained.spec, trained.fingerprint, data, split) as rows:
        names = feature_names(rows)
        found = [i for i, (column, _, table) in enumerate(names) if feature in (column, table) and feature]
        if not found:
            raise UserError(f"--by {feature}: the model has no such feature",
                            fix=nearest(feature, [column for column, _, _ in names]))
        number, (column, kind, _) = found[0], names[found[0]]
        if not (num := rows.source.num_eval_samples):
            raise DataError(f"{rows.description}: has no rows", fix="name other rows")
        everything = RowsInMemory(rows.source.eval_rows(0, num)) if num <= sampling.rows else \
            RowsInMemory.folds(rows.source, sampling.rows, 1)[0]
        parts, num_values, note = slices_of(everything, rows, number, top)
        labels = [part.label for part in parts]
        notes = [*rows.notes, *rows.source.notes, *([note] if note else [])]
        with loaded(trained, open_backend(trained.spec), rows) as model:
            slices = []
            for done, (label, part) in enumerate(zip(["all rows", *labels], [None, *parts], strict=True)):
                taken = everything if part is None else everything.taken(part.samples)
                slices.append(_measured(label, taken, rows, model, sampling))
                if on_progress:
                    on_progress(done + 1, len(parts) + 1)
            return SliceResult(
                run=trained.run_dir.uri, step=model.step, data=rows.path, split=rows.split, rows=rows.description,
                feature=column, kind=kind, all_rows=slices[0], slices=tuple(slices[1:]), num_values=num_values,
                method=METHOD.format(repeats=sampling.repeats), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows of a slice, by position."""

    label: str
    samples: NDArray[np.int64]
    id: int | None = None


def slices_of(rows: RowsInMemory, opened: EvaluationRows, feature: int, top: int) -> tuple[list[RowSlice], int, str]:
    """Of a feature, by its position: its slices, the number of its values, and a note where their names are unknown."""
    _, kind, table = feature_names(opened)[feature]
    if kind == "dense":
        parts = list(_ranges(rows.batch.dense[:, feature - len(rows.batch.lengths)]))
        return parts, len(parts), ""
    parts, num_values = _values(rows, feature, top)
    labels, note = _words(opened, table, parts)
    return [replace(part, label=label) for part, label in zip(parts, labels, strict=True)], num_values, note


def _values(rows: RowsInMemory, feature: int, top: int) -> tuple[list[RowSlice], int]:
    """The `top` most frequent ids, then the rows without an id and those that have none of these."""
    ids, samples = rows.ids_of(feature)
    pairs = np.unique(np.stack([ids.astype(np.int64), samples]), axis=1)  # an id counts once in a row
    known, counts = np.unique(pairs[0], return_counts=True)
    frequent = known[np.argsort(-counts, kind="stable")[:top]]
    parts = [RowSlice(f"id {one}", pairs[1][pairs[0] == one], int(one)) for one in frequent.tolist()]
    is_rest = np.ones(rows.num_eval_samples, np.bool_)
    is_rest[pairs[1][np.isin(pairs[0], frequent)]] = False
    is_empty = np.ones(rows.num_eval_samples, np.bool_)
    is_empty[samples] = False
    for label, chosen in (("no value", is_empty), ("other values", is_rest & ~is_empty)):
        if chosen.any():
            parts.append(RowSlice(label, np.flatnonzero(chosen)))
    return parts, len(known)


def _ranges(values: NDArray[np.float32]) -> Iterator[RowSlice]:
    edges = np.unique(np.quantile(values, np.linspace(0, 1, NUM_RANGES + 1)[1:-1], method="lower"))
    place = np.searchsorted(edges, values, side="left")
    for number in range(len(edges) + 1):
        if len(samples := np.flatnonzero(place == number)):
            yield RowSlice(f"{values[samples].min():g} to {values[samples].max():g}", samples)


def _words(rows: EvaluationRows, table: str, parts: list[RowSlice]) -> tuple[list[str], str]:
    """What the ids stand for, as the data has it; and a note where that is not known."""
    labels = [part.label for part in parts]
    if rows.spec.data.kind != "prepared":
        return labels, ""
    from embark.data.export.id_values import read_values
    from embark.data.prepared.cache import read_manifest

    path = rows.spec.data.path
    values = read_values(path, read_manifest(path), [table])[table]
    if values.values is None:
        return labels, f"{table}: {values.note}" if values.note else ""
    ids = np.array([part.id or 0 for part in parts], np.int64)
    words = values.take(ids).to_pylist()
    for place, (part, word) in enumerate(zip(parts, words, strict=True)):
        if part.id == 0:
            labels[place] = "missing, rare or unseen"
        elif part.id is not None and word is not None:
            labels[place] = str(word)
    return labels, values.note


def _measured(value: str, part: RowsInMemory, rows: EvaluationRows, model: LoadedRun, sampling: Sampling) -> Slice:
    found, clicks, num = metrics_on(part, rows, model), clicks_in(part, rows), part.num_eval_samples
    order = np.random.default_rng(sampling.seed).permutation(num)
    folds = [part.taken(order[start :: sampling.repeats]) for start in range(sampling.repeats)] \
        if num >= 2 * sampling.repeats else []
    has_both = [0 < clicks_in(fold, rows) < fold.num_eval_samples for fold in folds]
    auc = calibration = None
    if folds and all(has_both):
        by_fold = [metrics_on(fold, rows, model) for fold in folds]
        auc = _around(found["auc"], [one["auc"] for one in by_fold])
        calibration = _around(found["calibration"], [one["calibration"] for one in by_fold])
    return Slice(value=value, num_samples=num, click_rate=clicks / num, log_loss=found["log_loss"],
                 auc=found["auc"] if 0 < clicks < num else None, calibration=found["calibration"] if clicks else None,
                 auc_interval=auc, calibration_interval=calibration)


def _around(value: float, by_fold: list[float]) -> Estimate:
    """The interval's width is the folds'; its centre is the metric of all rows."""
    spread = estimate(by_fold)
    return Estimate(value, value + spread.low - spread.mean, value + spread.high - spread.mean)

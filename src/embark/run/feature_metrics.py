"""How the metrics of a trained model depend on a feature: permutation importance, and metrics by its values.

Importance is how much worse the predictions become when a feature is another sample's. The rows are dealt into as many
disjoint parts as there are repeats. In each part the values of one feature are permuted among its samples, and the
metrics compared with those of the same part left alone. The differences of the parts are independent given the model,
so Student's t over them gives an interval that covers both which rows were drawn and which permutation. It does not
cover that another training run would have learned another model; and each interval is one feature's own, not corrected
for looking at many. Features that say the same share their importance.

A slice is the rows that have a value of a sparse feature, or whose value of a dense one lies in a range. Its rows are
dealt into disjoint parts, too; the spread of their metrics gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data import SampleSource
from embark.data.evaluation_rows import EvaluationRows, open_rows
from embark.data.permuted_rows import RowsInMemory
from embark.data.task_labels import main_label
from embark.errors import DataError, UserError, nearest
from embark.run.evaluate_run import LoadedRun, loaded
from embark.run.evaluation import Evaluation
from embark.run.trainer import TrainerBackend
from embark.spec import RunSpec
from embark.spec.tasks import list_size_of
from embark.store.checkpoint_inspect import TrainedRun

MIN_REPEATS = 5
METHOD = ("permutation importance: each feature permuted among the rows of one of {repeats} disjoint parts at a time; "
          "mean difference over the parts, 95% interval by Student's t; given this trained model, not corrected for "
          "several features")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rows, parts and orders that are used to measure features."""

    rows: int = 50_000
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < MIN_REPEATS:
            raise UserError(f"--repeats {self.repeats}: an interval needs {MIN_REPEATS} or more",
                            fix="--repeats 10 is the default")
        if self.rows < 1:
            raise UserError(f"--rows {self.rows}: must be positive", fix="--rows 50000 is the default")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        return self.low <= 0 <= self.high


@dataclass(frozen=True, slots=True)
class FeatureImportance:
    """The loss of quality of the predictions without one feature."""

    feature: str  # The column of the user's data.
    kind: str  # `sparse` or `dense`.
    table: str  # Empty for a dense column.
    log_loss_increase: Estimate
    auc_drop: Estimate


@dataclass(frozen=True, slots=True)
class ImportanceResult:
    """All features, the most important by log loss first."""

    run: str
    step: int
    data: str
    split: str
    rows: str
    num_samples: int
    repeats: int
    seed: int
    log_loss: float  # The log loss of the same rows unpermuted, as the mean of the parts.
    auc: float
    features: tuple[FeatureImportance, ...]
    method: str
    notes: tuple[str, ...] = ()


def _refuse_without_features(trained: TrainedRun, option: str) -> None:
    """Refuse models whose rows have no predicted probability of their own."""
    model, run = trained.spec.model, trained.run_dir.uri
    if model.kind == "two_tower":
        raise UserError(f"{option}: needs predicted probabilities, and {run} is a retrieval model",
                        fix="leave it out: Recall@K, NDCG@K and Hit@K are measured without it")
    if list_size_of(model.tasks) > 1:
        raise UserError(f"{option}: takes rows one by one, and {run} has a task over lists of rows",
                        fix="leave it out: NDCG@K and Hit@K are measured without it")
    if model.is_next_item:
        raise UserError(f"{option}: {run} predicts the next item of one sequence, and has no features to compare",
                        fix="leave it out")


def measure_importance(
    trained: TrainedRun, open_backend: Callable[[RunSpec], TrainerBackend], sampling: Sampling, *, data: str = "",
    split: str = "", on_progress: Callable[[int, int], None] | None = None,
) -> ImportanceResult:
    """Measure the importance of every feature, on rows as `evaluate_run` takes them."""
    _refuse_without_features(trained, "--importance")
    with open_rows(trained.spec, trained.fingerprint, data, split) as rows:
        parts = RowsInMemory.folds(rows.source, sampling.rows, sampling.repeats)
        if any(not 0 < clicks_in(part, rows) < part.num_eval_samples for part in parts) or not parts:
            raise DataError(f"{rows.description}: too few rows for {sampling.repeats} parts that each have both labels",
                            fix="more --rows, fewer --repeats, or data with more rows")
        names = feature_names(rows)
        with loaded(trained, open_backend(trained.spec), rows) as model:
            base = [_metrics(part, rows, model) for part in parts]
            found = []
            for number, (column, kind, table) in enumerate(names):
                worse = []
                for index, part in enumerate(parts):
                    order = np.random.default_rng((sampling.seed, number, index)).permutation(part.num_eval_samples)
                    worse.append(_metrics(part.permuted(number, order), rows, model))
                found.append(FeatureImportance(
                    feature=column, kind=kind, table=table,
                    log_loss_increase=estimate([w[0] - b[0] for w, b in zip(worse, base, strict=True)]),
                    auc_drop=estimate([b[1] - w[1] for w, b in zip(worse, base, strict=True)])))
                if on_progress:
                    on_progress(number + 1, len(names))
            return ImportanceResult(
                run=trained.run_dir.uri, step=model.step, data=rows.path, split=rows.split, rows=rows.description,
                num_samples=sum(part.num_eval_samples for part in parts), repeats=sampling.repeats,
                seed=sampling.seed, log_loss=fmean(loss for loss, _ in base), auc=fmean(auc for _, auc in base),
                features=tuple(sorted(found, key=lambda one: -one.log_loss_increase.mean)),
                method=METHOD.format(repeats=sampling.repeats), notes=(*rows.notes, *rows.source.notes),
            )


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values, and the interval that Student's t gives."""
    mean, num = fmean(values), len(values)
    half = _t_quantile(num - 1) * stdev(values) / math.sqrt(num)
    return Estimate(mean, mean - half, mean + half)


def _t_quantile(df: int) -> float:
    """Return the 97.5% quantile of Student's t by its expansion around the normal one (Abramowitz and Stegun, 26.7.5),
    within 0.5% from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    return (z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3))


def clicks_in(part: RowsInMemory, rows: EvaluationRows) -> float:
    """Count the clicks; with several tasks, those of the first binary one."""
    return float(main_label(part.batch.label, rows.spec.model.tasks).sum())


def metrics_on(part: SampleSource, rows: EvaluationRows, model: LoadedRun) -> dict[str, Any]:
    """Return the model's metrics on some of the rows."""
    size = min(rows.spec.train.batch_size, -(-part.num_eval_samples // model.world.num_devices)
               * model.world.num_devices)
    return Evaluation(part, size, model.world, rows.spec.model.tasks).run(model.trainer, model.step, lambda: False)


def _metrics(part: SampleSource, rows: EvaluationRows, model: LoadedRun) -> tuple[float, float]:
    found = metrics_on(part, rows, model)
    return found["log_loss"], found["auc"]


def feature_names(rows: EvaluationRows) -> list[tuple[str, str, str]]:
    """Return column, kind and table of the sparse features and then the dense ones, in the order of a batch."""
    spec = rows.spec
    columns, dense = rows.columns, rows.dense or tuple(f"dense_{i}" for i in range(spec.model.num_dense))
    return [*((columns.get(table.name, table.name), "sparse", table.name) for table in spec.model.table_list()),
            *((name, "dense", "") for name in dense)]


NUM_RANGES = 10  # Ranges of a dense feature, with as many rows each as its values allow.
SLICE_METHOD = ("95% intervals by Student's t over {repeats} disjoint parts of a slice, none where a part has rows of "
                "one label only; given this trained model, not corrected for several slices")


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows that one value, or one range of values, selects."""

    value: str
    num_samples: int
    click_rate: float
    log_loss: float
    auc: float | None  # None if all labels are equal.
    calibration: float | None  # None if there is no click.
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
    num_values: int  # Values that the rows have; `slices` has the most frequent, and the rest together.
    method: str
    notes: tuple[str, ...] = ()


def measure_slices(
    trained: TrainedRun, open_backend: Callable[[RunSpec], TrainerBackend], feature: str, sampling: Sampling, *,
    top: int = 20, data: str = "", split: str = "", on_progress: Callable[[int, int], None] | None = None,
) -> SliceResult:
    """Measure the metrics by `feature`, a column of the data or a table, on rows as `evaluate_run` takes them."""
    _refuse_without_features(trained, "--by")
    if top < 1:
        raise UserError(f"--top {top}: must be positive", fix="--top 20 is the default")
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
                method=SLICE_METHOD.format(repeats=sampling.repeats), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Positions of the rows of a slice."""

    label: str
    samples: NDArray[np.int64]
    id: int | None = None


def slices_of(rows: RowsInMemory, opened: EvaluationRows, feature: int, top: int) -> tuple[list[RowSlice], int, str]:
    """Return the slices of a feature, the number of its values, and a note if their names are unknown."""
    _, kind, table = feature_names(opened)[feature]
    if kind == "dense":
        parts = list(_ranges(rows.batch.dense[:, feature - len(rows.batch.lengths)]))
        return parts, len(parts), ""
    parts, num_values = _values(rows, feature, top)
    labels, note = _words(opened, table, parts)
    return [replace(part, label=label) for part, label in zip(parts, labels, strict=True)], num_values, note


def _values(rows: RowsInMemory, feature: int, top: int) -> tuple[list[RowSlice], int]:
    """Return the `top` most frequent ids, then the rows without an id and those that have none of these."""
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
    bins = np.searchsorted(edges, values, side="left")
    for number in range(len(edges) + 1):
        if len(samples := np.flatnonzero(bins == number)):
            yield RowSlice(f"{values[samples].min():g} to {values[samples].max():g}", samples)


def _words(rows: EvaluationRows, table: str, parts: list[RowSlice]) -> tuple[list[str], str]:
    """Return what the ids stand for, as the data has it, and a note if that is not known."""
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
    for index, (part, word) in enumerate(zip(parts, words, strict=True)):
        if part.id == 0:
            labels[index] = "missing, rare or unseen"
        elif part.id is not None and word is not None:
            labels[index] = str(word)
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
    """Return an interval with the width of the folds' one around the metric of all rows."""
    spread = estimate(by_fold)
    return Estimate(value, value + spread.low - spread.mean, value + spread.high - spread.mean)

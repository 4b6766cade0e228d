"""Permutation importance: how much worse the predictions become when a feature is another sample's.

The rows are dealt into as many disjoint parts as there are repeats. In each part the values of one feature are
permuted among its samples, and the metrics compared with those of the same part left alone. The differences of the
parts are independent given the model, so Student's t over them gives an interval that covers both which rows were
drawn and which permutation. It does not cover that another training run would have learned another model; and each
interval is one feature's own, not corrected for looking at many. Features that say the same share their importance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np

from embark.data import SampleSource
from embark.data.evaluation_rows import EvaluationRows, open_rows
from embark.data.permuted_rows import RowsInMemory
from embark.data.task_labels import main_label
from embark.errors import DataError, UserError
from embark.run.evaluate_run import LoadedRun, loaded, refuse_two_towers
from embark.run.evaluation import Evaluation
from embark.run.trainer import TrainerBackend
from embark.spec import RunSpec
from embark.store.checkpoint_inspect import TrainedRun

MIN_REPEATS = 5
METHOD = ("permutation importance: each feature permuted among the rows of one of {repeats} disjoint parts at a time; "
          "mean difference over the parts, 95% interval by Student's t; given this trained model, not corrected for "
          "several features")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which rows, in how many parts, in which orders."""

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
    """What is lost without one feature."""

    feature: str  # The column of the user's data.
    kind: str  # `sparse` or `dense`.
    table: str  # Empty of a dense column.
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
    log_loss: float  # Of the same rows as they are, as the mean of the parts.
    auc: float
    features: tuple[FeatureImportance, ...]
    method: str
    notes: tuple[str, ...] = ()


def refuse_next_item(trained: TrainedRun) -> None:
    """Its features are one sequence, and its rows have no labels."""
    if trained.spec.model.is_next_item:
        raise UserError(f"{trained.run_dir.uri}: a model of the next item has one sequence, and no features to compare",
                        fix="leave out --importance and --by")


def measure_importance(
    trained: TrainedRun, open_backend: Callable[[RunSpec], TrainerBackend], sampling: Sampling, *, data: str = "",
    split: str = "", on_progress: Callable[[int, int], None] | None = None,
) -> ImportanceResult:
    """Of every feature, on rows as `evaluate_run` takes them."""
    refuse_two_towers(trained, "--importance")
    refuse_next_item(trained)
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
    """Of independent values: their mean, and the interval that Student's t gives."""
    mean, num = fmean(values), len(values)
    half = _t_quantile(num - 1) * stdev(values) / math.sqrt(num)
    return Estimate(mean, mean - half, mean + half)


def _t_quantile(df: int) -> float:
    """97.5% of Student's t, by its expansion around the normal one's (Abramowitz and Stegun, 26.7.5); within 0.5%
    from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    return (z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3))


def clicks_in(part: RowsInMemory, rows: EvaluationRows) -> float:
    """Of several tasks those of the first binary one."""
    return float(main_label(part.batch.label, rows.spec.model.tasks).sum())


def metrics_on(part: SampleSource, rows: EvaluationRows, model: LoadedRun) -> dict[str, Any]:
    """The model's metrics on some of the rows."""
    size = min(rows.spec.train.batch_size, -(-part.num_eval_samples // model.world.num_devices)
               * model.world.num_devices)
    return Evaluation(part, size, model.world, rows.spec.model.tasks).run(model.trainer, model.step, lambda: False)


def _metrics(part: SampleSource, rows: EvaluationRows, model: LoadedRun) -> tuple[float, float]:
    found = metrics_on(part, rows, model)
    return found["log_loss"], found["auc"]


def feature_names(rows: EvaluationRows) -> list[tuple[str, str, str]]:
    """Column, kind and table of the sparse features and then the dense ones, as a batch has them."""
    spec = rows.spec
    columns, dense = rows.columns, rows.dense or tuple(f"dense_{i}" for i in range(spec.model.num_dense))
    return [*((columns.get(table.name, table.name), "sparse", table.name) for table in spec.model.table_list()),
            *((name, "dense", "") for name in dense)]

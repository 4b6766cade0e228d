"""How the metrics of a trained model depend on a feature: permutation importance; and the rows with each of its values.

Importance is how much worse the predictions become when a feature is another sample's. The rows are dealt into as many
disjoint parts as `NUM_PARTS` says. In each part the values of one feature are permuted among its samples, and the
metrics compared with those of the same part left alone. The differences of the parts are independent given the model,
so Student's t over them gives an interval that covers both which rows were drawn and which permutation. It does not
cover that another training run would have learned another model; and each interval is one feature's own, not corrected
for looking at many. Features that say the same share their importance.

A slice is the rows that have a value of a sparse feature, or whose value of a dense one lies in a range.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, stdev

import numpy as np

from embark.data.evaluation_rows import EvaluationRows, open_rows
from embark.data.permuted_rows import RowsInMemory, dense_groups
from embark.data.task_labels import main_label
from embark.errors import DataError, UserError
from embark.events.results import Tabular
from embark.features.arrays import Floats, Int64s
from embark.spec import RunSpec, list_size_of
from embark.store.checkpoint_inspect import TrainedRun
from embark.values import JsonDict, frozen
from .evaluate_run import LoadedRun, loaded
from .evaluation import Evaluation
from .trainer import TrainerBackend

NUM_PARTS = 10
METHOD = (f"permutation importance: each feature permuted among the rows of one of {NUM_PARTS} disjoint parts at a "
          "time; mean difference over the parts, 95% interval by Student's t; given this trained model, not corrected "
          "for several features")


@frozen
class Estimate:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        return self.low <= 0 <= self.high


@frozen
class FeatureImportance:
    """The loss of quality of the predictions without one feature."""

    feature: str  # The column of the user's data.
    kind: str  # `sparse` or `dense`.
    table: str  # Empty for a dense column.
    log_loss_increase: Estimate
    auc_drop: Estimate


@frozen
class ImportanceResult(Tabular):
    """All features, the most important by log loss first."""

    run: str
    step: int
    data: str
    split: str
    rows: str
    num_samples: int
    log_loss: float  # The log loss of the same rows unpermuted, as the mean of the parts.
    auc: float
    features: tuple[FeatureImportance, ...]
    method: str
    notes: tuple[str, ...] = ()

    def to_rows(self) -> list[JsonDict]:
        """Return a row for each feature, with the ends of its intervals."""
        rows = []
        for one in self.features:
            row: JsonDict = {"feature": one.feature, "kind": one.kind, "table": one.table}
            for name in ("log_loss_increase", "auc_drop"):
                found: Estimate = getattr(one, name)
                row |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
            rows.append({**row, "differs_from_0": not one.log_loss_increase.includes_zero})
        return rows


def _refuse_without_features(trained: TrainedRun) -> None:
    """Refuse models whose rows have no predicted probability of their own."""
    model, run = trained.spec.model, trained.run_dir.uri
    if model.kind == "two_tower":
        raise UserError(f"--importance: needs predicted probabilities, and {run} is a retrieval model",
                        "leave it out: Recall@K, NDCG@K and Hit@K are measured without it")
    if list_size_of(model.tasks) > 1:
        raise UserError(f"--importance: takes rows one by one, and {run} has a task over lists of rows",
                        "leave it out: NDCG@K and Hit@K are measured without it")
    if model.is_next_item:
        raise UserError(f"--importance: {run} predicts the next item of one sequence, and has no features to compare",
                        "leave it out")


def measure_importance(
    trained: TrainedRun, open_backend: Callable[[RunSpec], TrainerBackend], num_rows: int, *, data: str,
    split: str, on_progress: Callable[[int, int], None] | None
) -> ImportanceResult:
    """Measure the importance of every feature, on rows as `evaluate_run` takes them, of which at most `num_rows`."""
    _refuse_without_features(trained)
    with open_rows(trained.spec, trained.fingerprint, data, split, run_uri=trained.run_dir.uri) as rows:
        parts = RowsInMemory.folds(rows.source, max(0, num_rows), NUM_PARTS)
        clicks = [main_label(part.batch.label, rows.spec.model.tasks).sum() for part in parts]
        if not parts or any(not 0 < num < part.num_eval_samples for num, part in zip(clicks, parts, strict=True)):
            raise DataError(f"{rows.description}: too few rows for {NUM_PARTS} parts that each have both labels",
                            "more --rows, or data with more rows")
        names, groups = feature_names(rows), _positions(rows)
        with loaded(trained, open_backend(trained.spec), rows) as model:
            base = [_metrics(part, rows, model) for part in parts]
            found = []
            for number, (column, kind, table) in enumerate(names):
                worse = []
                for index, part in enumerate(parts):
                    order = np.random.default_rng((0, number, index)).permutation(part.num_eval_samples)
                    worse.append(_metrics(part.permuted(groups[number][0], order, groups[number][1]), rows, model))
                found.append(FeatureImportance(
                    feature=column, kind=kind, table=table,
                    log_loss_increase=estimate([w[0] - b[0] for w, b in zip(worse, base, strict=True)]),
                    auc_drop=estimate([b[1] - w[1] for w, b in zip(worse, base, strict=True)])))
                if on_progress:
                    on_progress(number + 1, len(names))
            return ImportanceResult(
                run=trained.run_dir.uri, step=model.step, data=rows.path, split=rows.split, rows=rows.description,
                num_samples=sum(part.num_eval_samples for part in parts), log_loss=fmean(loss for loss, _ in base),
                auc=fmean(auc for _, auc in base),
                features=tuple(sorted(found, key=lambda one: -one.log_loss_increase.mean)), method=METHOD,
                notes=(*rows.notes, *rows.source.notes)
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


def _metrics(part: RowsInMemory, rows: EvaluationRows, model: LoadedRun) -> tuple[float, float]:
    """Return the model's log loss and AUC on some of the rows."""
    size = min(rows.spec.train.batch_size, -(-part.num_eval_samples // model.world.num_devices)
               * model.world.num_devices)
    found = Evaluation(part, size, model.world, rows.spec.model.tasks).run(model.trainer, model.step, lambda: False)
    return found["log_loss"], found["auc"]


def feature_names(rows: EvaluationRows) -> list[tuple[str, str, str]]:
    """Return column, kind and table of the sparse features and then the dense ones, in the order of a batch. A column
    that has several dense values is one feature."""
    return [*((rows.columns.get(table.name, table.name), "sparse", table.name)
              for table in rows.spec.model.table_list()),
            *((name, "dense", "") for name, _, _ in _groups(rows))]


def _groups(rows: EvaluationRows) -> list[tuple[str, int, int]]:
    return dense_groups(rows.dense or [f"dense_{i}" for i in range(rows.spec.model.num_dense)])


def _positions(rows: EvaluationRows) -> list[tuple[int, int]]:
    """Return the position of each feature in a batch, and how many values it has there."""
    num_tables = len(rows.spec.model.table_list())
    return [*((number, 1) for number in range(num_tables)),
            *((num_tables + at, width) for _, at, width in _groups(rows))]


NUM_RANGES = 10  # Ranges of a dense feature, with as many rows each as its values allow.


@frozen
class RowSlice:
    """Positions of the rows of a slice."""

    label: str
    samples: Int64s
    id: int | None = None


def slices_of(rows: RowsInMemory, opened: EvaluationRows, feature: int, top: int) -> list[RowSlice]:
    """Return the slices of a feature."""
    _, kind, table = feature_names(opened)[feature]
    if kind == "dense":
        at, width = _positions(opened)[feature]
        at -= len(rows.batch.lengths)
        return list(_ranges(rows.batch.dense[:, at : at + width].sum(axis=1)))  # rises with the column, in buckets too
    return _with_words(opened, table, _values(rows, feature, top))


def _values(rows: RowsInMemory, feature: int, top: int) -> list[RowSlice]:
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
    return parts


def _ranges(values: Floats) -> Iterator[RowSlice]:
    edges = np.unique(np.quantile(values, np.linspace(0, 1, NUM_RANGES + 1)[1:-1], method="lower"))
    bins = np.searchsorted(edges, values, side="left")
    for number in range(len(edges) + 1):
        if len(samples := np.flatnonzero(bins == number)):
            yield RowSlice(f"{values[samples].min():g} to {values[samples].max():g}", samples)


def _with_words(rows: EvaluationRows, table: str, parts: list[RowSlice]) -> list[RowSlice]:
    """Name slices by what their ids stand for, if the data has it."""
    if rows.spec.data.kind != "prepared":
        return parts
    from embark.data.export.id_values import read_values
    from embark.data.prepared.cache import read_manifest

    path = rows.spec.data.path
    values = read_values(path, read_manifest(path), [table])[table]
    if values.values is None:
        return parts
    words = values.take(np.array([part.id or 0 for part in parts], np.int64)).to_pylist()
    labels: dict[int | None, str] = {part.id: str(word) for part, word in zip(parts, words, strict=True)
                                     if part.id and word is not None}
    labels[0] = "missing, rare or unseen"
    return [replace(part, label=labels.get(part.id, part.label)) for part in parts]

"""What each column holds in a sample of the rows, and whether it alone predicts the label: such a column is derived
from the label, or known only after it."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

import numpy as np

from embark.features.arrays import Array, Doubles
from embark.features.numbers import Numbers
from embark.spec import RunSpec
from embark.values import frozen
from . import open_source
from .loader import Batch, SampleSource
from .prepared import Manifest, Split
from .prepared.parts import iter_blocks
from .prepared.source import PreparedSource
from .task_labels import main_label

LEAK_AUC = 0.9
"""A column that alone reaches this is nearly the label: on real clicks no single one comes near, and no model."""
MAX_ROWS = 100_000
MAX_IDS = 20_000_000
NUM_PIECES = 8
UNSEEN_SHARE = 0.3
MIN_OF_EACH = 10  # Rows of each label, below which an AUC says nothing.
PRIOR_WEIGHT = 10.0
"""An id seen once or twice says little: its label rate is drawn to that of all rows as by so many rows more."""
_NO_LENGTHS = np.zeros(0, np.int32)


@frozen
class Column:
    """What a column holds in the training rows that were read."""

    column: str
    kind: str
    rows: int | None  # Rows of the table.
    num_values: int
    top_share: float  # The share of the most frequent value.
    zero_share: float
    spread: str  # The range of values, or of the number of ids.
    same_as: str  # An earlier column that holds the same.
    auc_alone: float | None  # On held-out rows; never below 0.5; None if there are too few of them.


@frozen
class Problem:
    where: str  # A file, or a column.
    what: str


@frozen
class Report:
    """The result of `embark data check`."""

    path: str
    rows: Mapping[str, int]  # By split.
    problems: tuple[Problem, ...] = ()  # Problems that make the data unusable.
    hints: tuple[Problem, ...] = ()  # Oddities that a person may want to look at.
    columns: tuple[Column, ...] = ()
    size_bytes: int = 0  # The size of prepared data.
    time_split: Mapping[str, str] = field(default_factory=dict)  # Where splits by time begin.


def check_columns(spec: RunSpec) -> Report:
    """Read every row, as training does, which refuses bad ones, and look at the columns."""
    source = open_source(spec)
    columns = tuple(describe_columns(source, spec))
    name = spec.data.kind if spec.data.is_custom else spec.data.path
    hints = (*(Problem(name, note) for note in source.notes), *column_hints(columns))
    rows = {"train": source.num_train_samples, "validation": source.num_eval_samples}
    return Report(name, rows, hints=hints, columns=columns)


def describe_columns(source: SampleSource, spec: RunSpec) -> Iterator[Column]:
    """Yield the label and each column, from rows spread over the data. Ids of held-out rows are scored by the label
    rates of training rows."""
    tables = spec.model.table_list()
    num_rows = min(MAX_ROWS, MAX_IDS // max(1, sum(table.multi_hot for table in tables)))
    trained = [source.train_rows(0, *ends) for ends in _pieces(source.num_train_samples, num_rows)]
    held = [source.eval_rows(*ends) for ends in _pieces(source.num_eval_samples, num_rows)]
    if not trained:
        return
    seen = Batch.join(trained)
    asked = Batch.join(held) if held else seen.take(np.zeros(0, np.int64))
    label, held_label = (main_label(batch.label, spec.model.tasks) for batch in (seen, asked))
    marks: dict[bytes, str] = {}

    def column(name: str, kind: str, values: Array, spread: str, auc_alone: float | None, *,
               lengths: Array = _NO_LENGTHS, rows: int | None = None) -> Column:
        mark = hashlib.sha256(values.tobytes() + lengths.tobytes()).digest()
        first = marks.setdefault(mark, name)
        _, counts = np.unique(values, return_counts=True)
        most, zeros = (float(num / max(1, len(values))) for num in (counts.max(initial=0), (values == 0).sum()))
        return Column(name, kind, rows, len(counts), most, zeros, spread, "" if first == name else first, auc_alone)

    def dense_column(name: str, kind: str, values: Array, auc_alone: float | None) -> Column:
        return column(name, kind, values, f"{values.min():.4g} … {values.max():.4g}", auc_alone)

    if not spec.model.tasks and not (isinstance(source, PreparedSource) and source.layout.labels):
        yield dense_column("label", "label", label, None)
    names, encoded = spec.data.dense_columns, Numbers(())
    if isinstance(source, PreparedSource):
        names, encoded = source.layout.dense, source.numbers
    if spec.data.is_custom:
        names = tuple(f"dense {position}" for position in range(spec.model.num_dense))
    for (name, values, _), (_, *held_values) in zip(encoded.by_column(names, seen.dense),
                                                    encoded.by_column(names, asked.dense), strict=True):
        areas = (auc(one.astype(np.float64), held_label) for one in held_values if one is not None)
        yield dense_column(name, "dense", values, max(filter(None, areas), default=None))
    features = zip(tables, seen.by_feature(seen.ids), seen.lengths, asked.by_feature(asked.ids), asked.lengths,
                   strict=True)
    prior = float(label.mean())
    for table, ids, lengths, held_ids, held_lengths in features:
        found, numbers = np.unique(np.concatenate([ids, held_ids]), return_inverse=True)
        trained_numbers, held_numbers = numbers[: len(ids)], numbers[len(ids) :]
        counts = np.bincount(trained_numbers, minlength=len(found))
        clicks = np.bincount(trained_numbers, np.repeat(label, lengths), minlength=len(found))
        rates = (clicks + prior * PRIOR_WEIGHT) / (counts + PRIOR_WEIGHT)
        row = np.repeat(np.arange(len(held_label)), held_lengths)
        sums = np.bincount(row, rates[held_numbers], minlength=len(held_label))
        scores = np.where(held_lengths > 0, sums / np.maximum(held_lengths, 1), prior)
        is_list = lengths.min() < lengths.max()
        yield column(table.name, "list" if is_list else "ids", ids,
                     f"{lengths.min()} … {lengths.max()} ids" if is_list else f"{lengths[0]} each",
                     auc(scores, held_label), lengths=lengths, rows=table.rows)


def column_hints(columns: Sequence[Column]) -> Iterator[Problem]:
    """Find what is valid but often a mistake."""
    for one in columns:
        if one.num_values <= 1:
            yield Problem(one.column, "is the same in every training row that was read, so nothing can be learned from "
                                      "it")
        elif one.same_as:
            yield Problem(one.column, f"holds the same as {one.same_as} in every row that was read")
        if one.auc_alone is not None and one.auc_alone >= LEAK_AUC:
            what = "is the label, or derived from it" if one.auc_alone > 0.9999 else "may be known only after the label"
            yield Problem(one.column, f"alone predicts the label, with AUC {one.auc_alone:.4f} on held-out rows: it "
                                      f"{what}")


def unseen_ids(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Find tables whose ids in held-out rows often occur in no training row, among the first rows of each. Missing
    values, which have id 0 too, are taken to be as frequent in both."""
    split: Split = "validation" if manifest.num_rows("validation") else "test"
    maps = manifest.settings.get("id_maps", {})
    for index, feature in enumerate(manifest.layout.features):
        if maps.get(feature.name, {}).get("how") != "frequency" or not manifest.num_rows(split):
            continue
        share = _zero_share(folder, manifest, split, index) - _zero_share(folder, manifest, "train", index)
        if share >= UNSEEN_SHARE:
            yield Problem(feature.name, f"{share:.0%} of its ids in {split} rows occur in no training row (or too "
                                        "rarely): to the model they are all alike")


def _zero_share(folder: Path, manifest: Manifest, split: Split, feature: int) -> float:
    num_rows = num_ids = num_zeros = 0
    for block in iter_blocks(folder, manifest, split):
        ids = block.ids(feature)
        num_rows += len(block.label)
        num_ids += ids.size
        num_zeros += int((ids == 0).sum())
        if num_rows >= MAX_ROWS:
            break
    return num_zeros / max(1, num_ids)


def leak_note(columns: Sequence[Column]) -> str:
    """Name the columns that give the label away; empty if there is none."""
    leaking = [f"{one.column} (AUC {one.auc_alone:.4f})" for one in columns
               if one.auc_alone is not None and one.auc_alone >= LEAK_AUC]
    alone = "each alone predict" if len(leaking) > 1 else "alone predicts"
    return f"{', '.join(leaking)} {alone} the label of held-out rows" if leaking else ""


def auc(scores: Doubles, label: Array) -> float | None:
    """Return the share of pairs of a 1 and a 0 that the score orders rightly, or, if more are, wrongly."""
    num_positive = int((label == 1).sum())
    num_negative = len(label) - num_positive
    if min(num_positive, num_negative) < MIN_OF_EACH:
        return None
    values, index = np.unique(scores, return_inverse=True)
    positive = np.bincount(index, weights=label == 1, minlength=len(values))
    negative = np.bincount(index, weights=label != 1, minlength=len(values))
    below = np.cumsum(negative) - negative
    area = float((positive * (below + negative / 2)).sum()) / num_positive / num_negative
    return max(area, 1 - area)


def _pieces(num_rows: int, at_most: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of up to `at_most` rows, spread over all."""
    size = min(num_rows, at_most) // NUM_PIECES
    if num_rows <= at_most or not size:
        yield from ([(0, num_rows)] if num_rows else [])
        return
    yield from ((start, start + size) for start in range(0, num_rows - size + 1, num_rows // NUM_PIECES))

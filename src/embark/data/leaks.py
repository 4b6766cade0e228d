"""Columns that alone predict the label: derived from it, or known only after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from embark.data import open_source
from embark.data.loader import Batch, SampleSource
from embark.data.prepared.source import PreparedSource
from embark.data.statistics import PRIOR_WEIGHT, auc
from embark.data.task_labels import main_label
from embark.spec import RunSpec

LEAK_AUC = 0.9
"""A column that alone reaches this is nearly the label: on real clicks no single one comes near, and no model."""
MAX_ROWS = 100_000
MAX_IDS = 20_000_000
NUM_PIECES = 8


def column_scores(source: SampleSource, spec: RunSpec) -> dict[str, float]:
    """Return the AUC of each column alone on a sample of the held-out rows; ids are scored by the label rates of
    training rows."""
    tables = spec.model.table_list()
    num_rows = min(MAX_ROWS, MAX_IDS // max(1, sum(table.multi_hot for table in tables)))
    trained, held = [source.train_rows(0, *ends) for ends in _pieces(source.num_train_samples, num_rows)], \
        [source.eval_rows(*ends) for ends in _pieces(source.num_eval_samples, num_rows)]
    if not trained or not held:
        return {}
    seen, asked = Batch.join(trained), Batch.join(held)
    label, held_label = (main_label(batch.label, spec.model.tasks) for batch in (seen, asked))
    dense = asked.dense.astype(np.float64)
    names = source.layout.dense if isinstance(source, PreparedSource) else spec.data.dense_columns
    if spec.data.is_custom:
        names = tuple(f"dense {column}" for column in range(spec.model.num_dense))
    found = {name: auc(values, held_label) for name, values in zip(names, dense.T, strict=True)}
    prior, weight = float(label.mean()), PRIOR_WEIGHT
    features = zip(tables, seen.by_feature(seen.ids), seen.lengths, asked.by_feature(asked.ids), asked.lengths,
                   strict=True)
    for table, ids, lengths, held_ids, held_lengths in features:
        values, numbers = np.unique(np.concatenate([ids, held_ids]), return_inverse=True)
        trained_numbers, held_numbers = numbers[: len(ids)], numbers[len(ids) :]
        counts = np.bincount(trained_numbers, minlength=len(values))
        clicks = np.bincount(trained_numbers, np.repeat(label, lengths), minlength=len(values))
        rates = (clicks + prior * weight) / (counts + weight)
        row = np.repeat(np.arange(len(held_label)), held_lengths)
        sums = np.bincount(row, rates[held_numbers], minlength=len(held_label))
        found[table.name] = auc(np.where(held_lengths > 0, sums / np.maximum(held_lengths, 1), prior), held_label)
    return {name: score for name, score in found.items() if score is not None}


@dataclass(frozen=True, slots=True)
class ColumnsReport:
    """The result of `embark data check` for files that are read without preparation."""

    path: str
    num_train_samples: int
    num_eval_samples: int
    auc_alone: dict[str, float]
    hints: tuple[str, ...]


def check_columns(spec: RunSpec) -> ColumnsReport:
    """Read every row, as training does, which refuses bad ones, and score the columns."""
    source = open_source(spec)
    scores = column_scores(source, spec)
    name = spec.data.kind if spec.data.is_custom else spec.data.path
    return ColumnsReport(name, source.num_train_samples, source.num_eval_samples, scores,
                         tuple(filter(None, (*source.notes, leak_note(scores)))))


def leak_note(scores: dict[str, float]) -> str:
    """Name the columns that give the label away; empty if there is none."""
    leaking = [f"{name} (AUC {score:.4f})" for name, score in scores.items() if score >= LEAK_AUC]
    alone = "each alone predict" if len(leaking) > 1 else "alone predicts"
    return f"{', '.join(leaking)} {alone} the label of held-out rows" if leaking else ""


def _pieces(num_rows: int, at_most: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of up to `at_most` rows, spread over all."""
    size = min(num_rows, at_most) // NUM_PIECES
    if num_rows <= at_most or not size:
        yield from ([(0, num_rows)] if num_rows else [])
        return
    yield from ((start, start + size) for start in range(0, num_rows - size + 1, num_rows // NUM_PIECES))

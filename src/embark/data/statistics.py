"""What prepared data holds, counted exactly: `statistics.json`, which `embark data check` and `embark plan` read."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embark.data.counts import Counts, DenseIdCounts, DenseSummary, Frequencies, LengthSummary, SparseIdCounts
from embark.data.prepared import MANIFEST, SPLITS, STATISTICS, Feature, Manifest, Split
from embark.data.prepared.parts import iter_blocks
from embark.data.progress import ProgressReporter
from embark.data.workers import each_result, num_cores
from embark.features.arrays import Array, Doubles, Floats
from embark.store import write_atomic

VERSION = 1
WORKER_BYTES = 128 << 20  # A process without its counts: the interpreter, numpy, a mapped part, a block at work.
MIN_VALUES_TO_SHARE = 30_000_000  # Below this, one process is done before another has started.
TASKS_PER_WORKER = 4
MAX_IDS = 2_000_000  # Held-out ids of a column that are scored; more would give the same.
MAX_ROWS = 1_000_000
MIN_OF_EACH = 10  # Rows of each label, below which an AUC says nothing.
PRIOR_WEIGHT = 10.0
"""An id seen once or twice says little: its label rate is drawn to that of all rows as by so many rows more."""


@dataclass(frozen=True, slots=True)
class ColumnScore:
    """A measure of how well a column predicts the label of held-out rows."""

    auc: float | None  # The AUC of the column as the only feature, never below 0.5; None if there are too few rows.
    new_share: float | None = None  # The share of held-out ids that no training row has.


@dataclass(frozen=True, slots=True)
class _Task:
    """Columns that one pass over the training rows counts together; without a feature the dense columns and the
    labels."""

    directory: Path
    manifest: Manifest
    features: tuple[int, ...]
    ids_at_a_time: int  # Ids that are counted at once if the table is too large.
    cost: int
    with_scores: bool = False


def compute_statistics(
    directory: Path, manifest: Manifest, *, memory_bytes: int, num_workers: int = 0,
    progress: ProgressReporter | None = None, with_scores: bool = False,
) -> tuple[dict[str, Any], dict[str, ColumnScore]]:
    """Count cardinalities, top ids and label rates of the training rows, and label rates of every split.
    `with_scores`: how well each column predicts the label of held-out rows.

    `memory_bytes` is for all processes together, this one included; 0 workers: one for each core.
    """
    num_values = _cost(manifest, manifest.layout.id_features) + manifest.num_rows("train") * len(manifest.layout.dense)
    workers = (num_workers or num_cores()) if num_values >= MIN_VALUES_TO_SHARE else 1
    workers = max(1, min(workers, memory_bytes // (2 * WORKER_BYTES)))
    tasks = _tasks(directory, manifest, workers, memory_bytes - (WORKER_BYTES if workers > 1 else 0))
    if with_scores and held_out(manifest):
        tasks = [replace(task, with_scores=True) for task in tasks]
    found: dict[int, dict[str, Any]] = {}
    scores: dict[str, ColumnScore] = {}
    progress = progress or ProgressReporter()
    progress.begin("counting", sum(task.cost for task in tasks))
    for position, (task_found, task_scores) in each_result(_count, tasks, workers):
        found |= task_found
        scores |= task_scores
        progress.advance(tasks[position].cost)
    counted = {
        "version": VERSION,
        "rows": manifest.rows_by_split,
        **found[-1],
        "sparse": {feature.name: found[i] for i, feature in enumerate(manifest.layout.id_features)},
    }
    return counted, scores


def write_manifest(
    out: Path, manifest: Manifest, *, memory_bytes: int, num_workers: int, progress: ProgressReporter
) -> Manifest:
    """Count, write the statistics, and then the manifest: from here on it is prepared data."""
    statistics, _ = compute_statistics(out, manifest, memory_bytes=memory_bytes, num_workers=num_workers,
                                       progress=progress)
    text = json.dumps(statistics, indent=1) + "\n"
    write_atomic(out / STATISTICS, text)
    manifest = replace(manifest, statistics_sha256=hashlib.sha256(text.encode()).hexdigest())
    write_atomic(out / MANIFEST, manifest.to_text())
    return manifest


def _tasks(directory: Path, manifest: Manifest, num_workers: int, memory_bytes: int) -> list[_Task]:
    """Put the largest tables first, so that no worker begins a long one when the others are done."""
    features = manifest.layout.id_features
    worker_bytes = max(memory_bytes // num_workers - WORKER_BYTES, 1 << 20)
    fair = _cost(manifest, features) // (num_workers * TASKS_PER_WORKER) + 1
    dense_cost = manifest.num_rows("train") * len(manifest.layout.dense)
    at_a_time = max(1, worker_bytes // DenseIdCounts.size_bytes(1, is_wide=is_wide(manifest)))
    groups: list[list[int]] = []
    for i in sorted(range(len(features)), key=lambda i: -features[i].rows):
        together = [*(groups[-1] if groups else ()), i]
        is_too_large = sum(_bytes(manifest, features[j]) for j in together) > worker_bytes
        if not groups or is_too_large or _cost(manifest, [features[j] for j in together]) > fair:
            groups.append([i])
        else:
            groups[-1].append(i)
    return [_Task(directory, manifest, (), 0, dense_cost + 1),
            *(_Task(directory, manifest, tuple(group), at_a_time, _cost(manifest, [features[i] for i in group]))
              for group in groups)]


def is_wide(manifest: Manifest) -> bool:
    """Return whether a count may not fit in 32 bits."""
    most = max((f.multi_hot for f in manifest.layout.id_features), default=1)
    return manifest.num_rows("train") * most >= 1 << 32


def is_sparse(manifest: Manifest, feature: Feature) -> bool:
    """Return whether the table has so many more rows than there are lookups that most would be counted as 0."""
    num_ids = manifest.num_rows("train") * feature.multi_hot
    return SparseIdCounts.size_bytes(num_ids) < DenseIdCounts.size_bytes(feature.rows, is_wide=False)


def _cost(manifest: Manifest, features: Sequence[Feature]) -> int:
    return manifest.num_rows("train") * sum(f.multi_hot for f in features)


def _bytes(manifest: Manifest, feature: Feature) -> int:
    if is_sparse(manifest, feature):
        return SparseIdCounts.size_bytes(manifest.num_rows("train") * feature.multi_hot)
    return DenseIdCounts.size_bytes(feature.rows, is_wide=is_wide(manifest))


def _count(task: _Task) -> tuple[dict[int, dict[str, Any]], dict[str, ColumnScore]]:
    """Return what was counted by the feature's position, −1 for the labels and the dense columns, and scores by
    name."""
    if not task.features:
        return {-1: _general(task)}, score_dense_columns(task.directory, task.manifest) if task.with_scores else {}
    features = task.manifest.layout.id_features
    frequencies = {i: Frequencies() for i in task.features}
    lengths = {i: LengthSummary() for i in task.features}
    scorers = _scorers(task)
    # A task has one table that is too large for the memory, or several that are not.
    most = max(1 if is_sparse(task.manifest, features[i]) else features[i].rows for i in task.features)
    for first in range(0, most, task.ids_at_a_time):
        counts: dict[int, Counts] = {
            i: SparseIdCounts(features[i].rows) if is_sparse(task.manifest, features[i]) else
            DenseIdCounts(first, min(features[i].rows, first + task.ids_at_a_time), is_wide=is_wide(task.manifest))
            for i in task.features
        }
        for block in iter_blocks(task.directory, task.manifest, "train"):
            for i, one in counts.items():
                one.add(block, i, is_complete=len(one) == features[i].rows)
                if first == 0:
                    lengths[i].add(block.lengths(i))
        for i, one in counts.items():
            frequencies[i].add(one)
            if i in scorers:
                scorers[i].add(one)
    found = {i: frequencies[i].summary(features[i].rows) | lengths[i].summary() for i in task.features}
    return found, {features[i].name: scorer.result() for i, scorer in scorers.items()}


def _scorers(task: _Task) -> dict[int, SparseScorer]:
    if not task.with_scores:
        return {}
    num_rows, blocks = task.manifest.num_rows("train"), iter_blocks(task.directory, task.manifest, "train")
    num_positive = sum(int(block.label.sum(dtype="i8")) for block in blocks)
    prior = num_positive / num_rows if num_rows else 0.0
    return {i: SparseScorer(task.directory, task.manifest, i, prior) for i in task.features}


def _general(task: _Task) -> dict[str, Any]:
    names, labels = task.manifest.layout.dense, task.manifest.layout.labels
    dense, of_tasks = DenseSummary(len(names)), LabelSummary(len(labels))
    rates: dict[str, float | None] = {}
    for split in SPLITS:
        num_positive = 0
        for block in iter_blocks(task.directory, task.manifest, split):
            num_positive += int(block.label.sum(dtype="i8"))
            if split == "train" and names:
                dense.add(block.dense)
            if split == "train":
                of_tasks.add(block.labels)
        num_rows = task.manifest.num_rows(split)
        rates[split] = num_positive / num_rows if num_rows else None
    return {"label_rate": rates, "dense": {name: dense.summary(i) for i, name in enumerate(names)},
            **({"labels": {name: of_tasks.summary(i) for i, name in enumerate(labels)}} if labels else {})}


class LabelSummary:
    """Counts how many rows have a label of each task, and their mean."""

    def __init__(self, num_labels: int) -> None:
        self._num_rows = 0
        self._num, self._sum = np.zeros(num_labels, np.int64), np.zeros(num_labels)

    def add(self, labels: Floats) -> None:
        self._num_rows += len(labels)
        self._num += (~np.isnan(labels)).sum(axis=0)
        self._sum += np.nansum(labels, axis=0, dtype=np.float64)

    def summary(self, label: int) -> dict[str, float | None]:
        num = int(self._num[label])
        return {"missing_share": 1 - num / self._num_rows if self._num_rows else None,
                "mean": float(self._sum[label]) / num if num else None}


def held_out(manifest: Manifest) -> Split | None:
    """Return the split to look at: validation, else test."""
    return next((split for split in ("validation", "test") if manifest.num_rows(split)), None)


class SparseScorer:
    """Scores the ids of held-out rows by the label rate that each has among the training rows."""

    def __init__(self, directory: Path, manifest: Manifest, feature: int, prior: float) -> None:
        split, multi_hot = held_out(manifest), manifest.layout.id_features[feature].multi_hot
        assert split is not None
        at_most = max(1, MAX_IDS // (manifest.block_rows * multi_hot))
        some = list(iter_blocks(directory, manifest, split, at_most))
        lengths = [block.lengths(feature) for block in some]
        self._ids = np.concatenate([block.ids(feature).reshape(-1) for block in some])
        self._label = np.concatenate([block.label for block in some])
        self._lengths = np.concatenate(
            [np.full(len(b.label), multi_hot) if n is None else n.astype(np.intp)
             for b, n in zip(some, lengths, strict=True)]
        )
        self._prior = prior
        self._rates = np.full(len(self._ids), prior)
        self._is_new = np.ones(len(self._ids), bool)

    def add(self, counts: Counts) -> None:
        """Score the ids of a range."""
        at = np.flatnonzero((self._ids >= counts.first) & (self._ids < counts.stop))
        self._rates[at] = counts.rates(self._ids[at], self._prior, PRIOR_WEIGHT)
        self._is_new[at] = ~counts.is_used(self._ids[at])

    def result(self) -> ColumnScore:
        """Return the score of the column; a row's score is the mean of its ids'."""
        row = np.repeat(np.arange(len(self._label)), self._lengths)
        sums = np.bincount(row, weights=self._rates, minlength=len(self._label))
        scores = np.where(self._lengths > 0, sums / np.maximum(self._lengths, 1), self._prior)
        return ColumnScore(auc(scores, self._label), float(self._is_new.mean()) if len(self._ids) else None)


def score_dense_columns(directory: Path, manifest: Manifest) -> dict[str, ColumnScore]:
    """Score each dense column by its own values."""
    split = held_out(manifest)
    assert split is not None
    some = list(iter_blocks(directory, manifest, split, max(1, MAX_ROWS // manifest.block_rows)))
    label = np.concatenate([block.label for block in some])
    found = {}
    for i, name in enumerate(manifest.layout.dense):
        found[name] = ColumnScore(auc(np.concatenate([block.dense[:, i] for block in some]).astype(np.float64), label))
    return found


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


def equal_columns(directory: Path, manifest: Manifest) -> list[tuple[str, ...]]:
    """Find columns that hold the same in every training row that was looked at."""
    layout = manifest.layout
    marks: dict[str, tuple[str, int]] = {}

    def mark(name: str, kind: str, values: Array) -> None:
        before = marks.get(name, ("", 0))[1]
        marks[name] = kind, zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data, before)

    for block in iter_blocks(directory, manifest, "train", max(1, MAX_ROWS // manifest.block_rows)):
        for i, name in enumerate(layout.dense):
            mark(name, "dense", block.dense[:, i])
        for i, feature in enumerate(layout.id_features):
            mark(feature.name, f"{feature.id_dtype} {feature.multi_hot} {feature.is_ragged}", block.ids(i).reshape(-1))
            lengths = block.lengths(i)
            if lengths is not None:
                mark(feature.name, f"{feature.id_dtype} ragged", lengths)
    groups: dict[tuple[str, int], list[str]] = {}
    for name, seen in marks.items():
        groups.setdefault(seen, []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]

"""What prepared data holds, counted exactly: `statistics.json`, which `embark data check` and `embark plan` read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embark.data.blocks import blocks
from embark.data.counts import Counts, FewIdCounts, Frequencies, IdCounts
from embark.data.dense_summary import DenseSummary
from embark.data.leaks import Alone, SparseAlone, dense_alone, held_out
from embark.data.prepare.pieces import Progress
from embark.data.prepared import SPLITS, Feature, Manifest
from embark.data.processes import each_result, num_cores

VERSION = 1
WORKER_BYTES = 128 << 20
"""Of a process besides its counts: the interpreter, numpy, a part that is mapped and a block at work."""
MIN_VALUES_TO_SHARE = 30_000_000
"""Below this, one process is done before another has started."""
TASKS_PER_WORKER = 4

Tell = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Task:
    """Columns that one pass over the training rows counts together; no feature: the dense columns and the labels."""

    directory: Path
    manifest: Manifest
    features: tuple[int, ...]
    ids_at_a_time: int
    """Of a table, where it is too large to be counted at once."""
    cost: int
    has_alone: bool = False


@dataclass(frozen=True, slots=True)
class _Result:
    found: dict[int, dict[str, Any]]
    """By position of the feature; −1 holds what is not of one."""
    alone: dict[str, Alone]


def compute_statistics(
    directory: Path,
    manifest: Manifest,
    *,
    memory_bytes: int,
    num_workers: int = 0,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Counts, cardinalities, top ids and label rates of the training rows; label rates of every split.

    `memory_bytes` is for all processes together, this one too; 0 workers: one for each core.
    """
    return survey(directory, manifest, memory_bytes=memory_bytes, num_workers=num_workers, tell=tell)[0]


def survey(
    directory: Path,
    manifest: Manifest,
    *,
    memory_bytes: int,
    num_workers: int = 0,
    tell: Tell | None = None,
    has_alone: bool = False,
) -> tuple[dict[str, Any], dict[str, Alone]]:
    """The statistics, and with `has_alone` what each column alone tells of the label of held-out rows."""
    num_values = _cost(manifest, manifest.layout.features) + manifest.num_rows("train") * len(manifest.layout.dense)
    workers = (num_workers or num_cores()) if num_values >= MIN_VALUES_TO_SHARE else 1
    workers = max(1, min(workers, memory_bytes // (2 * WORKER_BYTES)))
    tasks = _tasks(directory, manifest, workers, memory_bytes - (WORKER_BYTES if workers > 1 else 0))
    if has_alone and held_out(manifest):
        tasks = [replace(task, has_alone=True) for task in tasks]
    found: dict[int, dict[str, Any]] = {}
    alone: dict[str, Alone] = {}
    began_s, done, total = time.monotonic(), 0, sum(task.cost for task in tasks)
    for position, result in each_result(_count, tasks, workers):
        found |= result.found
        alone |= result.alone
        done += tasks[position].cost
        if tell:
            elapsed_s = time.monotonic() - began_s
            tell(Progress("counting", done, total, manifest.num_rows("train"), elapsed_s,
                          elapsed_s * (total - done) / done if done else None))
    general = found[-1]
    features = manifest.layout.features
    counted = {
        "version": VERSION,
        "rows": {split: manifest.num_rows(split) for split in SPLITS},
        "label_rate": general["label_rate"],
        "dense": general["dense"],
        "sparse": {feature.name: found[i] for i, feature in enumerate(features)},
    }
    return counted, alone


def _tasks(directory: Path, manifest: Manifest, num_workers: int, memory_bytes: int) -> list[_Task]:
    """Largest tables first, so that no worker begins a long one when the others are done."""
    features = manifest.layout.features
    worker_bytes = max(memory_bytes // num_workers - WORKER_BYTES, 1 << 20)
    fair = _cost(manifest, features) // (num_workers * TASKS_PER_WORKER) + 1
    dense_cost = manifest.num_rows("train") * len(manifest.layout.dense)
    tasks = [_Task(directory, manifest, (), 0, dense_cost + 1)]
    waiting: list[int] = []
    for i in sorted(range(len(features)), key=lambda i: -features[i].rows):
        together = [*waiting, i]
        is_too_large = sum(_bytes(manifest, features[j]) for j in together) > worker_bytes
        is_too_long = _cost(manifest, [features[j] for j in together]) > fair
        if waiting and (is_too_large or is_too_long):
            tasks.append(_task(directory, manifest, waiting, worker_bytes))
            waiting = []
        waiting.append(i)
    if waiting:
        tasks.append(_task(directory, manifest, waiting, worker_bytes))
    return tasks


def _task(directory: Path, manifest: Manifest, features: Sequence[int], worker_bytes: int) -> _Task:
    at_a_time = max(1, worker_bytes // IdCounts.size_bytes(1, has_many=has_many(manifest)))
    cost = _cost(manifest, [manifest.layout.features[i] for i in features])
    return _Task(directory, manifest, tuple(features), at_a_time, cost)


def has_many(manifest: Manifest) -> bool:
    """A count may not fit in 32 bits."""
    most = max((f.multi_hot for f in manifest.layout.features), default=1)
    return manifest.num_rows("train") * most >= 1 << 32


def is_few(manifest: Manifest, feature: Feature) -> bool:
    """The table has so many more rows than there are lookups that most would be counted as 0."""
    num_ids = manifest.num_rows("train") * feature.multi_hot
    return FewIdCounts.size_bytes(num_ids) < IdCounts.size_bytes(feature.rows, has_many=False)


def _cost(manifest: Manifest, features: Sequence[Feature]) -> int:
    return manifest.num_rows("train") * sum(f.multi_hot for f in features)


def _bytes(manifest: Manifest, feature: Feature) -> int:
    if is_few(manifest, feature):
        return FewIdCounts.size_bytes(manifest.num_rows("train") * feature.multi_hot)
    return IdCounts.size_bytes(feature.rows, has_many=has_many(manifest))


def _count(task: _Task) -> _Result:
    if not task.features:
        return _Result({-1: _general(task)}, dense_alone(task.directory, task.manifest) if task.has_alone else {})
    found: dict[int, dict[str, Any]] = {}
    alone: dict[str, Alone] = {}
    features = task.manifest.layout.features
    frequencies = {i: Frequencies() for i in task.features}
    lengths = {i: _Lengths() for i in task.features}
    scored = _scored(task)
    # A task has one table that is too large for the memory, or several that are not.
    most = max(1 if is_few(task.manifest, features[i]) else features[i].rows for i in task.features)
    for first in range(0, most, task.ids_at_a_time):
        counts: dict[int, Counts] = {
            i: FewIdCounts(features[i].rows) if is_few(task.manifest, features[i]) else
            IdCounts(first, min(features[i].rows, first + task.ids_at_a_time), has_many=has_many(task.manifest))
            for i in task.features
        }
        for block in blocks(task.directory, task.manifest, "train"):
            for i, one in counts.items():
                one.add(block, i, is_whole=len(one) == features[i].rows)
                if first == 0:
                    lengths[i].add(block.lengths(i))
        for i, one in counts.items():
            frequencies[i].add(one)
            if i in scored:
                scored[i].add(one)
    for i in task.features:
        found[i] = frequencies[i].summary(features[i].rows) | lengths[i].summary()
        if i in scored:
            alone[features[i].name] = scored[i].result()
    return _Result(found, alone)


def _scored(task: _Task) -> dict[int, SparseAlone]:
    if not task.has_alone:
        return {}
    num_rows = task.manifest.num_rows("train")
    num_positive = sum(int(block.label.sum(dtype="i8")) for block in blocks(task.directory, task.manifest, "train"))
    prior = num_positive / num_rows if num_rows else 0.0
    return {i: SparseAlone(task.directory, task.manifest, i, prior) for i in task.features}


class _Lengths:
    """Of a ragged feature."""

    def __init__(self) -> None:
        self._num = self._sum = self._num_empty = self._max = 0
        self._min: int | None = None

    def add(self, lengths: Any) -> None:
        if lengths is None or not len(lengths):
            return
        self._num += len(lengths)
        self._sum += int(lengths.sum(dtype="i8"))
        self._num_empty += int((lengths == 0).sum())
        self._max = max(self._max, int(lengths.max()))
        least = int(lengths.min())
        self._min = least if self._min is None else min(self._min, least)

    def summary(self) -> dict[str, Any]:
        if not self._num:
            return {}
        return {"lengths": {"min": self._min, "mean": self._sum / self._num, "max": self._max,
                            "empty_share": self._num_empty / self._num}}


def _general(task: _Task) -> dict[str, Any]:
    names = task.manifest.layout.dense
    dense = DenseSummary(len(names))
    rates: dict[str, float | None] = {}
    for split in SPLITS:
        num_positive = 0
        for block in blocks(task.directory, task.manifest, split):
            num_positive += int(block.label.sum(dtype="i8"))
            if split == "train" and names:
                dense.add(block.dense)
        num_rows = task.manifest.num_rows(split)
        rates[split] = num_positive / num_rows if num_rows else None
    return {"label_rate": rates, "dense": {name: dense.summary(i) for i, name in enumerate(names)}}

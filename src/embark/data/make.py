"""The synthetic source, written out as prepared data: the same samples, in the same order."""

import shutil
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from embark.errors import UserError
from embark.features.encoding import weights_features
from embark.formatting import format_bytes
from embark.spec import RunSpec, Task, label_columns
from embark.store import write_atomic, writing
from embark.values import JsonDict, frozen
from .loader import Batch
from .prepare.journal import PREPARING
from .prepared import BLOCK_ROWS, MANIFEST, SPLITS, Feature, Layout, Manifest, Part, PartWriter, Rows, Split
from .prepared.parts import PART_BYTES
from .progress import OnProgress, ProgressReporter
from .synthetic import SyntheticSource
from .task_labels import main_label
from .workers import Report, WorkerPool, num_cores

MIN_ROWS_TO_SHARE = 1_000_000  # Below this, one process is done before another has started.


@frozen
class _Task:
    """One part file to write."""

    spec: RunSpec
    out: Path
    split: Split
    index: int
    start: int
    stop: int


@frozen
class MakeResult:
    """The data that was made."""

    path: Path
    manifest: Manifest
    elapsed_s: float

    def to_dict(self) -> JsonDict:
        return {"path": str(self.path), "rows": self.manifest.rows_by_split, "size_bytes": self.manifest.size_bytes,
                "elapsed_s": self.elapsed_s}


def make(spec: RunSpec, out: Path, *, on_progress: OnProgress | None = None, force: bool = False) -> MakeResult:
    """Write `data.num_train_samples` and `data.num_eval_samples` samples below `out`; the manifest comes last."""
    began_s = time.monotonic()
    _check_disk(spec, out)
    _clear(out, force=force)
    data, layout = spec.data, _layout(spec)
    rows_per_part = max(1, PART_BYTES // layout.map(BLOCK_ROWS, _most_ids(layout)).size_bytes) * BLOCK_ROWS
    sizes: tuple[tuple[Split, int], ...] = (("train", data.num_train_samples), ("validation", data.num_eval_samples))
    tasks = [
        _Task(spec, out, split, index, start, min(start + rows_per_part, num_rows))
        for split, num_rows in sizes
        for index, start in enumerate(range(0, num_rows, rows_per_part))
    ]
    total = sum(num_rows for _, num_rows in sizes)
    num_workers = (data.prepare.num_workers or num_cores()) if total >= MIN_ROWS_TO_SHARE else 1
    progress = ProgressReporter(on_progress)
    progress.begin("making", total)
    parts: dict[_Task, Part] = {}
    num_workers = num_workers if min(num_workers, len(tasks)) > 1 else 0
    with writing(out, "data.path"), WorkerPool(_Writing(), num_workers) as pool:
        for task, part in pool.run(tasks, lambda *_: None):
            parts[task] = part
            progress.advance(part.rows, part.rows)
    by_split = {split: tuple(parts[task] for task in tasks if task.split == split) for split, _ in sizes}
    manifest = Manifest(layout, by_split, label=data.label, settings=_settings(spec))
    with writing(out, "data.path"):
        write_atomic(out / MANIFEST, manifest.to_text())
    return MakeResult(out, manifest, time.monotonic() - began_s)


def estimate_bytes(spec: RunSpec) -> int:
    """Estimate the size of a spec's data on disk; for ragged data the most it can be."""
    layout, num_rows = _layout(spec), spec.data.num_train_samples + spec.data.num_eval_samples
    return layout.map(BLOCK_ROWS, _most_ids(layout)).size_bytes * num_rows // BLOCK_ROWS


def _check_disk(spec: RunSpec, out: Path) -> None:
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    needed, free = estimate_bytes(spec), shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(f"{out}: the data takes {format_bytes(needed)}, and the disk has {format_bytes(free)} left",
                        "lower data.num_train_samples, or name a larger disk")


def _clear(out: Path, *, force: bool) -> None:
    """Refuse to overwrite other data; with `force`, remove it."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, and prepared data is a folder", "name another folder")
    if (out / PREPARING).exists() and not force:
        raise UserError(f"{out}: holds an unfinished preparation",
                        "resume it: embark data prepare; name another folder; or --force to replace it")
    if (out / MANIFEST).exists() and not force:
        raise UserError(f"{out}: holds prepared data already", "name another folder, or --force to replace it")
    # The manifest first: without it, what is half removed or half written is not data.
    (out / MANIFEST).unlink(missing_ok=True)
    for split in SPLITS:
        for old in (*(out / split).glob("*.bin"), *(out / split).glob("*.bin.part")):
            old.unlink()


def _layout(spec: RunSpec) -> Layout:
    return layout_of(spec, is_ragged=spec.data.ragged)


def layout_of(spec: RunSpec, *, is_ragged: bool, max_rows: int = 1 << 62) -> Layout:
    """Return the layout of the model's samples; a table has at most `max_rows` rows."""
    tables = spec.model.table_list()
    features = tuple(Feature(table.name, min(table.rows, max_rows), table.multi_hot,
                             is_ragged=is_ragged or bool(table.weights_column)) for table in tables)
    return Layout(tuple(f"dense_{i}" for i in range(spec.model.num_dense)), features + weights_features(tables),
                  spec.data.prepare.dense_bits, label_columns(spec.model.tasks))


def _most_ids(layout: Layout) -> list[int]:
    return [BLOCK_ROWS * layout.features[i].multi_hot for i in layout.ragged]


def _settings(spec: RunSpec) -> JsonDict:
    data = spec.data
    return {
        "made": "synthetic", "seed": data.seed, "zipf_exponent": data.zipf_exponent, "signal": data.signal,
        "ragged": data.ragged, "dense_bits": data.prepare.dense_bits,
        **({"task_conflict": data.task_conflict} if spec.model.tasks else {})
    }


class _Writing:
    def do(self, task: _Task, report: Report) -> Callable[[], Part]:
        part = _write(task)
        return lambda: part


def _write(task: _Task) -> Part:
    source, layout = _source(task.spec), _layout(task.spec)
    writer = PartWriter(task.out, f"{task.split}/{task.index:06d}", layout, part_bytes=1 << 62)
    for start in range(task.start, task.stop, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, task.stop)
        batch = source.train_rows(0, start, stop) if task.split == "train" else source.eval_rows(start, stop)
        writer.add(rows_of(layout, batch, task.spec.model.tasks))
    (part,) = writer.close()
    return part


@lru_cache(maxsize=1)
def _source(spec: RunSpec) -> SyntheticSource:
    return SyntheticSource(spec.model, spec.data)


def rows_of(layout: Layout, batch: Batch, tasks: tuple[Task, ...] = ()) -> Rows:
    """Convert a batch to rows of prepared data. Each task has a column of its own."""
    label = np.column_stack([main_label(batch.label, tasks), batch.label]) if tasks else batch.label
    ids, weights = batch.by_feature(batch.ids), [] if batch.weights is None else batch.by_feature(batch.weights)
    indexes = {feature.name: index for index, feature in enumerate(layout.id_features)}
    values, lengths = [], []
    for feature in layout.features:
        index = indexes[feature.weights_of or feature.name]
        some = weights[index] if feature.weights_of else ids[index]
        values.append(some if feature.is_ragged else some.reshape(-1, feature.multi_hot))
        lengths.append(batch.lengths[index] if feature.is_ragged else None)
    return Rows(label, batch.dense, tuple(values), tuple(lengths))

"""The synthetic source, written out as prepared data: the same samples, in the same order."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from embark.data.batch import Batch
from embark.data.prepare.pieces import Progress
from embark.data.prepared import (
    BLOCK_ROWS,
    MANIFEST,
    STATISTICS,
    Feature,
    Layout,
    Manifest,
    Part,
    PartWriter,
    Rows,
    Split,
)
from embark.data.prepared.part_writer import PART_BYTES
from embark.data.processes import each_result, num_cores
from embark.data.statistics import compute_statistics
from embark.data.synthetic import SyntheticSource
from embark.errors import UserError
from embark.spec.run import RunSpec
from embark.store.atomic_file import write_atomic

MIN_ROWS_TO_SHARE = 1_000_000
"""Below this, one process is done before another has started."""
PREPARING = ".preparing"

Tell = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Task:
    """One part file."""

    spec: RunSpec
    out: Path
    split: Split
    index: int
    start: int
    stop: int


def make(spec: RunSpec, out: Path, *, tell: Tell | None = None, force: bool = False) -> Manifest:
    """Write `data.num_train_samples` and `data.num_eval_samples` samples below `out`; the manifest comes last."""
    _refuse_what_is_there(out, force=force)
    data, layout = spec.data, _layout(spec)
    rows_per_part = max(1, PART_BYTES // layout.map(BLOCK_ROWS, _most_ids(layout)).size_bytes) * BLOCK_ROWS
    sizes: tuple[tuple[Split, int], ...] = (("train", data.num_train_samples), ("validation", data.num_eval_samples))
    tasks = [
        _Task(spec, out, split, index, start, min(start + rows_per_part, num_rows))
        for split, num_rows in sizes
        for index, start in enumerate(range(0, num_rows, rows_per_part))
    ]
    parts: dict[int, Part] = {}
    total, done, began_s = sum(num_rows for _, num_rows in sizes), 0, time.monotonic()
    num_workers = (data.prepare.num_workers or num_cores()) if total >= MIN_ROWS_TO_SHARE else 1
    for position, part in each_result(_write, tasks, num_workers):
        parts[position] = part
        done += part.rows
        if tell:
            elapsed_s = time.monotonic() - began_s
            tell(Progress("making", done, total, done, elapsed_s, elapsed_s * (total - done) / done))
    by_split: dict[Split, tuple[Part, ...]] = {
        split: tuple(parts[i] for i, task in enumerate(tasks) if task.split == split) for split, _ in sizes
    }
    manifest = Manifest(layout, by_split, label=data.label, settings=_settings(spec))
    return _finish(out, manifest, memory_bytes=int(data.prepare.memory_gb * 1e9), num_workers=num_workers, tell=tell)


def estimate_bytes(spec: RunSpec) -> int:
    """What the data of a spec takes on disk; of ragged data, the most it can."""
    layout, num_rows = _layout(spec), spec.data.num_train_samples + spec.data.num_eval_samples
    return layout.map(BLOCK_ROWS, _most_ids(layout)).size_bytes * num_rows // BLOCK_ROWS


def _finish(
    out: Path, manifest: Manifest, *, memory_bytes: int, num_workers: int, tell: Tell | None = None
) -> Manifest:
    """Count, write the statistics, and then the manifest: from here on it is prepared data."""
    statistics = compute_statistics(out, manifest, memory_bytes=memory_bytes, num_workers=num_workers, tell=tell)
    text = json.dumps(statistics, indent=1) + "\n"
    whole = replace(manifest, statistics_sha256=hashlib.sha256(text.encode()).hexdigest())
    write_atomic(out / STATISTICS, text)
    write_atomic(out / MANIFEST, whole.to_text())
    return whole


def _refuse_what_is_there(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, and prepared data is a folder", fix="name another place")
    if (out / PREPARING).exists() and not force:
        raise UserError(f"{out}: `embark data prepare` was at work here and has not ended",
                        fix="run it again to go on, name another place, or --force to begin anew")
    if (out / MANIFEST).exists() and not force:
        raise UserError(f"{out}: holds prepared data already", fix="name another place, or --force to replace it")
    # The manifest first: what is half removed or half written has none.
    (out / MANIFEST).unlink(missing_ok=True)
    for split in ("train", "validation", "test"):
        for old in (*(out / split).glob("*.bin"), *(out / split).glob("*.bin.part")):
            old.unlink()


def _layout(spec: RunSpec) -> Layout:
    features = tuple(
        Feature(table.name, table.rows, table.multi_hot, is_ragged=spec.data.ragged)
        for table in spec.model.table_list()
    )
    dense = tuple(f"dense_{i}" for i in range(spec.model.num_dense))
    return Layout(dense, features, spec.data.prepare.dense_bits)


def _most_ids(layout: Layout) -> list[int]:
    return [BLOCK_ROWS * layout.features[i].multi_hot for i in layout.ragged]


def _settings(spec: RunSpec) -> dict[str, Any]:
    data = spec.data
    return {
        "made": "synthetic", "seed": data.seed, "zipf_exponent": data.zipf_exponent, "signal": data.signal,
        "ragged": data.ragged, "dense_bits": data.prepare.dense_bits,
    }


def _write(task: _Task) -> Part:
    source, layout = _source(task.spec), _layout(task.spec)
    writer = PartWriter(task.out, f"{task.split}/{task.index:06d}", layout, part_bytes=1 << 62)
    for start in range(task.start, task.stop, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, task.stop)
        batch = source.train_rows(0, start, stop) if task.split == "train" else source.eval_rows(start, stop)
        writer.add(_rows(layout, batch))
    (part,) = writer.close()
    return part


@lru_cache(maxsize=1)
def _source(spec: RunSpec) -> SyntheticSource:
    return SyntheticSource(spec.model, spec.data)


def _rows(layout: Layout, batch: Batch) -> Rows:
    ends = np.cumsum(batch.lengths.sum(axis=1, dtype=np.int64))
    ids = tuple(np.split(batch.ids, ends[:-1]))
    if not layout.is_fixed:
        return Rows(batch.label, batch.dense, ids, tuple(batch.lengths))
    shaped = tuple(values.reshape(-1, f.multi_hot) for values, f in zip(ids, layout.features, strict=True))
    return Rows(batch.label, batch.dense, shaped, (None,) * len(ids))

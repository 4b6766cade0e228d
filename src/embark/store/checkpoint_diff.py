"""What differs between two checkpoints of a run: spec, metrics and every tensor, a block at a time, no torch."""

import tomllib
from collections.abc import Iterator
from typing import Any

import numpy as np

from embark.spec import flatten
from embark.values import JsonDict, JsonMap, frozen
from .checkpoint_arrays import CheckpointArrays, TensorEntry
from .checkpoint_store import Checkpoint, CheckpointStore
from .errors import NotFound
from .object_store import Progress
from .run_dir import SPEC

BLOCK_BYTES = 8 << 20  # Compared at a time; that needs about ten times as much memory.


@frozen
class Change:
    """Something that has another value in each checkpoint."""

    what: str
    a: Any
    b: Any


@frozen
class TensorChange:
    """A tensor of the same shape in both, whose bytes differ."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_differing: int  # Elements whose bits differ.
    max_abs: float  # The largest difference of two finite elements.


@frozen
class CheckpointDiff:
    """The differences of two checkpoints, from `a` to `b`."""

    a: int
    b: int
    spec: tuple[Change, ...]
    values: tuple[Change, ...]  # Changes of recorded values such as ranks and metrics.
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shapes: tuple[Change, ...]  # Tensors of another shape or dtype.
    tensors: tuple[TensorChange, ...]
    num_same: int  # Tensors whose bytes are the same.


def diff_checkpoints(
    checkpoints: CheckpointStore, a: Checkpoint, b: Checkpoint, progress: Progress | None = None
) -> CheckpointDiff:
    """Compare two checkpoints, a block at a time."""
    arrays = [CheckpointArrays(checkpoints.store, one.name) for one in (a, b)]
    for of_one in arrays:
        of_one.refuse_beyond_files()
    in_a, in_b = (of_one.entries for of_one in arrays)
    shapes = _changes(*({name: f"{held[name].dtype} {list(held[name].size)}" for name in in_a if name in in_b}
                        for held in (in_a, in_b)))
    other = {change.what for change in shapes}
    alike = [name for name in in_a if name in in_b and name not in other]
    total, done, tensors = sum(in_a[name].num_bytes for name in alike), 0, list[TensorChange]()
    for name in alike:
        entry, num_differing, max_abs = in_a[name], 0, 0.0
        for first, stop in _row_ranges(entry):
            rows_a, rows_b = (of_one.rows(name, first, stop) for of_one in arrays)
            differing = rows_a.view(f"u{rows_a.itemsize}") != rows_b.view(f"u{rows_b.itemsize}")
            num_differing += int(differing.sum())
            gap = np.abs(rows_a[differing].astype(np.float64) - rows_b[differing].astype(np.float64))
            max_abs = max(max_abs, float(gap.max(initial=0.0, where=np.isfinite(gap))))
            done += rows_a.size * entry.stored.itemsize
            if progress:
                progress(done, total)
        if num_differing:
            tensors.append(TensorChange(name, entry.dtype, entry.size, num_differing, max_abs))
    return CheckpointDiff(
        a.step, b.step, _changes(_spec(checkpoints, a), _spec(checkpoints, b)), _changes(_known(a), _known(b)),
        tuple(sorted(in_a.keys() - in_b.keys())), tuple(sorted(in_b.keys() - in_a.keys())), shapes, tuple(tensors),
        len(alike) - len(tensors))


def _row_ranges(tensor: TensorEntry) -> Iterator[tuple[int, int]]:
    num_rows = tensor.size[0] if tensor.size else 1
    row_bytes = tensor.num_bytes // max(num_rows, 1)
    at_once = max(1, BLOCK_BYTES // max(row_bytes, 1))
    return ((first, min(first + at_once, num_rows)) for first in range(0, num_rows if row_bytes else 0, at_once))


def _spec(checkpoints: CheckpointStore, checkpoint: Checkpoint) -> JsonDict:
    try:
        return flatten(tomllib.loads(checkpoints.store.read(f"{checkpoint.name}/{SPEC}").decode()))
    except (NotFound, ValueError, RecursionError):  # damaged: `--verify` says so
        return {SPEC: "cannot be read"}


def _known(checkpoint: Checkpoint) -> JsonDict:
    return flatten({name: held for name, held in checkpoint.values.items() if name not in ("step", "time_s", "files")})


def _changes(a: JsonMap, b: JsonMap) -> tuple[Change, ...]:
    names = dict.fromkeys([*a, *b])
    return tuple(Change(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))

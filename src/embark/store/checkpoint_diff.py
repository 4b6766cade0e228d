"""What differs between two checkpoints of a run: spec, plan, metrics and every tensor, a block at a time, no torch."""

import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from embark.spec.toml import flatten
from embark.store.checkpoint_arrays import Array, CheckpointArrays, TensorEntry
from embark.store.checkpoint_store import Checkpoint, CheckpointStore
from embark.store.object_store import Progress
from embark.store.run_dir import SPEC

BLOCK_BYTES = 8 << 20  # Compared at a time; that needs about ten times as much memory.


@dataclass(frozen=True, slots=True)
class Change:
    """Something that has another value in each checkpoint."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor of the same shape in both, whose bytes differ."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_differing: int  # Elements whose bits differ.
    max_abs: float  # The largest difference of two finite elements.
    max_relative: float  # The same difference over the larger of the two elements.
    num_not_finite: int  # Differing elements of which one or both are NaN or infinite.


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """The differences of two checkpoints, from `a` to `b`."""

    a: int
    b: int
    spec: tuple[Change, ...]
    plan: tuple[Change, ...]
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
    total, done, found = sum(in_a[name].num_bytes for name in alike), 0, dict[str, _Gap]()
    with ThreadPoolExecutor(2, thread_name_prefix="embark-compare") as pool:
        for name in alike:
            gap = found.setdefault(name, _Gap())
            for first, stop in _row_ranges(in_a[name]):
                pair = [pool.submit(of_one.rows, name, first, stop) for of_one in arrays]
                rows_a, rows_b = pair[0].result(), pair[1].result()
                gap.add(rows_a, rows_b)
                done += rows_a.size * in_a[name].stored.itemsize
                if progress:
                    progress(done, total)
    tensors = tuple(gap.change(name, in_a[name]) for name, gap in found.items() if gap.num_differing)
    return CheckpointDiff(
        a.step, b.step, _changes(_spec(checkpoints, a), _spec(checkpoints, b)),
        _changes(_plan(checkpoints, a), _plan(checkpoints, b)),
        _changes(_known(a), _known(b)), tuple(sorted(in_a.keys() - in_b.keys())),
        tuple(sorted(in_b.keys() - in_a.keys())), shapes, tensors, len(alike) - len(tensors),
    )


class _Gap:
    """The difference of two tensors, over the blocks seen so far."""

    def __init__(self) -> None:
        self.num_differing = self.num_not_finite = 0
        self.max_abs = self.max_relative = 0.0

    def add(self, a: Array, b: Array) -> None:
        differing = a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")
        num = int(differing.sum())
        if not num:
            return
        self.num_differing += num
        x, y = (rows[differing].astype(np.float64) for rows in (a, b))
        is_finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[is_finite], y[is_finite]
        self.num_not_finite += num - len(x)
        gap = np.abs(x - y)
        larger = np.maximum(np.abs(x), np.abs(y))
        relative = np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0)
        self.max_abs = max(self.max_abs, float(gap.max(initial=0.0)))
        self.max_relative = max(self.max_relative, float(relative.max(initial=0.0)))

    def change(self, name: str, tensor: TensorEntry) -> TensorChange:
        return TensorChange(name, tensor.dtype, tensor.size, self.num_differing, self.max_abs, self.max_relative,
                            self.num_not_finite)


def _row_ranges(tensor: TensorEntry) -> Iterator[tuple[int, int]]:
    num_rows = tensor.size[0] if tensor.size else 1
    row_bytes = tensor.num_bytes // max(num_rows, 1)
    at_once = max(1, BLOCK_BYTES // max(row_bytes, 1))
    return ((first, min(first + at_once, num_rows)) for first in range(0, num_rows if row_bytes else 0, at_once))


def _spec(checkpoints: CheckpointStore, checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return flatten(tomllib.loads(_text(checkpoints, checkpoint, SPEC)))
    except (ValueError, RecursionError):  # damaged: `--verify` says so
        return {SPEC: "cannot be read"}


def _plan(checkpoints: CheckpointStore, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a line for each table and each rank, by its first word or by `rank N`."""
    plan: dict[str, Any] = {}
    for line in _text(checkpoints, checkpoint, "plan.txt").splitlines():
        name, _, rest = " ".join(line.split()).partition(": " if line.startswith("rank ") else " ")
        plan |= {name: rest} if name else {}
    return plan


def _known(checkpoint: Checkpoint) -> dict[str, Any]:
    return flatten({name: held for name, held in checkpoint.values.items() if name not in ("step", "time_s", "files")})


def _text(checkpoints: CheckpointStore, checkpoint: Checkpoint, name: str) -> str:
    if name not in checkpoint.files:
        return ""
    return checkpoints.store.read(f"{checkpoint.name}/{name}").decode(errors="replace")


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Change, ...]:
    names = dict.fromkeys([*a, *b])
    return tuple(Change(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))

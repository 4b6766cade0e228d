"""What differs between two checkpoints of a run: spec, plan, metrics and every tensor, a block at a time, no torch."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from embark.store.checkpoint_index import INDEX, ITEM_BYTES, ChunkEntry, TensorEntry, read_index
from embark.store.checkpoint_store import Checkpoint, CheckpointStore
from embark.store.object_store import Progress

BLOCK_BYTES = 8 << 20
"""Of each tensor at a time; about ten times as much is needed to compare them."""
CARRIERS = {
    dtype: f"u{num_bytes}" for dtype, num_bytes in ITEM_BYTES.items()
    if dtype.startswith(("bfloat", "float8")) or dtype == "complex32"
}
"""What numpy has no dtype for goes as its bits."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """Something that has another value in each."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor of the same shape in both, whose bytes differ."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_differing: int
    """Elements whose bits differ; of a value that is no tensor, 1."""
    max_abs: float | None
    """The largest difference of two finite elements; none where the dtype is not counted with."""
    max_relative: float | None
    """The same over the larger of the two."""
    num_not_finite: int
    """Differing elements of which one or both are NaN or infinite."""


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """From checkpoint `a` to `b`."""

    a: int
    b: int
    spec: tuple[Change, ...]
    plan: tuple[Change, ...]
    values: tuple[Change, ...]
    """What the run knew: ranks, metrics."""
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shapes: tuple[Change, ...]
    """Tensors of another shape or dtype."""
    tensors: tuple[TensorChange, ...]
    num_same: int
    """Tensors whose bytes are the same."""


def diff_checkpoints(
    checkpoints: CheckpointStore, a: Checkpoint, b: Checkpoint, progress: Progress | None = None
) -> CheckpointDiff:
    """Read both, a block at a time."""
    in_a, in_b = _tensors(checkpoints, a), _tensors(checkpoints, b)
    shapes = _changes(*({name: f"{held[name].dtype} {list(held[name].size)}" for name in in_a if name in in_b}
                        for held in (in_a, in_b)))
    other = {change.what for change in shapes}
    alike = [name for name in in_a if name in in_b and name not in other]
    total, done, found = sum(in_a[name].num_bytes for name in alike), 0, dict[str, _Gap]()
    with ThreadPoolExecutor(2, thread_name_prefix="embark-compare") as pool:
        for name in alike:
            gap = found.setdefault(name, _Gap())
            for first, stop in _row_ranges(in_a[name]):
                pair = [pool.submit(_rows, checkpoints, checkpoint, held[name], first, stop)
                        for checkpoint, held in ((a, in_a), (b, in_b))]
                rows_a, rows_b = pair[0].result(), pair[1].result()
                gap.add(rows_a, rows_b, in_a[name].dtype)
                done += rows_a.nbytes
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
    """How far two tensors are apart, over the blocks seen so far."""

    def __init__(self) -> None:
        self.num_differing = self.num_not_finite = 0
        self.max_abs: float | None = None
        self.max_relative: float | None = None

    def add(self, a: Array, b: Array, dtype: str) -> None:
        bits = f"<u{a.itemsize}" if a.itemsize <= 8 else "<u8"
        differing = (a.view(bits) != b.view(bits)).reshape(-1, a.itemsize // np.dtype(bits).itemsize).any(axis=1)
        num = int(differing.sum())
        if not num:
            return
        self.num_differing += num
        x, y = (_numbers(held.reshape(-1)[differing], dtype) for held in (a, b))
        if x is None or y is None:
            return
        is_finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[is_finite], y[is_finite]
        self.num_not_finite += num - len(x)
        gap = np.abs(x - y)
        larger = np.maximum(np.abs(x), np.abs(y))
        relative = np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0)
        self.max_abs = max(self.max_abs or 0.0, float(gap.max(initial=0.0)))
        self.max_relative = max(self.max_relative or 0.0, float(relative.max(initial=0.0)))

    def change(self, name: str, tensor: TensorEntry) -> TensorChange:
        return TensorChange(name, tensor.dtype, tensor.size, self.num_differing, self.max_abs, self.max_relative,
                            self.num_not_finite)


def _tensors(checkpoints: CheckpointStore, checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Those of its index; a value that is no tensor is looked at as bytes."""
    path = f"{checkpoint.name}/{INDEX}"
    index = read_index(checkpoints.store.read(path), checkpoints.store.where(path))
    values = {
        name: TensorEntry("uint8", (place.num_bytes,), (ChunkEntry((0,), (place.num_bytes,), place),))
        for name, place in index.values.items()
    }
    return {**index.tensors, **values}


def _row_ranges(tensor: TensorEntry) -> Iterator[tuple[int, int]]:
    num_rows = tensor.size[0] if tensor.size else 1
    row_bytes = tensor.num_bytes // max(num_rows, 1)
    at_once = max(1, BLOCK_BYTES // max(row_bytes, 1))
    return ((first, min(first + at_once, num_rows)) for first in range(0, num_rows if row_bytes else 0, at_once))


def _rows(checkpoints: CheckpointStore, checkpoint: Checkpoint, tensor: TensorEntry, first: int, stop: int) -> Array:
    """Rows `first` to `stop`, put together from whatever chunks they were saved in."""
    dtype = np.dtype(CARRIERS.get(tensor.dtype, tensor.dtype)).newbyteorder("<")
    rows: Array = np.zeros((stop - first, *tensor.size[1:]), dtype)
    for chunk in tensor.chunks:
        offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
        begin, end = max(first, offsets[0]), min(stop, offsets[0] + sizes[0])
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        if begin >= end or not row_bytes:
            continue
        read = checkpoints.store.read_range(f"{checkpoint.name}/{chunk.place.file}",
                                     chunk.place.start + (begin - offsets[0]) * row_bytes, (end - begin) * row_bytes)
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
        rows[(slice(begin - first, end - first), *box)] = np.frombuffer(read, dtype).reshape(end - begin, *sizes[1:])
    return rows


def _numbers(held: Array, dtype: str) -> Array | None:
    """To count with; None where numpy has no such numbers."""
    if dtype == "bfloat16":
        return (held.astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype in CARRIERS:
        return None
    return held.astype(np.complex128 if held.dtype.kind == "c" else np.float64)


def _spec(checkpoints: CheckpointStore, checkpoint: Checkpoint) -> dict[str, Any]:
    return _flat(tomllib.loads(_text(checkpoints, checkpoint, "spec.toml")))


def _plan(checkpoints: CheckpointStore, checkpoint: Checkpoint) -> dict[str, Any]:
    """A line for each table and each rank, by its first word or by `rank N`."""
    plan: dict[str, Any] = {}
    for line in _text(checkpoints, checkpoint, "plan.txt").splitlines():
        name, _, rest = " ".join(line.split()).partition(": " if line.startswith("rank ") else " ")
        plan |= {name: rest} if name else {}
    return plan


def _known(checkpoint: Checkpoint) -> dict[str, Any]:
    return _flat({name: held for name, held in checkpoint.values.items() if name not in ("step", "time_s", "files")})


def _text(checkpoints: CheckpointStore, checkpoint: Checkpoint, name: str) -> str:
    if name not in checkpoint.files:
        return ""
    return checkpoints.store.read(f"{checkpoint.name}/{name}").decode(errors="replace")


def _flat(nested: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, held in nested.items():
        flat |= _flat(held, f"{above}{name}.") if isinstance(held, Mapping) else {f"{above}{name}": held}
    return flat


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Change, ...]:
    names = dict.fromkeys([*a, *b])
    return tuple(Change(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))

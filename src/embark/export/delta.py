"""What of an exported model's tensors differs from an earlier version, bit for bit: the rows that changed, with their
numbers. Applying it to the earlier tensors gives exactly the later ones.

    delta.safetensors    FILE/NAME           a tensor of that file, whole
                         FILE/NAME#rows      of a tensor with the same shape: the rows that changed
                         FILE/NAME#values    what they are now
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from embark.errors import DataError
from embark.features.arrays import Array, UInt32s
from embark.store import Checkpoint, FileChecksum
from .safetensors_file import TensorSource, file_of, in_memory

DELTA = "delta.safetensors"
PARENT, PARENT_IDENTITY, TENSOR_FILES = "parent", "parent_identity", "tensor_files"
PARENT_WEIGHTS, PARENT_ID_MAPS = "parent_weights_sha256", "parent_id_maps_sha256"
"""Keys of a delta's commit record: the number and the identity of the version that it changes, the size and checksum
that each file of tensors has in a full export, and the checksums of that version's weights and id maps."""
ROWS, VALUES = "#rows", "#values"


def identity_of(committed: Checkpoint) -> str:
    """Return the checksum of the content of a version or a checkpoint: its files and, of a delta, what it changes.
    Neither its number nor its time is part of it."""
    files = {name: [mark.size_bytes, mark.sha256] for name, mark in committed.files.items()}
    delta = {key: committed.values.get(key) for key in (PARENT_IDENTITY, PARENT_WEIGHTS, PARENT_ID_MAPS, TENSOR_FILES)}
    return hashlib.sha256(json.dumps([files, delta], sort_keys=True).encode()).hexdigest()


class TooManyChanges(Exception):
    """Raised if a full version is smaller than the delta, or needs less memory."""


@dataclass(slots=True)
class DeltaSize:
    """The limit on bytes of changed rows in memory, and the bytes found so far."""

    max_bytes: int
    num_bytes: int = 0
    num_rows: int = 0

    def add(self, rows: UInt32s, values: Array) -> None:
        self.num_rows += len(rows)
        self.num_bytes += rows.nbytes + values.nbytes
        if self.num_bytes > self.max_bytes:
            raise TooManyChanges


@dataclass(slots=True)
class _Compared:
    """A tensor whose pieces are read once: for the checksum of the file, and for the rows that changed."""

    tensor: TensorSource
    before: Array | None  # The earlier tensor; None if there is none of the same type and shape.
    size: DeltaSize
    rows: list[UInt32s] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    def source(self) -> TensorSource:
        return TensorSource(self.tensor.name, self.tensor.dtype, self.tensor.shape, self._pieces)

    def _pieces(self) -> Iterator[Array]:
        start = 0
        for piece in self.tensor.pieces():
            values = np.ascontiguousarray(piece, self.tensor.dtype).reshape(-1, *self.tensor.shape[1:])
            stop = start + len(values)
            differs = np.ones(len(values), np.bool_) if self.before is None else \
                (_bytes(values) != _bytes(self.before.reshape(-1, *self.tensor.shape[1:])[start:stop])).any(axis=1)
            if differs.any():
                rows = (start + np.flatnonzero(differs)).astype(np.uint32)
                self.size.add(rows, changed := values[differs])
                self.rows.append(rows)
                self.values.append(changed)
            start = stop
            yield values

    def changes(self, file: str) -> list[TensorSource]:
        name, shape = f"{file}/{self.tensor.name}", self.tensor.shape
        if not self.rows:
            return [] if self.before is not None else [in_memory(name, np.empty(shape, self.tensor.dtype))]
        rows, values = np.concatenate(self.rows), np.concatenate(self.values)
        if len(rows) == (shape[0] if shape else 1):
            return [in_memory(name, values.reshape(shape))]
        return [in_memory(name + ROWS, rows), in_memory(name + VALUES, values)]


def delta_of(
    file: str, tensors: Sequence[TensorSource], before: Mapping[str, Array], about: Mapping[str, str], size: DeltaSize
) -> tuple[FileChecksum, list[TensorSource]]:
    """Return what the checksum of a full export's `file` would be, and how its tensors differ from those `before`.
    Raises `TooManyChanges`."""
    if {one.name for one in tensors} != set(before) or any(len(array) >= 1 << 32 for array in before.values()
                                                           if array.ndim):
        raise TooManyChanges
    compared = [_Compared(one, before[one.name] if _is_alike(before[one.name], one) else None, size) for one in tensors]
    checksum = _checksum([one.source() for one in compared], about)
    return checksum, [change for one in compared for change in one.changes(file)]


def apply_delta(file: str, before: Mapping[str, Array], delta: Mapping[str, Array], where: str) -> dict[str, Array]:
    """Return the tensors of `file` after the delta. Rows are written into the arrays of `before`, which nobody may read
    meanwhile."""
    found = dict(before)
    for name, values in delta.items():
        of_file, _, tensor = name.partition("/")
        if of_file != file or tensor.endswith(ROWS):
            continue
        if not tensor.endswith(VALUES):
            if (before_it := found.get(tensor)) is not None and _is_alike(before_it, values):
                before_it[...] = values  # the tables stay one behind the other
            else:
                found[tensor] = values
            continue
        tensor = tensor.removesuffix(VALUES)
        rows, array = delta.get(f"{file}/{tensor}{ROWS}"), found.get(tensor)
        if array is None or rows is None or rows.dtype.kind != "u" or not array.ndim \
                or len(rows) != len(values) or array.dtype != values.dtype \
                or array.shape[1:] != values.shape[1:] or rows.max(initial=0) >= len(array):
            raise DataError(f"{where}: its rows do not fit tensor {tensor}", "publish a full version: "
                            "`embark export RUN --to URI`")
        array[rows] = values
    return found


def tensors_checksum(tensors: Mapping[str, Array], about: Mapping[str, str]) -> FileChecksum:
    """Return the checksum of the file that these tensors would make."""
    return _checksum([in_memory(name, values) for name, values in tensors.items()], about)


def _checksum(tensors: Sequence[TensorSource], about: Mapping[str, str]) -> FileChecksum:
    size, pieces = file_of(tensors, about)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return FileChecksum(size, digest.hexdigest())


def _is_alike(before: Array, now: Array | TensorSource) -> bool:
    return before.dtype == now.dtype and before.shape == now.shape


def _bytes(values: Array) -> Array:
    """View values as [rows, bytes of a row]: comparing numbers would not tell -0.0 from 0.0, and no NaN equals
    itself."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)

"""The arrays of a checkpoint, in one form for every training library: each rank's `rank-….bin` and one `index.json`.

    {"format": "embark-checkpoint-2",
     "tensors": {NAME: {"dtype": "float32", "size": [rows, columns], "chunks": [
         {"offsets": [0, 0], "sizes": [rows, columns], "file": "rank-00000-00.bin", "start": 0, "bytes": …}]}}}

A chunk is a part of the tensor, row by row, little-endian. So a rank that loads under another sharding reads only the
rows it needs, and nothing that is read can run code.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from embark.errors import Fault, UserError
from embark.values import frozen
from .checkpoint_store import ChecksumWriter
from .object_store import ObjectStore, for_each_parallel

INDEX = "index.json"
NUM_FILES = 4  # Files that a rank writes in parallel.
WRITE_BYTES = 4 << 20
"""How much of an array is hashed and written at a time: what was just hashed is still in the processor's cache."""
DTYPES = {f"{kind}{bits}" for kind, all_bits in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)),
                                                 ("float", (16, 32, 64))) for bits in all_bits} | {"bool", "bfloat16"}
Array = NDArray[Any]
Size = Annotated[int, Field(strict=True, ge=0)]


@frozen
class ChunkEntry:
    """A box of a tensor, and its bytes in a file."""

    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]
    file: Annotated[str, Field(pattern=r"^rank-\d{5,}-\d{2,}\.bin$")]
    start: Size
    bytes: Size


@frozen
class TensorEntry:
    """A tensor and the chunks it was saved in."""

    dtype: str
    size: tuple[Size, ...]
    chunks: tuple[ChunkEntry, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown")
        item_bytes = self.stored.itemsize
        for chunk in self.chunks:
            if chunk.bytes != math.prod(chunk.sizes) * item_bytes:
                raise ValueError(f"{chunk.bytes} bytes for {chunk.sizes} of {self.dtype}")
            ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
            if any(end > limit for end, limit in zip(ends, self.size, strict=True)):
                raise ValueError(f"a chunk that ends at {ends} of {self.size}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.stored.itemsize

    @property
    def stored(self) -> np.dtype[Any]:
        """Type of the numbers in the file. NumPy has no bfloat16, whose bits are the upper half of a float32's."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).newbyteorder("<")

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Type of the arrays that are read: bfloat16 is read as float32, which holds all its values."""
        return np.dtype("float32" if self.dtype == "bfloat16" else self.dtype)


@frozen
class Index:
    """All tensors of a checkpoint, by name."""

    tensors: Mapping[str, TensorEntry]
    format: Literal["embark-checkpoint-2"] = "embark-checkpoint-2"

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("no tensors")
        for name, entry in self.tensors.items():
            if not entry.chunks:
                raise ValueError(f"{name}: no chunks")
            if (num_saved := sum(chunk.bytes for chunk in entry.chunks)) != entry.num_bytes:
                raise ValueError(f"{name}: {num_saved:,} bytes in its chunks instead of {entry.num_bytes:,}")

    def to_json(self) -> bytes:
        """Serialize the index for `read_index`."""
        return _INDEX.dump_json(self) + b"\n"


_INDEX = TypeAdapter(Index)


def read_index(text: bytes, where: str) -> Index:
    """Parse an index; one that Embark did not write, or that was changed since, is refused."""
    try:
        return _INDEX.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise Fault(f"{where} is not the index of a checkpoint: {reason}",
                "it was damaged, or another program wrote it: use another checkpoint")


@frozen
class TensorChunk:
    """A box of a tensor, on the host, to be written."""

    name: str
    size: tuple[int, ...]  # Shape of the complete tensor.
    offsets: tuple[int, ...]
    values: Array
    dtype: str = ""  # `bfloat16` if `values` contain its bits; otherwise the dtype of `values`.


def unsharded(name: str, values: Array) -> TensorChunk:
    """Make a chunk of a complete tensor."""
    return TensorChunk(name, values.shape, (0,) * values.ndim, values)


def write_pieces(
    store: ChecksumWriter, folder: str, rank: int, pieces: Iterable[TensorChunk], attempt: int = 1
) -> dict[str, TensorEntry]:
    """Write a rank's files, of about one size each; returns this rank's part of the index. Each attempt of a run has
    numbers of its own: ranks that were paused and go on beside the next attempt overwrite nothing of it."""
    names = [f"rank-{rank:05d}-{(attempt - 1) * NUM_FILES + number:02d}.bin" for number in range(NUM_FILES)]
    files: list[list[TensorChunk]] = [[] for _ in range(NUM_FILES)]
    sizes = [0] * NUM_FILES
    placed: list[tuple[TensorChunk, ChunkEntry]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.values.nbytes):
        least = sizes.index(min(sizes))
        files[least].append(piece)
        placed.append((piece, ChunkEntry(piece.offsets, piece.values.shape, names[least], sizes[least],
                                         piece.values.nbytes)))
        sizes[least] += piece.values.nbytes

    def write(number: int) -> None:
        store.write(f"{folder}/{names[number]}", _bytes_of(files[number]), sizes[number])

    for_each_parallel(write, [number for number in range(NUM_FILES) if sizes[number]], NUM_FILES)
    return merge_entries({piece.name: TensorEntry(piece.dtype or piece.values.dtype.name, piece.size, (chunk,))}
                         for piece, chunk in placed)


def merge_entries(parts: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Collect all chunks of every tensor."""
    chunks: dict[str, list[ChunkEntry]] = {}
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, entry in part.items():
            forms[name] = (entry.dtype, entry.size)
            chunks.setdefault(name, []).extend(entry.chunks)
    return {name: TensorEntry(*form, tuple(chunks[name])) for name, form in forms.items()}


def _bytes_of(pieces: Sequence[TensorChunk]) -> Iterator[memoryview]:
    for piece in pieces:
        flat = np.ascontiguousarray(piece.values).reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), WRITE_BYTES):
            yield flat[start : start + WRITE_BYTES]


class CheckpointArrays:
    """The arrays of one checkpoint, which can be read in any partition."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        self._store, self._folder = store, folder
        path = f"{folder}/{INDEX}"
        self.entries = read_index(store.read(path), store.where(path)).tensors

    def refuse_beyond_files(self) -> None:
        """Refuse an index that may be damaged or forged, before arrays are allocated by it."""
        sizes = {entry.path: entry.size_bytes for entry in self._store.list(self._folder)}
        for name, entry in self.entries.items():
            for chunk in entry.chunks:
                if chunk.start + chunk.bytes > sizes.get(f"{self._folder}/{chunk.file}", 0):
                    raise Fault(f"{self._store.where(self._folder)}: {name} ends beyond {chunk.file}",
                                "it was damaged, or another program wrote it: use another checkpoint")

    def entry(self, name: str, size: tuple[int, ...] | None = None) -> TensorEntry:
        """Return the entry of a tensor; one that is missing, or of another size than the model's, is refused."""
        if name not in self.entries:
            raise of_another_model(f"{self._store.where(self._folder)} has no {name}")
        entry = self.entries[name]
        if size is not None and entry.size != size:
            raise of_another_model(
                f"{name} is {list(entry.size)} in {self._store.where(self._folder)}, and {list(size)} here")
        return entry

    def tensor(self, name: str, size: tuple[int, ...]) -> Array:
        """Read a complete tensor."""
        return self.read_into(name, (0,) * len(size), np.zeros(size, self.entry(name, size).array_dtype))

    def rows(self, name: str, first: int, stop: int) -> Array:
        """Read rows `first` to `stop`; a scalar is one row."""
        entry = self.entry(name)
        into = np.zeros((stop - first, *entry.size[1:]), entry.array_dtype)
        return self.read_into(name, (first, *(0 for _ in entry.size[1:])), into)

    def read_into(self, name: str, offsets: Sequence[int], into: Array) -> Array:
        """Fill `into` with the box that begins at `offsets`, from whatever chunks the tensor was saved in. What
        the tensor does not have stays as it is."""
        entry = self.entry(name)
        dtype = entry.stored
        box, offsets = np.atleast_1d(into), tuple(offsets) or (0,)
        for chunk in entry.chunks:
            begins, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            low = [max(*pair) for pair in zip(offsets, begins, strict=True)]
            high = [min(offset + wanted, begin + size) for offset, wanted, begin, size
                    in zip(offsets, box.shape, begins, sizes, strict=True)]
            if any(first >= stop for first, stop in zip(low, high, strict=True)):
                continue
            # Complete rows of the chunk, one after another in its file.
            target = box[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
            shape = (high[0] - low[0], *sizes[1:])
            is_direct = target.shape == shape and target.flags.c_contiguous and target.dtype == dtype
            rows = target if is_direct else np.empty(shape, dtype)
            start = chunk.start + (low[0] - begins[0]) * math.prod(sizes[1:]) * dtype.itemsize
            self._store.read_into(f"{self._folder}/{chunk.file}", start, rows.reshape(-1).view(np.uint8).data)
            if entry.dtype == "bfloat16":
                rows = (rows.astype(np.uint32) << 16).view(np.float32)
            if not is_direct:
                columns = [slice(a - o, b - o) for a, b, o in zip(low[1:], high[1:], begins[1:], strict=True)]
                target[...] = rows[(slice(None), *columns)]
        return into

    def rowwise_state(self, name: str, table: str, first: int, stop: int) -> Array:
        """Read row-wise Adagrad's one number for each of rows `first` to `stop`. A table in column shards has one
        for each row and shard, shard after shard; weighted by the shards' widths, their mean is that of the complete
        row."""
        saved = self.entry(table)
        widths_by_offset = {chunk.offsets[1]: chunk.sizes[1] for chunk in saved.chunks}
        widths = [widths_by_offset[offset] for offset in sorted(widths_by_offset)]
        num_rows = saved.size[0]
        self.entry(name, (num_rows * len(widths),))
        parts = [self.rows(name, number * num_rows + first, number * num_rows + stop) for number in range(len(widths))]
        if len(parts) == 1:
            return parts[0]
        share = np.array(widths, np.float32) / np.float32(sum(widths))
        mean: Array = (np.stack(parts) * share[:, None]).sum(axis=0, dtype=np.float32)
        return mean


def table_weight(table: str, *, is_sequence: bool = False) -> str:
    """Return the name of a table's weights in a checkpoint, whichever library trained it. `is_sequence`: it is looked
    up row by row."""
    return f"model.{'sequences.embeddings' if is_sequence else 'tables.embedding_bags'}.{table}.weight"


def of_another_model(what: str) -> UserError:
    """Make the error for a checkpoint that does not fit the run."""
    return UserError(f"the checkpoint is of another model: {what}",
                     "take the spec that was saved with it, or start a run of another name")

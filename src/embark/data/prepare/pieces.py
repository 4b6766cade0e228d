"""What passes between the steps of preparing: a schema, pieces of input, and rows whose ids are not numbered yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64] | NDArray[np.uint32]
"""32 bits where they always suffice."""


@dataclass(frozen=True, slots=True)
class SparseColumn:
    """A column that becomes a table."""

    name: str
    kind: Literal["hex", "integer", "text"]
    is_list: bool = False
    max_ids: int = 1
    """Of a list: more are cut."""
    rows: int | None = None
    """Of its table, where the spec gives them."""
    column: str = ""
    """Its name in the input, where a table cannot be named so."""

    @property
    def source(self) -> str:
        """The column of the input it comes from."""
        return self.column or self.name


@dataclass(frozen=True, slots=True)
class Schema:
    """What each column of the input is."""

    format: Literal["criteo", "csv", "parquet"]
    label: str
    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    columns: tuple[str, ...]
    """All columns of the input, in its order."""
    ignored: tuple[str, ...] = ()
    delimiter: str = "\t"
    has_header: bool = False
    split_column: str = ""
    why: dict[str, str] = field(default_factory=dict)
    """By column, for a person: what it was taken for and why."""
    examples: dict[str, str] = field(default_factory=dict)
    """By column, for a person: some of its values."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input."""

    uri: str
    size_bytes: int
    changed: str = ""
    """What tells this content from another under the same name."""

    @property
    def name(self) -> str:
        return self.uri.rsplit("/", 1)[-1]


class Inputs(Protocol):
    """Where the input lies. It is sent to other processes, so it must pickle."""

    def find(self, pattern: str) -> list[InputFile]:
        """The files that a path or a glob means, sorted."""
        ...

    def read(self, uri: str, start: int, num_bytes: int) -> bytes:
        """Bytes of a file; fewer at its end."""
        ...

    def local_path(self, uri: str) -> str | None:
        """Where to map it from, if it is a local file."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one file that is prepared on its own: a unit of work, and of going on after a stop."""

    file: InputFile
    index: int
    """Among the segments of the file."""
    start: int
    """First byte of text, or first row group of Parquet."""
    stop: int
    """First that belongs to the next."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read."""

    line: int
    """Counted from 0 within the segment."""
    why: str


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows as the input has them, in columns."""

    lines: NDArray[np.int64]
    """[n]: the line of each within the segment, counted from 0; of Parquet, the row."""
    label: NDArray[np.float32]
    """[n]: 0 or 1."""
    dense: NDArray[np.float32]
    """[n, D], as they are; NaN where missing."""
    keys: tuple[Keys, ...]
    """Of each sparse column: the number, or 64 bits of hash of the text. [n], or of a list all one after the other."""
    lengths: tuple[NDArray[np.int32] | None, ...]
    """[n] of each list, after cutting; None of the others."""
    is_missing: tuple[NDArray[np.bool_] | None, ...]
    """[n] of each column that is no list: where there is no value; None where none is missing."""
    split: NDArray[np.uint8] | None = None
    """[n]: position in SPLITS, where a column says it."""
    bad: tuple[BadRow, ...] = ()
    """Rows left out between these; at most MAX_TOLD, `num_bad` has their number."""
    num_bad: int = 0
    num_cut: int = 0
    """Lists that were longer than their column's `max_ids`."""
    num_lines: int = 0
    """Lines this piece took, the bad ones and the header among them."""
    texts: tuple[dict[int, str] | None, ...] = ()
    """Of each text column: some hashes and the words they stand for, for people to read."""
    positions: NDArray[np.int64] | None = None
    """[n]: the byte of the file, unpacked, that each row begins at; of Parquet, the row of the file. A split by
    chance draws by it, so that the size of the pieces changes nothing. None: by the segment's start and `lines`."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Why rows were left out and how many for each reason, where the reader counts them all; see `bad_rows.py`."""
    read_bytes: int = 0
    """Of the input, as it lies there, that this piece took, where the reader knows."""

    def __len__(self) -> int:
        return len(self.label)


MAX_TOLD = 20
"""Bad rows that are told one by one."""


class Reader(Protocol):
    """Knows one format."""

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Pieces of about that size that can be read on their own."""
        ...

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """The segment's rows in order, in portions of about `chunk_bytes` of input."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is."""

    stage: str
    """Such as `reading`, `numbering ids`, `counting`."""
    done: int
    total: int
    """In bytes of input, or whatever the stage counts."""
    rows: int
    elapsed_s: float
    left_s: float | None
    num_bad: int = 0
    memory_bytes: int = 0
    """Largest so far of all processes together."""
    more: dict[str, Any] = field(default_factory=dict)

"""Parquet files as rows of their table: opened wherever they lie, with values of their folders, the names and types of
their table, and without deleted rows."""

import embark.features.arrow  # noqa: F401 - says so if pyarrow is missing

# isort: split
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as types
from pyarrow.parquet import ParquetFile

from embark.errors import DataError, EmbarkError
from embark.features.arrays import Int64s
from embark.features.arrow.cells import is_list
from embark.store import explain_data
from embark.values import JsonMap, frozen
from .inputs import InputFile, Inputs

_READ_BYTES = 1 << 20  # Bytes of a column that are read at a time.


@frozen
class FileView:
    """A Parquet file as rows of a table."""

    parquet: Any
    stored: Mapping[str, str]  # The name in the file of each column that it has.
    types: JsonMap = field(default_factory=dict)  # Of the table's columns; empty: those of the file.
    constants: JsonMap = field(default_factory=dict)  # Arrow scalars of columns that the file has not.
    read_deleted: Callable[[], Int64s] | None = None  # Positions of rows that are none any more.

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.types, *self.stored, *self.constants]))

    def batches(
        self, names: Sequence[str], groups: Sequence[int], batch_rows: int
    ) -> Iterator[tuple[Callable[[str], Any], Int64s, int]]:
        """Yield the rows of some row groups: the columns by name, the rows' positions in the file, and their number
        before any were deleted."""
        position = sum(self.parquet.metadata.row_group(i).num_rows for i in range(groups[0]))
        deleted = self.read_deleted() if self.read_deleted else np.zeros(0, np.int64)
        stored = [self.stored[name] for name in names if name in self.stored] or self.parquet.schema_arrow.names[:1]
        for batch in self.parquet.iter_batches(batch_rows, groups, stored, use_threads=False):
            positions, num_rows = np.arange(position, position + batch.num_rows), batch.num_rows
            position += num_rows
            if len(deleted):
                is_there = ~np.isin(positions, deleted)
                batch, positions = batch.filter(pa.array(is_there)), positions[is_there]
            yield partial(self.column, batch), positions, num_rows

    def column(self, batch: Any, name: str) -> Any:
        """Return a column of the table, of its type there."""
        kind = self.types.get(name)
        if name not in self.stored:
            return pa.repeat(self.constants.get(name, pa.scalar(None, kind)), batch.num_rows)
        array = batch.column(self.stored[name])
        if kind is None or types.is_nested(kind.value_type if is_list(kind) else kind):
            return array
        return array.cast(kind, safe=not types.is_timestamp(kind))


@contextmanager
def open_view(inputs: Inputs, file: InputFile) -> Iterator[FileView]:
    """Open a file of a table, or one that stands for itself, whose folders may be named `column=value`."""
    if file.table:
        view = inputs.table_of(file).view(inputs, file)
    else:
        parquet = open_parquet(inputs, file)
        names = parquet.schema_arrow.names
        view = FileView(parquet, dict(zip(names, names, strict=True)), constants={
            name: pa.scalar(value, pa.string()) for name, value in file.constants if name not in names})
    with view.parquet:
        yield view


def open_parquet(inputs: Inputs, file: InputFile) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`; an error names the file."""
    path = inputs.local_path(file.uri)
    source = path if path is not None else pa.PythonFile(_Ranges(inputs, file), mode="r")
    try:
        return ParquetFile(source, memory_map=path is not None, buffer_size=_READ_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(file, error) from error


def broken(file: InputFile, error: Exception) -> EmbarkError:
    """Explain an error: the file is cut short, damaged or something else, or the machine could not read it."""
    if isinstance(error, OSError) and error.errno:
        return explain_data(error, file.uri)
    return DataError(f"{file.uri}: is not a Parquet file that can be read: {str(error).splitlines()[0]}",
                     "copy or write it again; a Parquet file ends with its index, so one cut short is lost")


class _Ranges(io.RawIOBase):
    """A remote file that fetches only the bytes that are read."""

    def __init__(self, inputs: Inputs, file: InputFile) -> None:
        super().__init__()
        self._inputs, self._file = inputs, file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size_bytes - self._at)
        data = self._inputs.read(self._file.uri, self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data

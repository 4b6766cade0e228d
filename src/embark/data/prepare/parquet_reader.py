"""Parquet: row groups are the segments, batches of rows the portions, and only the columns that are needed are read."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from embark.data.prepare.inputs import InputFile, Inputs
from embark.data.prepare.row_parser import Location, RowParser
from embark.data.prepare.rows import RawRows, Segment
from embark.data.prepare.schema import Schema
from embark.errors import DataError, MissingPackage, nearest
from embark.spec.data import PrepareSpec

_MIN_BATCH_ROWS, _MAX_BATCH_ROWS = 1_024, 1 << 20
_READ_BYTES = 1 << 20
"""What is read of a column at a time."""


class ParquetReader:
    """Parquet files, NVTabular's and Spark's among them."""

    def __init__(self, schema: Schema, prepare: PrepareSpec, inputs: Inputs) -> None:
        self._schema = schema
        self._inputs = inputs
        self._parser = RowParser(schema, prepare)

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Row groups, as many as come to about that size in the file."""
        with open_parquet(self._inputs, file) as parquet:
            metadata = parquet.metadata
            sizes = [_stored_bytes(metadata.row_group(i)) for i in range(metadata.num_row_groups)]
        found: list[Segment] = []
        start = size_bytes = 0
        for group, size in enumerate(sizes):
            size_bytes += size
            if size_bytes >= segment_bytes or group == len(sizes) - 1:
                found.append(Segment(file, len(found), start, group + 1))
                start, size_bytes = group + 1, 0
        return found

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """The segment's rows in order."""
        import pyarrow as pa

        file, line = segment.file, 0
        with open_parquet(self._inputs, file) as parquet:
            self._check_columns(file, parquet.schema_arrow.names)
            groups = range(segment.start, segment.stop)
            metadata = parquet.metadata
            position = sum(metadata.row_group(i).num_rows for i in range(segment.start))
            batch_rows = self._batch_rows(metadata, groups, chunk_bytes)
            stored = sum(_stored_bytes(metadata.row_group(i)) for i in groups)
            bytes_per_row = stored / max(1, sum(metadata.row_group(i).num_rows for i in groups))
            try:
                for batch in parquet.iter_batches(batch_rows, list(groups), self._parser.columns, use_threads=False):
                    num_rows = batch.num_rows
                    lines = np.arange(line, line + num_rows)
                    location = Location(lines, lines + position, num_rows, int(bytes_per_row * num_rows))
                    yield self._parser.parse(batch.column, location, file.uri)
                    line += num_rows
            except (pa.ArrowException, OSError) as error:
                raise broken(file, error) from error

    def _check_columns(self, file: InputFile, names: list[str]) -> None:
        lacking = [name for name in self._parser.columns if name not in names]
        if lacking:
            raise DataError(f"{file.uri}: has no column " + ", ".join(map(repr, lacking)),
                            fix=nearest(lacking[0], names) + " Every file has the columns of the first one")

    def _batch_rows(self, metadata: Any, groups: range, chunk_bytes: int) -> int:
        """Rows that come to `chunk_bytes` when they are unpacked."""
        num_rows = max(1, sum(metadata.row_group(i).num_rows for i in groups))
        wanted, size = set(self._parser.columns), 0
        for group in groups:
            columns = metadata.row_group(group)
            for i in range(columns.num_columns):
                column = columns.column(i)
                if column.path_in_schema.split(".")[0] in wanted:
                    # Repeated words are stored once, and unpacked each time.
                    size += max(column.total_uncompressed_size, 8 * column.num_values)
        return min(max(int(chunk_bytes * num_rows / max(size, 1)), _MIN_BATCH_ROWS), _MAX_BATCH_ROWS)


def open_parquet(inputs: Inputs, file: InputFile) -> Any:
    """A `pyarrow.parquet.ParquetFile`, or an error that says which file is none."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage(f"{file.uri}: pyarrow reads Parquet", fix="pip install 'embark-rec[columns]'") from error
    path = inputs.local_path(file.uri)
    source = path if path is not None else pa.PythonFile(_Ranges(inputs, file), mode="r")
    try:
        return pyarrow.parquet.ParquetFile(source, memory_map=path is not None, buffer_size=_READ_BYTES,
                                           pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise broken(file, error) from error


def broken(file: InputFile, error: Exception) -> DataError:
    """It is cut short, damaged or something else."""
    return DataError(f"{file.uri}: is not a Parquet file that can be read: {str(error).splitlines()[0]}",
                     fix="copy or write it again; a Parquet file ends with its index, so one cut short is lost")


def _stored_bytes(group: Any) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


class _Ranges(io.RawIOBase):
    """A remote file that fetches only the bytes that are read."""

    def __init__(self, inputs: Inputs, file: InputFile) -> None:
        super().__init__()
        self._inputs = inputs
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._file.size_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size_bytes - self._at)
        data = self._inputs.read(self._file.uri, self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data

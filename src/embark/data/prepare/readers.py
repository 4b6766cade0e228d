"""Any delimited text: rows cut where quotes allow it, fields parsed by pyarrow, wrong ones counted."""

import embark.features.arrow  # noqa: F401 - says so if pyarrow is missing

# isort: split
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.types as types

from embark.errors import DataError, nearest
from embark.features.arrow.cells import as_bytes, as_text, is_list, is_text, normalize_array
from embark.features.arrow.row_parser import Location, RowParser, json_array, json_column
from embark.features.rows import BadRow, RawRows
from embark.features.schema import Schema
from embark.features.values import json_line
from embark.spec import PrepareSpec
from .inputs import InputFile, Inputs
from .parquet_view import FileView, broken, open_view
from .rows import Segment
from .sampling import Column, refuse_twins, say_encoding
from .text_stream import (
    BOM,
    MAX_ROW_BYTES,
    RowBlock,
    TextStream,
    UnterminatedRow,
    drop_malformed_rows,
    fields_of,
    head,
    header_names,
    is_gzip,
    split_rows,
)

_SCAN_BYTES = 8 << 20
_HEADER_BYTES = 1 << 20
_STAND_IN = b"\x1f"  # Takes the place of a delimiter of several characters; text does not have it.
_MIN_BATCH_ROWS, _MAX_BATCH_ROWS = 1_024, 1 << 20
_Parsed = tuple[Callable[[str], Any], int, dict[int, str]]


class _ArrowReader:
    """Reads files of which pyarrow makes columns."""

    def __init__(
        self, schema: Schema, prepare: PrepareSpec, inputs: Inputs, parser: RowParser | None = None
    ) -> None:
        self._schema, self._inputs, self._encoding = schema, inputs, prepare.encoding
        self._parser = parser or RowParser(schema, prepare)
        # JSON has no delimiter. One of several characters knows no quotes.
        self._delimiter = b"\0\0" if schema.format == "jsonl" else schema.delimiter.encode()
        self._has_quotes = len(self._delimiter) == 1


    def _refuse_other_encodings(self, column: Callable[[str], Any], positions: Any, file: InputFile, at: str) -> None:
        """Refuse words that are not UTF-8: a server, which gets UTF-8, would never find their ids."""
        words = {one.source for one in self._schema.sparse if one.kind == "text"}
        for name in (one for one in self._parser.columns if one in words):
            cells = normalize_array(column(name))
            if not is_text(cells.type):
                continue
            try:
                as_text(cells).validate(full=True)
            except pa.ArrowInvalid:
                for position, cell in zip(positions, as_bytes(cells).to_pylist(), strict=True):
                    if cell and cell.decode(errors="ignore").encode() != cell:
                        raise DataError(f"{file.uri}: {at} {position:,} has {cell!r:.80} in column {name!r}, which is "
                                        "not UTF-8", say_encoding(file)) from None


class CsvReader(_ArrowReader):
    """Reads delimited text, plain or gzip."""

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Cut a file between rows into pieces of about that size. Gzip cannot be entered in the middle, and to look
        for quotes in a remote file would be to fetch it twice: these are one segment each."""
        one = [Segment(file, 0, 0, file.size_bytes)]
        is_remote = self._inputs.local_path(file.uri) is None
        if file.size_bytes <= segment_bytes or is_remote or is_gzip(self._inputs, file):
            return one
        cuts = self._cuts_by_quotes(file, segment_bytes) if self._finds_quote(file) else self._cuts(file, segment_bytes)
        bounds = [0, *cuts, file.size_bytes]
        return [Segment(file, i, start, stop) for i, (start, stop) in enumerate(pairwise(bounds))]

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """Yield the segment's rows in order."""
        file, has_header = segment.file, self._schema.has_header
        columns = self._columns_of(file) if has_header else self._schema.columns
        stream = TextStream(self._inputs, file, segment.start, segment.stop, chunk_bytes)
        pieces, first_byte = _without_bom(stream.pieces) if segment.start == 0 else (stream.pieces, segment.start)
        is_header_next, line, none = has_header and segment.start == 0, 0, np.zeros(0, np.int64)
        for cut in split_rows(pieces, self._delimiter, has_quotes=self._has_quotes, first_byte=first_byte):
            num_lines, line = cut.stop_line - line, cut.stop_line
            if isinstance(cut, UnterminatedRow):
                location = Location(none, none, num_lines, [BadRow(cut.line, cut.why)])
                yield self._parser.parse(partial(json_column, []), location, file.uri)
                continue
            text, rows = cut.text, np.flatnonzero(~cut.is_blank)
            if is_header_next and len(rows):
                behind = int(cut.starts[rows[0] + 1] - cut.starts[0]) if rows[0] + 1 < len(cut.starts) else len(text)
                text, rows, is_header_next = text[behind:], rows[1:], False
            text = self._as_utf8(text, cut, file)
            column, num_rows, wrong = self._parse(text, columns, file)
            if self._schema.format == "csv" and not text.isascii():
                self._refuse_other_encodings(column, np.delete(cut.starts[rows], list(wrong)), file, "the row at byte")
            bad = [BadRow(int(cut.lines[rows[number]]), why) for number, why in wrong.items()]
            rows = np.delete(rows, list(wrong))
            if num_rows != len(rows):
                raise DataError(f"{file.uri}: {len(rows)} rows were counted from byte {cut.starts[0]:,} on, "
                                f"and {num_rows} read", "say so to the authors of Embark, with the lines")
            location = Location(cut.lines[rows], cut.starts[rows], num_lines, bad)
            yield self._parser.parse(column, location, file.uri)

    def _parse(self, text: bytes, columns: Sequence[str], file: InputFile) -> _Parsed:
        """Return the wanted columns as bytes, by name, and the number of rows. Malformed rows are left out; why is
        returned by their position among the rows that are not empty lines."""
        delimiter = self._delimiter
        if len(delimiter) > 1:
            text, delimiter = text.replace(_STAND_IN, b"").replace(delimiter, _STAND_IN), _STAND_IN
        wrong: dict[int, str] = {}
        try:
            try:
                table = self._table(text, delimiter, columns)
            except pa.ArrowInvalid:
                # pyarrow could leave them out itself, except those that are not UTF-8.
                text, fields = drop_malformed_rows(text, delimiter, len(columns), has_quotes=self._has_quotes)
                wrong = {row: f"its fields are {num} instead of {len(columns)}" for row, num in fields.items()}
                table = self._table(text, delimiter, columns)
            return table.column, table.num_rows, wrong
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.uri}: is not delimited text that can be read: {error}",
                            "check data.prepare.delimiter, and that the file is UTF-8 text") from error

    def _as_utf8(self, text: bytes, block: RowBlock, file: InputFile) -> bytes:
        """Convert rows, which end the block, from the encoding that the spec says."""
        if self._encoding == "utf-8" or self._schema.format == "jsonl" or text.isascii():
            return text
        try:
            return text.decode(self._encoding).encode()
        except UnicodeDecodeError as error:
            at = int(block.starts[0]) + len(block.text) - len(text) + error.start
            raise DataError(f"{file.uri}: byte {at:,}, {text[error.start : error.start + 1]!r}, is not "
                            f"{self._encoding}, which data.prepare.encoding says",
                            "say the file's own encoding") from None

    def _table(self, text: bytes, delimiter: bytes, columns: Sequence[str]) -> Any:
        if not text:
            return pa.table({name: pa.array([], pa.binary()) for name in columns})
        has_quotes, wanted = self._has_quotes and b'"' in text, self._parser.columns
        return arrow_csv.read_csv(
            pa.py_buffer(text),
            read_options=arrow_csv.ReadOptions(column_names=list(columns), use_threads=False, block_size=len(text) + 1),
            parse_options=arrow_csv.ParseOptions(
                delimiter=delimiter.decode("latin-1"), quote_char='"' if has_quotes else False,
                newlines_in_values=has_quotes, ignore_empty_lines=True),
            convert_options=arrow_csv.ConvertOptions(
                check_utf8=False, column_types={name: pa.binary() for name in wanted}, include_columns=wanted,
                strings_can_be_null=False)
        )

    def _columns_of(self, file: InputFile) -> Sequence[str]:
        """Return the columns in this file's own order."""
        text = head(self._inputs, file, _HEADER_BYTES).removeprefix(BOM)
        first = next((row for row in fields_of(text, self._schema.delimiter, self._encoding) if row), [])
        names = header_names(first)
        if twice := [name for name in self._parser.columns if names.count(name) > 1]:
            raise DataError(f"{file.uri}: has two columns named {twice[0]!r}", "rename one of them")
        if lacking := [name for name in self._parser.columns if name not in names]:
            raise DataError(f"{file.uri}: its header has no column " + ", ".join(map(repr, lacking)),
                            nearest(lacking[0], names) + " Every file has the columns of the first one")
        return names

    def _finds_quote(self, file: InputFile) -> bool:
        if not self._has_quotes:
            return False
        return any(b'"' in self._inputs.read(file.uri, start, _SCAN_BYTES)
                   for start in range(0, file.size_bytes, _SCAN_BYTES))

    def _cuts(self, file: InputFile, segment_bytes: int) -> list[int]:
        """Cut behind the first line end from each multiple of `segment_bytes` on."""
        cuts = []
        for target in range(segment_bytes, file.size_bytes, segment_bytes):
            end = self._inputs.read(file.uri, target, MAX_ROW_BYTES).find(b"\n")
            if end >= 0:
                cuts.append(target + end + 1)
        return [cut for cut in dict.fromkeys(cuts) if cut < file.size_bytes]

    def _cuts_by_quotes(self, file: InputFile, segment_bytes: int) -> list[int]:
        """Cut where a line end may be within quotes, which takes reading from the start."""
        cuts: list[int] = []
        target = segment_bytes
        pieces, first_byte = _without_bom(TextStream(self._inputs, file, 0, file.size_bytes, _SCAN_BYTES).pieces)
        for cut in split_rows(pieces, self._delimiter, first_byte=first_byte):
            if not isinstance(cut, RowBlock):
                continue
            while (position := int(np.searchsorted(cut.starts, target))) < len(cut.starts):
                cuts.append(int(cut.starts[position]))
                target = cuts[-1] - cuts[-1] % segment_bytes + segment_bytes
        return cuts


def _without_bom(pieces: Iterator[bytes]) -> tuple[Iterator[bytes], int]:
    """Return the pieces without a byte order mark, and how many bytes it has."""
    first = next(pieces, b"")
    rest = first.removeprefix(BOM)
    return chain([rest], pieces), len(first) - len(rest)


class ParquetReader(_ArrowReader):
    """Reads Parquet files, NVTabular's and Spark's among them."""

    def segments(self, file: InputFile, segment_bytes: int) -> list[Segment]:
        """Cut a file between row groups into pieces of about that size."""
        with open_view(self._inputs, file) as view:
            metadata = view.parquet.metadata
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
        """Yield the segment's rows in order."""
        file, line = segment.file, 0
        with open_view(self._inputs, file) as view:
            if lacking := [name for name in self._parser.columns if name not in view.names]:
                raise DataError(f"{file.uri}: has no column " + ", ".join(map(repr, lacking)),
                                nearest(lacking[0], view.names) + " Every file has the columns of the first one")
            groups = range(segment.start, segment.stop)
            try:
                batch_rows = self._batch_rows(view, groups, chunk_bytes)
            except UnicodeDecodeError as error:  # of the name of a column
                raise broken(file, error) from error
            try:
                for column, positions, num_rows in view.batches(self._parser.columns, groups, batch_rows):
                    location = Location(positions - positions[:1] + line, positions, num_rows)
                    self._refuse_other_encodings(column, positions, file, "row")
                    yield self._parser.parse(column, location, file.uri)
                    line += num_rows
            except (pa.ArrowException, OSError) as error:
                raise broken(file, error) from error

    def _batch_rows(self, view: FileView, groups: range, chunk_bytes: int) -> int:
        """Return how many rows come to `chunk_bytes` when they are unpacked."""
        metadata = view.parquet.metadata
        num_rows = max(1, sum(metadata.row_group(i).num_rows for i in groups))
        wanted, size = {view.stored.get(name) for name in self._parser.columns}, 0
        for group in groups:
            columns = metadata.row_group(group)
            for i in range(columns.num_columns):
                column = columns.column(i)
                if column.path_in_schema.split(".")[0] in wanted:
                    # Repeated words are stored once, and unpacked each time.
                    size += max(column.total_uncompressed_size, 8 * column.num_values)
        return min(max(int(chunk_bytes * num_rows / max(size, 1)), _MIN_BATCH_ROWS), _MAX_BATCH_ROWS)


def sample_parquet(
    inputs: Inputs, files: Sequence[InputFile], max_rows: int, missing: Collection[str]
) -> tuple[Column, ...]:
    """Return the columns of the first rows; of values that a whole file has, one for each file, several times."""
    for file in files:
        with open_view(inputs, file) as view:
            refuse_twins(file, view.parquet.schema_arrow.names)
            try:
                groups = range(view.parquet.num_row_groups)
                batch = next((column for column, positions, _ in view.batches(view.names, groups, max_rows)
                              if len(positions)), None)
            except (pa.ArrowException, OSError) as error:
                raise broken(file, error) from error
        if batch is not None:
            break
    else:
        raise DataError(f"{files[0].uri}: has columns, but no rows", "add at least one row below its header")
    of_files = [dict(one.constants) for one in files[:: -(-len(files) // max_rows)]]
    num_times = max(2, max_rows // len(of_files))
    arrays = {name: pa.array([one.get(name) for one in of_files] * num_times)
              for name in of_files[0] if name not in view.stored}
    return tuple(_sampled(name, normalize_array(arrays[name] if name in arrays else batch(name)), missing)
                 for name in view.names)


def sample_values(name: str, values: Sequence[Any], missing: Collection[str]) -> Column:
    """Return a column of JSON values."""
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):  # of several types
        array = json_array(values)
    return _sampled(name, array, missing)


def _sampled(name: str, array: Any, missing: Collection[str]) -> Column:
    kind, values = array.type, normalize_array(pc.list_flatten(array)) if is_list(array.type) else array
    if types.is_nested(values.type):
        return Column(name, (), len(array), type="nested")
    if types.is_timestamp(kind):  # Python has neither nanoseconds nor every zone
        utc = values.cast(pa.timestamp("s", kind.tz), safe=False).cast(pa.int64()).cast(pa.timestamp("s"))
        values = pc.binary_join_element_wise(utc.cast(pa.string()), "Z" if kind.tz else "", "")
    cells = [_text(value) for value in values.to_pylist()]
    if is_list(kind):
        return Column(name, tuple(cell for cell in cells if cell not in missing), len(array), "list")
    return Column.of(name, cells, missing, (
        "text" if is_text(kind) or types.is_null(kind) else "boolean" if types.is_boolean(kind)
        else "integer" if types.is_integer(kind) else "time" if types.is_temporal(kind) else "float"
    ))


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def _stored_bytes(group: Any) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


class JsonLinesReader(CsvReader):
    """Reads JSON Lines, plain or gzip; cut into rows as other text is. Numbers are read as the text they stand for, and
    a key that a line lacks is a missing value."""

    def _parse(self, text: bytes, columns: Sequence[str], file: InputFile) -> _Parsed:
        values = [json_line(line) for line in text.splitlines() if line]
        wrong = {row: "is not a JSON object in UTF-8" for row, value in enumerate(values) if value is None}
        found = [value for value in values if value is not None]
        return partial(json_column, found, parser=self._parser), len(found), wrong

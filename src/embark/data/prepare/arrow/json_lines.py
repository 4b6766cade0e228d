"""JSON Lines: one object a line. Numbers are read as the text they stand for, as those of any other text file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from embark.data.prepare.arrow.readers import CsvReader
from embark.data.prepare.arrow.row_parser import Location, RowParser
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.json_sample import json_cell, json_object
from embark.data.prepare.rows import BadRow, RawRows, Segment
from embark.data.prepare.schema import Schema
from embark.data.prepare.text_stream import BOM, Runaway, TextStream, cut_rows
from embark.spec.data import PrepareSpec

SplitCell = Callable[[str], list[str]]
_DELIMITER = "\0\0"  # Of fields: a line of JSON has none, and more than one character knows no quotes.
_WHY = "is not a JSON object"


class JsonLinesReader(CsvReader):
    """Plain or gzip; cut into segments as other text is."""

    def __init__(
        self, schema: Schema, prepare: PrepareSpec, inputs: Inputs, parser: RowParser | None = None
    ) -> None:
        super().__init__(replace(schema, delimiter=_DELIMITER, has_header=False), prepare, inputs, parser)

    def read(self, segment: Segment, chunk_bytes: int) -> Iterator[RawRows]:
        """The segment's rows in order. A key that a line lacks is a missing value."""
        stream = TextStream(self._inputs, segment.file, segment.start, segment.stop, chunk_bytes)
        line = read_bytes = 0
        for cut in cut_rows(stream.pieces, self._delimiter, has_quotes=False, first_byte=segment.start):
            num_lines, line = cut.stop_line - line, cut.stop_line
            new_bytes, read_bytes = stream.tell() - read_bytes, stream.tell()
            found: list[dict[str, Any]] = []
            kept: list[int] = []
            bad = [BadRow(cut.line, cut.why)] if isinstance(cut, Runaway) else []
            if not isinstance(cut, Runaway):
                ends = [*(cut.starts[1:] - cut.starts[0]), len(cut.text)]
                for row in np.flatnonzero(~cut.is_blank):
                    text = cut.text[cut.starts[row] - cut.starts[0] : ends[row]].removeprefix(BOM)
                    value = json_object(text)
                    if value is None:
                        bad.append(BadRow(int(cut.lines[row]), _WHY))
                    else:
                        found.append(value)
                        kept.append(int(row))
            none = np.zeros(0, np.int64)
            lines, starts = (none, none) if isinstance(cut, Runaway) else (cut.lines[kept], cut.starts[kept])
            location = Location(lines, starts, num_lines, new_bytes, bad)
            cells = partial(json_column, found, split=self._parser.split_cell)
            yield self._parser.parse(cells, location, segment.file.uri)


def json_column(rows: Sequence[Mapping[str, Any]], name: str, split: SplitCell | None = None) -> Any:
    """The cells of a column as text, or as lists of text."""
    return json_array([row.get(name) for row in rows], split)


def json_array(values: Sequence[Any], split: SplitCell | None = None) -> Any:
    """JSON values as text, or as lists of text; beside arrays, `split` gives the values of a text."""
    if not any(isinstance(value, list) for value in values):
        return pa.array([json_cell(value) for value in values], pa.string())
    lists = [value if isinstance(value, list) else [] if value is None else
             split(value) if split and isinstance(value, str) else [value] for value in values]
    return pa.array([[json_cell(one) for one in value] for value in lists], pa.list_(pa.string()))

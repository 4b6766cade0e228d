"""Raw rows that come after the data was prepared, with its ids and its normalisation; nothing is fitted again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from embark.data.id_maps import PreparedWith
from embark.data.prepare.inputs import InputFile, Inputs, open_inputs
from embark.data.prepare.rows import BadRows, SegmentCounts
from embark.data.prepare.sampling import take_sample
from embark.data.prepare.schema import Schema
from embark.data.prepare.tasks import open_reader
from embark.data.prepared import Manifest, PartWriter, Split
from embark.errors import DataError, nearest
from embark.spec.data import PrepareSpec

_CHUNK_BYTES = 8 << 20
_SPLIT: Split = "validation"


def write_later_rows(before: PreparedWith, path: str, out: Path) -> tuple[Manifest, BadRows]:
    """All rows of the raw files at `path`, as parts of one split below `out`, and how many could not be read."""
    inputs, files = open_inputs(path)
    schema = schema_in(before.schema.without_split(), before.prepare, inputs, files)
    layout, encoder = before.manifest.layout, before.row_encoder()
    reader, writer = open_reader(schema, before.prepare, inputs), PartWriter(out, f"{_SPLIT}/000000", layout)
    records = []
    for file in files:
        counts = SegmentCounts()
        for segment in reader.segments(file, 1 << 62):
            for raw in reader.read(segment, _CHUNK_BYTES):
                counts.add(raw)
                writer.add(encoder.encode(raw))
        records.append([counts.to_json()])
    bad = BadRows.collect(files, records)
    bad.check(before.prepare.max_bad_share)
    return Manifest(layout, {_SPLIT: tuple(writer.close())}, schema.label), bad


def schema_in(known: Schema, prepare: PrepareSpec, inputs: Inputs, files: Sequence[InputFile]) -> Schema:
    """The roles of the columns as they were, in the format that these files have."""
    wanted = {known.label, *(label.name for label in known.labels), *known.dense,
              *(column.source for column in known.sparse), *(time.name for time in known.times)} - {""}
    if known.format == "csv" and known.columns and not known.has_header and not prepare.delimiter:
        prepare = prepare.model_copy(update={"delimiter": known.delimiter})
    sample = take_sample(prepare, wanted, inputs, files)
    columns = tuple(column.name for column in sample.columns)
    if known.label and known.label not in columns:
        raise DataError(f"{files[0].uri}: has no column {known.label!r}, the label of the data that the run was "
                        "trained on; without labels nothing can be evaluated",
                        fix=f"{nearest(known.label, columns)} Add the column, or rename the one that holds the label")
    if lacking := sorted(wanted.difference(columns)):
        raise DataError(f"{files[0].uri}: has no column " + ", ".join(map(repr, lacking)) + ", which the model takes",
                        fix=nearest(lacking[0], columns))
    return replace(known, format=sample.format, delimiter=sample.delimiter, has_header=sample.has_header,
                   columns=columns)

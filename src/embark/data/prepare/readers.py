"""The reader for each format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embark.data.prepare.pieces import Inputs, Reader, Schema

if TYPE_CHECKING:
    from embark.spec.run import RunSpec


def reader_for(schema: Schema, spec: RunSpec, inputs: Inputs) -> Reader:
    """By the schema's format; pyarrow is imported only for what needs it."""
    if schema.format == "criteo":
        from embark.data.prepare.criteo_text import CriteoReader

        return CriteoReader(schema, spec, inputs)
    if schema.format == "csv":
        from embark.data.prepare.csv_text import CsvReader

        return CsvReader(schema, spec, inputs)
    from embark.data.prepare.parquet import ParquetReader

    return ParquetReader(schema, spec, inputs)

"""Parquet files of tables: one a table, in row groups, complete or not there at all."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from embark.errors import UserError, nearest
from embark.store.atomic_file import scratch_for
from embark.values import frozen

ROW_GROUP_BYTES = 64 << 20


@frozen
class TableFile:
    """One Parquet file."""

    table: str
    column: str  # The column of the user's data.
    path: str
    num_rows: int
    num_values: int  # Rows whose value is known.
    note: str = ""  # Why values are not known.


@frozen
class ParquetFiles:
    """The files that were written, and their source."""

    source: str
    tables: tuple[TableFile, ...]
    step: int | None = None  # The step of the checkpoint.


def choose_tables(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the wanted tables, or all."""
    for name in wanted:
        if name not in names:
            raise UserError(f"{name}: no such table", nearest(name, list(names)))
    return [name for name in names if not wanted or name in wanted]


def targets(to: Path, tables: Sequence[str], *, force: bool) -> dict[str, Path]:
    """Return the file of each table; one that exists is refused before any is written."""
    if to.exists() and not to.is_dir():
        raise UserError(f"{to}: is a file, and Parquet files go into a folder", "name a folder")
    files = {table: to / f"{table}.parquet" for table in tables}
    there = [str(path) for path in files.values() if path.exists()]
    if there and not force:
        raise UserError(f"{there[0]}: exists" + (f", and {len(there) - 1} more" if len(there) > 1 else ""),
                        "--force replaces them, or name another folder")
    return files


def write_parquet(path: Path, batches: Iterator[Any], about: dict[str, str]) -> None:
    """Write a row group for each batch; the file appears when it is complete."""
    first = next(batches)
    schema = first.schema.with_metadata({f"embark.{key}": value for key, value in about.items()})
    try:
        with scratch_for(path) as scratch, pq.ParquetWriter(scratch, schema) as writer:
            writer.write_batch(first.replace_schema_metadata(schema.metadata))
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}",
                        "name a folder that can be written, on a disk with space") from None

"""The split of each row of the raw files that data was prepared of, as Parquet: to compare with other models on the
same rows."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embark.data.prepare.inputs import Inputs
from embark.data.prepare.later_rows import PreparedWith
from embark.data.prepare.splits import assign_splits
from embark.data.prepare.tasks import open_reader
from embark.data.prepared import SPLITS, Manifest
from embark.data.prepared.cache import local_folder, read_manifest
from embark.data.prepared.manifest import SEQUENCES, TIME_SPLIT
from embark.errors import DataError, UserError
from embark.features.arrow.row_parser import Location, RowParser
from embark.features.rows import RawRows
from embark.features.values import micros_of
from embark.spec import DataSpec, moment
from .id_values import data_of
from .parquet_files import ParquetFiles, TableFile, write_parquet

_CHUNK_BYTES = 8 << 20


def write_splits(source: str, to: str | Path, *, force: bool = False) -> ParquetFiles:
    """Write `file`, `row` (from 0 in the file, without a header) and `split` of each row that the prepared data at
    `source` was made of; a row that could not be read has no split."""
    path, target = data_of(source), Path(to)
    if target.exists() and not force:
        raise UserError(f"{target}: exists", "--force replaces it, or name another file")
    manifest = read_manifest(path)
    before = PreparedWith.of(path, manifest)
    if before is None:
        raise DataError(f"{path}: was made, not prepared of files with rows",
                        "name what `embark data prepare` wrote")
    if SEQUENCES in manifest.settings:
        raise DataError(f"{path}: is of a log, which is split by user and order, not by row",
                        "docs/guides/sequences.md says which items of a user are held out")
    nums: list[int] = []

    def counted() -> Iterator[pa.RecordBatch]:
        for batch in _batches(before, manifest):
            nums.append(batch.num_rows)
            yield batch

    write_parquet(target, counted(), {"data": path})
    table = TableFile("splits", "", str(target), sum(nums), sum(nums))
    return ParquetFiles(path, (table,))


def _batches(before: PreparedWith, manifest: Manifest) -> Iterator[pa.RecordBatch]:
    settings, inputs, folder = manifest.settings, Inputs(), local_folder(before.path)
    data = DataSpec(kind="prepared", path=before.path, seed=settings["seed"], eval_fraction=settings["eval_fraction"],
                    time_column=before.schema.time_column, prepare=before.prepare)
    recorded = settings.get(TIME_SPLIT, {})
    starts = tuple(micros_of(moment(recorded[name])) for name in SPLITS[1:] if name in recorded)
    schema = before.schema
    if schema.format == "criteo":
        schema = replace(schema, format="csv", delimiter="\t", has_header=False)
    for index, source in enumerate(manifest.sources):
        uri = str(source["uri"])
        (file,) = inputs.find(uri if "://" in uri else os.path.normpath(os.path.join(folder or "", uri)))
        if file.size_bytes != source["bytes"]:
            raise DataError(f"{file.uri}: has {file.size_bytes:,} bytes, and had {source['bytes']:,} when the data was "
                            "prepared", "prepare the data again")
        parser, first = _Numbering(schema, before.prepare), 0
        reader = open_reader(schema, before.prepare, inputs, parser)
        for segment in reader.segments(file, 1 << 62):
            for raw in reader.read(segment, _CHUNK_BYTES):
                names = np.full(parser.num_rows, None, object)
                # Patterns of a split by file match the name that the file had then.
                split = assign_splits(data, index, replace(segment, file=replace(file, uri=uri)), raw, starts)
                names[parser.numbers_of(raw)] = np.array(SPLITS, object)[split]
                rows = np.arange(first, first + parser.num_rows)
                first += parser.num_rows
                yield pa.RecordBatch.from_pydict({"file": pa.array([uri] * len(rows)).dictionary_encode(),
                                                  "row": rows, "split": pa.array(names, pa.string())})


class _Numbering(RowParser):
    """Keeps the position of each row of a portion, and its number among them and the bad ones."""

    num_rows = 0

    def parse(self, column: Callable[[str], Any], location: Location, where: str) -> RawRows:
        lines = np.sort(np.concatenate([location.lines, [bad.line for bad in location.bad]]).astype(np.int64))
        self.num_rows, self._positions = len(lines), location.positions
        self._numbers = np.searchsorted(lines, location.lines)
        return super().parse(column, location, where)

    def numbers_of(self, raw: RawRows) -> Any:
        """Return the numbers of the rows that could be read."""
        return self._numbers[np.searchsorted(self._positions, raw.positions)]

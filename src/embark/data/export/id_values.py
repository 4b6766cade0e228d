"""The values behind the ids of prepared data, as the user's files have them; written as Parquet, one file a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embark.data import LOOK
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.later_rows import PreparedWith
from embark.data.prepare.tasks import open_reader
from embark.data.prepared import MANIFEST, Manifest
from embark.data.prepared.cache import find_manifest, local_folder, read_manifest
from embark.data.prepared.manifest import SHARED
from embark.data.prepared.parts import iter_blocks
from embark.errors import DataError, EmbarkError
from embark.features.arrays import Array, Int64s
from embark.features.arrow.cells import as_utf8, hash_bytes
from embark.features.arrow.row_parser import Location, RowParser
from embark.features.encoding import IdMap, look_up
from embark.features.rows import RawRows
from embark.features.schema import TIME_ROWS
from embark.store.checkpoint_inspect import find_trained
from embark.values import frozen
from .parquet_files import (
    ROW_GROUP_BYTES,
    ParquetFiles,
    TableFile,
    choose_tables,
    targets,
    write_parquet,
)

_CHUNK_BYTES = 8 << 20
_WIDE = (1 << 64) - (1 << 53)  # Keys from here on are rather numbers a little below 0.


def write_id_maps(
    source: str, to: str | Path, *, tables: Sequence[str] = (), force: bool = False
) -> ParquetFiles:
    """Write `value`, `id` and `count` (in training rows) of each table of prepared data, or of a run's data, into the
    folder `to`. Id 0 stands for missing, rare and unseen values."""
    path = data_of(source)
    manifest = read_manifest(path)
    names = choose_tables([feature.name for feature in manifest.id_features], tables)
    files = targets(Path(to), names, force=force)
    values = read_values(path, manifest, names)
    folder = local_folder(path)
    found = []
    for name in names:
        one = values[name]
        counts = None if folder is None else _counts(folder, manifest, name)
        ids = np.arange(one.num_rows) if one.has_no_map else np.append(0, np.sort(one.ids))

        def batches(one: TableValues = one, ids: Array = ids, counts: Any = counts) -> Iterator[pa.RecordBatch]:
            for some in np.array_split(ids, max(1, len(ids) * 32 // ROW_GROUP_BYTES)):
                columns = {"value": one.take(some)} if one.values is not None else {}
                columns["id"] = pa.array(some.astype(np.int64))
                if counts is not None:
                    columns["count"] = pa.array(counts[some])
                yield pa.RecordBatch.from_pydict(columns)

        write_parquet(files[name], batches(), {"data": path, "table": name})
        found.append(one.file(files[name], len(ids)))
    return ParquetFiles(path, tuple(found))


@frozen
class TableValues:
    """The values that the ids of a table stand for."""

    table: str
    column: str
    num_rows: int  # Rows of the table.
    ids: Array  # Ids that have an entry in the map.
    values: Any  # An Arrow array [num_rows] with nulls; None where none is known.
    note: str = ""
    has_no_map: bool = False

    def take(self, ids: Array) -> Any:
        """Return the values of these rows; the table may have more of them than the data has ids."""
        return self.values.take(pa.array(ids, mask=ids >= len(self.values)))

    def file(self, path: Path, num_rows: int) -> TableFile:
        num_values = 0 if self.values is None else len(self.values) - self.values.null_count
        return TableFile(self.table, self.column, str(path), num_rows, num_values, self.note)


def read_values(path: str, manifest: Manifest, tables: Sequence[str]) -> dict[str, TableValues]:
    """Return the values by table. Numbers are in the map; words are hashes there, so they are looked for in the raw
    files."""
    before = PreparedWith.of(path, manifest)
    features = {feature.name: feature for feature in manifest.id_features}
    if before is None:
        return {name: no_values(name, features[name].rows, "synthetic ids stand for nothing") for name in tables}
    maps = {name: before.id_map(features[name]) for name in tables}
    words = _Words(before, {name: one for name, one in maps.items() if one.keys is not None
                            and one.column.kind == "text"})
    words.read()
    return {name: _table_values(one, words) for name, one in maps.items()}


def no_values(table: str, num_rows: int, why: str, column: str = "") -> TableValues:
    """Describe a table whose values are not known."""
    return TableValues(table, column or table, num_rows, np.empty(0, np.int64), None, f"ids only: {why}",
                       has_no_map=True)


def _table_values(one: IdMap, words: _Words) -> TableValues:
    column, rows = one.column, one.feature.rows
    if column.kind in TIME_ROWS:  # the hours are 0 to 23, the weekdays 1 to 7, and id 0 is for no time
        ids = np.arange(1, TIME_ROWS[column.kind])
        return TableValues(column.name, column.source, rows, ids,
                           _by_id(pa.array(ids - (column.kind == "hour")), ids, rows), "")
    if column.kind == "bucket":
        edges = ["", *map(repr, column.buckets[0]), ""]
        shown = [f"{low} to {high}".strip() for low, high in pairwise(edges)]
        return TableValues(column.name, column.parts[0], rows, ids := np.arange(1, len(edges)),
                           _by_id(pa.array(shown), ids, rows), "")
    if one.keys is None or one.ids is None:
        return no_values(column.name, rows, "made by hash, so that several values share an id and no map is kept",
                         column.source)
    ids = np.asarray(one.ids, np.int64)
    if column.kind == "text":
        values, note = words.values_of(column.name, rows)
        return TableValues(column.name, column.source, rows, ids, values, note)
    keys = np.asarray(one.keys, np.uint64)
    if column.kind == "hex":
        digits = 8 if not len(keys) or int(keys.max()) < 1 << 32 else 16
        known = pa.array([f"{key:0{digits}x}" for key in keys.tolist()], pa.string())
    else:
        known = pa.array(keys.view(np.int64))
    is_wide = column.kind == "integer" and bool(((keys >= np.uint64(1 << 63)) & (keys < np.uint64(_WIDE))).any())
    note = "numbers of 2^63 and more, if it has any, are shown less 2^64" if is_wide else ""
    return TableValues(column.name, column.source, rows, ids, _by_id(known, ids, rows), note)


def _by_id(values: Any, ids: Array, num_rows: int) -> Any:
    """Return [num_rows] values, null where there is no id."""
    indexes = np.full(num_rows, -1, np.int64)
    indexes[ids] = np.arange(len(ids))
    return values.take(pa.array(indexes, mask=indexes < 0))


class _Words(RowParser):
    """Replaces the parser of rows: collects each word that has an id, once."""

    def __init__(self, before: PreparedWith, maps: dict[str, IdMap]) -> None:
        super().__init__(before.schema, before.prepare)
        self._before, self._maps = before, maps
        shared = before.manifest.settings.get(SHARED, {})
        self._sharing = {name: [one for one in before.schema.sparse
                                if shared.get(one.name, one.name) == shared.get(name, name)] for name in maps}
        self._is_found = {name: np.zeros(one.feature.rows, np.bool_) for name, one in maps.items()}
        self._found: dict[str, list[tuple[Array, Any]]] = {name: [] for name in maps}
        self._why = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column.source for columns in self._sharing.values() for column in columns))

    def read(self) -> None:
        """Read the raw files until every id has its word."""
        folder, inputs = local_folder(self._before.path), Inputs()
        reader = open_reader(self._before.schema, self._before.prepare, inputs, self)
        for source in self._before.manifest.sources if self._maps else ():
            uri = str(source.get("uri", ""))
            if "://" not in uri:
                uri = os.path.normpath(os.path.join(folder or "", uri))
            try:
                (file,) = inputs.find(uri)
                for segment in reader.segments(file, 1 << 62):
                    for _ in reader.read(segment, _CHUNK_BYTES):
                        if self._has_all():
                            return
            except (EmbarkError, ValueError) as error:
                self._why = getattr(error, "what", f"{uri}: cannot be read")

    def parse(self, column: Callable[[str], Any], location: Location, where: str) -> RawRows:
        for name, one in self._maps.items():
            assert one.keys is not None
            for sharing in self._sharing[name]:
                words = self._cells.words(column(sharing.source), sharing)
                ids = look_up(hash_bytes(words), one.keys, np.asarray(one.ids, np.int64))
                is_new = (ids > 0) & ~self._is_found[name][ids]
                if is_new.any():
                    self._is_found[name][ids[is_new]] = True
                    self._found[name].append((ids[is_new], words.filter(pa.array(is_new))))
        none = np.zeros(0, np.int64)
        return RawRows(none, none.astype(np.float32), np.zeros((0, 0), np.float32), (), (), ())

    def values_of(self, name: str, num_rows: int) -> tuple[Any, str]:
        """Return [num_rows] values, or None, and a note if some are missing."""
        one, found = self._maps[name], self._found[name]
        assert one.ids is not None
        num_lacking = len(one.ids) - sum(len(ids) for ids, _ in found)
        note = ""
        if num_lacking:
            why = f" ({self._why})" if self._why else ""
            note = f"{num_lacking:,} of {len(one.ids):,} values were not found in the raw files that were prepared{why}"
        if not found:
            return None, f"ids only: {note}" if note else ""
        words = pa.concat_arrays([as_utf8(words) for _, words in found])
        return _by_id(words, np.concatenate([ids for ids, _ in found]), num_rows), note

    def _has_all(self) -> bool:
        return all(sum(len(ids) for ids, _ in self._found[name]) == len(one.keys if one.keys is not None else ())
                   for name, one in self._maps.items())


def _counts(folder: Path, manifest: Manifest, table: str) -> Int64s:
    """Count how often the training rows have each id."""
    index = [feature.name for feature in manifest.id_features].index(table)
    counts = np.zeros(manifest.id_features[index].rows, np.int64)
    for block in iter_blocks(folder, manifest, "train"):
        np.add.at(counts, block.ids(index).reshape(-1).astype(np.intp), 1)
    return counts


def data_of(source: str) -> str:
    """Return the path of the prepared data at `source`, or of the data of the run with that name."""
    if (Path(source) / MANIFEST).exists() or ("://" in source and find_manifest(source, LOOK)[0] is not None):
        return source
    spec = find_trained(source).spec
    if spec.data.kind != "prepared":
        raise DataError(f"{source}: was trained on data.kind = {spec.data.kind!r}, whose ids have no map",
                        "the ids are those of the data itself")
    return spec.data.path

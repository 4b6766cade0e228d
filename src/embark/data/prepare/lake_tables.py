"""Delta and Iceberg tables: the Parquet files of one version, and how each is read as rows of the table. The libraries
of the formats read logs, snapshots and deletes; pyarrow reads the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol
from urllib.parse import unquote

import embark.features.arrow  # noqa: F401 - says so if pyarrow is missing

# isort: split
import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetFile

from embark.data.prepare.inputs import InputFile, Inputs, TableVersion
from embark.data.prepare.parquet_view import FileView, open_parquet
from embark.errors import DataError, EmbarkError, MissingPackage
from embark.features.arrays import Int64s
from embark.formatting import redact, shortlist, to_one_line

_DELTA_FEATURES = frozenset({
    "columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
    "vacuumProtocolCheck", "variantType", "variantType-preview"})
"""What tables may use; columns of the type variant are structures, which are not read."""
_FIELD_ID = b"PARQUET:field_id"


class LakeTable(Protocol):
    """One version of a table."""

    version: TableVersion
    files: dict[str, InputFile]  # By their paths.

    def partition_of(self, path: str) -> Mapping[str, Any]:
        """Return values that all rows of a file have, if they are known without a look into it."""

    def view(self, inputs: Inputs, path: str) -> FileView: ...


def open_table(inputs: Inputs, uri: str, said: str) -> LakeTable:
    """Open the table at `uri` in the version that `said` names, such as `version=3`, or the newest."""
    options = dict(one.partition("=")[::2] for one in said.split(",")) if said else {}
    known = {"version"} if not is_iceberg(uri) else {"snapshot", "schema"} if "snapshot" in options else {"ref"}
    wrong = {*options} - known or {name for name, value in options.items() if name != "ref" and not value.isdigit()}
    if wrong:
        raise DataError(f"{uri}#{said}: names no version of the table",
                        fix="#snapshot=NUMBER, or #ref=NAME for a branch or tag" if is_iceberg(uri) else
                        "#version=NUMBER; an Iceberg table is named by its catalog or metadata file")
    with _explained(uri):
        where = inputs.local_path(uri) or uri
        return _Iceberg(uri, where, options) if is_iceberg(uri) else _Delta(uri, where, options)


def is_iceberg(uri: str) -> bool:
    """Tell whether this names a table of a catalog, or a metadata file."""
    return uri.startswith("iceberg://") or uri.endswith(".metadata.json")


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Explain why the library of a format does not read a table. Their errors have no common class."""
    try:
        yield
    except EmbarkError:
        raise
    except ImportError as error:
        kind = "iceberg" if is_iceberg(uri) else "delta"
        raise MissingPackage(f"{uri}: needs {error.name}, which reads {kind.title()} tables and is not installed",
                             fix=f"pip install 'embark-rec[{kind}]'") from None
    except Exception as error:
        raise DataError(f"{uri}: the table cannot be read: {redact(to_one_line(error))[:300] or type(error).__name__}",
                        fix="check its name, the version and the rights to read it" + (
                            ", and the catalog in ~/.pyiceberg.yaml or PYICEBERG_CATALOG__NAME__URI"
                            if uri.startswith("iceberg://") else "")) from error


def _input_files(uri: str, version: TableVersion, sizes: Mapping[str, int]) -> dict[str, InputFile]:
    if not sizes:
        raise DataError(f"{uri}: the {version} has no rows", fix="name another version, or write rows to it")
    return {path: InputFile(f"{uri}#{version.version}:{path}", sizes[path], table=version) for path in sorted(sizes)}


class _Delta:
    """A version of a Delta table. Rows of its deletion vectors are left out, and columns go by the names that its
    column mapping gives them."""

    def __init__(self, uri: str, where: str, options: Mapping[str, str]) -> None:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        version = int(options["version"]) if options else None
        opened = partial(DeltaTable, where, storage_options={"allow_http": "true"} if "://" in where else None)
        try:
            table = opened(version=version)
        except (DeltaError, OSError):
            newest = None
            with suppress(DeltaError, OSError):
                newest = opened().version() if version is not None else None
            if newest is None:
                raise
            raise DataError(f"{uri}: the Delta table has no version {version} that can be read",
                            fix=f"its newest is #version={newest}; older ones may have been cleaned up") from None
        protocol = table.protocol()
        features = protocol.reader_features or ["columnMapping"][: protocol.min_reader_version - 1]
        if unknown := sorted({*features} - _DELTA_FEATURES):
            raise DataError(f"{uri}: the Delta table uses {shortlist(unknown, 5)}, which is not read",
                            fix="write a copy of it without, or export it as Parquet")
        about, self._uri = table.metadata(), uri
        self._mapping = about.configuration.get("delta.columnMapping.mode") if "columnMapping" in features else ""
        name = uri.rstrip("/").rpartition("/")[2]
        self.version = TableVersion("Delta", name, str(about.id), f"version={table.version()}")
        self._types = {one.name: one.type for one in pa.schema(table.schema().to_arrow())}
        self._metadata = {one.name: one.metadata for one in table.schema().fields}
        actions = pa.table(table.get_add_actions(flatten=True)).to_pydict() if table.count() else {"path": []}
        if foreign := next((path for path in actions["path"] if "://" in path or path.startswith("/")), ""):
            raise DataError(f"{uri}: is a shallow clone, with files elsewhere: {foreign}", fix="name the original")
        self.files = _input_files(uri, self.version, dict(zip(map(unquote, actions["path"]), actions["size_bytes"],
                                                              strict=True)))
        self._partitions = {
            unquote(path): {name: pa.scalar(actions[f"partition.{name}"][row], self._types[name])
                            for name in about.partition_columns} for row, path in enumerate(actions["path"])}
        self._deleted: dict[str, Int64s] = {}
        if "deletionVectors" in features:
            for batch in table.deletion_vectors():
                rows = pa.record_batch(batch).to_pydict()
                for at, mask in zip(rows["filepath"], rows["selection_vector"], strict=True):
                    self._deleted[unquote(at.removeprefix(table.table_uri))] = np.flatnonzero(~np.array(mask))

    def partition_of(self, path: str) -> Mapping[str, Any]:
        return self._partitions[path]

    def view(self, inputs: Inputs, path: str) -> FileView:
        plain = f"{self._uri.rstrip('/')}/{path}"
        parquet = open_parquet(inputs, InputFile(plain, self.files[path].size_bytes))
        has, constants = parquet.schema_arrow, self._partitions[path]
        ids = {(one.metadata or {}).get(_FIELD_ID, b"").decode(): one.name for one in has}
        stored: dict[str, str] = {}
        for name in self._types:
            said = self._metadata[name]
            found = ids.get(str(said.get("delta.columnMapping.id"))) if self._mapping == "id" else \
                said.get("delta.columnMapping.physicalName", name) if self._mapping == "name" else name
            if found and found in has.names and name not in constants:
                stored[name] = found
        if not stored and len(constants) < len(self._types):
            raise DataError(f"{plain}: has none of the table's columns", fix="check the table with what wrote it")
        deleted = self._deleted.get(path)
        return FileView(parquet, stored, self._types, constants, None if deleted is None else lambda: deleted)


class _Iceberg:
    """A snapshot of an Iceberg table. Columns go by their field ids; rows of delete files and deletion vectors are left
    out."""

    def __init__(self, uri: str, where: str, options: Mapping[str, str]) -> None:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.io.pyarrow import schema_to_pyarrow
        from pyiceberg.table import StaticTable

        if uri.startswith("iceberg://"):
            catalog, _, name = uri.removeprefix("iceberg://").partition("/")
            self._table = load_catalog(catalog).load_table(name)
        else:
            self._table = StaticTable.from_metadata(where)
            name = self._table.location().rstrip("/").rpartition("/")[2]
        table = self._table
        if wanted := options.get("snapshot"):
            snapshot = table.snapshot_by_id(int(wanted))
        else:
            snapshot = table.snapshot_by_name(options["ref"]) if "ref" in options else table.current_snapshot()
        if snapshot is None:
            known = [f"#snapshot={one.snapshot_id}" for one in table.snapshots()[::-1]]
            raise DataError(f"{uri}: the Iceberg table has no " + ", ".join(map("=".join, options.items()) or ["rows"]),
                            fix="it has " + shortlist([*known, *(f"#ref={ref}" for ref in table.refs())], 6)
                            if known else "write rows to it")
        own = table.metadata.current_schema_id if snapshot.schema_id is None else snapshot.schema_id
        schema_id = int(options.get("schema", own if options else table.metadata.current_schema_id))
        self._schema = table.schemas()[schema_id]
        self.version = TableVersion("Iceberg", name, str(table.metadata.table_uuid), f"snapshot={snapshot.snapshot_id}"
                                    + (f",schema={schema_id}" if schema_id != own else ""))
        self._types = {one.name: one.type for one in schema_to_pyarrow(self._schema, include_field_ids=False)}
        tasks = list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files())
        if other := next((one.file for one in tasks if one.file.file_format.name != "PARQUET"), None):
            raise DataError(f"{other.file_path}: is a file of {other.file_format.name}, which is not read",
                            fix="rewrite the table's files as Parquet")
        folder = f"{table.location().rstrip('/')}/"
        self._tasks = {one.file.file_path.removeprefix(folder).rpartition("://")[2]: one for one in tasks}
        self.files = _input_files(uri, self.version, {
            path: one.file.file_size_in_bytes for path, one in self._tasks.items()})

    def partition_of(self, path: str) -> Mapping[str, Any]:
        return {}  # They are in most files too, and if not, a look into the file tells.

    def view(self, inputs: Inputs, path: str) -> FileView:
        with _explained(path):
            from pyiceberg.io.pyarrow import pyarrow_to_schema
            from pyiceberg.transforms import IdentityTransform

            task, table = self._tasks[path], self._table
            parquet = ParquetFile(table.io.new_input(task.file.file_path).open(), pre_buffer=False)
            fields = pyarrow_to_schema(parquet.schema_arrow, table.name_mapping(), downcast_ns_timestamp_to_us=True)
            names = {one.field_id: one.name for one in fields.fields}
            values = {part.source_id: task.file.partition[position]
                      for position, part in enumerate(table.specs()[task.file.spec_id].fields)
                      if isinstance(part.transform, IdentityTransform)}
            stored, constants = {}, {}
            for one in self._schema.fields:
                value = values.get(one.field_id)
                value = one.initial_default if value is None else value
                if one.field_id in names:
                    stored[one.name] = names[one.field_id]
                elif value is not None:
                    constants[one.name] = pa.scalar(value, self._types[one.name])
                elif one.required:
                    raise DataError(f"{path}: has no column {one.name!r}, which the table requires",
                                    fix="rewrite the file by the engine that wrote it")
            return FileView(parquet, stored, self._types, constants,
                            partial(self._deleted, task) if task.delete_files else None)

    def _deleted(self, task: Any) -> Int64s:
        """Read the positions that delete files, or deletion vectors, have for a data file."""
        from pyiceberg.io.pyarrow import _read_deletes

        with _explained(task.file.file_path):
            found = [_read_deletes(self._table.io, one).get(task.file.file_path) for one in task.delete_files]
            return np.unique(np.concatenate([np.zeros(0, np.int64), *(
                one.to_numpy().astype(np.int64) for one in found if one is not None)]))

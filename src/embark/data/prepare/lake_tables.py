"""Delta and Iceberg tables: the Parquet files of one version, and how each is read as rows of the table. The libraries
of the formats read logs, snapshots and deletes; pyarrow reads the files."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from urllib.parse import unquote

import embark.features.arrow  # noqa: F401 - says so if pyarrow is missing

# isort: split
import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetFile

from embark.errors import DataError, EmbarkError, MissingPackage
from embark.features.arrays import Int64s
from embark.formatting import redact, shortlist, to_one_line
from embark.values import JsonDict
from .inputs import InputFile, Inputs, TableVersion, is_iceberg
from .parquet_view import FileView, open_parquet

_DELTA_FEATURES = frozenset({
    "columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
    "vacuumProtocolCheck", "variantType", "variantType-preview"})  # Variants are structures, which are not read.
_S3_SETTINGS = {"s3.endpoint": "AWS_ENDPOINT_URL", "s3.region": "AWS_REGION"}  # Which pyarrow does not look for.


class LakeTable(Protocol):
    """One version of a table."""

    version: TableVersion
    files: dict[str, InputFile]  # By their URIs.

    def view(self, inputs: Inputs, file: InputFile) -> FileView: ...


def open_table(inputs: Inputs, uri: str, said: str) -> LakeTable:
    """Open the table at `uri` in the version that `said` names, such as `version=3`, or the newest."""
    options = dict(one.partition("=")[::2] for one in said.split(",") if one)
    if said and is_iceberg(uri) == ("version" in options):
        raise DataError(f"{uri}#{said}: does not name a version of this table",
                        "#version=NUMBER for Delta; for Iceberg #snapshot=NUMBER or #ref=NAME behind "
                            "iceberg://CATALOG/NAMESPACE.TABLE or a metadata file")
    where = inputs.local_path(uri) or uri
    with _explained(uri):
        return _Iceberg(uri, where, options) if is_iceberg(uri) else _Delta(uri, where, options)


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
                             f"pip install 'embark-rec[{kind}]'") from None
    except Exception as error:
        raise DataError(f"{uri}: the table cannot be read: {redact(to_one_line(error))[:300]}",
                        "check its name, its version, your rights and, for iceberg://CATALOG, the catalog in "
                            "~/.pyiceberg.yaml or PYICEBERG_CATALOG__NAME__URI") from error


class _Delta:
    """A version of a Delta table. Rows of its deletion vectors are left out, and columns go by the names that its
    column mapping gives them."""

    def __init__(self, uri: str, where: str, options: Mapping[str, str]) -> None:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        opened = partial(DeltaTable, where, storage_options={"allow_http": "true"} if "://" in where else None)
        version = int(options["version"]) if options else None
        try:
            table = opened(version=version)
        except DeltaError:
            if version is None:
                raise
            raise DataError(f"{uri}: the Delta table has no version {version} that can be read",
                            f"its newest is #version={opened().version()}; old ones may have been cleaned up"
                            ) from None
        protocol, about = table.protocol(), table.metadata()
        features = protocol.reader_features or ["columnMapping"][: protocol.min_reader_version - 1]
        mapping = about.configuration.get("delta.columnMapping.mode") if "columnMapping" in features else None
        if unknown := [*({*features} - _DELTA_FEATURES), *(["columnMapping by id"] if mapping == "id" else [])]:
            raise DataError(f"{uri}: the Delta table uses {shortlist(unknown, 5)}, which is not read",
                            "write a copy of it without, or export it as Parquet")
        name = uri.rpartition("/")[2]
        self.version = TableVersion("Delta", name, str(about.id), f"version={table.version()}")
        self._types = {one.name: one.type for one in pa.schema(table.schema().to_arrow())}
        self._names = {one.name: one.metadata["delta.columnMapping.physicalName"] if mapping else one.name
                       for one in table.schema().fields}
        self.files: dict[str, InputFile] = {}
        self._paths: dict[str, str] = {}  # By URI, as the log has them.
        for file in sorted(pa.table(table.get_add_actions(flatten=True)).to_pylist(), key=lambda one: str(one["path"])):
            key = f"{uri}#{self.version.version}:{unquote(file['path'])}"
            self._paths[key] = file["path"]
            self.files[key] = InputFile(key, file["size_bytes"], table=self.version, constants=tuple(
                (one, pa.scalar(file[f"partition.{one}"], self._types[one])) for one in about.partition_columns))
        self._uri, self._deleted = uri, dict[str, Int64s]()
        for batch in table.deletion_vectors() if "deletionVectors" in features else ():
            for one in pa.record_batch(batch).to_pylist():
                self._deleted[one["filepath"].removeprefix(table.table_uri)] = np.flatnonzero(
                    ~np.array(one["selection_vector"]))

    def view(self, inputs: Inputs, file: InputFile) -> FileView:
        path, constants = self._paths[file.uri], dict(file.constants)
        plain = f"{self._uri}/{unquote(path)}"
        parquet = open_parquet(inputs, InputFile(plain, file.size_bytes))
        stored = {name: found for name, found in self._names.items()
                  if found in parquet.schema_arrow.names and name not in constants}
        if not stored and len(constants) < len(self._types):
            raise DataError(f"{plain}: has none of the table's columns", "check the table with what wrote it")
        deleted = self._deleted.get(path)
        return FileView(parquet, stored, self._types, constants, None if deleted is None else lambda: deleted)


class _Iceberg:
    """A snapshot of an Iceberg table. Columns go by their field ids; rows of delete files and deletion vectors are left
    out."""

    def __init__(self, uri: str, where: str, options: Mapping[str, str]) -> None:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.io.pyarrow import schema_to_pyarrow
        from pyiceberg.table import StaticTable

        catalog, _, name = uri.removeprefix("iceberg://").partition("/")
        self._table = table = load_catalog(catalog).load_table(name) if uri.startswith("iceberg://") else \
            StaticTable.from_metadata(where, {
                key: os.environ[name] for key, name in _S3_SETTINGS.items() if name in os.environ})
        snapshot = table.current_snapshot()
        if options:
            snapshot = table.snapshot_by_name(options["ref"]) if "ref" in options else \
                table.snapshot_by_id(int(options["snapshot"]))
        if snapshot is None:
            known = [*(f"#ref={ref}" for ref in table.refs()),
                     *(f"#snapshot={one.snapshot_id}" for one in table.snapshots()[::-1])]
            raise DataError(f"{uri}: the Iceberg table has no {'='.join(*options.items()) if options else 'rows'}",
                            f"it has {shortlist(known, 6)}" if known else "write rows to it")
        newest, number = table.metadata.current_schema_id, snapshot.snapshot_id
        own = newest if snapshot.schema_id is None else snapshot.schema_id
        schema_id = int(options.get("schema", own if options else newest))
        self._schema = table.schemas()[schema_id]
        location = table.location().rstrip("/")
        self.version = TableVersion("Iceberg", location.rpartition("/")[2], str(table.metadata.table_uuid),
                                    f"snapshot={number}" + (f",schema={schema_id}" if schema_id != own else ""))
        self._types = {one.name: one.type for one in schema_to_pyarrow(self._schema, include_field_ids=False)}
        self.files: dict[str, InputFile] = {}
        self._tasks: JsonDict = {}
        for task in sorted(table.scan(snapshot_id=number).plan_files(), key=lambda one: str(one.file.file_path)):
            path, kind = task.file.file_path, task.file.file_format.name
            if kind != "PARQUET":
                raise DataError(f"{path}: is a file of {kind}, which is not read", "rewrite the table as Parquet")
            key = f"{uri}#{self.version.version}:" + path.removeprefix(f"{location}/").rpartition("://")[2]
            self._tasks[key] = task
            self.files[key] = InputFile(key, task.file.file_size_in_bytes, table=self.version)

    def view(self, inputs: Inputs, file: InputFile) -> FileView:
        with _explained(file.uri):
            from pyiceberg.io.pyarrow import pyarrow_to_schema
            from pyiceberg.transforms import IdentityTransform

            task, table = self._tasks[file.uri], self._table
            parquet = ParquetFile(table.io.new_input(task.file.file_path).open(), pre_buffer=False)
            fields = pyarrow_to_schema(parquet.schema_arrow, table.name_mapping(), downcast_ns_timestamp_to_us=True)
            names = {one.field_id: one.name for one in fields.fields}
            values = {one.field_id: one.initial_default for one in self._schema.fields}
            values |= {part.source_id: value for part, value in zip(
                table.specs()[task.file.spec_id].fields, task.file.partition, strict=True)
                if isinstance(part.transform, IdentityTransform) and value is not None}
            stored, constants = {}, {}
            for one in self._schema.fields:
                if one.field_id in names:
                    stored[one.name] = names[one.field_id]
                elif one.required and values[one.field_id] is None:
                    raise DataError(f"{file.uri}: has no column {one.name!r}, which the table requires",
                                    "check the table with what wrote it")
                else:
                    constants[one.name] = pa.scalar(values[one.field_id], self._types[one.name])
            return FileView(parquet, stored, self._types, constants,
                            partial(self._deleted, task) if task.delete_files else None)

    def _deleted(self, task: Any) -> Int64s:
        """Read the positions that delete files, or deletion vectors, have for a data file."""
        from pyiceberg.io.pyarrow import _read_deletes

        with _explained(task.file.file_path):
            found = (_read_deletes(self._table.io, one).get(task.file.file_path) for one in task.delete_files)
            return np.concatenate([np.zeros(0, np.int64), *(one.to_numpy() for one in found if one is not None)])

"""Ids of earlier prepared data, for new rows: `data.prepare.id_map_from`.

A value keeps its row only if it gives the same key, so columns are read as they were then: the same kinds, the same
dense transform, the tables in the same order.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from embark.data.prepare.id_numbering import IdFiles, KnownIds
from embark.data.prepared.cache import local_folder, read_manifest
from embark.data.prepared.manifest import IDS, SHARED, Manifest, shared_tables
from embark.errors import DataError
from embark.features.arrays import Int32s, Int64s
from embark.features.encoding import IdMethod
from embark.features.layout import REPAIR
from embark.features.schema import TIME_ROWS, Schema
from embark.formatting import shortlist
from embark.spec.data import NewIds, TimeColumns
from embark.spec.run import RunSpec
from embark.store import open_store
from embark.store.atomic_file import scratch_for

FIELD = "data.prepare.id_map_from"


class _IdMap(BaseModel):
    how: Literal["hash", "frequency"]
    rows: int
    sha256: str = ""


class _Settings(BaseModel):
    """The part of a manifest's settings that a later preparation needs."""

    revision: int
    schema_: dict[str, Any]
    prepare: dict[str, Any]
    id_maps: dict[str, _IdMap]


@dataclass(frozen=True)
class EarlierIds:
    """The id maps of data that was prepared earlier, whose ids are kept."""

    path: str
    manifest: Manifest
    schema: Schema
    maps: Mapping[str, _IdMap]
    dense: str  # Transformation of the dense values.
    new_ids: NewIds

    def completed(self, spec: RunSpec) -> RunSpec:
        """Return `spec` with the columns of the earlier data where it names none."""
        data, old = spec.data, self.schema
        changes: dict[str, object] = {"dense": self.dense} if data.prepare.dense == "auto" else {}
        of_data: dict[str, object] = {}
        if "label" not in data.model_fields_set and "label_above" not in data.prepare.model_fields_set:
            of_data["label"] = old.label
            changes["label_above"] = self.manifest.settings["prepare"].get("label_above")
        if old.format != "criteo":
            of_data |= {"dense_columns": data.dense_columns or old.dense,
                        "time_column": data.time_column or old.time_column}
            changes["time_columns"] = data.prepare.time_columns or TimeColumns(
                {time.name: time.features for time in old.times})
            if not (data.prepare.sparse_columns or data.prepare.list_columns or spec.model.tables):
                changes |= {
                    "sparse_columns": tuple(column.source for column in old.sparse
                                            if not column.is_list and column.kind not in TIME_ROWS),
                    "list_columns": tuple(column.source for column in old.sparse
                                          if column.is_list and not column.weights_of),
                    "hex_columns": tuple(column.source for column in old.sparse if column.kind == "hex"),
                    "list_delimiter": data.prepare.list_delimiter or old.list_delimiter,
                }
        prepare = data.prepare.model_copy(update=changes)
        return spec.model_copy(update={"data": data.model_copy(update={**of_data, "prepare": prepare})})

    def aligned(self, spec: RunSpec, schema: Schema) -> Schema:
        """Return `schema` with the kinds of the earlier columns; refuse it if its ids could not mean the same rows."""
        if differences := list(self._differences(spec, schema)):
            raise DataError("\n  ".join([f"{self.path}: its ids cannot be kept for this input", *differences]),
                            fix="change the spec so; or prepare without data.prepare.id_map_from, for ids that begin "
                                "anew")
        old = {column.name: column for column in self.schema.sparse}
        sparse = {column.name: replace(
            column, kind=old[column.name].kind,
            rows=self.maps[column.name].rows if not column.weights_of and self._is_hashed(column.name) else column.rows,
        ) for column in schema.sparse}
        order = sparse if spec.model.tables else old
        why = dict.fromkeys([*schema.dense, *(column.source for column in schema.sparse)], f"as in {self.path}")
        return replace(schema, sparse=tuple(sparse[name] for name in order), why=schema.why | why)

    def methods(self, schema: Schema) -> tuple[IdMethod, ...]:
        """Return how each column's ids were made."""
        return tuple("hash" if column.weights_of else self.maps[column.name].how for column in schema.sparse)

    def settings(self) -> dict[str, str]:
        """Return what the new manifest records: which ids it continues, not where they lie."""
        return {"data": self.manifest.fingerprint(), "new_ids": self.new_ids}

    def fetch(self, folder: Path) -> dict[str, KnownIds]:
        """Return the maps by table, checked; they are copied to `folder` if they are not on this machine."""
        names = [name for name in self.maps if not self._is_hashed(name)]
        here = local_folder(self.path)
        if here is None:
            files = [f"{IDS}/{name}.{kind}.npy" for name in names for kind in ("keys", "ids")]
            open_store(self.path).download_many([(file, folder / file) for file in files])
        found = {name: IdFiles.of((here or folder) / IDS, name) for name in names}
        for name, files_of in found.items():
            try:
                is_intact = (files_of.sha256() == self.maps[name].sha256
                             and np.load(files_of.ids, mmap_mode="r").max(initial=0) < self.maps[name].rows)
                damage = "" if is_intact else "is not what the manifest says"
            except OSError as error:
                damage = f"cannot be read: {error.strerror}"
            if damage:
                raise DataError(f"{self.path}: the id map of {name} {damage}",
                                fix="it was damaged or replaced: copy the data again, or name an intact copy in "
                                    f"{FIELD}")
        return {name: KnownIds(files_of.keys, files_of.ids, self.maps[name].rows, self.new_ids)
                for name, files_of in found.items()}

    def _is_hashed(self, name: str) -> bool:
        return self.maps[name].how == "hash"

    def _differences(self, spec: RunSpec, schema: Schema) -> Iterator[str]:
        old, prepare = self.schema, spec.data.prepare
        if (old.format == "criteo") != (schema.format == "criteo"):
            yield f"its input was {old.format}, this one is {schema.format}: their ids have different keys"
        if old.dense_names != schema.dense_names:
            yield f"dense columns: {_listed(old.dense_names)} there, {_listed(schema.dense_names)} here"
        if prepare.dense != self.dense:
            yield f'data.prepare.dense: "{self.dense}" there, "{prepare.dense}" here'
        before, now = self.manifest.settings.get(SHARED, {}), shared_tables(spec.model)
        if before != now:
            yield f"features that share a table: {_sharing(before)} there, {_sharing(now)} here"
        columns = {column.name: column for column in old.sparse}
        names = [column.name for column in schema.sparse]
        if set(names) != set(columns):
            yield f"tables: {_listed(tuple(columns))} there, {_listed(tuple(names))} here"
        for column in schema.sparse:
            if column.name not in columns or column.weights_of:
                continue
            about = self.maps[column.name]
            if column.is_list != columns[column.name].is_list:
                yield f"{column.name}: {'one id' if column.is_list else 'a list'} per row there, not here"
            if prepare.ids not in ("auto", about.how) and column.kind not in TIME_ROWS:
                yield f'{column.name}: data.prepare.ids: "{about.how}" there, "{prepare.ids}" here'
            rows = column.rows or about.rows
            if rows < about.rows or (about.how == "hash" and rows != about.rows):
                yield f"{column.name}: {about.rows:,} rows there, {rows:,} in [model]"


def open_earlier(spec: RunSpec, revision: int) -> EarlierIds | None:
    """Open the data that `id_map_from` names; it must have been prepared by the same `revision` of this code."""
    path = spec.data.prepare.id_map_from
    if not path:
        return None
    manifest = read_manifest(path)
    settings = {**manifest.settings, "schema_": manifest.settings.get("schema")}
    try:
        found = _Settings.model_validate(settings)
        schema = TypeAdapter(Schema).validate_python(found.schema_)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"{path}: its manifest has no id maps ({'.'.join(map(str, first['loc']))}: {first['msg']})",
                        fix=f"{FIELD} takes what `embark data prepare` wrote") from None
    if found.revision != revision:
        raise DataError(f"{path}: another version of Embark prepared it, and may read the same values as other keys",
                        fix="prepare the earlier data again with this version")
    if set(found.id_maps) != {column.name for column in schema.sparse if not column.weights_of}:
        raise DataError(f"{path}: its manifest has id maps of other tables than its columns",
                        fix="it was damaged: prepare or copy the data again")
    return EarlierIds(path, manifest, schema, found.id_maps, str(found.prepare.get("dense")),
                      spec.data.prepare.new_ids)


def _sharing(shared: Mapping[str, str]) -> str:
    return _listed(tuple(f"{feature} that of {table}" for feature, table in shared.items()))


def _listed(names: tuple[str, ...]) -> str:
    return shortlist(names, 12) or "none"


def write_changed_rows(out: Path, table: str, rows: Int64s) -> dict[str, str]:
    """Write the table rows that have another owner than in the earlier data: what a model learned there is not theirs.
    Return what the manifest records."""
    text = io.BytesIO()
    np.save(text, rows.astype("<i4"))
    file = f"{IDS}/{table}.changed.npy"
    with scratch_for(out / file) as scratch:
        scratch.write_bytes(text.getbuffer())
    return {"changed": file, "changed_sha256": hashlib.sha256(text.getbuffer()).hexdigest()}


def read_changed_rows(path: str, manifest: Manifest) -> dict[str, Int32s]:
    """Read the changed rows of the data at `path`, a folder or a URI, by table."""
    store, found = open_store(path), {}
    maps: dict[str, dict[str, Any]] = manifest.settings.get("id_maps", {})
    for table, about in maps.items():
        if "changed" in about:
            text = store.read(about["changed"])
            if hashlib.sha256(text).hexdigest() != about.get("changed_sha256"):
                raise DataError(f"{store.where(about['changed'])}: is not what the manifest says", fix=REPAIR)
            found[table] = np.load(io.BytesIO(text))
    return found

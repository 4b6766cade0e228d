"""Ids of earlier prepared data, for new rows: `data.prepare.id_map_from`.

A value keeps its row only if it gives the same key, so columns are read as they were then: the same kinds, the same
dense transform, the tables in the same order.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from embark.data.prepared.cache import BAD_ARRAY, local_folder, read_manifest
from embark.data.prepared.manifest import IDS, SEQUENCES, SHARED, shared_tables
from embark.errors import DataError
from embark.features.encoding import IdMethod
from embark.features.layout import REPAIR
from embark.features.schema import FIXED_ROWS, Schema
from embark.features.statistics import ValueStatistics
from embark.formatting import shortlist
from embark.spec import DataSpec, FeaturesSpec, RunSpec
from embark.spec.data import is_of_log
from embark.store import open_store
from embark.values import JsonDict
from .id_numbering import IdFiles, KnownIds
from .later_rows import PreparedWith, is_id_map

_INHERITED = ("encoding", "label_above", "label_is", "decimal", "sparse_columns", "list_columns", "hex_columns",
              "list_delimiter")


@dataclass(frozen=True)
class EarlierIds:
    """The id maps of data that was prepared earlier, whose ids are kept."""

    before: PreparedWith

    @property
    def path(self) -> str:
        return self.before.path

    @property
    def maps(self) -> dict[str, JsonDict]:
        """The manifest's record of each table's ids."""
        return self.before.manifest.settings["id_maps"]  # type: ignore[no-any-return]

    @property
    def is_log(self) -> bool:
        return SEQUENCES in self.before.manifest.settings

    def completed(self, spec: RunSpec) -> RunSpec:
        """Return `spec` with the columns of the earlier data where it names none."""
        if self.is_log:
            return self._completed_log(spec)
        values = self.before.schema.to_spec(self.before.prepare)
        own, own_prepare = (part.model_dump(exclude_unset=True) for part in (spec.data, spec.data.prepare))
        names = {*_INHERITED}
        if "label" in own or {"label_above", "label_is"} & {*own_prepare}:
            names -= {"label_above", "label_is"}
        if spec.model.tables or own_prepare.get("sparse_columns") or own_prepare.get("list_columns"):
            names -= {"sparse_columns", "list_columns", "hex_columns", "list_delimiter"}
        prepare = {key: value for key, value in values["prepare"].items() if key in names} | own_prepare
        data = DataSpec.model_validate(values | own | {"prepare": prepare})
        earlier = self._features()
        given = spec.features.model_dump(exclude_unset=True, mode="json")
        columns = earlier.get("columns", {})
        columns |= {name: columns.get(name, {}) | one for name, one in given.get("columns", {}).items()}
        features = FeaturesSpec.model_validate(earlier | given | ({"columns": columns} if columns else {}))
        return spec.changed(data=data, features=features)

    def _completed_log(self, spec: RunSpec) -> RunSpec:
        data, earlier = spec.data, self.before.schema
        user, item = (column.source for column in earlier.sparse)
        how = data.interactions.changed(**{"user": user, "item": item} |
                                        data.interactions.model_dump(exclude_unset=True))
        prepare = data.prepare if "encoding" in data.prepare.model_fields_set else \
            data.prepare.changed(encoding=self.before.prepare.encoding)
        return spec.changed(data=data.changed(interactions=how, prepare=prepare,
                                              time_column=data.time_column or earlier.time_column))

    def _features(self) -> JsonDict:
        return self.before.schema.to_features(self.before.prepare, self.before.features)

    def aligned(self, spec: RunSpec, schema: Schema) -> Schema:
        """Return `schema` with the kinds of the earlier columns; refuse it if its ids could not mean the same rows."""
        if differences := list(self._differences(spec, schema)):
            raise DataError("\n  ".join([f"{self.path}: its ids cannot be kept for this input", *differences]),
                            "change the spec so; or prepare without data.prepare.id_map_from, for ids that begin "
                                "anew")
        old = {column.name: column for column in self.before.schema.sparse}
        sparse = {}
        for column in schema.sparse:
            if column.is_user:  # has no ids to keep
                sparse[column.name] = column
                continue
            is_hashed = self._how(column.name) == "hash" and not column.weights_of
            sparse[column.name] = replace(
                column, kind=old[column.name].kind, buckets=old[column.name].buckets,
                rows=self.maps[column.name]["rows"] if is_hashed else column.rows)
        order = sparse if spec.model.tables or self.is_log else old
        kept = (column.source for column in schema.sparse if not column.is_user)
        why = dict.fromkeys([*schema.dense, *kept], f"as in {self.path}")
        return replace(schema, sparse=tuple(sparse[name] for name in order), why=schema.why | why)

    def methods(self, schema: Schema) -> tuple[IdMethod, ...]:
        """Return how each column's ids were made."""
        return tuple(self._how(column.name) for column in schema.sparse)

    def statistics(self, schema: Schema) -> tuple[ValueStatistics, ...]:
        """Return the statistics of values, which are kept too."""
        positions = {column.name: position for position, column in enumerate(schema.sparse)}
        return tuple(replace(one, column=positions[self.before.schema.sparse[one.column].name])
                     for one in self.before.statistics())

    def settings(self) -> dict[str, str]:
        """Return what the new manifest records: which ids it continues, not where they lie."""
        return {"data": self.before.manifest.fingerprint(), "new_ids": "append"}

    def fetch(self, folder: Path, *, is_moved: bool = False) -> dict[str, KnownIds]:
        """Return the maps by table, checked; they are copied to `folder` if they are not on this machine, or with
        `is_moved`."""
        names = [name for name in self.maps if self._how(name) == "frequency"]
        here = None if is_moved else local_folder(self.path)
        if here is None:
            files = [f"{IDS}/{name}.{kind}.npy" for name in names for kind in ("keys", "ids")]
            open_store(self.path).download_many([(file, folder / file) for file in files])
        found = {}
        for name in names:
            files_of = IdFiles.of((here or folder) / IDS, name)
            try:
                keys, ids = (np.load(path, mmap_mode="r") for path in (files_of.keys, files_of.ids))
                is_intact = files_of.sha256() == self.maps[name]["sha256"] and is_id_map(
                    keys, ids, self.maps[name]["rows"])
            except BAD_ARRAY:
                is_intact = False
            if not is_intact:
                raise DataError(f"{self.path}: the id map of {name} is missing or not what the manifest says",
                                REPAIR)
            found[name] = KnownIds(files_of.keys, files_of.ids, self.maps[name]["rows"])
        return found

    def _how(self, name: str) -> IdMethod:
        """Return how ids were made; weights, which are none, have no map."""
        return "frequency" if self.maps.get(name, {}).get("how") == "frequency" else "hash"

    def _differences(self, spec: RunSpec, schema: Schema) -> Iterator[str]:
        old, prepare = self.before.schema, spec.data.prepare
        columns = {column.name: column for column in old.sparse if not column.is_user}
        for what, before, now in () if self.is_log else (
            ("Criteo's own format", old.format == "criteo", schema.format == "criteo"),
            ("dense columns", *(_listed((*one.dense_names, *one.statistics_names)) for one in (old, schema))),
            ("features", *(json.dumps(one.model_dump(mode="json"))
                           for one in (FeaturesSpec.model_validate(self._features()), spec.features))),
            ("features that share a table", _sharing(self.before.manifest.settings.get(SHARED, {})),
             _sharing(shared_tables(spec.model)))
        ):
            if before != now:
                yield f"{what}: {before} there, {now} here"
        names = [column.name for column in schema.sparse if not column.is_user]
        if set(names) != set(columns):
            yield f"tables: {_listed(tuple(columns))} there, {_listed(tuple(names))} here"
        for column in schema.sparse:
            if column.name not in columns or column.weights_of:
                continue
            how, old_rows = self._how(column.name), self.maps[column.name]["rows"]
            if column.is_list != columns[column.name].is_list:
                yield f"{column.name}: {'one id' if column.is_list else 'a list'} per row there, not here"
            if prepare.ids not in ("auto", how) and column.kind not in FIXED_ROWS:
                yield f'{column.name}: data.prepare.ids: "{how}" there, "{prepare.ids}" here'
            rows = column.rows or old_rows
            if rows < old_rows or (how == "hash" and rows != old_rows):
                yield f"{column.name}: {old_rows:,} rows there, {rows:,} in [model]"


def open_earlier(spec: RunSpec, revision: int) -> EarlierIds | None:
    """Open the data that `id_map_from` names; it must have been prepared by the same `revision` of this code."""
    path = spec.data.prepare.id_map_from
    if not path:
        return None
    manifest = read_manifest(path)
    before = PreparedWith.of(path, manifest)
    if before is None:
        raise DataError(f"{path}: its manifest has no id maps",
                        "data.prepare.id_map_from takes what `embark data prepare` wrote")
    if manifest.settings.get("revision") != revision:
        raise DataError(f"{path}: another version of Embark prepared it, and may read the same values as other keys",
                        "prepare the earlier data again with this version")
    earlier = EarlierIds(before)
    if earlier.is_log != is_of_log(spec):
        there, here = ("a log", "a table") if earlier.is_log else ("a table", "a log")
        raise DataError(f"{path}: was prepared from rows of {there}, and these are of {here}",
                        "prepare without data.prepare.id_map_from")
    return earlier


def _sharing(shared: Mapping[str, str]) -> str:
    return _listed(tuple(f"{feature} that of {table}" for feature, table in shared.items()))


def _listed(names: tuple[str, ...]) -> str:
    return shortlist(names, 12) or "none"

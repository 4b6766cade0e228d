"""Raw rows that come after the data was prepared, with its ids and its normalisation; nothing is fitted again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from embark.data.prepared import MANIFEST, Manifest, PartWriter, Split
from embark.data.prepared.cache import read_array
from embark.data.prepared.manifest import NUMBERS, SEQUENCES, Size
from embark.errors import DataError, nearest
from embark.features.arrays import Array
from embark.features.encoding import IdMap, RowEncoder, plain_row_format
from embark.features.layout import REPAIR, Feature
from embark.features.numbers import Numbers, recorded_numbers, with_bounds
from embark.features.schema import Schema
from embark.features.statistics import ValueStatistics, are_statistics, statistic_columns
from embark.spec import CANDIDATE, DataSpec, FeaturesSpec, ModelSpec, PrepareSpec
from embark.spec.features import LEGACY_OPTIONS, legacy_features
from embark.store import normalize_path
from embark.values import JsonMap, frozen
from .inputs import InputFile, Inputs, open_inputs
from .rows import BadRows, SegmentCounts
from .sampling import Sample, take_sample
from .tasks import open_reader

_CHUNK_BYTES = 8 << 20
_SPLIT: Split = "validation"
_SCHEMA = TypeAdapter(Schema)


class _HashedIds(BaseModel, strict=True):
    how: Literal["hash"]
    rows: Size


class _NumberedIds(BaseModel, strict=True):
    how: Literal["frequency", "statistics"]
    rows: Size
    sha256: str
    keys: str
    ids: str
    hashed_rows: Size = 0


_ID_MAPS = TypeAdapter(dict[str, _HashedIds | _NumberedIds])
"""The manifest's record of the ids of each table, and of statistics."""


@frozen
class PreparedWith:
    """The settings that data was prepared with: the columns of its input, and the mapping from cells to numbers."""

    path: str
    manifest: Manifest
    schema: Schema
    prepare: PrepareSpec
    features: FeaturesSpec

    @staticmethod
    def of(path: str, manifest: Manifest) -> PreparedWith | None:
        """Read it from a manifest; None for data that was made and not prepared."""
        settings = manifest.settings
        if "schema" not in settings or "id_maps" not in settings:
            return None
        try:
            schema = _SCHEMA.validate_python(settings["schema"])
            _ID_MAPS.validate_python(settings["id_maps"])
            said = {key: value for key, value in settings["prepare"].items()
                    if key not in ("ids", "format", *LEGACY_OPTIONS)}
            prepare = PrepareSpec.model_validate(said)
            features = FeaturesSpec.model_validate(settings.get("features") or legacy_features(settings["prepare"]))
        except (ValidationError, KeyError, AttributeError) as error:
            raise DataError(f"{path}/{MANIFEST}: does not say how the data was prepared ({error})",
                            "prepare the data again, with this version of Embark") from None
        found = PreparedWith(path, manifest, schema, prepare, features)
        return replace(found, schema=with_bounds(schema, found.numbers)) if schema.bucketed else found

    @property
    def numbers(self) -> Numbers:
        """How numbers become dense values; the manifests of earlier Embark name a transform without a state."""
        settings, features = self.manifest.settings, self.features
        if features.numbers == "auto":
            features = features.model_copy(update=legacy_features(settings["prepare"]))
        return recorded_numbers(settings.get(NUMBERS), features, self.schema.dense_names)

    def row_encoder(self) -> RowEncoder:
        """Read all id maps and compare them with their checksums."""
        layout = self.manifest.layout
        if SEQUENCES in self.manifest.settings:  # the other features of a user have no values of a column
            layout = replace(layout, features=layout.features[:1])
        return RowEncoder(self.numbers, layout, tuple(self.id_map(feature) for feature in layout.features),
                          statistics=self.statistics())

    def id_map(self, feature: Feature) -> IdMap:
        """Read the id map of a table and compare it with its checksum."""
        column = next((one for one in self.schema.sparse if one.name == feature.name), None)
        if column is not None and column.weights_of:
            return IdMap(column, feature, None, None, 1)
        about = self.manifest.settings["id_maps"].get(feature.name)
        if column is None or about is None:
            raise DataError(f"{self.path}: the manifest has no id map of table {feature.name}", REPAIR)
        if about["how"] != "frequency":
            return IdMap(column, feature, None, None, feature.rows)
        keys, ids, is_intact = self._arrays(about)
        hashed_rows = about.get("hashed_rows", 0)
        if not is_intact or hashed_rows > feature.rows or not is_id_map(keys, ids, feature.rows):
            raise DataError(f"{self.path}: the id map of table {feature.name} was changed since the data was prepared",
                            REPAIR)
        return IdMap(column, feature, keys, ids, hashed_rows)

    def statistics(self) -> tuple[ValueStatistics, ...]:
        """Read the statistics of values and compare them with their checksums."""
        found = []
        for position, column in statistic_columns(self.schema).items():
            about = self.manifest.settings["id_maps"].get(f"{column.name}.statistics")
            none = np.empty(0)
            keys, values, is_intact = self._arrays(about) if about else (none, none, False)
            if not is_intact or not are_statistics(keys, values, len(column.statistics)):
                raise DataError(f"{self.path}: the statistics of {column.name} are missing, or were changed since the "
                                "data was prepared", REPAIR)
            found.append(ValueStatistics(position, keys, values))
        return tuple(found)

    def _arrays(self, about: JsonMap) -> tuple[Array, Array, bool]:
        """Return the keys, what is known of each, and whether they are what the manifest says."""
        digest, arrays = hashlib.sha256(), []
        for name in ("keys", "ids"):
            array, checksum = read_array(self.path, normalize_path(about[name]))
            digest.update(checksum)
            arrays.append(array)
        return arrays[0], arrays[1], digest.hexdigest() == about["sha256"]


def next_item_rows(model: ModelSpec, data: DataSpec, before: PreparedWith) -> tuple[Schema, PrepareSpec, RowEncoder]:
    """Describe the rows that a model of the next item scores: histories and candidates as the log has its items."""
    schema, options, encoder = plain_row_format(model, data)
    item = before.manifest.layout.features[0]
    known, maps = before.id_map(item), list[IdMap]()
    for column, one in zip(schema.sparse, encoder.maps, strict=True):
        if one.feature.name in (model.sequence.history, CANDIDATE):
            one = replace(one, column=replace(column, kind=known.column.kind), keys=known.keys, ids=known.ids,
                          hashed_rows=0)
        maps.append(one)
    return replace(schema, sparse=tuple(one.column for one in maps)), options, replace(encoder, maps=tuple(maps))


def is_id_map(keys: Array, ids: Array, num_rows: int) -> bool:
    """Return whether these are keys and the id of each, below `num_rows`: a forged map may have fitting checksums."""
    return bool(keys.ndim == 1 and keys.shape == ids.shape and keys.dtype.kind == "u" and ids.dtype.kind in "iu"
                and ids.min(initial=0) >= 0 and ids.max(initial=0) < num_rows)


def write_later_rows(before: PreparedWith, path: str, out: Path) -> tuple[Manifest, BadRows]:
    """Write all rows of the raw files at `path` as parts of one split below `out`; return also how many could not be
    read."""
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
    """Return the roles of the columns as they were, in the format that these files have."""
    if known.format == "csv" and known.columns and not known.has_header and not prepare.delimiter:
        prepare = prepare.changed(delimiter=known.delimiter)
    return fit_schema(known, take_sample(prepare, known.needed, inputs, files), files[0].uri)


def fit_schema(known: Schema, sample: Sample, where: str, names: Sequence[str] = ()) -> Schema:
    """Return the roles of the columns in the format of `sample`; it must have the columns `names` too."""
    columns = tuple(column.name for column in sample.columns)
    if lacking := [name for name in (*known.needed, *names) if name not in columns]:
        raise DataError(f"{where}: has no column " + ", ".join(map(repr, lacking)), nearest(lacking[0], columns))
    return replace(known, format=sample.format, delimiter=sample.delimiter, has_header=sample.has_header,
                   columns=columns)

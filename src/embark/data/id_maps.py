"""The id maps of prepared data: which id each value of a column has, and for raw rows that come later the same ids."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from embark.data.id_weights import weights_features, weights_of_keys
from embark.data.number_rows import NumberRows
from embark.data.prepare.id_numbering import look_up
from embark.data.prepare.rows import DenseTransform, Keys, RawRows, dense_transform, hash_ids, transform_dense
from embark.data.prepare.schema import LabelColumn, Schema, SparseColumn
from embark.data.prepared import Manifest, Rows
from embark.data.prepared.cache import local_folder
from embark.data.prepared.layout import REPAIR, Feature, Layout
from embark.errors import DataError, UserError
from embark.spec.data import DataSpec, PrepareSpec
from embark.spec.model import CANDIDATE, ModelSpec
from embark.store import open_store
from embark.store.object_store import normalize_path

_SCHEMA = TypeAdapter(Schema)
_MAX_IDS = 1 << 31


@dataclass(frozen=True, slots=True)
class PreparedWith:
    """What data was prepared with: the columns of its input, and how cells became numbers."""

    path: str  # Of the data.
    manifest: Manifest
    schema: Schema
    prepare: PrepareSpec

    @staticmethod
    def of(path: str, manifest: Manifest) -> PreparedWith | None:
        """None of data that was made and not prepared."""
        settings = manifest.settings
        if "schema" not in settings or "id_maps" not in settings:
            return None
        try:
            schema = _SCHEMA.validate_python(settings["schema"])
            said = {key: value for key, value in settings["prepare"].items() if key not in ("ids", "format")}
            prepare = PrepareSpec.model_validate(said)
        except (ValidationError, KeyError, AttributeError) as error:
            raise DataError(f"{path}: its manifest does not say how the data was prepared ({error})",
                            fix="prepare the data again, with this version of Embark") from None
        return PreparedWith(path, manifest, schema, prepare)

    def row_encoder(self) -> RowEncoder:
        """With all id maps, read and compared with their checksums."""
        layout = self.manifest.layout
        return RowEncoder(dense_transform(self.prepare, self.schema), layout,
                          tuple(self.id_map(feature) for feature in layout.features))

    def id_map(self, feature: Feature) -> IdMap:
        """Of one of the tables, read and compared with its checksum."""
        column = next((one for one in self.schema.sparse if one.name == feature.name), None)
        if column is not None and column.weights_of:
            return IdMap(column, feature, None, None, 1)
        about = self.manifest.settings["id_maps"].get(feature.name)
        if column is None or about is None:
            raise DataError(f"{self.path}: the manifest has no id map of table {feature.name}", fix=REPAIR)
        if about["how"] != "frequency":
            return IdMap(column, feature, None, None, feature.rows)
        digest, arrays = hashlib.sha256(), []
        for name in ("keys", "ids"):
            array, checksum = _read_array(self.path, normalize_path(about[name]))
            digest.update(checksum)
            arrays.append(array)
        if digest.hexdigest() != about["sha256"] or len(arrays[0]) != len(arrays[1]):
            raise DataError(f"{self.path}: the id map of table {feature.name} was changed since the data was prepared",
                            fix=REPAIR)
        return IdMap(column, feature, arrays[0], arrays[1], about.get("hashed_rows", 0))


@dataclass(frozen=True, slots=True)
class IdMap:
    """How the values of a column became the ids of its table; of weights, nothing but the numbers."""

    column: SparseColumn
    feature: Feature
    keys: Keys | None  # Rising; None where every id is by hash.
    ids: NDArray[np.int32] | None
    hashed_rows: int  # The id of a value without an entry is its key modulo this; where it is 0, the id is 0.

    def ids_of(self, keys: Keys, is_missing: NDArray[np.bool_] | None) -> NDArray[Any]:
        """As the data was prepared; a missing value has id 0."""
        dtype = self.feature.id_dtype
        if self.keys is None or self.ids is None:
            return hash_ids(keys, is_missing, self.hashed_rows, dtype)
        width = np.promote_types(keys.dtype, self.keys.dtype)  # Criteo's have 32 bits
        wanted, known = (cast(Keys, array.astype(width, copy=False)) for array in (keys, self.keys))
        found = look_up(wanted, known, cast(Any, self.ids)).astype(dtype)
        if self.hashed_rows:
            found = np.where(found > 0, found, hash_ids(keys, None, self.hashed_rows, dtype))
        if is_missing is not None:
            found[is_missing] = 0
        return found


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """The one way from raw rows to what the model takes, in evaluation and in serving: as the data was prepared."""

    dense: DenseTransform
    layout: Layout
    maps: tuple[IdMap, ...]  # Of the features of the layout.
    plain_ids: Literal["refuse", "clip"] | None = None
    """Of data that has ids instead of values: what becomes of those that no table has."""
    any_number: frozenset[str] = frozenset()  # Features whose keys are the ids, any 64 bits.
    same_lengths: tuple[str, ...] = ()  # Features that have as many values as each other, such as items and times.

    def encode(self, raw: RawRows) -> Rows:
        """Only of rows that are `readable`. The dense values of `raw` are changed in place."""
        ids = tuple(self._ids_of(*column) for column in zip(self.maps, raw.keys, raw.is_missing, strict=True))
        return Rows(raw.label, self._transformed(raw.dense), ids, raw.lengths)

    def _transformed(self, dense: NDArray[np.float32]) -> NDArray[np.float32]:
        transform_dense(dense, self.dense)
        return dense if self.layout.dense_bits == 32 else dense.astype(np.float16).astype(np.float32)

    def _ids_of(self, one: IdMap, keys: Keys, is_missing: NDArray[np.bool_] | None) -> NDArray[Any]:
        if one.feature.weights_of:
            return weights_of_keys(keys)
        if self.plain_ids is None or one.keys is not None:
            return one.ids_of(keys, is_missing)
        # Readable keys are ids.
        return keys.view(np.int64) if one.feature.name in self.any_number else keys.astype(one.feature.id_dtype)

    def encode_numbers(self, rows: NumberRows) -> NumberRows:
        """The same of rows in matrices that `are_readable`."""
        ids = rows.ids
        if self.plain_ids is None or any(one.keys is not None for one in self.maps):
            ids = np.array([self._ids_of(one, keys, None) for one, keys in
                            zip(self.maps, rows.ids.view(np.uint64), strict=True)], np.int64)
        return NumberRows(self._transformed(rows.dense), ids, rows.shared)

    def are_readable(self, rows: NumberRows) -> bool:
        """Whether all rows are `readable`, and no dense value is too large."""
        if np.isinf(rows.dense).any():
            return False
        return self.plain_ids is None or self._are_ids(rows.ids.view(np.uint64), rows.dense)

    def rows_of(self, one: IdMap, ids: NDArray[Any]) -> NDArray[Any]:
        """Of the ids that a batch of training data has: they are rows, but for those of dynamic tables."""
        is_row = self.plain_ids is None or one.keys is None
        return ids if is_row else one.ids_of(ids.astype(np.int64).view(np.uint64), None)

    def readable(self, raw: RawRows) -> RawRows:
        """Without the rows that data of plain ids may not have: no value, an id that no table has, too many ids."""
        if self.plain_ids is None or self._has_only_ids(raw):
            return raw
        is_bad, reasons = np.zeros(len(raw), np.bool_), Counter(raw.reasons)

        def refuse(mask: NDArray[np.bool_], why: str) -> None:
            if num := int((mask & ~is_bad).sum()):
                reasons[why] += num
            np.logical_or(is_bad, mask, out=is_bad)

        keys = []
        for name, values in zip(self.layout.dense, raw.dense.T, strict=True):
            refuse(np.isnan(values), f"column {name!r} is empty")
        for feature, own, lengths, is_missing in zip(self.layout.features, raw.keys, raw.lengths, raw.is_missing,
                                                     strict=True):
            if feature.weights_of:  # as many as ids
                keys.append(own)
                continue
            ids = own.view(np.int64)
            is_any = feature.name in self.any_number
            is_outside = np.zeros(len(ids), np.bool_) if is_any else (ids < 0) | (ids >= feature.rows)
            if is_missing is not None:
                refuse(is_missing, f"column {feature.name!r} is empty")
                is_outside &= ~is_missing
            if lengths is not None:
                refuse(lengths > feature.multi_hot, f"column {feature.name!r}: more than {feature.multi_hot} ids")
                owner = np.repeat(np.arange(len(raw)), lengths)
                is_outside = np.bincount(owner[is_outside], minlength=len(raw)) > 0
            if self.plain_ids == "refuse":
                refuse(is_outside, f"column {feature.name!r}: an id is not in 0 to {feature.rows - 1}")
            keys.append(own if is_any else np.clip(ids, 0, feature.rows - 1).view(np.uint64))
        paired = [lengths for feature, lengths in zip(self.layout.features, raw.lengths, strict=True)
                  if feature.name in self.same_lengths and lengths is not None]
        for one, other in pairwise(paired):
            names = " and ".join(map(repr, self.same_lengths))
            refuse(one != other, f"columns {names} have different numbers of values")
        return replace(raw, keys=tuple(keys), reasons=reasons).select(~is_bad)

    def _has_only_ids(self, raw: RawRows) -> bool:
        """Whether each cell of plain columns has its value: of all of them at once, in a tenth of the time."""
        if any(lengths is not None for lengths in raw.lengths) or any(mask is not None for mask in raw.is_missing):
            return False
        return self._are_ids(np.array(raw.keys, np.uint64).reshape(len(self.layout.features), len(raw)), raw.dense)

    def _are_ids(self, keys: NDArray[np.uint64], dense: NDArray[np.float32]) -> bool:
        """[F, n]; negative ones are large."""
        num_rows = np.array([2**64 - 1 if feature.name in self.any_number else feature.rows
                             for feature in self.layout.features], np.uint64)
        return bool((keys < num_rows[:, None]).all() and not np.isnan(dense).any())


def by_rising_key(keys: Keys, rows: NDArray[np.int32]) -> tuple[Keys, NDArray[np.int32]]:
    """The map of a dynamic table, which is stored slot by slot so that a delta has only those that changed; row 0 is of
    free ones."""
    taken = np.flatnonzero(rows)
    order = taken[np.argsort(keys[taken])]
    return keys[order], rows[order]


def plain_row_format(
    model: ModelSpec, data: DataSpec, prepared: Layout | None = None, *, has_words: bool = True
) -> tuple[Schema, PrepareSpec, RowEncoder]:
    """Of rows that hold ids, as data that was made has them, or a file of `data.kind = "columns"`. `has_words`: the ids
    of dynamic tables are hashes of what the cells hold, not the numbers themselves."""
    tables = model.scored_features()
    if len({table.name for table in tables}) < len(tables):
        raise UserError(f"a feature is called {CANDIDATE!r}, as the column of the item that is scored is",
                        fix="rename it, and train again")
    names = prepared.dense if prepared else data.dense_columns or tuple(f"dense_{i}" for i in range(model.num_dense))
    is_list = {table.name: table.multi_hot > 1 or table.is_sequence or bool(table.weights_column) for table in tables}
    layout = Layout(names, tuple(Feature(table.name, table.stored_rows, table.multi_hot, is_list[table.name])
                                 for table in tables) + weights_features(tables),
                    prepared.dense_bits if prepared else 32)
    sparse = tuple(SparseColumn(table.name, "text" if table.is_dynamic and has_words else "integer",
                                is_list=is_list[table.name], max_ids=_MAX_IDS) for table in tables) + tuple(
                                    SparseColumn.of_weights(table) for table in tables if table.weights_column)
    maps = tuple(IdMap(column, feature, None, None, feature.rows)
                 for column, feature in zip(sparse, layout.features, strict=True))
    return Schema("csv", data.label, names, sparse, (), labels=LabelColumn.of(model.tasks)), \
        PrepareSpec(missing=("",), dense="none"), RowEncoder(
            "none", layout, maps, data.on_bad_id, model.features_of_any_number, same_lengths_of(model))


def same_lengths_of(model: ModelSpec) -> tuple[str, ...]:
    """Features of a row that have as many values as each other."""
    return (model.sequence.history, model.sequence.times) if model.sequence.times else ()


def _read_array(path: str, name: str) -> tuple[NDArray[Any], bytes]:
    """Mapped where it lies on this machine; and its file's SHA-256."""
    folder = local_folder(path)
    try:
        if folder is not None:
            with (folder / name).open("rb") as file:
                return np.load(folder / name, mmap_mode="r"), hashlib.file_digest(file, "sha256").digest()
        data = open_store(path).read(name)
        return np.load(io.BytesIO(data), allow_pickle=False), hashlib.sha256(data).digest()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}/{name}: cannot be read ({error})", fix=REPAIR) from None

"""Encoding of raw rows: keys become ids by id maps and hashes, numbers are transformed. Training, evaluation and
serving encode raw rows here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np

from embark.errors import UserError
from embark.spec import CANDIDATE, DataSpec, FeaturesSpec, ModelSpec, PrepareSpec, Table, Task
from embark.spec.features import bucket_table_name
from embark.values import frozen
from .arrays import Array, Floats, Hashes, Int32s, Int64s, Mask
from .layout import Feature, Layout, Rows
from .numbers import Numbers, numbers_of, with_bounds
from .rows import Keys, NumberRows, RawRows
from .schema import FIXED_ROWS, LabelColumn, Schema, SparseColumn
from .statistics import ValueStatistics, with_statistics

IdMethod = Literal["hash", "frequency"]
_MAX_IDS = 1 << 31
PLAIN = PrepareSpec(missing=("",))
PLAIN_FEATURES = FeaturesSpec(numbers="none", missing_flags=False)
"""How cells are read that hold ids and numbers as the model takes them."""


def plain_options(data: DataSpec, **changes: Any) -> PrepareSpec:
    """Describe how such cells are read by this spec."""
    names = ("decimal", "encoding", "label_above", "label_is", "time_unit")
    own = {name: getattr(data.prepare, name) for name in names}
    return PLAIN.model_copy(update=own | changes)


def id_methods(prepare: PrepareSpec, schema: Schema) -> tuple[IdMethod, ...]:
    """Return how the ids of each sparse column are made."""
    if prepare.ids == "auto":
        return tuple("frequency" if column.rows is None else "hash" for column in schema.sparse)
    without = [column.name for column in schema.sparse if column.rows is None]
    if prepare.ids == "hash" and without:
        raise UserError(f"data.prepare.ids = \"hash\" needs the rows of every table; not given: {', '.join(without)}",
                        "give them in [[model.tables]], or set data.prepare.ids = \"frequency\"")
    # An hour or a bucket is its id, and a weight is none.
    return tuple("hash" if column.kind in FIXED_ROWS or column.weights_of or column.num_hashes > 1 else prepare.ids
                 for column in schema.sparse)


def hash_ids(keys: Keys, is_missing: Mask | None, rows: int, dtype: np.dtype[Any]) -> Array:
    """Return key mod rows; 0 for a missing value."""
    # Two steps, for numpy divides by a scalar with vector instructions, and takes remainders one by one.
    ids = keys // keys.dtype.type(rows)
    ids *= keys.dtype.type(rows)
    np.subtract(keys, ids, out=ids)
    narrow = ids.astype(dtype)
    if is_missing is not None:
        np.copyto(narrow.T, 0, where=is_missing)
    return narrow


def weights_features(tables: Sequence[Table]) -> tuple[Feature, ...]:
    """Return the features of weights, which stand behind the ids in prepared data and in rows to score."""
    return tuple(Feature(table.weights_feature, 1, table.multi_hot, is_ragged=True, weights_of=table.name)
                 for table in tables if table.weights_column)


def weights_of_keys(keys: Keys) -> Floats:
    """Return the weights whose float64 bits are the keys."""
    return keys.view(np.float64).astype(np.float32)


def look_up(wanted: Keys, keys: Keys, ids: Int64s) -> Int32s:
    """Return the id of each wanted key, 0 if it has none. Both are rising, so the search walks along."""
    if not len(keys):
        return np.zeros(len(wanted), np.int32)
    indexes = np.searchsorted(keys, wanted)
    np.minimum(indexes, len(keys) - 1, out=indexes)
    found = ids[indexes].astype(np.int32)
    found[keys[indexes] != wanted] = 0
    return found


@frozen
class IdMap:
    """Maps the values of a column to the ids of its table. Weights have no map: they stay numbers."""

    column: SparseColumn
    feature: Feature
    keys: Keys | None  # Rising; None where every id is by hash.
    ids: Int32s | None
    hashed_rows: int  # The id of a value without an entry is its key modulo this; where it is 0, the id is 0.

    def ids_of(self, keys: Keys, is_missing: Mask | None) -> Array:
        """Return the ids that the values had when the data was prepared; a missing value has id 0."""
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


@frozen
class RowEncoder:
    """Encodes raw rows as the data was prepared, in evaluation and in serving."""

    numbers: Numbers
    layout: Layout
    maps: tuple[IdMap, ...]  # One for each feature of the layout.
    plain_ids: Literal["refuse", "clip"] | None = None
    """What becomes of ids that no table has, in data that has ids instead of values."""
    any_number: frozenset[str] = frozenset()  # Features whose keys are the ids, any 64 bits.
    same_lengths: tuple[str, ...] = ()  # Features that have as many values as each other, such as items and times.
    statistics: tuple[ValueStatistics, ...] = ()

    @property
    def _unchecked(self) -> frozenset[str]:
        """Features whose keys are not ids of their tables: any numbers, and values that have a map."""
        return self.any_number | {one.feature.name for one in self.maps if one.keys is not None}

    def encode(self, raw: RawRows) -> Rows:
        """Encode rows that are `readable`. The dense values of `raw` are changed in place."""
        ids = tuple(self._ids_of(*column) for column in zip(self.maps, raw.keys, raw.is_missing, strict=True))
        return Rows(raw.label, self._transformed(raw.dense, raw), ids, raw.lengths)

    def _transformed(self, dense: Floats, raw: RawRows | None = None) -> Floats:
        dense = self.numbers.encode(dense)
        if raw is not None:
            dense = with_statistics(dense, self.statistics, raw)
        return dense if self.layout.dense_bits == 32 else dense.astype(np.float16).astype(np.float32)

    def _ids_of(self, one: IdMap, keys: Keys, is_missing: Mask | None) -> Array:
        if one.feature.weights_of:
            return weights_of_keys(keys)
        if self.plain_ids is None or one.keys is not None:
            return one.ids_of(keys, is_missing)
        # Readable keys are ids.
        return keys.view(np.int64) if one.feature.name in self.any_number else keys.astype(one.feature.id_dtype)

    def encode_numbers(self, rows: NumberRows) -> NumberRows:
        """Encode rows in matrices that `are_readable`."""
        ids = rows.ids
        if self.plain_ids is None or any(one.keys is not None for one in self.maps):
            ids = np.array([self._ids_of(one, keys, None) for one, keys in
                            zip(self.maps, rows.ids.view(np.uint64), strict=True)], np.int64)
        return NumberRows(self._transformed(rows.dense), ids, rows.shared)

    def are_readable(self, rows: NumberRows) -> bool:
        """Return whether all rows are `readable`, and no dense value is too large."""
        if np.isinf(rows.dense).any():
            return False
        return self.plain_ids is None or self._are_ids(rows.ids.view(np.uint64), rows.dense)

    def rows_of(self, one: IdMap, ids: Array) -> Array:
        """Return the table rows of ids in a batch of training data: the ids themselves, except for dynamic tables."""
        is_row = self.plain_ids is None or one.keys is None
        return ids if is_row else one.ids_of(ids.astype(np.int64).view(np.uint64), None)

    def readable(self, raw: RawRows) -> RawRows:
        """Drop the rows that data of plain ids may not have: no value, an id that no table has. Lists that are too
        long keep their last ids."""
        if self.plain_ids is None or self._has_only_ids(raw):
            return raw
        paired = [lengths for feature, lengths in zip(self.layout.features, raw.lengths, strict=True)
                  if feature.name in self.same_lengths and lengths is not None]
        raw = self._known(raw).cut_lists([feature.multi_hot for feature in self.layout.features])
        is_bad, reasons, unchecked = np.zeros(len(raw), np.bool_), Counter(raw.reasons), self._unchecked

        def refuse(mask: Mask, why: str) -> None:
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
            is_any = feature.name in unchecked
            is_outside = np.zeros(len(ids), np.bool_) if is_any else (ids < 0) | (ids >= feature.rows)
            if is_missing is not None:
                refuse(is_missing, f"column {feature.name!r} is empty")
                is_outside &= ~is_missing
            if lengths is not None:
                owner = np.repeat(np.arange(len(raw)), lengths)
                is_outside = np.bincount(owner[is_outside], minlength=len(raw)) > 0
            if self.plain_ids == "refuse":
                refuse(is_outside, f"column {feature.name!r}: an id is not in 0 to {feature.rows - 1}")
            keys.append(own if is_any else np.clip(ids, 0, feature.rows - 1).view(np.uint64))
        for one, other in pairwise(paired):
            names = " and ".join(map(repr, self.same_lengths))
            refuse(one != other, f"columns {names} have different numbers of values")
        return replace(raw, keys=tuple(keys), reasons=reasons).select(~is_bad)

    def _known(self, raw: RawRows) -> RawRows:
        """Drop the items of histories that the training data does not have, with their times."""
        names = [feature.name for feature in self.layout.features]
        for position, one in enumerate(self.maps):
            lengths = raw.lengths[position]
            if one.keys is None or lengths is None or one.feature.name in self.any_number:
                continue
            is_known = one.ids_of(raw.keys[position], None) > 0
            kept = np.bincount(np.repeat(np.arange(len(raw)), lengths)[is_known], minlength=len(raw)).astype(np.int32)
            of = {position} | {i for i, other in enumerate(raw.lengths) if names[i] in self.same_lengths
                               and other is not None and np.array_equal(other, lengths)}
            raw = replace(raw, keys=tuple(keys[is_known] if i in of else keys for i, keys in enumerate(raw.keys)),
                          lengths=tuple(kept if i in of else other for i, other in enumerate(raw.lengths)))
        return raw

    def _has_only_ids(self, raw: RawRows) -> bool:
        """Return whether each cell of plain columns has its value; checked for all columns at once, in a tenth of the
        time."""
        if any(lengths is not None for lengths in raw.lengths) or any(mask is not None for mask in raw.is_missing):
            return False
        return self._are_ids(np.array(raw.keys, np.uint64).reshape(len(self.layout.features), len(raw)), raw.dense)

    def _are_ids(self, keys: Hashes, dense: Floats) -> bool:
        """Return whether keys [F, n] are ids of their tables, and no dense value is missing. Negative ids are large
        keys."""
        unchecked = self._unchecked
        num_rows = np.array([2**64 - 1 if feature.name in unchecked else feature.rows
                             for feature in self.layout.features], np.uint64)
        return bool((keys < num_rows[:, None]).all() and not np.isnan(dense).any())


def by_rising_key(keys: Keys, rows: Int32s) -> tuple[Keys, Int32s]:
    """Sort the map of a dynamic table, which is stored slot by slot so that a delta has only those that changed; free
    slots have row 0."""
    taken = np.flatnonzero(rows)
    order = taken[np.argsort(keys[taken])]
    return keys[order], rows[order]


def plain_row_format(
    model: ModelSpec, data: DataSpec, prepared: Layout | None = None, *, has_words: bool = True,
    features: FeaturesSpec | None = None
) -> tuple[Schema, PrepareSpec, RowEncoder]:
    """Describe rows that hold ids, as data that was made has them, or a file of `data.kind = "columns"`. `has_words`:
    the ids of dynamic tables are hashes of what the cells hold, not the numbers themselves. `features` has
    the state of the numbers' transforms."""
    tables, features = model.scored_features(), features or FeaturesSpec()
    if len({table.name for table in tables}) < len(tables):
        raise UserError(f"a feature is called {CANDIDATE!r}, as the column of the item that is scored is",
                        "rename it, and train again")
    names = prepared.dense if prepared else data.dense_columns or tuple(f"dense_{i}" for i in range(model.num_dense))
    numbers = numbers_of(features.fitted, names)
    schema = plain_schema(tables, names, data, model.tasks, has_words=has_words, features=features)
    schema = with_bounds(schema, numbers)
    layout = Layout(names, tuple(Feature(table.name, table.stored_rows, table.multi_hot, _is_list(table))
                                 for table in tables) + weights_features(tables),
                    prepared.dense_bits if prepared else 32)
    maps = tuple(IdMap(column, feature, None, None, feature.rows)
                 for column, feature in zip(schema.sparse, layout.features, strict=True))
    return schema, plain_options(data), RowEncoder(
        numbers, layout, maps, data.on_bad_id, model.features_of_any_number, same_lengths_of(model))


def plain_schema(tables: Sequence[Table], dense: tuple[str, ...], data: DataSpec, tasks: tuple[Task, ...], *,
                 has_words: bool = True, features: FeaturesSpec) -> Schema:
    """Describe rows that hold the ids of `tables`. `has_words`: see `plain_row_format`."""
    buckets = {bucket_table_name(name): name for name in dense if features.has_buckets(name)}
    sparse = tuple(SparseColumn(table.name, "bucket", rows=table.rows, parts=(buckets[table.name],))
                   if table.name in buckets else
                   SparseColumn(table.name, "text" if table.is_dynamic and has_words else "integer",
                                is_list=_is_list(table), max_ids=_MAX_IDS) for table in tables)
    weights = tuple(SparseColumn.of_weights(table) for table in tables if table.weights_column)
    labels = LabelColumn.of(tasks)
    label, sign = labels[0].name if labels else data.label, data.prepare.decimal
    return Schema("csv", label, dense, (*sparse, *weights), (), labels=labels,
                  decimals=dict.fromkeys((*dense, label), sign) if sign else {})


def _is_list(table: Table) -> bool:
    return table.multi_hot > 1 or table.is_sequence or bool(table.weights_column)


def same_lengths_of(model: ModelSpec) -> tuple[str, ...]:
    """Return the features of a row that have as many values as each other."""
    return (model.sequence.history, model.sequence.times) if model.sequence.times else ()

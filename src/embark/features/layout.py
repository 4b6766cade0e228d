"""How a block of rows lies in memory and on disk: the same bytes in a file, in pinned memory and on a GPU.

A block of n rows holds, each from a multiple of 64 bytes on:

    counts    int64 [R]            how many ids each of the R ragged features has in the block
    label     uint8 [n]
    labels    f4 [n, L]            of several tasks, NaN where a row has none; `label` is then the first binary one
    dense     f4 or f2 [n, D]
    groups    [F, n, multi_hot]    one for all features of the same width and number of ids, narrowest first
    ragged    lengths [n], ids [c] one after the other for each ragged feature; weights of ids are one, of f4
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from embark.errors import DataError
from embark.values import JsonDict, frozen
from .arrays import Array, Bytes, Floats, Int64s, Mask

ALIGNMENT = 64
REPAIR = "`embark data check` lists what is damaged; copy or prepare the data again"


@frozen
class Feature:
    """A sparse column, whose ids are 0 to rows − 1."""

    name: str
    rows: Annotated[int, pydantic.Field(ge=1, le=1 << 31)]
    multi_hot: Annotated[int, pydantic.Field(ge=1, lt=1 << 31)] = 1
    """The most ids a row has; exactly so many unless it is ragged."""
    is_ragged: bool = False
    weights_of: str = ""  # The feature whose ids these are the weights of, as many in each row; empty: these are ids.

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds every id."""
        return np.dtype("<f4") if self.weights_of else _narrowest(self.rows - 1)


@frozen
class Group:
    """Features that lie together, as one array [F, n, multi_hot]."""

    dtype: np.dtype[Any]
    multi_hot: int
    members: tuple[int, ...]  # Positions of the group's members among the features.


@frozen
class Field:
    """An array in a block."""

    start: int  # Bytes from the block's first.
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def of(self, block: Bytes) -> Array:
        """Return the array, without a copy."""
        return block[self.start : self.start + self.size_bytes].view(self.dtype).reshape(self.shape)


@frozen
class Map:
    """The position of each array in a block of `num_rows`."""

    num_rows: int
    size_bytes: int
    counts: Field
    label: Field
    labels: Field
    dense: Field
    groups: tuple[Field, ...]  # One for each of `Layout.groups`.
    ragged: tuple[tuple[Field, Field], ...]  # Lengths and ids of each of `Layout.ragged`.


@dataclass(frozen=True)
class Layout:
    """The columns of encoded rows, and so where they lie in a block."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]  # Weights behind all others.
    dense_bits: Literal[16, 32] = 32
    labels: tuple[str, ...] = ()  # The columns that `model.tasks` name; empty where there is one label, of 0 and 1.

    def __post_init__(self) -> None:
        counts = Counter(feature.name for feature in self.features)
        if twins := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two features are called {twins[0]!r}")
        fixed = {feature.name for feature in self.features if not feature.is_ragged}
        if wrong := [f.name for f in self.features if f.weights_of and fixed & {f.name, f.weights_of}]:
            raise ValueError(f"the weights {wrong[0]!r}, or their ids, are not ragged")

    @cached_property
    def id_features(self) -> tuple[Feature, ...]:
        """The features that look up a table: the first ones, without weights of ids."""
        return tuple(feature for feature in self.features if not feature.weights_of)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The fixed features, those of the same kind together."""
        kinds = sorted({(f.id_dtype.itemsize, f.multi_hot) for f in self.features if not f.is_ragged})
        members = {kind: tuple(i for i, f in enumerate(self.features)
                               if not f.is_ragged and (f.id_dtype.itemsize, f.multi_hot) == kind) for kind in kinds}
        return tuple(Group(self.features[of[0]].id_dtype, kind[1], of) for kind, of in members.items())

    @cached_property
    def positions(self) -> dict[int, tuple[int, int]]:
        """The group of each fixed feature, and its position there."""
        return {member: (number, position) for number, group in enumerate(self.groups)
                for position, member in enumerate(group.members)}

    @cached_property
    def ragged(self) -> tuple[int, ...]:
        """Positions of the features whose rows have different numbers of ids."""
        return tuple(i for i, f in enumerate(self.features) if f.is_ragged)

    @property
    def is_fixed(self) -> bool:
        """Whether every block of the same number of rows lies the same way."""
        return not self.ragged

    def map(self, num_rows: int, counts: Sequence[int] = ()) -> Map:
        """Return where everything is in a block of `num_rows` whose ragged features have `counts` ids."""
        end = 0

        def field(dtype: Any, *shape: int) -> Field:
            nonlocal end
            made = Field(end, np.dtype(dtype), shape)
            end = -(-(end + made.size_bytes) // ALIGNMENT) * ALIGNMENT
            return made

        return Map(
            num_rows,
            counts=field("<i8", len(self.ragged)),
            label=field("u1", num_rows),
            labels=field("<f4", num_rows, len(self.labels)),
            dense=field("<f2" if self.dense_bits == 16 else "<f4", num_rows, len(self.dense)),
            groups=tuple(field(g.dtype, len(g.members), num_rows, g.multi_hot) for g in self.groups),
            ragged=tuple(
                (field(_narrowest(self.features[i].multi_hot), num_rows), field(self.features[i].id_dtype, count))
                for i, count in zip(self.ragged, counts, strict=True)
            ),
            size_bytes=end
        )

    def row_order(self, num_rows: int, spare_rows: int) -> Field:
        """Return the field after a block with spare rows: the position in the block of each row in turn, by which the
        device puts the rows in order. It is empty without spare rows."""
        return Field(self.map(num_rows + spare_rows).size_bytes, np.dtype("<i4"), (num_rows if spare_rows else 0,))

    def to_json(self) -> JsonDict:
        features = [{key: value for key, value in asdict(feature).items() if key != "weights_of" or value}
                    for feature in self.features]
        return {"dense": list(self.dense), "dense_bits": self.dense_bits, "features": features,
                **({"labels": list(self.labels)} if self.labels else {})}


@frozen
class Rows:
    """Encoded rows."""

    label: Array  # [n]: 0 or 1; where the layout has labels [n, 1 + L], these behind it.
    dense: Floats  # [n, D]
    ids: tuple[Array, ...]
    """Of each feature: [n, multi_hot], or, where it is ragged, all ids one after the other."""
    lengths: tuple[Array | None, ...]  # [n] of each ragged feature; None of the others.

    def __len__(self) -> int:
        return len(self.label)

    def cut(self, start: int, stop: int) -> Rows:
        """Return rows `start` to `stop`."""
        lengths = tuple(None if counts is None else counts[start:stop] for counts in self.lengths)
        firsts = (start if counts is None else int(counts[:start].sum()) for counts in self.lengths)
        nums = (stop - start if counts is None else int(counts.sum()) for counts in lengths)
        ids = tuple(values[first : first + num] for values, first, num in zip(self.ids, firsts, nums, strict=True))
        return Rows(self.label[start:stop], self.dense[start:stop], ids, lengths)

    def select(self, mask: Mask) -> Rows:
        """Return the rows of the mask."""
        rows = np.flatnonzero(mask)
        return Rows(
            self.label[rows], self.dense.take(rows, axis=0),
            tuple(ids.take(rows, axis=0) if lengths is None else ids[np.repeat(mask, lengths)]
                  for ids, lengths in zip(self.ids, self.lengths, strict=True)),
            tuple(None if lengths is None else lengths[rows] for lengths in self.lengths)
        )

    @staticmethod
    def join(several: Iterable[Rows]) -> Rows:
        """Join rows, one behind the other."""
        rows = list(several)
        if len(rows) == 1:
            return rows[0]
        return Rows(
            np.concatenate([r.label for r in rows]), np.concatenate([r.dense for r in rows]),
            tuple(np.concatenate(parts) for parts in zip(*(r.ids for r in rows), strict=True)),
            tuple(None if parts[0] is None else np.concatenate(parts)
                  for parts in zip(*(r.lengths for r in rows), strict=True))
        )


@dataclass(frozen=True)
class Block:
    """The arrays of a block, without a copy."""

    layout: Layout
    label: Bytes
    labels: Floats  # [n, L]
    dense: Array
    groups: tuple[Array, ...]  # [F, n, multi_hot] of each of `Layout.groups`.
    ragged: tuple[tuple[Array, Array, Int64s], ...]
    """Lengths [n], ids, and row offsets [n + 1] of each of `Layout.ragged`."""

    @staticmethod
    def of(layout: Layout, data: Bytes, num_rows: int) -> Block:
        """Return the block that begins with the first byte of `data`."""
        head_bytes = 8 * len(layout.ragged)
        counts = data[:head_bytes].view("<i8").tolist() if len(data) >= head_bytes else [-1]
        if min(counts, default=0) < 0 or (fields := layout.map(num_rows, counts)).size_bytes > len(data):
            raise DataError("a block of prepared data is not as long as its rows", REPAIR)
        ragged = []
        for lengths_field, ids_field in fields.ragged:
            lengths, offsets = lengths_field.of(data), np.zeros(num_rows + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            ragged.append((lengths, ids_field.of(data), offsets))
        return Block(layout, fields.label.of(data), fields.labels.of(data), fields.dense.of(data),
                     tuple(field.of(data) for field in fields.groups), tuple(ragged))

    @cached_property
    def positive(self) -> NDArray[np.intp]:
        """Rows whose label is 1."""
        return np.flatnonzero(self.label != 0)

    def ids(self, feature: int) -> Array:
        """Return [n, multi_hot]; for a ragged feature the ids of all rows in one array."""
        if self.layout.features[feature].is_ragged:
            return self.ragged[self.layout.ragged.index(feature)][1]
        number, position = self.layout.positions[feature]
        found: Array = self.groups[number][position]
        return found

    def lengths(self, feature: int) -> Array | None:
        """Return [n] for a ragged feature."""
        is_ragged = self.layout.features[feature].is_ragged
        return self.ragged[self.layout.ragged.index(feature)][0] if is_ragged else None


def fill(layout: Layout, rows: Rows) -> Bytes:
    """Return the block of `rows`. Ids are not checked."""
    counts = [len(rows.ids[i]) for i in layout.ragged]
    where = layout.map(len(rows), counts)
    block = np.zeros(where.size_bytes, np.uint8)
    where.counts.of(block)[:] = counts
    where.label.of(block)[:] = rows.label[:, 0] if layout.labels else rows.label
    if layout.labels:
        where.labels.of(block)[:] = rows.label[:, 1:]
    where.dense.of(block)[:] = rows.dense
    for group, field in zip(layout.groups, where.groups, strict=True):
        array = field.of(block)
        for position, member in enumerate(group.members):
            array[position] = rows.ids[member].reshape(len(rows), group.multi_hot)
    for member, (lengths, ids) in zip(layout.ragged, where.ragged, strict=True):
        lengths.of(block)[:] = rows.lengths[member]
        ids.of(block)[:] = rows.ids[member]
    return block


def _narrowest(largest: int) -> np.dtype[Any]:
    return np.dtype("u1" if largest < 1 << 8 else "<u2" if largest < 1 << 16 else "<i4")

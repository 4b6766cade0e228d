"""Arrow columns made into rows: the label, the dense values and the keys, without the rows that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.arrow_cells import Cells, Mask, SparseCells, is_words, plain
from embark.data.prepare.pieces import MAX_TOLD, BadRow, RawRows, Schema
from embark.data.prepare.words import as_text
from embark.errors import DataError
from embark.spec.data import PrepareSpec

SPLIT_WORDS = {"train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "eval": 1, "test": 2}
"""What a split column may say, and the position in SPLITS that it means."""
_MAX_CELL_CHARS = 40


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the input some rows stand."""

    lines: NDArray[np.int64]
    positions: NDArray[np.int64]
    """See `RawRows`."""
    num_lines: int
    read_bytes: int = 0
    bad: Sequence[BadRow] = ()
    """Rows that were no rows at all, and are not among the columns."""


@dataclass(slots=True)
class _Bad:
    """The rows that cannot be read, each with the first reason that was found."""

    mask: Mask
    whys: dict[int, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, is_bad: Mask | None, name: str, array: Any, what: str) -> None:
        """The cells of column `name` that `what` is said of."""
        if is_bad is None:
            return
        new = np.flatnonzero(is_bad & ~self.mask)
        self.mask[new] = True
        if len(new):
            self.reasons[f"column {name!r}: a cell {what}"] += len(new)
        self.whys.update((int(row), f"column {name!r}: {shown(array[int(row)])} {what}") for row in new[:MAX_TOLD])


class RowMaker:
    """Knows what each column is."""

    def __init__(self, schema: Schema, prepare: PrepareSpec) -> None:
        self._schema = schema
        self._label_above = prepare.label_above
        self._cells = Cells(prepare.missing, prepare.list_delimiter)

    @property
    def columns(self) -> list[str]:
        """Those of the input that are needed."""
        wanted = [self._schema.label, *self._schema.dense, *(s.source for s in self._schema.sparse)]
        return list(dict.fromkeys([*wanted, *([self._schema.split_column] if self._schema.split_column else [])]))

    def make(self, column: Callable[[str], Any], place: Place, where: str) -> RawRows:
        """The rows that `column` gives the cells of, by name."""
        schema, num_rows = self._schema, len(place.lines)
        cells = {name: plain(column(name)) for name in self.columns}
        bad = _Bad(np.zeros(num_rows, np.bool_))
        label = self._label(cells[schema.label], bad, where)
        dense = np.empty((num_rows, len(schema.dense)), np.float32)
        for position, name in enumerate(schema.dense):
            array = cells[name]
            with _told(where, name):
                numbers = self._cells.numbers(array)
            bad.add(numbers.is_bad, name, array, "is not a number")
            dense[:, position] = numbers.values
        keys: list[SparseCells] = []
        for sparse in schema.sparse:
            array = cells[sparse.source]
            with _told(where, sparse.source):
                found = self._cells.keys(array, sparse)
            what = "is not a hexadecimal number" if sparse.kind == "hex" else "is not an integer"
            bad.add(found.is_bad, sparse.source, array, what)
            keys.append(found)
        split = self._split(cells[schema.split_column], bad) if schema.split_column else None
        rows = RawRows(
            place.lines, label, dense, tuple(k.keys for k in keys), tuple(k.lengths for k in keys),
            tuple(k.is_missing for k in keys), split, num_cut=sum(k.num_cut for k in keys),
            num_lines=place.num_lines, texts=tuple(k.texts for k in keys), positions=place.positions,
            num_bad=len(place.bad) + int(bad.mask.sum()), read_bytes=place.read_bytes,
            reasons=bad.reasons + Counter(row.why for row in place.bad),
        )
        if not rows.num_bad:
            return rows
        told = [*place.bad, *(BadRow(int(place.lines[row]), why) for row, why in bad.whys.items())]
        told.sort(key=lambda row: row.line)
        return replace(_without(rows, bad.mask), bad=tuple(told[:MAX_TOLD]))

    def _label(self, array: Any, bad: _Bad, where: str) -> NDArray[np.float32]:
        name, above = self._schema.label, self._label_above
        with _told(where, name):
            values = self._cells.numbers(array, may_be_word=above is None).values
        if above is not None:
            bad.add(np.isnan(values), name, array, "is not a number, as the label must be")
            with np.errstate(invalid="ignore"):
                return (values > above).astype(np.float32)
        bad.add((values != 0) & (values != 1), name, array, "is neither 0 nor 1, as the label must be")
        return values.astype(np.float32)

    def _split(self, array: Any, bad: _Bad) -> NDArray[np.uint8]:
        import pyarrow as pa
        import pyarrow.compute as pc

        words = pc.ascii_lower(pc.ascii_trim_whitespace(_text_of(array)))
        position = pc.index_in(words, value_set=pa.array(list(SPLIT_WORDS))).fill_null(-1)
        found = position.to_numpy(zero_copy_only=False)
        bad.add(found < 0, self._schema.split_column, array, "is neither train, validation nor test")
        split: NDArray[np.uint8] = np.array([*SPLIT_WORDS.values(), 0], np.uint8)[found]
        return split


@contextmanager
def _told(where: str, name: str) -> Iterator[None]:
    """What is wrong with a whole column, with its place."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: column {name!r} {error.what}",
                        fix="leave it out, or give it another role in [data.prepare]") from None


def shown(cell: Any) -> str:
    """A cell as a message quotes it."""
    value = cell.as_py() if not hasattr(cell, "as_buffer") else bytes(cell.as_buffer() or b"").decode(errors="replace")
    if value is None or value == "":
        return "nothing"
    text = repr(value)
    return text if len(text) <= _MAX_CELL_CHARS else text[:_MAX_CELL_CHARS] + "…"


def _text_of(array: Any) -> Any:
    import pyarrow as pa




    array = plain(array)
    return as_text(array) if is_words(array.type) else array.cast(pa.string())


def _without(rows: RawRows, is_bad: Mask) -> RawRows:
    """All but the bad rows."""
    if not is_bad.any():
        return rows
    keep = ~is_bad
    keys = tuple(
        k[keep] if lengths is None else k[np.repeat(keep, lengths)]
        for k, lengths in zip(rows.keys, rows.lengths, strict=True)
    )
    return replace(
        rows, lines=rows.lines[keep], label=rows.label[keep], dense=rows.dense[keep], keys=keys,
        lengths=tuple(None if lengths is None else lengths[keep] for lengths in rows.lengths),
        is_missing=tuple(None if missing is None else missing[keep] for missing in rows.is_missing),
        split=None if rows.split is None else rows.split[keep],
        positions=None if rows.positions is None else rows.positions[keep],
    )

"""How JAX's trainer lays tables over the chips of a TPU, counted without JAX: rows and lines of a chip, and how many
rows two chips exchange at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from embark.model.placement import Placement, Shard, TooLarge
from embark.model.work import distinct
from embark.spec import RunSpec, Table

LINE = 128
"""Numbers in a line of a TPU's memory."""
SUBLANES = 8
"""Lines that lie together, of numbers of four bytes."""
MAX_ROWS = 2**31 - 2**24
"""Of a group on all chips together: the trainer numbers rows in 32 bits."""
HEADROOM = 1.25
"""Over what two chips are expected to exchange."""
SHARDINGS = ("auto", "row_wise", "table_wise")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


@dataclass(frozen=True, slots=True)
class Rows:
    """Tables of one width, on one chip."""

    tables: tuple[Table, ...]
    dim: int
    rows_per_chip: int
    rows_per_line: int
    """Narrow rows that lie side by side; 1: each has a line of its own."""
    num_columns: int
    """Ids of a sample."""
    capacity: int
    """Rows that a chip may ask of another at a time."""
    chip_of: tuple[int, ...] = ()
    """By tables: the chip that has each."""

    @property
    def width(self) -> int:
        """Numbers of a row of the array, as it is declared."""
        return self.rows_per_line * self.dim

    @property
    def lines_per_chip(self) -> int:
        return self.rows_per_chip // self.rows_per_line


def lay_out(spec: RunSpec, num_chips: int) -> tuple[Rows, ...]:
    """As `tpu/layout.py` does it. Raises `TooLarge` for what that trainer refuses."""
    _refuse(spec, num_chips)
    is_by_rows = spec.train.sharding != "table_wise" and num_chips > 1
    tables = spec.model.table_list()
    found = []
    for dim in sorted({t.dim or 0 for t in tables}):
        per_line = LINE // dim if spec.train.table_dtype == "fp32" and LINE % dim == 0 else 1
        for members in _split([t for t in tables if t.dim == dim]):
            found.append(_rows(spec, members, dim, max(1, per_line), num_chips, is_by_rows=is_by_rows))
    return tuple(found)


def placement_on(spec: RunSpec, num_chips: int, groups: Sequence[Rows]) -> Placement:
    """The same in a plan's own words."""
    shards: list[Shard] = []
    is_by_rows = spec.train.sharding != "table_wise" and num_chips > 1
    for group in groups:
        for number, table in enumerate(group.tables):
            if not is_by_rows:
                shards.append(Shard(table.name, group.chip_of[number], table.rows, group.dim))
                continue
            each, more = divmod(table.rows, num_chips)
            shards += [Shard(table.name, chip, rows, group.dim) for chip in range(num_chips)
                       if (rows := each + ((chip - number) % num_chips < more))]
    kind = "row_wise" if is_by_rows else "table_wise"
    return Placement(num_chips, tuple(shards), {t.name: kind for t in spec.model.table_list()}, "JAX's trainer")


def tiled_bytes(shape: Sequence[int], size: int) -> float:
    """Of an array on a TPU: in tiles of eight lines of 128 (of 16 lines, of two-byte numbers), turned over where that
    takes less; a vector in tiles of 1,024."""
    if len(shape) < 2:
        return _up(math.prod(shape), SUBLANES * LINE) * size
    *outer, high, wide = shape
    return math.prod(outer) * size * min(_tiled(high, wide, size), _tiled(wide, high, size))


def lined_bytes(shape: Sequence[int], size: int) -> float:
    """The same where each row of the array must be a line of memory, or several: rows are taken one by one."""
    *outer, high, wide = shape
    return math.prod(outer) * size * _tiled(high, wide, size)


def _tiled(high: int, wide: int, size: int) -> int:
    tile = SUBLANES * 4 // size
    while tile > 1 and high <= tile // 2:
        tile //= 2
    return _up(high, tile) * _up(wide, LINE)


def _rows(
    spec: RunSpec, tables: list[Table], dim: int, per_line: int, num_chips: int, *, is_by_rows: bool
) -> Rows:
    num_columns = sum(t.multi_hot for t in tables)
    per_chip = spec.train.batch_size // num_chips
    most = per_chip * num_columns
    chips: list[int] = []
    if is_by_rows:
        held = sum(-(-t.rows // num_chips) for t in tables)
        asked = most / num_chips
    else:
        chips = _dealt(tables, num_chips)
        held = max(sum(t.rows for t, at in zip(tables, chips, strict=True) if at == chip) for chip in range(num_chips))
        asked = max(
            sum(distinct(per_chip * t.multi_hot, t.rows, spec.data.zipf_exponent)
                for t, at in zip(tables, chips, strict=True) if at == chip)
            for chip in range(num_chips)
        )
    rows = _up(held, per_line)
    if rows * num_chips > MAX_ROWS:
        raise TooLarge(f"{rows:,} rows on each of {num_chips:,} chips are more than JAX's trainer can number, in "
                       "32 bits")
    capacity = most if num_chips == 1 else min(most, max(8, math.ceil(HEADROOM * asked / 8) * 8))
    return Rows(tuple(tables), dim, rows, per_line, num_columns, capacity, tuple(chips))


def _dealt(tables: list[Table], num_chips: int) -> list[int]:
    """The largest first, each to the chip that has the least."""
    filled = [0] * num_chips
    chips = [0] * len(tables)
    for number in sorted(range(len(tables)), key=lambda n: -tables[n].rows):
        chips[number] = filled.index(min(filled))
        filled[chips[number]] += tables[number].rows
    return chips


def _split(tables: list[Table]) -> list[list[Table]]:
    """As few groups as 32 bits allow."""
    split: list[list[Table]] = [[]]
    num_rows = 0
    for table in tables:
        if split[-1] and num_rows + table.rows > MAX_ROWS // 2:
            split.append([])
            num_rows = 0
        split[-1].append(table)
        num_rows += table.rows
    return split


def _refuse(spec: RunSpec, num_chips: int) -> None:
    train = spec.train
    if train.optimizer not in OPTIMIZERS:
        raise TooLarge(f"train.optimizer = {train.optimizer} is none that JAX's trainer has for tables: use "
                       f"{', '.join(OPTIMIZERS)}")
    if train.sharding not in SHARDINGS:
        raise TooLarge(f"train.sharding = {train.sharding} is none of JAX's trainer: use {', '.join(SHARDINGS)}")
    if train.batch_size % num_chips:
        lower = train.batch_size // num_chips * num_chips
        near = " or ".join(f"{n:,}" for n in (lower, lower + num_chips) if n)
        raise TooLarge(f"train.batch_size = {train.batch_size:,} does not divide over {num_chips:,} chips: use {near}")
    for table in spec.model.table_list():
        if table.rows > MAX_ROWS:
            raise TooLarge(f"table {table.name} has {table.rows:,} rows, and JAX's trainer numbers them in 32 bits")


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
